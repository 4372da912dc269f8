# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training of a graph: :func:`fit` and its result."""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import math
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from ebmpp.annealing.path import Path
from ebmpp.annealing.reference import base_rates
from ebmpp.core import Params, checks, random, sharding
from ebmpp.core.display import Card, Shown
from ebmpp.errors import TrainingError
from ebmpp.estimators import Estimator
from ebmpp.graph import FactorGraph
from ebmpp.training.batches import Data, as_source, is_stream
from ebmpp.training.callbacks import BestParams, Callback, PathRecorder
from ebmpp.training.checkpoint import SharedCheckpoints
from ebmpp.training.history import Watch, card
from ebmpp.training.loop import Loop
from ebmpp.training.steps import Stage, Stages, State

if TYPE_CHECKING:
    import xarray as xr


@dataclasses.dataclass(frozen=True)
class Fit(Shown):
    """A trained model.

    :param graph: the trained graph.
    :param params: the last params.
    :param history: an ``xarray.Dataset``: per ``step`` the gradient norm and the
        estimator's metrics, such as ``meeting_time_mean``, ``num_unmet`` and ``lag`` of
        coupled chains, nan where a stage has none; per ``monitor_step`` (the number of
        steps done) the monitors; with a schedule also ``stage``.
        ``history.to_dataframe()`` has one row per step, with the monitors' values after
        it. ``history.attrs["stopped_by"]`` is "max_seconds" in a run that this argument
        of ``fit`` ended.
    :param optimizer_state: optax state after the last step.
    :param estimator_state: the estimator's state (persistent chains, the adaptive lag).
    :param best_params: with ``keep_best``, the params at the monitor's best value, if
        it had any.
    :param best_step: number of steps done at that value.
    :param path: with ``keep_path``, the path from independent units to the last params,
        an argument of :func:`ebmpp.smc`, :func:`ebmpp.particle_expectation` and
        :class:`ebmpp.ParallelTempering`.
    :param estimator: the estimator of the last step.
    :param optimizer: its optimiser; None in a copy by pickle, which optax does not
        support.
    :param num_steps: gradient steps in all, including the steps of ``start``.
    """

    graph: FactorGraph
    params: Params
    history: "xr.Dataset"
    optimizer_state: Any
    estimator_state: Any
    best_params: Params | None = None
    best_step: int | None = None
    path: Path | None = None
    estimator: Estimator | None = None
    optimizer: optax.GradientTransformation | None = None
    num_steps: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"optimizer": None}

    def __repr__(self) -> str:
        steps = self.history.sizes["step"]
        by = f" by {self.estimator!r}" if self.estimator else ""
        best = "" if self.best_step is None else f", best at step {self.best_step}"
        params = sum(np.size(a) for a in jax.tree.leaves(self.params))
        return f"Fit({steps} steps{by}, {params} params in {len(self.params)} factors{best})"

    def _card(self) -> Card:
        return card(repr(self), self.graph, self.params, self.history)


