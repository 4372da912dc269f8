# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tempered persistent chains visit modes that plain chains do not leave."""

from typing import Any

import numpy as np
from ucd_tools import estimate, exact_gradient, key, two_modes
import zoo

import jax
import jax.numpy as jnp

from ebmpp import PCD, TemperedPCD
from helpers import assert_rows_law

ROWS = {"v": np.float32([[1] * 4, [0] * 4])}


def gradients(estimator: Any, steps: int = 250, warmup: int = 50) -> tuple[np.ndarray, Any, list[Any]]:
    """Gradients by ``v`` of a run at fixed params whose chains all start in one mode."""
    graph, params = zoo.graph("rbm"), two_modes(5.0, 0.05)
    state, results, metrics = estimator.init(graph, params, ROWS, 2, key(0)), [], []
    ones = lambda s: jax.tree.map(jnp.ones_like, s)
    state = state._replace(chains=ones(state.chains)) if hasattr(state, "chains") else ones(state)
    for seed in range(steps):
        result = jax.device_get(estimate(estimator, graph, params, state, ROWS, key(seed + 1)))
        state = result.state
        if seed >= warmup:
            results.append(result.gradient["v"])
            metrics.append(result.metrics)
    return np.stack(results), state, metrics


def test_tempered_chains_weigh_modes_that_plain_chains_do_not_leave() -> None:
    exact = exact_gradient(zoo.graph("rbm"), two_modes(5.0, 0.05), ROWS)["v"]
    # batch means of 20 steps: neighbouring steps are not independent
    result, state, metrics = gradients(TemperedPCD(k=2, num_chains=50, num_temperatures=6))
    assert_rows_law(result.reshape(10, 20, -1).mean(1), exact)
    stuck, _, _ = gradients(PCD(k=2, num_chains=50))
    assert np.abs(stuck.mean(0) - exact).min() > 0.2
    # the ladder has moved to where all neighbours are rejected alike
    betas = np.asarray(state.betas)
    assert betas[0] == 0 and betas[-1] == 1 and (np.diff(betas) > 0).all()
    assert not np.allclose(betas, np.linspace(0, 1, 6), atol=0.02)
    spread = [float(m["swap_rejection_max"] - m["swap_rejection_mean"]) for m in metrics]
    assert np.mean(spread) < 0.15
