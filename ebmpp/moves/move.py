# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Moves: their base class, sweeps of single chains and coupled pairs, and the Gibbs move.

A sweep is a tuple of moves. :class:`~ebmpp.moves.Layer` redraws a layer from its
conditionals (blocked Gibbs), :class:`~ebmpp.moves.Mixture` proposes values of several
layers at once. The engine and the coupled kernels use nothing but this interface, so a
new kind of move is one class.

Both chains of a pair are stacked: a block is an array of shape ``(2, rows, *shape)``.
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import itertools
from typing import Generic, NamedTuple, TypeVar

from jaxtyping import Bool, PyTree, Shaped

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Chains,
    Counts,
    Eta,
    Keys,
    Params,
    RowMask,
    Rows,
    UnitMasks,
    at_index,
    checks,
    fold_parts,
    merge_axes,
    random,
    select,
)
from ebmpp.core.backend import materialize
from ebmpp.errors import IntractableError, clash
from ebmpp.families.family import Families
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.moves import gibbs
from ebmpp.moves.couplings import (
    KINDS,
    MOST_TRIALS,
    Attempt,
    PartIndex,
    Trial,
    attempt,
    stalls,
    where_rows,
)
from ebmpp.moves.target import Target

#: What the trials of a coupled draw share: see :meth:`Move.prepare`.
Prepared = TypeVar("Prepared")
#: New values of blocks, and how many proposals each row accepted.
Drawn = tuple[Blocks, Counts | int]
#: From the chains after a draw of a part to what the part hands on.
Advance = Callable[[Chains], PyTree]
#: Parts of each block on which the chains of a row agree, ``(rows, parts)``.
Flags = Mapping[str, Bool[Array, "rows ..."]]


class Move(abc.ABC, Generic[Prepared]):
    """One step of a sweep: an immutable, hashable value. Base class.

    A subclass defines ``blocks``, ``draw`` and ``attempt``, and overrides what else
    differs.
    """

    blocks: tuple[str, ...]
    """The blocks that it changes."""
    proposes: int = 0
    """Proposals per move that a chain may reject; 0 if acceptance is not worth counting."""
    uses_pool: bool = False
    """True if it proposes from a pool: the acceptance is then that of such moves alone."""
    stalls: bool = False
    """True if a coupled trial can be rejected, so that more trials may be needed."""
    exact: bool = True
    """True if the target's distribution is invariant."""
    marginalize: tuple[str, ...] = ()
    """Blocks that are summed out, so that the next move must draw them again."""

    def check(self, graph: FactorGraph) -> None:
        """Raise an error if this is not a move of the graph."""

    def check_params(self, graph: FactorGraph, params: Params) -> None:
        """Raise an error if these params are not accepted."""

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        """Return the blocks on which the draw depends: chains that agree there are moved alike.

        By default these are ``blocks`` and all that shares a factor with one of them or
        with one that is summed out.
        """
        around = graph.neighbours((*self.blocks, *self.marginalize))
        names = dict.fromkeys((*self.blocks, *around))
        return tuple(b for b in names if b not in self.marginalize)

    @abc.abstractmethod
    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        """Return new values of ``blocks``, and how many proposals each row accepted."""

    def num_parts(self, graph: FactorGraph) -> int:
        """Return the number of parts of a coupled draw, each of which has its own trials."""
        return 1

    def prepare(self, target: Target, z: Chains) -> Prepared | None:
        """Compute what all parts share.

        With several parts only what :meth:`carry` returns may depend on ``blocks``.
        """

    def carry(self, prepared: Prepared) -> PyTree:
        """Return what is handed to the first part; nothing by default."""

    def focus(
        self,
        target: Target,
        prepared: Prepared,
        carried: PyTree,
        z: Chains,
        part: PartIndex,
    ) -> tuple[Prepared, Advance]:
        """Compute what all trials of a part share, and what it hands to the next.

        :return: the latter as a function of the chains after the trials.
        """
        return prepared, lambda z: None

    @abc.abstractmethod
    def attempt(
        self,
        target: Target,
        focused: Prepared,
        z: Chains,
        trial: Trial,
    ) -> Attempt:
        """Make one trial of the coupled draw of a part, with values of all ``blocks``.

        :param focused: result of :meth:`focus` for the same ``z`` and part.
        """


