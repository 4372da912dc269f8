# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Everything that follows from the energy, for one state given by its sufficient statistics.

This is the only place where anything is derived (DESIGN, section 1): natural parameters are minus the
gradient of the energy in a block's statistics, a marginal is the energy at zero statistics plus the
log-normalisers. Batches are ``jax.vmap`` of these functions; XLA turns a vmapped gradient of a
bilinear energy into one matrix product, as fast as one written by hand.
"""

from collections.abc import Iterable
from types import MappingProxyType

from jaxtyping import Float

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.precision import in_full
from ebmpp.core.types import Eta, Params, PerRow, Rows, Scalar, State, Statistics
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Factor


def energy(graph: Declaration, params: Params, statistics: Statistics) -> Scalar:
    """E(t)."""
    return _energy_of(graph, graph.factors, params, statistics)


@in_full
def _energy_of(graph: Declaration, factors: Iterable[Factor], params: Params, stats: Statistics) -> Scalar:
    total = jnp.zeros((), jnp.result_type(float))
    for factor in factors:
        families = tuple(graph.families[b] for b in factor.blocks)
        inputs = (stats[b] for b in factor.blocks)
        total = total + factor.evaluate(params[factor.name], *inputs, families=families)
    return total


def _zeros(graph: Declaration, blocks: Iterable[str]) -> Eta:
    dtype = jnp.result_type(float)
    return {b: jnp.zeros(graph.families[b].statistic_shape, dtype) for b in blocks}


def natural(
    graph: Declaration,
    params: Params,
    statistics: Statistics,
    blocks: Iterable[str],
    factors: Iterable[Factor] | None = None,
) -> Eta:
    """Natural parameters of non-interacting ``blocks`` given the others: eta_b = -dE/dt_b.

    ``statistics`` must hold every block that shares a factor with one of ``blocks``. Where the units of a
    block interact it must hold that block too, and each unit's natural parameter is that given all the
    others; those of one part are the law of a joint draw.

    :param factors: what they alone contribute; all factors by default.
    """
    blocks = tuple(blocks)
    if factors is None:
        factors = [f for f in graph.factors if not set(f.blocks).isdisjoint(blocks)]
    around = lambda t: -_energy_of(graph, factors, params, {**statistics, **t})
    inside = {b: statistics[b] for b in blocks if b in graph.splits and b in statistics}
    return jax.grad(around)(_zeros(graph, blocks) | inside)


def contributed(graph: Declaration, factors: Iterable[Factor], params: Params, statistics: Statistics) -> Eta:
    """What ``factors`` alone add to the natural parameter of every block, the others at ``statistics``."""
    around = lambda t: -_energy_of(graph, factors, params, t)
    return jax.grad(around)(dict(statistics))


def affine(
    graph: Declaration, params: Params, statistics: Statistics, blocks: Iterable[str]
) -> tuple[Scalar, Eta]:
    """The energy as a function of non-interacting ``blocks``, the others at ``statistics``.

    :return: c and the natural parameters eta of ``blocks``, with -E = c + sum <eta_b, t_b>.
    """
    negative = lambda t: -energy(graph, params, {**statistics, **t})
    return jax.value_and_grad(negative)(_zeros(graph, blocks))


def log_marginal(graph: Declaration, params: Params, statistics: Statistics, blocks: Iterable[str]) -> Scalar:
    """log of the sum over ``blocks`` of exp(-E) r; the others' base measures left out."""
    blocks = tuple(blocks)
    at_zero, eta = affine(graph, params, statistics, blocks)
    return at_zero + sum(graph.families[b].log_normalizer(eta[b]).sum() for b in blocks)


def log_base_measure(graph: Declaration, x: State) -> Scalar:
    """Sum of log r_b(x_b) over the blocks of ``x``, for one state."""
    total = jnp.zeros((), jnp.result_type(float))
    return total + sum(graph.families[b].log_base_measure(v).sum() for b, v in x.items())


@in_full
def log_unnormalized(
    graph: Declaration, params: Params, x: State, blocks: Iterable[str], known: State = MappingProxyType({})
) -> Scalar:
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
    graph: Declaration, params: Params, x: Rows, blocks: Iterable[str]
) -> dict[str, Float[Array, "rows ..."]]:
    """Natural parameters of ``blocks``, row by row.

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


def log_density(graph: Declaration, params: Params, x: Rows) -> PerRow:
    """Unnormalised log-density of each row."""
    one = lambda row: log_base_measure(graph, row) - energy(graph, params, graph.statistics(row))
    return jax.vmap(one)(dict(x))


def summed_out(graph: Declaration, params: Params, x: Rows, group: tuple[str, ...]) -> PerRow:
    """log of the unnormalised density of each row, the blocks of ``group`` summed out."""
    kept = {b: v for b, v in x.items() if b not in group}
    if not kept:  # nothing is left to map over
        value = log_unnormalized(graph, params, {}, group)
        return jnp.broadcast_to(value, len(next(iter(x.values()))))
    return jax.vmap(lambda row: log_unnormalized(graph, params, row, group))(kept)


def weighted_gradient(graph: Declaration, params: Params, x: Rows, weights: PerRow) -> Params:
    """Gradient in params of ``sum_i w_i E(params, x_i)`` over rows."""
    return gradient_at(graph, params, graph.statistics(x), weights)


@in_full
def gradient_at(graph: Declaration, params: Params, statistics: Statistics, weights: PerRow) -> Params:
    """The same at given statistics, those that are means included: E is affine in each unit's."""
    each = lambda p: jax.vmap(lambda t: energy(graph, p, t))(dict(statistics))
    return jax.grad(lambda p: weights @ each(p))(params)
