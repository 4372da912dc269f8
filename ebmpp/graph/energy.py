# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditionals, marginals and gradients derived from a graph's energy.

Natural parameters are minus the gradient of the energy in a block's statistics; a
marginal is the energy at zero statistics plus the log-normalisers. Most functions take
one state and are batched by ``jax.vmap``: XLA turns a vmapped gradient of a bilinear
energy into one matrix product, as fast as a hand-written one.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
import math
from types import MappingProxyType
from typing import NamedTuple

from jaxtyping import Bool, Float, Shaped

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Eta,
    Natural,
    Params,
    PerRow,
    Rows,
    Scalar,
    State,
    Statistics,
    expand,
    fold_parts,
    full_precision,
    num_rows,
    omit,
    select,
)
from ebmpp.errors import IntractableError
from ebmpp.families.family import Family, as_float
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Factor, evaluation, lateral, zeros
from ebmpp.graph.factors.terms import Terms

#: Factors to which a sum is restricted; None for all.
Factors = Iterable[Factor] | None


@full_precision
def energy(
    graph: Declaration,
    params: Params,
    statistics: Statistics,
    factors: Factors = None,
    as_written: bool = False,
) -> Scalar:
    """Return E(t), or the sum of some factors.

    At states, it has the derivatives of its multi-affine extension, or the ones of the
    energy ``as_written``.
    """
    total = jnp.zeros(())
    for factor in graph.factors if factors is None else factors:
        weights = params[factor.name]
        inputs = select(statistics, factor.blocks)
        if not factor.accepts_bfloat16:
            inputs = jax.tree.map(as_float, inputs)
        if factor.affine or as_written:
            value = factor.energy_at(weights, inputs, graph.families)
        else:
            value = evaluation.extended(factor, graph.families, weights, inputs)
        total = total + value
    return total


def zero_statistics(graph: Declaration, blocks: Iterable[str]) -> Eta:
    """Return statistics of some blocks that are all 0."""
    return {b: jnp.zeros(graph.families[b].statistic_shape) for b in blocks}


def natural(
    graph: Declaration,
    params: Params,
    statistics: Statistics,
    blocks: Sequence[str],
    factors: Factors = None,
) -> Eta:
    """Return the natural parameters -dE/dt_b of non-interacting ``blocks`` given the others.

    :param statistics: of every block that shares a factor with ``blocks``. A block
        whose units interact must be among them; each of its units then gets its natural
        parameter given all other units.
    :param factors: restrict the energy to these factors; all by default.
    :raises IntractableError: for a real-valued block under an energy that is not
        affine.
    """
    if factors is None:
        factors = graph.touching(blocks)
    independent = [b for b in blocks if b not in graph.splits or b not in statistics]
    start = {**statistics, **zero_statistics(graph, independent)}
    return contributed(graph, factors, params, start, blocks)


def refuse_nonconjugate(
    graph: Declaration, blocks: Iterable[str], factors: Iterable[Factor]
) -> None:
    """Refuse blocks whose conditionals under some factors are not of their families."""
    for b in graph.nonconjugate.intersection(blocks):
        if any(b in f.blocks and not f.affine for f in factors):
            raise IntractableError(
                f"real-valued block {b!r} ({graph.families[b]!r}) is in a factor with "
                "affine=False, so its conditional has no closed form. Move it by "
                "ebmpp.moves.informed_sweep or ebmpp.moves.Hamiltonian."
            )


def fields(graph: Declaration, params: Params, x: Rows) -> Eta:
    """Return natural parameters to first order of every block, ``(rows, *shape, *stat_shape)``.

    They are minus the gradient of the energy as it is written, at the statistics of the
    current states: one gradient in place of an evaluation for each value of each unit.
    Without factors that are not affine they are the conditionals' natural parameters.
    """

    def log_density_at(t):
        return -energy(graph, params, t, as_written=True)

    eta = jax.vmap(jax.grad(log_density_at))(graph.statistics(x))
    return select(eta, x)


def saturated(graph: Declaration, eta: Eta) -> Eta:
    """Return natural parameters by block without barriers of impossible states."""
    if not graph.has_zeros:
        return eta
    return {b: zeros.saturate(graph.families[b], e) for b, e in eta.items()}


def softened(graph: Declaration, params: Params, beta: Array) -> Params:
    """Return params at an inverse temperature; see :func:`~ebmpp.graph.factors.zeros.soften`."""
    if not graph.has_zeros:
        return params
    zero = {f.name for f in graph.factors if f.has_zeros and f.affine}
    return {n: zeros.soften(p, beta) if n in zero else p for n, p in params.items()}


