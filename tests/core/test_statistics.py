# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased squared norms and distances from products of different draws.

Tests core/statistics.py.
"""

import numpy as np
import pytest

from ebmpp.core.statistics import squared_distance, squared_norm
from helpers import assert_law

RUNS, UNITS = 1000, 6


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_squared_distances_are_unbiased_with_honest_errors(shift: float) -> None:
    """Skewed draws of unequal noise, with a common mean that is large beside the distance."""
    rng = np.random.default_rng(0)
    first, second, common = 12, 15, 10.0
    a = common + shift + (rng.gamma(4.0, 1.0, (RUNS, first, UNITS)) - 4) / 2
    b = common + 0.5 * rng.normal(size=(RUNS, second, UNITS))
    results = np.array(
        [squared_distance(x @ x.T, first) for x in np.concatenate([a, b], 1)]
    )
    spread = results[:, 0].std(ddof=1)
    assert_law(results[:, 0].mean(), UNITS * shift**2, spread / np.sqrt(RUNS))
    assert 0.9 * spread < np.sqrt((results[:, 1] ** 2).mean()) < 1.5 * spread
    norms = np.array([squared_norm(x @ x.T).value for x in b - common])
    assert_law(norms.mean(), 0.0, norms.std(ddof=1) / np.sqrt(RUNS))


def test_squared_distances_use_no_draw_twice_and_ignore_a_shift() -> None:
    rng = np.random.default_rng(1)
    x, first = rng.normal(size=(9, 4)) + 1, 4
    value, error = squared_distance(x @ x.T, first)
    a, b = x[:first], x[first:]
    norms = [
        np.mean([p @ q for i, p in enumerate(z) for j, q in enumerate(z) if i != j])
        for z in (a, b)
    ]
    assert value == pytest.approx(sum(norms) - 2 * a.mean(0) @ b.mean(0))
    assert squared_distance((x + 5) @ (x + 5).T, first) == pytest.approx((value, error))
    assert squared_norm(a @ a.T).value == pytest.approx(norms[0])
