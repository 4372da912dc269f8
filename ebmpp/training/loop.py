# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The steps of a training run, and what happens between them."""

from collections.abc import Mapping, Sequence
import time
from types import MappingProxyType
from typing import Any, NamedTuple
import warnings

from jaxtyping import Float, Integer
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from ebmpp.core import checks, random, sharding
from ebmpp.core.programs import compiled
from ebmpp.core.types import Key, Numbers, Params, Rows
from ebmpp.errors import ArgumentError, CheckpointWriteError, DataError, StateError
from ebmpp.estimators import Batch, Estimator
from ebmpp.graph import FactorGraph
from ebmpp.training import optimizers
from ebmpp.training.bar import Bar
from ebmpp.training.batches import Selection, Source
from ebmpp.training.callbacks import Best, Callback, Progress
from ebmpp.training.checkpoint import Checkpoints, OfProcesses
from ebmpp.training.guard import Guard
from ebmpp.training.history import Log
from ebmpp.training.schedule import Stages
from ebmpp.training.trail import Trail
from ebmpp.training.watching import Watch

_LOOK_EVERY = 50  # steps between looks at the device when nothing is shown


class State(NamedTuple):
    """Everything a step changes."""

    params: Params
    optimizer: Any
    estimator: Any
    ok: Array
    """False from the first step that was not finite."""


@compiled(statics=2)
def estimate_step(
    graph: FactorGraph,
    estimator: Estimator,
    params: Params,
    state: Any,
    rows: Rows,
    index: Integer[Array, "batch"] | None,
    key: Key,
    step: Array,
    weights: Float[Array, "batch"] | None = None,
    known: Rows = MappingProxyType({}),
) -> tuple[Params, Any, dict[str, Array]]:
    """One gradient estimate from the rows ``index``; from all of them where that is None.

    :param weights: of the rows that are taken, of mean 1 over the data; None for equal ones.
    :param known: of the blocks of ``rows`` that lack units, which are known.
    :raises ArgumentError: for an estimator whose gradient is not like the params.
    """
    take = lambda x: x if index is None else {b: v[index] for b, v in x.items()}
    batch = Batch.of(take(rows), take(known))
    if weights is not None:
        batch = batch._replace(weights=weights * batch.weights)
    batch = sharding.rows(batch)
    made = estimator.estimate(graph, params, state, batch, random.fold_in(key, step, 2))
    if optimizers.shapes(made.gradient) != optimizers.shapes(params):
        raise ArgumentError(
            f"{type(estimator).__name__}.estimate returned a gradient of shapes "
            f"{jax.tree.map(jnp.shape, made.gradient)}, and the params have {jax.tree.map(jnp.shape, params)}"
        )
    return made.gradient, made.state, made.metrics


@compiled(statics=1)
def _update(
    optimizer: optax.GradientTransformation, gradient: Params, params: Params, state: Any, ok: Array
) -> tuple[Params, Any, Array, Array]:
    updates, moved = optimizer.update(gradient, state, params)
    proposed = optax.apply_updates(params, updates)
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((gradient, proposed))]
    ok = ok & jnp.stack(finite).all()
    keep = lambda new, old: jnp.where(ok, new, old)
    params, state = jax.tree.map(keep, (proposed, moved), (params, state))
    return params, state, ok, optax.tree.norm(gradient)


def one_step(
    graph: FactorGraph,
    estimator: Estimator,
    optimizer: optax.GradientTransformation,
    key: Key,
    state: State,
    step: ArrayLike,
    given: Selection,
) -> tuple[State, dict[str, Array]]:
    """One gradient and one update; after a failure the state stays as it was."""
    rows, index, weights, known = given
    told = (rows, index, key, step, weights, known)
    gradient, carried, metrics = estimate_step(graph, estimator, state.params, state.estimator, *told)
    # Two programs: trying another optimiser does not compile the estimator again.
    params, moved, ok, norm = _update(optimizer, gradient, state.params, state.optimizer, state.ok)
    return State(params, moved, carried, ok), {"gradient_norm": norm, "ok": ok, **metrics}