def refuse_interacting(graph: FactorGraph, blocks: Sequence[str], verb: str) -> None:
    """Refuse blocks that interact, or whose units do; ``verb`` is such as "summed out"."""
    for a, b in graph.interacting(blocks):
        raise IntractableError(f"{clash(a, b)}, so they cannot be {verb} together.")


def refuse_observed(marginalize: tuple[str, ...], keep: UnitMasks) -> None:
    """Refuse blocks with observed units: a sum over a block runs over all its values."""
    observed = [b for b in marginalize if b in keep]
    if observed:
        raise checks.error(
            "marginalize", "of no block with observed units", observed, IntractableError
        )


def offsets(graph: FactorGraph, moves: Sequence[Move]) -> list[int]:
    """Return the number of the first part of each move, and the number of all parts."""
    counts = [move.num_parts(graph) for move in moves]
    return list(itertools.accumulate(counts, initial=0))


def counted(moves: Sequence[Move]) -> Sequence[Move]:
    """Return the moves whose proposals count in the acceptance."""
    return [move for move in moves if move.uses_pool] or moves


def num_proposals(moves: Sequence[Move]) -> int:
    """Return the number of proposals per sweep that count in the acceptance."""
    return sum(move.proposes for move in counted(moves))


def draw_sweep(
    target: Target,
    x: Rows,
    moves: Sequence[Move],
    keys: Keys,
) -> tuple[Blocks, Counts]:
    """Make one sweep of each row; return the rows, and how many proposals each accepted.

    Move i draws from ``fold_in(keys, i)``.
    """
    x = dict(x)
    total = jnp.zeros(len(keys), jnp.int32)
    for index, move in enumerate(moves):
        drawn, accepted = move.draw(target, x, random.fold_in(keys, index))
        x |= drawn
        if move in counted(moves):
            total += accepted
    return x, total


def block_flags(target: Target, z: Chains) -> Flags:
    """Return flags of stored chains, from their values."""
    return {
        b: jnp.tile(rows_equal(v)[:, None], target.num_parts(b)) for b, v in z.items()
    }


def rows_agree(flags: Flags, blocks: Sequence[str], rows: int) -> RowMask:
    """Return True for the rows whose chains agree on all of ``blocks``."""
    agreed = [flags[b].all(-1) for b in blocks]
    return jnp.stack(agreed).all(0) if agreed else jnp.ones(rows, bool)


def both_as_rows(z: Chains) -> Blocks:
    """Return the rows of the leading chains, followed by the rows of the following chains."""
    return {b: merge_axes(v) for b, v in z.items()}


def as_chains(x: Rows) -> Blocks:
    """Undo :func:`both_as_rows`."""
    return {b: v.reshape(2, -1, *v.shape[1:]) for b, v in x.items()}


def stack_chains(x: Rows, y: Rows) -> Blocks:
    """Return the leading chain ``x`` and the following one ``y``, stacked."""
    return {b: jnp.stack([x[b], y[b]]) for b in x}


def one_chain(z: Chains, index: int) -> Blocks:
    """Return the rows of the leading chain, 0, or of the following one, 1."""
    return at_index(dict(z), index)


def split_chains(z: Chains) -> tuple[Blocks, Blocks]:
    """Undo :func:`stack_chains`."""
    return one_chain(z, 0), one_chain(z, 1)