def with_infinities(graph: Declaration, log_density: Array) -> Array:
    """Return log densities, -inf for impossible states."""
    if not graph.has_zeros:
        return log_density
    return jnp.where(zeros.is_impossible(-log_density), -jnp.inf, log_density)


@partial(jax.jit, static_argnums=(0, 1, 2))
def slope(
    graph: Declaration, a: str, b: str, params: Params, statistics: Statistics
) -> Array:
    """Return the derivative of the natural parameters of ``a`` in the statistics of ``b``."""
    sizes = {c: math.prod(graph.families[c].statistic_shape) for c in (a, b)}

    def eta(t):
        return natural(graph, params, {**statistics, b: t}, [a])[a]

    jacobian = jax.jacfwd if sizes[b] < sizes[a] else jax.jacrev
    return jacobian(eta)(statistics[b])


def contributed(
    graph: Declaration,
    factors: Factors,
    params: Params,
    statistics: Statistics,
    blocks: Iterable[str] | None = None,
) -> Eta:
    """Return the terms of ``factors`` in the natural parameters of blocks, all by default."""
    blocks = list(statistics if blocks is None else blocks)
    refuse_nonconjugate(graph, blocks, graph.factors if factors is None else factors)

    def log_density_at(t):
        return -energy(graph, params, {**statistics, **t}, factors)

    return jax.grad(log_density_at)({b: as_float(statistics[b]) for b in blocks})


def affine(
    graph: Declaration, params: Params, statistics: Statistics, blocks: Iterable[str]
) -> tuple[Scalar, Eta]:
    """Return c and eta of non-interacting ``blocks``, with -E = c + sum <eta_b, t_b>."""
    return jax.value_and_grad(lambda t: -energy(graph, params, {**statistics, **t}))(
        zero_statistics(graph, blocks)
    )


def log_marginal(
    graph: Declaration, params: Params, statistics: Statistics, blocks: Sequence[str]
) -> Scalar:
    """Return log of the sum over ``blocks`` of exp(-E) r; other base measures are left out."""
    at_zero, eta = affine(graph, params, statistics, blocks)
    return at_zero + sum(graph.families[b].log_normalizer(eta[b]).sum() for b in blocks)


def log_base_measure(graph: Declaration, x: State) -> Scalar:
    """Return the sum of log r_b(x_b) over the blocks of one state."""
    return jnp.zeros(()) + sum(
        graph.families[b].log_base_measure(v).sum() for b, v in x.items()
    )


@full_precision
def log_unnormalized(
    graph: Declaration,
    params: Params,
    x: State,
    blocks: Iterable[str],
    known: State = MappingProxyType({}),
    rows: int = 1,
) -> Scalar:
    """Return the log of the unnormalised density of the blocks ``x``, with ``blocks`` summed out.

    :param known: masks of the partly observed blocks of ``x``, whose unknown units are
        summed out too. No two of these blocks and ``blocks`` may interact.
    :param rows: how many states a caller maps over.
    """
    observed = omit(x, known)
    summed = (*blocks, *known)
    at_zero, eta = affine(graph, params, graph.exact_statistics(observed, rows), summed)
    log_sums = []
    for b in summed:
        family = graph.families[b]
        units = family.log_normalizer(eta[b])
        if b in known:
            products = (eta[b] * family.statistics(x[b])).reshape(*family.shape, -1)
            log_terms = products.sum(-1) + family.log_base_measure(x[b])
            units = jnp.where(known[b], log_terms, units)
        log_sums.append(units.sum())
    return at_zero + sum(log_sums) + log_base_measure(graph, observed)


def natural_rows(
    graph: Declaration, params: Params, x: Rows, blocks: Sequence[str]
) -> Eta:
    """Return the natural parameters of ``blocks`` for each row; see :func:`natural`."""
    scope = select(x, graph.scope(blocks))
    if not scope:  # no neighbours: the same for every row
        eta = natural(graph, params, {}, blocks)
        rows = num_rows(x)
        return {b: jnp.broadcast_to(e, (rows, *e.shape)) for b, e in eta.items()}
    return jax.vmap(lambda t: natural(graph, params, t, blocks))(
        graph.exact_statistics(scope, num_rows(x))
    )


def log_density(graph: Declaration, params: Params, x: Rows) -> PerRow:
    """Return the unnormalised log-density of each row."""

    def at_row(row):
        return log_base_measure(graph, row) - energy(
            graph, params, graph.statistics(row)
        )

    return jax.vmap(at_row)(dict(x))


