# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The training loop: data, an estimator, an optimiser, and a history."""

from collections.abc import Iterator, Mapping
import dataclasses
from functools import partial
import itertools
import os
import time
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm
import xarray as xr

import jax
from jax import Array
import jax.numpy as jnp
import optax

from ebmpp import bits, states
from ebmpp.checkpoint import Checkpoints, digest
from ebmpp.errors import DivergenceError, StateError
from ebmpp.estimators import UCD, Batch, Estimator
from ebmpp.graph import FactorGraph
from ebmpp.history import Log, Monitor

Params = Any
_LOOK_EVERY = 50  # steps between looks at the device when nothing is shown


@dataclasses.dataclass(frozen=True)
class Fit:
    """A trained model.

    :param graph: what was trained.
    :param params: the last params.
    :param history: an ``xarray.Dataset``: per ``step`` the gradient norm and, where the estimator couples
        chains, ``meeting_time_mean``, ``meeting_time_max``, ``num_unmet``, ``lag``, ``k``, ``trials``;
        per ``monitor_step`` the monitors.
    :param optimizer_state: optax state after the last step.
    :param estimator_state: what the estimator carries (persistent chains, the adaptive lag).
    """

    graph: FactorGraph
    params: Params
    history: xr.Dataset
    optimizer_state: Any
    estimator_state: Any


def fit(
    graph: FactorGraph,
    data: Mapping[str, Array] | Array,
    *,
    rng_key: Array,
    estimator: Estimator | None = None,
    optimizer: optax.GradientTransformation | None = None,
    num_steps: int = 1000,
    batch_size: int = 100,
    params: Params | None = None,
    scheme: str | Mapping[str, str] = "gaussian",
    monitors: Mapping[str, Monitor] | None = None,
    monitor_every: int = 100,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 500,
    resume: bool = False,
    progress_bar: bool = True,
) -> Fit:
    """Maximise the likelihood of ``data`` by stochastic gradients.

    One step is compiled once; data stay on the device, and batches are rows of a fresh permutation each
    epoch.

    :param graph: the model.
    :param data: rows of the visible blocks, ``(rows, *shape)`` each; a bare array for a single block.
    :param rng_key: a jax key: the same key gives the same run.
    :param estimator: :class:`UCD` (default), :class:`CD`, :class:`PCD`, or your own.
    :param optimizer: any optax transformation; default ``optax.sgd(0.1)``.
    :param num_steps: gradient steps.
    :param batch_size: rows a step, or all rows where there are fewer.
    :param params: start from these instead of ``graph.init(rng_key, data, scheme)``.
    :param scheme: see :meth:`FactorGraph.init`.
    :param monitors: functions of the params to a scalar, kept in the history.
    :param monitor_every: steps between monitor values (the first step and the last are included).
    :param checkpoint_dir: keep checkpoints of params, optimiser, estimator and history there. A resumed run
        ends with bitwise the params of one that was never stopped.
    :param checkpoint_every: steps between checkpoints; the last step makes one too.
    :param resume: go on from the newest whole checkpoint in ``checkpoint_dir``, or start where there is none.
        Call ``fit`` as the stopped run was called; ``num_steps`` may be larger.
    :param progress_bar: show one.
    :return: a :class:`Fit`.
    :raises StateError: for data of a wrong name, shape or value, NaN included.
    :raises ParameterError: for params that do not fit, or under which the model does not normalise.
    :raises DivergenceError: when params or gradient stop being finite, or a pair is unmet; it carries the
        last good params and the history.
    :raises CheckpointError: for checkpoints of another run, all of them damaged, or there without ``resume``.

    **Example**

    >>> import jax, optax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.CD(k=1), optimizer=optax.sgd(0.1), progress_bar=False)
    >>> fit.history.sizes["step"]
    5
    """
    estimator = UCD() if estimator is None else estimator
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    _check_counts(
        num_steps=num_steps,
        batch_size=batch_size,
        monitor_every=monitor_every,
        checkpoint_every=checkpoint_every,
    )
    rows = _device_rows(graph, data)
    size = len(next(iter(rows.values())))
    init_key, base_key, order_key = jax.random.split(rng_key, 3)
    params = graph.init(init_key, rows, scheme) if params is None else params
    graph.check(params)
    pair = bits.key_pair(base_key)
    batch_size = min(batch_size, size)
    loop = _Loop(graph, estimator, optimizer, rows, pair)
    state = _State(
        jax.tree.map(jnp.asarray, params),
        optimizer.init(params),
        estimator.init(graph, params, rows, batch_size, bits.fold_in(pair, 0, 1)),
        jnp.array(True),
    )
    log = Log(monitors or {}, monitor_every)
    start, save = 0, None
    if checkpoint_dir is not None:
        run = _identity(graph, estimator, rows, batch_size, state, rng_key, monitors, monitor_every)
        save = Checkpoints(checkpoint_dir, run, resume)
    try:
        if save is not None:
            start, state = _restored(save, state, log)
        batches = itertools.islice(_batches(size, batch_size, order_key), start, num_steps)
        with _bar(num_steps, start, progress_bar) as bar:
            looked = 0.0
            for step, index in enumerate(batches, start):
                if step % monitor_every == 0:
                    log.monitor(step, state.params)
                state, metrics = loop.step(state, index, step)
                log.append(metrics)
                bar.update()
                if (progress_bar and time.monotonic() - looked > 0.5) or step % _LOOK_EVERY == 0:
                    bar.set_postfix(log.latest(), refresh=False)
                    _stop_if_failed(state, log)
                    looked = time.monotonic()
                if save is not None and ((step + 1) % checkpoint_every == 0 or step + 1 == num_steps):
                    _stop_if_failed(state, log)  # what failed is not kept
                    save.save(step + 1, jax.tree.leaves(state), log.arrays())
    finally:
        if save is not None:
            save.close()
    _stop_if_failed(state, log)
    log.monitor(num_steps, state.params)
    return Fit(graph, state.params, log.dataset(), state.optimizer, state.estimator)


