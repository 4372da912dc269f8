# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Stages of a training run, and their compiled steps."""

from bisect import bisect_right
from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from ebmpp.core import Key, Params, backend, checks, random, sharding
from ebmpp.core.compile import compiled
from ebmpp.estimators import UCD, Batch, Estimator, base
from ebmpp.graph import FactorGraph
from ebmpp.training.batches import Selection
from ebmpp.training.history import Metrics
from ebmpp.training.optimizers import Comparable

# A chunk ends when its sweeps have cost so many multiplications, about a second on two
# cores. It would else ignore Ctrl-C for minutes where chains meet late. This is a
# count, not a clock, so runs are reproducible.
_WORK = 2.0**31
_WORK_ACCELERATED = 2.0**35
_PER_UNIT = 32  # of drawing one unit, in multiplications: measured at 64-20 and 784-500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Part of a run with its own estimator and optimiser: see ``schedule`` of :func:`ebmpp.fit`.

    Params continue from the stage before. The optimiser starts again, and so does the
    estimator, unless its ``adopt(before, fresh)`` continues the state of the one
    before, such as persistent chains.

    :param num_steps: gradient steps.
    :param estimator: default :class:`UCD`.
    :param optimizer: any optax transformation; default ``optax.sgd(0.1)``.

    **References**

    1. Qiu, Zhang, Wang (2020), section 5: PCD for 500 steps, then UCD at a smaller
       rate.

    **Example**

    >>> import jax, optax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> stages = [ebmpp.Stage(num_steps=3, estimator=ebmpp.PCD(num_chains=20)),
    ...           ebmpp.Stage(num_steps=2, estimator=ebmpp.CD(k=2), optimizer=optax.sgd(0.01))]
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), schedule=stages,
    ...                 progress_bar=False)
    >>> fit.history.stage.values.tolist()
    [0, 0, 0, 1, 1]
    """

    num_steps: int
    estimator: Estimator = UCD()
    optimizer: optax.GradientTransformation = optax.sgd(0.1)

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_steps")
        checks.instance(
            "Stage: estimator",
            self.estimator,
            Estimator,
            "one such as UCD() or CD(k=1)",
        )
        what = "an optax transformation such as optax.sgd(0.1)"
        checks.instance(
            "Stage: optimizer", self.optimizer, optax.GradientTransformation, what
        )


class Stages:
    """Stages of one run, and the stage and batch of each step.

    ``batches_before`` is the number of batches of rows before the run's first one.

    :param scheduled: True if the user gave a schedule; else there is one stage, the
        whole run.
    :raises ArgumentError: for invalid stages, or a ``steps_per_batch`` that is not a
        positive int.
    """

    def __init__(self, stages: Sequence[Stage], scheduled: bool) -> None:
        self.stages = tuple(checks.sequence("fit: schedule", stages, "stages"))
        self.scheduled = scheduled
        checks.count("fit: number of stages in schedule", len(self.stages))
        self.first = [0]
        self._first_batch = [0]
        self.batches_before = 0
        for stage in self.stages:
            checks.instance("fit: schedule's entry", stage, Stage, "an ebmpp.Stage")
            name = f"{type(stage.estimator).__name__}: steps_per_batch"
            per_batch = checks.count(name, stage.estimator.steps_per_batch)
            self.first.append(self.first[-1] + stage.num_steps)
            self._first_batch.append(
                self._first_batch[-1] - (-stage.num_steps // per_batch)
            )
        self.num_steps = self.first.pop()

    def __getitem__(self, number: int) -> Stage:
        return self.stages[number]

    def at(self, step: int) -> int:
        """Return the number of a step's stage."""
        return bisect_right(self.first, step) - 1

    def end(self, number: int) -> int:
        """Return the step after the last one of a stage."""
        return self.first[number] + self.stages[number].num_steps

    def batch(self, step: int) -> int:
        """Return the number of a step's batch, which several steps may share."""
        number = self.at(step)
        per_batch = self.stages[number].estimator.steps_per_batch
        return (
            self.batches_before
            + self._first_batch[number]
            + (step - self.first[number]) // per_batch
        )


class State(NamedTuple):
    """Everything that a step changes; ``ok`` is False from the first step that was not finite."""

    params: Params
    optimizer: Any
    estimator: Any
    ok: Array


class Method(NamedTuple):
    """Static part of a program of steps, compared by value."""

    graph: FactorGraph
    estimator: Estimator
    optimizer: Comparable


def stacked(batches: Sequence[Selection], size: int) -> tuple[Selection, Selection]:
    """Return the rows that all batches of a chunk share, and the rest, with a leading axis of ``size``."""
    padded = [*batches, *[batches[-1]] * (size - len(batches))]
    if batches[0].index is None:
        shared = Selection({})
        parts = padded
    else:  # rows stay on the device, and a batch is an index
        shared = batches[0]._replace(index=None, weights=None)
        parts = [Selection({}, batch.index, batch.weights) for batch in padded]
    if size == 1:
        return shared, parts[0]
    return shared, jax.tree.map(lambda *leaves: np.stack(leaves), *parts)


