# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sweeps of a graph whose params and clamped blocks are functions of other variables.

Inside a larger model these may be data, arguments of the model, or the present values
of other variables, such as a likelihood's noise scale. They may differ from row to row,
and between the chains of a pair.
"""

from collections.abc import Callable, Sequence
import dataclasses
from functools import partial
from typing import Self, TypeVar

from jaxtyping import PyTree

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Params,
    Rows,
    Scalar,
    Schedule,
    at_index,
    checks,
    fold_parts,
    random,
    select,
)
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.graph.transforms import batches
from ebmpp.moves import Layer, Target, gibbs
from ebmpp.moves.couplings import Trial, where_states
from ebmpp.moves.gibbs import PartIndex
from ebmpp.moves.move import (
    Drawn,
    Move,
    block_flags,
    couple_focused,
    draw_sweep,
    offsets,
    rows_agree,
    split_chains,
    stack_chains,
)
from ebmpp.moves.rungs import Tempering

Moves = Sequence[Move]
T = TypeVar("T", bound=PyTree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundGraph(Target):
    """A graph with the present params and clamped blocks.

    At a rung (see :meth:`at`) its energy and ``log_likelihood`` are multiplied by beta.

    :param order: the layers of a sweep.
    :param log_likelihood: log density beside the energy, of all blocks as rows; None
        for the energy alone.
    :param sites: the blocks that ``log_likelihood`` reads.
    """

    order: Schedule
    log_likelihood: Callable[[Rows], Array] | None = None
    sites: tuple[str, ...] = ()

    @property
    def layers(self) -> Schedule:
        return self.order

    def at(self, beta: Scalar) -> Self:
        """Return the same at an inverse temperature."""
        return dataclasses.replace(self, tempering=Tempering(beta))

    def map(self, fn: Callable[..., T], *rows: PyTree) -> T:
        """Apply ``fn(target, *rows)``, at once or, where params differ by row, row by row."""

        def at_row(target, *rows):
            return at_index(fn(target, *at_index(rows, None)), 0)

        return self.over_sets(at_row, *rows) if self.sets else fn(self, *rows)

    def moves(self, kinds: Sequence[str], replaced: Moves) -> list[Move]:
        """Return the layers as moves, with ``replaced`` in place of theirs."""
        changed = {b for move in replaced for b in move.blocks}
        layers = [
            Layer(blocks, kind)
            for blocks, kind in zip(self.layers, kinds, strict=True)
            if changed.isdisjoint(blocks)
        ]
        return [*layers, *replaced]


def bind_params(
    graph: FactorGraph, params: Params, batch: tuple[int, ...], check: bool
) -> dict[str, PyTree]:
    """Return params, rows first where they have the axes ``batch``; refuse other shapes."""
    axes = batches.leading_axes(graph, params)
    batches.check_batch(graph, params, axes, values=False)
    if axes not in ((), batch):
        raise checks.parameter_error(
            "leading axes of params",
            f"{batch} where they differ by row",
            jax.tree.map(jnp.shape, dict(params)),
        )
    arrays = jax.tree.map(jnp.asarray, dict(params))
    values, _ = batches.flatten_axes(graph, arrays, batch)
    if check:
        states.check_finite(values)
    return values


def sweep(
    bound: BoundGraph,
    x: Rows,
    keys: Array,
    fraction: float = 1.0,
    backward: bool = False,
) -> Drawn:
    """Sweep every row once, and count the Metropolis proposals that each row accepts.

    :param keys: of this sweep, ``(rows, 2)``. Part i of all layers draws from
        ``fold_in(keys, i)``.
    :param fraction: of a layer's units that are proposed at a time, where there is a
        ``log_likelihood``.
    :param backward: the last part of the last layer first, which is the reversal of the
        sweep.
    """
    carry = (dict(x), jnp.zeros(len(keys), jnp.int32))
    layers = [Layer(blocks) for blocks in bound.layers]
    order = [*zip(offsets(bound.graph, layers), layers, strict=False)]
    for start, layer in reversed(order) if backward else order:

        def step(part, carry, start=start, layer=layer):
            x, total = carry
            last = layer.num_parts(bound.graph) - 1
            part = last - part if backward else part
            part_keys = random.fold_in(keys, start + part)
            draw = partial(_draw_part, layer=layer, part=part)
            drawn = bound.map(draw, x, part_keys)
            x, accepted = _accept(bound, layer, x, drawn, part_keys, fraction)
            return x, total + accepted

        # part by part: visits of several parts are not reversible, so one acceptance
        # for all would be wrong
        carry = fold_parts(layer.num_parts(bound.graph), step, carry)
    return carry


def sweep_by_moves(bound: BoundGraph, moves: Moves, x: Rows, keys: Array) -> Blocks:
    """Sweep every row once: draw the layers of latents, then apply moves of the sites."""
    sweep = bound.moves(["common"] * len(bound.layers), moves)

    def draw(target, x, keys):
        return draw_sweep(target, x, sweep, keys)[0]

    return bound.map(draw, x, keys)


def log_density(bound: BoundGraph, x: Rows) -> Array:
    """Return what a temperature divides: minus the energy of rows, plus ``log_likelihood``."""

    def by_row(target, x):
        energy_of = partial(energy.energy, target.graph, target.params)
        return -jax.vmap(energy_of)(target.graph.statistics(x))

    density = bound.map(by_row, x)
    if bound.log_likelihood is not None:
        density += bound.log_likelihood(x)
    return density


def _natural(target: Target, x: Rows, layer: Move, part: PartIndex) -> PyTree:
    """Return natural parameters of a part of a layer, by row, or tables."""
    chains = at_index(x, None)
    prepared = layer.prepare(target, chains)
    focused, _ = layer.focus(target, prepared, layer.carry(prepared), chains, part)
    return at_index(focused, 0)


def _draw_part(
    target: Target, x: Rows, keys: Array, layer: Layer, part: PartIndex
) -> Blocks:
    """Return a layer with new values of one part."""
    families = layer.families(target.graph, part)
    eta = _natural(target, x, layer, part)
    return layer.put(target.graph, x, part, gibbs.draw(families, eta, keys))


def _accept(
    bound: BoundGraph,
    layer: Move,
    x: Rows,
    drawn: Rows,
    keys: Array,
    fraction: float,
) -> tuple[Blocks, Array]:
    """Return rows with the drawn values, by Metropolis if there is a likelihood.

    Also return which rows accepted.
    """
    if bound.log_likelihood is None or set(layer.blocks).isdisjoint(bound.sites):
        return {**x, **drawn}, jnp.zeros(len(keys), bool)
    families = select(bound.graph.families, layer.blocks)
    proposed = {**x, **drawn}
    # words apart from the draw's: one per unit, and one for the row
    size = sum(family.size for family in families.values())
    words = random.words(random.fold_in(keys, 0, 1 << 31), size + 1)
    if fraction < 1:
        start = 0
        for b, value in drawn.items():
            end = start + families[b].size
            is_proposed = random.uniform(words[:, start:end]) < fraction
            proposed[b] = jnp.where(is_proposed.reshape(value.shape), value, x[b])
            start = end
    gain = bound.beta * (bound.log_likelihood(proposed) - bound.log_likelihood(x))
    accepted = jnp.log(random.uniform(words[:, -1])) < gain
    return where_states(accepted, proposed, x), accepted


def couple(
    bounds: Sequence[BoundGraph],
    z: Rows,
    keys: Array,
    kinds: Sequence[str],
    fraction: float,
    moves: Moves,
) -> tuple[Blocks, Array]:
    """Make one coupled sweep of both chains of every row, each under its own params.

    :param z: both chains, ``(2, rows, *shape)`` per block.
    :param keys: of this sweep, ``(rows, 2)``.
    :param moves: forests of the sites, in place of their layers.
    :return: both chains, and which rows are broken (see
        :class:`~ebmpp.moves.Attempt`).
    """
    graph = bounds[0].graph
    equal_params = jnp.broadcast_to(_same_params(*bounds), len(keys))
    carry = dict(z), jnp.zeros(len(keys), bool)
    layers = bounds[0].moves(kinds, moves)
    for start, layer in zip(offsets(graph, layers), layers, strict=False):

        def step(part, carry, start=start, layer=layer):
            z, broken = carry
            chains = split_chains(z)
            natural = partial(_natural, layer=layer, part=part)
            etas = [
                bound.map(natural, x) for bound, x in zip(bounds, chains, strict=True)
            ]
            focused = jax.tree.map(lambda *e: jnp.stack(e), *etas)
            flags = block_flags(bounds[0], z)
            same = equal_params & rows_agree(flags, layer.reads(graph), len(keys))
            trial = Trial(keys, jnp.ones(len(keys), bool), same, part)
            attempt = couple_focused(bounds[0], focused, z, layer, start + part, trial)
            part_keys = random.fold_in(keys, start + part)
            drawn = attempt.x, attempt.y
            x, y = (
                _accept(bound, layer, old, new, part_keys, fraction)[0]
                for bound, old, new in zip(bounds, chains, drawn, strict=True)
            )
            return stack_chains(x, y), broken | attempt.broken

        carry = fold_parts(layer.num_parts(graph), step, carry)
    return carry


def _same_params(first: BoundGraph, second: BoundGraph) -> Array:
    """Return where two chains have equal params and clamped blocks, by row or for all rows."""

    def compare(a, b, by_row):
        is_equal = a == b
        return is_equal.reshape(len(a), -1).all(-1) if by_row else is_equal.all()

    def compare_params(a, b, expected):
        return compare(a, b, by_row=a.shape != expected.shape)

    expected = first.graph.param_shapes
    same = jax.tree.map(compare_params, first.params, second.params, expected)
    rows = jax.tree.leaves(same)
    for b, value in first.clamped.items():
        rows.append(compare(value, second.clamped[b], by_row=True))
    return jnp.stack(jnp.broadcast_arrays(jnp.ones((), bool), *rows)).all(0)
