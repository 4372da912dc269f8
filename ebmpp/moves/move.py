# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Moves: the steps that a sweep is made of, for one chain and for a coupled pair.

A coupled sweep is a tuple of moves. :class:`~ebmpp.moves.layer.Layer` redraws a layer from its conditionals
(blocked Gibbs), :class:`~ebmpp.moves.metropolis.Metropolis` proposes values of several layers at once. The
engine and the coupled kernels know nothing else, so a new kind of step is one class.

Both chains of a pair are stacked: a block is an array of shape ``(2, rows, *shape)``.
"""

from collections.abc import Mapping, Sequence
import itertools
from typing import Any

from jaxtyping import Bool, Shaped

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Blocks, Chains, Counts, Keys, Params, Rows, Which
from ebmpp.graph import FactorGraph
from ebmpp.graph.factors.lateral import each_part
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.target import Target

Drawn = tuple[Blocks, Counts]
#: Which parts of a block the chains of a row have as one value, ``(rows, parts)`` a block.
Flags = Mapping[str, Bool[Array, "rows ..."]]


class Move:
    """One step of a sweep, an immutable, hashable value: to inherit from.

    A subclass has ``blocks``, ``reads``, ``draw`` and ``attempt``, and says where else it differs.
    """

    blocks: tuple[str, ...]
    """The blocks that it changes."""
    proposes: int = 0
    """How many proposals it makes that a chain may turn down, so that acceptance is worth counting."""
    stalls: bool = False
    """Whether a coupled trial can fail, so that more of them may be needed."""
    exact: bool = True
    """Whether it leaves the target's law as it is."""
    marginalize: tuple[str, ...] = ()
    """Blocks that it sums out, so that the next move must draw them again."""

    def check(self, graph: FactorGraph) -> None:
        """Whether it is a move of this graph: raises what tells why not."""

    def check_params(self, graph: FactorGraph, params: Params) -> None:
        """Whether it takes these params: raises what tells why not."""

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        """What its draw depends on: chains that agree there are moved alike."""
        raise NotImplementedError

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        """New values of ``blocks``, for one chain a row, and how many proposals each row took."""
        raise NotImplementedError

    def num_parts(self, graph: FactorGraph) -> int:
        """In how many parts a coupled draw is made, each with its own trials."""
        return 1

    def prepare(self, target: Target, z: Chains) -> Any:
        """What all parts have in common; where there are several it does not depend on ``blocks``."""

    def focus(self, target: Target, prepared: Any, z: Chains, part: Any) -> Any:
        """What all trials of a part have in common."""
        return prepared

    def attempt(self, target: Target, focused: Any, z: Chains, trial: Trial) -> Attempt:
        """One trial of the coupled draw of a part; both chains' values of all ``blocks``.

        :param focused: of :meth:`focus`, for the same ``z`` and part.
        :param trial: its words, and which part.
        """
        raise NotImplementedError


def offsets(graph: FactorGraph, moves: Sequence[Move]) -> list[int]:
    """The number of the first part of each move, and the number of all parts."""
    return list(itertools.accumulate((move.num_parts(graph) for move in moves), initial=0))


def draw_sweep(target: Target, x: Rows, moves: Sequence[Move], keys: Keys) -> Drawn:
    """One sweep of one chain a row; move i draws from ``fold_in(keys, i)``.

    :param keys: of this sweep, ``(rows, 2)``.
    :return: the rows, and how many proposals each took.
    """
    x, taken = dict(x), jnp.zeros(len(keys), jnp.int32)
    for index, move in enumerate(moves):
        drawn, took = move.draw(target, x, random.fold_in(keys, index))
        x, taken = x | drawn, taken + took
    return x, taken


# -- on what the chains agree ----------------------------------------------------------------------


def compare(target: Target, z: Chains) -> Flags:
    """Flags of chains as they are stored, from their values; those that a coupling made come from it."""
    return {b: jnp.tile(equal(v)[:, None], target.num_parts(b)) for b, v in z.items()}


def agree(flags: Flags, blocks: Sequence[str], rows: int) -> Which:
    """Whether the chains of each row agree on all of ``blocks``."""
    read = [flags[b].all(-1) for b in blocks]
    return jnp.stack(read).all(0) if read else jnp.ones(rows, bool)


def flat(z: Chains) -> Blocks:
    """Both chains as rows, one's after the other's."""
    return {b: v.reshape(-1, *v.shape[2:]) for b, v in z.items()}


def equal(z: Shaped[Array, "2 rows ..."]) -> Which:
    """Whether the two chains have equal values of a block, row by row."""
    # counted: XLA makes three kernels of a reduction of truths, and one of a sum
    differ = (z[0] != z[1]).reshape(z.shape[1], -1)
    return differ.astype(jnp.result_type(float)).sum(-1) == 0


