# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Monitors, callbacks, params at a best value, and the warning of a falling likelihood."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
import warnings

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import Params, backend, checks
from ebmpp.graph import normalization
from ebmpp.training.callbacks import SIGNS, Callback, EarlyStop, Progress
from ebmpp.training.history import Log
from ebmpp.training.observers.base import Observer
from ebmpp.training.observers.guard import Guard
from ebmpp.training.steps import TrainState

_FALL = 2.0  # nats
_NOISE = 6.0  # standard deviations of a single value
# values below which their noise is not estimated
_FEWEST = 5
# values whose medians are compared at the end, and standard errors of their difference:
# PCD on bars and stripes, which declines at rate 1, had 3.2 to 7.5 under six keys
_LEAST_WIDTH = 3
_MEDIAN_NOISE = 3.0


@dataclasses.dataclass
class Monitoring(Observer):
    """Evaluate the monitors and call the callbacks, any of which may end the run.

    Warn once if a monitored likelihood has fallen, unless the params at its best are
    recorded, and if a monitor that chooses params never improved.
    """

    log: Log
    guard: Guard
    callbacks: Sequence[Callback]
    best: "BestParams | None"
    period: int

    def __post_init__(self) -> None:
        best = None if self.best is None else self.best.name
        self._watched = [
            name
            for name, monitor in self.log.monitors.items()
            if getattr(monitor, "log_likelihood", False) and name != best
        ]
        self._count = 0
        self._next_look = 10

    def at(self, step: int, state: TrainState, is_last: bool) -> bool:
        if not self.is_due(step, is_last):
            return False
        # else the device need not be waited for
        if self.callbacks or not normalization.is_bounded(self.guard.graph):
            self.guard.check(step, state)
        self.log.monitor(step, state.params, state.estimator)
        if self.best is not None:
            backend.wait(state.ok)
            value = self.log.monitored.last[self.best.name]
            self.best.record(step, value, state.params)
        is_stopped = bool(self.callbacks) and self._call_back(step, state)
        ends = is_last or is_stopped
        self._warn_of_fall(ends)
        if ends:
            self._warn_of_no_gain()
        return is_stopped

    def _call_back(self, step: int, state: TrainState) -> bool:
        """Call all callbacks; return True if one ends the run."""
        # new containers, which the callbacks may change
        params, estimator = jax.tree.map(
            lambda leaf: leaf, (state.params, state.estimator)
        )
        progress = Progress(step, params, estimator, self.log.dataset())
        return any([callback(progress) for callback in self.callbacks])

    def _warn_of_fall(self, is_last: bool) -> None:
        """Warn of a likelihood that has fallen; seldom look, since the device is waited for."""
        self._count += 1
        if not self._watched or (not is_last and self._count < self._next_look):
            return
        self._next_look = 5 * self._count // 4 + 10
        columns = self.log.monitored.columns()
        tail = 1 if is_last else 2
        for name in self._watched:
            message = diagnose_fall(name, columns["monitor_step"], columns[name], tail)
            if message is not None:
                self._watched = []
                warnings.warn(f"fit: {message}", stacklevel=5)
                return

    def _warn_of_no_gain(self) -> None:
        """Warn if no step improved a monitor of ``keep_best`` or :class:`EarlyStop`."""
        watched = [
            (c.monitor, c.mode) for c in self.callbacks if isinstance(c, EarlyStop)
        ]
        if self.best is not None:
            watched.append((self.best.name, self.best.mode))
        columns = self.log.monitored.columns()
        for name, mode in dict.fromkeys(watched):
            first, *others = SIGNS[mode] * columns[name]
            if others and max(others) <= first:
                warnings.warn(
                    f"fit: monitor {name!r} was best before the first step, "
                    f"{columns[name][0]:.4g}, and is {columns[name][-1]:.4g} after the "
                    "last. The usual cause is a large rate: reduce it.",
                    stacklevel=5,
                )


class BestParams:
    """Recorder of the params at the best value of a monitor; the first of equals, never at nan.

    :param keep_best: the monitor's name, or a tuple of it and "max" or "min".
    :param params: params of the right structure.
    """

    def __init__(
        self, keep_best: object, monitors: Mapping[str, object], params: Params
    ) -> None:
        pair = (keep_best, "max") if isinstance(keep_best, str) else keep_best
        self.name, self.mode = checks.instance(
            "fit: keep_best", pair, tuple, 'a monitor\'s name, or (name, "min")'
        )
        checks.choice("fit: keep_best's mode", self.mode, SIGNS)
        checks.names("monitor in fit: keep_best", [self.name], monitors)
        self._value = -math.inf
        self._step = -1
        self._params = params

    @property
    def result(self) -> tuple[Params | None, int | None]:
        """The best params and their step; None if there was no value."""
        return (None, None) if self._step < 0 else (self._params, self._step)

    def record(self, step: int, value: float, params: Params) -> None:
        """Compare the monitor's value at these params."""
        signed = SIGNS[self.mode] * float(value)
        if signed > self._value:
            self._value = signed
            self._step = step
            self._params = params

    def leaves(self) -> list[ArrayLike]:
        """Return arrays for a checkpoint."""
        leaves = jax.tree.leaves(self._params)
        return [np.array(self._value), np.array(self._step), *leaves]

    def load(self, leaves: Iterator[np.ndarray]) -> None:
        """Restore the arrays of :meth:`leaves`, the next ones of an iterator."""
        self._value = float(next(leaves))
        self._step = int(next(leaves))
        self._params = jax.tree.map(lambda _: jnp.asarray(next(leaves)), self._params)


def diagnose_fall(
    name: str, steps: np.ndarray, values: np.ndarray, tail: int
) -> str | None:
    """Return a warning if a log-likelihood is far below its best value.

    At the end the median of the last third is compared with earlier ones too, since
    single values of a run that declines may be noisy. The noise of a value is estimated
    by second differences, in which a trend cancels, and their median, to which single
    steps do not count.

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
        noise = np.median(np.abs(bends)) / (0.6745 * math.sqrt(1.5))
    best = values.argmax()
    high = values[best]
    low = values[-tail:].max()
    ends = ""
    if not high - low > max(_FALL, _NOISE * noise):
        width = len(values) // 3
        if tail > 1 or width < _LEAST_WIDTH or not noise:
            return None
        medians = np.median(sliding_window_view(values, width), axis=1)
        best = medians[: 1 - width].argmax()
        high = medians[best]
        low = medians[-1]
        # the standard error of a median is sqrt(pi / 2) times that of a mean
        error = noise * math.sqrt(math.pi / width)
        if not high - low > max(_FALL, _MEDIAN_NOISE * error):
            return None
        ends = f", medians of {width} values"
    return (
        f"monitor {name!r} fell from {high:.4g} at step {steps[best]} to {low:.4g} at "
        f"step {steps[-1]}{ends}. keep_best={name!r} returns the params of the best "
        "value. The usual causes are a large rate, and the bias of CD or "
        "PCD: reduce the rate, or use an exact estimator such as UCD() or "
        "ParticleUCD() for the last steps."
    )
