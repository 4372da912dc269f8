# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a step tells of its pairs, also where there are many and long ones."""

import numpy as np

import jax.numpy as jnp

from ebmpp.estimators.pairs import metrics_of
from ebmpp.sampling.pairs import Outcome, Window

WINDOW = Window(*(jnp.int32(n) for n in (2, 4, 2, 0)))


def told(times: list[int]) -> dict[str, np.ndarray]:
    outcome = Outcome((), jnp.array(times, jnp.int32), jnp.float32(1), None, jnp.float32(0))
    return {name: np.asarray(value) for name, value in metrics_of(outcome, WINDOW).items()}


def test_unmet_pairs_are_counted_apart() -> None:
    made = told([3, 7, -1, 5])
    assert (made["num_unmet"], made["meeting_time_max"], made["meeting_time_mean"]) == (1, 7, 5)
    assert made["sweeps"] == (4 + 3 - 2 + 7 + 7 - 2 + 5 + 5 - 2) / 3
    assert made["corrected"] == 0.75  # later than k + lag, or never
    none = told([-1, -1])
    assert (none["num_unmet"], none["meeting_time_mean"], none["sweeps"], none["corrected"]) == (2, 0, 0, 1)


def test_sums_do_not_overflow() -> None:
    made = told([2**29] * 8)
    assert made["meeting_time_mean"] == 2**29 and made["num_unmet"] == 0
    np.testing.assert_allclose(made["sweeps"], 2**30, rtol=1e-6)
