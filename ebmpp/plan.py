# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The moves of a coupled sweep, from what a user asks for."""

from collections.abc import Iterable
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.couplings import resolve
from ebmpp.errors import DeclarationError, IntractableError
from ebmpp.family import Family
from ebmpp.layer_move import Layer
from ebmpp.metropolis import PROPOSALS, Metropolis
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
        a clamped one.
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
    return tuple(given)


def metropolis_sweep(
    graph: "FactorGraph",
    clamped: Iterable[str] = (),
    proposal: str = "uniform",
    marginalize: tuple[str, ...] = (),
) -> tuple[Move, ...]:
    """A Metropolis move of the free blocks, and then a draw of those that it sums out.

    :param proposal: "uniform" or "initial", see :class:`~ebmpp.metropolis.Metropolis`.
    :param marginalize: blocks that are summed out of the acceptance ratio.

    :raises ValueError: for an unknown proposal, or blocks summed out so that none is left to propose.
    :raises DeclarationError: for a block without a uniform law.
    :raises IntractableError: for two blocks that cannot be summed out together.
    """
    if proposal not in PROPOSALS:
        raise ValueError(f"proposal {proposal!r} is unknown; choose among {PROPOSALS}")
    free = tuple(b for layer in schedule(graph, clamped) for b in layer)
    unknown = [b for b in marginalize if b not in free]
    blocks = tuple(b for b in free if b not in marginalize)
    if unknown or not blocks:
        raise ValueError(
            f"marginalize={marginalize} should name some of the free blocks {free} and leave at least one"
        )
    if graph.interacting(marginalize):
        a, b = graph.interacting(marginalize)[0]
        raise IntractableError(f"blocks {a!r} and {b!r} interact, so they cannot be summed out together")
    for b in blocks if proposal == "uniform" else ():
        if not _is_uniform(graph.families[b]):
            raise DeclarationError(
                f"block {b!r} ({graph.families[b]!r}) has no uniform law to propose from; "
                'proposal="initial" takes the law of its initial values instead'
            )
    move = Metropolis(blocks, proposal, marginalize)
    return (move, Layer(marginalize, "maximal")) if marginalize else (move,)


def _is_uniform(family: Family) -> bool:
    """Whether the law of initial values gives every value of a unit the same probability."""
    with jax.ensure_compile_time_eval():  # a kernel asks while it is traced
        states = family.states()
    if states is None:
        return False
    unit = dataclasses.replace(family, shape=(1,))
    with jax.ensure_compile_time_eval():
        values = jnp.asarray(states)[:, None]
        inner = (unit.default_eta() * unit.statistics(values)).reshape(len(states), -1).sum(-1)
        return bool(np.ptp(np.asarray(inner + unit.log_base_measure(values)[:, 0])) < 1e-6)