def _bar(num_steps: int, start: int, shown: bool) -> tqdm:
    return tqdm(total=num_steps, initial=start, disable=not shown, desc="training", unit="step")


def _identity(
    graph: FactorGraph,
    estimator: Estimator,
    rows: dict[str, Array],
    batch_size: int,
    state: "_State",
    rng_key: Array,
    monitors: Mapping[str, Monitor] | None,
    monitor_every: int,
) -> dict[str, Any]:
    """What two runs must have in common for one to go on where the other stopped."""
    shapes = [[list(jnp.shape(leaf)), str(jnp.result_type(leaf))] for leaf in jax.tree.leaves(state)]
    return {
        "graph": repr(graph),
        "estimator": repr(estimator) if dataclasses.is_dataclass(estimator) else type(estimator).__qualname__,
        "batch_size": batch_size,
        "rng_key": np.asarray(bits.key_pair(rng_key)).tolist(),
        "monitors": [sorted(monitors or {}), monitor_every],
        "state": shapes,
        "start": digest({"params": np.concatenate([np.ravel(a) for a in jax.tree.leaves(state.params)])}),
        "data": digest(jax.device_get(rows)),
    }


def _restored(save: Checkpoints, state: "_State", log: Log) -> tuple[int, "_State"]:
    """Steps done and the state after them; the log gets its history back."""
    found = save.restore()
    if found is None:
        return 0, state
    log.load(found.history)
    return found.step, jax.tree.unflatten(jax.tree.structure(state), map(jnp.asarray, found.leaves))


class _State(NamedTuple):
    """Everything a step changes."""

    params: Params
    optimizer: Any
    estimator: Any
    ok: Array  # False from the first step that was not finite


