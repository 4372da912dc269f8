# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: its state and its history."""

from collections.abc import Mapping, Sequence
import os
from typing import Any, NamedTuple

import numpy as np

from ebmpp.core import archive, checkpoints, sharding
from ebmpp.training import identity


class Saved(NamedTuple):
    """What a checkpoint holds."""

    step: int
    """Steps done."""
    leaves: list[np.ndarray]
    """Of the state, in the order of its pytree."""
    history: dict[str, np.ndarray]


class Checkpoints(checkpoints.Checkpoints):
    """Those of one call of ``fit``."""

    caller = checkpoints.Caller(
        archive.Kind("ebmpp checkpoint", 2, "ebmpp.fit"), "fit", "checkpoint_dir", "num_steps"
    )

    def fingerprint(self) -> str:
        """A hash of what identifies the run, but for what is compared up to a tolerance."""
        return identity.fingerprint(self.run)

    def differences(self, there: Mapping[str, Any]) -> list[str]:
        """As of every run; optimisers are compared by what they do."""
        return identity.differences(there, self.run)

    def save(self, step: int, leaves: Sequence[Any], history: Mapping[str, np.ndarray]) -> None:
        """Write the state after ``step`` steps.

        :raises OSError: where the disk does not take it; checkpoints that were there are there still.
        """
        told = {"leaves": len(leaves), "history": list(history)}
        self.write(step, told, [*leaves, *history.values()])

    def restore(self) -> Saved | None:
        """The newest checkpoint that is whole; None in an empty directory.

        :raises CheckpointError: when all are damaged, the newest whole one is another run's, or the disk
            fails.
        """
        found = self.read(depth=5)
        return None if found is None else _saved(found.step, found.told, found.arrays)


class OfProcesses:
    """The checkpoints of a run of several processes: the first one has the disk, and tells the others."""

    def __init__(self, directory: str | os.PathLike[str], run: Mapping[str, Any], resume: bool) -> None:
        self.directory = directory
        self._own = sharding.by_first(lambda: Checkpoints(directory, run, resume))

    def close(self) -> None:
        """Let another run use the directory."""
        if self._own is not None:
            self._own.close()

    def save(self, step: int, leaves: Sequence[Any], history: Mapping[str, np.ndarray]) -> None:
        """By the first process; the others wait for it.

        :raises OSError: in all, where the disk does not take it.
        """
        whole, own = sharding.to_host(list(leaves)), self._own
        sharding.by_first(lambda: None if own is None else own.save(step, whole, history))

    def restore(self) -> Saved | None:
        """The newest checkpoint that is whole, as the first process reads it.

        :raises CheckpointError: as :meth:`Checkpoints.restore` does.
        """
        data = sharding.shared_bytes(sharding.by_first(self._newest) or b"")
        if not data:
            return None
        body, arrays = archive.read(data, Checkpoints.caller.kind, "the first process's checkpoint")
        return _saved(body["step"], body, arrays)

    def check_length(self, step: int, total: int) -> None:
        """:raises CheckpointError: in all, for a checkpoint of more steps than the run has."""
        checkpoints.check_length(Checkpoints.caller, self.directory, step, total)

    def _newest(self) -> bytes:
        """Of the first process: what it has read, once more as it is."""
        found = None if self._own is None else self._own.read(depth=6)
        return b"" if self._own is None or found is None else self._own.bytes_of(found.step)


def _saved(step: int, told: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Saved:
    count = told["leaves"]
    history = dict(zip(told["history"], arrays[count:], strict=True))
    return Saved(step, list(arrays[:count]), history)
