# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
from own_families import Ordinal
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, FactorGraph, Gaussian, Poisson, Spin, exact, layered
from ebmpp.errors import StateError
from ebmpp.evaluate import mean_field_bound, unit_activity
from helpers import enumerate_numpy, pair, random_params

KEY = jax.random.key(0)
V = np.random.default_rng(0).integers(0, 2, (200, 4)).astype(np.float32)


def machine(family: ebmpp.Family, bias: np.ndarray, weight: np.ndarray) -> tuple[FactorGraph, dict]:
    graph = layered(v=Bernoulli(4), h=family)
    return graph, {"v": jnp.zeros(4), "h": jnp.asarray(bias), "v:h": jnp.asarray(weight, jnp.float32)}


def test_each_fate_of_a_unit_is_told() -> None:
    weight = np.zeros((4, 5))
    weight[0, 3], weight[1, 4] = 6.0, 0.1
    for family, scale in ((Bernoulli(5), 1.0), (Spin(5), 0.5)):
        graph, params = machine(family, scale * np.array([-8.0, 8.0, 0.4, -3.0, 0.0]), scale * weight)
        made = unit_activity(graph, params, V, rng_key=KEY)
        assert made["status"].tolist() == ["off", "on", "constant", "active", "constant"]
        mean = np.asarray(graph.mean(params, {"v": V}, "h"))
        np.testing.assert_allclose(made["mean"], mean.mean(0), rtol=1e-5)
        np.testing.assert_allclose(made["low"], mean.min(0), rtol=1e-5)
        # Var E[t | v] over Var t, of a unit of two values
        total = (1 - mean.mean(0)) * mean.mean(0) if scale == 1 else 1 - mean.mean(0) ** 2
        np.testing.assert_allclose(made["varies"], mean.var(0) / total, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_categories_and_counts_and_reals() -> None:
    weight = np.zeros((4, 1, 3))
    weight[0, 0, 1] = 4.0
    graph, params = machine(Categorical(1, 3), np.array([[0.0, 0.0, -12.0]]), weight)
    made = unit_activity(graph, params, V, rng_key=KEY)
    assert made["statistic"].tolist() == [0, 1, 2] and made["unit"].tolist() == [0, 0, 0]
    assert made["status"].tolist() == ["active", "active", "off"]  # the third category is never taken
    for family in (Poisson(2), Gaussian(2)):
        graph, params = machine(family, np.array([0.3, 0.3]), np.eye(4, 2) * [2.0, 0.0])
        assert unit_activity(graph, params, V, rng_key=KEY)["status"].tolist() == ["active", "constant"]
    dead = machine(Poisson(1), np.array([-30.0]), np.zeros((4, 1)))
    assert unit_activity(*dead, V, rng_key=KEY)["status"].tolist() == ["constant"]  # no end above


def test_the_range_of_a_statistic_is_its_own() -> None:
    """Of x from 0 to 3 and of x**2 from 0 to 9, where a family says no bounds."""
    graph, params = machine(Ordinal(2), np.array([[9.0, 0.0], [-9.0, 0.0]]), np.zeros((4, 2, 2)))
    made = unit_activity(graph, params, V, rng_key=KEY)
    assert made["status"].tolist() == ["on", "on", "off", "off"]


def test_deep_machines_are_told_through_the_noise_of_chains() -> None:
    graph = layered(v=Bernoulli(4), h1=Bernoulli(3), h2=Bernoulli(3))
    params = jax.tree.map(jnp.zeros_like, graph.init(KEY))
    params["v:h1"] = params["v:h1"].at[0, 0].set(5.0)
    params["h1:h2"] = params["h1:h2"].at[0, 0].set(5.0).at[1, 1].set(2.0)
    params["h2"] = jnp.array([-2.5, -1.0, 12.0])
    made = unit_activity(graph, params, V, rng_key=KEY).set_index(["block", "unit"])["status"]
    assert made.loc["h1"].tolist() == ["active", "constant", "constant"]
    assert made.loc["h2"].tolist() == ["active", "constant", "on"]
    alone = unit_activity(graph, params, V, rng_key=KEY, blocks=["h2"], num_sweeps=5)
    assert set(alone["block"]) == {"h2"}


def test_wrong_arguments() -> None:
    graph = layered(v=Bernoulli(4), h=Bernoulli(2))
    params = graph.init(KEY)
    with pytest.raises(StateError, match=r"expected latent blocks, got 'v'; there are \['h'\]"):
        unit_activity(graph, params, V, rng_key=KEY, blocks=["v"])
    with pytest.raises(ValueError, match=r"edge, a share of the range, is a number in \(0, 0.5\), not 0.5"):
        unit_activity(graph, params, V, rng_key=KEY, edge=0.5)
    with pytest.raises(StateError, match="expected latent blocks, got none"):
        unit_activity(layered(v=Bernoulli(4)), {"v": jnp.zeros(4)}, V, rng_key=KEY)


# -- the bound ---------------------------------------------------------------------------------------


def numpy_log_sum(graph: FactorGraph, params: dict, v: np.ndarray) -> float:
    """log sum_h of one row, by enumeration."""
    states, probs, log_z = enumerate_numpy(graph, params)
    return log_z + np.log(sum(p for x, p in zip(states, probs, strict=True) if (x["v"] == v).all()))


def test_the_bound_is_below_and_near() -> None:
    graph = layered(v=Bernoulli(2), h1=Spin(3), h2=Categorical(2, 3))
    rows = np.float32([[0, 0], [0, 1], [1, 1]])
    gaps = []
    for scale in (0.1, 1.0):
        params = random_params(graph, 4, scale)
        bound = np.asarray(mean_field_bound(graph, params, rows))
        gaps.append(np.array([numpy_log_sum(graph, params, v) for v in rows]) - bound)
    assert (gaps[0] > -1e-5).all() and (gaps[1] > 1e-3).all()
    assert gaps[0].max() < 2e-2 < 0.1 < gaps[1].max() < 1.5
    early = mean_field_bound(graph, params, rows, passes=1)
    assert (early <= bound + 1e-5).all() and (early < bound - 1e-5).any()


def test_weighted_draws_are_unbiased_and_close_the_gap() -> None:
    graph = layered(v=Bernoulli(2), h1=Spin(3), h2=Categorical(2, 3))
    params = random_params(graph, 4, 1.0)
    rows = np.float32([[0, 0], [0, 1], [1, 1]])
    truth = np.array([numpy_log_sum(graph, params, v) for v in rows])
    repeated = np.broadcast_to(rows, (2000, *rows.shape))
    draw = lambda number: np.asarray(mean_field_bound(graph, params, repeated, num_draws=number, rng_key=KEY))
    # of one draw: its weight is the sum over h itself on average, and its logarithm is below
    first = draw(1)
    ratios = np.exp(first - truth)
    z = (ratios.mean(0) - 1) / (ratios.std(0, ddof=1) / np.sqrt(len(ratios)))
    assert (abs(z) < 4).all() and (ratios.std(0) > 0.05).all()
    plain, many = np.asarray(mean_field_bound(graph, params, rows)), draw(30)
    errors = np.hypot(first.std(0, ddof=1), many.std(0, ddof=1)) / np.sqrt(len(first))
    assert (plain < first.mean(0) + 4 * errors).all()
    assert (first.mean(0) + 4 * errors < many.mean(0)).all() and (many.mean(0) < truth).all()


def test_weighted_draws_of_a_row_are_its_own() -> None:
    graph = layered(v=Bernoulli(2), h1=Spin(3), h2=Categorical(2, 3))
    params, rows = random_params(graph, 4, 1.0), np.float32([[0, 1], [0, 1], [1, 1]])
    made = mean_field_bound(graph, params, rows, num_draws=9, rng_key=KEY)
    assert made[0] != made[1]
    np.testing.assert_allclose(
        made[:2], mean_field_bound(graph, params, rows[:2], num_draws=9, rng_key=KEY), rtol=1e-6
    )
    one = layered(v=Bernoulli(2), h=Spin(3))  # nothing is left to draw
    params = random_params(one, 4, 1.0)
    exactly = mean_field_bound(one, params, rows, num_draws=1, rng_key=KEY)
    np.testing.assert_allclose(exactly, -one.free_energy(params, {"v": rows}), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", [Poisson(3), Gaussian(3, variance="learned"), Categorical(2, 3)])
def test_one_layer_is_exact_for_any_family(family: ebmpp.Family) -> None:
    graph = pair(Bernoulli(3), family)
    params = random_params(graph, 1, 0.3)
    bound = mean_field_bound(graph, params, V[:5, :3])
    np.testing.assert_allclose(bound, -graph.free_energy(params, {"a": V[:5, :3]}), rtol=1e-4)


@pytest.mark.slow
def test_lateral_units_and_no_latents() -> None:
    chain = FactorGraph(
        {"v": Bernoulli(2)},
        {"h": Spin(3)},
        [
            ebmpp.Bias("v"),
            ebmpp.Bias("h"),
            ebmpp.Bilinear("v", "h"),
            ebmpp.Pairwise("h", edges=[(0, 1), (1, 2)]),
        ],
    )
    params = random_params(chain, 2, 0.5)
    rows = np.float32([[0, 1], [1, 1]])
    gap = np.array([numpy_log_sum(chain, params, v) for v in rows]) - np.asarray(
        mean_field_bound(chain, params, rows)
    )
    assert (gap > -1e-5).all() and gap.max() < 0.3
    alone = layered(v=Bernoulli(4))
    value = mean_field_bound(alone, {"v": jnp.ones(4)}, V[:5])
    log_z = exact.log_partition(alone, {"v": jnp.ones(4)})
    np.testing.assert_allclose(
        value - log_z, exact.log_likelihood(alone, {"v": jnp.ones(4)}, V[:5]), rtol=1e-5
    )
    with pytest.raises(ValueError, match="passes is an int of at least 1, not 0"):
        mean_field_bound(alone, {"v": jnp.ones(4)}, V[:5], passes=0)
