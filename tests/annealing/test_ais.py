# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Annealed importance sampling in both directions against exact log Z.

Tests annealing/bidirectional.py, annealing/log_partition.py, annealing/reference.py.
"""

import dataclasses
from functools import partial
import math
from typing import Any
import warnings

import numpy as np
from oracle import Oracle
import pytest
from scipy import stats
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, FactorGraph, Gaussian, Poisson, exact, layered
from ebmpp.annealing import Path, bidirectional, log_partition, reverse_ais
from ebmpp.annealing.bidirectional import anneal
from ebmpp.annealing.ladder import temperatures
from ebmpp.annealing.path import summed_blocks
from ebmpp.annealing.reference import reference
from ebmpp.errors import (
    ArgumentError,
    DomainError,
    IntractableError,
    ParameterError,
    StateError,
)
from ebmpp.exact.shifted import Shifted
from helpers import assert_law, assert_rows_law, often, parameter_sets, random_params

KEY = zoo.KEY
PAIR = np.zeros(2, np.uint32)
NUM = 2000


def model(
    name: str, seed: int = 1, scale: float = 1.0
) -> tuple[FactorGraph, dict, float]:
    """Return a graph of the zoo with stronger params, and its log Z by enumeration in NumPy."""
    graph = zoo.graph(name)
    params = random_params(
        graph, seed, {"poisson": 0.5, "learned": 0.3}.get(name, scale)
    )
    return graph, params, Oracle(graph, params, {}).log_z


def uniform(graph: FactorGraph) -> dict:
    """Return a reference that is far from most models."""
    return {b: f.default_eta() for b, f in graph.families.items()}


@pytest.mark.parametrize("ladder", ["linear", "adaptive"])
@pytest.mark.filterwarnings("ignore:.*effective sample size")
def test_parameter_sets_have_the_results_of_single_calls(ladder: str) -> None:
    graph = zoo.graph("rbm")
    stacked, sets = parameter_sets(graph)
    options = {"num_particles": 30, "num_temperatures": 120, "ladder": ladder}
    results = ebmpp.ais(graph, stacked, rng_key=KEY, **options)
    assert len(results) == 3
    for i, params in enumerate(sets):
        key = jax.random.fold_in(KEY, i)
        single = ebmpp.ais(graph, params, rng_key=key, **options)
        np.testing.assert_array_equal(single.betas, results[i].betas)
        np.testing.assert_allclose(
            single.log_weights, results[i].log_weights, atol=1e-4
        )


RUN = {"num_particles": NUM, "num_temperatures": 20}


MODELS = (
    "rbm",
    "mixed",
    "deep",
    "gated",
    "categorical",
    "gaussian",
    "learned",
    "poisson",
)


@pytest.mark.parametrize("name", often(MODELS, "mixed"))
@pytest.mark.filterwarnings("ignore:the effective sample size")
def test_weights_are_unbiased_in_both_directions(name: str) -> None:
    """Few temperatures and a far start show a draw at the wrong temperature or before
    its weight."""
    graph, params, log_z = model(name)
    options = {
        "rng_key": KEY,
        "num_particles": NUM,
        "ladder": [0, 0.2, 1],
        "reference": uniform(graph),
    }
    above = reverse_ais(graph, params, **options)
    below = ebmpp.ais(graph, params, **options)
    assert_rows_law(np.exp(below.log_weights - log_z), 1.0)
    assert_rows_law(np.exp(above.log_weights + log_z), 1.0)
    # by Jensen, a single particle is below log Z forward and above it in reverse
    for result, sign in ((below, 1), (above, -1)):
        gap = log_z - sign * result.log_weights
        assert gap.std() < 0.3 or sign * gap.mean() > 3 * gap.std() / math.sqrt(
            len(gap)
        )
    assert (below.bound, above.bound, above.unbiased) == ("lower", "upper", True)


@pytest.mark.nightly
def test_brackets_have_honest_standard_errors() -> None:
    z = []
    for seed in range(10):
        graph, params, log_z = model("rbm", seed)
        result = ebmpp.bracket(graph, params, rng_key=jax.random.key(seed), **RUN)
        assert result.exact == pytest.approx(log_z, abs=1e-4)
        assert result.lower.effective_sample_size > NUM / 4
        z += [
            (side.log_partition - log_z) / side.standard_error
            for side in (result.lower, result.upper)
        ]
        assert abs(result.gap) < 4 * result.standard_error
    # twenty numbers show standard errors that are twice too small or too large
    assert stats.chi2(20).ppf(1e-3) < np.square(z).sum() < stats.chi2(20).isf(1e-3)


@pytest.mark.nightly
def test_any_reference_gives_unbiased_weights() -> None:
    graph, params, log_z = model("rbm", 2)
    rows = np.float32([[1, 1, 1, 0], [1, 0, 1, 0]])
    far = {
        "v": np.linspace(-1, 1, 4, dtype=np.float32),
        "h": np.full(3, 0.5, np.float32),
    }
    for options in (
        {},
        {"reference": far},
        {"data": rows, "reference": {"h": far["h"]}},
    ):
        result = ebmpp.ais(
            graph, params, rng_key=KEY, **(RUN | {"num_temperatures": 4} | options)
        )
        assert_rows_law(np.exp(result.log_weights - log_z), 1.0, comparisons=4)
    eta = reference(graph, Shifted(params, {}), PAIR, rows)
    np.testing.assert_allclose(
        1 / (1 + np.exp(-np.asarray(eta["v"]))), (rows.sum(0) + 0.5) / 3, rtol=1e-5
    )


@pytest.mark.nightly
def test_samples_of_the_user_start_the_reverse_direction() -> None:
    graph, params, log_z = model("rbm", 1)
    states = zoo.Oracle(graph, params, {}).draw(np.random.default_rng(0), NUM)
    options = {"rng_key": KEY, "num_temperatures": 20}
    chain = reverse_ais(graph, params, samples=states, **options)
    assert not chain.unbiased and len(chain.log_weights) == NUM
    result = reverse_ais(
        graph, params, samples={"h": states["h"]}, unbiased=True, **options
    )
    assert result.unbiased  # v is drawn given h
    assert_rows_law(np.exp(result.log_weights + log_z), 1.0)
    bracket = ebmpp.bracket(graph, params, samples={"v": states["v"]}, **options)
    assert len(bracket.lower.log_weights) == NUM and not bracket.upper.unbiased


def test_as_many_units_as_possible_are_summed_out() -> None:
    for name, blocks in (("rbm", ("v",)), ("deep", ("v", "h2")), ("gated", ("a",))):
        assert summed_blocks(zoo.graph(name)) == blocks


@pytest.mark.nightly
def test_brackets_make_draws_where_no_exact_ones_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The upper side is then marked, and its error holds that of the draws."""
    graph, params, log_z = model("rbm", 4, scale=2.0)

    def refuse(*_: Any, **__: Any) -> None:
        raise IntractableError("too many states")

    monkeypatch.setattr(bidirectional, "perfect_sample", refuse)
    z, options = [], RUN | {"num_particles": 400}
    for seed in range(10):
        result = ebmpp.bracket(graph, params, rng_key=jax.random.key(seed), **options)
        z.append((result.upper.log_partition - log_z) / result.upper.standard_error)
    assert not result.guaranteed and not result.upper.unbiased and result.lower.unbiased
    assert "not guaranteed" in repr(result) and "not guaranteed" in str(result)
    assert np.square(z).sum() < stats.chi2(10).isf(1e-3)
    low, high = result.interval()
    assert low < result.lower.log_partition and high > result.upper.log_partition
    with pytest.raises(IntractableError):
        reverse_ais(graph, params, rng_key=KEY, **options)


