# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Squared norms from products of different draws."""

import numpy as np
import pytest

from ebmpp.core.statistics import squared_distance, squared_norm
from helpers import assert_law

RUNS, UNITS = 4000, 6


@pytest.mark.parametrize("apart", [0.0, 0.3, 2.0])
def test_a_squared_distance_has_no_bias_and_its_error_is_not_too_small(apart: float) -> None:
    """Skew draws of unequal noise, with a common mean that is large beside what is looked for."""
    rng = np.random.default_rng(0)
    first, second, common = 12, 15, 10.0
    a = common + apart + (rng.gamma(4.0, 1.0, (RUNS, first, UNITS)) - 4) / 2
    b = common + 0.5 * rng.normal(size=(RUNS, second, UNITS))
    draws = np.concatenate([a, b], 1)
    made = np.array([squared_distance(x @ x.T, first) for x in draws])
    spread = made[:, 0].std(ddof=1)
    assert_law(made[:, 0].mean(), UNITS * apart**2, spread / np.sqrt(RUNS))
    told = np.sqrt((made[:, 1] ** 2).mean())
    assert 0.97 * spread < told < 1.4 * spread
    alone = np.array([squared_norm(x @ x.T) for x in b - common])
    assert_law(alone[:, 0].mean(), 0.0, alone[:, 0].std(ddof=1) / np.sqrt(RUNS))


def test_draws_may_be_moved_and_are_not_multiplied_with_themselves() -> None:
    rng = np.random.default_rng(1)
    x, first = rng.normal(size=(9, 4)) + 1, 4
    value, error = squared_distance(x @ x.T, first)
    a, b = x[:first], x[first:]
    each = [np.mean([p @ q for i, p in enumerate(z) for j, q in enumerate(z) if i != j]) for z in (a, b)]
    assert value == pytest.approx(sum(each) - 2 * a.mean(0) @ b.mean(0))
    assert squared_distance((x + 5) @ (x + 5).T, first) == pytest.approx((value, error))
    assert squared_norm(a @ a.T).value == pytest.approx(each[0])
