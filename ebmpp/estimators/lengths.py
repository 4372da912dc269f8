# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How far a step's coupled pairs run, from the meeting times of the steps before.

With k = lag = L the estimate averages over the states at L, ..., L + n, where n is L ("averaged") or 0 (one
state). A pair that takes T sweeps to meet, beyond the lag, costs ``L + max(n, T) + T`` sweeps and makes no
correction where T <= L. T hardly depends on L, so the times of past steps tell what an L would have cost and
brought.

The variance that they predict, over that of independent draws, is a sum of two:

- of the average, ``(1 + 2 sum_{s=1}^{n} (1 - s / (n + 1)) P(T > s)) / (n + 1)``: the autocorrelation at s
  sweeps is taken to be P(T > s), as if a chain kept its value until it met another and were new afterwards;
- of the corrections, ``2 E[sum_{i>=1} c_i^2] / (n + 1)^2``: the i-th time that T exceeds the lag, it corrects
  the first ``c_i = max(0, min(n + 1, T - i L))`` of the n + 1 states, by differences of two draws that are
  independent where they are a lag apart and all alike where they are less.

With n = 0 the sum is ``1 + 2 E[max(0, ceil(T / L) - 1)]``. With n = L it is pessimistic where most pairs
meet within the lag, since chains forget sooner than pairs meet: two to six times what is measured on
machines of 16x8 to 64x16. Where many meet later, differences a lag apart are not independent, and it is too
low.
"""

from collections.abc import Mapping

from jaxtyping import Real
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Scalar

Times = Real[Array, "pairs"]
_TRAPPED = 30.0  # of a thousand exponential times the last is some 2.3 times their 0.95 quantile
#: Candidates for L: some 5 % apart, up to 2^29 sweeps, twice which an int32 holds.
_LENGTHS = np.unique(np.geomspace(1, 2**29, 415).round().astype(np.int32))


def quantile(times: Times, q: float) -> Scalar:
    """The L within which a share ``q`` of the pairs meets."""
    return jnp.quantile(times.astype(jnp.result_type(float)), q)


def for_variance(times: Times, target: float, averaged: bool = True) -> Array:
    """The least L at which the predicted variance is ``target`` times that of independent draws.

    :param times: T of each pair.
    :param target: above 0; above 1 where one state counts.
    :param averaged: whether the states at L, ..., 2 L count, or that at L alone.

    **Example**

    >>> import jax.numpy as jnp
    >>> for_variance(jnp.array([1, 1, 1, 100]), 1.5, averaged=False).item()  # 1 + 2/4: one corrects once
    51
    >>> for_variance(jnp.array([1, 1, 1, 100]), 0.5).item()
    59
    """
    lengths = jnp.asarray(_LENGTHS)
    predicted = jax.vmap(lambda length: inflation(times, length, averaged))(lengths)
    enough = (predicted <= target).at[-1].set(True)  # beyond all reach: as long as can be
    return lengths[jnp.argmax(enough)]


def for_cost(times: Times, target: float, averaged: bool = True) -> Array:
    """The L at which a pair costs ``target`` sweeps on average, at least 1.

    :param times: T of each pair.
    :param target: sweeps of both chains a pair.
    :param averaged: as for :func:`for_variance`.

    **Example**

    >>> import jax.numpy as jnp
    >>> for_cost(jnp.array([2.0, 4.0]), 16).item()  # 6.5 sweeps, then 6.5 more, and 3 of the other chain
    6.5
    >>> for_cost(jnp.array([2.0, 4.0]), 16, averaged=False).item()
    10.0
    """
    times = times.astype(jnp.result_type(float))
    left = target - times.mean()
    if not averaged:
        return jnp.maximum(1.0, left - times.mean())
    # The mean of max(L, T) is the largest of the lines that count L in place of the i least times, so that
    # the L at which it and L make up what is left is the least of those of the lines.
    count = len(times)
    above = jnp.concatenate([jnp.cumsum(jnp.sort(times)[::-1])[::-1], jnp.zeros(1, times.dtype)]) / count
    return jnp.maximum(1.0, ((left - above) / (1 + jnp.arange(count + 1) / count)).min())


def inflation(times: Times, length: Array, averaged: bool = True) -> Scalar:
    """Predicted variance at k = lag = ``length`` over that of independent draws; see the top of this file.

    :param averaged: as for :func:`for_variance`.
    """
    real = jnp.result_type(float)
    states = length + 1 if averaged else jnp.ones_like(length)
    near = jnp.clip(times - 1, 0, states - 1).astype(real)
    excess = times - length
    whole = jnp.maximum(0, (excess - states) // length + 1)  # how often all states are corrected
    rest = jnp.clip(excess - whole * length, 0, states).astype(real)
    n, whole = states.astype(real), whole.astype(real)
    average = (1 + 2 * (near - near * (near + 1) / (2 * n)).mean()) / n
    return average + 2 * (whole + (rest / n) ** 2).mean()


def trapped(told: Mapping[str, np.ndarray]) -> str | None:
    """In words, that most pairs meet within the lag and the last ones take very much longer.

    So it is where both chains start in one mode of many, soon meet there, and seldom leave it: the adaptive
    lag follows those that meet at once. A run that began at a machine trained on bars and stripes 4x4 kept a
    lag of 2, within which 95 % of its pairs met, and the worth of one exact draw cost 1.9 million sweeps.

    :param told: the history of steps; its second half is looked at.

    **Example**

    >>> steps = {"meeting_time_max": np.array([90.0, 110.0]), "lag": np.array([2, 2])}
    >>> trapped(steps)[:40]
    'the last pair of a step took 55 times as'
    >>> trapped({"meeting_time_max": np.array([9.0]), "lag": np.array([2])}) is None
    True
    """
    if "meeting_time_max" not in told or not len(told["lag"]):
        return None
    ratio = float((told["meeting_time_max"] / told["lag"])[len(told["lag"]) // 2 :].mean())
    if not ratio > _TRAPPED:
        return None
    return (
        f"the last pair of a step took {ratio:.0f} times as long as the lag, within which most met: chains "
        "that start alike meet in the mode where they start, and a few late pairs carry the correction, so "
        "that the gradient is unbiased and its variance large. Train from earlier params, so that the lag "
        'grows with the model; or take a quantile nearer to 1, coupling="mixture", or ParticleUCD'
    )
