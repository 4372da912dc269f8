# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The steps of a training run, and what happens between them."""

from collections import deque
from collections.abc import Mapping, Sequence
import time
from types import MappingProxyType
from typing import Any
import warnings

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random, sharding
from ebmpp.core.types import Key, Params
from ebmpp.errors import ArgumentError, CheckpointWriteError, DataError, StateError
from ebmpp.estimators import Estimator
from ebmpp.graph import FactorGraph
from ebmpp.training import optimizers
from ebmpp.training.ahead import Ahead
from ebmpp.training.bar import Bar
from ebmpp.training.batches import Selection, Source
from ebmpp.training.callbacks import Best, Callback, Progress
from ebmpp.training.checkpoint import Checkpoints, OfProcesses
from ebmpp.training.guard import Guard
from ebmpp.training.history import Log
from ebmpp.training.schedule import Stages
from ebmpp.training.steps import State, chunk_size, run_chunk, stacked
from ebmpp.training.trail import Trail
from ebmpp.training.watching import Watch

_LOOK_EVERY = 50  # steps between looks at the device when nothing is shown


def _check_missing(estimator: Estimator, given: Selection) -> None:
    """:raises StateError: where rows lack entries and the estimator does not know what to make of that."""
    if given.known and not estimator.takes_missing:
        raise StateError(
            f"block {next(iter(given.known))!r} of the data has missing entries, and {estimator!r} trains on "
            "whole rows; UCD, CD, PCD and their kin train on what is known, and ebmpp.complete fills it in"
        )


