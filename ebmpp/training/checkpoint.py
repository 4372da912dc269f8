# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: its state, its history, and its identity."""

from collections.abc import Mapping, Sequence
import os
from typing import Any, NamedTuple

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core import archive, checkpoints, sharding
from ebmpp.graph import FactorGraph, saving
from ebmpp.training.batches import Source
from ebmpp.training.history import Monitor
from ebmpp.training.optimizers import computation
from ebmpp.training.steps import Stages, State


class Saved(NamedTuple):
    """Contents of a checkpoint: the number of steps done, and the leaves of the state and the recorders."""

    step: int
    leaves: list[np.ndarray]
    history: dict[str, np.ndarray]


class Checkpoints(checkpoints.Checkpoints):
    """Checkpoints of one call of ``fit``."""

    caller = checkpoints.Caller(
        archive.Kind("ebmpp checkpoint", 3, "ebmpp.fit"), "fit", "checkpoint_dir", "num_steps"
    )

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the differences; the code of another version of jax is not compared."""
        ignored = {"jax"} if saved.get("jax") == self.run["jax"] else {"jax", "optimizer", "monitors"}
        rest = lambda run: {name: value for name, value in run.items() if name not in ignored}
        return checkpoints.differences(rest(saved), rest(self.run))

    def save(self, step: int, leaves: Sequence[Any], history: Mapping[str, np.ndarray]) -> None:
        """Write the state after ``step`` steps; raise OSError if it cannot be written."""
        body = {"leaves": len(leaves), "history": list(history)}
        self.write(step, body, [*leaves, *history.values()])

    def restore(self) -> Saved | None:
        """Return the newest valid checkpoint; None in an empty directory. See :meth:`read` for its errors."""
        checkpoint = self.read(depth=5)
        return None if checkpoint is None else _saved(*checkpoint)


class ProcessCheckpoints:
    """Checkpoints of a run of several processes, which the first process reads and writes."""

    def __init__(self, directory: str | os.PathLike[str], run: Mapping[str, Any], resume: bool) -> None:
        self.directory = directory
        self._first = sharding.by_first(lambda: Checkpoints(directory, run, resume))

    def close(self) -> None:
        """Release the directory."""
        if self._first is not None:
            self._first.close()

    def save(self, step: int, leaves: Sequence[Any], history: Mapping[str, np.ndarray]) -> None:
        """Write by the first process; the others wait. All raise OSError if it fails."""
        arrays, first = sharding.to_host(list(leaves)), self._first
        sharding.by_first(lambda: None if first is None else first.save(step, arrays, history))

    def restore(self) -> Saved | None:
        """Return the newest valid checkpoint, as :meth:`Checkpoints.restore` of the first process does."""
        data = sharding.broadcast_bytes(sharding.by_first(self._newest) or b"")
        if not data:
            return None
        body, arrays = archive.read(data, Checkpoints.caller.kind, "the first process's checkpoint")
        return _saved(body["step"], body, arrays)

    def _newest(self) -> bytes:
        """Return the file that the first process has read."""
        checkpoint = None if self._first is None else self._first.read(depth=6)
        return b"" if self._first is None or checkpoint is None else self._first.bytes_of(checkpoint.step)


def _saved(step: int, body: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Saved:
    count = body["leaves"]
    return Saved(step, list(arrays[:count]), dict(zip(body["history"], arrays[count:], strict=True)))


def run_identity(
    graph: FactorGraph,
    stages: Stages,
    source: Source,
    state: State,
    optimizers: Sequence[str],
    monitors: Mapping[str, Any],
) -> dict[str, Any]:
    """Return JSON values that a resumed run must share; its last stage may be longer."""
    estimators = [checkpoints.without_addresses(repr(stage.estimator)) for stage in stages.stages]
    lengths = [*(stage.num_steps for stage in stages.stages[:-1]), "the rest"]
    schedule = {"schedule": [list(pair) for pair in zip(lengths, estimators, strict=True)]}
    start = np.concatenate([np.ravel(a) for a in jax.tree.leaves(state.params)])
    return {
        "jax": jax.__version__,
        "graph": repr(graph),
        "energies": saving.energies(graph),
        "layers": saving.layers(graph),
        **(schedule if stages.scheduled else {"estimator": estimators[0]}),
        "optimizer": list(optimizers),
        "batch_size": source.batch_size,
        "monitors": {name: monitor_identity(fn, state) for name, fn in sorted(monitors.items())},
        "state": [[list(jnp.shape(a)), str(jnp.result_type(a))] for a in jax.tree.leaves(state)],
        "start": archive.digest({"params": start}),
        **source.identity(),
    }


def monitor_identity(fn: Any, state: State) -> str:
    """Return a digest of a monitor's code and data, or its name if it is not compiled."""
    monitor = fn if isinstance(fn, Monitor) else Monitor(fn)
    args = (state.params, *([state.estimator] if monitor.takes_state else []), *monitor.arguments)
    try:
        code = computation(monitor.fn, *args) if monitor.compiled else ""
    except Exception:  # the first evaluation raises it again, with the monitor's name
        code = ""
    data = archive.digest({str(i): a for i, a in enumerate(jax.tree.leaves(monitor.arguments))})
    return code + data if code else getattr(monitor.fn, "__qualname__", type(monitor.fn).__qualname__)
