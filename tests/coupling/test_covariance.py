# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Covariances from independent estimates are unbiased.

Tests coupling/covariance.py.
"""

import numpy as np

from ebmpp.coupling.covariance import mean_of_others
from helpers import assert_rows_law


def test_covariances_by_the_mean_of_others_are_unbiased() -> None:
    generator = np.random.default_rng(0)
    repeats, pairs = 4000, 4
    states = generator.normal(size=(pairs, repeats, 3)) + 1.0
    noise = generator.normal(size=(3, pairs, repeats, 3))  # of estimates by a pair
    f, g = states + noise[0], states**2 + noise[1]
    value = (states**3 + noise[2] - f * mean_of_others(g)).mean(0)
    assert_rows_law(value, 2.0)  # Cov(x, x^2) of a normal x with mean 1
    np.testing.assert_allclose(mean_of_others(f)[2], np.delete(f, 2, 0).mean(0))