def fit(
    graph: FactorGraph,
    data: Data,
    *,
    rng_key: Array,
    estimator: Estimator | None = None,
    optimizer: optax.GradientTransformation | None = None,
    num_steps: int | None = None,
    max_seconds: float | None = None,
    schedule: Sequence[Stage] | None = None,
    batch_size: int | None = None,
    weights: Array | None = None,
    params: Params | None = None,
    start: Fit | None = None,
    init_scheme: str | Mapping[str, str] = "gaussian",
    monitors: Mapping[str, Watch] | None = None,
    monitor_every: int = 100,
    callbacks: Sequence[Callback] = (),
    keep_best: str | tuple[str, str] | None = None,
    keep_path: bool | int = False,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 500,
    resume: bool = False,
    mesh: Mesh | None = None,
    progress_bar: bool = True,
) -> Fit:
    """Maximise the likelihood of ``data`` by stochastic gradients.

    Batches are rows of a new random permutation per epoch. Up to 50 steps run in one
    compiled program, or fewer if they are expensive. ``data`` can be:

    * arrays: rows of the visible blocks, ``(rows, *shape)`` each, in a dict, or a
      single array for a single block. Lists, data frames and other objects with
      ``__array__`` are accepted;
    * ``numpy.memmap`` arrays: rows are read and checked ahead of their step, and a few
      thousand give the base rates;
    * a stream of batches of one size: an iterable of arrays or dicts, or a function
      that returns one. Each is used once, and the first gives the base rates. For a
      resumed run pass the stream from its beginning.

    Any block may be an :class:`Observed` with missing entries, such as
    ``Observed.where_finite(table)``: the likelihood is that of the known ones. Missing
    entries are drawn from the posterior together with the latents, without bias under
    :class:`UCD`.

    :param rng_key: a jax key: the same key gives the same run.
    :param estimator: :class:`UCD` (default), :class:`CD`, :class:`PCD`, or a custom
        one.
    :param optimizer: any optax transformation; default ``optax.sgd(0.1)``.
    :param num_steps: gradient steps; default 1000, or no limit with ``max_seconds``.
    :param max_seconds: wall time of this call, above 0, compilation included. The run
        ends at the first look after it, about a second late, as if it had ``num_steps``
        so far. Their number **depends on the clock**, so the run cannot be repeated
        exactly. It can be resumed.
    :param schedule: a list of :class:`Stage` in place of estimator, optimizer and
        num_steps.
    :param batch_size: rows per step, at most all rows; default 100, or the stream's.
    :param weights: one per row, not negative: row i counts w_i times, up to a common
        factor. Not for streams.
    :param params: initial params, cast to jax's default floats; default
        ``graph.init(rng_key, data, init_scheme)``.
    :param start: a :class:`Fit` of the same graph and kind of estimator, whose params,
        chains, weights, lag and optimiser state continue. With the same key, data and
        settings the run equals the rest of one longer run. ``num_steps``, ``history``
        and ``path`` count from this call; ``estimator`` and ``optimizer`` default to
        the ones of ``start``. Another optimiser continues the parts of the state that
        have its structure, such as moments. A stream begins at its first batch.
    :param init_scheme: "gaussian", "orthogonal", or a dict of both parts: see
        :meth:`FactorGraph.init`.
    :param monitors: functions of the params to a scalar, kept in the history; see
        :mod:`ebmpp.monitors`.
    :param monitor_every: steps between monitor values (the first and last step are
        included).
    :param callbacks: functions of a :class:`Progress`, called at each of these steps;
        one that returns True stops the run, such as :class:`EarlyStop`. An exception
        ends the run and keeps the checkpoints. It carries ``params``, ``history``,
        ``step`` and ``fit``, a Fit so far; so does KeyboardInterrupt.
    :param keep_best: the name of a monitor, or ``(name, "min")``: keep the params at
        its best value.
    :param keep_path: keep a path from independent units at the data's base rates to the
        model, as ``Fit.path``. At most 64 checkpoints of the params, or the number
        given here, stay in memory. At the end they are thinned to knots between which
        half of 500 particles stay effective.
    :param checkpoint_dir: directory for checkpoints, of one run at a time. A resumed
        run ends with bitwise the params of an uninterrupted one.
    :param checkpoint_every: steps between checkpoints; the last step writes one too.
    :param resume: continue from the newest valid checkpoint in ``checkpoint_dir``, or
        start where there is none. Only the number of steps (of the last stage), if
        larger, and the callbacks may differ.
    :param mesh: devices that share the work: rows, chains and coupled pairs are sharded
        over the mesh's first axis; params are replicated, or sharded as they are given.
        Meeting times are identical to a single-device run; gradients are summed in
        another order. Under ``jax.distributed`` every process calls ``fit`` with **its
        own part** of the rows (of one size; ``batch_size`` is the total), the same
        params, and callbacks that decide alike.
    :warns UserWarning: if an estimator diagnoses a problem, a path cannot be thinned, a
        monitor with ``log_likelihood=True`` falls, or coupled pairs will take too many
        sweeps.
    :raises StateError: for invalid data or weights, NaN included.
    :raises ParameterError: for params that do not fit, or under which the model does
        not normalise.
    :raises DivergenceError: when params or gradient stop being finite, or a pair is
        unmet; it carries the last good params and the history, as do the next two.
    :raises NormalizationError: when training leaves the params under which the model
        normalises, which is checked every ``monitor_every`` steps, before checkpoints,
        and at the end.
    :raises DataError: when a stream ends too early, or a later row is invalid.
    :raises CheckpointError: for checkpoints of another run, damaged ones, or existing
        ones without ``resume``; for a directory in use, or a disk that fails (during
        the run with params and history).
    :raises ArgumentError: for other invalid arguments, and under ``jit``.

    **Example**

    >>> import jax, optax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.CD(k=1), optimizer=optax.sgd(0.1), progress_bar=False)
    >>> fit.history.sizes["step"]
    5
    """
    checks.instance("fit: graph", graph, FactorGraph, "a FactorGraph")
    rng_key = checks.key("fit: rng_key", rng_key)
    checks.on_host("fit", rng_key, params, weights, data)
    batch_size = checks.optional_count("fit: batch_size", batch_size)
    interval = checks.count("fit: monitor_every", monitor_every)
    checkpoint_every = checks.count("fit: checkpoint_every", checkpoint_every)
    checks.flag("fit: progress_bar", progress_bar)
    if checks.flag("fit: resume", resume) and checkpoint_dir is None:
        raise checks.error("fit: checkpoint_dir", "a directory with resume=True", None)
    deadline = math.inf
    if max_seconds is not None:
        deadline = time.monotonic() + checks.number(
            "fit: max_seconds", max_seconds, above=0
        )
        num_steps = (
            checks.LARGEST if num_steps is None and schedule is None else num_steps
        )
    if start is not None:
        checks.instance("fit: start", start, Fit, "a Fit that this run continues")
        if params is not None:
            raise checks.error(
                "fit: params", "None with start, which has params", params
            )
        params = start.params
        if schedule is None:
            estimator = estimator or start.estimator
            optimizer = optimizer or start.optimizer
            if optimizer is None:
                raise checks.error(
                    "fit: optimizer",
                    "given, since start was copied without it",
                    optimizer,
                )
    stages = _stages(
        schedule, estimator=estimator, optimizer=optimizer, num_steps=num_steps
    )
    before = 0
    if start is not None:
        _check_start(start, graph, stages[0].estimator)
        before = start.num_steps
        if not is_stream(data):
            stages.batches_before = -(-before // stages[0].estimator.steps_per_batch)
    monitors = {} if monitors is None else monitors
    checks.instance(
        "fit: monitors", monitors, Mapping, "a dict of functions of the params"
    )
    for name, fn in monitors.items():
        checks.instance("fit: a monitor's name", name, str, "a string")
        checks.function(f"fit: monitor {name!r}", fn, "the params")
    for i, fn in enumerate(
        checks.sequence("fit: callbacks", callbacks, "functions of a Progress")
    ):
        checks.function(f"fit: callbacks[{i}]", fn, "a Progress")
    with sharding.use_mesh("fit: mesh", mesh):
        init_key, base_key, order_key = jax.random.split(rng_key, 3)
        source = as_source(graph, data, weights, batch_size, order_key)
        sample = source.sample()
        if params is None:
            params = graph.init(
                init_key, sample.observed(), init_scheme, sample.weights
            )
        params = _owned(graph, params)
        best = None if keep_best is None else BestParams(keep_best, monitors, params)
        recorder = None if keep_path is False else PathRecorder(keep_path, params)
        eta0 = (
            None
            if recorder is None
            else base_rates(graph, sample.observed(), sample.weights)
        )
        key = random.key_pair(base_key)
        options = {
            "monitors": dict(monitors),
            "interval": interval,
            "callbacks": tuple(callbacks),
        }
        loop = Loop(
            graph,
            stages,
            source,
            key,
            params,
            **options,
            best=best,
            path=recorder,
            before=before,
        )
        first = 0
        state = loop.begin(0, params)
        if start is not None:
            state = loop.proceed(start.estimator_state, start.optimizer_state, state)
        with contextlib.ExitStack() as stack:
            if checkpoint_dir is not None:
                run = loop.identity(state, rng_key)
                save = stack.enter_context(
                    contextlib.closing(SharedCheckpoints(checkpoint_dir, run, resume))
                )
                first, state = loop.resume(save, checkpoint_every, state)
            try:
                state = loop.run(first, state, progress_bar, deadline)
            except BaseException as error:  # Ctrl-C too
                _attach(error, loop, first)
                raise
        fit = _result(loop, None, state)
        if recorder is None or eta0 is None:
            return fit
        path = recorder.path(graph, eta0, fit.params, random.fold_in(key, 0, 3))
    return dataclasses.replace(fit, path=path)


def _result(loop: Loop, stop: int | None, state: State) -> Fit:
    """Return the run up to step ``stop``, without its path."""
    best = (None, None) if loop.best is None else loop.best.result
    history = loop.log.dataset(stop).copy(deep=True)  # writable
    steps = history.sizes["step"]
    last = max(steps, 1) - 1
    estimator = loop.choose(last).estimator
    stage = loop.stages[loop.stages.at(last)]
    states = state.params, history, state.optimizer, state.estimator
    return Fit(
        loop.graph,
        *states,
        *best,
        None,
        estimator,
        stage.optimizer,
        loop.before + steps,
    )


def _attach(error: BaseException, loop: Loop, first: int) -> None:
    """Attach the run so far to an error that ends it, unless the error carries it."""
    with contextlib.suppress(Exception):  # the first error counts
        step, state = loop.reached()
        if isinstance(error, TrainingError) or step == first:
            return
        fit = _result(loop, step, state)
        for name, value in {
            "params": fit.params,
            "history": fit.history,
            "step": step,
            "fit": fit,
        }.items():
            if not hasattr(error, name):
                setattr(error, name, value)
        error.add_note(
            f"fit: {step} steps were done. The exception's .params, .history and .fit have them."
        )


def _check_start(start: Fit, graph: FactorGraph, estimator: Estimator) -> None:
    """Raise ArgumentError if a run by this estimator cannot continue ``start``."""
    name = "fit: start"
    hint = "Pass params=start.params to begin with new chains."
    if start.graph != graph:
        raise checks.error(name, f"a Fit of {graph!r}", start.graph, hint=hint)
    if type(start.estimator) is not type(estimator):
        raise checks.error(
            name,
            f"a Fit by an estimator like {estimator!r}",
            start.estimator,
            hint=hint,
        )


def _owned(graph: FactorGraph, params: Params) -> Params:
    """Return copies of the params on the devices of the mesh, which nobody else can write into."""

    # of torch, say
    def foreign(a):
        return hasattr(a, "__array__") and not isinstance(a, Array)

    params = jax.tree.map(lambda a: np.asarray(a) if foreign(a) else a, params)
    graph.check(params)
    # Integers have no gradient. numpy arrays are copied, since jax may use memory that
    # their owner writes to.
    floats = jnp.result_type(float)

    def copy(a):
        return (
            jnp.asarray(a, floats)
            if isinstance(a, Array)
            else jax.device_put(np.array(a, floats))
        )

    return sharding.place(jax.tree.map(copy, params))


def _stages(schedule: Sequence[Stage] | None, **options: Any) -> Stages:
    """Return the schedule's stages, or the one stage of the options that are not None."""
    options = {name: value for name, value in options.items() if value is not None}
    if schedule is None:
        return Stages(
            [Stage(**dict[str, Any](num_steps=1000) | options)], scheduled=False
        )
    if options:
        raise checks.error(
            "fit: arguments beside schedule",
            "in its stages",
            list(options),
            hint="Pass them to the stages of schedule.",
        )
    return Stages(schedule, scheduled=True)
