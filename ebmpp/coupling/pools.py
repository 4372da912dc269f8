# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pools of states whose conditionals form the mixture proposal."""

from collections.abc import Mapping, Sequence
import dataclasses
from functools import partial
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Blocks, Key, Params, Rows, checks, random
from ebmpp.errors import StateError
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import Clamped, as_rows
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.mixture import Mixture, make_pool
from ebmpp.moves.move import Move, draw_sweep, gibbs_sweep
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Pool, Target

_SWEEPS = 10  # that draw the missing blocks of a pool where they are not one layer


def mixture_of(moves: Sequence[Any]) -> Mixture | None:
    """Return the move that proposes from a pool, or None."""
    mixtures = list(dict.fromkeys(move for move in moves if isinstance(move, Mixture)))
    checks.require(len(mixtures) <= 1, "coupling", "moves with one Mixture move", mixtures)
    return mixtures[0] if mixtures else None


def with_pool(who: str, target: Target, moves: Sequence[Move], pool: Any, key: Key) -> Target:
    """Return the target with the pool that its moves propose from.

    :param pool: rows of some blocks, a :class:`~ebmpp.moves.target.Pool`, or None.
    :param key: draws the blocks that the rows lack.
    """
    move = mixture_of(moves)
    expected = 'states like draws of the model if coupling is "mixture" or a Mixture move, and otherwise None'
    checks.require((move is None) == (pool is None), f"{who}: pool", expected, pool)
    if move is None:
        return target
    clamped, hint = (list(target.keep), target.batch), "Pass coupling=None."
    expected = "without observed units and leading axes beside a pool"
    checks.require(not any(clamped), f"{who}: clamped", expected, clamped, StateError, hint)
    if not isinstance(pool, Pool):
        rows, batch = free_rows(f"{who}: pool", target, pool)
        is_valid = len(batch) == 1 and batch[0]
        checks.require(is_valid, f"{who}: leading axes of pool", "one axis of rows", batch, StateError)
        pool = _make(target, move, rows, key)
    count = len(pool.log_normalizer)
    expected = {b: (count, *target.graph.families[b].statistic_shape) for b in move.blocks}
    shapes = {b: e.shape for b, e in pool.eta.items()}
    name = f"{who}: natural parameters of pool"
    checks.require(shapes == expected, name, f"of shapes {expected}", shapes, StateError)
    return dataclasses.replace(target, pool=pool)


def free_rows(name: str, target: Target, values: Any) -> tuple[Blocks, tuple[int, ...]]:
    """Return a dict of values of free blocks as rows, and their leading axes."""
    checks.require(isinstance(values, Mapping), name, "a dict of blocks", values, StateError)
    checks.names(f"free block of {name}", values, target.free, StateError)
    return as_rows(target.graph.families, values)


def mixture_pool(
    graph: FactorGraph,
    params: Params,
    rows: Mapping[str, Array],
    *,
    rng_key: Array,
    coupling: Any = "mixture",
    **clamped: Array,
) -> Pool:
    """Return the pool of a mixture proposal, which kernels take beside the params.

    :param rows: states that resemble draws of the model, such as data: ``(rows, *shape)`` for each block.
        Other blocks are drawn given these where they are needed.
    :param rng_key: a jax key for those draws.
    :param coupling: "mixture", or the moves of a sweep.
    :param clamped: values of clamped blocks, without a batch axis.
    :raises ArgumentError: for a coupling that needs no pool.
    :raises IntractableError: for "mixture" and a graph whose free blocks are not two layers.
    :raises StateError: for rows that do not fit the graph.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> params = rbm.init(jax.random.key(0))
    >>> pool = mixture_pool(rbm, params, {"v": ebmpp.data.bars_and_stripes(3)}, rng_key=jax.random.key(1))
    >>> pool.eta["h"].shape
    (16, 4)
    """
    key = random.key_pair(checks.key("mixture_pool: rng_key", rng_key))
    target = Target.checked("mixture_pool", graph, params, clamped)
    target = with_pool("mixture_pool", target, resolve_moves(graph, coupling, target.clamped), rows, key)
    assert target.pool is not None  # rows are given
    return target.pool


@partial(jax.jit, static_argnames="move")
def _make(target: Target, move: Mixture, rows: Rows, key: Key) -> Pool:
    rows = rows if set(move.marginalize) <= set(rows) else complete_rows(target, rows, key)
    return make_pool(target.graph, target.params, move, rows, target.clamped)


def complete_rows(target: Target, rows: Rows, key: Key) -> Blocks:
    """Return rows with draws of the other blocks: exact if these are one layer, else by ten sweeps."""
    graph, count = target.graph, len(next(iter(rows.values())))
    clamped = {b: jnp.broadcast_to(v, (count, *v.shape[1:])) for b, v in target.clamped.items()}
    held = {**clamped, **rows}
    keys = random.fold_in(key, jnp.arange(count))
    free = tuple(b for b in graph.families if b not in held)
    x = held | initial_rows(graph, free, random.fold_in(keys, 0))
    around, moves = Target(graph, target.params, Clamped(held)), gibbs_sweep(graph, held)
    sweeps = _SWEEPS if graph.interacting(free) else 1
    step = lambda i, x: draw_sweep(around, x, moves, random.fold_in(keys, i + 1))[0]
    return lax.fori_loop(0, sweeps, step, x)
