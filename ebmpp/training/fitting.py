# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training of a graph: :func:`fit`."""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
from functools import partial
import math
import os
import time
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike
import optax

from ebmpp.annealing.reference import base_rates
from ebmpp.core import Params, archive, checkpoints, checks, random, sharding
from ebmpp.errors import TrainingError
from ebmpp.estimators import Batch, Estimator
from ebmpp.estimators.phases import check_rows
from ebmpp.graph import FactorGraph, saving
from ebmpp.training.batches import TrainingData, as_source, is_stream
from ebmpp.training.callbacks import Callback
from ebmpp.training.history import Monitor, MonitorFn
from ebmpp.training.loop import Loop
from ebmpp.training.observers.checkpoints import CheckpointWriter
from ebmpp.training.observers.diagnosis import EstimatorDiagnosis, PairWatch
from ebmpp.training.observers.monitoring import BestParams, Monitoring
from ebmpp.training.observers.path import PathRecorder
from ebmpp.training.observers.progress import Deadline, ProgressBar
from ebmpp.training.result import FitResult, Past
from ebmpp.training.steps import Stage, Stages, TrainState

_DEFAULT_STEPS = 1000


def fit(
    graph: FactorGraph,
    data: TrainingData,
    *,
    rng_key: Array,
    estimator: Estimator | None = None,
    optimizer: optax.GradientTransformation | None = None,
    num_steps: int | None = None,
    epochs: int | None = None,
    max_seconds: float | None = None,
    schedule: Sequence[Stage] | None = None,
    batch_size: int | None = None,
    weights: ArrayLike | None = None,
    params: Params | None = None,
    start: FitResult | None = None,
    init_scheme: str | Mapping[str, str] = "gaussian",
    monitors: Mapping[str, MonitorFn] | None = None,
    monitor_every: int = 100,
    callbacks: Sequence[Callback] = (),
    keep_best: str | tuple[str, str] | None = None,
    keep_path: bool | int = False,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 500,
    resume: bool = False,
    mesh: Mesh | None = None,
    progress_bar: bool = True,
) -> FitResult:
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
    :param optimizer: any optax transformation; default ``optax.adam(0.01)``. Runs that
        differ in its constant rate alone, its last factor, share a compiled program.
    :param num_steps: gradient steps; default 1000, or no limit with ``max_seconds``.
    :param epochs: passes over the data in place of ``num_steps``. For a stream with a
        length, a list of batches say, at most 1.
    :param max_seconds: wall time of this call, above 0, compilation included. The run
        ends at the first look after it, about a second late, as if it had ``num_steps``
        so far. Their number **depends on the clock**, so the run cannot be repeated
        exactly. It can be resumed.
    :param schedule: a list of :class:`Stage` in place of estimator, optimizer,
        num_steps and epochs.
    :param batch_size: rows per step, at most all rows; default 100, or the stream's.
    :param weights: one per row, not negative: row i counts w_i times, up to a common
        factor. Not for streams.
    :param params: initial params, cast to jax's default floats; default
        ``graph.init(rng_key, data, init_scheme)``.
    :param start: a :class:`FitResult` of the same graph and kind of estimator, whose
        params, chains, weights, lag and optimiser state continue. With the same key, data and
        settings the run equals the rest of one longer run. ``num_steps``, ``history``
        and ``path`` count from this call, and callbacks and ``keep_best`` see its steps
        alone; ``estimator`` and ``optimizer`` default to
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
        ``step`` and ``fit``, a FitResult so far; so does KeyboardInterrupt.
    :param keep_best: the name of a monitor, or ``(name, "min")``: keep the params at
        its best value.
    :param keep_path: keep a path from independent units at the data's base rates to the
        model, as ``FitResult.path``. At most 64 checkpoints of the params, or the number
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
    :param progress_bar: show the steps. On by default, unlike elsewhere, since training
        takes longest.
    :warns UserWarning: if an estimator diagnoses a problem, a path cannot be thinned, a
        monitor with ``log_likelihood=True`` falls, no step improves the monitor of
        ``keep_best`` or :class:`EarlyStop`, or coupled pairs will take too many sweeps.
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
    began = time.monotonic()
    checks.on_host("fit", rng_key, params, weights, data)
    checks.instance("fit: graph", graph, FactorGraph)
    checks.flag("fit: progress_bar", progress_bar)
    rng_key = checks.key("fit: rng_key", rng_key)
    batch_size = checks.optional_count("fit: batch_size", batch_size)
    monitor_every = checks.count("fit: monitor_every", monitor_every)
    checkpoint_every = checks.count("fit: checkpoint_every", checkpoint_every)
    if checks.flag("fit: resume", resume) and checkpoint_dir is None:
        raise checks.error("fit: checkpoint_dir", "given with resume=True", None)
    if start is not None:
        checks.instance("fit: start", start, FitResult, "a FitResult to continue")
        if params is not None:
            raise checks.error(
                "fit: params", "None with start, which has params", params
            )
        params = start.params
    listed = _resolve_stages(
        schedule,
        start,
        max_seconds,
        estimator=estimator,
        optimizer=optimizer,
        num_steps=num_steps,
        epochs=epochs,
    )
    steps_before = 0
    if start is not None:
        _check_start(graph, start, listed[0])
        steps_before = start.num_steps
    monitors = {} if monitors is None else monitors
    _check_functions(monitors, callbacks)
    deadline = began + (math.inf if max_seconds is None else max_seconds)
    with sharding.use_mesh("fit: mesh", mesh):
        init_key, base_key, order_key = random.split(rng_key, 3)
        source = as_source(graph, data, weights, batch_size, order_key)
        sample = source.sample()
        if params is None:
            params = graph.init(init_key, sample.table, init_scheme, sample.weights)
        params = _owned(graph, params)
        check_rows(graph, params, Batch.uniform(sample.rows, sample.known))
        best = None
        if keep_best is not None:
            best = BestParams(keep_best, monitors, params)
        path = None
        if keep_path is not False:
            path = PathRecorder(keep_path, params)
            eta0 = base_rates(graph, sample.table.observed(), sample.weights)
        key = random.key_pair(base_key)
        # a stream begins at its first batch
        batches_after = 0 if is_stream(data) else steps_before
        stages = Stages(listed, source, schedule is not None, batches_after)
        loop = Loop(
            graph,
            stages,
            source,
            key,
            params,
            monitors=monitors,
            before=steps_before,
            past={} if start is None else start.past.columns,
        )
        first = 0
        state = loop.begin(0, params)
        if start is not None:
            state = loop.proceed(start.estimator_state, start.optimizer_state, state)
        with contextlib.ExitStack() as stack:
            writer = None
            if checkpoint_dir is not None:
                writer = CheckpointWriter(
                    checkpoint_dir,
                    _identity(
                        loop, state, best, path, rng_key, monitors, monitor_every
                    ),
                    resume,
                    total=stages.num_steps,
                    log=loop.log,
                    guard=loop.guard,
                    recorders=[r for r in (best, path) if r is not None],
                    period=checkpoint_every,
                )
                stack.enter_context(contextlib.closing(writer))
                state = writer.restore(state, loop.template_at)
                first = writer.step
            total = stages.num_steps
            bar = ProgressBar(
                loop.log,
                None if total == checks.LARGEST else total,
                first,
                is_hidden=not (progress_bar and sharding.is_first()),
            )
            observers = [
                PairWatch(loop.log, stages, graph.num_units, first, deadline),
                Deadline(loop.log, deadline, first) if deadline < math.inf else None,
                loop.guard,
                # before the user's functions, which may fail
                writer,
                path,
                EstimatorDiagnosis(loop.guard, source, key, loop.before),
                Monitoring(loop.log, loop.guard, tuple(callbacks), best, monitor_every),
                # again, for a run that a callback ends
                writer,
            ]
            present = [observer for observer in observers if observer is not None]
            try:
                state = loop.run(first, state, present, bar, writer)
            except BaseException as error:  # Ctrl-C too
                _attach(error, loop, best, first)
                raise
        fit = _result(loop, best, None, state)
        if path is None:
            return fit
        key = random.fold_in(key, 0, 3)
        return dataclasses.replace(fit, path=path.path(graph, eta0, fit.params, key))


