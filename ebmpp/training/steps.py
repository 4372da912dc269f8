# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Stages of a training run, and their compiled steps."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
import dataclasses
from functools import partial
import math
from typing import NamedTuple

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from ebmpp.core import (
    Key,
    Params,
    at_index,
    backend,
    checks,
    compiled,
    random,
    sharding,
)
from ebmpp.estimators import UCD, Batch, Estimator, base
from ebmpp.graph import FactorGraph
from ebmpp.training.batches import BatchSource, Selection
from ebmpp.training.history import Metrics
from ebmpp.training.optimizers import Comparable, as_transformation

# A chunk ends when its sweeps have cost so many multiplications, about a second on two
# cores. It would else ignore Ctrl-C for minutes where chains meet late. This is a
# count, not a clock, so runs are reproducible.
_WORK = 2.0**31
_WORK_ACCELERATED = 2.0**35
_DRAW_COST = 32  # of one unit, in multiplications: measured at 64-20 and 784-500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Part of a run with its own estimator and optimiser: see ``schedule`` of :func:`ebmpp.fit`.

    Params continue from the stage before. The optimiser starts again, and so does the
    estimator, unless its ``adopt(before, fresh)`` continues the state of the one
    before, such as persistent chains.

    :param num_steps: gradient steps. Give these or ``epochs``.
    :param epochs: passes over the data in place of ``num_steps``.
    :param estimator: default :class:`UCD`.
    :param optimizer: any optax transformation; default ``optax.adam(0.01)``.

    **References**

    1. Qiu, Zhang, Wang (2020), section 5: PCD for 500 steps, then UCD at a smaller
       rate.

    **Example**

    >>> import jax, optax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> stages = [ebmpp.Stage(num_steps=3, estimator=ebmpp.PCD(num_chains=20)),
    ...           ebmpp.Stage(num_steps=2, estimator=ebmpp.CD(k=2), optimizer=optax.sgd(0.01))]
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0),
    ...                 schedule=stages, progress_bar=False)
    >>> fit.history.stage.values.tolist()
    [0, 0, 0, 1, 1]
    """

    num_steps: int | None = None
    epochs: int | None = None
    estimator: Estimator = UCD()
    optimizer: optax.GradientTransformation = optax.adam(0.01)

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_steps", "epochs", optional=True)
        if (self.num_steps is None) == (self.epochs is None):
            raise checks.error(
                "Stage",
                "given either num_steps or epochs",
                (self.num_steps, self.epochs),
            )
        checks.instance(
            "estimator",
            self.estimator,
            Estimator,
            "one such as UCD() or CD(k=1)",
        )
        optimizer = as_transformation("optimizer", self.optimizer)
        object.__setattr__(self, "optimizer", optimizer)


class Stages:
    """Stages of one run, and the stage and batch of each step.

    :param source: batches of the run, for stages with ``epochs``.
    :param is_scheduled: True if the user gave a schedule; else there is one stage, the
        whole run.
    :param steps_before: number of steps, like the first stage's, whose batches the run
        leaves out.
    :raises ArgumentError: for a ``steps_per_batch`` that is not a positive int, or
        epochs of a stream without a length.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        source: BatchSource | None = None,
        is_scheduled: bool = False,
        steps_before: int = 0,
    ) -> None:
        self.stages = tuple(stages)
        self.is_scheduled = is_scheduled
        self.lengths: list[int] = []
        self.first: list[int] = []
        self.num_steps = 0
        self._first_batch: list[int] = []
        batch = 0
        for number, stage in enumerate(self.stages):
            name = f"{type(stage.estimator).__name__}: steps_per_batch"
            per_batch = checks.count(name, stage.estimator.steps_per_batch)
            if number == 0:
                batch = -(-steps_before // per_batch)
            length = stage.num_steps or 0
            if stage.epochs is not None and source is not None:
                length = source.batches_in(stage.epochs) * per_batch
            self.first.append(self.num_steps)
            self.lengths.append(length)
            self._first_batch.append(batch)
            self.num_steps += length
            batch += -(-length // per_batch)

    def __getitem__(self, number: int) -> Stage:
        return self.stages[number]

    def at(self, step: int) -> int:
        """Return the number of a step's stage."""
        return bisect_right(self.first, step) - 1

    def end(self, number: int) -> int:
        """Return the step after the last one of a stage."""
        return self.first[number] + self.lengths[number]

    def batch(self, step: int) -> int:
        """Return the number of a step's batch, which several steps may share."""
        number = self.at(step)
        per_batch = self.stages[number].estimator.steps_per_batch
        return self._first_batch[number] + (step - self.first[number]) // per_batch


class TrainState(NamedTuple):
    """Everything that a step changes; ``ok`` is False from the first step that was not finite."""

    params: Params
    optimizer: PyTree
    estimator: PyTree
    ok: Array


class StepProgram(NamedTuple):
    """Static part of a program of steps, compared by value."""

    graph: FactorGraph
    estimator: Estimator
    optimizer: Comparable


def stacked(batches: Sequence[Selection], size: int) -> tuple[Selection, Selection]:
    """Return the rows that a chunk's batches share, and the rest, with an axis of ``size``."""
    padded = [*batches, *[batches[-1]] * (size - len(batches))]
    shared = Selection({})
    if batches[0].index is not None:  # rows stay on the device, and a batch is an index
        shared = batches[0]._replace(index=None, weights=None)
        padded = [batch._replace(rows={}, known={}) for batch in padded]
    if size == 1:
        return shared, padded[0]
    return shared, jax.tree.map(lambda *leaves: np.stack(leaves), *padded)


class _Carry(NamedTuple):
    """Number of steps done, their cost, the state after them, and their metrics."""

    done: Array
    work: Array
    state: TrainState
    metrics: Metrics


@compiled(
    statics=1,
    fast_compile=lambda program, *_, **__: program.estimator.fast_compile(
        program.graph
    ),
)
def run_chunk(
    program: StepProgram,
    key: Key,
    state: TrainState,
    numbers: Sequence[Array],
    first: Array,
    count: Array,
    shared: Selection,
    parts: Selection,
    offsets: Array | None = None,
) -> tuple[TrainState, Metrics, Array]:
    """Run up to ``count`` consecutive steps in one program.

    A step depends on its number and on the state alone, so results do not depend on how
    steps are chunked.

    :param numbers: rates of the optimiser.
    :param first: number of the first step.
    :param shared: from :func:`stacked`, as ``parts``.
    :param offsets: 0, 1, 2, ... for each step of the chunk; None for a single step,
        whose batch has no leading axis.
    :return: the state, one row of metrics per step, and the number of steps: fewer
        where they are expensive.
    """
    if offsets is None:
        batch = _merged(shared, parts)
        state, metrics, _ = _step(program, key, state, numbers, first, batch)
        table = jax.tree.map(lambda row: row[None], metrics)
        return state, table, jnp.int32(1)
    budget = _WORK_ACCELERATED if backend.accelerated() else _WORK
    costs = []

    @jax.jit  # so that the shapes of its metrics and the loop share one tracing
    def step_at(i, state):
        batch = _merged(shared, jax.tree.map(lambda a: jnp.asarray(a)[i], parts))
        step = first + jnp.asarray(offsets)[i]
        state, metrics, cost = _step(program, key, state, numbers, step, batch)
        costs.append(cost)
        return state, metrics, jnp.asarray(cost, float)

    def cond(carry):
        return (carry.done < count) & (carry.work < budget)

    def body(carry):
        i = carry.done
        state, metrics, cost = step_at(i, carry.state)
        put = partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        table = jax.tree.map(put, carry.metrics, metrics)
        return _Carry(i + 1, carry.work + cost, state, table)

    zero = jnp.int32(0)
    _, metrics, _ = jax.eval_shape(step_at, zero, state)
    size = len(offsets)
    table = jax.tree.map(lambda a: jnp.zeros((size, *a.shape), a.dtype), metrics)
    start = _Carry(zero, jnp.zeros(()), state, table)
    if backend.accelerated() and isinstance(costs[0], int | float):

        def masked(i, carry):
            return jax.tree.map(partial(jnp.where, i < count), body(carry), carry)

        # of known length, without a synchronisation with the host per step
        length = min(size, math.ceil(budget / costs[0]))
        last = lax.fori_loop(0, length, masked, start)
    else:
        last = lax.while_loop(cond, body, start)
    return last.state, last.metrics, last.done


def _merged(shared: Selection, part: Selection) -> Selection:
    """Return a batch with the rows that it shares with others."""
    if part.index is None:
        return part
    return part._replace(rows=shared.rows, known=shared.known)


def _step(
    program: StepProgram,
    key: Key,
    state: TrainState,
    numbers: Sequence[Array],
    step: ArrayLike,
    selection: Selection,
) -> tuple[TrainState, Metrics, ArrayLike]:
    """Make one gradient and one update; return the state, metrics, and the cost in multiplications.

    After a failure the params stay as they were.
    """
    graph, estimator, optimizer = program
    batch = sharding.rows(_batch_of(selection))
    key = random.fold_in(key, step, 2)
    estimate = estimator.estimate(graph, state.params, state.estimator, batch, key)
    expected = base.shapes(state.params)
    shapes = base.shapes(estimate.gradient)
    if shapes != expected:
        raise checks.error(
            f"{type(estimator).__name__}.estimate: gradient",
            f"of the params' shapes {expected}",
            shapes,
        )
    update = _update(partial(optimizer.update, numbers), estimate.gradient, state)
    metrics = {"gradient_norm": update.norm, "ok": update.ok, **estimate.metrics}
    num_params = optax.tree.size(state.params)
    per_row = num_params + _DRAW_COST * graph.num_units
    sweeps = estimate.sweeps
    if not isinstance(sweeps, int | float):  # else each step costs the same
        sweeps = jnp.asarray(sweeps, jnp.float32)
    return (
        TrainState(update.params, update.optimizer, estimate.state, update.ok),
        Metrics.stack(metrics),
        sweeps * (len(batch.weights) * per_row),
    )


def _batch_of(selection: Selection) -> Batch:
    """Return the selected rows, as estimators take them."""
    rows = selection.rows
    known = selection.known
    if selection.index is not None:
        rows, known = at_index((rows, known), selection.index)
    batch = Batch.uniform(rows, known)
    if selection.weights is None:
        return batch
    return batch._replace(weights=batch.weights * selection.weights)


class _Update(NamedTuple):
    """Params, optimiser's state and ``ok`` after a step, and the gradient's norm."""

    params: Params
    optimizer: PyTree
    ok: Array
    norm: Array


def _update(
    optimizer: Callable[..., PyTree], gradient: Params, state: TrainState
) -> _Update:
    def zero(g, p):
        # Zero times what is not finite is nan: a sum takes one pass, a test of each
        # number several.
        return jnp.sum(0 * g + 0 * p)

    def apply(gradient):
        updates, moved = optimizer(gradient, state.optimizer, state.params)
        proposed = optax.apply_updates(state.params, updates)
        zeros = jax.tree.map(zero, gradient, proposed)
        ok = state.ok & jnp.isfinite(sum(jax.tree.leaves(zeros)))
        # The optimiser's state is not restored: training stops, and no checkpoint keeps
        # a failed step.
        params = jax.tree.map(partial(jnp.where, ok), proposed, state.params)
        return _Update(params, moved, ok, optax.tree.norm(gradient))

    if backend.accelerated():  # a branch waits for the device
        return apply(gradient)

    # XLA would compute the gradient again in each of the optimiser's kernels, but not
    # across a branch: a step of PCD compiles in 0.8 of the time.
    def skip(gradient):
        norm = jax.eval_shape(optax.tree.norm, gradient)
        nan = jnp.full((), jnp.nan, norm.dtype)
        return _Update(state.params, state.optimizer, state.ok, nan)

    return lax.cond(state.ok, apply, skip, gradient)