class Loop:
    """A run: the source's batches through the stages' estimators and optimisers, with what looks on.

    :param key: the run's; a step's draws depend on it and on the step's number.
    :param params: where it starts: a model that normalises.
    :param every: steps between monitor values.
    :param best: what keeps the best params, or None.
    :param trail: what keeps params on the way, or None.
    """

    def __init__(
        self,
        graph: FactorGraph,
        stages: Stages,
        source: Source,
        key: Key,
        params: Params,
        *,
        monitors: Mapping[str, Watch] = MappingProxyType({}),
        every: int = checks.LARGEST,
        callbacks: Sequence[Callback] = (),
        best: Best | None = None,
        trail: Trail | None = None,
    ) -> None:
        self.graph, self.stages, self.source, self.key = graph, stages, source, key
        self.every, self.callbacks = every, callbacks
        self.batches = Ahead(source, stages.batch(stages.num_steps - 1))
        self.best, self.trail = best, trail
        self.log = Log(monitors)
        self.guard = Guard(graph, params, self.log)
        self.save: Checkpoints | OfProcesses | None = None
        for stage in stages.stages:
            _check_missing(stage.estimator, source.sample())
            optimizers.check(stage.optimizer, params)
        self._optimizers = [optimizers.Comparable.of(stage.optimizer, params) for stage in stages.stages]
        self._save_every = self._saved = 0
        self._looked = 0.0
        self._selected: deque[tuple[int, Selection]] = deque()  # batches of the next steps

    @property
    def _kept(self) -> list[Best | Trail]:
        """What is kept of the run beside its state."""
        return [each for each in (self.best, self.trail) if each is not None]

    # -- states ----------------------------------------------------------------------------------

    def begin(self, number: int, params: Params) -> State:
        """The state in which stage ``number`` begins."""
        stage, rows = self.stages[number], self.source.sample().rows
        key = random.fold_in(self.key, number, 1)
        estimator = stage.estimator.init(self.graph, params, rows, self.source.batch_size, key)
        # placed as the first step leaves it, so that the second is the same program
        return State(params, stage.optimizer.init(params), sharding.place(estimator), jnp.array(True))

    def _enter(self, number: int, state: State) -> State:
        """From one stage to the next."""
        fresh = self.begin(number, state.params)._replace(ok=state.ok)
        adopted = self.stages[number].estimator.adopt(state.estimator, fresh.estimator)
        if jax.tree.structure(adopted) != jax.tree.structure(fresh.estimator):
            name = type(self.stages[number].estimator).__name__
            raise ArgumentError(
                f"{name}.adopt returned a pytree of another structure than the fresh state it was given: "
                f"{jax.tree.structure(adopted)}, not {jax.tree.structure(fresh.estimator)}"
            )
        return fresh._replace(estimator=adopted)

    def keep(self, save: Checkpoints | OfProcesses, every: int, first: State) -> tuple[int, State]:
        """Checkpoints from now on.

        :param first: the state before the first step.
        :return: the steps that were done when the run stopped, and the state after them.
        :raises CheckpointError: for one of more steps than this run has.
        """
        self.save, self._save_every = save, every
        found = save.restore()
        if found is None:
            return 0, first
        save.check_length(found.step, self.stages.num_steps)
        like = self.begin(self.stages.at(found.step - 1), first.params) if found.step else first
        count = len(jax.tree.leaves(like))
        leaves = map(_as_leaf, found.leaves[:count], jax.tree.leaves(like))
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        self.log.load(found.history, found.step)
        rest = found.leaves[count:]
        for kept in self._kept:
            size = len(kept.leaves())
            kept.load(rest[:size])
            rest = rest[size:]
        self._saved = found.step
        return found.step, state

    # -- the run ---------------------------------------------------------------------------------

    def run(self, start: int, state: State, progress_bar: bool) -> State:
        """The steps from ``start`` on; the state after the last."""
        total, step = self.stages.num_steps, start
        hidden = not (progress_bar and sharding.is_first())
        with Bar(total, start, hidden) as bar, self.batches:
            while step < total:
                if self.trail is not None:
                    self.trail.see(step, state.params)
                if step % self.every == 0 and self._monitor(step, state):
                    self._checkpoint(step, state)
                    return state
                number = self.stages.at(step)
                if number and step == self.stages.first[number]:
                    state = self._enter(number, state)
                bar.begin(number)
                state, stop = self._chunk(step, self._stop(step, number), number, state)
                bar.made(stop - step, state)
                step = stop
                if self.trail is not None:
                    self.trail.see(step, state.params)
                self._show(step, state, bar, progress_bar)
                if self.save is not None and (step % self._save_every == 0 or step == total):
                    self._checkpoint(step, state)
        self._look(total, state)
        self._monitor(total, state)
        self._caution()
        return state

    def _caution(self) -> None:
        """Warn of what estimators have to say of their stages."""
        columns = self.log.steps.columns()
        for number, stage in enumerate(self.stages.stages):
            at = slice(self.stages.first[number], self.stages.end(number))
            told = stage.estimator.diagnose({name: v[at] for name, v in columns.items()})
            if told is not None:
                warnings.warn(f"fit: steps {at.start} to {at.stop - 1}: {told}", stacklevel=4)

    def _stop(self, step: int, number: int) -> int:
        """Before which step there is next something to do beside steps."""
        every = [self.every, *([self._save_every] if self.save is not None else ())]
        every += [] if self.trail is None else [self.trail.stride]
        looks = step + 1 + -step % _LOOK_EVERY
        return min(self.stages.end(number), looks, *(step + n - step % n for n in every))

    def _look(self, done: int, state: State, needed: bool = True) -> None:
        """:raises TrainingError: where the run is not what it should be after ``done`` steps."""
        estimator = self.stages[self.stages.at(max(0, done - 1))].estimator
        self.guard.look(done, state.params, state.ok, estimator, needed)

    def _chunk(self, step: int, stop: int, number: int, state: State) -> tuple[State, int]:
        """Run steps from ``step`` to at most before ``stop``, all of one stage.

        :return: the state after them, and the step that is next.
        """
        stage, batches = self.stages[number], self._select(step, stop, number, state)
        size = chunk_size(batches[0])
        steps = np.uint32(step), np.int32(len(batches))
        offsets = None if size == 1 else np.arange(size, dtype=np.uint32)
        args = (self.key, state, *steps, *stacked(batches, size), offsets)
        chunk = run_chunk(self.graph, stage.estimator, self._optimizers[number], *args)
        sharding.settle(chunk.state)
        count = 1 if len(batches) == 1 else int(chunk.count)  # a single step need not be waited for
        self.log.append(chunk.metrics, count, {"stage": number} if self.stages.scheduled else {})
        return chunk.state, step + count

    def _select(self, step: int, stop: int, number: int, state: State) -> list[Selection]:
        """The batches of steps of a stage; those before one that is wrong are trained on first.

        :raises DataError: where the first one is; a checkpoint keeps what was done.
        """
        ready = self._selected
        while ready and ready[0][0] < step:
            ready.popleft()
        try:
            while (at := step + len(ready)) < stop and (not ready or len(ready) < chunk_size(ready[0][1])):
                batch = self.batches.batch(self.stages.batch(at))
                _check_missing(self.stages[number].estimator, batch)
                ready.append((at, batch))
        except StateError as error:
            if not ready:  # else it is raised again by the step it belongs to
                self._look(step, state)
                self._checkpoint(step, state)
                raise DataError(
                    f"training stopped at step {step}: {error}. The error's .params are those before that "
                    "step, and .history holds the steps before; with checkpoint_dir the run can be resumed "
                    "here",
                    state.params,
                    self.log.dataset(),
                    step,
                ) from error
        return [batch for at, batch in ready if at < stop]

    def _monitor(self, step: int, state: State) -> bool:
        """Whether a callback stops the run."""
        if self.callbacks or not self.guard.bounded:  # else nobody needs to wait for the device
            self._look(step, state)
        self.log.monitor(step, state.params, state.estimator)
        if self.best is not None:
            self.best.see(step, self.log.monitored.last[self.best.name], state.params)
        if not self.callbacks:
            return False
        progress = Progress(step, _own(state.params), _own(state.estimator), self.log.dataset())
        return any([bool(fn(progress)) for fn in self.callbacks])  # a list: each of them is called

    def _show(self, done: int, state: State, bar: Bar, shown: bool) -> None:
        # processes that work together look at the same steps, whatever their clocks say
        shown = shown and sharding.processes() == 1
        if (shown and time.monotonic() - self._looked > 0.5) or done % _LOOK_EVERY == 1:
            bar.tell(self.log.latest)
            self._look(done, state, needed=False)
            self._looked = time.monotonic()

    def _checkpoint(self, steps: int, state: State) -> None:
        """:raises CheckpointWriteError: where it cannot be written."""
        if self.save is None or steps == self._saved:
            return
        self._look(steps, state)  # what failed is not kept
        kept = [leaf for each in self._kept for leaf in each.leaves()]
        try:
            self.save.save(steps, [*map(_as_numbers, jax.tree.leaves(state)), *kept], self.log.arrays())
        except OSError as error:
            raise CheckpointWriteError(
                f"checkpoint {steps} cannot be written in {self.save.directory}: {error}. Mend the disk, and "
                "resume=True goes on from the checkpoint before. The error's .params are those after "
                f"{steps} steps, and .history holds these steps",
                state.params,
                self.log.dataset(),
                steps,
            ) from error
        self._saved = steps


def _own(tree: Any) -> Any:
    """The same arrays in containers of one's own."""
    return jax.tree.map(lambda leaf: leaf, tree)


def _as_numbers(leaf: Any) -> Any:
    """A leaf of the state as numbers: an optimiser that adds noise carries a jax key."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_leaf(numbers: np.ndarray, like: Any) -> Array:
    if _is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(numbers), impl=jax.random.key_impl(like))
    return sharding.place_like(numbers, like)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