def _resolve_stages(
    schedule: Sequence[Stage] | None,
    start: FitResult | None,
    max_seconds: float | None,
    **arguments: Any,
) -> tuple[Stage, ...]:
    """Return the stages of a run; the arguments of a run of one stage become the only one.

    :param arguments: fields of that stage, None where they were not given.
    :raises ArgumentError: for invalid arguments.
    """
    options = {name: value for name, value in arguments.items() if value is not None}
    if max_seconds is not None:
        checks.number("fit: max_seconds", max_seconds, above=0)
    if schedule is None:
        return (_one_stage(options, start, max_seconds is not None),)
    if options:
        raise checks.error(
            "fit: arguments beside schedule",
            "in its stages",
            list(options),
            hint="Pass them to the stages of schedule.",
        )
    stages = checks.sequence("fit: schedule", schedule, "stages")
    checks.count("fit: number of stages in schedule", len(stages))
    for stage in stages:
        checks.instance("fit: schedule's entry", stage, Stage, "an ebmpp.Stage")
    return tuple(stages)


def _one_stage(
    options: dict[str, Any], start: FitResult | None, has_limit: bool
) -> Stage:
    """Return the stage of the arguments, which ``start`` completes."""
    if start is not None:
        options.setdefault("estimator", start.past.estimator or start.estimator)
        if options.setdefault("optimizer", start.optimizer) is None:
            raise checks.error(
                "fit: optimizer", "given, since start was copied without it", None
            )
    if "epochs" not in options:
        default = checks.LARGEST if has_limit else _DEFAULT_STEPS
        options.setdefault("num_steps", default)
    elif "num_steps" in options:
        raise checks.error("fit: epochs", "None with num_steps", options["epochs"])
    return Stage(**options)


