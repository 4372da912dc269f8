# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import functools
import itertools
from typing import Any

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import CD, FPCD, PCD, Bernoulli, exact, layered
from ebmpp.core import random
from ebmpp.errors import IntractableError
from ebmpp.estimators.base import Batch, Estimate
from ebmpp.estimators.contrastive import FPCDState
from ebmpp.estimators.phases import two_phases
from helpers import assert_rows_law, pair, random_params

RBM = pair(Bernoulli(3), Bernoulli(2))
PARAMS = random_params(RBM, seed=1, scale=2.5)
DATA = {"a": jnp.array([[1.0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 1, 1]])}
BATCHES, COPIES = 60, 100  # each data row many times in a batch: the mean over rows is the same


def key(seed: int) -> jax.Array:
    return random.key_pair(jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0)
def estimate(estimator: Any, state: Any, batch: Any, pair: jax.Array) -> Estimate:
    return estimator.estimate(RBM, PARAMS, state, Batch.of(batch), pair)


# -- the oracle: transition matrices over the eight visible states, in numpy ---------------------

STATES = np.array(list(itertools.product((0, 1), repeat=3)), float)
A, B, W = (np.asarray(PARAMS[name], float) for name in ("a", "b", "a:b"))


def _on(eta: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-eta))


def _law(states: np.ndarray, on: np.ndarray) -> np.ndarray:
    """P(state) for each row of probabilities ``on``."""
    return np.prod(np.where(states[None] == 1, on[:, None], 1 - on[:, None]), -1)


def transition() -> np.ndarray:
    """P(v' | v) of one sweep that draws h, then v."""
    hidden = np.array(list(itertools.product((0, 1), repeat=2)), float)
    return _law(hidden, _on(B + STATES @ W)) @ _law(STATES, _on(A + hidden @ W.T))


def data_law() -> np.ndarray:
    made = np.zeros(8)
    for row in np.asarray(DATA["a"]):
        made[(STATES == row).all(1)] += 1 / len(DATA["a"])
    return made


def gradient(positive: np.ndarray, negative: np.ndarray) -> dict[str, np.ndarray]:
    """Of the mean negative log-likelihood, with the model's law replaced by ``negative``."""
    means = _on(B + STATES @ W)
    weight = negative - positive
    return {"a": weight @ STATES, "b": weight @ means, "a:b": np.einsum("s,si,sj->ij", weight, STATES, means)}


def assert_gradients(made: list[Any], wanted: dict[str, np.ndarray]) -> None:
    count = sum(np.size(g) for g in wanted.values())
    for name, value in wanted.items():
        assert_rows_law(np.stack([np.asarray(g[name]) for g in made]), value, count)


@pytest.mark.parametrize("k", [1, 3])
def test_cd_is_the_gradient_of_the_k_step_law(k: int) -> None:
    batch = {"a": jnp.tile(DATA["a"], (COPIES, 1))}
    made = [estimate(CD(k=k), (), batch, key(seed)).gradient for seed in range(BATCHES)]
    start = data_law()
    wanted = gradient(start, start @ np.linalg.matrix_power(transition(), k))
    assert_gradients(made, wanted)


def test_cd_is_biased_by_as_much_as_the_chain_is_from_its_limit() -> None:
    # the test above can tell k = 1 from k = 3 and both from the exact gradient
    start, step = data_law(), transition()
    laws = [start @ np.linalg.matrix_power(step, k) for k in (1, 3, 10_000)]
    grads = [np.concatenate([g.ravel() for g in gradient(start, law).values()]) for law in laws]
    assert min(np.abs(grads[i] - grads[j]).max() for i, j in ((0, 1), (0, 2), (1, 2))) > 0.01
    limit = exact.grad_log_likelihood(RBM, PARAMS, DATA)
    for name, value in gradient(start, laws[2]).items():
        np.testing.assert_allclose(value, -np.asarray(limit[name]), atol=2e-6)


def test_pcd_chains_go_on_and_reach_the_exact_gradient() -> None:
    estimator = PCD(k=2, num_chains=500)
    state = first = estimator.init(RBM, PARAMS, DATA, 4, key(0))
    assert {b: v.shape for b, v in state.items()} == {"a": (500, 3), "b": (500, 2)}
    made = []
    for step in range(300):
        out = estimate(estimator, state, DATA, key(step + 1))
        state = out.state
        if step >= 20 and step % 7 == 0:  # fourteen sweeps apart
            made.append(out.gradient)
    assert (np.asarray(state["a"]) != np.asarray(first["a"])).any()
    wanted = jax.tree.map(np.negative, exact.grad_log_likelihood(RBM, PARAMS, DATA))
    assert_gradients(made, wanted)


