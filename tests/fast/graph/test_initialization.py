# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Initial params: schemes, keys, and biases from base rates of data."""

import numpy as np
import pytest
import zoo

import jax

from ebmpp import Bernoulli, Exponential, Factor, FactorGraph, Gaussian, Spin, layered
from ebmpp.errors import ParameterError, StateError
from helpers import FAMILIES, alone, assert_law, random_state


def test_gaussian_scheme() -> None:
    params = jax.device_get(layered(v=Bernoulli(60), h=Bernoulli(40)).init(zoo.KEY))
    weight = params["v:h"].astype(float)
    assert_law(weight.mean(), 0, 0.01 / np.sqrt(weight.size), 2)
    assert_law(weight.std(), 0.01, 0.01 / np.sqrt(2 * weight.size), 2)
    assert not np.any(params["v"]) and not np.any(params["h"])


@pytest.mark.parametrize("size", [3, 8])
def test_orthogonal_scheme(size: int) -> None:
    params = layered(v=Bernoulli(size), h=Spin(5)).init(zoo.KEY, scheme="orthogonal")
    weight = np.asarray(params["v:h"])
    product = weight @ weight.T if size < 5 else weight.T @ weight
    np.testing.assert_allclose(product, np.eye(min(size, 5)), atol=1e-5)


def test_logistic_biases_stay_in_the_domain() -> None:
    graph = layered(v=Bernoulli(3000), e=Exponential(50))
    params = graph.init(zoo.KEY, scheme={"weight": "zero", "bias": "logistic"})
    bias = np.asarray(params["v"], float)
    deviation = 0.5 * np.pi / np.sqrt(3)  # of Logistic(0, 0.5), whose kurtosis is 4.2
    assert_law(bias.mean(), 0, deviation / np.sqrt(bias.size), 2)
    assert_law(bias.var(), deviation**2, deviation**2 * np.sqrt(3.2 / bias.size), 2)
    assert not np.any(params["v:e"]) and (np.asarray(params["e"]) < 0).all()
    learned = alone(Gaussian(50, "learned")).init(zoo.KEY)["a"]
    assert (np.asarray(learned)[:, 1] < 0).all()


def test_params_are_a_function_of_the_key() -> None:
    rbm = zoo.graph("rbm")
    first, second = rbm.init(zoo.KEY), rbm.init(zoo.KEY)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert np.any(np.asarray(first["v:h"]) != np.asarray(rbm.init(jax.random.key(1))["v:h"]))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_biases_from_base_rates(name: str) -> None:
    """The mean at the initial bias is that of the data and one row of the default distribution."""
    family = FAMILIES[name]
    data = random_state(family, seed=2, rows=(9,))
    graph = alone(family)
    bias = graph.init(zoo.KEY, data=data)["a"]
    means = jax.jit(
        lambda eta, x: (family.mean(eta), family.mean(family.default_eta()), family.statistics(x))
    )
    mean, default, statistics = jax.device_get(means(bias, data))
    np.testing.assert_allclose(mean, (statistics.sum(0) + default) / 10, rtol=1e-4, atol=1e-5)
    graph.check({"a": bias})


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_units_that_are_constant_in_the_data_have_finite_biases(value: float) -> None:
    bias = alone(Bernoulli(2)).init(zoo.KEY, data=np.full((99, 2), value, np.float32))["a"]
    rate = 1 / (1 + np.exp(-np.asarray(bias)))
    np.testing.assert_allclose(rate, (99 * value + 0.5) / 100, rtol=1e-4)


def test_init_of_custom_factors() -> None:
    factor = Factor(
        "a", energy=lambda p, a: -(p["scale"] * a).sum(), init=lambda key: {"scale": jax.random.normal(key)}
    )
    scale = FactorGraph({"a": Bernoulli(2)}, factors=[factor]).init(zoo.KEY)["a"]["scale"]
    assert (scale.shape, scale.dtype) == ((), np.float32)
    free = Factor("a", energy=lambda p, a: -a.sum())
    assert FactorGraph({"a": Bernoulli(2)}, factors=[free]).init(zoo.KEY) == {"a": ()}


WRONG = [
    ({"scheme": "xavier"}, ParameterError, "'xavier' is unknown"),
    ({"scheme": {"weight": "xavier"}}, ParameterError, "'weight' as one of"),
    ({"scheme": {"wieght": "zero"}}, ParameterError, "'weight' as one of"),
    ({"data": np.zeros((5, 2))}, StateError, r"block 'v' got shape \(5, 2\)"),
    ({"data": {"h": np.zeros((5, 3))}}, StateError, "unknown visible block 'h'"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_arguments(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zoo.graph("rbm").init(zoo.KEY, **options)


class HostBernoulli(Bernoulli):
    """A family whose ``from_mean`` jax cannot trace."""

    def from_mean(self, mean: jax.Array) -> np.ndarray:
        assert 0 < float(mean.min())
        return np.log(mean) - np.log1p(-mean)


def test_from_mean_may_be_host_code() -> None:
    rows = np.random.default_rng(0).integers(0, 2, (20, 3)).astype(np.float32)
    host, usual = (
        layered(v=f(3), h=Bernoulli(2)).init(zoo.KEY, rows)["v"] for f in (HostBernoulli, Bernoulli)
    )
    np.testing.assert_allclose(host, usual, rtol=1e-5, atol=1e-6)