def with_invalid(broken: Array, x: Rows) -> Blocks:
    """Return rows with values that no unit can have where they are broken."""
    result = {}
    for b, v in x.items():
        invalid = jnp.nan if jnp.issubdtype(v.dtype, jnp.floating) else -1
        result[b] = where_rows(~broken, v, invalid)
    return result


def rows_equal(z: Shaped[Array, "2 rows ..."]) -> RowMask:
    """Return True for the rows in which the two chains have equal values of a block."""
    differs = (z[0] != z[1]).reshape(z.shape[1], -1)
    # a sum: XLA makes three kernels of a reduction of booleans, and one of a sum
    return differs.astype(jnp.result_type(float)).sum(-1) == 0


def final_attempt(
    z: Chains, trial: Trial, broken: RowMask, num_accepted: Counts | int = 0
) -> Attempt:
    """Return the attempt in which both chains of every row accept their values ``z``.

    Chains with one distribution get the leading one's values: a shared value that is
    computed twice may be rounded differently.
    """
    y = {b: where_rows(trial.same, v[0], v[1]) for b, v in z.items()}
    together = {b: trial.same | rows_equal(v) for b, v in z.items()}
    return Attempt.final(one_chain(z, 0), y, broken, together, num_accepted)


def update_flags(
    target: Target,
    move: Move,
    flags: Flags,
    z: Chains,
    part: PartIndex,
    draw: Attempt,
    done: RowMask,
) -> Flags:
    """Update the flags after a draw of a part, in the rows in which both chains have accepted.

    Values of discrete units may also coincide that were drawn in different trials;
    these compare exactly.
    """
    is_whole = move.num_parts(target.graph) == 1
    changed = draw.accept_x | draw.accept_y
    result = dict(flags)
    for b in move.blocks:
        is_drawn = is_whole | (jnp.arange(flags[b].shape[1]) == part)
        agree = draw.done & draw.together[b]
        result[b] = jnp.where(
            changed[:, None] & is_drawn[None], agree[:, None], flags[b]
        )
        # their values compare exactly
        if target.is_discrete(b):
            result[b] |= (done & rows_equal(z[b]))[:, None]
    return result


def with_equal_copies(z: Chains, flags: Flags) -> Blocks:
    """Return both chains, with the leading one's values where they agree on a block."""
    return {b: where_rows(flags[b].all(-1)[None], v[:1], v) for b, v in z.items()}


def _stored_copies(z: Chains, flags: Flags) -> Blocks:
    """Apply :func:`with_equal_copies` in a loop, which stores both copies bit by bit."""

    def once(c):
        return jnp.zeros_like(c[0]), with_equal_copies(c[1], flags)

    needed = jnp.stack([f.any() for f in flags.values()]).any()
    return lax.while_loop(lambda c: c[0], once, (needed, dict(z)))[1]


def coupled_sweep(
    target: Target,
    z: Chains,
    moves: Sequence[Move],
    keys: Keys,
    most: Array | int = MOST_TRIALS,
) -> tuple[Blocks, RowMask, RowMask, Counts]:
    """Make one sweep of both chains, with all trials, from the words of the engine.

    Trial r of move i draws from ``fold_in(keys, i, r)``.

    :return: both chains; rows that agree on all blocks, with values that are equal bit
        by bit; broken rows (see :class:`~ebmpp.moves.Attempt`); and the
        number of proposals that each row accepted.
    """
    rows = len(keys)
    chains = CoupledChains(
        dict(z),
        block_flags(target, z),
        jnp.zeros(rows, bool),
        jnp.zeros(rows, jnp.int32),
    )
    for start, move in zip(offsets(target.graph, moves), moves, strict=False):
        total = chains.num_accepted
        chains = _couple_move(target, chains, move, keys, start, most)
        if move not in counted(moves):
            chains = chains._replace(num_accepted=total)
    z, flags, broken, total = chains
    return _stored_copies(z, flags), rows_agree(flags, tuple(z), rows), broken, total


