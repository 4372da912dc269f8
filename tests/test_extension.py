# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A family, a factor and an estimator of another package: declared, sampled, trained,
saved and loaded."""

import dataclasses
from pathlib import Path

from beta_family import Beta, PseudoLikelihood, Ring
import numpy as np
from numpyro.infer import MCMC
import pytest
from scipy import stats

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, BlockedGibbs, FactorGraph, Spin
from ebmpp.moves import Clusters
from helpers import assert_law, assert_rows_law

SHAPES = np.array([[2.0, 3.0], [0.7, 0.6], [5.0, 1.5]], np.float32)
FACTORS = [Bias("x"), Bias("s"), Bilinear("x", "s"), Ring("s", 4, init=0.4)]


def mixed() -> FactorGraph:
    return FactorGraph({"x": Beta(3), "s": Spin(4)}, factors=FACTORS)


def mixed_params() -> dict[str, np.ndarray]:
    weights = np.random.default_rng(0).uniform(-0.05, 0.05, (3, 2, 4))
    return {
        "x": SHAPES - 1,
        "s": np.array([0.1, -0.2, 0.0, 0.3], np.float32),
        "x:s": weights.astype(np.float32),
        "ring of s": np.float32(0.4),
    }


def test_the_family_has_the_density_mean_and_draws_of_scipy() -> None:
    family, eta = Beta(3), jnp.asarray(SHAPES - 1)
    exact = stats.beta(SHAPES[:, 0], SHAPES[:, 1])
    x = np.random.default_rng(0).uniform(0.01, 0.99, (5, 3)).astype(np.float32)
    np.testing.assert_allclose(
        family.unit_log_prob(eta, x), exact.logpdf(x), 1e-4, 1e-4
    )
    mean = family.mean(eta)
    np.testing.assert_allclose(family.from_mean(mean), eta, 1e-3, 1e-4)
    words = jax.random.bits(jax.random.key(0), (4000, 3, family.num_words), "uint32")
    draws = family.sample(words, jnp.broadcast_to(eta, (4000, 3, 2)))
    assert family.in_support(draws).all()
    assert_rows_law(draws, exact.mean())
    assert_rows_law(family.statistics(draws), mean)
    np.testing.assert_allclose(family.mode(eta)[0], 1 / 3, 1e-5)
    assert (
        not family.is_two_valued and not family.is_one_hot and not family.is_quadratic
    )


def test_conditionals_are_those_of_scipy() -> None:
    graph, params = mixed(), mixed_params()
    graph.check(params)
    s = np.array([1.0, -1.0, 1.0, 1.0], np.float32)
    x = np.array([0.2, 0.5, 0.9], np.float32)
    shapes = SHAPES + params["x:s"] @ s
    conditional = graph.conditional(params, {"s": s}, "x")
    expected = stats.beta(shapes[:, 0], shapes[:, 1]).logpdf(x).sum()
    np.testing.assert_allclose(conditional.log_prob(x), expected, 1e-5)
    field = params["s"] + np.einsum(
        "ikj,ik", params["x:s"], graph.statistics({"x": x})["x"]
    )
    beside = 0.4 * (np.roll(s, 1) + np.roll(s, -1))
    eta = graph.natural_parameters(params, {"x": x, "s": s}, "s")
    np.testing.assert_allclose(eta, field + beside, 1e-5)


def test_params_outside_the_domain_are_refused() -> None:
    params = mixed_params()
    params["x"] = np.full((3, 2), -0.99, np.float32)
    with pytest.raises(ebmpp.errors.DomainError, match="block 'x'.*above -1"):
        mixed().check(params)


def test_gibbs_samples_match_sums_over_the_spins() -> None:
    graph, params = mixed(), mixed_params()
    mcmc = MCMC(
        BlockedGibbs(graph),
        num_warmup=50,
        num_samples=200,
        num_chains=40,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), params)
    exact = ebmpp.exact.moments(graph, params)
    samples = mcmc.get_samples(group_by_chain=True)
    for block, family in graph.families.items():
        means = np.asarray(family.statistics(samples[block]), float).mean(1)
        error = means.std(0, ddof=1) / np.sqrt(len(means))
        assert_law(means.mean(0), exact[block], error, comparisons=10)


@pytest.mark.nightly
def test_clusters_take_the_factor() -> None:
    ring = FactorGraph({"s": Bernoulli(4)}, factors=[Bias("s"), Ring("s", 4)])
    params = {"s": np.zeros(4, np.float32), "ring of s": np.float32(0.8)}
    result = ebmpp.unbiased_expectation(
        ring,
        params,
        lambda x: x["s"],
        rng_key=jax.random.key(2),
        num_pairs=500,
        coupling=Clusters("s"),
    )
    exact = ebmpp.exact.moments(ring, params)["s"]
    assert_law(result.value, exact, result.standard_error)


@dataclasses.dataclass(frozen=True, repr=False)
class Coin(Bernoulli):
    """A subclass of a family of the library."""


@pytest.mark.nightly
def test_random_clusters_take_a_subclass_of_a_family() -> None:
    ring = FactorGraph({"s": Coin(4)}, factors=[Bias("s"), Ring("s", 4)])
    params = {"s": np.full(4, -0.5, np.float32), "ring of s": np.float32(0.8)}
    draws = ebmpp.perfect_sample(
        ring, params, 2000, rng_key=jax.random.key(4), method="random_cluster"
    )
    assert_rows_law(draws["s"], ebmpp.exact.moments(ring, params)["s"])


def test_the_estimator_trains_the_graph_and_files_keep_it(tmp_path: Path) -> None:
    graph, file = mixed(), tmp_path / "mixed.ebmpp"
    rng = np.random.default_rng(0)
    rows = {
        "x": rng.beta(SHAPES[:, 0], SHAPES[:, 1], (200, 3)).clip(1e-3, 1 - 1e-3),
        "s": rng.choice([-1.0, 1.0], (200, 4)),
    }
    fit = ebmpp.fit(
        graph,
        rows,
        estimator=PseudoLikelihood(),
        optimizer=optax.adam(0.01),
        num_steps=60,
        batch_size=100,
        rng_key=jax.random.key(3),
        progress_bar=False,
    )
    values = np.asarray(fit.history.pseudo_likelihood)
    assert values[-10:].mean() > values[:10].mean()
    ebmpp.save(file, graph, fit.params)
    loaded, params = ebmpp.load(file, factors=[FACTORS[-1]], families={"Beta": Beta})
    assert loaded == graph
    jax.tree.map(np.testing.assert_array_equal, params, fit.params)
