# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of coupled pairs."""

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.coupling.slots import Outcome, Window
from ebmpp.estimators.phases import pair_metrics


@jax.jit
def _metrics(times: jax.Array) -> dict[str, jax.Array]:
    window = Window(*(jnp.int32(n) for n in (2, 4, 2, 0)))
    return pair_metrics(Outcome((), times, jnp.float32(1), None, jnp.float32(0)), window)


def metrics(*times: int) -> dict[str, np.ndarray]:
    return jax.device_get(_metrics(np.array(times, np.int32)))


def test_unmet_pairs_are_counted_separately() -> None:
    partly = metrics(3, 7, -1, 5)
    assert (partly["num_unmet"], partly["meeting_time_max"], partly["meeting_time_mean"]) == (1, 7, 5)
    np.testing.assert_allclose(partly["sweeps"], ((4 + 3 - 2) + (7 + 7 - 2) + (5 + 5 - 2)) / 3, rtol=1e-6)
    assert partly["corrected"] == 0.75  # later than k + lag, or never
    unmet = metrics(-1, -1, -1, -1)
    names = ("num_unmet", "meeting_time_mean", "sweeps", "corrected")
    assert [unmet[name] for name in names] == [4, 0, 0, 1]


def test_sums_of_long_times_do_not_overflow() -> None:
    long = metrics(*[2**29] * 4)
    assert long["meeting_time_mean"] == 2**29 and long["num_unmet"] == 0
    np.testing.assert_allclose(long["sweeps"], 2**30, rtol=1e-6)
