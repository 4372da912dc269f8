# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import itertools
import math

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import CD, PCD, Bernoulli, Bias, Bilinear, FactorGraph, Gaussian, Spin, exact, layered
from ebmpp.core import random
from ebmpp.errors import IntractableError
from ebmpp.estimators import Batch, MeanField
from helpers import assert_rows_law, random_params

DEEP = layered(v=Bernoulli(3), h1=Bernoulli(2), h2=Spin(2))
PARAMS = random_params(DEEP, seed=4, scale=1.5)
ROWS = {"v": jnp.array([[1.0, 0, 0], [1, 1, 1], [0, 1, 1]])}


def latents() -> list[dict[str, np.ndarray]]:
    sides = [itertools.product((0.0, 1.0), repeat=2), itertools.product((-1.0, 1.0), repeat=2)]
    return [{"h1": np.array(a), "h2": np.array(b)} for a, b in itertools.product(*map(list, sides))]


def bound(means: dict[str, np.ndarray], v: np.ndarray) -> float:
    """E_q[-E] plus the entropy of q, every state enumerated."""
    on = {"h1": np.asarray(means["h1"], float), "h2": (np.asarray(means["h2"], float) + 1) / 2}
    total = 0.0
    for state in latents():
        q = math.prod(math.prod(np.where(state[b] > 0, on[b], 1 - on[b])) for b in state)
        energy = float(DEEP.energy(PARAMS, {"v": v, **state}))
        total += q * (-energy - math.log(max(q, 1e-300)))
    return total


def test_passes_climb_the_bound_to_a_fixed_point_below_the_likelihood() -> None:
    bounds = []
    for passes in (1, 2, 3, 50, 51):
        made = MeanField(passes).statistics(DEEP, PARAMS, ROWS)
        bounds.append([bound({b: made[b][i] for b in ("h1", "h2")}, ROWS["v"][i]) for i in range(3)])
    bounds = np.array(bounds)
    assert (np.diff(bounds, axis=0) > -1e-5).all() and (bounds[3] - bounds[0] > 1e-3).any()
    np.testing.assert_allclose(bounds[3], bounds[4], atol=1e-5)
    truth = exact.log_likelihood(DEEP, PARAMS, ROWS) + exact.log_partition(DEEP, PARAMS)
    assert (bounds[3] < np.asarray(truth)).all()


def test_a_pass_goes_up_from_the_visible_blocks_however_they_are_declared() -> None:
    """The first layer begins from what the row says, and the middle of the upper one, not from its bias."""
    graph = FactorGraph(
        {"v": Bernoulli(3)},
        {"top": Bernoulli(2), "low": Bernoulli(4)},
        [Bias("top"), Bias("v"), Bias("low"), Bilinear("top", "low"), Bilinear("v", "low")],
    )
    params = random_params(graph, seed=2, scale=1.0) | {"top": jnp.full(2, 9.0)}
    p = {name: np.asarray(a, float) for name, a in params.items()}
    on = lambda eta: 1 / (1 + np.exp(-eta))
    low = on(p["low"] + np.asarray(ROWS["v"]) @ p["v:low"] + 0.5 * p["top:low"].sum(0))
    made = MeanField(1).statistics(graph, params, ROWS)
    np.testing.assert_allclose(made["low"], low, atol=1e-5)
    np.testing.assert_allclose(made["top"], on(p["top"] + low @ p["top:low"].T), atol=1e-5)


def test_no_product_of_units_nearby_has_a_higher_bound() -> None:
    made = MeanField(60).statistics(DEEP, PARAMS, ROWS)
    best = {b: np.asarray(made[b][0], float) for b in ("h1", "h2")}
    top = bound(best, ROWS["v"][0])
    for b, i, step in itertools.product(("h1", "h2"), range(2), (-0.02, 0.02)):
        moved = {name: v.copy() for name, v in best.items()}
        moved[b][i] += step
        assert bound(moved, ROWS["v"][0]) < top


def test_pcd_takes_it_for_its_positive_phase() -> None:
    estimator = PCD(num_chains=4, posterior=MeanField(30))
    pair = random.key_pair(jax.random.key(0))
    chains = estimator.init(DEEP, PARAMS, ROWS, 3, pair)
    weights = jnp.array([0.5, 0.3, 0.2])
    made = estimator.estimate(DEEP, PARAMS, chains, Batch(ROWS, weights), pair)
    means = MeanField(30).statistics(DEEP, PARAMS, ROWS)
    # by hand: means of products are products of means
    positive = -np.einsum("n,ni,nj->ij", weights, means["v"], means["h1"])
    negative = -np.einsum("ni,nj->ij", made.state["v"], made.state["h1"]) / 4
    np.testing.assert_allclose(made.gradient["v:h1"], positive - negative, atol=1e-5)


def test_one_layer_needs_no_mean_field() -> None:
    rbm = layered(v=Gaussian(2), h=Bernoulli(2))
    params = random_params(rbm, seed=1, scale=0.5)
    batch = Batch.of({"v": jnp.array([[0.3, -1.0], [1.0, 0.2]])})
    pair = random.key_pair(jax.random.key(0))
    one = jax.jit(lambda estimator: estimator.estimate(rbm, params, (), batch, pair), static_argnums=0)
    plain, asked = (one(CD(posterior=p)) for p in (None, MeanField(1)))
    jax.tree.map(np.testing.assert_array_equal, plain.gradient, asked.gradient)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_bound_at_the_fixed_point() -> None:
    batch = Batch.of({"v": jnp.tile(ROWS["v"], (100, 1))})
    estimator = PCD(k=5, num_chains=2000, posterior=MeanField(60))
    step = jax.jit(lambda s, key: estimator.estimate(DEEP, PARAMS, s, batch, key))
    state, made = estimator.init(DEEP, PARAMS, ROWS, 3, random.key_pair(jax.random.key(0))), []
    for seed in range(60):
        out = step(state, random.key_pair(jax.random.key(seed + 1)))
        state = out.state
        if seed >= 10:
            made.append(np.asarray(out.gradient["v:h1"]))
    means = MeanField(60).statistics(DEEP, PARAMS, ROWS)
    positive = np.einsum("ni,nj->ij", means["v"], means["h1"]) / 3
    moments = jax.grad(lambda p: exact.log_partition(DEEP, p))(PARAMS)["v:h1"]
    assert_rows_law(np.stack(made), np.asarray(moments) - positive)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="passes is an int of at least 1, not 0"):
        MeanField(0)
    with pytest.raises(IntractableError, match=r"PCD\(posterior=MeanField\(\)\) takes a variational one"):
        PCD(num_chains=2).init(DEEP, PARAMS, ROWS, 1, random.key_pair(jax.random.key(0)))