def summed_out(
    graph: Declaration, params: Params, x: Rows, group: tuple[str, ...]
) -> PerRow:
    """Return the log unnormalised density of each row, with the blocks of ``group`` summed out."""
    rest = omit(x, group)
    if not rest:  # nothing is left to map over
        value = log_unnormalized(graph, params, {}, group)
        return jnp.broadcast_to(value, num_rows(x))

    def at_row(row):
        return log_unnormalized(graph, params, row, group, rows=num_rows(rest))

    return jax.vmap(at_row)(rest)


def weighted_gradient(
    graph: Declaration, params: Params, x: Rows, weights: PerRow
) -> Params:
    """Return the gradient in params of ``sum_i w_i E(params, x_i)`` over rows."""
    return gradient_at(graph, params, graph.statistics(x), weights)


@full_precision
def gradient_at(
    graph: Declaration, params: Params, statistics: Statistics, weights: PerRow
) -> Params:
    """Return the gradient of :func:`weighted_gradient` at given statistics, which may be means."""

    def energies(p):
        return jax.vmap(lambda t: energy(graph, p, t))(dict(statistics))

    return jax.grad(lambda p: weights @ energies(p))(params)


# -- mean field: coordinate ascent on a lower bound of the log-density of one row ----

#: Mean statistics of all blocks, and natural parameters of the latent ones.
Means = tuple[Blocks, Eta]


def mean_field(graph: Declaration, params: Params, known: Blocks, passes: int) -> Means:
    """Return independent latent units fitted to statistics of the visible blocks by some passes.

    Latents start at the means of their families' defaults. A pass visits the blocks
    next to the visible ones first, so that upper layers start from lower ones that have
    seen the row. (Starting from their own biases, or from above, a deep machine on
    digits ended a hundred nats below the bound it reaches this way.)
    """
    start = {b: f.default_eta() for b, f in graph.latent.items()}
    order: list[str] = []
    while near := [
        b for b in graph.neighbours((*graph.visible, *order)) if b in graph.latent
    ]:
        order += near
    order += [b for b in graph.latent if b not in order]

    def one_pass(_: Array, state: Means) -> Means:
        for block in order:
            state = mean_layer(graph, params, (block,), *state)
        return state

    means = {b: graph.families[b].mean(e) for b, e in start.items()}
    return lax.fori_loop(0, passes, one_pass, (known | means, start))


def mean_layer(
    graph: Declaration, params: Params, blocks: tuple[str, ...], t: Blocks, eta: Eta
) -> Means:
    """Update the blocks of one layer, part by part, to their conditionals given other means."""
    for b in graph.evaluated.intersection(blocks):
        raise IntractableError(
            f"block {b!r} is in a factor with affine=False or impossible values, whose "
            "energy at means is not the mean of its energy. Draw the block by PCD or UCD "
            "in place of mean field."
        )

    def conditional(t: Blocks) -> Means:
        new = natural(graph, params, t, blocks)
        return {
            b: graph.families[b].mean(e).astype(t[b].dtype) for b, e in new.items()
        }, new

    if graph.splits.keys().isdisjoint(blocks):
        means, new_eta = conditional(t)
        return t | means, eta | new_eta
    (block,) = blocks
    split = graph.splits[block]
    colors = jnp.asarray(split.colors).reshape(graph.families[block].shape)
    colors = expand(colors, target=t[block])

    def step(part: Array, state: Means) -> Means:
        new = conditional(t | state[0])
        return jax.tree.map(
            lambda new, old: jnp.where(colors == part, new, old), new, state
        )

    means, new_eta = fold_parts(
        split.num_parts, step, ({block: t[block]}, {block: eta[block]})
    )
    return t | means, eta | new_eta


# -- parts of blocks whose units interact --------------------------------------------
#
# The terms of the other blocks do not change while the parts of a block are visited, so
# they are computed once per visit (part_context). Terms between units of the block are
# gathered for the units of one part where the factor provides a Local, are evaluated
# with values that pass from part to part where it has Terms, and come from
# autodiff over the whole block otherwise.


#: Values or statistics of one block, and with its units flattened and before the rows.
BlockRows = Shaped[Array, "rows *shape_stats"]
UnitRows = Shaped[Array, "size rows *stats"]
#: From the units of a block after a draw of a part to what the part hands on.
Advance = Callable[[Array], tuple]


class PartContext(NamedTuple):
    """Terms shared by all parts of a block during one visit."""

    eta: Float[Array, "size rows_or_1 ..."]
    """Natural parameters from the factors in which the block's units do not interact."""
    prepared: tuple
    """Prepared params of each factor in which they do."""
    carried: tuple
    """Values of these factors at the current state, or None; they pass from part to part."""


