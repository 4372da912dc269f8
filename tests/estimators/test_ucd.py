# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import functools
from typing import Any

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import UCD, Bernoulli, FactorGraph, Gaussian, bits, exact, layered
from ebmpp.estimators.base import Batch, Estimate
from helpers import assert_rows_law, pair, random_params

BATCHES, ROWS = 40, 400
MODELS = {
    "rbm": (pair(Bernoulli(3), Bernoulli(2)), 1.2),
    "gaussian": (pair(Gaussian(2), Bernoulli(2)), 0.8),
    "deep": (layered(a=Bernoulli(3), h1=Bernoulli(2), h2=Bernoulli(2)), 1.2),
}


def key(seed: int) -> jax.Array:
    return bits.key_pair(jax.random.key(seed))


@functools.cache
def problem(name: str) -> tuple[FactorGraph, dict[str, Any], dict[str, jax.Array]]:
    """A model and data rows far from its law."""
    graph, scale = MODELS[name]
    params = random_params(graph, seed=2, scale=scale)
    rows = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 1]], np.float32)[:, : graph.families["a"].size]
    return graph, params, {"a": jnp.tile(jnp.asarray(rows), (ROWS // 4, 1))}


@functools.partial(jax.jit, static_argnums=(0, 1))
def estimate(estimator: UCD, graph: FactorGraph, params: Any, state: Any, batch: Any, pair: Any) -> Estimate:
    return estimator.estimate(graph, params, state, Batch.of(batch), pair)


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("rbm", UCD(k=1, num_slots=16)),
        ("rbm", UCD(num_slots=16)),
        ("gaussian", UCD(k=2, m=4, lag=2, num_slots=16)),
        ("deep", UCD(k=1, num_slots=16)),  # the positive phase is a second set of pairs
    ],
)
def test_mean_gradient_is_that_of_the_negative_log_likelihood(name: str, estimator: UCD) -> None:
    graph, params, data = problem(name)
    wanted = jax.tree.map(lambda g: -np.asarray(g), exact.grad_log_likelihood(graph, params, data))
    state = estimator.init(graph, params, data, ROWS, key(0))
    made = []
    for seed in range(BATCHES):
        out = estimate(estimator, graph, params, state, data, key(seed + 1))
        made.append(out.gradient)
        state = out.state  # an adaptive lag moves, and every step stays unbiased given the past
        assert out.metrics["num_unmet"] == 0
    assert np.abs(wanted["a"]).max() > 0.1
    count = sum(g.size for g in jax.tree.leaves(wanted))
    for factor, value in wanted.items():
        assert_rows_law(np.stack([np.asarray(g[factor]) for g in made]), value, count)


def test_adaptive_lag_follows_the_past_only() -> None:
    graph, params, data = problem("rbm")
    estimator = UCD(num_slots=16)
    assert estimator.adaptive and not UCD(k=1).adaptive
    first = estimator.init(graph, params, data, ROWS, key(0))
    assert first == (1.0, 1.0, ())
    for past, lag in ((1.0, 1), (2.4, 2), (2.6, 3), (0.1, 1), (30.0, 30)):
        made = [
            estimate(estimator, graph, params, first._replace(negative=jnp.float32(past)), data, key(seed))
            for seed in range(2)
        ]
        for out in made:  # whatever happens in the step itself
            assert (int(out.metrics["lag"]), int(out.metrics["k"])) == (lag, lag)
        moved = {float(out.state.negative) for out in made}
        assert all(value != past for value in moved)
    # 0.9 of the past and 0.1 of the quantile of this step's times to meet, which are small here
    assert 27 <= float(made[0].state.negative) < 28


def test_metrics_tell_the_meeting_times() -> None:
    graph, params, data = problem("rbm")
    state = UCD().init(graph, params, data, ROWS, key(0))
    metrics = estimate(UCD(k=1, num_slots=16), graph, params, state, data, key(1)).metrics
    assert set(metrics) == {
        "meeting_time_mean",
        "meeting_time_max",
        "num_unmet",
        "lag",
        "k",
        "trials",
        "late",
    }
    assert 1 < metrics["meeting_time_mean"] < metrics["meeting_time_max"]
    assert metrics["trials"] >= 1


def test_unmet_pairs_make_the_gradient_not_a_number_unless_allowed() -> None:
    graph, params, data = problem("rbm")
    state = UCD().init(graph, params, data, ROWS, key(0))
    strict = estimate(UCD(k=1, max_sweeps=2, num_slots=16), graph, params, state, data, key(1))
    assert strict.metrics["num_unmet"] > 0
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(strict.gradient))
    lax = estimate(UCD(k=1, max_sweeps=2, allow_unmet=True, num_slots=16), graph, params, state, data, key(1))
    assert lax.metrics["num_unmet"] == strict.metrics["num_unmet"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(lax.gradient))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": -1}, "UCD: k is an int of at least 0, not -1"),
        ({"k": 1.0}, "UCD: k is an int of at least 0, not 1.0"),
        ({"num_pairs": 0}, "UCD: num_pairs is an int of at least 1, not 0"),
        ({"lag": 0}, "UCD: lag is an int of at least 1, not 0"),
        ({"max_sweeps": 0}, "UCD: max_sweeps is an int of at least 1, not 0"),
        ({"k": 3, "m": 2}, "UCD: m is at least k; got k=3, m=2"),
        ({"quantile": 1.0}, r"quantile is in \(0, 1\)"),
        ({"smoothing": 1.0}, r"smoothing in \[0, 1\)"),
    ],
)
def test_numbers_out_of_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UCD(**given)


def test_coupling_is_checked_against_the_layers_before_training() -> None:
    graph, params, data = problem("rbm")
    assert hash(UCD(coupling=["maximal", "common"])) == hash(UCD(coupling=("maximal", "common")))
    with pytest.raises(ValueError, match="coupling 'crn' is unknown"):
        UCD(coupling="crn").init(graph, params, data, ROWS, key(0))
    with pytest.raises(ValueError, match="names 1 layers, and the sweep has 2"):
        UCD(coupling=("maximal",)).init(graph, params, data, ROWS, key(0))