def test_pcd_starts_from_the_state_it_is_given() -> None:
    chains = 400
    still = {"a": jnp.ones((chains, 3)), "b": jnp.ones((chains, 2))}
    made = [estimate(PCD(k=1, num_chains=chains), still, DATA, key(seed)) for seed in range(BATCHES)]
    # layers a, then b: the first sweep draws a from b = 1
    wanted = _on(A + W.sum(1))
    assert_rows_law([np.asarray(out.state["a"]).mean(0) for out in made], wanted)


def test_chains_go_on_from_stage_to_stage() -> None:
    before = {"a": jnp.arange(9.0).reshape(3, 3), "b": jnp.arange(6.0).reshape(3, 2)}
    init = lambda estimator: estimator.init(RBM, PARAMS, DATA, 4, key(0))
    more, fewer = (PCD(num_chains=n).adopt(before, init(PCD(num_chains=n))) for n in (5, 2))
    for b, rows in before.items():
        np.testing.assert_array_equal(more[b], rows[jnp.array([0, 1, 2, 0, 1])])  # in turn
        np.testing.assert_array_equal(fewer[b], rows[:2])
    state = FPCD(num_chains=3).init(RBM, PARAMS, DATA, 4, key(0))
    moved = FPCDState(before, jax.tree.map(jnp.ones_like, PARAMS))
    same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    same(FPCD(num_chains=3).adopt(before, state), FPCDState(before, state.fast))
    same(FPCD(num_chains=3).adopt(moved, state), moved)
    same(PCD(num_chains=3).adopt(moved, state.chains), before)


def test_a_stage_that_carries_no_chains_leaves_them_to_the_next() -> None:
    fresh = PCD(num_chains=5).init(RBM, PARAMS, DATA, 4, key(0))
    assert PCD(num_chains=5).adopt((), fresh) is fresh  # of a CD


def test_same_key_same_gradient_and_another_key_another() -> None:
    one, again, other = (estimate(CD(), (), DATA, key(seed)).gradient["a:b"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (np.asarray(one) != np.asarray(other)).any()


def test_posterior_that_is_not_one_layer_is_refused() -> None:
    deep = layered(v=Bernoulli(2), h1=Bernoulli(2), h2=Bernoulli(2))
    params = deep.init(jax.random.key(0))
    for name, estimator in (("CD", CD()), ("PCD", PCD(num_chains=2))):
        message = rf"^{name} needs an exact positive phase, and latent blocks 'h1' and 'h2' interact.*UCD\(\)"
        with pytest.raises(IntractableError, match=message):
            estimator.init(deep, params, {"v": jnp.zeros((1, 2))}, 1, key(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CD(k=0), "k is an int of at least 1, not 0"),
        (lambda: CD(k=1.5), "k is an int of at least 1, not 1.5"),
        (lambda: PCD(k=-1), "k is an int of at least 1, not -1"),
        (lambda: PCD(num_chains=0), "num_chains is an int of at least 1, not 0"),
    ],
)
def test_counts_are_positive(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_fast_weights_learn_decay_and_drive_the_chains_alone():
    fpcd, pcd = FPCD(num_chains=7, rate=0.3, decay=0.6), PCD(num_chains=7)
    state = fpcd.init(RBM, PARAMS, DATA, 4, key(0))
    np.testing.assert_array_equal(state.chains["a"], pcd.init(RBM, PARAMS, DATA, 4, key(0))["a"])
    one = jax.jit(lambda e, p, s, k: e.estimate(RBM, p, s, Batch.of(DATA), k), static_argnums=0)
    first = one(fpcd, PARAMS, state, key(1))
    plain = one(pcd, PARAMS, state.chains, key(1))  # fast weights are 0 at first
    jax.tree.map(np.testing.assert_array_equal, first.gradient, plain.gradient)
    jax.tree.map(lambda f, g: np.testing.assert_allclose(f, -0.3 * g), first.state.fast, first.gradient)

    second = one(fpcd, PARAMS, first.state, key(2))
    moved = jax.tree.map(jnp.add, PARAMS, first.state.fast)
    driven = one(pcd, moved, first.state.chains, key(2))
    jax.tree.map(np.testing.assert_array_equal, second.state.chains, driven.state)
    expected = jax.tree.map(lambda f, g: 0.6 * f - 0.3 * g, first.state.fast, second.gradient)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, atol=1e-6), second.state.fast, expected)
    # the gradient is that of the params themselves
    at_params = two_phases(RBM, PARAMS, Batch.of(DATA), second.state.chains)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, atol=1e-6), second.gradient, at_params)


@pytest.mark.parametrize("options", [{"rate": -0.1}, {"decay": 1.0}, {"k": 0}, {"rate": float("nan")}])
def test_fpcd_refuses_numbers_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        FPCD(**options)
