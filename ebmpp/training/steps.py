# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training steps, compiled: a chunk of them is one program."""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from ebmpp.core import backend, random, sharding
from ebmpp.core.compile import compiled
from ebmpp.core.types import Key, Params
from ebmpp.errors import ArgumentError
from ebmpp.estimators import Batch, Estimator
from ebmpp.estimators.ucd import uses_fast_compile
from ebmpp.graph import FactorGraph
from ebmpp.training import optimizers
from ebmpp.training.batches import Selection
from ebmpp.training.history import Metrics

#: Steps of a chunk at most, and bytes of the batches that are copied side by side for one.
CHUNK, _MAX_BYTES = 50, 2**22
# A chunk ends when its sweeps have cost so many multiplications, about a second on two cores. It would else
# ignore Ctrl-C for minutes where chains meet late. This is a count, not a clock, so runs are reproducible.
_WORK, _WORK_ACCELERATED = 2.0**31, 2.0**35
_PER_UNIT = 32  # of drawing one unit, in multiplications: measured at 64-20 and 784-500


class State(NamedTuple):
    """Everything a step changes."""

    params: Params
    optimizer: Any
    estimator: Any
    ok: Array
    """False from the first step that was not finite."""


class Chunk(NamedTuple):
    """The outcome of consecutive steps."""

    state: State
    metrics: Metrics
    """One row per step, of which the first ``count`` are valid."""
    count: Array
    """How many steps were done: fewer than asked for where they were expensive."""


def chunk_size(batch: Selection) -> int:
    """Return how many steps with batches like this one fit into a program.

    1 over a mesh, and where copies of the rows would cost more than a chunk saves.
    """
    if not sharding.alone():
        return 1
    size = CHUNK * sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
    return CHUNK if batch.index is not None or size <= _MAX_BYTES else 1


def stacked(batches: Sequence[Selection], size: int) -> tuple[Selection, Selection]:
    """Return what all batches of a chunk share, and what each has, with a leading axis of ``size``."""
    padded = [*batches, *[batches[-1]] * (size - len(batches))]
    if batches[0].index is None:
        shared, each = Selection({}), padded
    else:  # rows stay on the device, and a batch is an index
        shared = batches[0]._replace(index=None, weights=None)
        each = [Selection({}, batch.index, batch.weights) for batch in padded]
    if size == 1:
        return shared, each[0]
    return shared, jax.tree.map(lambda *leaves: np.stack(leaves), *each)


@compiled(statics=3, fast_compile=lambda graph, estimator, *_, **__: uses_fast_compile(graph, estimator))
def run_chunk(
    graph: FactorGraph,
    estimator: Estimator,
    optimizer: optimizers.Comparable,
    key: Key,
    state: State,
    first: Array,
    count: Array,
    shared: Selection,
    each: Selection,
    offsets: Array | None = None,
) -> Chunk:
    """Run up to ``count`` steps, one after the other, in one program.

    A step depends on its number and on the state alone, so results do not depend on how steps are chunked.

    :param first: number of the first step.
    :param count: steps to do, at least 1 and at most the chunk's size.
    :param shared: of :func:`stacked`, as ``each``.
    :param offsets: 0, 1, 2, ... for each step of the chunk; None for a single step, whose batch has no
        leading axis.
    """
    if offsets is None:
        state, metrics, _ = _step(graph, estimator, optimizer, key, state, first, _merged(shared, each))
        return Chunk(state, jax.tree.map(lambda row: row[None], metrics), jnp.ones((), jnp.int32))
    budget = _WORK_ACCELERATED if backend.accelerated() else _WORK

    @jax.jit  # so that the shapes of its metrics and the loop share one tracing
    def step_at(i: Array, state: State) -> tuple[State, Metrics, Array]:
        batch = _merged(shared, jax.tree.map(lambda a: a[i], each))
        return _step(graph, estimator, optimizer, key, state, first + offsets[i], batch)

    def cond(carry: tuple) -> Array:
        i, work, *_ = carry
        return (i < count) & (work < budget)

    def body(carry: tuple) -> tuple:
        i, work, state, table = carry
        state, metrics, cost = step_at(i, state)
        table = jax.tree.map(lambda rows, row: rows.at[i].set(row), table, metrics)
        return i + 1, work + cost, state, table

    zero = jnp.zeros((), jnp.int32)
    like = jax.eval_shape(step_at, zero, state)[1]
    table = jax.tree.map(lambda a: jnp.zeros((len(offsets), *a.shape), a.dtype), like)
    done, _, state, table = lax.while_loop(cond, body, (zero, jnp.zeros(()), state, table))
    return Chunk(state, table, done)


def _merged(shared: Selection, each: Selection) -> Selection:
    """Return one batch."""
    return each if each.index is None else each._replace(rows=shared.rows, known=shared.known)


def _step(
    graph: FactorGraph,
    estimator: Estimator,
    optimizer: optimizers.Comparable,
    key: Key,
    state: State,
    step: ArrayLike,
    chosen: Selection,
) -> tuple[State, Metrics, Array]:
    """Make one gradient and one update; after a failure the params stay as they were.

    :return: the state, metrics, and the cost in multiplications.
    :raises ArgumentError: for an estimator whose gradient does not have the structure of the params.
    """
    take = lambda x: x if chosen.index is None else {b: v[chosen.index] for b, v in x.items()}
    batch = Batch.of(take(chosen.rows), take(chosen.known))
    if chosen.weights is not None:
        batch = batch._replace(weights=batch.weights * chosen.weights)
    batch = sharding.rows(batch)
    key = random.fold_in(key, step, 2)
    estimate = estimator.estimate(graph, state.params, state.estimator, batch, key)
    if optimizers.shapes(estimate.gradient) != optimizers.shapes(state.params):
        raise ArgumentError(
            f"{type(estimator).__name__}.estimate returned a gradient of shapes "
            f"{jax.tree.map(jnp.shape, estimate.gradient)}, and the params have "
            f"{jax.tree.map(jnp.shape, state.params)}"
        )
    params, moved, ok, norm = _update(optimizer, estimate.gradient, state)
    metrics = Metrics.of({"gradient_norm": norm, "ok": ok, **estimate.metrics})
    per_row = sum(np.size(a) for a in jax.tree.leaves(state.params)) + _PER_UNIT * sum(
        math.prod(family.shape) for family in graph.families.values()
    )
    cost = jnp.asarray(estimate.sweeps, jnp.float32) * (len(batch.weights) * per_row)
    return State(params, moved, estimate.state, ok), metrics, cost.astype(jnp.result_type(float))


def _update(
    optimizer: optimizers.Comparable, gradient: Params, state: State
) -> tuple[Params, Any, Array, Array]:
    updates, moved = optimizer.optimizer.update(gradient, state.optimizer, state.params)
    proposed = optax.apply_updates(state.params, updates)
    # Zero times what is not finite is nan: a sum is one pass, where asking number by number takes several.
    nothing = jax.tree.map(lambda g, p: jnp.sum(0 * g + 0 * p), gradient, proposed)
    ok = state.ok & jnp.isfinite(jnp.stack(jax.tree.leaves(nothing))).all()
    # The optimiser's state is not kept: training stops, and what failed is in no checkpoint.
    params = jax.tree.map(lambda new, old: jnp.where(ok, new, old), proposed, state.params)
    return params, moved, ok, optax.tree.norm(gradient)