@compiled(statics=3)
def several_steps(
    graph: FactorGraph,
    estimator: Estimator,
    optimizer: optax.GradientTransformation,
    key: Key,
    state: State,
    steps: Array,
    given: Selection,
) -> tuple[State, dict[str, Array]]:
    """:func:`one_step` after the other in one program: small steps cost no more than their sums.

    :param given: ``index`` and ``weights`` have a leading axis of steps, and ``rows`` are those of all steps.
    :return: the state after them, and metrics with a leading axis of steps.
    """

    def one(state: State, at: tuple[Array, Numbers | None, Numbers | None]) -> tuple[State, dict[str, Array]]:
        step, index, weights = at
        chosen = given._replace(index=index, weights=weights)
        return one_step(graph, estimator, optimizer, key, state, step, chosen)

    return lax.scan(one, state, (steps, given.index, given.weights))


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
    :param together: dispatch all steps at once that nobody looks in between, of a source on the device. Small
        steps are several times faster so, and each optimiser compiles the estimator again.
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
        together: bool = False,
    ) -> None:
        self.graph, self.stages, self.source, self.key = graph, stages, source, key
        self.every, self.callbacks, self.together = every, callbacks, together
        self.best, self.trail = best, trail
        self.log = Log(monitors)
        self.guard = Guard(graph, params, self.log)
        self.save: Checkpoints | OfProcesses | None = None
        for stage in stages.stages:
            _check_missing(stage.estimator, source.sample())
        self._save_every = self._saved = 0
        self._looked = 0.0

    @property
    def _kept(self) -> list[Best | Trail]:
        """What is kept of the run beside its state."""
        return [each for each in (self.best, self.trail) if each is not None]

    # -- states ----------------------------------------------------------------------------------

    def begin(self, number: int, params: Params) -> State:
        """The state in which stage ``number`` begins.

        :raises ArgumentError: for an optimiser that does not go with the params.
        """
        stage, rows = self.stages[number], self.source.sample().rows
        optimizers.check(stage.optimizer, params)
        key = random.fold_in(self.key, number, 1)
        estimator = stage.estimator.init(self.graph, params, rows, self.source.batch_size, key)
        return State(params, stage.optimizer.init(params), estimator, jnp.array(True))

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
        with Bar(total, start, hidden) as bar:
            while step < total:
                if self.trail is not None:
                    self.trail.see(step, state.params)
                if step % self.every == 0 and self._monitor(step, state):
                    self._checkpoint(step, state)
                    return state
                number = self.stages.at(step)
                if number and step == self.stages.first[number]:
                    state = self._enter(number, state)
                stop = self._stop(step, number)
                bar.begin(number)
                state = self._steps(step, stop, number, state)
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
            told = stage.estimator.caution({name: v[at] for name, v in columns.items()})
            if told is not None:
                warnings.warn(f"fit: steps {at.start} to {at.stop - 1}: {told}", stacklevel=4)

    def _stop(self, step: int, number: int) -> int:
        """Before which step there is next something to do beside steps."""
        if not self.together:
            return step + 1
        every = [self.every, *([self._save_every] if self.save is not None else ())]
        every += [] if self.trail is None else [self.trail.stride]
        return min(self.stages.end(number), *(step + n - step % n for n in every))

    def _look(self, done: int, state: State, needed: bool = True) -> None:
        """:raises TrainingError: where the run is not what it should be after ``done`` steps."""
        estimator = self.stages[self.stages.at(max(0, done - 1))].estimator
        self.guard.look(done, state.params, state.ok, estimator, needed)

    def _steps(self, step: int, stop: int, number: int, state: State) -> State:
        """The steps from ``step`` to before ``stop``, all of one stage."""
        stage, chosen = self.stages[number], [self._select(at, state) for at in range(step, stop)]
        told = {"stage": np.int32(number)} if self.stages.scheduled else {}
        args = (self.graph, stage.estimator, stage.optimizer, self.key, state)
        if not self.together:
            state, metrics = one_step(*args, np.uint32(step), chosen[0])
            sharding.settle(state)
            self.log.append({**metrics, **told})
            return state
        index, weights = jax.tree.map(lambda *each: np.stack(each), *((c.index, c.weights) for c in chosen))
        steps = np.arange(step, stop, dtype=np.uint32)
        state, metrics = several_steps(*args, steps, chosen[0]._replace(index=index, weights=weights))
        each = {name: np.full(stop - step, value) for name, value in told.items()}
        self.log.append({**jax.device_get(metrics), **each}, several=True)
        return state

    def _select(self, step: int, state: State) -> Selection:
        """:raises DataError: where the data fail; a checkpoint keeps what was done."""
        try:
            made = self.source.batch(self.stages.batch(step))
            _check_missing(self.stages[self.stages.at(step)].estimator, made)
            return made
        except StateError as error:
            self._look(step, state)
            self._checkpoint(step, state)
            raise DataError(
                f"training stopped at step {step}: {error}. The error's .params are those before that step, "
                "and .history holds the steps before; with checkpoint_dir the run can be resumed here",
                state.params,
                self.log.dataset(),
                step,
            ) from error

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
            bar.tell(self.log.latest())
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
