# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Moves of a sweep, resolved from the argument ``coupling`` or ``moves`` and checked."""

from collections.abc import Iterable, Sequence
import functools
from typing import Any

import jax

from ebmpp.core import checks
from ebmpp.errors import ArgumentError, DeclarationError
from ebmpp.families.family import Family
from ebmpp.graph import FactorGraph
from ebmpp.graph.declaration import schedule
from ebmpp.graph.states import is_concrete
from ebmpp.moves.couplings import resolve, stalls
from ebmpp.moves.mixture import mixture_sweep
from ebmpp.moves.move import Layer, Move
from ebmpp.moves.target import Target

MovesLike = Move | Sequence[Move] | None


def resolve_moves(
    graph: FactorGraph, coupling: Any, clamped: Iterable[str] = (), exact: bool = True
) -> tuple[Move, ...]:
    """Return the moves of a coupled sweep.

    :param coupling: "maximal", "maximal_independent", "common", "reflection" or "independent" for every
        layer, or one per layer, or None (see :func:`ebmpp.moves.couplings.resolve`); "mixture" for
        :func:`~ebmpp.moves.mixture_sweep`; one or several moves; or a function of the graph and its clamped
        blocks that returns moves, such as :func:`~ebmpp.moves.cluster_sweep`.
    :param exact: refuse moves that do not leave the model's distribution invariant, and pairs that could
        never meet.
    :raises ArgumentError: for an unknown coupling, or moves that are invalid, change a clamped block, or do
        not change every free one.
    :raises DeclarationError: for pairs that could never meet.
    :raises IntractableError: for interacting blocks in one layer, or summed out together.
    """
    return _resolve(graph, as_coupling("coupling", coupling), tuple(clamped), exact)


def as_coupling(name: str, value: Any) -> Any:
    """Return the argument ``coupling`` with a list as a tuple, so that it can be hashed."""
    if value is None or isinstance(value, str | Move) or callable(value):
        return value
    return tuple(checks.sequence(name, value, "kinds or moves"))


@functools.lru_cache(maxsize=256)  # kernels ask at every trace
def _resolve(graph: FactorGraph, coupling: Any, clamped: tuple[str, ...], exact: bool) -> tuple[Move, ...]:
    if coupling == "mixture":
        return mixture_sweep(graph, clamped)
    layers = schedule(graph, clamped)
    moves = tuple(coupling(graph, clamped)) if callable(coupling) else coupling
    moves = (moves,) if isinstance(moves, Move) else moves
    if not isinstance(moves, tuple) or not all(isinstance(move, Move) for move in moves):
        moves = tuple(Layer(b, kind) for b, kind in zip(layers, resolve(coupling, layers), strict=True))
    else:
        free, changed = {b for layer in layers for b in layer}, {b for move in moves for b in move.blocks}
        if free != changed:
            raise ArgumentError(
                f"moves must change every free block and no other: they change {sorted(changed)}, and "
                f"the free blocks are {sorted(free)}."
            )
        _check(graph, moves)
    if exact:
        _check_meets(graph, moves)
        biased = [move for move in moves if not move.exact]
        if biased:  # its settings are longer than a value that `require` shows
            raise ArgumentError(f"moves must leave the model's distribution invariant, got {biased[0]}.")
    return moves


def as_moves(name: str, value: MovesLike) -> tuple[Move, ...] | None:
    """Return one or several moves as a tuple, and None for None."""
    if value is None or isinstance(value, Move):
        return None if value is None else (value,)
    moves = tuple(checks.sequence(name, value, "moves, such as ebmpp.moves.cluster_sweep makes"))
    for move in moves:
        checks.instance(f"{name}: each", move, Move, "a move")
    return moves


def _check(graph: FactorGraph, moves: Sequence[Move]) -> None:
    """Check each move, and that blocks that are summed out are drawn again."""
    for move, following in zip(moves, (*moves[1:], None), strict=True):
        move.check(graph)
        drawn = set(following.blocks) if isinstance(following, Layer) else set()
        expected = f"a Layer that draws {move.marginalize}, which {move} sums out"
        checks.require(drawn.issuperset(move.marginalize), "moves: the next", expected, following)


def _check_meets(graph: FactorGraph, moves: Sequence[Move]) -> None:
    """Refuse pairs that approach one another and never meet, except by rounding."""
    separate = {b for move in moves for b in move.blocks if _shares_noise(move, graph.families[b])}
    for _ in range(len(separate)):  # a block with shared noise meets once all that its distribution reads has
        for move in moves:
            if separate.isdisjoint(move.reads(graph)):
                separate -= set(move.blocks)
    if separate:
        names = ", ".join(repr(b) for b in graph.families if b in separate)
        raise DeclarationError(
            f"coupling must let real-valued blocks {names} meet: from shared noise they are equal only where "
            'their distributions are. Couple a layer of them by "maximal" or, if Gaussian, by "reflection".'
        )


def _shares_noise(move: Move, family: Family) -> bool:
    """Return True if a move makes units of this family equal only where their distributions are."""
    if not isinstance(move, Layer) or family.support.is_discrete:
        return False
    reflects = move.kind == "reflection" and type(family).reflect is not Family.reflect
    return not (reflects or stalls(move.kind))


def check_params(target: Target, moves: Iterable[Move]) -> None:
    """Check that moves accept the params, unless these are traced."""
    if all(is_concrete(leaf) for leaf in jax.tree.leaves(target.params)):
        for move in moves:
            move.check_params(target.graph, target.params)
