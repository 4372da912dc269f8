# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The steps of a training run, and what happens between them."""

from collections.abc import Mapping, Sequence
import time
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

import jax
from jax import Array
import jax.numpy as jnp
import optax

from ebmpp.core import random
from ebmpp.core.programs import compiled
from ebmpp.core.types import Rows
from ebmpp.errors import ArgumentError, CheckpointError, CheckpointWriteError, DataError, StateError
from ebmpp.estimators import Batch, Estimator
from ebmpp.graph import FactorGraph
from ebmpp.training import optimizers
from ebmpp.training.batches import Selection, Source
from ebmpp.training.callbacks import Best, Callback, Progress
from ebmpp.training.checkpoint import Checkpoints
from ebmpp.training.guard import Guard
from ebmpp.training.history import Log
from ebmpp.training.schedule import Stages

Params = Any
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
    index: Array | None,
    pair: Array,
    step: Array,
    weights: Array | None = None,
    known: Mapping[str, Array] = MappingProxyType({}),
) -> tuple[Params, Any, dict[str, Array]]:
    """One gradient estimate from the rows ``index``; from all of them where that is None.

    :param weights: of all ``rows``, of mean 1 over the data; None for equal ones.
    :param known: of the blocks of ``rows`` that lack units, which are known.
    :raises ArgumentError: for an estimator whose gradient is not like the params.
    """
    take = lambda a: a if index is None else a[index]
    batch = Batch.of(*({b: take(v) for b, v in x.items()} for x in (rows, known)))
    if weights is not None:
        batch = batch._replace(weights=take(weights) * batch.weights)
    made = estimator.estimate(graph, params, state, batch, random.fold_in(pair, step, 2))
    if optimizers.shapes(made.gradient) != optimizers.shapes(params):
        raise ArgumentError(
            f"{type(estimator).__name__}.estimate returned a gradient of shapes "
            f"{jax.tree.map(jnp.shape, made.gradient)}, and the params have {jax.tree.map(jnp.shape, params)}"
        )
    return made.gradient, made.state, made.metrics


@compiled(statics=1)
def _update(
    optimizer: optax.GradientTransformation,
    gradient: Params,
    params: Params,
    state: Any,
    ok: Array,
) -> tuple[Params, Any, Array, Array]:
    updates, moved = optimizer.update(gradient, state, params)
    proposed = optax.apply_updates(params, updates)
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((gradient, proposed))]
    ok = ok & jnp.stack(finite).all()
    keep = lambda new, old: jnp.where(ok, new, old)
    params, state = jax.tree.map(keep, (proposed, moved), (params, state))
    return params, state, ok, optax.tree.norm(gradient)


def _check_missing(estimator: Estimator, given: Selection) -> None:
    """:raises StateError: where rows lack entries and the estimator does not know what to make of that."""
    if given.known and not getattr(estimator, "takes_missing", False):
        raise StateError(
            f"block {next(iter(given.known))!r} of the data has missing entries, and {estimator!r} trains on "
            "whole rows; UCD, CD, PCD and their kin train on what is known, and ebmpp.complete fills it in"
        )


