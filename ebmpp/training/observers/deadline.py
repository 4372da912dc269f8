# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""End of a run by the clock."""

import dataclasses
import time

import numpy as np

from ebmpp.core import sharding
from ebmpp.training.history import Log
from ebmpp.training.observers.base import Observer
from ebmpp.training.steps import TrainState


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
