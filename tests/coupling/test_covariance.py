# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Covariances from independent estimates: their mean, and their standard errors.

Tests coupling/covariance.py.
"""

import numpy as np

from ebmpp.coupling.covariance import covariance, mean_of_others
from helpers import assert_rows_law


def test_covariances_are_unbiased_with_standard_errors_that_fit() -> None:
    generator = np.random.default_rng(0)
    repeats, pairs = 3000, 30
    states = generator.normal(size=(pairs, repeats, 3)) + 1.0
    noise = generator.normal(size=(3, pairs, repeats, 3))  # of estimates by a pair
    f, g = states + noise[0], states**2 + noise[1]
    f, g = f[..., :, None], g[..., None, :]
    products = states[..., :, None] * states[..., None, :] ** 2 + noise[2][..., None]
    value, error = covariance(products, f, g)
    assert_rows_law(value, 2 * np.eye(3))  # Cov(x, x^2) of a normal x with mean 1
    ratio = np.sqrt((error**2).mean(0)) / value.std(0)
    assert (np.abs(np.log(ratio)) < 0.1).all()
    np.testing.assert_allclose(mean_of_others(f)[2], np.delete(f, 2, 0).mean(0))
