# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Warning of a monitored log-likelihood that falls."""

import math
import warnings

import numpy as np

from ebmpp.training.history import Log
from ebmpp.training.observers.base import Periodic
from ebmpp.training.steps import TrainState

_FALL = 2.0  # nats
_NOISE = 6.0  # standard deviations of a single value
# values below which their noise is not estimated
_FEWEST = 5


class LikelihoodWatch(Periodic):
    """Warn once if a monitored likelihood has fallen, unless the params at its best are recorded.

    :param period: steps between monitor values.
    :param best: the monitor whose best params are recorded.
    """

    def __init__(self, log: Log, period: int, best: str | None) -> None:
        self.period = period
        self._log = log
        self._names = [
            name
            for name, monitor in log.monitors.items()
            if getattr(monitor, "log_likelihood", False) and name != best
        ]
        self._count = 0
        self._next_look = 10

    def at(self, step: int, state: TrainState, is_last: bool) -> None:
        if not self._names or not self.is_due(step, is_last):
            return
        self._count += 1
        if not is_last and self._count < self._next_look:
            return
        # seldom, since the device is waited for
        self._next_look = 5 * self._count // 4 + 10
        columns = self._log.monitored.columns()
        for name in self._names:
            message = diagnose_fall(
                name, columns["monitor_step"], columns[name], 1 if is_last else 2
            )
            if message is not None:
                self._names = []
                warnings.warn(f"fit: {message}", stacklevel=4)
                return


def diagnose_fall(
    name: str, steps: np.ndarray, values: np.ndarray, tail: int
) -> str | None:
    """Return a warning if a log-likelihood is far below its best value.

    The noise of a value is estimated by second differences, in which a trend cancels,
    and their median, to which single steps do not count.

    :param tail: number of last values that must all be so low; more than 1 while a run
        may recover.
    """
    is_known = ~np.isnan(values)
    steps = steps[is_known]
    values = values[is_known].astype(float)
    if len(values) <= tail:
        return None
    noise = 0.0
    if len(values) >= _FEWEST and np.isfinite(values).all():
        bends = values[1:-1] - (values[:-2] + values[2:]) / 2
        noise = float(np.median(np.abs(bends))) / (0.6745 * math.sqrt(1.5))
    best = int(values.argmax())
    last = float(values[-tail:].max())
    if not values[best] - last > max(_FALL, _NOISE * noise):
        return None
    return (
        f"monitor {name!r} fell from {values[best]:.4g} at step {steps[best]} to "
        f"{values[-1]:.4g} at step {steps[-1]}. keep_best={name!r} returns the params "
        "of the best value. The usual causes are a large rate, and the bias of CD or "
        "PCD: reduce the rate, or use an exact estimator such as UCD() or "
        "ParticleUCD() for the last steps."
    )
