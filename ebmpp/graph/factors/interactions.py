# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units that interact in a factor: declared pairs, or pairs that its traced energy shows."""

from functools import lru_cache
import math
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Edges, checks, sharding
from ebmpp.dependence.program import Program
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.errors import DeclarationError
from ebmpp.families.family import Families
from ebmpp.graph.factors.evaluation import values_of
from ebmpp.graph.factors.factor import Factor, FactorParams, Scope, call_cached


def interactions(factor: Factor, families: Families, block: str) -> Edges | None:
    """Return the pairs of units of a block that interact; None where all do.

    :raises DeclarationError: for an energy that is not affine in a block of counts, or
        that fails.
    """
    declared = factor.edges(families)
    if factor.affine:
        return declared.get(block, np.empty((0, 2), np.int64))
    family = families[block]
    if family.support.is_discrete and values_of(family) is None:
        raise DeclarationError(
            f"{factor!r}: block {block!r} must be Bernoulli, Spin, Categorical or "
            f"real-valued where affine=False, got {family!r}, whose conditional "
            "under any energy is outside its family. Declare counts as "
            "Categorical, or an energy that is affine in their statistics."
        )
    traced = terms_of(factor, families)
    if block in declared:
        return declared[block]
    # pairs of 2000 units would be listed for a second
    edges = None if traced.most_together == traced.sets.size else traced.edges
    if edges is None:
        return None
    inside = traced.numbers[block]
    is_inside = ((inside.start <= edges) & (edges < inside.stop)).all(1)
    width = math.prod(family.stat_shape)
    pairs = np.unique((edges[is_inside] - inside.start) // width, axis=0)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def terms_of(factor: Factor, families: Families) -> SumOfTerms:
    """Return the energy as a sum of terms in the statistics, whatever the params."""
    scope = factor.scope(families)
    return call_cached(_terms_of, factor, scope, jnp.result_type(float))


@lru_cache(maxsize=128)
def _terms_of(factor: Factor, scope: Scope, floats: Any) -> SumOfTerms:
    with sharding.eager():
        program = trace(factor, dict(zip(factor.blocks, scope)))
        return SumOfTerms(program, [], {}, products=False)


def trace(factor: Factor, families: Families) -> Program:
    """Return the energy as a program of statistics, whatever the params."""
    params = factor.init_params(jax.random.key(0), families)
    leaves, structure = jax.tree.flatten(params)
    floats = jnp.result_type(float)
    sites = {
        b: jax.ShapeDtypeStruct(families[b].statistic_shape, floats)
        for b in factor.blocks
    }

    def energy(sites, siblings, _):
        params = jax.tree.unflatten(structure, siblings.values())
        return as_scalar(factor, factor.energy_at(params, sites, families))

    try:
        return Program(energy, sites, dict(enumerate(leaves)), [])
    except DeclarationError:
        raise
    except Exception as error:
        raise energy_failed(factor, families, params, error) from error


def as_scalar(factor: Factor, value: Any) -> Array:
    """Return the value of an energy; refuse all but scalars."""
    is_number = isinstance(value, jax.Array | np.ndarray | np.number | float | int)
    if not is_number or jnp.shape(value) != ():
        name = f"{factor!r}: value of energy"
        raise checks.declaration_error(name, "a scalar", value)
    return value


def energy_failed(
    factor: Factor,
    families: Families,
    params: FactorParams,
    error: Exception,
    hint: str = "",
    kind: type[DeclarationError] = DeclarationError,
) -> DeclarationError:
    """Return the error for an energy that raises one."""
    shapes = {b: families[b].statistic_shape for b in factor.blocks}
    return kind(
        f"{factor!r}: energy failed for params of shape "
        f"{jax.tree.map(np.shape, params)} and statistics of shape {shapes}: "
        f"{error}{hint}"
    )