def _check_start(graph: FactorGraph, start: FitResult, stage: Stage) -> None:
    """Raise ArgumentError if a run whose first stage is ``stage`` cannot continue ``start``."""
    hint = "Pass params=start.params to begin with new chains."
    if start.graph != graph:
        expected = f"a FitResult of {graph!r}"
        raise checks.error("fit: start", expected, start.graph, hint=hint)
    if type(start.estimator) is not type(stage.estimator):
        expected = f"a FitResult by an estimator like {stage.estimator!r}"
        raise checks.error("fit: start", expected, start.estimator, hint=hint)


def _check_functions(
    monitors: Mapping[str, MonitorFn], callbacks: Sequence[Callback]
) -> None:
    """Raise ArgumentError for monitors and callbacks that are no functions."""
    checks.instance(
        "fit: monitors", monitors, Mapping, "a dict of functions of the params"
    )
    for name, fn in monitors.items():
        checks.instance("fit: a monitor's name", name, str, "a string")
        checks.function(f"fit: monitor {name!r}", fn, "the params")
    checks.sequence("fit: callbacks", callbacks, "functions of a Progress")
    for i, fn in enumerate(callbacks):
        checks.function(f"fit: callbacks[{i}]", fn, "a Progress")


def _result(
    loop: Loop, best: BestParams | None, stop: int | None, state: TrainState
) -> FitResult:
    """Return the run up to step ``stop``, without its path."""
    best_params, best_step = (None, None) if best is None else best.result
    history = loop.log.dataset(stop).copy(deep=True)  # writable
    steps = history.sizes["step"]
    last = max(steps, 1) - 1
    number = loop.stages.at(last)
    stage = loop.stages[number]
    return FitResult(
        graph=loop.graph,
        params=state.params,
        history=history,
        optimizer_state=state.optimizer,
        estimator_state=state.estimator,
        best_params=best_params,
        best_step=best_step,
        estimator=loop.choose(last).estimator,
        optimizer=stage.optimizer,
        num_steps=loop.before + steps,
        past=Past(stage.estimator, loop.columns(number, steps)),
    )


