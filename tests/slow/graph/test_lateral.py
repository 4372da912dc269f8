# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks whose units interact in the kernels, the engine and the estimators, against enumeration."""

from typing import Any

from lateral_graphs import enumerated, exact_means, lateral
import networkx as nx
import numpy as np
from numpyro.infer import MCMC
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import UCD, BlockedGibbs, FactorGraph, Gaussian, Observed, exact
from ebmpp.estimators.base import Batch
from helpers import assert_law, assert_rows_law

COUPLED = [
    ("potts", None),
    ("many parts", "maximal_independent"),
    ("semi-restricted", ("maximal", "common")),
    ("lateral latents", None),
    ("custom", "common"),
]


@pytest.mark.parametrize(("name", "coupling"), COUPLED)
def test_coupled_estimates_are_unbiased(name: str, coupling: Any) -> None:
    graph, params = lateral(name)
    options = {"rng_key": zoo.KEY, "num_pairs": 3000, "k": 1, "m": 3, "lag": 2, "coupling": coupling}
    result = ebmpp.unbiased_expectation(graph, params, graph.statistics, **options)
    assert result.met.all() and result.meeting_time.max() > 3
    for block, mean in exact_means(name).items():
        assert_law(result.value[block], mean, result.standard_error[block])


def test_gaussian_fields_meet_and_agree() -> None:
    graph = FactorGraph.from_networkx(nx.cycle_graph(4), Gaussian)
    params = {"x": np.float32([0.5, -1.0, 0.2, 0.0]), "x:x": np.float32([0.3, -0.2, 0.1, 0.4])}
    options = {"rng_key": zoo.KEY, "num_pairs": 3000, "coupling": "reflection"}
    result = ebmpp.unbiased_expectation(graph, params, lambda x: x["x"], **options)
    assert result.met.all()
    assert_law(result.value, exact.moments(graph, params)["x"], result.standard_error)


def test_observed_units_stay_and_condition_the_others() -> None:
    graph, params = lateral("many parts")
    known = np.array([True, False, False, True, False, False])
    observed = Observed(np.where(known, [1.0, 1, 1, 0, 1, 1], np.nan), known)
    states, probs = enumerated("many parts")
    agree = (states["x"][:, known] == [1, 0]).all(1)
    mean = np.average(states["x"][agree], axis=0, weights=probs[agree])
    options = {"rng_key": zoo.KEY, "num_pairs": 3000, "x": observed}
    result = ebmpp.unbiased_expectation(graph, params, lambda x: x["x"], **options)
    assert_law(result.value, mean, result.standard_error)
    mcmc = MCMC(BlockedGibbs(graph), num_warmup=20, num_samples=400, progress_bar=False)
    mcmc.run(zoo.KEY, params, x=observed)
    samples = np.asarray(mcmc.get_samples()["x"])
    assert (samples[:, known] == [1, 0]).all() and (samples[:, ~known].std(0) > 0).all()


@pytest.mark.parametrize("name", ["semi-restricted", "lateral latents"])
def test_ucd_gradient_is_that_of_the_likelihood(name: str) -> None:
    """Where latents interact the positive phase is a second set of pairs, unbiased too."""
    graph, params = lateral(name)
    data = np.random.default_rng(1).integers(0, 2, (8, graph.families["v"].size)).astype(np.float32)
    estimator = UCD(num_pairs=2000, k=2, lag=2, m=4)
    batch = Batch({"v": jnp.asarray(np.tile(data, (100, 1)))}, jnp.full(800, 1 / 800))
    state = estimator.init(graph, params, batch.rows, 800, jnp.array([0, 1], jnp.uint32))
    estimate = jax.jit(lambda key: estimator.estimate(graph, params, state, batch, key).gradient)
    gradients = [estimate(jnp.array([i, 7], jnp.uint32)) for i in range(24)]
    expected = exact.grad_log_likelihood(graph, params, data)
    for factor, value in expected.items():
        assert_rows_law(np.stack([g[factor] for g in gradients]), -np.asarray(value))


def test_search_ends_where_no_unit_would_change() -> None:
    graph, params = lateral("many parts")
    start = {"x": np.random.default_rng(0).integers(0, 2, (20, 6)).astype(np.float32)}
    state = ebmpp.local_search(graph, params, rng_key=zoo.KEY, init=start).state
    np.testing.assert_array_equal(graph.mode(params, state, "x"), state["x"])
