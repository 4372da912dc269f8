# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The bias of gradients against what enumeration says of it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import CD, FPCD, PCD, UCD, Bernoulli, ParticleUCD, TemperedPCD, WeightedPCD, exact, layered
from ebmpp.core import random
from ebmpp.errors import ArgumentError, StateError, UnmetError
from ebmpp.estimators import SDCP, Centered, Discriminative, GradientBias, Herding, gradient_bias
from ebmpp.estimators.base import Batch, Repeats
from ebmpp.estimators.contrastive import FPCDState
from ebmpp.graph.energy import gradient_at
from helpers import assert_law, enumerate_numpy, random_params, slow

RBM = layered(v=Bernoulli(3), h=Bernoulli(2))
#: Two modes, of unequal weight, between which a sweep seldom goes.
PARAMS = {"v": jnp.full(3, -3.0), "h": jnp.array([-4.0, -4.5]), "v:h": jnp.full((3, 2), 3.0)}
KEY = jax.random.key(0)
DATA = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 1]] * 100, np.float32)
REFERENCE = ParticleUCD(num_particles=1000, max_rungs=8)
COMPARISONS = 100


def judge(estimator: Any, state: Any = None, **options: Any) -> GradientBias:
    options = {"rng_key": KEY, "num_repeats": 40, "num_references": 60, "reference": REFERENCE} | options
    return gradient_bias(RBM, PARAMS, DATA, estimator, state, **options)


