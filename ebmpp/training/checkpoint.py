# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: its state and its history."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ebmpp.core import archive, checkpoints
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
        if found is None:
            return None
        count, names = found.told["leaves"], found.told["history"]
        history = dict(zip(names, found.arrays[count:], strict=True))
        return Saved(found.step, found.arrays[:count], history)
