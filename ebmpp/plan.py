# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The moves of a coupled sweep, from what a user asks for."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ebmpp.couplings import resolve
from ebmpp.layer_move import Layer
from ebmpp.metropolis import Metropolis
from ebmpp.moves import Move
from ebmpp.sweeps import schedule

if TYPE_CHECKING:
    from ebmpp.graph import FactorGraph


def resolve_moves(graph: "FactorGraph", coupling: Any, clamped: Iterable[str] = ()) -> tuple[Move, ...]:
    """The moves of a coupled sweep.

    :param coupling: what :func:`ebmpp.couplings.resolve` takes (a kind of coupling for every layer, or one
        a layer, or None); "metropolis" for :func:`metropolis_sweep` with uniform proposals; or moves, one
        or several.
    :param clamped: blocks that are held.
    :raises ValueError: for an unknown coupling, or moves that do not change every free block, or change
        a clamped one, or that are wrong in themselves.
    :raises DeclarationError: for a uniform proposal of a block without a uniform law.
    :raises IntractableError: for interacting blocks in one layer, or summed out together.
    """
    if coupling == "metropolis":
        return metropolis_sweep(graph, clamped)
    given = (coupling,) if isinstance(coupling, Move) else coupling
    layers = schedule(graph, clamped)
    if given is None or isinstance(given, str) or not all(isinstance(move, Move) for move in given):
        kinds = resolve(given, layers)
        return tuple(Layer(blocks, kind) for blocks, kind in zip(layers, kinds, strict=True))
    free, changed = {b for layer in layers for b in layer}, {b for move in given for b in move.blocks}
    if free != changed:
        raise ValueError(
            f"the moves change blocks {sorted(changed)}, and the free blocks are {sorted(free)}: "
            "give moves that change every free block and no other"
        )
    _check(graph, given)
    return tuple(given)


def _check(graph: "FactorGraph", moves: Sequence[Move]) -> None:
    """:raises ValueError: for a move that is wrong in itself, or that leaves what it summed out undrawn."""
    for move, following in zip(moves, (*moves[1:], None), strict=True):
        move.check(graph)
        summed = getattr(move, "marginalize", ())
        if summed and not (isinstance(following, Layer) and set(summed) <= set(following.blocks)):
            raise ValueError(
                f"{move} sums out {summed}, so the next move must be a Layer that draws them again; it is "
                f"{following}"
            )


def metropolis_sweep(
    graph: "FactorGraph",
    clamped: Iterable[str] = (),
    proposal: str = "uniform",
    marginalize: str | Sequence[str] = (),
) -> tuple[Move, ...]:
    """A Metropolis move of the free blocks, and then a draw of those that it sums out.

    :param proposal: "uniform" or "initial", see :class:`~ebmpp.metropolis.Metropolis`.
    :param marginalize: blocks that are summed out of the acceptance ratio.
    :raises ValueError: for an unknown proposal, or blocks summed out so that none is left to propose.
    :raises DeclarationError: for a block without a uniform law.
    :raises IntractableError: for two blocks that cannot be summed out together.
    """
    marginalize = (marginalize,) if isinstance(marginalize, str) else tuple(marginalize)
    free = tuple(b for layer in schedule(graph, clamped) for b in layer)
    unknown = [b for b in marginalize if b not in free]
    blocks = tuple(b for b in free if b not in marginalize)
    if unknown or not blocks:
        raise ValueError(
            f"marginalize={marginalize} should name some of the free blocks {free} and leave at least one"
        )
    move = Metropolis(blocks, proposal, marginalize)
    move.check(graph)
    return (move, Layer(marginalize, "maximal")) if marginalize else (move,)
