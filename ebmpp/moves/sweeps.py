# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Moves of a sweep, resolved from ``coupling`` or ``moves``, and their pool of proposals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import (
    BatchShape,
    Blocks,
    Key,
    Params,
    Rows,
    State,
    checks,
    is_concrete,
    num_rows,
    random,
)
from ebmpp.errors import ArgumentError, DeclarationError, StateError
from ebmpp.families.family import Family
from ebmpp.graph import FactorGraph
from ebmpp.graph.declaration import schedule
from ebmpp.graph.states import Clamped, as_rows
from ebmpp.moves.couplings import resolve, stalls
from ebmpp.moves.gradients import informed_sweep
from ebmpp.moves.mixture import (
    LOCAL_STEPS,
    Mixture,
    has_costly_sweeps,
    make_pool,
    mixture_sweep,
)
from ebmpp.moves.move import Layer, Move, draw_chains
from ebmpp.moves.target import Pool, Target

_SWEEPS = 10  # that draw the missing blocks of a pool where they are not one layer

MovesLike = Move | Sequence[Move] | None
#: The argument ``coupling``: see :func:`resolve_moves`.
CouplingLike = str | Move | Sequence[Any] | Callable[..., Any] | None


def resolve_moves(
    graph: FactorGraph,
    coupling: CouplingLike,
    clamped: Iterable[str] = (),
    exact: bool = True,
) -> tuple[Move, ...]:
    """Return the moves of a coupled sweep.

    :param coupling: "maximal", "maximal_independent", "common", "reflection" or
        "independent" for every layer, or one per layer; None is "maximal". Algorithm 3
        of Qiu et al. (2020) is ``("maximal", "common")``, their Algorithm 1
        ``("maximal_independent", "independent")``. Otherwise "mixture" for
        :func:`~ebmpp.moves.mixture_sweep`; one or several moves; or a function of the
        graph and its clamped blocks that returns moves, such as
        :func:`~ebmpp.moves.cluster_sweep`.
    :param exact: refuse moves that do not leave the model's distribution invariant, and
        pairs that could never meet.
    :raises ArgumentError: for an unknown coupling, or moves that are invalid, change a
        clamped block, or do not change every free one.
    :raises DeclarationError: for pairs that could never meet.
    :raises IntractableError: for interacting blocks in one layer, or summed out
        together.
    """
    return _resolve(graph, as_coupling("coupling", coupling), tuple(clamped), exact)


def as_coupling(name: str, value: CouplingLike) -> CouplingLike:
    """Return the argument ``coupling`` with a list as a tuple, so that it can be hashed."""
    if value is None or isinstance(value, str | Move) or callable(value):
        return value
    return tuple(checks.sequence(name, value, "kinds or moves"))


@functools.lru_cache(maxsize=256)  # kernels ask at every trace
def _resolve(
    graph: FactorGraph,
    coupling: Any,
    clamped: tuple[str, ...],
    exact: bool,
) -> tuple[Move, ...]:
    if coupling == "mixture":
        return mixture_sweep(graph, clamped)
    if callable(coupling):
        coupling = tuple(coupling(graph, clamped))
    if isinstance(coupling, Move):
        coupling = (coupling,)
    layers = schedule(graph, clamped)
    if isinstance(coupling, tuple) and all(isinstance(m, Move) for m in coupling):
        moves = coupling
        _check(graph, moves, {b for layer in layers for b in layer})
    else:
        kinds = resolve(coupling, layers)
        moves = tuple(map(Layer, layers, kinds))
    if exact:
        _check_meets(graph, moves)
        biased = [move for move in moves if not move.exact]
        if biased:  # its settings are longer than a value that `checks.error` shows
            raise ArgumentError(
                f"moves must leave the model's distribution invariant, got {biased[0]}."
            )
    return moves


