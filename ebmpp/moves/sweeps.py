# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The moves of a coupled sweep, from what a user asks for."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ebmpp.core import checks
from ebmpp.errors import ArgumentError, DeclarationError, IntractableError
from ebmpp.families.family import Family
from ebmpp.graph import FactorGraph
from ebmpp.graph.declaration import schedule
from ebmpp.graph.states import is_concrete
from ebmpp.moves.clusters import Clusters
from ebmpp.moves.couplings import resolve, stalls
from ebmpp.moves.langevin import Langevin, is_real
from ebmpp.moves.layer import Layer
from ebmpp.moves.metropolis import Metropolis
from ebmpp.moves.mixture import mixture_sweep
from ebmpp.moves.move import Move
from ebmpp.moves.target import Target


def resolve_moves(
    graph: FactorGraph, coupling: Any, clamped: Iterable[str] = (), exact: bool = True
) -> tuple[Move, ...]:
    """The moves of a coupled sweep.

    :param coupling: "maximal", "maximal_independent", "common", "reflection" or "independent" for every
        layer, or one a layer, or None (see :func:`ebmpp.moves.couplings.resolve`); "metropolis" for
        :func:`metropolis_sweep` with uniform proposals; "mixture" for
        :func:`~ebmpp.moves.mixture.mixture_sweep`; or moves, one or several.
    :param clamped: blocks that are held.
    :param exact: refuse moves that do not leave the model's law as it is, and pairs that could never meet.
    :raises ArgumentError: for an unknown coupling, or moves that do not change every free block, or change
        a clamped one, or that are wrong in themselves.
    :raises DeclarationError: for a uniform proposal of a block without a uniform law, or pairs that could
        never meet.
    :raises IntractableError: for interacting blocks in one layer, or summed out together.
    """
    if coupling == "metropolis":
        return metropolis_sweep(graph, clamped)
    if coupling == "mixture":
        return mixture_sweep(graph, clamped)
    given = (coupling,) if isinstance(coupling, Move) else coupling
    layers = schedule(graph, clamped)
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not listed or not all(isinstance(move, Move) for move in given):
        kinds = resolve(given, layers)
        made = tuple(Layer(blocks, kind) for blocks, kind in zip(layers, kinds, strict=True))
        if exact:
            _check_meets(graph, made)
        return made
    free, changed = {b for layer in layers for b in layer}, {b for move in given for b in move.blocks}
    if free != changed:
        raise ArgumentError(
            f"the moves change blocks {sorted(changed)}, and the free blocks are {sorted(free)}: "
            "give moves that change every free block and no other"
        )
    _check(graph, given)
    if exact:
        _check_meets(graph, given)
    biased = [move for move in given if not move.exact]
    if biased and exact:
        raise ArgumentError(
            f"{biased[0]} does not leave the model's law as it is, and what is unbiased needs moves that do: "
            "give adjust=True"
        )
    return tuple(given)


def as_moves(name: str, given: Move | Sequence[Move] | None) -> tuple[Move, ...] | None:
    """Moves as a tuple; None stays None.

    :raises ArgumentError: for what is no move.
    """
    if given is None or isinstance(given, Move):
        return None if given is None else (given,)
    made = tuple(checks.sequence(name, given, "moves, such as ebmpp.moves.langevin_sweep makes"))
    for move in made:
        checks.instance(f"{name}: each", move, Move, "a move")
    return made


def _check(graph: FactorGraph, moves: Sequence[Move]) -> None:
    """:raises ArgumentError: for a move that is wrong in itself, or leaves what it summed out undrawn."""
    for move, following in zip(moves, (*moves[1:], None), strict=True):
        move.check(graph)
        summed = move.marginalize
        if summed and not (isinstance(following, Layer) and set(summed) <= set(following.blocks)):
            raise ArgumentError(
                f"{move} sums out {summed}, so the next move must be a Layer that draws them again; it is "
                f"{following}"
            )


def _check_meets(graph: FactorGraph, moves: Sequence[Move]) -> None:
    """:raises DeclarationError: for pairs that come ever nearer and never meet, but for rounding."""
    apart = {b for move in moves for b in move.blocks if _shares_noise(move, graph.families[b])}
    for _ in range(len(apart)):  # what shares its noise meets once all that its law depends on has met
        for move in moves:
            if apart.isdisjoint(move.reads(graph)):
                apart -= set(move.blocks)
    if apart:
        told = ", ".join(repr(b) for b in graph.families if b in apart)
        raise DeclarationError(
            f"pairs whose real-valued blocks {told} could only come near each other would never meet: draws "
            'from one noise are equal where their laws are; couple a layer of them by "maximal" or, if '
            'Gaussian, by "reflection"'
        )


def _shares_noise(move: Move, family: Family) -> bool:
    """Whether a move makes units of this family equal where their laws are and nowhere else."""
    if not isinstance(move, Layer) or family.support.is_discrete:
        return False
    reflects = move.kind == "reflection" and type(family).reflect is not Family.reflect
    return not (reflects or stalls(move.kind))


