# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Progress bar of a training run, and its end by the clock."""

from collections.abc import Hashable
import contextlib
import dataclasses
import time

import numpy as np
from tqdm.auto import tqdm

from ebmpp.core import backend, sharding
from ebmpp.training.history import Log
from ebmpp.training.observers.base import Observer
from ebmpp.training.steps import TrainState


class ProgressBar(Observer, contextlib.AbstractContextManager["ProgressBar"]):
    """Progress bar that counts neither compilation nor dispatched steps as done.

    :param total: number of steps; None if it is not known.
    :param start: number of steps done before this run.
    """

    def __init__(
        self, log: Log, total: int | None, start: int, is_hidden: bool
    ) -> None:
        self._log = log
        self._done = start
        self._bar = tqdm(
            total=total, initial=start, disable=is_hidden, desc="training", unit="step"
        )
        self._programs: set[Hashable] = set()  # compiled ones
        self._compiling_since: float | None = None

    def __exit__(self, *raised: object) -> None:
        if "stopped_by" in self._log.attrs:
            self._bar.set_description(f"stopped by {self._log.attrs['stopped_by']}")
        self._bar.close()

    def begin(self, program: Hashable) -> None:
        """Prepare for steps of a program, of which the first ones compile."""
        if not self._bar.disable and program not in self._programs:
            self._programs.add(program)
            self._compiling_since = time.monotonic()
            self._bar.set_description("compiling")

    def at(self, step: int, state: TrainState, is_last: bool) -> None:
        """Count the steps, and show the latest values when the bar is drawn."""
        count = step - self._done
        self._done = step
        if self._bar.disable or not count:
            return
        # else dispatched steps would count, and Ctrl-C would wait for them
        backend.wait(state)
        if self._compiling_since is None:
            if self._bar.update(count):
                self._bar.set_postfix(self._log.latest())
            return
        seconds = time.monotonic() - self._compiling_since
        self._compiling_since = None
        # also the clock, so that the rate is that of steps alone
        self._bar.reset(self._bar.total)
        self._bar.n = self._bar.initial = self._bar.last_print_n = step
        self._bar.set_description("training", refresh=False)
        self._bar.set_postfix({"compiled": f"{seconds:.1f} s"})


@dataclasses.dataclass
class Deadline(Observer):
    """End of a run, as if it had no more steps, at the first look after a time.

    :param seconds: time of ``time.monotonic``, by the clock of the first process.
    :param start: step at which the run starts; one program of steps always runs.
    """

    log: Log
    seconds: float
    start: int

    def at(self, step: int, state: TrainState, is_last: bool) -> bool:
        if is_last or step == self.start:
            return False
        is_past = np.array(time.monotonic() >= self.seconds)
        if not sharding.gather(is_past)[0]:
            return False
        self.log.attrs["stopped_by"] = "max_seconds"
        return True
