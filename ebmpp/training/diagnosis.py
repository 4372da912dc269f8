# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Diagnoses of a training run from its history: a likelihood that falls, and pairs that meet too late."""

from collections.abc import Mapping
import math
import time

import numpy as np

# nats, and standard deviations of a single value
_FALL = 2.0
_NOISE = 6.0
_FEW = 5  # values, of which the noise is not estimated
# predicted sweeps of a pair, per step and in all, that are too many
_SWEEPS = 150
_TOTAL = 30_000
# Predicted unit updates of a pair that are too many. `make demo` (84 units, 1,000
# steps) predicts 7e7 at step 100 and ends in half a minute; MNIST at 784x100, where PCD
# is far better at equal seconds, 5e8.
_UPDATES = 2e8
_HORIZON = 4  # growth is extrapolated to so many times the steps done


def diagnose_fall(
    name: str, steps: np.ndarray, values: np.ndarray, tail: int
) -> str | None:
    """Return a warning if a log-likelihood is far below its best value.

    The noise of a value is estimated by second differences, in which a trend cancels,
    and their median, to which single steps do not count.

    :param tail: number of last values that must all be so low; more than 1 while a run
        may recover.
    """
    valid = ~np.isnan(values)
    steps = steps[valid]
    values = values[valid].astype(float)
    if len(values) <= tail:
        return None
    noise = 0.0
    if len(values) >= _FEW and np.isfinite(values).all():
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


def diagnose_pairs(
    sweeps: np.ndarray, remaining: int, pace: float, units: int
) -> str | None:
    """Return a warning if coupled pairs will need too many sweeps for the remaining steps.

    A power of the number of steps extrapolates the sweeps. A clock enters the words
    alone.

    :param pace: seconds per sweep, or nan.
    """
    done = len(sweeps)
    recent = sweeps[done // 2 :].mean()
    before = sweeps[done // 4 : done // 2]
    growth = (
        math.log2(max(1.0, recent / before.mean()))
        if len(before) >= 5 and before.mean() > 0
        else 0.0
    )

    def sweeps_at(step):
        return recent * (step / (0.75 * done)) ** min(growth, 2.0)

    near = np.arange(done, min(done + remaining, _HORIZON * done))
    total = float(
        sweeps_at(near).sum() + (remaining - len(near)) * sweeps_at(_HORIZON * done)
    )
    if total < max(_TOTAL, _SWEEPS * remaining, _UPDATES / units):
        return None
    minutes = "" if math.isnan(pace) else f" (roughly {pace * total / 60:.2g} minutes)"
    return (
        f"a coupled pair takes {recent:.0f} sweeps per step until it meets, and about "
        f"{total:.2g} in the "
        f"remaining {remaining} steps{minutes}, where a chain of PCD takes "
        f"{remaining}. Chains of this model "
        "mix too slowly for this estimator. Use Centered(PCD()), and an exact "
        "gradient for the last steps if "
        'at all. ParticleUCD() and UCD(method="mixture") are exact where chains do '
        "not leave their modes."
    )


class PairWatch:
    """Watch over the pairs of one stage, steps ``first`` to ``last - 1``, at a few of the first ones."""

    def __init__(self, first: int, last: int, units: int) -> None:
        self.first = first
        self.last = last
        self._units = units
        self._due = [1, 10, 25, 50, 100]
        self._clock = (0, time.monotonic())

    def is_due(self, step: int) -> bool:
        """Return True if the stage's pairs should be diagnosed after ``step`` steps of the run."""
        return (
            bool(self._due) and self._due[0] <= step - self.first <= self._due[-1] + 1
        )

    def diagnose(
        self, columns: Mapping[str, np.ndarray], step: int, deadline: float
    ) -> str | None:
        """Return a warning from the metrics of all steps, if there is a reason."""
        done = step - self.first
        now = time.monotonic()
        self._due = [due for due in self._due if due > done]
        names = ("sweeps", "posterior_sweeps")
        parts = [columns[name][self.first : step] for name in names if name in columns]
        if not parts or "meeting_time_mean" not in columns:
            return None
        sweeps = np.nan_to_num(np.sum(parts, 0))
        before, then = self._clock
        self._clock = (done, now)
        remaining = self.last - step
        pace = math.nan
        if before:  # the first steps compile
            pace = (now - then) / max(sweeps[before:].sum(), 1.0)
            remaining = int(
                min(
                    remaining, max(0.0, deadline - now) * (done - before) / (now - then)
                )
            )
        elif deadline < math.inf:
            return None
        return diagnose_pairs(sweeps, remaining, pace, self._units)
