# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training loop: steps, and the checks, monitors, checkpoints and display between them."""

from collections import deque
from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
import time
from typing import Any
import warnings

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import errors
from ebmpp.core import (
    Key,
    Params,
    archive,
    backend,
    checkpoints,
    checks,
    random,
    sharding,
)
from ebmpp.estimators import Choice, Estimator, base
from ebmpp.graph import FactorGraph, saving
from ebmpp.training import optimizers
from ebmpp.training.batches import Prefetch, Selection, Source, chunk_size
from ebmpp.training.callbacks import BestParams, Callback, PathRecorder, Progress
from ebmpp.training.checkpoint import Checkpoints, SharedCheckpoints, monitor_identity
from ebmpp.training.diagnosis import PairWatch, diagnose_fall
from ebmpp.training.history import Bar, Log, Watch
from ebmpp.training.steps import Method, Stages, State, run_chunk, stacked

# steps between checks that the params are finite, for which the device is waited for
_CHECK_EVERY = 50


@dataclasses.dataclass(eq=False)
class Loop:
    """A run: batches through the stages' estimators and optimisers.

    :param key: the run's key; a step's draws depend on it and on the step's number.
    :param interval: steps between monitor values.
    :param before: number of steps done before this run, which the draws continue.
    """

    graph: FactorGraph
    stages: Stages
    source: Source
    key: Key
    params: dataclasses.InitVar[Params]
    _: dataclasses.KW_ONLY
    monitors: Mapping[str, Watch] = dataclasses.field(default_factory=dict)
    interval: int = checks.LARGEST
    callbacks: Sequence[Callback] = ()
    best: BestParams | None = None
    path: PathRecorder | None = None
    before: int = 0

    def __post_init__(self, params: Params) -> None:
        stages = self.stages
        families = self.graph.families.values()
        self.batches = Prefetch(self.source, stages.batch(stages.num_steps - 1))
        self._recorders = [
            recorder for recorder in (self.best, self.path) if recorder is not None
        ]
        self.log = Log(self.monitors)
        # the params of the last check, and their step
        self._good = params
        self._checked = 0
        self._bounded = all(
            math.isfinite(b) for family in families for b in family.bounds
        )
        for stage in stages.stages:
            _check_missing(stage.estimator, self.source.sample())
        comparable = optimizers.Comparable.for_params
        self.optimizers = [
            comparable(stage.optimizer, params) for stage in stages.stages
        ]
        self._save: SharedCheckpoints | None = None
        self._save_every = checks.LARGEST
        self._saved = 0
        # batches of the next steps
        self._selected: deque[tuple[int, Selection]] = deque()
        self._units = sum(family.size for family in families)
        self._choice = Choice(stages[0].estimator)  # of the current steps
        self._pairs: PairWatch | None = PairWatch(0, stages.end(0), self._units)
        self._num_monitored = 0
        self._next_look = 10
        self._has_fallen = False
        # number of steps done, and their state
        self._recent: deque[tuple[int, State]] = deque(maxlen=2)

    def begin(self, number: int, params: Params) -> State:
        """Return the first state of a stage."""
        stage = self.stages[number]
        key = random.fold_in(self.key, number + self.before, 1)
        estimator = self._init(stage.estimator, params, key)
        return State(params, stage.optimizer.init(params), estimator, jnp.array(True))

    def _init(self, estimator: Estimator, params: Params, key: Key) -> Any:
        """Return an estimator's state, placed as a step leaves it, so that the second step is one program."""
        rows = self.source.sample().rows
        return sharding.place(
            estimator.init_state(self.graph, params, rows, self.source.batch_size, key)
        )

    def _enter(self, number: int, state: State) -> State:
        """Return the first state of a stage from the last one of the stage before."""
        fresh = self.begin(number, state.params)
        estimator = self.stages[number].estimator
        adopted = estimator.adopt(state.estimator, fresh.estimator)
        expected, structure = map(jax.tree.structure, (fresh.estimator, adopted))
        if structure != expected:
            raise checks.error(
                f"{type(estimator).__name__}.adopt: value",
                f"of the structure {expected}",
                structure,
            )
        return fresh._replace(estimator=adopted, ok=state.ok)

    def proceed(self, estimator: Any, optimizer: Any, fresh: State) -> State:
        """Return the first state of a run that continues the states of another run."""
        if base.shapes(estimator) != base.shapes(fresh.estimator):
            estimator = self._enter(0, fresh._replace(estimator=estimator)).estimator
        states = estimator, optimizers.carried(optimizer, fresh.optimizer)
        placed = jax.tree.map(
            sharding.place_like, states, (fresh.estimator, fresh.optimizer)
        )
        return fresh._replace(estimator=placed[0], optimizer=placed[1])

    def choose(self, step: int) -> Choice:
        """Return the estimator of a step by the stage's steps before, and the step of the next choice."""
        number = self.stages.at(step)
        first = self.stages.first[number]
        columns = (
            {n: v[first:] for n, v in self.log.steps.columns(step).items()}
            if step > first
            else {}
        )
        choice = self.stages[number].estimator.choose(self.graph, columns)
        return choice._replace(until=min(first + choice.until, checks.LARGEST))

    def _switch(self, step: int, state: State) -> State:
        """Choose the estimator of the next steps, and let it adopt the state of the one before."""
        before = self._choice.estimator
        self._choice = self.choose(step)
        estimator = self._choice.estimator
        if step in self.stages.first or estimator == before:
            return state
        fresh = self._init(
            estimator, state.params, random.fold_in(self.key, step + self.before, 4)
        )
        return state._replace(
            estimator=sharding.place(estimator.adopt(state.estimator, fresh))
        )

    def identity(self, state: State, rng_key: Array) -> dict[str, Any]:
        """Return JSON values that a resumed run must share; its last stage may be longer.

        :param state: the state before the first step.
        """
        graph = self.graph
        stages = self.stages
        estimators = [
            checkpoints.without_addresses(repr(stage.estimator))
            for stage in stages.stages
        ]
        lengths = [*(stage.num_steps for stage in stages.stages[:-1]), "the rest"]
        schedule = {
            "schedule": [list(pair) for pair in zip(lengths, estimators, strict=True)]
        }
        start = np.concatenate([np.ravel(a) for a in jax.tree.leaves(state.params)])
        return {
            "jax": jax.__version__,
            "graph": repr(graph),
            "energies": saving.energies(graph),
            "layers": saving.layers(graph),
            **(schedule if stages.scheduled else {"estimator": estimators[0]}),
            "optimizer": [optimizer.digest for optimizer in self.optimizers],
            "batch_size": self.source.batch_size,
            "monitors": {
                name: monitor_identity(fn, state)
                for name, fn in sorted(self.monitors.items())
            },
            "state": [
                [list(jnp.shape(a)), str(jnp.result_type(a))]
                for a in jax.tree.leaves(state)
            ],
            "start": archive.digest({"params": start}),
            **self.source.identity(),
            "rng_key": np.asarray(random.key_pair(rng_key)).tolist(),
            "monitor_every": self.interval,
            "keep_best": None
            if self.best is None
            else [self.best.name, self.best.mode],
            "keep_path": None if self.path is None else self.path.capacity,
            "steps_before": self.before,
        }

    def resume(
        self, save: SharedCheckpoints, interval: int, first: State
    ) -> tuple[int, State]:
        """Write checkpoints from now on, and restore the newest one.

        :param first: the state before the first step.
        :return: the number of steps done, and the state after them.
        """
        self._save = save
        self._save_every = interval
        saved = save.restore()
        if saved is None:
            return 0, first
        self._saved, arrays, history = saved
        Checkpoints.check_length(save.directory, self._saved, self.stages.num_steps)
        self.log.load(history, self._saved)
        template = first
        if self._saved:
            last = self._saved - 1
            number = self.stages.at(self._saved - 1)
            self._choice = Choice(self.stages[number].estimator)
            template = self._switch(last, self.begin(number, first.params))
        leaves = iter(arrays)

        def restore(leaf):
            return sharding.place_like(
                checkpoints.from_numbers(next(leaves), leaf), leaf
            )

        state = jax.tree.map(restore, template)
        for recorder in self._recorders:
            recorder.load(leaves)
        return self._saved, state

    def run(
        self, start: int, state: State, progress_bar: bool, deadline: float = math.inf
    ) -> State:
        """Run the steps from ``start`` on; return the state after the last.

        :param deadline: time of ``time.monotonic`` after which the run ends as if it
            had no more steps.
        """
        total = self.stages.num_steps
        step = start
        self._recent.append((start, state))
        hidden = not (progress_bar and sharding.is_first())
        with (
            Bar(total if total < checks.LARGEST else None, start, hidden) as bar,
            self.batches,
        ):
            while step < total:
                if self.path is not None:
                    self.path.record(step, state.params)
                if step % self.interval == 0:
                    has_stopped = self._monitor(step, state)
                    self._watch_likelihoods(has_stopped)
                    if has_stopped:
                        self._checkpoint(step, state)
                        return state
                number = self.stages.at(step)
                if number and step == self.stages.first[number]:
                    state = self._enter(number, state)
                if (
                    step == start
                    or step in self.stages.first
                    or step >= self._choice.until
                ):
                    state = self._switch(step, state)
                bar.begin((number, self._choice.estimator))
                # a program must end before monitors, checkpoints, checks, a stage or a
                # choice
                strides = (
                    self.interval,
                    self._save_every,
                    self.path.stride if self.path else checks.LARGEST,
                )
                ends = [step + n - step % n for n in strides] + [
                    step + 1 + -step % _CHECK_EVERY
                ]
                stop = min(self.stages.end(number), self._choice.until, *ends)
                state, stop = self._chunk(step, stop, number, state)
                self._recent.append((stop, state))
                # a step that never ends is the only one that runs
                backend.wait(self._recent[0][1].ok)
                bar.update(stop - step, state, self.log.latest)
                step = stop
                self._watch_pairs(number, step, state, deadline)
                if step % _CHECK_EVERY == 1 and not bool(backend.wait(state.ok)):
                    self._check(step, state)
                is_over = step < total and deadline < math.inf and _is_past(deadline)
                if step % self._save_every == 0 or step == total or is_over:
                    self._checkpoint(step, state)
                if is_over:
                    self.log.attrs["stopped_by"] = "max_seconds"
                    bar.stop("max_seconds")
                    break
        if self.path is not None:
            self.path.record(step, state.params)
        self._check(step, state)
        self._monitor(step, state)
        self._diagnose(state.params)
        self._watch_likelihoods(is_last=True)
        return state

    def reached(self) -> tuple[int, State]:
        """Return the number of steps done when the run was interrupted, and the state after them."""
        self.log.steps.discard_running()
        self.log.monitored.discard_running()
        return next(
            recent for recent in reversed(self._recent) if backend.is_ready(recent[1])
        )

    def _watch_pairs(
        self, number: int, step: int, state: State, deadline: float
    ) -> None:
        """Warn once if the pairs of a stage will take too many sweeps."""
        first = self.stages.first[number]
        if self._pairs is not None and self._pairs.first != first:
            self._pairs = PairWatch(first, self.stages.end(number), self._units)
        if self._pairs is None or not self._pairs.is_due(step):
            return
        backend.wait(state.ok)
        message = self._pairs.diagnose(self.log.steps.columns(), step, deadline)
        if message is not None:
            self._pairs = None
            warnings.warn(f"fit: {message}", stacklevel=4)

    def _watch_likelihoods(self, is_last: bool) -> None:
        """Warn once if a monitored likelihood has fallen, unless the params at its best are recorded."""
        names = [
            n
            for n, fn in self.log.monitors.items()
            if getattr(fn, "log_likelihood", False)
        ]
        self._num_monitored += 1
        if (
            not names
            or self._has_fallen
            or not (is_last or self._num_monitored >= self._next_look)
        ):
            return
        # seldom, since the device is waited for
        self._next_look = 5 * self._num_monitored // 4 + 10
        columns = self.log.monitored.columns()
        for name in names:
            message = diagnose_fall(
                name, columns["monitor_step"], columns[name], 1 if is_last else 2
            )
            if message is not None and (self.best is None or self.best.name != name):
                self._has_fallen = True
                warnings.warn(f"fit: {message}", stacklevel=4)
                return

    def _diagnose(self, params: Params) -> None:
        """Warn of what estimators report about their stages, and the last one about its chains."""
        columns = self.log.steps.columns()
        sample = self.source.sample()
        is_local = sharding.processes() == 1
        done = len(next(iter(columns.values())))
        stages = self.stages.stages[: self.stages.at(done - 1) + 1]
        for number, stage in enumerate(stages):
            steps = slice(self.stages.first[number], self.stages.end(number))
            history = {name: v[steps] for name, v in columns.items()}
            message = stage.estimator.diagnose(history)
            if (
                message is None
                and number == len(stages) - 1
                and is_local
                and not sample.known
            ):
                inputs = (
                    self.graph,
                    params,
                    sample.rows,
                    history,
                    random.fold_in(self.key, number, 2),
                )
                message = stage.estimator.diagnose_chains(*inputs)
            if message is not None:
                last = min(steps.stop, done) - 1
                warnings.warn(
                    f"fit: steps {steps.start} to {last}: {message}", stacklevel=4
                )

    def _check(self, done: int, state: State) -> None:
        """Raise TrainingError after ``done`` steps if one was not finite, or the model does not normalise."""
        failed = None
        if not bool(backend.wait(state.ok)):  # at the first step that was not finite
            failed = int(np.flatnonzero(~self.log.steps.columns()["ok"])[0])
        step = done if failed is None else failed
        try:
            if not self._bounded:  # else every model normalises
                self.graph.check(state.params)
        except errors.DomainError as error:
            message = (
                f"training stopped after step {step}: {error} The params after "
                f"{self._checked} steps were valid. Lower the learning rate, or keep "
                "the params in the domain by optimizers.projected(...)."
            )
            raise self.log.failure(
                errors.NormalizationError, message, self._good, step
            ) from error
        if failed is not None:
            message = f"training stopped at step {failed}: {self._reason(failed)}"
            raise self.log.failure(
                errors.DivergenceError, message, state.params, failed
            )
        self._good = state.params
        self._checked = done

    def _reason(self, step: int) -> str:
        """Return why a step was not finite, in words."""
        metrics = {name: v[step] for name, v in self.log.steps.columns().items()}
        unmet = np.nansum(
            [metrics.get(name, 0) for name in ("num_unmet", "posterior_num_unmet")]
        )
        if unmet:
            return (
                f"{unmet:.0f} coupled pairs of "
                f"{self.stages[self.stages.at(step)].estimator!r} had not met. Raise "
                "its max_sweeps (of ParticleUCD: max_systems), or see "
                "UCD(allow_unmet=True), which biases the gradient. Without a limit, "
                "params are too large for their floats: lower the learning rate."
            )
        norm = float(metrics["gradient_norm"])
        return (
            f"gradient or params were not finite (gradient norm {norm:.4g}). Lower the "
            "learning rate."
        )

    def _chunk(
        self, step: int, stop: int, number: int, state: State
    ) -> tuple[State, int]:
        """Run steps of one stage up to ``stop``; return the state after them, and the next step."""
        batches = self._select(step, stop, number, state)
        size = chunk_size(batches[0])
        steps = np.uint32(step + self.before), np.int32(len(batches))
        offsets = None if size == 1 else np.arange(size, dtype=np.uint32)
        args = (self.key, state, *steps, *stacked(batches, size), offsets)
        estimator = self._choice.estimator
        record = dict(self._choice.record)
        state, metrics, done = run_chunk(
            Method(self.graph, estimator, self.optimizers[number]), *args
        )
        sharding.block_on_cpu_mesh(state)
        # a single step is not waited for
        count = 1 if len(batches) == 1 else int(backend.wait(done))
        self.log.append(
            metrics,
            count,
            record | ({"stage": number} if self.stages.scheduled else {}),
        )
        return state, step + count

    def _select(
        self, step: int, stop: int, number: int, state: State
    ) -> list[Selection]:
        """Return the batches of a stage's next steps, up to an invalid one or one of another structure.

        :raises DataError: if the first one is invalid; a checkpoint is written before.
        """
        ready = self._selected
        while ready and ready[0][0] < step:
            ready.popleft()
        try:
            while (at := step + len(ready)) < stop and (
                not ready or len(ready) < chunk_size(ready[0][1])
            ):
                batch = self.batches.batch(self.stages.batch(at))
                _check_missing(self.stages[number].estimator, batch)
                ready.append((at, batch))
        except errors.StateError as error:
            if not ready:  # else it is raised again at its own step
                self._check(step, state)
                self._checkpoint(step, state)
                message = (
                    f"training stopped at step {step}: {error} With checkpoint_dir it "
                    "can be resumed."
                )
                raise self.log.failure(
                    errors.DataError, message, state.params, step
                ) from error
        batches = [batch for at, batch in ready if at < stop]
        # rows of a stream may have missing entries in some batches
        structure = jax.tree.structure(batches[0])
        return list(
            itertools.takewhile(
                lambda batch: jax.tree.structure(batch) == structure, batches
            )
        )

    def _monitor(self, step: int, state: State) -> bool:
        """Evaluate monitors and callbacks; return True if a callback stops the run."""
        # else the device need not be waited for
        if self.callbacks or not self._bounded:
            self._check(step, state)
        self.log.monitor(step, state.params, state.estimator)
        if self.best is not None:
            backend.wait(state.ok)
            self.best.record(
                step, self.log.monitored.last[self.best.name], state.params
            )
        if not self.callbacks:
            return False

        # new containers
        def copy(tree):
            return jax.tree.map(lambda leaf: leaf, tree)

        progress = Progress(
            step, copy(state.params), copy(state.estimator), self.log.dataset()
        )
        # a list, so that each is called
        return any([bool(fn(progress)) for fn in self.callbacks])

    def _checkpoint(self, steps: int, state: State) -> None:
        """Write a checkpoint, unless it exists; raise CheckpointWriteError if it cannot be written."""
        if self._save is None or steps == self._saved:
            return
        self._check(steps, state)  # a failed state is not saved
        recorded = [leaf for recorder in self._recorders for leaf in recorder.leaves()]
        leaves = [*map(checkpoints.as_numbers, jax.tree.leaves(state)), *recorded]
        try:
            self._save.save(steps, leaves, self.log.arrays())
        except OSError as error:
            message = (
                f"checkpoint {steps} cannot be written in {self._save.directory}: "
                f"{error}. Free disk space or fix the permissions, then resume=True "
                "continues from the checkpoint before."
            )
            raise self.log.failure(
                errors.CheckpointWriteError, message, state.params, steps
            ) from error
        self._saved = steps


def _is_past(deadline: float) -> bool:
    """Return True after a time of ``time.monotonic``, by the clock of the first process."""
    return bool(sharding.gather(np.array(time.monotonic() >= deadline))[0])


def _check_missing(estimator: Estimator, selection: Selection) -> None:
    """Raise StateError for missing entries that the estimator cannot treat."""
    block = next(iter(selection.known), "")
    if selection.known and not estimator.takes_missing:
        raise checks.error(
            f"block {block!r} of the data",
            f"without missing entries with {estimator!r}",
            selection.known.get(block),
            errors.StateError,
            "Use UCD, CD or PCD, or fill them in with ebmpp.complete.",
        )
