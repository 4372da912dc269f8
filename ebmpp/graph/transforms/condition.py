# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditioning of a graph on values of some blocks or units."""

import dataclasses

import numpy as np

from jax import Array

from ebmpp.core import HashableArray, checks, sharding
from ebmpp.families import Family
from ebmpp.graph import states
from ebmpp.graph.graph import FactorGraph
from ebmpp.graph.transforms.rewire import Part, rewire, unchanged, with_blocks


def condition(graph: FactorGraph, /, **values: Array | states.Observed) -> FactorGraph:
    """Return the graph of the other blocks given these values.

    The values are built into the energy. Factors keep their names and params, so the
    params of ``graph`` are params of the result, which describes p(rest, values) with
    the values' base measures: its log Z is the log of the sum over the rest. Unknown
    units of an :class:`Observed` block stay under the block's name, as one axis.

    Values become part of the declaration, and each compiles its own programs. For many
    values in turn, or one per chain, clamp the block instead: pass it by name to a
    kernel's ``run``, to :func:`unbiased_expectation` or to :func:`local_search`.

    If no visible block is left, the others become visible. Initialise with
    ``graph.init``: the new graph's own has no scheme for the changed factors.

    :param values: one value per block, of the block's shape; or ``clamped={...}``.
    :return: the graph of the rest.
    :raises StateError: for an unknown block, a wrong shape or value, several rows, or a
        traced value.
    :raises DeclarationError: if no unit is left.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> posterior = ebmpp.condition(rbm, v=jnp.array([1.0, 0, 0, 1]))
    >>> posterior.visible, posterior.layers
    (mappingproxy({'h': Bernoulli(3)}), (('h',),))
    >>> params = rbm.init(jax.random.key(0))
    >>> joint = rbm.free_energy(params, {"v": jnp.array([1.0, 0, 0, 1])})
    >>> bool(jnp.isclose(ebmpp.exact.log_partition(posterior, params), -joint))
    True
    """
    checks.instance("condition: graph", graph, FactorGraph)
    values = states.merge_clamped(values)
    if not values:
        return graph
    with sharding.eager():
        for b, v in values.items():
            if not states.is_concrete(v):
                raise checks.state_error(
                    f"condition: block {b!r}",
                    "concrete, not traced by jit, vmap or grad",
                    v,
                    hint="Condition outside of the transformed function, or clamp the block "
                    "in a kernel.",
                )
        clamped = states.as_clamped(graph.families, values)
        if clamped.batch:
            raise checks.state_error(
                "condition: values",
                "one state of the graph, without leading axes",
                clamped.batch,
                hint="Clamp the blocks in a kernel to hold one row per chain.",
            )
        parts = unchanged(graph.families)
        remaining = dict(graph.families)
        offsets = dict.fromkeys((f.name for f in graph.factors), 0.0)
        for b, value in {**clamped.full, **clamped.partial}.items():
            family = graph.families[b]
            known = np.ones(family.shape, bool)
            if b in clamped.keep:
                known = np.asarray(clamped.keep[b][0])
            parts[b], left = _fixed_part(b, family, value[0], known)
            measure = family.log_base_measure(value[0])
            # every block has a factor
            first = graph.touching([b])[0].name
            offsets[first] -= float(np.asarray(measure, float)[known].sum())
            if left is None:
                del remaining[b]
            else:
                remaining[b] = left
    if not remaining:
        raise checks.declaration_error(
            "condition: values",
            f"such that a unit of {list(graph.families)} is left",
            list(values),
        )
    anchor = next(iter(remaining))
    factors = [rewire(f, parts, anchor, offsets[f.name]) for f in graph.factors]
    return with_blocks(graph, remaining, factors, parts)


def _fixed_part(
    block: str, family: Family, value: Array, known: np.ndarray
) -> tuple[Part, Family | None]:
    """Return the assembly of the block's statistics, and the family of its free units."""
    free = np.flatnonzero(~known)
    if len(free) == family.size:
        return unchanged({block: family})[block], family
    fixed = HashableArray.copy(family.statistics(value))
    if not len(free):
        return Part(family, (), fixed), None
    left = dataclasses.replace(family, shape=(len(free),))
    return Part(family, ((block, HashableArray.copy(free)),), fixed), left
