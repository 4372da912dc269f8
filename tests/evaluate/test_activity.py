# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Activity of latent units, and mean-field bounds of the log-likelihood.

Tests evaluate/activity.py.
"""

import numpy as np
from own_families import Ordinal
import pytest
import zoo

import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, FactorGraph, Gaussian, Poisson, layered
from ebmpp.evaluate import mean_field_bound, unit_activity
from helpers import pair, random_params

V = np.random.default_rng(0).integers(0, 2, (200, 4)).astype(np.float32)


def machine(
    family: ebmpp.Family, bias: np.ndarray, weight: np.ndarray
) -> tuple[FactorGraph, dict]:
    graph = layered(v=Bernoulli(4), h=family)
    return graph, {
        "v": np.zeros(4, np.float32),
        "h": np.float32(bias),
        "v:h": np.float32(weight),
    }


def test_status_of_units() -> None:
    weight = np.zeros((4, 5))
    weight[0, 3], weight[1, 4] = 6.0, 0.1
    bias = np.array([-8.0, 8.0, 0.4, -3.0, 0.0])
    graph, params = machine(Bernoulli(5), bias, weight)
    table = unit_activity(graph, params, V, rng_key=zoo.KEY)
    assert table["status"].tolist() == ["off", "on", "constant", "active", "constant"]
    p = 1 / (1 + np.exp(-(bias + V @ weight)))
    np.testing.assert_allclose(table["mean"], p.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(table["low"], p.min(0), rtol=1e-4, atol=1e-5)
    # the share of the variance of a unit that the rows explain
    share = p.var(0) / (p.mean(0) * (1 - p.mean(0)))
    np.testing.assert_allclose(table["varies"], share, rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
def test_a_single_row_shows_no_variation() -> None:
    graph, params = machine(Bernoulli(2), np.array([-8.0, 0.0]), np.ones((4, 2)))
    table = unit_activity(graph, params, V[:1], rng_key=zoo.KEY)
    assert table["varies"].isna().all() and set(table["status"]) <= {"off", "unknown"}


@pytest.mark.nightly
def test_status_of_categories_counts_and_reals() -> None:
    weight = np.zeros((4, 1, 3))
    weight[0, 0, 1] = 4.0
    status = lambda *args: unit_activity(*machine(*args), V, rng_key=zoo.KEY)[
        "status"
    ].tolist()
    assert status(Categorical(1, 3), np.array([[0.0, 0.0, -12.0]]), weight) == [
        "active",
        "active",
        "off",
    ]
    for family in (Poisson(2), Gaussian(2)):
        assert status(family, np.full(2, 0.3), np.eye(4, 2) * [2.0, 0.0]) == [
            "active",
            "constant",
        ]
    # an unbounded range
    assert status(Poisson(1), np.array([-30.0]), np.zeros((4, 1))) == ["constant"]
    ordinal = status(
        Ordinal(2), np.array([[9.0, 0.0], [-9.0, 0.0]]), np.zeros((4, 2, 2))
    )
    assert ordinal == ["on", "on", "off", "off"]  # x and x**2 have their own ranges


@pytest.mark.nightly
def test_status_in_deep_models_accounts_for_noise_of_chains() -> None:
    graph = layered(v=Bernoulli(4), h1=Bernoulli(3), h2=Bernoulli(3))
    params = random_params(graph, scale=0.0)
    params["v:h1"] = params["v:h1"].at[0, 0].set(5.0)
    params["h1:h2"] = params["h1:h2"].at[0, 0].set(5.0).at[1, 1].set(2.0)
    params["h2"] = jnp.array([-2.5, -1.0, 12.0])
    status = unit_activity(graph, params, V, rng_key=zoo.KEY).set_index(
        ["block", "unit"]
    )["status"]
    assert status.loc["h1"].tolist() == ["active", "constant", "constant"]
    assert status.loc["h2"].tolist() == ["active", "constant", "on"]


def log_sums(graph: FactorGraph, params: dict, rows: np.ndarray) -> np.ndarray:
    """log sum_h exp(-E(v, h)) r(v, h) of each row, by enumeration."""
    oracle, (block, *_) = zoo.Oracle(graph, params, {}), graph.visible
    agrees = [
        (oracle.x[block] == row).reshape(len(oracle.x[block]), -1).all(1)
        for row in rows
    ]
    return np.array([np.logaddexp.reduce(oracle.log_weights[a]) for a in agrees])


ROWS = np.float32([[0, 0, 0], [0, 1, 0], [1, 1, 1]])


def test_bounds_are_below_and_near_the_exact_value() -> None:
    graph, gaps = zoo.graph("deep"), []
    for scale in (0.1, 1.5):
        params = random_params(graph, 4, scale)
        bound = np.asarray(mean_field_bound(graph, params, ROWS))
        gaps.append(log_sums(graph, params, ROWS) - bound)
    assert (gaps[0] > -1e-5).all() and (gaps[1] > 1e-3).all()
    assert gaps[0].max() < 2e-2 and gaps[1].max() < 1.5


def test_weighted_draws_are_unbiased_and_tighten_the_bound() -> None:
    graph, num_draws = zoo.graph("deep"), 8
    params = random_params(graph, 4, 1.5)
    exact = log_sums(graph, params, ROWS)
    repeated = np.broadcast_to(ROWS, (2000, *ROWS.shape))
    draws = np.asarray(
        mean_field_bound(graph, params, repeated, num_draws=num_draws, rng_key=zoo.KEY)
    )
    # a mean weight is unbiased, and its logarithm is too small
    ratios = np.exp(draws - exact)
    error = ratios.std(0, ddof=1) / np.sqrt(len(ratios))
    assert (np.abs(ratios.mean(0) - 1) < 4 * error).all() and (error > 0).all()
    plain = np.asarray(mean_field_bound(graph, params, ROWS))
    error = draws.std(0, ddof=1) / np.sqrt(len(draws))
    assert (plain < draws.mean(0)).all() and (draws.mean(0) < exact + 4 * error).all()
    assert (draws[0] != draws[1]).any()  # rows have their own draws


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family", [Poisson(3), Gaussian(3, variance="learned"), Categorical(2, 3)]
)
def test_bounds_of_one_layer_are_exact(family: ebmpp.Family) -> None:
    graph = pair(Bernoulli(3), family)
    params = random_params(graph, 1, 0.3)
    expected = -graph.free_energy(params, {"a": ROWS})
    np.testing.assert_allclose(
        mean_field_bound(graph, params, ROWS), expected, rtol=1e-4
    )
    draws = mean_field_bound(graph, params, ROWS, num_draws=1, rng_key=zoo.KEY)
    np.testing.assert_allclose(draws, expected, rtol=1e-4)