def note(target: Target, move: Move, flags: Flags, z: Chains, part: Any, made: Attempt, done: Which) -> Flags:
    """The flags after a draw of a part.

    Values of discrete units may also coincide, drawn in different trials; these compare exactly.

    :param z: both chains after the draw.
    :param made: the draw, ``accept_x`` and ``accept_y`` telling which chain has taken its proposal now.
    :param done: rows in which both have.
    """
    whole, noted = move.num_parts(target.graph) == 1, dict(flags)
    changed, both = made.accept_x | made.accept_y, made.accept_x & made.accept_y
    for b in move.blocks:
        here = changed[:, None] & (whole | (jnp.arange(flags[b].shape[1]) == part))[None]
        noted[b] = jnp.where(here, (both & made.together[b])[:, None], flags[b])
        if target.is_discrete(b):
            noted[b] |= (done & equal(z[b]))[:, None]
    return noted


def copied(z: Chains, flags: Flags) -> Blocks:
    """Both chains, the following one with the leading one's values of the blocks on which they agree."""
    alike = lambda v, same: same.reshape(1, -1, *(1,) * (v.ndim - 2))
    return {b: jnp.where(alike(v, flags[b].all(-1)), v[:1], v) for b, v in z.items()}


def _settled(z: Chains, flags: Flags) -> Blocks:
    """:func:`copied` from what a loop carries: that is stored, so a copy of it has the same bits."""
    once = lambda c: (jnp.zeros_like(c[0]), copied(c[1], flags))
    some = jnp.stack([f.any() for f in flags.values()]).any()
    return lax.while_loop(lambda c: c[0], once, (some, dict(z)))[1]


# -- one sweep of pairs ----------------------------------------------------------------------------


def coupled_sweep(
    target: Target, z: Chains, moves: Sequence[Move], keys: Keys
) -> tuple[Blocks, Which, Which, Counts]:
    """One sweep of both chains of every row, residual trials run to their end; the engine's own words.

    :param z: both chains, stacked.
    :param keys: of this sweep, ``(rows, 2)``; trial r of move i draws from ``fold_in(keys, i, r)``.
    :return: both chains; which rows agree on all blocks, whose values are then equal bit by bit; which are
        broken (see :class:`~ebmpp.moves.couplings.Attempt`); and how many proposals each row accepted.
    """
    z, flags, rows = dict(z), compare(target, z), len(keys)
    broken, taken = jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32)
    for start, move in zip(offsets(target.graph, moves), moves, strict=False):
        prepared = move.prepare(target, z)

        def step(
            part: Any, carry: tuple, start: int = start, move: Move = move, prepared: Any = prepared
        ) -> tuple:
            z, flags, broken, taken = carry
            focused = move.focus(target, prepared, z, part)
            same = agree(flags, move.reads(target.graph), rows)
            trial = Trial(keys, jnp.ones(rows, bool), same, part, flags)
            made = couple_focused(target, focused, z, move, start + part, trial)
            z = z | {b: jnp.stack([made.x[b], made.y[b]]) for b in move.blocks}
            flags = note(target, move, flags, z, part, made, made.accept_x & made.accept_y)
            return z, flags, broken | made.broken, taken + made.taken

        z, flags, broken, taken = each_part(move.num_parts(target.graph), step, (z, flags, broken, taken))
    return _settled(z, flags), agree(flags, tuple(z), rows), broken, taken


def couple_focused(target: Target, focused: Any, z: Chains, move: Move, index: Any, draw: Trial) -> Attempt:
    """Trials of step number ``index`` until every row is accepted; rows that never are come out broken.

    :param focused: what the move's ``focus`` made, or the like of it.
    :param draw: the first trial, with the keys of the sweep.
    :return: ``together`` where both chains accepted one value at once.
    """

    def trial(number: Array | int) -> Attempt:
        first, keys = draw.first & (number == 0), random.fold_in(draw.keys, index, number)
        return move.attempt(target, focused, z, draw._replace(keys=keys, first=first))

    def again(carry: tuple[Array, Attempt]) -> tuple[Array, Attempt]:
        number, held = carry
        new = trial(number)
        take_x, take_y = new.accept_x & ~held.accept_x, new.accept_y & ~held.accept_y
        merged = held._replace(
            x={b: where_rows(take_x, new.x[b], held.x[b]) for b in move.blocks},
            y={b: where_rows(take_y, new.y[b], held.y[b]) for b in move.blocks},
            accept_x=held.accept_x | new.accept_x,
            accept_y=held.accept_y | new.accept_y,
            broken=held.broken | new.broken,
            together={b: where_rows(take_x & take_y, new.together[b], held.together[b]) for b in move.blocks},
        )
        return number + 1, merged

    def pending(carry: tuple[Array, Attempt]) -> Array:
        number, held = carry
        return (~(held.accept_x & held.accept_y) & ~held.broken).any() & (number < draw.most)

    made = trial(0)
    if not move.stalls:
        return made
    made = lax.while_loop(pending, again, (jnp.ones((), jnp.uint32), made))[1]
    return made._replace(broken=made.broken | ~(made.accept_x & made.accept_y))
