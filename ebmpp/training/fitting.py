# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""``fit``: data, an estimator, an optimiser, and a history."""

from collections.abc import Mapping, Sequence
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from ebmpp.annealing.path import Path
from ebmpp.core import checks, random, sharding
from ebmpp.core.archive import digest
from ebmpp.core.display import Card, Shown
from ebmpp.core.types import Params
from ebmpp.errors import ArgumentError
from ebmpp.estimators import Estimator
from ebmpp.graph import FactorGraph, saving
from ebmpp.training import cards
from ebmpp.training.batches import Data, as_source
from ebmpp.training.callbacks import Best, Callback
from ebmpp.training.checkpoint import Checkpoints, OfProcesses
from ebmpp.training.identity import monitor_identity
from ebmpp.training.loop import Loop
from ebmpp.training.schedule import Stage, Stages
from ebmpp.training.steps import State
from ebmpp.training.trail import Trail, reference, room
from ebmpp.training.watching import Watch

if TYPE_CHECKING:
    import xarray as xr

_DEFAULT_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Fit(Shown):
    """A trained model.

    :param graph: what was trained.
    :param params: the last params.
    :param history: an ``xarray.Dataset``: per ``step`` the gradient norm and, where the estimator couples
        chains, ``meeting_time_mean``, ``meeting_time_max``, ``num_unmet``, ``lag``, ``k``, ``trials``;
        per ``monitor_step`` the monitors. With a schedule also ``stage``, and nan where a stage does not
        have a metric.
    :param optimizer_state: optax state after the last step.
    :param estimator_state: what the estimator carries (persistent chains, the adaptive lag).
    :param best_params: with ``keep_best``, the params at the monitor's best value; None where it had none.
    :param best_step: how many steps had been done then.
    :param path: with ``keep_path``, from independent units to the last params: what :func:`ebmpp.smc`,
        :func:`ebmpp.particle_expectation` and :class:`ebmpp.ParallelTempering` take as ``path``.
    :param estimator: that of the last stage, whose state the last one is.
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

    def __repr__(self) -> str:
        steps, by = self.history.sizes["step"], f" by {self.estimator!r}" if self.estimator else ""
        best = "" if self.best_step is None else f", best at step {self.best_step}"
        params = sum(np.size(a) for a in jax.tree.leaves(self.params))
        return f"Fit({steps} steps{by}, {params} params in {len(self.params)} factors{best})"

    def _card(self) -> Card:
        return cards.card(repr(self), self.graph, self.params, self.history)


def fit(
    graph: FactorGraph,
    data: Data,
    *,
    rng_key: Array,
    estimator: Estimator | None = None,
    optimizer: optax.GradientTransformation | None = None,
    num_steps: int | None = None,
    schedule: Sequence[Stage] | None = None,
    batch_size: int | None = None,
    weights: Array | None = None,
    params: Params | None = None,
    scheme: str | Mapping[str, str] = "gaussian",
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

    Up to 50 steps run in one compiled program, between the steps at which monitors, callbacks and
    checkpoints look at the run; a chunk of expensive steps ends earlier, after about a second. Batches are
    rows of a fresh permutation each epoch.

    ``data`` are one of these:

    * arrays, which are put on the device: rows of the visible blocks, ``(rows, *shape)`` each, in a dict, or
      a bare array for a single block. Lists, data frames and whatever else has ``__array__`` will do;
    * ``numpy.memmap`` arrays, likewise: each step's rows are read from the file and checked before their step
      comes, and the base rates are those of some thousand rows;
    * batches that somebody else makes: an iterable of arrays or dicts, or a function that returns one. All
      have one size, each is used once, and the first makes the base rates. A resumed run passes over those
      that were used before, so the iterable is given anew, from its beginning.

    A block may be an :class:`Observed` in each of these: rows that lack entries train on the likelihood of
    what is known. Missing entries are drawn on the posterior together with the latents, without bias under
    :class:`UCD`; base rates are those of known entries.

    :param graph: the model.
    :param data: as above.
    :param rng_key: a jax key: the same key gives the same run.
    :param estimator: :class:`UCD` (default), :class:`CD`, :class:`PCD`, or your own.
    :param optimizer: any optax transformation; default ``optax.sgd(0.1)``.
    :param num_steps: gradient steps; default 1000.
    :param schedule: in place of estimator, optimizer and num_steps: a :class:`Stage` after the other.
    :param batch_size: rows a step, or all rows where there are fewer; default 100, or the stream's.
    :param weights: one a row, not negative: row i counts w_i times, up to a constant factor. Not for streams.
    :param params: start from these instead of ``graph.init(rng_key, data, scheme)``; taken as jax's default
        floats.
    :param scheme: "gaussian", "orthogonal", or a dict of both parts: see :meth:`FactorGraph.init`.
    :param monitors: functions of the params to a scalar, kept in the history; see :mod:`ebmpp.monitors`.
    :param monitor_every: steps between monitor values (the first step and the last are included).
    :param callbacks: called at each of these steps with a :class:`Progress`; one that returns True stops the
        run, such as :class:`EarlyStop`. An exception in one ends the run and keeps the checkpoints.
    :param keep_best: the name of a monitor, or ``(name, "min")``: the params at its best value are kept.
    :param keep_path: keep the way that the params went, as ``Fit.path``. While the run goes on, 64
        checkpoints at most, or as many as are given here (at least 2), stay in memory, at a stride of steps
        that doubles where there is no room. At the end 500 particles go along them, from independent units at
        the data's base rates, and the path has a knot wherever half of them have stayed effective since the
        last one.
    :param checkpoint_dir: keep checkpoints of params, optimiser, estimator and history there: files of names
        of their own, beside which others are let alone, of one run at a time. A resumed run ends with bitwise
        the params of one that was never stopped, whatever stopped it: an interrupt from the keyboard or a
        kill costs the steps since the last checkpoint.
    :param checkpoint_every: steps between checkpoints; the last step makes one too.
    :param resume: go on from the newest whole checkpoint in ``checkpoint_dir``, or start where there is none.
        Call ``fit`` as the stopped run was called: other data, another model, estimator or key, an optimiser
        that makes other updates, or monitors that compute or hold something else are refused. The number of
        steps (of the last stage) may be larger, and callbacks are free.
    :param mesh: devices to share the work: a batch's rows, chains and coupled pairs go over the mesh's first
        axis, and params are on every device, or cut as they are given (over another axis, say). Meeting times
        are those of one device, pair by pair; gradients are added up in another order. Under
        ``jax.distributed`` every process calls ``fit`` alike, with **its own part** of the rows (as many in
        each; ``batch_size`` is that of all together) and the same params; the first one writes checkpoints
        and shows the progress, and callbacks must decide alike in all. None: where jax puts things.
    :param progress_bar: show one.
    :return: a :class:`Fit`.
    :warns UserWarning: where an estimator's metrics say that it did not do what it is for, or ``keep_path``
        takes too many knots, so that the path is not thinned.
    :raises StateError: for data or weights of a wrong name, shape or value, NaN included.
    :raises ParameterError: for params that do not fit, or under which the model does not normalise.
    :raises DivergenceError: when params or gradient stop being finite, or a pair is unmet; it carries the
        last good params and the history.
    :raises NormalizationError: when training leaves the params under which the model normalises, which is
        looked at every 50 steps, before monitors, callbacks and checkpoints, and at the end; it carries the
        last that were seen to normalise.
    :raises DataError: when a stream ends too early, or a row that comes later is wrong; it carries the same.
    :raises CheckpointError: for checkpoints of another run, all of them damaged, or there without ``resume``;
        for a directory that another run is using, or a disk that fails. :class:`CheckpointWriteError`, where
        that is amid the run, carries the params and the history.
    :raises ArgumentError: for numbers out of range, a schedule beside what it replaces, or what is no key, no
        estimator, no optimizer that goes by gradients alone, or no function to a scalar; under ``jit``.

    **Example**

    >>> import jax, optax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.CD(k=1), optimizer=optax.sgd(0.1), progress_bar=False)
    >>> fit.history.sizes["step"]
    5

    Entries that are missing, say nan in a table:

    >>> table = ebmpp.data.bars_and_stripes(3)
    >>> table[::2, 4] = float("nan")
    >>> fit = ebmpp.fit(rbm, ebmpp.Observed.where_finite(table), rng_key=jax.random.key(0), num_steps=5,
    ...                 progress_bar=False)
    >>> fit.history.posterior_num_unmet.values.tolist()
    [0, 0, 0, 0, 0]
    """
    checks.instance("fit: graph", graph, FactorGraph, "a FactorGraph")
    rng_key = checks.key("fit: rng_key", rng_key)
    checks.on_host("fit", rng_key, params, weights, data)
    num_steps = checks.optional_count("fit: num_steps", num_steps)
    batch_size = checks.optional_count("fit: batch_size", batch_size)
    every = checks.count("fit: monitor_every", monitor_every)
    checkpoint_every = checks.count("fit: checkpoint_every", checkpoint_every)
    resume, progress_bar = checks.flag("fit: resume", resume), checks.flag("fit: progress_bar", progress_bar)
    if resume and checkpoint_dir is None:
        raise ArgumentError("fit: resume=True goes on from a checkpoint: give checkpoint_dir, where they are")
    stages = _stages(schedule, estimator, optimizer, num_steps)
    monitors, callbacks = _monitors(monitors), _callbacks(callbacks)
    with sharding.over("fit: mesh", mesh):
        init_key, base_key, order_key = jax.random.split(rng_key, 3)
        source = as_source(graph, data, weights, batch_size, order_key)
        if params is None:
            sample = source.sample()
            params = graph.init(init_key, sample.observed(), scheme, sample.weights)
        params = _as_own(graph, params)
        best = None if keep_best is None else Best(keep_best, tuple(monitors), params)
        trail = None if (size := room(keep_path)) is None else Trail(size, params)
        eta0 = None if trail is None else reference(graph, source.sample())
        key = random.key_pair(base_key)
        loop = Loop(
            graph,
            stages,
            source,
            key,
            params,
            monitors=monitors,
            every=every,
            callbacks=callbacks,
            best=best,
            trail=trail,
        )
        start, state = 0, loop.begin(0, params)
        save = None
        if checkpoint_dir is not None:
            run = {
                "graph": repr(graph),
                "energies": saving.energies(graph),
                "layers": saving.layers(graph),
                **stages.identity(params),
                "batch_size": source.batch_size,
                "rng_key": np.asarray(random.key_pair(rng_key)).tolist(),
                "monitors": monitor_identity(monitors),
                "monitor_every": every,
                "keep_best": None if best is None else [best.name, best.mode],
                "keep_path": None if trail is None else trail.size,
                **_state_identity(state),
                **source.identity(),
            }
            kind = Checkpoints if sharding.processes() == 1 else OfProcesses
            save = kind(checkpoint_dir, run, resume)
        try:
            if save is not None:
                start, state = loop.keep(save, checkpoint_every, state)
            state = loop.run(start, state, progress_bar)
        finally:
            if save is not None:
                save.close()
        kept = (None, None) if best is None else (best.params, best.step)
        path = None
        if trail is not None and eta0 is not None:
            path = trail.path(graph, eta0, state.params, random.fold_in(key, 0, 3))
    history = loop.log.dataset().copy(deep=True)  # the caller's own, to write
    last = stages[-1].estimator
    return Fit(graph, state.params, history, state.optimizer, state.estimator, *kept, path, last)