@compiled(
    statics=1,
    fast_compile=lambda method, *_, **__: method.estimator.fast_compile(method.graph),
)
def run_chunk(
    method: Method,
    key: Key,
    state: State,
    first: Array,
    count: Array,
    shared: Selection,
    parts: Selection,
    offsets: Array | None = None,
) -> tuple[State, Metrics, Array]:
    """Run up to ``count`` consecutive steps in one program.

    A step depends on its number and on the state alone, so results do not depend on how
    steps are chunked.

    :param first: number of the first step.
    :param shared: from :func:`stacked`, as ``parts``.
    :param offsets: 0, 1, 2, ... for each step of the chunk; None for a single step,
        whose batch has no leading axis.
    :return: the state, one row of metrics per step, and the number of steps: fewer
        where they are expensive.
    """
    if offsets is None:
        state, metrics, _ = _step(method, key, state, first, _merged(shared, parts))
        return (
            state,
            jax.tree.map(lambda row: row[None], metrics),
            jnp.ones((), jnp.int32),
        )
    budget = _WORK_ACCELERATED if backend.accelerated() else _WORK

    @jax.jit  # so that the shapes of its metrics and the loop share one tracing
    def step_at(i: Array, state: State) -> tuple[State, Metrics, Array]:
        batch = _merged(shared, jax.tree.map(lambda a: a[i], parts))
        return _step(method, key, state, first + offsets[i], batch)

    def cond(carry: tuple) -> Array:
        i, work, *_ = carry
        return (i < count) & (work < budget)

    def body(carry: tuple) -> tuple:
        i, work, state, table = carry
        state, metrics, cost = step_at(i, state)
        table = jax.tree.map(lambda rows, row: rows.at[i].set(row), table, metrics)
        return i + 1, work + cost, state, table

    zero = jnp.zeros((), jnp.int32)
    metrics = jax.eval_shape(step_at, zero, state)[1]
    table = jax.tree.map(
        lambda a: jnp.zeros((len(offsets), *a.shape), a.dtype), metrics
    )
    done, _, state, table = lax.while_loop(
        cond, body, (zero, jnp.zeros(()), state, table)
    )
    return state, table, done


def _merged(shared: Selection, part: Selection) -> Selection:
    return (
        part
        if part.index is None
        else part._replace(rows=shared.rows, known=shared.known)
    )


def _step(
    method: Method, key: Key, state: State, step: ArrayLike, selection: Selection
) -> tuple[State, Metrics, Array]:
    """Make one gradient and one update; return the state, metrics, and the cost in multiplications.

    After a failure the params stay as they were.
    """
    graph, estimator, optimizer = method

    def take(x):
        return (
            x
            if selection.index is None
            else {b: v[selection.index] for b, v in x.items()}
        )

    batch = Batch.uniform(take(selection.rows), take(selection.known))
    if selection.weights is not None:
        batch = batch._replace(weights=batch.weights * selection.weights)
    batch = sharding.rows(batch)
    key = random.fold_in(key, step, 2)
    estimate = estimator.estimate(graph, state.params, state.estimator, batch, key)
    expected = base.shapes(state.params)
    if base.shapes(estimate.gradient) != expected:
        raise checks.error(
            f"{type(estimator).__name__}.estimate: gradient",
            f"of the params' shapes {expected}",
            base.shapes(estimate.gradient),
        )
    params, moved, ok, norm = _update(optimizer, estimate.gradient, state)
    metrics = Metrics.stack({"gradient_norm": norm, "ok": ok, **estimate.metrics})
    units = sum(family.size for family in graph.families.values())
    per_row = sum(np.size(a) for a in jax.tree.leaves(state.params)) + _PER_UNIT * units
    cost = jnp.asarray(estimate.sweeps, jnp.float32) * (len(batch.weights) * per_row)
    return (
        State(params, moved, estimate.state, ok),
        metrics,
        cost.astype(jnp.result_type(float)),
    )


def _update(
    optimizer: Comparable, gradient: Params, state: State
) -> tuple[Params, Any, Array, Array]:
    def apply(gradient: Params) -> tuple[Params, Any, Array, Array]:
        updates, moved = optimizer.optimizer.update(
            gradient, state.optimizer, state.params
        )
        proposed = optax.apply_updates(state.params, updates)
        # Zero times what is not finite is nan: a sum takes one pass, a test of each
        # number several.
        zeros = jax.tree.map(lambda g, p: jnp.sum(0 * g + 0 * p), gradient, proposed)
        ok = state.ok & jnp.isfinite(sum(jax.tree.leaves(zeros)))
        # The optimiser's state is not restored: training stops, and no checkpoint keeps
        # a failed step.
        params = jax.tree.map(
            lambda new, old: jnp.where(ok, new, old), proposed, state.params
        )
        return params, moved, ok, optax.tree.norm(gradient)

    if backend.accelerated():  # a branch waits for the device
        return apply(gradient)

    # XLA would compute the gradient again in each of the optimiser's kernels, but not
    # across a branch: a step of PCD compiles in 0.8 of the time.
    def skip(_):
        return (
            state.params,
            state.optimizer,
            state.ok,
            jnp.full((), jnp.nan, norm.dtype),
        )

    norm = jax.eval_shape(optax.tree.norm, gradient)
    return lax.cond(state.ok, apply, skip, gradient)