def as_moves(name: str, value: MovesLike) -> tuple[Move, ...] | None:
    """Return one or several moves as a tuple, and None for None."""
    if value is None:
        return None
    if isinstance(value, Move):
        return (value,)
    expected = "moves, such as ebmpp.moves.cluster_sweep makes"
    moves = tuple(checks.sequence(name, value, expected))
    for move in moves:
        checks.instance(f"{name}: each", move, Move, "a move")
    return moves


def single_moves(
    name: str, graph: FactorGraph, value: MovesLike, clamped: Iterable[str] = ()
) -> tuple[Move, ...] | None:
    """Return moves of all free blocks that keep the model's distribution.

    None stays None, but for :func:`~ebmpp.moves.informed_sweep` where Gibbs sweeps are
    costly or have no closed form. A step of ParticleUCD on the network of
    benchmarks/any_energy/digits.py takes 3 times as long by Gibbs sweeps, at equal
    acceptance. Models with impossible states keep Gibbs sweeps, which leave these.
    """
    moves = as_moves(name, value)
    if moves is None and has_costly_sweeps(graph) and not graph.has_zeros:
        moves = informed_sweep(graph, clamped, num_steps=LOCAL_STEPS)
    for move in moves or ():
        if not move.exact:
            raise checks.error(name, "exact", move)
    return moves and resolve_moves(graph, moves, clamped, exact=False)


def _check(graph: FactorGraph, moves: Sequence[Move], free: set[str]) -> None:
    """Check each move, and that all free blocks change, those summed out once again."""
    changed = {b for move in moves for b in move.blocks}
    if changed != free:
        raise ArgumentError(
            "moves must change every free block and no other: they change "
            f"{sorted(changed)}, and the free blocks are {sorted(free)}."
        )
    for move, following in zip(moves, (*moves[1:], None), strict=True):
        move.check(graph)
        drawn = following.blocks if isinstance(following, Layer) else ()
        if not set(drawn).issuperset(move.marginalize):
            raise ArgumentError(
                f"moves must draw {move.marginalize}, which {move} sums out, by a Layer "
                f"directly after it, got {following}."
            )


def _check_meets(graph: FactorGraph, moves: Sequence[Move]) -> None:
    """Refuse pairs that approach one another and never meet, except by rounding."""
    separate = {
        b
        for move in moves
        for b in move.blocks
        if _shares_noise(move, graph.families[b])
    }
    # a block with shared noise meets once all that its distribution reads has
    for _ in range(len(separate)):
        for move in moves:
            if separate.isdisjoint(move.reads(graph)):
                separate -= set(move.blocks)
    if separate:
        names = ", ".join(repr(b) for b in graph.families if b in separate)
        raise DeclarationError(
            f"coupling must let real-valued blocks {names} meet: from shared noise they "
            "are equal only where their distributions are. Couple a layer of them by "
            '"maximal" or, if Gaussian, by "reflection".'
        )


def _shares_noise(move: Move, family: Family) -> bool:
    """Return True if a move makes units of this family equal only where their distributions are."""
    if not isinstance(move, Layer) or family.support.is_discrete:
        return False
    reflects = move.kind == "reflection" and type(family).reflect is not Family.reflect
    return not (reflects or stalls(move.kind))


def check_params(target: Target, moves: Iterable[Move]) -> None:
    """Check that moves accept the params, unless these are traced."""
    if is_concrete(target.params):
        for model in target.each_set():
            for move in moves:
                move.check_params(model.graph, model.params)


def mixture_of(moves: Iterable[object]) -> Mixture | None:
    """Return the move that proposes from a pool, or None."""
    mixtures = list(dict.fromkeys(move for move in moves if isinstance(move, Mixture)))
    if len(mixtures) > 1:
        raise checks.error("coupling", "moves with one Mixture move", mixtures)
    return mixtures[0] if mixtures else None