def test_intervals_use_the_quantile_of_few_islands_and_doubts_one_rule() -> None:
    graph, params, _ = model("rbm")
    result = ebmpp.smc(
        graph, params, rng_key=KEY, num_particles=200, ladder=[0, 0.2, 0.5, 1]
    )
    low, high = result.interval()
    assert high - low == pytest.approx(
        2 * stats.t(9).ppf(0.975) * result.standard_error
    )
    assert f"{low:.6g} to {high:.6g}" in str(result)
    with pytest.raises(ArgumentError, match="level"):
        result.interval(95)
    fields = (
        "standard_error",
        "effective_sample_size",
        "correlation",
        "num_sweeps",
        "relative_ancestry",
    )
    doubt = lambda *values: (
        dataclasses.replace(result, **dict(zip(fields, values, strict=False))).doubt
    )
    assert doubt(0.1, 50, 0.4, 20, 1.0) is None and doubt(0.29, 50, 0.0) is None
    assert "80% of the ancestors" in str(doubt(0.1, 50, 0.4, 20, 0.8))
    for values in ((0.1, 49), (0.31, 50), (0.1, 50, 0.7), (0.1, 50, 0.0, 1, 0.8)):
        assert doubt(*values) is not None
    assert log_partition.contradiction(-0.3, 0.1) is None
    assert log_partition.contradiction(-0.5, 0.1) is not None


def test_ladders() -> None:
    np.testing.assert_allclose(temperatures("linear", 5), [0, 0.25, 0.5, 0.75, 1])
    logistic = 1 / (1 + np.exp(-4 * np.linspace(-1, 1, 9)))
    expected = (logistic - logistic[0]) / (logistic[-1] - logistic[0])
    np.testing.assert_allclose(temperatures("sigmoid", 9), expected, atol=1e-6)


