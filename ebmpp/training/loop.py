# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training loop: programs of steps, and observers between them."""

from collections import deque
from collections.abc import Mapping, Sequence
import itertools
from types import MappingProxyType

from jaxtyping import PyTree
import numpy as np

import jax
import jax.numpy as jnp

from ebmpp import errors
from ebmpp.core import Key, Params, backend, checks, num_rows, random, sharding
from ebmpp.estimators import Choice, Estimator, base
from ebmpp.estimators.base import Columns
from ebmpp.graph import FactorGraph
from ebmpp.training import optimizers
from ebmpp.training.batches import BatchSource, Prefetch, Selection, chunk_size
from ebmpp.training.history import Log, MetricTable, MonitorFn
from ebmpp.training.observers.base import Observer
from ebmpp.training.observers.checkpoints import CheckpointWriter
from ebmpp.training.observers.guard import Guard
from ebmpp.training.observers.progress import ProgressBar
from ebmpp.training.steps import Stages, StepProgram, TrainState, run_chunk, stacked


class Loop:
    """A run: batches through the stages' estimators and optimisers.

    :param key: the run's key; a step's draws depend on it and on the step's number.
    :param params: params before the first step.
    :param before: number of steps done before this run, which the draws continue.
    :param past: metrics of the steps before that belong to the first stage.
    """

    def __init__(
        self,
        graph: FactorGraph,
        stages: Stages,
        source: BatchSource,
        key: Key,
        params: Params,
        *,
        monitors: Mapping[str, MonitorFn] = MappingProxyType({}),
        before: int = 0,
        past: Columns = MappingProxyType({}),
    ) -> None:
        self.graph = graph
        self.stages = stages
        self.source = source
        self.key = key
        self.before = before
        self.past = past
        self.log = Log(monitors)
        self.guard = Guard(graph, stages, self.log, params)
        self.optimizers = []
        for stage in stages.stages:
            _check_missing(stage.estimator, source.sample())
            self.optimizers.append(
                optimizers.Comparable.for_params(stage.optimizer, params)
            )
        self._batches = Prefetch(source, stages.batch(stages.num_steps - 1))
        # numbers of the next steps, and their batches
        self._selected: deque[tuple[int, Selection]] = deque()
        self._choice = self.choose(-1)  # of the current steps
        # number of steps done, and their state
        self._recent: deque[tuple[int, TrainState]] = deque(maxlen=2)

    def begin(self, number: int, params: Params) -> TrainState:
        """Return the first state of a stage."""
        key = random.fold_in(self.key, number + self.before, 1)
        estimator = self.init(self._choice.estimator, params, key)
        optimizer = self.stages[number].optimizer.init(params)
        checks.on_host("fit", optimizer)
        return TrainState(params, optimizer, estimator, jnp.array(True))

    def init(self, estimator: Estimator, params: Params, key: Key) -> PyTree:
        """Return an estimator's state, placed as a step leaves it: else a step compiles twice."""
        rows = self.source.sample().rows
        state = estimator.init_state(
            self.graph, params, rows, self.source.batch_size, key
        )
        return sharding.place(state)

    def _enter(self, number: int, state: TrainState) -> TrainState:
        """Return the first state of a stage from the last one of the stage before."""
        estimator = self.stages[number].estimator
        self._choice = Choice(estimator)
        fresh = self.begin(number, state.params)
        adopted = estimator.adopt(state.estimator, fresh.estimator)
        expected = jax.tree.structure(fresh.estimator)
        structure = jax.tree.structure(adopted)
        if structure != expected:
            raise checks.error(
                f"{type(estimator).__name__}.adopt: value",
                f"of the structure {expected}",
                structure,
            )
        return fresh._replace(estimator=adopted, ok=state.ok)

    def proceed(
        self, estimator: PyTree, optimizer: PyTree, fresh: TrainState
    ) -> TrainState:
        """Return the first state of a run that continues the states of another run."""
        if base.shapes(estimator) != base.shapes(fresh.estimator):
            estimator = self._enter(0, fresh._replace(estimator=estimator)).estimator
        optimizer = optimizers.carried(optimizer, fresh.optimizer)
        place = sharding.place_like
        return fresh._replace(
            estimator=jax.tree.map(place, estimator, fresh.estimator),
            optimizer=jax.tree.map(place, optimizer, fresh.optimizer),
        )

    def template_at(self, step: int, first: TrainState) -> TrainState:
        """Return a state like the one after ``step`` steps, from the first state of the run."""
        if not step:
            return first
        number = self.stages.at(step - 1)
        self._choice = Choice(self.stages[number].estimator)
        return self._switch(step - 1, self.begin(number, first.params))

    def choose(self, step: int) -> Choice:
        """Return the estimator of a step, and the step of the next choice, by past steps alone."""
        number = self.stages.at(max(step, 0))
        columns = self.columns(number, step)
        choice = self.stages[number].estimator.choose(self.graph, columns)
        first = self.stages.first[number] - self._num_past(number)
        return choice._replace(until=min(first + choice.until, checks.LARGEST))

    def _num_past(self, number: int) -> int:
        return 0 if number or not self.past else num_rows(self.past)

    def columns(self, number: int, step: int) -> Columns:
        """Return metrics of a stage's steps before ``step``, including steps of past runs."""
        first = self.stages.first[number]
        columns = {}
        if step > first:
            columns = {n: v[first:] for n, v in self.log.steps.columns(step).items()}
        if count := self._num_past(number):
            return MetricTable(self.past, columns).columns(count + step)
        return columns

    def _switch(self, step: int, state: TrainState) -> TrainState:
        """Choose the estimator of the next steps, which adopts the state of the one before."""
        before = self._choice.estimator
        self._choice = self.choose(step)
        estimator = self._choice.estimator
        if estimator == before:
            return state
        key = random.fold_in(self.key, step + self.before, 4)
        fresh = self.init(estimator, state.params, key)
        adopted = estimator.adopt(state.estimator, fresh)
        return state._replace(estimator=sharding.place(adopted))

    def run(
        self,
        start: int,
        state: TrainState,
        observers: Sequence[Observer],
        bar: ProgressBar,
        checkpoints: CheckpointWriter | None = None,
    ) -> TrainState:
        """Run the steps from ``start`` on; return the state after the last.

        :param checkpoints: writes the state before a batch that is invalid.
        """
        step = start
        self._recent.append((start, state))
        with bar, self._batches:
            while True:
                is_last = step >= self.stages.num_steps
                for observer in (bar, *observers):
                    if observer.at(step, state, is_last):
                        is_last = True
                if is_last:
                    return state
                number = self.stages.at(step)
                is_first = step == self.stages.first[number]
                if number and is_first:
                    state = self._enter(number, state)
                if step == start or is_first or step >= self._choice.until:
                    state = self._switch(step, state)
                bar.begin((number, self._choice.estimator))
                stops = [observer.next_stop(step) for observer in observers]
                stop = min(self.stages.end(number), self._choice.until, *stops)
                try:
                    batches = self._select(step, stop, number)
                except errors.StateError as error:
                    self.guard.check(step, state)
                    if checkpoints is not None:
                        checkpoints.save(step, state)
                    raise self.log.failure(
                        errors.DataError,
                        f"training stopped at step {step}: {error} With "
                        "checkpoint_dir it can be resumed.",
                        state.params,
                        step,
                    ) from error
                state, step = self._run_chunk(step, number, state, batches)
                self._recent.append((step, state))
                # a step that never ends is the only one that runs
                backend.wait(self._recent[0][1].ok)

    def reached(self) -> tuple[int, TrainState]:
        """Return the number of steps that an interrupted run has done, and its state."""
        self.log.steps.discard_running()
        self.log.monitored.discard_running()
        return next(
            recent for recent in reversed(self._recent) if backend.is_ready(recent[1])
        )

    def _run_chunk(
        self, step: int, number: int, state: TrainState, batches: Sequence[Selection]
    ) -> tuple[TrainState, int]:
        """Run the steps of the batches, or fewer; return the state, and the next step."""
        size = chunk_size(batches[0])
        offsets = None if size == 1 else np.arange(size, dtype=np.uint32)
        optimizer = self.optimizers[number]
        state, metrics, done = run_chunk(
            StepProgram(self.graph, self._choice.estimator, optimizer),
            self.key,
            state,
            optimizer.numbers,
            np.uint32(step + self.before),
            np.int32(len(batches)),
            *stacked(batches, size),
            offsets,
        )
        sharding.block_on_cpu_mesh(state)
        if batches[0].index is not None:  # else a thread reads ahead
            self._read(step, self.stages.end(number), number, num_chunks=2)
        # a single step is not waited for
        count = 1 if len(batches) == 1 else int(backend.wait(done))
        constants = dict(self._choice.record)
        if self.stages.is_scheduled:
            constants["stage"] = number
        self.log.append(metrics, count, constants)
        return state, step + count

    def _select(self, step: int, stop: int, number: int) -> list[Selection]:
        """Return the batches of the next steps, up to an invalid one or one of another structure.

        :raises StateError: if the first one is invalid.
        """
        ready = self._selected
        while ready and ready[0][0] < step:
            ready.popleft()
        try:
            self._read(step, stop, number)
        except errors.StateError:
            if not ready:  # else it is raised again at its own step
                raise
        size = chunk_size(ready[0][1])
        batches = [batch for at, batch in itertools.islice(ready, size) if at < stop]
        # rows of a stream may have missing entries in some batches
        _, like_first = next(itertools.groupby(batches, jax.tree.structure))
        return list(like_first)

    def _read(self, step: int, stop: int, number: int, num_chunks: int = 1) -> None:
        """Make the batches of so many chunks from ``step`` on, up to ``stop``, ready."""
        ready = self._selected
        while (at := step + len(ready)) < stop and (
            not ready or len(ready) < num_chunks * chunk_size(ready[0][1])
        ):
            batch = self._batches.batch(self.stages.batch(at))
            _check_missing(self.stages[number].estimator, batch)
            ready.append((at, batch))


def _check_missing(estimator: Estimator, selection: Selection) -> None:
    """Raise StateError for missing entries that the estimator cannot treat."""
    if selection.known and not estimator.takes_missing:
        block, mask = next(iter(selection.known.items()))
        raise checks.state_error(
            f"block {block!r} of the data",
            f"without missing entries with {estimator!r}",
            mask,
            hint="Use UCD, CD or PCD, or fill them in with ebmpp.complete.",
        )
