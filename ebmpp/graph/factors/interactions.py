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
from ebmpp.families.family import Families, Family
from ebmpp.graph.factors import evaluation
from ebmpp.graph.factors.factor import Factor, FactorParams, Scope

#: Pairs of units that interact by block; None where each interacts with every other.
Interactions = dict[str, Edges | None]


def interactions(factor: Factor, families: Families) -> Interactions:
    """Return the pairs of units of each block that interact.

    :raises DeclarationError: for an energy that is not affine in a block of counts, or
        that fails.
    """
    declared: Interactions = dict(factor.edges(families))
    if factor.affine:
        separate = factor.blocks if factor.has_zeros else ()
        return {b: np.empty((0, 2), np.int64) for b in separate} | declared
    scope = tuple(families[b] for b in factor.blocks)
    evaluation.check_families(factor, scope)
    traced = terms_of(factor, scope, jnp.result_type(float))
    for block, family in zip(factor.blocks, scope, strict=True):
        if block not in declared:
            declared[block] = _pairs_of(traced, block, family)
    return declared


def can_be_infinite(factor: Factor, families: Families) -> bool:
    """Return True if states of probability zero are declared, or traced as a constant."""
    if factor.affine:
        return factor.has_zeros
    scope = tuple(families[b] for b in factor.blocks)
    program = terms_of(factor, scope, jnp.result_type(float)).program
    return any(np.isposinf(c).any() for c in program.constants.values())


def terms_of(factor: Factor, scope: Scope, floats: Any) -> SumOfTerms:
    """Return the energy as a sum of terms in the statistics, whatever the params."""
    try:
        hash((factor, scope))
    except TypeError:  # a custom family or energy that holds a list
        return _terms_of.__wrapped__(factor, scope, floats)
    return _terms_of(factor, scope, floats)


@lru_cache(maxsize=128)
def _terms_of(factor: Factor, scope: Scope, floats: Any) -> SumOfTerms:
    with sharding.eager():
        families = dict(zip(factor.blocks, scope))
        params = factor.init_params(jax.random.key(0), families)
        leaves, structure = jax.tree.flatten(params)
        sites = {
            b: jax.ShapeDtypeStruct(f.statistic_shape, floats)
            for b, f in families.items()
        }

        def energy(sites, siblings, _):
            params = jax.tree.unflatten(structure, siblings.values())
            inputs = (sites[b] for b in factor.blocks)
            return as_scalar(factor, factor.evaluate(params, *inputs, families=scope))

        try:
            program = Program(energy, sites, dict(enumerate(leaves)), [])
        except DeclarationError:
            raise
        except Exception as error:
            raise energy_failed(factor, scope, params, error) from error
        return SumOfTerms(program, [], {}, products=False)


def _pairs_of(traced: SumOfTerms, block: str, family: Family) -> Edges | None:
    """Return the pairs of units of one block that a term reads both of."""
    inside = traced.numbers(block)
    if traced.reads_all(inside) or traced.edges is None:
        return None
    edges = traced.edges
    is_inside = ((inside.start <= edges) & (edges < inside.stop)).all(1)
    units = (edges[is_inside] - inside.start) // math.prod(family.stat_shape)
    pairs = np.unique(units, axis=0)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def as_scalar(factor: Factor, value: Any) -> Array:
    """Return the value of an energy; refuse all but scalars."""
    is_number = isinstance(value, jax.Array | np.ndarray | np.number | float | int)
    if not is_number or jnp.shape(value) != ():
        name = f"{factor!r}: value of energy"
        raise checks.declaration_error(name, "a scalar", value)
    return value


def energy_failed(
    factor: Factor,
    scope: Scope,
    params: FactorParams,
    error: Exception,
    hint: str = "",
    kind: type[DeclarationError] = DeclarationError,
) -> DeclarationError:
    """Return the error for an energy that raises one."""
    shapes = {b: f.statistic_shape for b, f in zip(factor.blocks, scope)}
    return kind(
        f"{factor!r}: energy failed for params of shape "
        f"{jax.tree.map(np.shape, params)} and statistics of shape {shapes}: "
        f"{error}{hint}"
    )