def test_adaptive_ladders_have_even_steps() -> None:
    graph, params, log_z = model("rbm", 3, scale=2.5)
    eta, count = uniform(graph), 60
    options = {
        "rng_key": KEY,
        "num_particles": NUM,
        "num_temperatures": count,
        "reference": eta,
    }
    result = ebmpp.ais(graph, params, ladder="adaptive", **options)
    assert result.betas[0] == 0 and result.betas[-1] == 1 and len(result.betas) == count
    variation = []
    for betas in (temperatures("linear", count), result.betas):
        _, spread, _ = anneal(Path.line(graph, eta, params), betas, PAIR, NUM)
        variation.append(spread.std() / spread.mean())
    assert variation[1] < 0.5 * variation[0]
    assert_law(result.log_partition, log_z, result.standard_error)


def test_particles_depend_on_the_key_and_their_number_alone(
    capsys: pytest.CaptureFixture,
) -> None:
    graph, params, _ = model("rbm")
    run = lambda key, **options: (
        ebmpp.ais(graph, params, rng_key=key, **(RUN | options)).log_weights
    )
    first = run(KEY)
    np.testing.assert_array_equal(run(KEY, progress_bar=True), first)
    assert "19/19" in capsys.readouterr().err
    assert (run(jax.random.key(1)) != first).all() and capsys.readouterr().err == ""
    np.testing.assert_allclose(run(KEY, num_particles=30), first[:30], rtol=1e-5)


def test_log_likelihoods_of_rows() -> None:
    graph, params, log_z = model("rbm")
    rows = np.random.default_rng(0).integers(0, 2, (3, 2, 4)).astype(np.float32)
    result = ebmpp.ais(graph, params, rng_key=KEY, **RUN)
    values = np.asarray(result.log_likelihood(rows))
    p = {name: np.asarray(value, float) for name, value in params.items()}
    exact = rows @ p["v"] + np.logaddexp(0, p["h"] + rows @ p["v:h"]).sum(-1) - log_z
    np.testing.assert_allclose(
        values + (result.log_partition - log_z), exact, rtol=1e-5
    )
    mean = result.average_log_likelihood(rows)
    assert mean.value == pytest.approx(float(values.mean()))
    assert mean.standard_error == result.standard_error
    assert mean.row_error == pytest.approx(
        float(values.std(ddof=1)) / math.sqrt(6), rel=1e-4
    )
    with pytest.raises(StateError, match="'h'"):
        result.log_likelihood({"h": rows})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_particles": 1}, "num_particles.*1"),
        ({"num_temperatures": 1}, "num_temperatures.*1"),
        ({"num_temperatures": 1, "ladder": "adaptive"}, "num_temperatures"),
        ({"rng_key": 0}, "rng_key.*0"),
        ({"progress_bar": "no"}, "progress_bar.*'no'"),
        ({"ladder": "cosine"}, "'cosine'"),
        ({"ladder": [0, 0.5]}, "0.5"),
        ({"ladder": [0, 0.6, 0.5, 1]}, "0.5"),
        ({"ladder": [0, math.nan, 1]}, "nan"),
        ({"ladder": [[0, 1]]}, "ladder"),
    ],
)
def test_invalid_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ebmpp.ais(zoo.graph("rbm"), zoo.params("rbm"), **({"rng_key": KEY} | options))


@pytest.mark.nightly
def test_invalid_params_references_and_samples_are_refused() -> None:
    graph, params, options = (
        zoo.graph("learned"),
        zoo.params("learned"),
        {"num_temperatures": 5},
    )
    run = lambda p, **more: ebmpp.ais(graph, p, rng_key=KEY, **options, **more)
    with pytest.raises(ParameterError, match="'h'"):
        run(params | {"h": np.full(2, np.nan, np.float32)})
    with pytest.raises(DomainError, match="'v'"):
        run(params | {"v": np.ones((2, 2), np.float32)})
    for name, size, error, message in (
        ("v", (2, 2), DomainError, "reference.*'v'"),
        ("h", 3, ParameterError, r"'h'.*\(3,\)"),
        ("c", 3, ParameterError, "'c'"),
    ):
        with pytest.raises(error, match=message):
            run(params, reference={name: np.zeros(size)})
    with pytest.raises(TypeError, match="traced"):
        jax.jit(run)(params)
    deep, params = zoo.graph("deep"), zoo.params("deep")
    for samples, more, error, message in (
        ({"v": np.zeros((4, 3))}, {}, IntractableError, "'h1'.*'h2'"),
        ({"h1": np.ones(3)}, {}, StateError, r"\(\)"),
        ({"h1": np.ones((4, 3))}, {"num_particles": 7}, StateError, r"\(7,\).*\(4,\)"),
        ({"h1": np.full((4, 3), 0.5)}, {}, StateError, "'h1'"),
    ):
        with pytest.raises(error, match=message):
            reverse_ais(deep, params, rng_key=KEY, samples=samples, **options, **more)


