# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Rules for how long coupled pairs run, from the meeting times of the steps before.

With k = lag = L the estimate averages over the states at L, ..., L + n, where n is L
("averaged") or 0 (one state). A pair that takes T sweeps to meet, beyond the lag, costs
:math:`L + \max(n, T) + T` sweeps and makes no correction where :math:`T \le L`. T
hardly depends on L, so past times predict the cost and the variance of any L. The
predicted variance, relative to independent draws, is a sum of two terms:

- of the average, :math:`\frac{1}{n + 1} \left(1 + 2 \sum_{s=1}^{n} (1 - \frac{s}{n +
  1}) P(T > s)\right)`: the autocorrelation at s sweeps is taken to be P(T > s), as if a
  chain kept its value until it met another and were independent afterwards;
- of the corrections, :math:`2 E[\sum_{i \ge 1} c_i^2] / (n + 1)^2`: the i-th time that
  T exceeds the lag, it corrects the first :math:`c_i = \max(0, \min(n + 1, T - i L))`
  of the n + 1 states by differences of two draws that are independent at distances of
  at least a lag, and equal at less.

With n = 0 the sum is :math:`1 + 2 E[\max(0, \lceil T / L \rceil - 1)]`. With n = L it
is pessimistic where most pairs meet within the lag, since chains forget sooner than
pairs meet: two to six times the measured variance on machines of 16x8 to 64x16. Where
many pairs meet later, it is too low.
"""

import abc
from collections.abc import Mapping
import dataclasses
from typing import ClassVar

from jaxtyping import Real
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Scalar, checks

#: Meeting times of a step's pairs, beyond the lag.
MeetingTimes = Real[Array, "pairs"]
_SMOOTHING = 0.9  # weight of the past
# a ratio of the last meeting time to the lag that is far too large: of a thousand
# exponential times the last is some 2.3 times their 0.95 quantile
_LATE = 30.0
#: Candidates for L: some 5 % apart, up to 2^29 sweeps, twice which an int32 holds.
_LENGTHS = np.unique(np.geomspace(1, 2**29, 415).round().astype(np.int32))


class Length(abc.ABC):
    """Base class of the rules for an adaptive k and lag: see ``length`` of :class:`ebmpp.UCD`."""

    def check(self, k: int | None, m: int | None, lag: int | None) -> None:
        """Raise ArgumentError for a window that the rule does not apply to."""

    @abc.abstractmethod
    def choose(self, times: MeetingTimes, averaged: bool) -> Array:
        """Return the L that suits these times; ``averaged``: the states at L, ..., 2 L count."""

    def update(
        self, length: Scalar, steps: Array, times: MeetingTimes, averaged: bool
    ) -> Scalar:
        """Return the next length from the current one, the number of steps and their last times.

        Steps have equal weight until there are enough for the smoothing, so the second
        step has the length of the first one's times.
        """
        share = jnp.maximum(1 - _SMOOTHING, 1 / steps)
        return length + share * (self.choose(times, averaged) - length)


@dataclasses.dataclass(frozen=True)
class Quantile(Length):
    """The L within which a share q of the pairs meets.

    :param q: between 0 and 1.
    """

    q: float = 0.95

    def __post_init__(self) -> None:
        checks.number("Quantile: q", self.q, above=0, below=1)

    def choose(self, times: MeetingTimes, averaged: bool) -> Scalar:
        return jnp.quantile(times.astype(float), self.q)


@dataclasses.dataclass(frozen=True)
class _Target(Length):
    """A rule that chooses k, lag and m together."""

    target: float
    least: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        checks.number(f"{type(self).__name__}: target", self.target, above=self.least)

    def check(self, k: int | None, m: int | None, lag: int | None) -> None:
        """Raise ArgumentError for a fixed k, lag, or an m other than 0."""
        fixed = {"k": k, "lag": lag, "m": m or None}
        if set(fixed.values()) != {None}:
            raise checks.error(
                f"UCD: k, lag and m of length={self!r}", "None, or m=0", fixed
            )


@dataclasses.dataclass(frozen=True)
class TargetVariance(_Target):
    """The least L with a predicted variance of ``target`` times that of independent draws.

    :param target: above 0; above 1 with m=0.

    **Example**

    >>> import jax.numpy as jnp
    >>> times = jnp.array([1, 1, 1, 100])
    >>> TargetVariance(1.5).choose(times, False).item()  # 1 + 2/4: one pair corrects once
    51
    """

    def check(self, k: int | None, m: int | None, lag: int | None) -> None:
        super().check(k, m, lag)
        if m == 0:
            checks.number(
                "UCD: the target of length=TargetVariance, with m=0,",
                self.target,
                above=1,
            )

    def choose(self, times: MeetingTimes, averaged: bool) -> Array:
        """Return the least candidate whose prediction is small enough."""
        lengths = jnp.asarray(_LENGTHS)
        predict = jax.vmap(lambda length: relative_variance(times, length, averaged))
        is_enough = predict(lengths) <= self.target
        # the longest, if all are too short
        return lengths[jnp.argmax(is_enough.at[-1].set(True))]


@dataclasses.dataclass(frozen=True)
class TargetCost(_Target):
    """The L, at least 1, at which a pair costs ``target`` sweeps of both chains on average.

    :param target: above 1.

    **Example**

    >>> import jax.numpy as jnp
    >>> times = jnp.array([2.0, 4.0])
    >>> TargetCost(16).choose(times, True).item()  # 6.5 sweeps, 6.5 more, and 3 of the other
    6.5
    """

    least = 1.0

    def choose(self, times: MeetingTimes, averaged: bool) -> Array:
        """Solve L + E[max(n, T) + T] = target."""
        times = times.astype(float)
        left = self.target - times.mean()
        if not averaged:
            return jnp.maximum(1.0, left - times.mean())
        # The mean of max(L, T) is the largest of the lines that replace the i least
        # times by L, so the L at which it and L sum to what is left is the least of the
        # lines' solutions.
        count = len(times)
        sums = jnp.cumsum(jnp.sort(times)[::-1])[::-1]
        above = jnp.append(sums, 0.0) / count
        share = jnp.arange(count + 1) / count
        return jnp.maximum(1.0, ((left - above) / (1 + share)).min())


def relative_variance(
    times: MeetingTimes, length: Array, averaged: bool = True
) -> Scalar:
    """Return the predicted variance at k = lag = ``length`` over that of independent draws."""
    states = length + 1 if averaged else jnp.ones_like(length)
    n = states.astype(float)
    near = jnp.clip(times - 1, 0, states - 1).astype(float)
    autocorrelation = near - near * (near + 1) / (2 * n)
    average = (1 + 2 * autocorrelation.mean()) / n
    excess = times - length
    # corrections of all states, and of the first ones alone
    complete = jnp.maximum(0, (excess - states) // length + 1)
    rest = jnp.clip(excess - complete * length, 0, states).astype(float)
    corrections = complete.astype(float) + (rest / n) ** 2
    return average + 2 * corrections.mean()


def diagnose_late_pairs(history: Mapping[str, np.ndarray]) -> str | None:
    """Return a warning if most pairs meet within the lag, and the last take far longer.

    This happens where both chains start in one of many modes, soon meet there, and
    seldom leave it. A run on bars and stripes 4x4 kept a lag of 2, within which 95 % of
    its pairs met, and one exact draw cost 1.9 million sweeps. The second half of the
    history counts.
    """
    if "meeting_time_max" not in history or not len(history["lag"]):
        return None
    ratios = history["meeting_time_max"] / history["lag"]
    ratio = ratios[len(ratios) // 2 :].mean()
    if not ratio > _LATE:
        return None
    return (
        f"the last pair of a step took {ratio:.0f} times as long as the lag, within "
        "which most met: a few late pairs make all corrections, so the gradient is "
        "unbiased and its variance large. Train from earlier params, so that the lag "
        "grows with the model, or use a quantile nearer to 1, or "
        'method="mixture" or "particles".'
    )
