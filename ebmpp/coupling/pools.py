# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pools: the states whose conditionals mixture proposals are made of."""

from collections.abc import Mapping, Sequence
import dataclasses
from functools import partial
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Blocks, Key, Params, Rows
from ebmpp.errors import ArgumentError, StateError
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import Clamped, as_clamped, as_rows
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.independence import Mixture, make_pool
from ebmpp.moves.move import Move, draw_sweep, gibbs_sweep
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Pool, Target

# Blocks of a pool that are not given, and are no layer given those that are.
_SWEEPS = 10


def mixture_of(moves: Sequence[Any]) -> Mixture | None:
    """The move that proposes from a pool, if there is one.

    :raises ArgumentError: for two that need different pools.
    """
    found = list(dict.fromkeys(move for move in moves if isinstance(move, Mixture)))
    if len(found) > 1:
        raise ArgumentError(f"there is one pool, and {found[0]} and {found[1]} propose from different ones")
    return found[0] if found else None


def with_pool(who: str, target: Target, moves: Sequence[Move], pool: Any, key: Key) -> Target:
    """The target with the pool that its moves propose from, checked; as it is where none does.

    :param who: for errors: the function that was called.
    :param pool: rows of some blocks, or a made :class:`~ebmpp.moves.target.Pool`, or None.
    :param key: for blocks that the rows lack.
    :raises ArgumentError: for a pool without a move that takes one, or the reverse.
    :raises StateError: for one that does not fit the graph, or beside values clamped one a pair.
    """
    move = mixture_of(moves)
    if move is None:
        if pool is not None:
            raise ArgumentError(f'{who}: a pool is for coupling="mixture", which proposes from it')
        return target
    if pool is None:
        raise ArgumentError(
            f'{who}: coupling="mixture" proposes from a pool of states that look like draws of the model: '
            f"give pool={{{move.marginalize[0]!r}: rows}}, or rows of other blocks, such as the data"
        )
    return dataclasses.replace(target, pool=_pool(who, target, move, pool, key))


def _pool(who: str, target: Target, move: Mixture, pool: Any, key: Key) -> Pool:
    held = target.given
    if held.keep or held.batch:
        told = "units of a block are observed" if held.keep else "clamped values have leading axes"
        raise StateError(
            f"{who}: a pool is of one law, and {told}, so that each pair has its own: give coupling=None"
        )
    if not isinstance(pool, Pool):
        pool = _make(target, move, _rows(who, target, pool), key)
    return _fitting(who, target, move, pool)


def mixture_pool(
    graph: FactorGraph,
    params: Params,
    rows: Mapping[str, Array],
    *,
    rng_key: Array,
    coupling: Any = "mixture",
    **clamped: Array,
) -> Pool:
    """What mixture proposals come from: for kernels, which are given it beside the params.

    :param rows: states that look like the model's draws, ``(rows, *shape)`` a block: of data, say. What is
        needed of other blocks is drawn given these.
    :param rng_key: a jax key, for that.
    :param coupling: "mixture", or the moves that are used.
    :param clamped: blocks held at values, without a batch axis.
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
    checks.instance("mixture_pool: graph", graph, FactorGraph, "a FactorGraph")
    graph.check(params)
    key = random.key_pair(checks.key("mixture_pool: rng_key", rng_key))
    target = Target(graph, params, as_clamped(graph.families, clamped))
    move = mixture_of(resolve_moves(graph, coupling, target.clamped))
    if move is None:
        raise ArgumentError(f"mixture_pool: coupling={coupling!r} has no Mixture move, so it needs no pool")
    return _pool("mixture_pool", target, move, rows, key)


def _rows(who: str, target: Target, pool: Any) -> Blocks:
    """:raises StateError: for what is no rows of free blocks."""
    if not isinstance(pool, Mapping) or not pool:
        raise StateError(f"{who}: pool is a dict of blocks, (rows, *shape) each, not {pool!r:.80}")
    rows, batch = as_rows(target.graph.families, pool)
    held = sorted(set(rows) & set(target.clamped))
    if held:
        raise StateError(f"{who}: block {held[0]!r} is clamped and in the pool: give it once")
    if len(batch) != 1 or batch[0] == 0:
        raise StateError(f"{who}: blocks of the pool have leading axes {batch}, expected one, of its states")
    return rows


def _fitting(who: str, target: Target, move: Mixture, pool: Pool) -> Pool:
    """:raises StateError: for a pool of another graph or move."""
    count = len(pool.log_normalizer)
    wanted = {b: (count, *target.graph.families[b].statistic_shape) for b in move.blocks}
    given = {b: e.shape for b, e in pool.eta.items()}
    if given != wanted:
        raise StateError(f"{who}: the pool has natural parameters of shapes {given}, expected {wanted}")
    return pool


@partial(jax.jit, static_argnames="move")
def _make(target: Target, move: Mixture, rows: Rows, key: Key) -> Pool:
    whole = rows
    if not set(move.marginalize) <= set(rows):
        whole = complete_rows(target, rows, key)
    return make_pool(target.graph, target.params, move, whole, target.clamped)


def complete_rows(target: Target, rows: Rows, key: Key) -> Blocks:
    """Rows with draws of the other blocks given them: exact where these are one layer, else by ten sweeps."""
    graph, count = target.graph, len(next(iter(rows.values())))
    clamped = {b: jnp.broadcast_to(v, (count, *v.shape[1:])) for b, v in target.clamped.items()}
    held = {**clamped, **rows}
    own = random.fold_in(key, jnp.arange(count))
    free = tuple(b for b in graph.families if b not in held)
    x = held | initial_rows(graph, free, random.fold_in(own, 0))
    given, moves = Target(graph, target.params, Clamped(held)), gibbs_sweep(graph, held)
    sweeps = _SWEEPS if graph.interacting(free) else 1
    step = lambda i, x: draw_sweep(given, x, moves, random.fold_in(own, i + 1))[0]
    return lax.fori_loop(0, sweeps, step, x)
