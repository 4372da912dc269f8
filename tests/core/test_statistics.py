# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Squared norms from products of different draws."""

import numpy as np
import pytest

from ebmpp.core.statistics import squared_distance, squared_norm
from helpers import assert_law

RUNS, UNITS = 4000, 6


@pytest.mark.parametrize("apart", [0.0, 0.4, 2.0])
def test_a_squared_distance_has_no_bias_and_its_error_is_not_too_small(apart: float) -> None:
    """Few and skew draws of unequal noise, with a common mean that is large beside what is looked for."""
    rng = np.random.default_rng(0)
    first, second, common = 5, 7, 10.0
    a = common + apart + (rng.exponential(1.0, (RUNS, first, UNITS)) - 1)
    b = common + 0.5 * rng.normal(size=(RUNS, second, UNITS))
    draws = np.concatenate([a, b], 1)
    made = np.array([squared_distance(x @ x.T, first) for x in draws])
    spread = made[:, 0].std(ddof=1)
    assert_law(made[:, 0].mean(), UNITS * apart**2, spread / np.sqrt(RUNS))
    told = np.sqrt((made[:, 1] ** 2).mean())
    assert 0.95 * spread < told < 1.8 * spread
    alone = np.array([squared_norm(x @ x.T) for x in b - common])
    assert_law(alone[:, 0].mean(), 0.0, alone[:, 0].std(ddof=1) / np.sqrt(RUNS))


def test_what_is_left_out_is_left_out() -> None:
    """The jackknife by its definition, one draw after the other."""
    rng = np.random.default_rng(1)
    x, first = rng.normal(size=(9, 4)) + 1, 4
    value, error = squared_distance(x @ x.T, first)
    mean = lambda x, n: squared_distance(x @ x.T, n)[0]
    parts = []
    for low, high, n in ((0, first, first - 1), (first, 9, first)):
        each = np.array([mean(np.delete(x, i, 0), n) for i in range(low, high)])
        count = high - low
        parts.append((count - 1) / count * ((each - each.mean()) ** 2).sum())
    assert error == pytest.approx(np.sqrt(sum(parts)))
    assert value == pytest.approx(mean(x + 5.0, first))
