# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Gradients from particle systems and from weighted persistent chains against exact ones.

Tests estimators/particles.py, estimators/weighted.py.
"""

from typing import Any

import numpy as np
import pytest
from ucd_tools import (
    assert_mean,
    difference,
    exact_gradient,
    key,
    phase,
    problem,
    sigmoid,
    two_modes,
)
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import ParticleUCD, WeightedPCD
from ebmpp.contrib import Herding
from ebmpp.core import random
from ebmpp.errors import ArgumentError
from ebmpp.estimators import Batch, weighted
from ebmpp.estimators.base import Estimate
from helpers import assert_rows_law, nightly

WEIGHTS = np.float32([0.5, 2.5, 0.0, 1.5]) / 4
DRAWS, STARTS = 300, 25


def scaled(params: dict[str, Any], factor: float) -> dict[str, Any]:
    return {
        name: jnp.asarray(np.float32(factor) * np.asarray(a))
        for name, a in params.items()
    }


def batch_of(name: str) -> Batch:
    return Batch({"v": problem(name)[2]["v"][:4]}, jnp.asarray(WEIGHTS))


def loss_gradient(name: str) -> dict[str, np.ndarray]:
    graph, params, _ = problem(name)
    return exact_gradient(
        graph, params, {"v": np.asarray(batch_of(name).rows["v"])}, WEIGHTS
    )


def draws(name: str, estimator: ParticleUCD, start: float | None = None) -> Estimate:
    """Independent estimates of one gradient; ``start`` scales the params of a step before."""
    graph, params, _ = problem(name)
    before = params if start is None else scaled(params, start)
    batch = batch_of(name)
    first = estimator.init_state(graph, before, batch.rows, 4, key(1))

    def draw(pair: jax.Array) -> Estimate:
        state = first
        if start is not None:
            state = estimator.estimate(
                graph, before, state, batch, random.fold_in(pair, 0, 5)
            ).state
        return estimator.estimate(graph, params, state, batch, pair)

    pairs = np.stack([np.zeros(DRAWS, np.uint32), np.arange(DRAWS, dtype=np.uint32)], 1)
    return jax.device_get(jax.jit(lambda pairs: jax.lax.map(draw, pairs))(pairs))


@pytest.mark.parametrize(
    ("name", "path"),
    [("rbm", "line"), nightly("rbm", "training"), nightly("deep", "line")],
)
def test_mean_gradient_matches_exact_gradient(name: str, path: str) -> None:
    """So few particles that many systems are rejected; the deep graph has a positive
    phase by pairs."""
    estimator = ParticleUCD(num_particles=6, path=path, cess_threshold=0.5, max_rungs=8)
    result = draws(name, estimator, 0.7 if path == "training" else None)
    rows = {n: list(g) for n, g in result.gradient.items()}
    assert_mean(
        [{n: g[i] for n, g in rows.items()} for i in range(DRAWS)], loss_gradient(name)
    )
    assert (
        result.metrics["meeting_time_max"].max() > 1
        and not result.metrics["num_unmet"].any()
    )
    assert 0.1 < result.metrics["acceptance"].mean() < 0.97


@pytest.mark.nightly
def test_weighted_chains_and_watchers_follow_the_params(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Z stays unbiased as params move far, with so few particles that they resample;
    weights count."""
    monkeypatch.setattr(weighted, "_MAX_ERROR", np.inf)
    monkeypatch.setattr(weighted, "MIN_SHARE", 0.0)
    graph, params, batch = zoo.graph("rbm"), two_modes(), batch_of("rbm")
    estimator = WeightedPCD(num_chains=50, num_watchers=20)
    step = jax.jit(
        lambda p, state, pair: estimator.estimate(graph, p, state, batch, pair)
    )
    log_z, partitions, metrics = zoo.Oracle(graph, params, {}).log_z, [], []
    positive = phase(params, batch.rows["v"], WEIGHTS)
    for seed in range(STARTS):
        state = estimator.init_state(
            graph, scaled(params, 0.2), batch.rows, 4, key(3 * seed)
        )
        assert state.watchers is not None and state.watchers.log_weights.shape == (
            10,
            2,
        )
        # one program for all steps
        assert state.variance == 0 and not state.variance.weak_type
        for i, factor in enumerate((0.6, 1.0)):
            result = jax.device_get(
                step(scaled(params, factor), state, key(3 * seed + i + 1))
            )
            state = result.state
        # the gradient is that of the weighted chains, with the visible units summed out
        w = (
            np.asarray(jax.nn.softmax(state.chains.log_weights[0]), float)
            * WEIGHTS.sum()
        )
        h = state.chains.x["h"].astype(float)
        v = sigmoid(np.asarray(params["v"]) + h @ np.asarray(params["v:h"]).T)
        negative = {"v": w @ v, "h": w @ h, "v:h": np.einsum("n,ni,nj->ij", w, v, h)}
        for name, value in difference(negative, positive).items():
            np.testing.assert_allclose(result.gradient[name], value, atol=1e-4)
        reference = sum(np.logaddexp(0, eta).sum() for eta in state.eta0.values())
        chains = float(
            jax.nn.logsumexp(state.chains.log_weights)
            - np.log(50)
            + state.chains.log_z[0]
        )
        partitions.append(
            np.exp(
                [chains + reference - log_z, result.metrics["log_partition"] - log_z]
            )
        )
        metrics.append({**result.metrics, "spread": w.std()})
    assert_rows_law(np.array(partitions), 1.0)
    heirs = state.watchers._replace(ancestors=np.zeros_like(state.watchers.ancestors))
    assert np.isinf(weighted._first_variance(heirs))
    assert np.mean([m["spread"] for m in metrics]) > 0.005
    assert 5 < np.mean([m["effective_sample_size"] for m in metrics]) < 40
    assert 0 < np.mean([m["resampled"] for m in metrics]) < 1