class Loop:
    """A run: the source's batches through the stages' estimators and optimisers, with what looks on.

    :param pair: the run's key pair; a step's draws depend on it and on the step's number.
    :param every: steps between monitor values.
    :param best: what keeps the best params, or None.
    :param guard: what looks after the params.
    """

    def __init__(
        self,
        graph: FactorGraph,
        stages: Stages,
        source: Source,
        pair: Array,
        log: Log,
        every: int,
        callbacks: Sequence[Callback],
        best: Best | None,
        guard: Guard,
    ) -> None:
        self.graph, self.stages, self.source, self.pair = graph, stages, source, pair
        self.log, self.every, self.callbacks, self.best = log, every, callbacks, best
        self.guard = guard
        self.save: Checkpoints | None = None
        for stage in stages.stages:
            _check_missing(stage.estimator, source.sample())
        self._save_every = self._saved = 0
        self._looked = 0.0

    # -- states ----------------------------------------------------------------------------------

    def begin(self, number: int, params: Params) -> State:
        """The state in which stage ``number`` begins.

        :raises ArgumentError: for an optimiser that does not go with the params.
        """
        stage, rows = self.stages[number], self.source.sample().rows
        optimizers.check(stage.optimizer, params)
        pair = random.fold_in(self.pair, number, 1)
        estimator = stage.estimator.init(self.graph, params, rows, self.source.batch_size, pair)
        return State(params, stage.optimizer.init(params), estimator, jnp.array(True))

    def _enter(self, number: int, state: State) -> State:
        """From one stage to the next."""
        fresh = self.begin(number, state.params)._replace(ok=state.ok)
        adopt = getattr(self.stages[number].estimator, "adopt", None)
        if adopt is None:
            return fresh
        adopted = adopt(state.estimator, fresh.estimator)
        if jax.tree.structure(adopted) != jax.tree.structure(fresh.estimator):
            name = type(self.stages[number].estimator).__name__
            raise ArgumentError(
                f"{name}.adopt returned a pytree of another structure than the fresh state it was given: "
                f"{jax.tree.structure(adopted)}, not {jax.tree.structure(fresh.estimator)}"
            )
        return fresh._replace(estimator=adopted)

    def keep(self, save: Checkpoints, every: int, first: State) -> tuple[int, State]:
        """Checkpoints from now on.

        :param first: the state before the first step.
        :return: the steps that were done when the run stopped, and the state after them.
        :raises CheckpointError: for one of more steps than this run has.
        """
        self.save, self._save_every = save, every
        found = save.restore()
        if found is None:
            return 0, first
        if found.step > self.stages.num_steps:
            raise CheckpointError(
                f"{save.directory} holds {found.step} steps, and this run has {self.stages.num_steps}: give "
                "num_steps of at least as many, or another directory"
            )
        like = self.begin(self.stages.at(found.step - 1), first.params) if found.step else first
        count = len(jax.tree.leaves(like))
        leaves = map(_as_leaf, found.leaves[:count], jax.tree.leaves(like))
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        self.log.load(found.history, found.step)
        if self.best is not None:
            self.best.load(found.leaves[count:])
        self._saved = found.step
        return found.step, state

    # -- the run ---------------------------------------------------------------------------------

    def run(self, start: int, state: State, progress_bar: bool) -> State:
        """The steps from ``start`` on; the state after the last."""
        total = self.stages.num_steps
        bar = tqdm(total=total, initial=start, disable=not progress_bar, desc="training", unit="step")
        with bar:
            for step in range(start, total):
                if step % self.every == 0 and self._monitor(step, state):
                    self._checkpoint(step, state)
                    return state
                number = self.stages.at(step)
                if number and step == self.stages.first[number]:
                    state = self._enter(number, state)
                state, metrics = self._step(step, number, state)
                self.log.append(metrics)
                bar.update()
                self._show(step, state, bar, progress_bar)
                if self.save is not None and ((step + 1) % self._save_every == 0 or step + 1 == total):
                    self._checkpoint(step + 1, state)
        self._look(total, state)
        self._monitor(total, state)
        return state

    def _look(self, done: int, state: State, needed: bool = True) -> None:
        """:raises TrainingError: where the run is not what it should be after ``done`` steps."""
        estimator = self.stages[self.stages.at(max(0, done - 1))].estimator
        self.guard.look(done, state.params, state.ok, estimator, needed)

    def _step(self, step: int, number: int, state: State) -> tuple[State, dict[str, Any]]:
        """One gradient and one update; after a failure the state stays as it was."""
        rows, index, weights, known = self._select(step, state)
        stage, key = self.stages[number], np.uint32(step)
        given = (rows, index, self.pair, key, weights, known)
        gradient, carried, metrics = estimate_step(
            self.graph, stage.estimator, state.params, state.estimator, *given
        )
        # Two programs: trying another optimiser does not compile the estimator again.
        params, optimizer, ok, norm = _update(
            stage.optimizer, gradient, state.params, state.optimizer, state.ok
        )
        told = {"stage": np.int32(number)} if self.stages.scheduled else {}
        return State(params, optimizer, carried, ok), {"gradient_norm": norm, "ok": ok, **told, **metrics}

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

    def _show(self, step: int, state: State, bar: tqdm, shown: bool) -> None:
        if (shown and time.monotonic() - self._looked > 0.5) or step % _LOOK_EVERY == 0:
            bar.set_postfix(self.log.latest(), refresh=False)
            self._look(step + 1, state, needed=False)
            self._looked = time.monotonic()

    def _checkpoint(self, steps: int, state: State) -> None:
        """:raises CheckpointWriteError: where it cannot be written."""
        if self.save is None or steps == self._saved:
            return
        self._look(steps, state)  # what failed is not kept
        kept = [] if self.best is None else self.best.leaves()
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
    made = jnp.asarray(numbers)
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(like)) if _is_key(like) else made


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
