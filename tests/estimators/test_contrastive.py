# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Contrastive divergence, persistent and with fast weights, against transition matrices.

Tests estimators/base.py, estimators/contrastive.py, estimators/phases.py.
"""

import functools
from typing import Any

import numpy as np
import pytest
from ucd_tools import (
    BATCHES,
    STATES,
    WEIGHTS,
    assert_mean,
    difference,
    initial,
    key,
    phase,
    problem,
    problem_gradient,
    sigmoid,
    step,
    visible_distribution,
    visible_transition,
)

import jax
import jax.numpy as jnp

from ebmpp import CD, PCD
from ebmpp.contrib import FPCD
from ebmpp.contrib.estimators.fpcd import FPCDState
from ebmpp.errors import ArgumentError, IntractableError
from helpers import assert_rows_law, nightly

CHAINS = 500


def gradient_at(distribution: np.ndarray) -> dict[str, np.ndarray]:
    """The gradient of the weighted loss with the model's distribution replaced."""
    _, params, data = problem("rbm")
    return difference(
        phase(params, STATES, distribution), phase(params, data["v"], WEIGHTS)
    )


@pytest.mark.parametrize("k", [2, nightly(1)])
def test_cd_mean_gradient_is_that_of_the_k_step_distribution(k: int) -> None:
    _, params, data = problem("rbm")
    start, transition = (
        visible_distribution(data["v"], WEIGHTS),
        visible_transition(params),
    )
    gradients = [step(CD(k=k), "rbm", (), seed).gradient for seed in range(BATCHES)]
    exact = gradient_at(start @ np.linalg.matrix_power(transition, k))
    assert_mean(gradients, exact)
    # one sweep more or less would be seen, and the limit is the exact gradient
    for other in (k - 1, k + 1, 10_000):
        wrong = gradient_at(start @ np.linalg.matrix_power(transition, other))
        assert max(np.abs(wrong[name] - exact[name]).max() for name in exact) > 0.01
    for name, value in problem_gradient("rbm").items():
        np.testing.assert_allclose(wrong[name], value, atol=1e-6)


def test_pcd_chains_continue_and_reach_the_exact_gradient() -> None:
    estimator = PCD(num_chains=CHAINS)
    state = first = initial(estimator, "rbm")
    assert {b: v.shape for b, v in state.items()} == {
        "v": (CHAINS, 4),
        "h": (CHAINS, 3),
    }
    gradients = []
    for seed in range(300):
        result = step(estimator, "rbm", state, seed + 1)
        state = result.state
        if seed >= 40 and seed % 13 == 0:
            gradients.append(result.gradient)
    assert (state["v"] != np.asarray(first["v"])).any()
    assert_mean(gradients, problem_gradient("rbm"))


def test_pcd_sweep_starts_from_the_given_chains() -> None:
    _, params, _ = problem("rbm")
    ones = {"v": jnp.ones((CHAINS, 4)), "h": jnp.ones((CHAINS, 3))}
    results = [
        step(PCD(num_chains=CHAINS), "rbm", ones, seed) for seed in range(BATCHES)
    ]
    # the first sweep draws v given h = 1
    exact = sigmoid(np.asarray(params["v"]) + np.asarray(params["v:h"]).sum(1))
    assert_rows_law([r.state["v"].mean(0) for r in results], exact)


def test_fast_weights_learn_decay_and_move_the_chains_alone() -> None:
    _, params, data = problem("rbm")
    fpcd, pcd = FPCD(num_chains=CHAINS, rate=0.3, decay=0.6), PCD(num_chains=CHAINS)
    state = initial(fpcd, "rbm")
    np.testing.assert_array_equal(state.chains["v"], initial(pcd, "rbm")["v"])
    first, plain = step(fpcd, "rbm", state, 1), step(pcd, "rbm", state.chains, 1)
    # Fast weights are 0 at first. Two programs may round differently, so that a few of
    # the chains' units differ on an accelerator.
    for b, chains in plain.state.items():
        assert np.mean(first.state.chains[b] != chains) < 0.005
    for name, g in plain.gradient.items():
        np.testing.assert_allclose(first.gradient[name], g, atol=0.01)
        fast = -0.3 * first.gradient[name]
        np.testing.assert_allclose(first.state.fast[name], fast, atol=1e-6)
    second = step(fpcd, "rbm", first.state, 2)
    moved = step(pcd, "rbm", first.state.chains, 2)
    assert any((second.state.chains[b] != moved.state[b]).any() for b in moved.state)
    # the gradient is that of the params themselves
    model = phase(
        params, second.state.chains["v"], np.full(CHAINS, WEIGHTS.sum() / CHAINS)
    )
    for name, g in difference(model, phase(params, data["v"], WEIGHTS)).items():
        np.testing.assert_allclose(second.gradient[name], g, atol=1e-5)
        expected = 0.6 * first.state.fast[name] - 0.3 * g
        np.testing.assert_allclose(second.state.fast[name], expected, atol=1e-5)


def test_chains_are_adopted_from_stage_to_stage() -> None:
    before = {"v": jnp.arange(12.0).reshape(3, 4), "h": jnp.arange(9.0).reshape(3, 3)}
    fresh = {n: initial(PCD(num_chains=n), "rbm") for n in (2, 5)}
    more, fewer = (PCD(num_chains=n).adopt(before, fresh[n]) for n in (5, 2))
    for b, rows in before.items():
        np.testing.assert_array_equal(more[b], np.asarray(rows)[[0, 1, 2, 0, 1]])
        np.testing.assert_array_equal(fewer[b], rows[:2])
    assert PCD(num_chains=5).adopt((), fresh[5]) is fresh[5]  # the state of CD
    fpcd = FPCD(num_chains=3)
    state = initial(fpcd, "rbm")
    moved = FPCDState(before, jax.tree.map(jnp.ones_like, problem("rbm")[1]))
    same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    same(fpcd.adopt(before, state), FPCDState(before, state.fast))
    same(fpcd.adopt(moved, state), moved)
    same(PCD(num_chains=3).adopt(moved, state.chains), before)


@pytest.mark.parametrize("estimator", [CD(), PCD(num_chains=2)], ids=["CD", "PCD"])
def test_interacting_latents_need_a_posterior(estimator: Any) -> None:
    graph, params, data = problem("deep")
    with pytest.raises(
        IntractableError, match=rf"^{type(estimator).__name__} .*'h1' and 'h2' interact"
    ):
        estimator.init_state(graph, params, data, 4, key(0))


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        (CD, {"k": 0}),
        (PCD, {"num_chains": 0}),
        (FPCD, {"rate": -0.1}),
        (FPCD, {"rate": float("nan")}),
        (FPCD, {"decay": 1.0}),
    ],
)
def test_invalid_arguments_raise(estimator: Any, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ArgumentError, match=f"{name} .*{value:g}"):
        estimator(**options)