class CoupledChains(NamedTuple):
    """Both chains of every row, after some coupled moves."""

    z: Blocks
    flags: Flags
    broken: RowMask
    num_accepted: Counts
    """Number of proposals that each row accepted."""


def _couple_move(
    target: Target,
    chains: CoupledChains,
    move: Move,
    keys: Keys,
    start: int,
    most: Array | int,
) -> CoupledChains:
    """Make one move of both chains of every row, with all trials; see :func:`coupled_sweep`.

    :param start: number of the first part: trial r of part i draws from
        ``fold_in(keys, start + i, r)``.
    """
    prepared = move.prepare(target, chains.z)
    rows = len(keys)

    def step(part, state):
        (z, flags, broken, total), carried = state
        focused, advance = move.focus(target, prepared, carried, z, part)
        same = rows_agree(flags, move.reads(target.graph), rows)
        trial = Trial(keys, jnp.ones(rows, bool), same, part, flags, most)
        draw = couple_focused(target, focused, z, move, start + part, trial)
        z = z | stack_chains(draw.x, draw.y)
        flags = update_flags(target, move, flags, z, part, draw, draw.done)
        chains = CoupledChains(
            z, flags, broken | draw.broken, total + draw.num_accepted
        )
        return chains, advance(z)

    state = chains, move.carry(prepared)
    return fold_parts(move.num_parts(target.graph), step, state)[0]


def couple_focused(
    target: Target,
    focused: PyTree,
    z: Chains,
    move: Move,
    index: Array | int,
    draw: Trial,
) -> Attempt:
    """Make trials of part number ``index`` until every row accepts; others are broken."""

    def trial(number):
        first = draw.first & (number == 0)
        keys = random.fold_in(draw.keys, index, number)
        return move.attempt(target, focused, z, draw._replace(keys=keys, first=first))

    def retry(carry):
        number, result = carry
        return number + 1, result.retried(trial(number))

    def is_pending(carry):
        number, result = carry
        return (~result.done & ~result.broken).any() & (number < draw.most)

    result = trial(0)
    if not move.stalls:
        return result
    _, result = lax.while_loop(is_pending, retry, (jnp.uint32(1), result))
    return result._replace(broken=result.broken | ~result.done)


