# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: its state, its history, and its identity."""

from collections.abc import Mapping, Sequence
import os
from typing import Any

import numpy as np

import jax

from ebmpp.core import archive, checkpoints, sharding
from ebmpp.training.history import Monitor
from ebmpp.training.optimizers import computation
from ebmpp.training.steps import State


class Checkpoints(checkpoints.Checkpoints):
    """Checkpoints of one call of ``fit``."""

    kind = archive.Kind("ebmpp checkpoint", 3, "ebmpp.fit")
    function = "fit"
    argument = "checkpoint_dir"
    total = "num_steps"

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the differences; the code of another version of jax is not compared."""
        ignored = (
            {"jax"}
            if saved.get("jax") == self.run["jax"]
            else {"jax", "optimizer", "monitors"}
        )

        def rest(run):
            return {name: value for name, value in run.items() if name not in ignored}

        return checkpoints.differences(rest(saved), rest(self.run))


class SharedCheckpoints:
    """Checkpoints of a run of one or several processes, which the first process reads and writes."""

    def __init__(
        self, directory: str | os.PathLike[str], run: Mapping[str, Any], resume: bool
    ) -> None:
        self.directory = directory
        self._first = sharding.run_on_first(lambda: Checkpoints(directory, run, resume))

    def close(self) -> None:
        """Release the directory."""
        if self._first is not None:
            self._first.close()

    def save(
        self, step: int, leaves: Sequence[Any], history: Mapping[str, np.ndarray]
    ) -> None:
        """Write the state after ``step`` steps; the others wait. All raise OSError if it fails."""
        body = {"leaves": len(leaves), "history": list(history)}
        first = self._first
        arrays = [*sharding.to_host(list(leaves)), *history.values()]
        sharding.run_on_first(
            lambda: None if first is None else first.write(step, body, arrays)
        )

    def restore(self) -> tuple[int, list[np.ndarray], dict[str, np.ndarray]] | None:
        """Return the contents of the newest valid checkpoint; None in an empty directory.

        These are the number of steps done, the leaves of the state and the recorders,
        and the history. See ``Checkpoints.read``.
        """
        first = self._first
        checkpoint = sharding.run_on_first(
            lambda: None if first is None else first.read(depth=7)
        )
        if sharding.processes() > 1:
            file = (
                b""
                if first is None or checkpoint is None
                else first.bytes_of(checkpoint.step)
            )
            if data := sharding.broadcast_bytes(file):
                body, arrays = archive.read(
                    data, Checkpoints.kind, "the first process's checkpoint"
                )
                checkpoint = checkpoints.Checkpoint(body["step"], body, arrays)
        if checkpoint is None:
            return None
        step, body, arrays = checkpoint
        count = body["leaves"]
        names = body["history"]
        return step, list(arrays[:count]), dict(zip(names, arrays[count:], strict=True))


def monitor_identity(fn: Any, state: State) -> str:
    """Return a digest of a monitor's code and data, or its name if it is not compiled."""
    monitor = fn if isinstance(fn, Monitor) else Monitor(fn)
    args = (
        state.params,
        *([state.estimator] if monitor.takes_state else []),
        *monitor.arguments,
    )
    try:
        code = computation(monitor.fn, *args) if monitor.compiled else ""
    except Exception:  # the first evaluation raises it again, with the monitor's name
        code = ""
    data = archive.digest(
        {str(i): a for i, a in enumerate(jax.tree.leaves(monitor.arguments))}
    )
    return (
        code + data
        if code
        else getattr(monitor.fn, "__qualname__", type(monitor.fn).__qualname__)
    )
