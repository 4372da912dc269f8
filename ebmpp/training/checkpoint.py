# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: its state, its history, and its identity."""

from collections.abc import Mapping, Sequence
import os
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core import archive, checkpoints, sharding
from ebmpp.graph import FactorGraph, saving
from ebmpp.training.batches import Source
from ebmpp.training.history import Monitor
from ebmpp.training.optimizers import Comparable, computation
from ebmpp.training.steps import Stages, State


class Checkpoints(checkpoints.Checkpoints):
    """Checkpoints of one call of ``fit``."""

    kind = archive.Kind("ebmpp checkpoint", 3, "ebmpp.fit")
    function, argument, total = "fit", "checkpoint_dir", "num_steps"

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the differences; the code of another version of jax is not compared."""
        ignored = {"jax"} if saved.get("jax") == self.run["jax"] else {"jax", "optimizer", "monitors"}
        rest = lambda run: {name: value for name, value in run.items() if name not in ignored}
        return checkpoints.differences(rest(saved), rest(self.run))


class SharedCheckpoints:
    """Checkpoints of a run of one or several processes, which the first process reads and writes."""

    def __init__(self, directory: str | os.PathLike[str], run: Mapping[str, Any], resume: bool) -> None:
        self.directory = directory
        self._first = sharding.by_first(lambda: Checkpoints(directory, run, resume))

    def close(self) -> None:
        """Release the directory."""
        if self._first is not None:
            self._first.close()

    def save(self, step: int, leaves: Sequence[Any], history: Mapping[str, np.ndarray]) -> None:
        """Write the state after ``step`` steps; the others wait. All raise OSError if it fails."""
        body, first = {"leaves": len(leaves), "history": list(history)}, self._first
        arrays = [*sharding.to_host(list(leaves)), *history.values()]
        sharding.by_first(lambda: None if first is None else first.write(step, body, arrays))

    def restore(self) -> tuple[int, list[np.ndarray], dict[str, np.ndarray]] | None:
        """Return the contents of the newest valid checkpoint; None in an empty directory.

        These are the number of steps done, the leaves of the state and the recorders, and the history. See
        ``Checkpoints.read``.
        """
        first = self._first
        checkpoint = sharding.by_first(lambda: None if first is None else first.read(depth=7))
        if sharding.processes() > 1:
            file = b"" if first is None or checkpoint is None else first.bytes_of(checkpoint.step)
            if data := sharding.broadcast_bytes(file):
                body, arrays = archive.read(data, Checkpoints.kind, "the first process's checkpoint")
                checkpoint = checkpoints.Checkpoint(body["step"], body, arrays)
        if checkpoint is None:
            return None
        step, body, arrays = checkpoint
        count, names = body["leaves"], body["history"]
        return step, list(arrays[:count]), dict(zip(names, arrays[count:], strict=True))


def run_identity(
    graph: FactorGraph,
    stages: Stages,
    source: Source,
    state: State,
    optimizers: Sequence[Comparable],
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
        "optimizer": [optimizer.digest for optimizer in optimizers],
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
