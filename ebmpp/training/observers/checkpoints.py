# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: its state and its history."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
from typing import Any

import jax

from ebmpp import errors
from ebmpp.core import archive, checkpoints, sharding
from ebmpp.training.history import Log
from ebmpp.training.observers.base import Observer
from ebmpp.training.observers.guard import Guard
from ebmpp.training.observers.monitoring import BestParams
from ebmpp.training.observers.path import PathRecorder
from ebmpp.training.steps import TrainState


class FitCheckpoints(checkpoints.Checkpoints):
    """Checkpoints of one call of ``fit``."""

    kind = archive.Kind("ebmpp checkpoint", 4, "ebmpp.fit")
    function = "fit"
    argument = "checkpoint_dir"
    total = "num_steps"
    compiled = ("optimizer", "monitors", "estimator code")


@dataclasses.dataclass
class CheckpointWriter(Observer):
    """Checkpoints of a run of one or several processes, which the first process reads and writes.

    :param run: identity of the run: JSON values by name.
    :param total: number of steps of the run.
    """

    directory: str | os.PathLike[str]
    run: dataclasses.InitVar[Mapping[str, object]]
    resume: dataclasses.InitVar[bool]
    total: int
    log: Log
    guard: Guard
    recorders: Sequence[BestParams | PathRecorder]
    period: int
    #: Number of steps done at the newest checkpoint.
    step: int = dataclasses.field(default=0, init=False)

    def __post_init__(self, run: Mapping[str, object], resume: bool) -> None:
        # None but in the first process
        self._files: Any = sharding.run_on_first(
            lambda: FitCheckpoints(self.directory, run, resume)
        )

    def close(self) -> None:
        """Release the directory."""
        if self._files is not None:
            self._files.close()

    def at(self, step: int, state: TrainState, is_last: bool) -> None:
        if self.is_due(step, is_last):
            self.save(step, state)

    def save(self, step: int, state: TrainState) -> None:
        """Write a checkpoint, unless it exists.

        :raises CheckpointWriteError: if it cannot be written.
        """
        if step == self.step:
            return
        self.guard.check(step, state)  # a failed state is not saved
        leaves = list(map(checkpoints.as_numbers, jax.tree.leaves(state)))
        for recorder in self.recorders:
            leaves += recorder.leaves()
        history = self.log.arrays()
        body = {"leaves": len(leaves), "history": list(history)}
        try:
            arrays = [*sharding.to_host(leaves), *history.values()]
            sharding.run_on_first(lambda: self._files.write(step, body, arrays))
        except OSError as error:
            raise self.log.failure(
                errors.CheckpointWriteError,
                f"checkpoint {step} cannot be written in {self.directory}: "
                f"{error}. Free disk space or fix the permissions, then resume=True "
                "continues from the checkpoint before.",
                state.params,
                step,
            ) from error
        self.step = step

    def restore(
        self, first: TrainState, template_at: Callable[[int, TrainState], TrainState]
    ) -> TrainState:
        """Return the state of the newest valid checkpoint; ``first`` in an empty directory.

        The history and the recorders are restored too.

        :param first: state before the first step.
        :param template_at: returns a state like the one after so many steps, from
            ``first``.
        """
        checkpoint = sharding.run_on_first(lambda: self._files.read(depth=6))
        if sharding.processes() > 1:
            data = b""
            if checkpoint is not None:  # in the first process
                data = self._files.bytes_of(checkpoint.step)
            if data := sharding.broadcast_bytes(data):
                body, arrays = archive.read(
                    data, FitCheckpoints.kind, "the first process's checkpoint"
                )
                checkpoint = checkpoints.Checkpoint(body["step"], body, arrays)
        if checkpoint is None:
            return first
        step, body, arrays = checkpoint
        FitCheckpoints.check_length(self.directory, step, self.total)
        count = body["leaves"]
        history = dict(zip(body["history"], arrays[count:], strict=True))
        self.log.load(history, step)
        leaves = iter(arrays[:count])

        def restore_leaf(template):
            value = checkpoints.from_numbers(next(leaves), template)
            return sharding.place_like(value, template)

        state = jax.tree.map(restore_leaf, template_at(step, first))
        for recorder in self.recorders:
            recorder.load(leaves)
        self.step = step
        return state
