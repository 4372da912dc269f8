# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Everything that follows from the energy, for one state given by its sufficient statistics.

This is the only place where anything is derived (DESIGN, section 1): natural parameters are minus the
gradient of the energy in a block's statistics, a marginal is the energy at zero statistics plus the
log-normalisers. Batches are ``jax.vmap`` of these functions; XLA turns a vmapped gradient of a
bilinear energy into one matrix product, as fast as one written by hand.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Params, Rows
from ebmpp.graph.declaration import Declaration

Statistics = Mapping[str, Array]


def energy(graph: Declaration, params: Params, statistics: Statistics) -> Array:
    """E(t), a scalar."""
    return _energy_of(graph, graph.factors, params, statistics)


def _energy_of(graph: Declaration, factors: Iterable, params: Params, stats: Statistics) -> Array:
    total = jnp.zeros((), jnp.result_type(float))
    for factor in factors:
        families = tuple(graph.families[b] for b in factor.blocks)
        inputs = (stats[b] for b in factor.blocks)
        total = total + factor.evaluate(params[factor.name], *inputs, families=families)
    return total


def _zeros(graph: Declaration, blocks: Iterable[str]) -> dict[str, Array]:
    dtype = jnp.result_type(float)
    return {b: jnp.zeros(graph.families[b].statistic_shape, dtype) for b in blocks}


def natural(
    graph: Declaration,
    params: Params,
    statistics: Statistics,
    blocks: Iterable[str],
    factors: Iterable | None = None,
) -> dict[str, Array]:
    """Natural parameters of non-interacting ``blocks`` given the others: eta_b = -dE/dt_b.

    ``statistics`` must hold every block that shares a factor with one of ``blocks``. Where the units of a
    block interact it must hold that block too, and each unit's natural parameter is that given all the
    others; those of one part are the law of a joint draw.

    :param factors: what they alone contribute; all factors by default.
    """
    blocks = tuple(blocks)
    factors = (
        [f for f in graph.factors if not set(f.blocks).isdisjoint(blocks)] if factors is None else factors
    )
    around = lambda t: -_energy_of(graph, factors, params, {**statistics, **t})
    inside = {b: statistics[b] for b in blocks if b in graph.splits and b in statistics}
    return jax.grad(around)(_zeros(graph, blocks) | inside)


def contributed(
    graph: Declaration, factors: Iterable, params: Params, statistics: Statistics
) -> dict[str, Array]:
    """What ``factors`` alone add to the natural parameter of every block, the others at ``statistics``."""
    around = lambda t: -_energy_of(graph, factors, params, t)
    return jax.grad(around)(dict(statistics))


def affine(
    graph: Declaration, params: Params, statistics: Statistics, blocks: Iterable[str]
) -> tuple[Array, dict[str, Array]]:
    """The energy as a function of non-interacting ``blocks``, the others at ``statistics``.

    :return: a scalar c and the natural parameters eta of ``blocks``, with -E = c + sum <eta_b, t_b>.
    """
    negative = lambda t: -energy(graph, params, {**statistics, **t})
    return jax.value_and_grad(negative)(_zeros(graph, blocks))


def log_marginal(graph: Declaration, params: Params, statistics: Statistics, blocks: Iterable[str]) -> Array:
    """log of the sum over ``blocks`` of exp(-E) r, a scalar; the others' base measures left out."""
    blocks = tuple(blocks)
    at_zero, eta = affine(graph, params, statistics, blocks)
    return at_zero + sum(graph.families[b].log_normalizer(eta[b]).sum() for b in blocks)


def log_base_measure(graph: Declaration, x: Mapping[str, Array]) -> Array:
    """Sum of log r_b(x_b) over the blocks of ``x``, for one state."""
    total = jnp.zeros((), jnp.result_type(float))
    return total + sum(graph.families[b].log_base_measure(v).sum() for b, v in x.items())


def log_unnormalized(
    graph: Declaration,
    params: Params,
    x: Mapping[str, Array],
    blocks: Iterable[str],
    known: Mapping[str, Array] = MappingProxyType({}),
) -> Array:
    """log of the unnormalised density of the kept blocks ``x``, ``blocks`` summed out, for one state.

    :param known: masks of kept blocks of which some units alone are known: the others are summed out too. No
        two of these blocks and ``blocks`` interact.
    """
    kept = {b: v for b, v in x.items() if b not in known}
    if not known:
        return log_marginal(graph, params, graph.statistics(kept), blocks) + log_base_measure(graph, kept)
    at_zero, eta = affine(graph, params, graph.statistics(kept), (*blocks, *known))
    value = at_zero + log_base_measure(graph, kept)
    for b, e in eta.items():
        family = graph.families[b]
        each = family.log_normalizer(e)
        if b in known:
            linear = (e * family.statistics(x[b])).reshape(*family.shape, -1).sum(-1)
            each = jnp.where(known[b], linear + family.log_base_measure(x[b]), each)
        value = value + each.sum()
    return value


# -- many states at once -----------------------------------------------------------------------


def natural_rows(
    graph: Declaration, params: dict[str, Any], x: Rows, blocks: Iterable[str]
) -> dict[str, Array]:
    """Natural parameters of ``blocks``, each of shape ``(rows, *shape, *stat_shape)``.

    Where the units of a block interact, of each given all others: such a block is drawn part by part.
    """
    inside = [b for b in blocks if b in graph.splits]
    around = {b: x[b] for b in (*graph.neighbours(blocks), *inside)}
    if not around:  # no neighbours: the same for every row
        eta = natural(graph, params, {}, blocks)
        rows = len(next(iter(x.values())))
        return {b: jnp.broadcast_to(e, (rows, *e.shape)) for b, e in eta.items()}
    one = lambda t: natural(graph, params, t, blocks)
    return jax.vmap(one)(graph.statistics(around))


def log_density(graph: Declaration, params: Params, x: Rows) -> Array:
    """Unnormalised log-density of each row."""
    one = lambda row: log_base_measure(graph, row) - energy(graph, params, graph.statistics(row))
    return jax.vmap(one)(dict(x))


def summed_out(graph: Declaration, params: Any, x: dict[str, Array], group: tuple[str, ...]) -> Array:
    """log of the unnormalised density of each row, the blocks of ``group`` summed out."""
    kept = {b: v for b, v in x.items() if b not in group}
    if not kept:  # nothing is left to map over
        value = log_unnormalized(graph, params, {}, group)
        return jnp.broadcast_to(value, len(next(iter(x.values()))))
    return jax.vmap(lambda row: log_unnormalized(graph, params, row, group))(kept)


def weighted_gradient(graph: Declaration, params: Any, x: dict[str, Array], weights: Array) -> Any:
    """Gradient in params of ``sum_i w_i E(params, x_i)`` over rows."""
    return gradient_at(graph, params, graph.statistics(x), weights)


def gradient_at(graph: Declaration, params: Any, statistics: dict[str, Array], weights: Array) -> Any:
    """The same at given statistics, those that are means included: E is affine in each unit's."""

    def weighted(p: Any) -> Array:
        return weights @ jax.vmap(lambda t: energy(graph, p, t))(statistics)

    return jax.grad(weighted)(params)
