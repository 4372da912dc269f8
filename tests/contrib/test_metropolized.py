# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Transition probabilities of the metropolized Gibbs move; its sweeps are tested in test_sweeps.py.

Tests contrib/metropolized.py.
"""

import numpy as np
from oracle import log_base, statistics_of, unit_values
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Binomial, Categorical, Family, Spin
from ebmpp.contrib import Metropolized
from ebmpp.core import random
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from helpers import alone, assert_law, nightly

ROWS = 6000


@pytest.mark.parametrize(
    "family", [Categorical(1, 3), nightly(Binomial(1, 3)), nightly(Spin(1))]
)
def test_transitions_are_those_of_liu(family: Family) -> None:
    """The move goes from x to y with probability min(p_y / (1 - p_x), p_y / (1 - p_y))."""
    graph, values = alone(family), np.array(unit_values(family))
    eta = (
        np.random.default_rng(0).normal(size=family.statistic_shape).astype(np.float32)
    )
    log_p = statistics_of(family, values[:, None]) @ eta.ravel() + log_base(
        family, values[:, None]
    )
    p = np.exp(log_p) / np.exp(log_p).sum()
    start = np.arange(ROWS) % len(values)

    @jax.jit
    def sweep(eta):
        keys = random.fold_in(np.array([0, 3], np.uint32), jnp.arange(ROWS))
        x = {"a": jnp.asarray(values[start][:, None], family.dtype)}
        return draw_sweep(Target(graph, {"a": eta}), x, (Metropolized(("a",)),), keys)[
            0
        ]["a"]

    end = np.asarray(sweep(eta))[:, 0]
    for x in range(len(values)):
        exact = p / np.maximum(1 - p, 1 - p[x])
        exact[x] = 0
        exact[x] = 1 - exact.sum()
        rows = end[start == x]
        share = (rows[:, None] == values).mean(0)
        assert_law(
            share, exact, np.sqrt(exact * (1 - exact) / len(rows)), len(values) ** 2
        )
    large = np.asarray(sweep(200 * eta))  # probabilities that round to 0 and 1
    assert np.isin(large, values).all()