def test_small_effective_sample_sizes_cause_one_warning() -> None:
    graph, params, _ = model("rbm", 0)
    params = {name: 15 * np.asarray(value) for name, value in params.items()}
    options = {
        "rng_key": KEY,
        "num_particles": NUM,
        "num_temperatures": 2,
        "reference": uniform(graph),
    }
    with pytest.warns(UserWarning, match="num_temperatures"):
        result = ebmpp.ais(graph, params, **options)
    assert result.effective_sample_size < NUM / 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ebmpp.bracket(graph, params, **options)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize(("variance", "scale"), [("learned", 3.0), ("unit", 1.0)])
@pytest.mark.nightly
def test_large_means_do_not_cancel(variance: str, scale: float) -> None:
    """The likelihood of rows of mean 10,000 is that of the model of mean 0; in float32
    hundreds were lost."""
    rows = np.float32(np.random.default_rng(0).normal(1e4, scale, (100, 4)))
    graph = layered(v=Gaussian(4, variance=variance), h=Bernoulli(3))
    params = graph.init(KEY, rows) | {"v:h": jnp.zeros((4, 3))}
    mean, deviation = (
        np.asarray(m, float) for m in graph.families["v"].moments(params["v"])
    )
    truth = stats.norm(mean, deviation).logpdf(rows).sum(1)
    options = {"rng_key": KEY, "num_temperatures": 10, "num_particles": 10}
    assert_allclose = partial(np.testing.assert_allclose, desired=truth, atol=0.05)
    assert_allclose(exact.log_likelihood(graph, params, rows))
    for start in ({}, {"reference": {"v": params["v"]}}):
        assert_allclose(
            ebmpp.ais(graph, params, **options, **start).log_likelihood(rows)
        )
    both = ebmpp.bracket(graph, params, **options)
    assert_allclose(both.upper.log_likelihood(rows))
    assert both.exact is not None and abs(both.lower.log_partition - both.exact) < 0.01
    system = ebmpp.smc(graph, params, rng_key=KEY, num_particles=200)
    assert_allclose(system.log_likelihood(rows))
    assert abs(system.particles["v"].mean() - 1e4) < 3 * scale


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["categorical", "poisson", "mixed"])
def test_references_without_data_have_the_means_of_the_model(name: str) -> None:
    graph, params, _ = model(name)
    eta, moments = (
        reference(graph, Shifted(params, {}), PAIR),
        exact.moments(graph, params),
    )
    for b, family in graph.families.items():
        variance = 0.25
        if not family.stat_shape:
            variance = float(
                jax.jvp(family.mean, (eta[b],), (jnp.ones_like(eta[b]),))[1].max()
            )
        assert np.abs(family.mean(eta[b]) - moments[b]).max() < 5 * math.sqrt(
            variance / 200
        )
    first = next(iter(eta))
    fixed = reference(
        graph, Shifted(params, {}), PAIR, fixed={first: jnp.ones_like(eta[first])}
    )
    for b in eta:
        np.testing.assert_array_equal(
            fixed[b], jnp.ones_like(eta[b]) if b == first else eta[b]
        )


@pytest.mark.nightly
def test_independent_blocks_are_exact() -> None:
    graph = FactorGraph({"a": Poisson(3)}, {"b": Gaussian(2)}, [Bias("a"), Bias("b")])
    params = random_params(graph)
    result = ebmpp.ais(graph, params, rng_key=KEY, num_particles=3, num_temperatures=5)
    assert result.log_partition == pytest.approx(
        float(exact.log_partition(graph, params)), rel=1e-6
    )
    assert result.effective_sample_size == pytest.approx(3)


@pytest.mark.nightly
def test_large_and_deep_models_are_refused_where_samples_are_missing() -> None:
    graph, params, _ = model("deep")
    result = ebmpp.ais(
        graph, params, rng_key=KEY, num_particles=NUM, num_temperatures=20
    )
    with pytest.raises(IntractableError, match="'h1' and 'h2'"):
        result.average_log_likelihood(np.zeros((2, 3)))
    large = layered(v=Bernoulli(40), h=Bernoulli(30))
    with pytest.raises(IntractableError, match="samples="):
        reverse_ais(large, random_params(large), rng_key=KEY, num_temperatures=5)
