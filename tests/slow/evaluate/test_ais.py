# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Annealed importance sampling: references, refusals of large models, and errors over many runs."""

import importlib.util
import math
from pathlib import Path
from typing import Any

from annealing_tools import KEY, NUM, PAIR, model, zoo_model
import numpy as np
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Factor, FactorGraph, Gaussian, Poisson, exact, layered
from ebmpp.errors import IntractableError
from ebmpp.sampling import annealing_path
from helpers import random_params


@pytest.mark.parametrize("name", ["categorical", "harmonium", "three layers"])
def test_references_without_data_have_the_means_of_the_model(name: str) -> None:
    graph, params, _ = model(name, 1)
    eta, moments = annealing_path.reference(graph, params, PAIR), exact.moments(graph, params)
    for b, family in graph.families.items():
        variance = 0.25
        if not family.stat_shape:
            variance = float(jax.jvp(family.mean, (eta[b],), (jnp.ones_like(eta[b]),))[1].max())
        assert np.abs(family.mean(eta[b]) - moments[b]).max() < 5 * math.sqrt(variance / 200)
    first = next(iter(eta))
    fixed = annealing_path.reference(graph, params, PAIR, given={first: jnp.ones_like(eta[first])})
    for b in eta:
        np.testing.assert_array_equal(fixed[b], jnp.ones_like(eta[b]) if b == first else eta[b])


def test_independent_blocks_are_exact() -> None:
    graph = FactorGraph({"a": Poisson(3)}, {"b": Gaussian(2)}, [Bias("a"), Bias("b")])
    params = random_params(graph)
    result = ebmpp.ais(graph, params, rng_key=KEY, num_particles=3, num_temperatures=5)
    assert result.log_partition == pytest.approx(float(exact.log_partition(graph, params)), rel=1e-6)
    assert result.effective_sample_size == pytest.approx(3)


def test_a_second_call_is_not_traced() -> None:
    traces = []

    def energy(weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        traces.append(None)
        return -weight * a.sum() * b.sum()

    factor = Factor("a", "b", energy=energy, init=jnp.ones(()))
    graph = FactorGraph({"a": Bernoulli(2)}, {"b": Bernoulli(2)}, [factor])
    options = {"rng_key": KEY, "num_particles": 4}
    ebmpp.ais(graph, {"a:b": jnp.ones(())}, num_temperatures=5, **options)
    num_traces = len(traces)
    ebmpp.ais(graph, {"a:b": jnp.float32(0.5)}, num_temperatures=230, ladder="sigmoid", **options)
    ebmpp.ais(graph, {"a:b": jnp.float32(0.1)}, num_temperatures=20, data=np.zeros((3, 2)), **options)
    assert len(traces) == num_traces


def test_large_and_deep_models_are_refused_where_samples_are_missing() -> None:
    graph, params, _ = zoo_model("deep")
    result = ebmpp.ais(graph, params, rng_key=KEY, num_particles=NUM, num_temperatures=20)
    with pytest.raises(IntractableError, match="'h1' and 'h2'"):
        result.average_log_likelihood(np.zeros((2, 3)))
    large = layered(v=Bernoulli(40), h=Bernoulli(30))
    with pytest.raises(IntractableError, match="samples="):
        ebmpp.evaluate.reverse_ais(large, random_params(large), rng_key=KEY, num_temperatures=5)


def test_standard_errors_of_larger_models_are_honest() -> None:
    graph, z, gaps = layered(v=Bernoulli(100), h=Bernoulli(16)), [], []
    for seed in range(20):
        params = random_params(graph, seed, 0.7)
        result = ebmpp.bracket(graph, params, rng_key=jax.random.key(seed), num_temperatures=3000)
        sides = result.lower, result.upper
        z.append([(side.log_partition - result.exact) / side.standard_error for side in sides])
        gaps.append(result.upper.log_partition - result.lower.log_partition)
    z = np.array(z)
    assert ((np.abs(z) < 2).mean(0) >= 0.75).all() and (np.abs(z) < 5).all(), z
    assert np.mean(gaps) > -3 * np.std(gaps) / math.sqrt(20)


# -- the models of benchmarks/bracket.py -------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> Any:
    path = Path(__file__).parents[3] / "benchmarks" / "bracket.py"
    spec = importlib.util.spec_from_file_location("bracket", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("temperatures", [20, 300])
def test_brackets_cover_exact_values_as_often_as_stated(bench: Any, temperatures: int) -> None:
    args = bench.parse(["--repeats", "10"])
    kinds = [(kind, seed) for kind in bench.KINDS for seed in range(bench.MODELS)]
    models = [bench.brackets(kind, seed, temperatures, args) for kind, seed in kinds]
    hits = {name: [bench.covered(m)[name] for m in models] for name in ("bracket", "lower", "upper")}
    for name, covered in hits.items():
        # the interval of a single side is normal, which few temperatures do not approach closely
        if name == "bracket" or temperatures == 300:
            assert np.sum(covered) >= stats.binom(np.size(covered), bench.LEVEL).ppf(1e-4), name
    assert np.sum(hits["lower"]) < np.size(hits["lower"])