def to_units(values: BlockRows, family: Family) -> UnitRows:
    """Flatten the block's shape and move the units before the rows."""
    stats = values.shape[1 + len(family.shape) :]
    flat = values.reshape(len(values), family.size, *stats)
    return jnp.moveaxis(flat, 1, 0)


def to_rows(values: UnitRows, family: Family) -> BlockRows:
    """Invert :func:`to_units`."""
    rows, *stats = values.shape[1:]
    return jnp.moveaxis(values, 0, 1).reshape(rows, *family.shape, *stats)


def part_context(
    graph: Declaration, params: Params, x: Rows, block: str
) -> PartContext:
    """Compute the terms that stay fixed while the parts of ``block`` are visited."""
    split = graph.splits[block]
    refuse_nonconjugate(graph, [block], split.inner_factors)
    scope = dict.fromkeys(
        b for f in split.outer_factors for b in f.blocks if b != block
    )
    t = graph.statistics(select(x, scope))

    def eta_at(t):
        return natural(graph, params, t, [block], split.outer_factors)[block]

    eta = jax.vmap(eta_at)(t) if t else eta_at({})[None]

    def begin(factor, path):
        """Return what is prepared for the parts, and what the first one is handed."""
        weights = params[factor.name]
        if not isinstance(path, Terms):
            return path and path.prepare(weights), None
        others = graph.statistics({b: x[b] for b in factor.blocks if b != block})
        prepared = path.prepare(weights, others)
        if not path.carries:
            return prepared, None
        t = split.family.statistics(to_units(x[block], split.family))
        return prepared, path.evaluate(prepared, t, None)

    begun = list(map(begin, split.inner_factors, split.fast_paths))
    return PartContext(to_units(eta, split.family), *zip(*begun))


def natural_part(
    graph: Declaration,
    params: Params,
    x: Rows,
    units: Array | list[Array],
    block: str,
    context: PartContext,
    part: Array | int,
) -> tuple[Natural, Advance]:
    """Return the natural parameters of one part given everything else, ``(rows, part units, ...)``.

    :param x: the other blocks, for which ``context`` was computed.
    :param units: current values of the block, ``(size, rows)`` or packed, as is then
        the ``eta`` of the context.
    :param context: with what the part before handed on.
    :return: the parameters, and what the part hands on as a function of the units after
        its draw.
    """
    split = graph.splits[block]

    def statistics_at(numbers):
        return split.family.statistics(units[numbers])

    eta = split.take(context.eta, part)
    if isinstance(units, list):
        for shifted, weights in zip(split.shifts, context.prepared):
            eta = eta + shifted.field(weights, units, part)
        return eta, lambda units: context.carried
    advances = []
    for factor, path, prepared, carried in zip(
        split.inner_factors, split.fast_paths, *context[1:], strict=True
    ):
        advance = None
        if isinstance(path, Terms):
            field, advance = path.field(
                prepared, carried, split.family.statistics(units), part
            )
        elif path is not None:
            field = path.field(prepared, statistics_at, part)
        else:
            rows = {b: x[b] for b in factor.blocks if b != block}
            rows[block] = to_rows(units, split.family)
            t = graph.statistics(rows)
            field = _field(graph, params, t, factor, split, part)
        eta = eta + field
        advances.append(advance)
    eta = jnp.broadcast_to(eta, (eta.shape[0], units.shape[1], *eta.shape[2:]))
    eta = jnp.moveaxis(eta, 0, 1)
    eta = mask_natural(split.part_family(part), split.mask(part), eta)
    return eta, lambda units: tuple(step and step(units) for step in advances)


def _field(
    graph: Declaration,
    params: Params,
    t: Rows,
    factor: Factor,
    split: lateral.Split,
    part: Array | int,
) -> lateral.Field:
    """Return the terms of a factor without fast path in the natural parameters of a part."""
    block = split.block
    family = split.family

    def eta_at(row):
        def energy_at(statistics):
            return energy(graph, params, {**row, block: statistics}, [factor])

        here = row[block]
        if factor.affine:
            eta = -jax.grad(energy_at)(here)
            return split.take(eta.reshape(family.size, *family.stat_shape), part)
        units = split.at(part)
        return evaluation.natural_of_units(energy_at, family, here, units, num_rows(t))

    return jax.vmap(eta_at, out_axes=1)(t)


def mask_natural(
    family: Family, mask: Bool[Array, "..."] | None, eta: Natural
) -> Natural:
    """Replace the natural parameters of units with ``mask`` False by the family's default."""
    if mask is None:
        return eta
    mask = mask.reshape(mask.shape + (1,) * len(family.stat_shape))
    return jnp.where(mask, eta, family.default_eta())
