# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A user's own family: what follows from its few methods, and that it is a full citizen."""

import functools
import math

import numpy as np
from own_families import Geometric, Ordinal, Ternary
import pytest

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    FactorGraph,
    Family,
    exact,
    fit,
    layered,
    local_search,
)
from ebmpp.core import random
from ebmpp.estimators import PCD
from ebmpp.sklearn import HarmoniumTransformer
from helpers import FAMILIES, FINITE, alone, assert_rows_law, slow

ROWS = 20_000


def words(family: Family, count: int) -> jax.Array:
    """Random words of ``ROWS`` rows."""
    pairs = random.fold_in(random.key_pair(jax.random.key(0)), jnp.arange(ROWS))
    return random.words(pairs, family.size * count).reshape(ROWS, *family.shape, count)


def test_a_user_defined_family_through_a_graph() -> None:
    graph = FactorGraph({"n": Geometric(2)}, {"h": Bernoulli(1)}, [Bias("n"), Bias("h"), Bilinear("n", "h")])
    params = {"n": jnp.array([-1.0, -0.7]), "h": jnp.array([0.3]), "n:h": jnp.array([[-0.5], [0.2]])}
    eta = graph.natural_parameters(params, {"h": jnp.ones((3, 1))}, "n")
    np.testing.assert_allclose(eta, np.tile([-1.5, -0.5], (3, 1)), rtol=1e-6)
    np.testing.assert_allclose(
        graph.mean(params, {"h": jnp.ones(1)}, "n"), 1 / np.expm1([1.5, 0.5]), rtol=1e-5
    )
    off = -np.log1p(-np.exp([-1.0, -0.7])).sum()
    on = 0.3 - np.log1p(-np.exp([-1.5, -0.5])).sum()
    np.testing.assert_allclose(exact.log_partition(graph, params), np.logaddexp(off, on), rtol=1e-6)
    family = graph.families["n"]
    drawn = family.sample(words(family, 2), jnp.broadcast_to(jnp.array([-1.5, -0.5]), (ROWS, 2)))
    assert_rows_law(drawn, 1 / np.expm1([1.5, 0.5]))
    assert alone(Geometric(2)) == alone(Geometric(2))
    with pytest.raises(
        NotImplementedError, match=r"Geometric must define mode\(eta\), .* states\(\), from which"
    ):
        graph.mode(params, {"h": jnp.ones(1)}, "n")
    with pytest.raises(NotImplementedError, match=r"Geometric must define from_mean\(mean\), the natural"):
        graph.init(jax.random.key(0), np.ones((5, 2)))


DEFAULTS = {"ternary": Ternary(5), "ordinal": Ordinal(5), **{n: FAMILIES[n] for n in FINITE}}


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_defaults_from_states_invert_the_mean_and_find_the_mode(name: str) -> None:
    family = DEFAULTS[name]
    eta = np.random.default_rng(1).uniform(-1, 1, (50, *family.statistic_shape)).astype(np.float32)
    means = jax.jit(family.mean)(eta)
    back = jax.jit(functools.partial(Family.from_mean, family))(means)
    np.testing.assert_allclose(family.mean(back), means, rtol=1e-4, atol=1e-5)
    states = family.states()
    inner = (
        np.tensordot(eta, family.statistics(states), (range(-len(family.stat_shape), 0),) * 2)
        if (family.stat_shape)
        else eta[..., None] * np.asarray(states)
    )
    best = np.asarray(states)[(inner + np.asarray(family.log_base_measure(states))).argmax(-1)]
    np.testing.assert_array_equal(Family.mode(family, jnp.asarray(eta)), best)
    assert Family.mode(family, jnp.asarray(eta)).dtype == family.dtype


def test_means_near_an_end_at_it_and_beyond() -> None:
    mean = jnp.array([0.0, 1e-6, 1e-3, 1.0, 2 - 1e-3, 2.0, 2.1, -0.1, jnp.nan])
    made = np.asarray(Ternary(9).from_mean(mean))
    np.testing.assert_array_equal(made[[0, 5]], [-np.inf, np.inf])  # as Bernoulli's are
    assert np.isnan(made[6:]).all()
    np.testing.assert_allclose(Ternary(4).mean(made[1:5]), mean[1:5], rtol=1e-5)
    np.testing.assert_allclose(made[[1, 3]], [math.log(1e-6), 0], rtol=1e-5, atol=1e-6)


def test_means_of_several_statistics_at_the_boundary_and_beyond() -> None:
    mean = jnp.array(
        [[1.0, 1.0], [2.0, 3.0], [4.0, 16.0], [1.5, 3.5]]
    )  # x is 1; E[x**2] < E[x]**2; not below 4
    made = np.asarray(Ordinal(4).from_mean(mean))
    assert np.isnan(made[:3]).all()
    np.testing.assert_allclose(Ordinal(1).mean(made[3:]), mean[3:], rtol=1e-5)
    counts = 1e5 * np.eye(4)[[0, 2]] + 0.25  # units that are always the same, and one row of the default law
    rare = jnp.asarray(counts / counts.sum(1, keepdims=True), jnp.float32)
    np.testing.assert_allclose(jax.nn.softmax(Family.from_mean(Categorical(2, 4), rare)), rare, rtol=1e-3)


@pytest.mark.parametrize("family", [Ternary(4), slow(Ordinal((2, 2)))], ids=repr)
def test_a_family_of_ones_own_is_a_visible_block(family: Family) -> None:
    graph = layered(v=family, h=Bernoulli(2))
    data = np.random.default_rng(0).integers(0, 3, (40, *family.shape)).astype(np.float32)
    params = graph.init(jax.random.key(0), data)
    mean = np.asarray(family.statistics(data)).mean(0)
    smoothed = (40 * mean + np.asarray(family.mean(family.default_eta()))) / 41
    np.testing.assert_allclose(family.mean(params["v"]), smoothed, rtol=1e-4)
    trained = fit(
        graph, data, estimator=PCD(num_chains=20), num_steps=5, batch_size=20, rng_key=jax.random.key(1),
        progress_bar=False,
    )  # fmt: skip
    graph.check(trained.params)
    found = local_search(graph, trained.params, rng_key=jax.random.key(2))
    assert family.in_support(found.state["v"]).all()


@pytest.mark.slow
def test_a_transformer_takes_a_family_of_ones_own() -> None:
    rows = np.random.default_rng(0).integers(0, 3, (60, 4)).astype(float)
    made = HarmoniumTransformer(3, visible=Ternary, n_iter=1, random_state=0).fit(rows)
    assert made.transform(rows).shape == (60, 3)
    assert np.isfinite(made.score_samples(rows)).all()
