# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Adaptive lengths: variance predicted from meeting times, by brute force and against
measured variance.

Tests estimators/lengths.py.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
from ucd_tools import SCALES
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.estimators import lengths
from helpers import random_params

TIMES = np.random.default_rng(0).geometric(0.02, 1000) - 1
relative_variance = jax.jit(lengths.relative_variance, static_argnums=2)
for_variance = jax.jit(
    lambda times, target, averaged: lengths.TargetVariance(target).choose(
        times, averaged
    ),
    static_argnums=(1, 2),
)


def by_hand(times: np.ndarray, length: int, averaged: bool) -> float:
    """The predicted variance, sum by sum."""
    n = length if averaged else 0
    later = np.array([(times > s).mean() for s in range(1, n + 1)])
    average = (1 + 2 * ((1 - np.arange(1, n + 1) / (n + 1)) * later).sum()) / (n + 1)
    squares = [
        (
            np.maximum(0, np.minimum(n + 1, t - length * np.arange(1, t // length + 2)))
            ** 2
        ).sum()
        for t in times
    ]
    return float(average + 2 * np.sum(squares) / len(times) / (n + 1) ** 2)


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_predicted_variance_matches_its_definition(length: int, averaged: bool) -> None:
    times = np.array([0, 1, 2, 3, 7, 8, 14, 15, 22, 41, 80, 81, 82, 300])
    predicted = float(relative_variance(times, np.int32(length), averaged))
    assert predicted == pytest.approx(by_hand(times, length, averaged), rel=1e-5)


@pytest.mark.parametrize(
    ("target", "averaged"), [(0.2, True), (0.7, True), (1.1, False), (3.0, False)]
)
def test_length_for_a_variance_is_the_shortest(target: float, averaged: bool) -> None:
    length = int(for_variance(TIMES, target, averaged))
    predicted = lambda length: float(
        relative_variance(TIMES, np.int32(length), averaged)
    )
    # the candidates are 5 % apart
    assert predicted(length) <= target < predicted(int(0.93 * length))


def test_lengths_at_the_limits() -> None:
    assert int(for_variance(np.zeros(1000, int), 1.1, False)) == 1
    assert int(for_variance(TIMES, 1e-12, True)) == 2**29
    times = jnp.array([0, 3, 9])
    assert float(lengths.TargetCost(50.0).choose(times, False)) == 50 - 2 * 4
    assert float(lengths.TargetCost(6.0).choose(times, False)) == 1
    for target in (9.5, 27.0):
        length = float(lengths.TargetCost(target).choose(times, True))
        cost = (
            length + (np.maximum(length, np.asarray(times)) + np.asarray(times)).mean()
        )
        assert cost == pytest.approx(target, rel=1e-5)
    assert float(lengths.TargetCost(6.0).choose(times, True)) == 1


def _moments(x: dict[str, Any]) -> jax.Array:
    return jnp.concatenate([x["v"], x["h"], jnp.outer(x["v"], x["h"]).ravel()])


@pytest.mark.nightly
@pytest.mark.parametrize("scale", [0.6, SCALES["rbm"], 2.2])
def test_measured_variance_is_at_most_the_predicted_one(scale: float) -> None:
    graph = zoo.graph("rbm")
    params = random_params(graph, seed=4, scale=scale)
    draws = zoo.Oracle(graph, params, {}).draw(np.random.default_rng(0), 1000)
    unit = np.asarray(jax.jit(jax.vmap(_moments))(draws)).var(0, ddof=1).sum()
    run = partial(
        ebmpp.unbiased_expectation, graph, params, _moments, rng_key=jax.random.key(1)
    )

    def measured(length: int, m: int) -> tuple[float, np.ndarray]:
        result = run(num_pairs=1000, init=draws, k=length, m=m, lag=length, num_slots=8)
        return float(
            (result.standard_error**2).sum() * 1000 / unit
        ), result.meeting_time - length

    _, times = measured(1, 1)
    for target in (0.7, 0.25):
        length = int(
            lengths.TargetVariance(target).choose(jnp.asarray(times.astype(int)), True)
        )
        variance, _ = measured(length, 2 * length)
        assert 0.15 * target < variance < 1.1 * target