@pytest.mark.nightly
def test_watchers_start_again_where_they_cannot_follow() -> None:
    """After a step too long to reweight by there is no estimate until a fresh system
    replaces them."""
    graph, batch = zoo.graph("rbm"), batch_of("rbm")
    estimator = WeightedPCD(num_chains=50, num_watchers=1000)
    step = jax.jit(
        lambda p, state, pair: estimator.estimate(graph, p, state, batch, pair)
    )
    state, seen = (
        estimator.init_state(graph, scaled(two_modes(), 0.1), batch.rows, 4, key(0)),
        [],
    )
    exact = {
        factor: zoo.Oracle(graph, scaled(two_modes(), factor), {}).log_z
        for factor in (3.0, -3.0)
    }
    for i, factor in enumerate((3.0, -3.0, *[3.0] * 20)):
        params = scaled(two_modes(), factor)
        result = jax.device_get(step(params, state, key(i)))
        state, log_z = result.state, result.metrics["log_partition"]
        seen.append(np.isnan(log_z))
        assert np.isnan(log_z) == np.isnan(result.metrics["log_likelihood"])
        assert np.isnan(log_z) == (not result.metrics["log_partition_error"] <= 0.2)
        error = log_z - exact[factor]
        assert np.isnan(error) or abs(error) < 5 * result.metrics["log_partition_error"]
    assert seen[:2] == [False, True] and not any(seen[-8:])


def test_histories_are_diagnosed() -> None:
    chains, particles = WeightedPCD(), ParticleUCD()
    assert "60%" in (chains.diagnose({"resampled": np.array([1, 0, 1, 0, 1])}) or "")
    quiet = {"resampled": np.array([1, 0, 0, 0])}
    assert chains.diagnose(quiet) is None
    assert chains.diagnose(quiet | {"log_partition_error": np.full(4, 0.1)}) is None
    assert "50%" in (
        chains.diagnose(
            quiet | {"log_partition_error": np.array([0.1, 0.1, 0.4, np.nan])}
        )
        or ""
    )
    history = lambda stay, even: {
        "longest_stay": np.array(stay),
        "min_cess": np.array(even),
    }
    assert "25 others, at step 2" in (
        particles.diagnose(history([0, 3, 25], [0.9, 0.9, 0.95])) or ""
    )
    assert "4.0%" in (particles.diagnose(history([0, 3], [0.9, 0.04])) or "")
    assert particles.diagnose(history([0, 3], [0.9, 0.95])) is None


@pytest.mark.parametrize(
    ("estimator", "options", "message"),
    [
        (ParticleUCD, {"num_particles": 1}, "num_particles .*1"),
        (ParticleUCD, {"path": "beta"}, "path .*'beta'"),
        (ParticleUCD, {"k": 2}, "m .*2, got 1"),
        (ParticleUCD, {"cess_threshold": 1.0}, "cess_threshold .*1"),
        (ParticleUCD, {"max_systems": 2}, "max_systems .*2"),
        (ParticleUCD, {"posterior": None}, "posterior"),
        (WeightedPCD, {"num_watchers": 15}, "num_watchers .*15"),
        (ebmpp.TemperedPCD, {"num_temperatures": 1}, "num_temperatures .*1"),
        (Herding, {"num_chains": 5, "num_kept": 4}, "num_kept .*4"),
    ],
)
def test_invalid_arguments_raise(
    estimator: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        estimator(**options)