class _Loop:
    def __init__(
        self,
        graph: FactorGraph,
        estimator: Estimator,
        optimizer: optax.GradientTransformation,
        rows: dict[str, Array],
        pair: Array,
    ) -> None:
        self.graph, self.estimator, self.optimizer = graph, estimator, optimizer
        self.rows, self.pair = rows, pair

    def step(self, state: _State, index: Array, step: int) -> tuple[_State, dict[str, Array]]:
        """One gradient and one update; after a failure the state stays as it was."""
        key = np.uint32(step)
        gradient, carried, metrics = estimate_step(
            self.graph, self.estimator, state.params, state.estimator, self.rows, index, self.pair, key
        )
        # Two programs: trying another optimiser does not compile the estimator again.
        params, optimizer, ok, norm = _update(
            self.optimizer, gradient, state.params, state.optimizer, state.ok
        )
        return _State(params, optimizer, carried, ok), {"gradient_norm": norm, "ok": ok, **metrics}


@partial(jax.jit, static_argnums=(0, 1))
def estimate_step(
    graph: FactorGraph,
    estimator: Estimator,
    params: Params,
    state: Any,
    rows: dict[str, Array],
    index: Array,
    pair: Array,
    step: Array,
) -> tuple[Params, Any, dict[str, Array]]:
    """One gradient estimate from the rows ``index``."""
    batch = Batch.of({b: v[index] for b, v in rows.items()})
    made = estimator.estimate(graph, params, state, batch, bits.fold_in(pair, step, 2))
    return made.gradient, made.state, made.metrics


@partial(jax.jit, static_argnums=0)
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
    keep = lambda new, old: jnp.where(ok, new, old)  # noqa: E731
    params, state = jax.tree.map(keep, (proposed, moved), (params, state))
    return params, state, ok, optax.tree.norm(gradient)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"fit: {name} is a positive int, not {value!r}")


def _device_rows(graph: FactorGraph, data: Mapping[str, Array] | Array) -> dict[str, Array]:
    """Checked data on the device."""
    rows, batch = states.as_rows(graph.families, graph.as_visible(data), tuple(graph.visible))
    if len(batch) != 1 or batch[0] < 1:
        raise StateError(
            f"data need one leading axis of at least one row; got leading axes {batch} before the blocks' "
            f"own shapes { ({b: f.shape for b, f in graph.visible.items()}) }"
        )
    return {b: jax.device_put(v.astype(graph.families[b].dtype)) for b, v in rows.items()}


def _batches(size: int, batch_size: int, order_key: Array) -> Iterator[Array]:
    """Row indices: permutation after permutation, cut into batches; no row is left out."""
    if batch_size == size:
        everything = jnp.arange(size)
        while True:
            yield everything
    generator = np.random.default_rng(np.asarray(bits.key_pair(order_key)))
    waiting = np.empty(0, np.int32)
    while True:
        while len(waiting) < batch_size:
            waiting = np.concatenate([waiting, generator.permutation(size).astype(np.int32)])
        yield jnp.asarray(waiting[:batch_size])
        waiting = waiting[batch_size:]


def _stop_if_failed(state: _State, log: Log) -> None:
    if bool(state.ok):
        return
    step = log.failed_at()
    unmet = sum(float(log.steps[step].get(name, 0)) for name in ("num_unmet", "posterior_num_unmet"))
    if unmet:
        reason = (
            f"{unmet:.0f} coupled pairs had not met: raise max_sweeps, or see "
            "UCD(allow_unmet=True), which biases the gradient. Without max_sweeps, params are too large "
            "for float32"
        )
    else:
        norm = float(log.steps[step]["gradient_norm"])
        reason = f"gradient or params were not finite (gradient norm {norm:.4g}): lower the learning rate"
    raise DivergenceError(
        f"training stopped at step {step}: {reason}. The error's .params are those before that step, and "
        ".history holds the steps before",
        state.params,
        log.dataset(step),
        step,
    )
