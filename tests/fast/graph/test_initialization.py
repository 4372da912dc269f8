# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Exponential, Factor, FactorGraph, Gaussian, Spin, layered
from ebmpp.errors import ParameterError, StateError
from helpers import FAMILIES, alone, assert_law, gated, random_state

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def rbm() -> FactorGraph:
    return layered(v=Bernoulli(60), h=Bernoulli(40))


def test_the_gaussian_scheme(rbm: FactorGraph) -> None:
    params = rbm.init(KEY)
    weight = np.asarray(params["v:h"], float)
    assert_law(weight.mean(), 0, 0.01 / np.sqrt(weight.size), 2)
    assert_law(weight.std(), 0.01, 0.01 / np.sqrt(2 * weight.size), 2)
    assert not np.any(params["v"])
    assert not np.any(params["h"])


@pytest.mark.parametrize("first", [3, 8])
def test_the_orthogonal_scheme(first: int) -> None:
    params = layered(v=Bernoulli(first), h=Spin(5)).init(KEY, scheme="orthogonal")
    weight = np.asarray(params["v:h"])
    narrow = weight @ weight.T if first < 5 else weight.T @ weight
    np.testing.assert_allclose(narrow, np.eye(min(first, 5)), atol=1e-5)


def test_logistic_biases_keep_the_domain() -> None:
    graph = layered(v=Bernoulli(3000), e=Exponential(50))
    params = graph.init(KEY, scheme={"weight": "zero", "bias": "logistic"})
    bias = np.asarray(params["v"], float)
    deviation = 0.5 * np.pi / np.sqrt(3)  # of Logistic(0, 0.5), whose kurtosis is 4.2
    assert_law(bias.mean(), 0, deviation / np.sqrt(bias.size), 2)
    assert_law(bias.var(), deviation**2, deviation**2 * np.sqrt(3.2 / bias.size), 2)
    assert (np.asarray(params["e"]) < 0).all()
    learned = alone(Gaussian(50, "learned")).init(KEY, scheme="orthogonal")["a"]
    assert (np.asarray(learned)[:, 1] < 0).all()


def test_zero_and_partial_schemes(rbm: FactorGraph) -> None:
    zero = rbm.init(KEY, scheme={"weight": "zero", "bias": "zero"})
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(zero))
    partial = rbm.init(KEY, scheme={"weight": "zero"})
    assert not np.any(partial["v:h"])


def test_a_key_decides_everything(rbm: FactorGraph) -> None:
    first, second = rbm.init(KEY), rbm.init(KEY)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert np.any(first["v:h"] != rbm.init(jax.random.key(1))["v:h"])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_base_rates_of_data(name: str) -> None:
    # The mean at the initial bias is that of the data and one row of the default law.
    family = FAMILIES[name]
    data = random_state(family, seed=2, rows=(9,))
    graph = alone(family)
    bias = graph.init(KEY, data=data)["a"]
    observed = np.asarray(family.statistics(data), float).sum(0)
    expected = (observed + np.asarray(family.mean(family.default_eta()))) / 10
    np.testing.assert_allclose(family.mean(bias), expected, rtol=1e-4, atol=1e-5)
    graph.check({"a": bias})


def test_a_spin_at_its_base_rate() -> None:
    # P(x = 1) = sigmoid(2 eta), not sigmoid(eta): 8 of 9 rows up, and half a row of the pseudo-row
    data = np.ones((9, 1), np.float32)
    data[0] = -1
    bias = alone(Spin(1)).init(KEY, data=data)["a"]
    np.testing.assert_allclose(1 / (1 + np.exp(-2 * np.asarray(bias))), 8.5 / 10, rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_units_that_never_change_stay_finite(value: float) -> None:
    bias = alone(Bernoulli(2)).init(KEY, data=np.full((99, 2), value, np.float32))["a"]
    np.testing.assert_allclose(jax.nn.sigmoid(bias), (99 * value + 0.5) / 100, rtol=1e-4)


def test_factors_of_ones_own() -> None:
    assert gated().init(KEY)["a:b:c"].shape == (2, 2, 2)
    made = Factor(
        "a", energy=lambda p, a: -(p["scale"] * a).sum(), init=lambda key: {"scale": jax.random.normal(key)}
    )
    scale = FactorGraph({"a": Bernoulli(2)}, factors=[made]).init(KEY)["a"]["scale"]
    assert scale.shape == ()
    assert scale.dtype == jnp.float32
    free = Factor("a", energy=lambda p, a: -a.sum())
    assert FactorGraph({"a": Bernoulli(2)}, factors=[free]).init(KEY) == {"a": ()}


def test_what_is_refused(rbm: FactorGraph) -> None:
    with pytest.raises(
        ParameterError, match=r"'xavier' is unknown; choose one of \['gaussian', 'orthogonal'\]"
    ):
        rbm.init(KEY, scheme="xavier")
    with pytest.raises(ParameterError, match="give 'weight' as one of"):
        rbm.init(KEY, scheme={"weight": "xavier"})
    with pytest.raises(ParameterError, match="give 'weight' as one of"):
        rbm.init(KEY, scheme={"wieght": "zero"})
    with pytest.raises(StateError, match=r"block 'v' got shape \(5, 59\), expected \(..., 60\)"):
        rbm.init(KEY, data=np.zeros((5, 59)))
    with pytest.raises(StateError, match="unknown visible block 'h'"):
        rbm.init(KEY, data={"h": np.zeros((5, 40))})


class InNumpy(Bernoulli):
    def from_mean(self, mean):
        assert 0 < float(mean.min())
        return np.log(mean) - np.log1p(-mean)


def test_a_from_mean_that_jax_cannot_trace_is_taken() -> None:
    rows = np.random.default_rng(0).integers(0, 2, (20, 3)).astype(np.float32)
    own, usual = (
        layered(v=family(3), h=Bernoulli(2)).init(KEY, rows)["v"] for family in (InNumpy, Bernoulli)
    )
    np.testing.assert_allclose(own, usual, rtol=1e-5, atol=1e-6)