def visible_laws() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All visible states, the model's law of them, and that of a Gibbs sweep from each."""
    states, weights, _ = enumerate_numpy(RBM, PARAMS)
    v = np.array([x["v"] for x in states[:: len(states) // 8]])
    joint = np.asarray(weights).reshape(8, -1)  # the latents are last
    sweep = (joint / joint.sum(1, keepdims=True)) @ (joint / joint.sum(0)).T
    return v, joint.sum(1), sweep


def biased_by(start: np.ndarray) -> dict:
    """What the gradient is off by where chains are one sweep from the law ``start``: (p - start K) dF."""
    v, model, sweep = visible_laws()
    off = jnp.asarray(model - start @ sweep)
    return jax.grad(lambda p: off @ RBM.free_energy(p, {"v": jnp.asarray(v)}))(PARAMS)


def law_of(rows: np.ndarray) -> np.ndarray:
    v, _, _ = visible_laws()
    return (rows[:, None] == v).all(-1).mean(0)


def assert_bias(made: GradientBias, wanted: dict) -> None:
    """Coordinate by coordinate, by factor and over all."""
    squared = {n: float((np.asarray(w, float) ** 2).sum()) for n, w in wanted.items()}
    for name, found in made.factors.items():
        assert_law(made.bias[name], wanted[name], made.bias_error[name], COMPARISONS)
        assert_law(found.squared_bias, squared[name], found.standard_error, COMPARISONS)
    assert_law(made.total.squared_bias, sum(squared.values()), made.total.standard_error, COMPARISONS)


def assert_gradient(made: GradientBias) -> None:
    gradient = exact.grad_log_likelihood(RBM, PARAMS, DATA)
    for name, found in made.factors.items():
        wanted = float((np.asarray(gradient[name], float) ** 2).sum())
        assert_law(found.squared_gradient, wanted, found.gradient_error, COMPARISONS)


def test_cd_is_off_by_what_enumeration_says() -> None:
    made = judge(CD())
    assert_bias(made, biased_by(law_of(DATA)))
    assert_gradient(made)
    assert made.total.squared_bias > 5 * made.total.standard_error
    assert made.total.bias_norm == pytest.approx(made.total.squared_bias**0.5)
    assert "squared bias of" in repr(made) and "40 repeats from one state" in repr(made)


@pytest.mark.parametrize("mixed", [False, True])
def test_pcd_is_judged_by_the_law_of_its_chains(mixed: bool) -> None:
    """Chains that are draws of the model have no bias, however noisy their mean is; others have theirs."""
    v, model, _ = visible_laws()
    start = model if mixed else np.eye(8)[3] / 2 + np.eye(8)[5] / 2
    rows = v[np.random.default_rng(0).choice(8, 4000, p=start / start.sum())]
    latents = RBM.mean(PARAMS, {"v": jnp.asarray(rows), "h": jnp.zeros((4000, 2))}, "h")
    drawn = np.random.default_rng(1).uniform(size=(4000, 2)) < np.asarray(latents)
    chains = {"v": jnp.asarray(rows), "h": jnp.asarray(drawn)}
    like = PCD(num_chains=4000).init(RBM, PARAMS, {"v": DATA}, 4, random.key_pair(KEY))
    chains = {b: a.astype(like[b].dtype) for b, a in chains.items()}
    made = judge(PCD(num_chains=4000), chains)
    assert made.chains == 100 and made.given == "40 groups of 100 of its last chains"
    assert_bias(made, biased_by(start))
    assert (made.total.squared_bias > 10 * made.total.standard_error) == (not mixed)
    fast = jax.tree.map(jnp.zeros_like, PARAMS)
    same = judge(FPCD(num_chains=4000, rate=0.0), FPCDState(chains, fast))
    assert same.total.squared_bias == pytest.approx(made.total.squared_bias, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize(
    "estimator", [UCD(k=1, lag=1, num_slots=4), slow(dataclasses.replace(REFERENCE, num_particles=50))]
)
def test_unbiased_gradients_have_none(estimator: Any) -> None:
    assert_bias(judge(estimator), jax.tree.map(jnp.zeros_like, PARAMS))


def test_steps_between_batches_are_judged_on_the_rows_they_are_given() -> None:
    """What is carried from inner step to inner step is of the rows before."""
    estimator, rows = SDCP(d=3, k=2), {"v": np.ones_like(DATA)}
    state = estimator.init(RBM, PARAMS, rows, len(DATA), random.key_pair(KEY))
    made = estimator.estimate(RBM, PARAMS, state, Batch.of(rows), random.key_pair(KEY))
    assert made.state.inner == 1
    few = {"num_repeats": 3, "num_references": 3}
    between, fresh = judge(estimator, made.state, **few), judge(estimator, **few)
    jax.tree.map(np.testing.assert_array_equal, between.bias, fresh.bias)


def test_pairs_that_are_stopped_have_some() -> None:
    cut = UCD(k=0, lag=1, max_sweeps=2, num_slots=4)
    made = judge(dataclasses.replace(cut, allow_unmet=True))
    assert made.total.squared_bias > 3 * made.total.standard_error
    with pytest.raises(UnmetError, match="a pair of UCD.* was unmet after max_sweeps=2: raise that"):
        judge(cut)


def test_repeats_do_not_depend_on_how_many_there_are() -> None:
    few, many = (judge(CD(), num_repeats=3, num_references=n) for n in (3, 5))
    assert few.total.squared_gradient != many.total.squared_gradient
    again = judge(CD(), num_repeats=3, num_references=3)
    jax.tree.map(np.testing.assert_array_equal, few.bias, again.bias)


@pytest.mark.slow
def test_what_is_repeated() -> None:
    """Groups of chains that owe one another nothing; else the whole state."""
    begin = lambda e: e.init(RBM, PARAMS, {"v": DATA}, 100, random.key_pair(KEY))
    groups = PCD(num_chains=11).repeats(begin(PCD(num_chains=11)), 3)
    assert groups.chains == 3 and [len(s["v"]) for s in groups.states] == [3, 3, 3]
    assert len(PCD(num_chains=2).repeats(begin(PCD(num_chains=2)), 5).states) == 2
    tempered = TemperedPCD(num_chains=6, num_temperatures=2)
    groups = tempered.repeats(begin(tempered), 3)
    assert groups.estimator.num_chains == 2 and groups.states[0].chains["v"].shape == (2, 2, 3)
    np.testing.assert_array_equal(
        np.concatenate([s.chains["v"] for s in groups.states]), begin(tempered).chains["v"]
    )
    inner = Centered(PCD(num_chains=6))
    assert inner.repeats(begin(inner), 3).estimator == PCD(num_chains=6)
    weighted = WeightedPCD(num_chains=20, num_watchers=0)
    state = begin(weighted)
    assert weighted.repeats(state, 2) == Repeats(weighted, (state, state))
    beside = Discriminative("v", PCD(num_chains=6))
    assert beside.repeats(begin(PCD(num_chains=6)), 3).chains == 2


def test_what_cannot_be_judged_is_refused() -> None:
    begin = lambda e, size: e.init(RBM, PARAMS, {"v": DATA[:size]}, size, random.key_pair(KEY))
    with pytest.raises(ArgumentError, match="is its last chains; give state=fit.estimator_state"):
        judge(PCD(num_chains=10))
    with pytest.raises(ArgumentError, match="has 2 chains; 3 are the fewest that tell"):
        judge(PCD(num_chains=2), begin(PCD(num_chains=2), 4))
    persistent = UCD(start="persistent")
    with pytest.raises(StateError, match="with batches of 400 rows"):
        judge(persistent, begin(persistent, 4))
    with pytest.raises(ArgumentError, match="climbs no likelihood"):
        judge(Herding())
    with pytest.raises(ArgumentError, match="which has no bias"):
        Discriminative("v").repeats((), 3)


@pytest.mark.slow
def test_a_stand_in_for_the_posterior_is_a_part_of_the_bias() -> None:
    """Chains that are draws of a deep model: what is off is the positive phase of the mean field."""
    graph = layered(v=Bernoulli(3), a=Bernoulli(2), b=Bernoulli(2))
    params, data = random_params(graph, seed=2, scale=2.0), DATA[:4]
    params["a:b"] = 3.0 * jnp.ones((2, 2))
    params["a"], params["b"] = jnp.full(2, -3.0), jnp.full(2, -3.0)  # two modes of the posterior
    states, weights = exact.probabilities(graph, params)
    law = np.asarray(weights, float)
    drawn = np.random.default_rng(0).choice(len(law), 4000, p=law / law.sum())
    estimator = PCD(num_chains=4000, posterior=ebmpp.estimators.MeanField())
    like = estimator.init(graph, params, {"v": jnp.asarray(data)}, 4, random.key_pair(KEY))
    chains = {b: states[b][drawn].astype(like[b].dtype) for b in like}
    posterior = UCD(k=20, m=40, lag=20, num_slots=4)
    options = {"rng_key": KEY, "reference": dataclasses.replace(REFERENCE, posterior=posterior)}
    made = gradient_bias(graph, params, data, estimator, chains, num_references=60, **options)
    mean = estimator.posterior.statistics(graph, params, {"v": jnp.asarray(data)})
    stand_in = gradient_at(graph, params, mean, jnp.full(4, 0.25))
    tilt = jax.grad(lambda p: exact.log_partition(graph, p))(params)  # minus the negative phase
    exactly = exact.grad_log_likelihood(graph, params, data)
    wanted = jax.tree.map(lambda s, t, g: s + t + g, stand_in, tilt, exactly)
    for name in wanted:
        assert_law(made.bias[name], wanted[name], made.bias_error[name], COMPARISONS)
    squared = sum(float((np.asarray(w, float) ** 2).sum()) for w in wanted.values())
    assert_law(made.total.squared_bias, squared, made.total.standard_error, COMPARISONS)
    assert made.total.squared_bias > 3 * made.total.standard_error