def _as_own(graph: FactorGraph, params: Params) -> Params:
    """Params that nobody else writes into, on the devices of the mesh."""
    foreign = lambda a: hasattr(a, "__array__") and not isinstance(a, Array)  # of torch, say
    params = jax.tree.map(lambda a: np.asarray(a) if foreign(a) else a, params)
    graph.check(params)
    # Whole numbers have no gradient, and params of fewer bits than the data's would not stay what they are.
    # numpy arrays are copied, for jax may take them as they stand, and their owner may write into them.
    floats = jnp.result_type(float)
    own = lambda a: jnp.asarray(a, floats) if isinstance(a, Array) else jax.device_put(np.array(a, floats))
    return sharding.place(jax.tree.map(own, params))


def _monitors(given: Mapping[str, Watch] | None) -> dict[str, Watch]:
    checks.instance(
        "fit: monitors", {} if given is None else given, Mapping, "a dict of functions of the params"
    )
    monitors = dict(given or {})
    for name, fn in monitors.items():
        checks.instance("fit: a monitor's name", name, str, "a string")
        checks.function(f"fit: monitor {name!r}", fn, "the params")
    return monitors


def _callbacks(given: Sequence[Callback]) -> tuple[Callback, ...]:
    callbacks = tuple(checks.sequence("fit: callbacks", given, "functions of a Progress"))
    for i, fn in enumerate(callbacks):
        checks.function(f"fit: callbacks[{i}]", fn, "a Progress")
    return callbacks


def _stages(
    schedule: Sequence[Stage] | None,
    estimator: Estimator | None,
    optimizer: optax.GradientTransformation | None,
    num_steps: int | None,
) -> Stages:
    single = {"estimator": estimator, "optimizer": optimizer, "num_steps": num_steps}
    given = {name: value for name, value in single.items() if value is not None}
    if schedule is None:
        return Stages([dataclasses.replace(Stage(num_steps=_DEFAULT_STEPS), **given)], scheduled=False)
    if given:
        raise ArgumentError(f"fit: schedule takes the place of {', '.join(given)}; give them to its stages")
    return Stages(schedule, scheduled=True)


def _state_identity(state: State) -> dict[str, Any]:
    """Where a run starts: the shapes of its state, and its params."""
    shapes = [[list(jnp.shape(leaf)), str(jnp.result_type(leaf))] for leaf in jax.tree.leaves(state)]
    flat = np.concatenate([np.ravel(a) for a in jax.tree.leaves(state.params)])
    return {"state": shapes, "start": digest({"params": flat})}