def check_params(target: Target, moves: Iterable[Move]) -> None:
    """What moves ask of params, where these can be looked at.

    :raises ParameterError: for params that a move does not take.
    """
    if all(is_concrete(leaf) for leaf in jax.tree.leaves(target.params)):
        for move in moves:
            move.check_params(target.graph, target.params)


def metropolis_sweep(
    graph: FactorGraph,
    clamped: Iterable[str] = (),
    proposal: str = "uniform",
    marginalize: str | Sequence[str] = (),
) -> tuple[Move, ...]:
    """A Metropolis move of the free blocks, and then a draw of those that it sums out.

    :param proposal: "uniform" or "initial", see :class:`~ebmpp.moves.metropolis.Metropolis`.
    :param marginalize: blocks that are summed out of the acceptance ratio.
    :raises ArgumentError: for an unknown proposal, or blocks summed out so that none is left to propose.
    :raises DeclarationError: for a block without a uniform law.
    :raises IntractableError: for two blocks that cannot be summed out together.
    """
    checks.instance("metropolis_sweep: graph", graph, FactorGraph, "a FactorGraph")
    marginalize = (marginalize,) if isinstance(marginalize, str) else tuple(marginalize)
    free = tuple(b for layer in schedule(graph, clamped) for b in layer)
    unknown = [b for b in marginalize if b not in free]
    blocks = tuple(b for b in free if b not in marginalize)
    if unknown or not blocks:
        raise ArgumentError(
            f"marginalize={marginalize} should name some of the free blocks {free} and leave at least one"
        )
    move = Metropolis(blocks, proposal, marginalize)
    move.check(graph)
    return (move, Layer(marginalize, "maximal")) if marginalize else (move,)


def langevin_sweep(
    graph: FactorGraph,
    clamped: Iterable[str] = (),
    step_size: float = 0.5,
    num_steps: int = 10,
    marginalize: str | Sequence[str] = (),
    adjust: bool = True,
) -> tuple[Move, ...]:
    """Layer after layer: real-valued blocks by Langevin steps, the others from their conditionals.

    With ``marginalize``, the steps follow the density with those blocks summed out, which are drawn
    afterwards.

    :param clamped: blocks that are held.
    :param step_size: see :class:`~ebmpp.moves.langevin.Langevin`, as for the other arguments.
    :raises ArgumentError: for numbers out of range, or an unknown block.
    :raises DeclarationError: for a graph without real-valued blocks.
    :raises IntractableError: for two blocks that cannot be summed out together.
    """
    checks.instance("langevin_sweep: graph", graph, FactorGraph, "a FactorGraph")
    marginalize = (marginalize,) if isinstance(marginalize, str) else tuple(marginalize)
    unknown = [b for b in marginalize if b not in graph.families]
    real = tuple(b for b, f in graph.families.items() if is_real(f) and b not in marginalize)
    if unknown:
        raise ArgumentError(f"marginalize names {unknown}, and the blocks are {list(graph.families)}")
    if not real:
        raise DeclarationError(
            f"Langevin steps move real-valued blocks, and there is none among {dict(graph.families)} "
            f"(marginalize={marginalize}): BlockedGibbs draws the others"
        )
    layers = schedule(graph, clamped)
    free = [b for layer in layers for b in layer]
    real, summed = tuple(b for b in real if b in free), tuple(b for b in marginalize if b in free)
    move = lambda blocks, summed=(): Langevin(blocks, step_size, num_steps, summed, adjust)
    made: list[Move] = []
    for layer in layers:
        steps = tuple(b for b in layer if b in real)
        if steps and not summed:
            made.append(move(steps))
        rest = tuple(b for b in layer if b not in real and not (real and b in summed))
        if rest:
            made.append(Layer(rest, "maximal"))
    if real and summed:
        made += [move(real, summed), Layer(summed, "maximal")]
    if not real:
        move(())  # numbers are checked whatever is clamped
    for each in made:
        each.check(graph)
    return tuple(made)


def cluster_sweep(graph: FactorGraph, clamped: Iterable[str] = ()) -> tuple[Move, ...]:
    """Layer after layer: blocks whose units interact cluster by cluster, the others from their conditionals.

    :param clamped: blocks that are held.
    :return: moves of a coupled sweep, such as :func:`~ebmpp.unbiased_expectation` takes.
    :raises IntractableError: for a graph in which no units of one block interact, or not in a way that makes
        clusters; see :class:`~ebmpp.moves.clusters.Clusters`.

    **References**

    1. Swendsen, Wang (1987), *Nonuniversal critical dynamics in Monte Carlo simulations*.
    """
    checks.instance("cluster_sweep: graph", graph, FactorGraph, "a FactorGraph")
    if not graph.splits:
        raise IntractableError(
            f"in no block of {dict(graph.families)} do units interact, so there are no clusters; "
            "BlockedGibbs draws each block at once"
        )
    made = []
    for layer in schedule(graph, clamped):
        move = Clusters(layer[0]) if layer[0] in graph.splits else Layer(layer, "maximal")
        move.check(graph)
        made.append(move)
    return tuple(made)
