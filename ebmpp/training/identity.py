# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Identity of a training run, which a resumed run must share."""

from collections.abc import Mapping
import contextlib
from functools import partial

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Params, archive, checkpoints, random
from ebmpp.estimators.base import Batch, Estimator
from ebmpp.graph import saving
from ebmpp.training.history import Monitor, MonitorFn
from ebmpp.training.loop import Loop
from ebmpp.training.observers.monitoring import BestParams
from ebmpp.training.observers.path import PathRecorder
from ebmpp.training.steps import TrainState


def run_identity(
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
        "estimator code": [estimator_code(e, loop, state.params) for e in estimators],
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


def estimator_code(estimator: Estimator, loop: Loop, params: Params) -> str:
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