def with_pool(
    who: str,
    target: Target,
    moves: Sequence[Move],
    pool: Pool | Mapping[str, ArrayLike] | None,
    key: Key,
) -> Target:
    """Return the target with the pool that its moves propose from.

    :param pool: rows of some blocks, a :class:`~ebmpp.moves.target.Pool`, or None.
    :param key: draws the blocks that the rows lack.
    """
    move = mixture_of(moves)
    if move is None and pool is None:
        return target
    if move is None or pool is None:
        raise checks.error(
            f"{who}: pool",
            'states like draws of the model if coupling is "mixture" or a Mixture '
            "move, and otherwise None",
            pool,
        )
    if target.keep or target.batch:
        raise StateError(
            f"{who}: clamped must have no observed units and no leading axes beside a "
            f"pool, got {[*target.keep]} and {target.batch}. Pass coupling=None."
        )
    if not isinstance(pool, Pool):
        rows, batch = free_rows(f"{who}: pool", target, pool)
        if len(batch) != 1 or not batch[0]:
            raise checks.state_error(
                f"{who}: leading axes of pool", "one axis of rows", batch
            )
        pool = _make(target, move, rows, key)
    families = target.graph.families
    count = len(pool.log_normalizer)
    expected = {b: (count, *families[b].statistic_shape) for b in move.blocks}
    shapes = {b: e.shape for b, e in pool.eta.items()}
    if shapes != expected:
        raise checks.state_error(
            f"{who}: natural parameters of pool", f"of shapes {expected}", shapes
        )
    return dataclasses.replace(target, pool=pool)


def check_free(name: str, target: Target, values: object) -> None:
    """Refuse anything but a dict of values of free blocks."""
    if not isinstance(values, Mapping):
        raise checks.state_error(name, "a dict of blocks", values)
    checks.names(f"free block of {name}", values, target.free, StateError)


def free_rows(name: str, target: Target, values: Any) -> tuple[Blocks, BatchShape]:
    """Return a dict of values of free blocks as rows, and their leading axes."""
    check_free(name, target, values)
    return as_rows(target.graph.families, values)


def mixture_pool(
    graph: FactorGraph,
    params: Params,
    rows: State,
    *,
    rng_key: Array,
    coupling: CouplingLike = "mixture",
    **clamped: Array,
) -> Pool:
    """Return the pool of a mixture proposal, which kernels take beside the params.

    :param rows: states that resemble draws of the model, such as data:
        ``(rows, *shape)`` for each block. Other blocks are drawn given these where they
        are needed.
    :param rng_key: a jax key for those draws.
    :param coupling: "mixture", or the moves of a sweep.
    :param clamped: values of clamped blocks, without a batch axis.
    :raises ArgumentError: for a coupling that needs no pool.
    :raises IntractableError: for "mixture" and a graph whose free units do not
        interact.
    :raises StateError: for rows that do not fit the graph.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> params = rbm.init(jax.random.key(0))
    >>> rows = {"v": ebmpp.data.bars_and_stripes(3)}
    >>> pool = mixture_pool(rbm, params, rows, rng_key=jax.random.key(1))
    >>> pool.eta["h"].shape
    (16, 4)
    """
    key = random.key_pair(checks.key("mixture_pool: rng_key", rng_key))
    target = Target.checked("mixture_pool", graph, params, clamped)
    moves = resolve_moves(graph, coupling, target.clamped)
    target = with_pool("mixture_pool", target, moves, rows, key)
    assert target.pool is not None  # rows are given
    return target.pool


@functools.partial(jax.jit, static_argnames="move")
def _make(
    target: Target,
    move: Mixture,
    rows: Rows,
    key: Key,
) -> Pool:
    if not set(move.pool_blocks(target.graph)) <= set(rows):
        rows = complete_rows(target, rows, key)
    return make_pool(target, move, rows)


def complete_rows(target: Target, rows: Rows, key: Key) -> Blocks:
    """Return rows with draws of the other blocks, exact if these are one layer."""
    graph = target.graph
    count = num_rows(rows)
    held = Clamped({**target.clamped_rows(count), **rows})
    around = Target(graph, target.params, held)
    keys = random.fold_in(key, jnp.arange(count))
    num_sweeps = _SWEEPS if graph.interacting(around.free) else 1
    return draw_chains(around, keys, num_sweeps)