def _attach(
    error: BaseException, loop: Loop, best: BestParams | None, first: int
) -> None:
    """Attach the run so far to an error that ends it, unless the error carries it."""
    with contextlib.suppress(Exception):  # the first error counts
        step, state = loop.reached()
        if isinstance(error, TrainingError) or step == first:
            return
        fit = _result(loop, best, step, state)
        run = {"params": fit.params, "history": fit.history, "step": step, "fit": fit}
        vars(error).update(run | vars(error))
        error.add_note(
            f"fit: {step} steps were done. The exception's .params, .history and .fit have them."
        )


def _owned(graph: FactorGraph, params: Params) -> Params:
    """Return copies of the params on the devices of the mesh, which nobody else can write into."""

    def from_foreign(a):  # of torch, say
        is_foreign = hasattr(a, "__array__") and not isinstance(a, Array)
        return np.asarray(a) if is_foreign else a

    params = jax.tree.map(from_foreign, params)
    graph.check(params)
    params = graph.effective_params(params)
    # integers have no gradient
    dtype = jnp.result_type(float)

    def copy(a):
        if isinstance(a, Array):
            return jnp.asarray(a, dtype)
        # copied, since jax may use memory that its owner writes to
        return jax.device_put(np.array(a, dtype))

    return sharding.place(jax.tree.map(copy, params))


def _identity(
    loop: Loop,
    state: TrainState,
    best: BestParams | None,
    path: PathRecorder | None,
    rng_key: Array,
    monitors: Mapping[str, MonitorFn],
    monitor_every: int,
) -> dict[str, object]:
    """Return JSON values that a resumed run must share; its last stage may be longer.

    :param state: the state before the first step.
    """
    graph = loop.graph
    stages = loop.stages
    estimators = [stage.estimator for stage in stages.stages]
    start = np.concatenate([np.ravel(a) for a in jax.tree.leaves(state.params)])
    return {
        "versions": checkpoints.versions(),
        "graph": repr(graph),
        "energies": saving.energies(graph),
        "layers": saving.layers(graph),
        "estimator": [checkpoints.without_addresses(repr(e)) for e in estimators],
        "estimator code": [_estimator_code(e, loop, state.params) for e in estimators],
        "schedule": stages.lengths[:-1] if stages.is_scheduled else None,
        "optimizer": [optimizer.digest for optimizer in loop.optimizers],
        "batch_size": loop.source.batch_size,
        "monitors": {
            name: monitor_identity(fn, state) for name, fn in sorted(monitors.items())
        },
        "state": [
            [list(jnp.shape(a)), str(jnp.result_type(a))]
            for a in jax.tree.leaves(state)
        ],
        "start": archive.digest({"params": start, **loop.past}),
        **loop.source.identity(),
        "rng_key": np.asarray(random.key_pair(rng_key)).tolist(),
        "monitor_every": monitor_every,
        "keep_best": None if best is None else [best.name, best.mode],
        "keep_path": None if path is None else path.capacity,
        "steps_before": loop.before,
    }


def monitor_identity(fn: MonitorFn, state: TrainState) -> str:
    """Return a digest of a monitor's code and data, or its name if it is not compiled."""
    monitor = fn if isinstance(fn, Monitor) else Monitor(fn)
    # the first evaluation raises an error again, with the monitor's name
    with contextlib.suppress(Exception):
        if monitor.compiled:
            inputs = monitor.inputs(state.params, state.estimator)
            code = checkpoints.computation(monitor.fn, *inputs)
            leaves = jax.tree.leaves(monitor.arguments)
            return code + archive.digest({str(i): a for i, a in enumerate(leaves)})
    return getattr(monitor.fn, "__qualname__", type(monitor.fn).__qualname__)


def _estimator_code(estimator: Estimator, loop: Loop, params: Params) -> str:
    """Return a digest of an estimator's code, or nothing if its repr determines the code."""
    is_custom = not type(estimator).__module__.startswith("ebmpp.")
    if is_custom or " at 0x" in repr(estimator):
        # the first step raises an error again
        with contextlib.suppress(Exception):
            sample = loop.source.sample()
            batch = Batch.uniform(sample.rows, sample.known)
            state = loop.init(estimator, params, loop.key)
            estimate = partial(estimator.estimate, loop.graph)
            return checkpoints.computation(estimate, params, state, batch, loop.key)
    return ""