@dataclasses.dataclass(frozen=True)
class Layer(Move[PyTree]):
    """Draw of the blocks of one layer from their conditionals.

    :param blocks: blocks that do not interact.
    :param kind: coupling of pairs: "maximal", "maximal_independent", "common",
        "reflection" or "independent"; see :func:`ebmpp.moves.resolve_moves`.
    """

    blocks: tuple[str, ...]
    kind: str = "common"

    @property
    def stalls(self) -> bool:
        """True for maximal couplings."""
        return stalls(self.kind)

    def check(self, graph: FactorGraph) -> None:
        """Refuse unknown kinds, and blocks that interact."""
        checks.choice("coupling", self.kind, KINDS)
        if len(self.blocks) > 1:
            refuse_interacting(graph, self.blocks, "drawn as one layer")

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        return graph.scope(self.blocks)

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        def new(natural, families, part):
            if part is None:
                return gibbs.draw(families, natural(), keys)
            return gibbs.draw_part(families, natural, random.fold_in(keys, 0, part))

        return gibbs.visit(target, x, self.blocks, new), 0

    def num_parts(self, graph: FactorGraph) -> int:
        return graph.num_parts(self.blocks[0])

    def prepare(self, target: Target, z: Chains) -> Eta | energy.PartContext:
        """Return natural parameters, ``(2 rows, *shape, *stat_shape)``, or a context of parts."""
        graph = target.graph
        x = both_as_rows(z)
        if self.blocks[0] in graph.splits:
            return energy.part_context(graph, target.params, x, self.blocks[0])
        return target.natural(x, self.blocks)

    def carry(self, prepared: PyTree) -> PyTree:
        return getattr(prepared, "carried", None)

    def focus(
        self,
        target: Target,
        prepared: PyTree,
        carried: PyTree,
        z: Chains,
        part: PartIndex,
    ) -> tuple[Eta, Advance]:
        """Return natural parameters of both chains, ``(2, rows, *shape, *stat_shape)``."""
        block = self.blocks[0]
        split = target.graph.splits.get(block)
        rows = z[block].shape[1]
        is_free = {b: ~k for b, k in target.keep.items() if b in self.blocks}
        etas = prepared
        advance = None
        if split is not None:
            x = both_as_rows(z)
            units = energy.to_units(x[block], split.family)
            context = prepared._replace(carried=carried)

            def natural_at(units):
                return target.natural_part(x, units, block, context, part)

            if any(carried):
                eta, advance = natural_at(units)
            else:
                eta = materialize(lambda units: natural_at(units)[0], units)
            etas = {block: eta}
            is_free = {
                b: split.take(energy.to_units(v, split.family), part).T
                for b, v in is_free.items()
            }
        families = self.families(target.graph, part)
        focused = {
            b: energy.mask_natural(
                families[b], is_free.get(b), eta.reshape(-1, rows, *eta.shape[1:])
            )
            for b, eta in etas.items()
        }

        def hand_on(z):
            if split and advance:
                return advance(energy.to_units(both_as_rows(z)[block], split.family))
            return carried

        return focused, hand_on

    def attempt(
        self,
        target: Target,
        focused: Eta,
        z: Chains,
        trial: Trial,
    ) -> Attempt:
        """See :class:`~ebmpp.moves.Move`.

        Observed units get one distribution in both chains, so they do not affect
        whether the chains meet.
        """
        graph = target.graph
        families = self.families(graph, trial.part)
        result = attempt(families, self.kind, split_chains(focused), trial)

        def new(chain, drawn):
            x = one_chain(z, chain)
            drawn = self.put(graph, x, trial.part, drawn)
            return gibbs.keep_observed(target.keep, x, drawn)

        return result._replace(x=new(0, result.x), y=new(1, result.y))

    def families(self, graph: FactorGraph, part: PartIndex) -> Families:
        """Return the families of the units that are drawn at once."""
        split = graph.splits.get(self.blocks[0])
        if split is not None:
            return {split.block: split.part_family(part)}
        return select(graph.families, self.blocks)

    def put(
        self,
        graph: FactorGraph,
        x: Rows,
        part: PartIndex,
        new: Blocks,
    ) -> Blocks:
        """Return ``x`` with the values of a part replaced; ``new`` if there is one part."""
        block = self.blocks[0]
        split = graph.splits.get(block)
        if split is None:
            return new
        units_first = materialize(jnp.transpose, new[block])
        units = split.put(energy.to_units(x[block], split.family), part, units_first)
        return {block: energy.to_rows(units, split.family)}


def gibbs_sweep(graph: FactorGraph, clamped: Iterable[str] = ()) -> tuple[Layer, ...]:
    """Return draws of all free layers: blocked Gibbs.

    :param clamped: names of clamped blocks.
    """
    return tuple(Layer(blocks) for blocks in schedule(graph, clamped))


def draw_chains(
    target: Target,
    keys: Keys,
    num_sweeps: Array | int,
    moves: Sequence[Move] | None = None,
) -> Blocks:
    """Return every block after sweeps from initial draws, one chain per row.

    :param moves: of a sweep; by default blocked Gibbs.
    """
    graph = target.graph
    moves = moves or gibbs_sweep(graph, target.clamped)
    start = gibbs.initial_rows(graph, target.free, random.fold_in(keys, 0))
    start |= target.clamped_rows(len(keys))

    def sweep_once(i, x):
        return draw_sweep(target, x, moves, random.fold_in(keys, i))[0]

    return lax.fori_loop(1, num_sweeps + 1, sweep_once, start)
