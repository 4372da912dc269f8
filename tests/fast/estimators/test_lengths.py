# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How far pairs run: what meeting times predict, against brute force and against measured variance."""

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.estimators import lengths
from ebmpp.sampling.engine import Window
from helpers import pair, random_params, slow

TIMES = jnp.asarray(np.random.default_rng(0).geometric(0.02, 1000) - 1)


def by_hand(times: np.ndarray, length: int, averaged: bool) -> float:
    """The predicted variance, sum by sum; corrections counted by the engine's window."""
    n = length if averaged else 0
    window = Window(*(jnp.int32(a) for a in (length, length + n, length, 0)))
    later = np.array([(times > s).mean() for s in range(1, n + 1)])
    average = (1 + 2 * ((1 - np.arange(1, n + 1) / (n + 1)) * later).sum()) / (n + 1)
    total = 0.0
    for t in times:
        counts = np.maximum(0, np.minimum(n + 1, t - length * np.arange(1, t // length + 2)))
        at = np.arange(length, length + t)  # times before the pair meets
        assert counts.sum() == np.asarray(window.correction(jnp.asarray(at))).sum()
        total += (counts**2).sum()
    return float(average + 2 * total / len(times) / (n + 1) ** 2)


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_predicted_variance_is_the_sum_that_it_stands_for(length: int, averaged: bool) -> None:
    times = np.array([0, 1, 2, 3, 7, 8, 14, 15, 22, 41, 80, 81, 82, 300])
    made = float(lengths.inflation(jnp.asarray(times), jnp.int32(length), averaged))
    assert made == pytest.approx(by_hand(times, length, averaged), rel=1e-5)


def test_without_an_average_a_correction_counts_twice() -> None:
    for length in (1, 5, 60):
        corrections = np.maximum(np.ceil(np.asarray(TIMES) / length) - 1, 0).mean()
        made = float(lengths.inflation(TIMES, jnp.int32(length), averaged=False))
        assert made == pytest.approx(1 + 2 * corrections, rel=1e-5)


@pytest.mark.parametrize(
    ("target", "averaged"), [(0.2, True), (0.7, True), (1.1, False), (1.5, False), (3.0, False)]
)
def test_the_length_of_a_variance_is_the_shortest_that_keeps_it(target: float, averaged: bool) -> None:
    made = int(lengths.for_variance(TIMES, target, averaged))
    predicted = lambda length: float(lengths.inflation(TIMES, jnp.int32(length), averaged))
    assert predicted(made) <= target < predicted(int(0.93 * made))  # the candidates are 5 % apart


def test_pairs_that_have_met_need_no_length_and_no_length_does_the_impossible() -> None:
    assert int(lengths.for_variance(jnp.zeros(10, int), 1.1, averaged=False)) == 1
    assert int(lengths.for_variance(jnp.zeros(10, int), 0.5)) == 1  # two states
    assert int(lengths.for_variance(TIMES, 1e-12)) == 2**29


def test_the_length_of_a_cost_is_what_meeting_leaves() -> None:
    times = jnp.array([0, 3, 9])
    assert float(lengths.for_cost(times, 50.0, averaged=False)) == 50 - 2 * 4
    assert float(lengths.for_cost(times, 6.0, averaged=False)) == 1
    for target in (9.5, 15.0, 27.0, 200.0):
        made = float(lengths.for_cost(times, target))
        cost = made + (np.maximum(made, times) + times).mean()
        assert cost == pytest.approx(target, rel=1e-5)
    assert float(lengths.for_cost(times, 6.0)) == 1


@pytest.mark.parametrize("scale", [0.6, slow(2.2)])
def test_measured_variance_is_at_most_what_was_predicted(scale: float) -> None:
    """A machine whose chains forget at once, and one whose pairs take tens of sweeps."""
    graph = pair(ebmpp.Bernoulli(4), ebmpp.Bernoulli(3))
    params = random_params(graph, seed=4, scale=scale)
    key = lambda i: jax.random.fold_in(jax.random.key(1), i)
    fn = lambda x: jnp.concatenate([x["a"], x["b"], jnp.outer(x["a"], x["b"]).ravel()])
    draws = ebmpp.perfect_sample(graph, params, key(0), num_samples=2000)
    unit = np.asarray(jax.vmap(fn)(draws)).var(0, ddof=1).sum()

    def measured(length: int, m: int) -> tuple[float, np.ndarray]:
        options = {"init": draws, "k": length, "m": m, "lag": length, "num_slots": 8}
        made = ebmpp.unbiased_expectation(graph, params, fn, rng_key=key(1), num_pairs=2000, **options)
        return float((made.standard_error**2).sum() * 2000 / unit), made.meeting_time - length

    _, times = measured(1, 1)
    for target in (0.7, 0.25):
        length = int(lengths.for_variance(jnp.asarray(times.astype(int)), target))
        variance, _ = measured(length, 2 * length)
        assert 0.15 * target < variance < 1.1 * target, (length, variance)
