# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Initial params: schemes, keys, and biases from base rates of data.

Tests graph/initialization.py.
"""

import dataclasses

import numpy as np
import pytest
import zoo

import jax

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Factor,
    FactorGraph,
    Gaussian,
    Spin,
    exact,
    layered,
)
from helpers import FAMILIES, alone, assert_law, nightly, often, random_state


def test_gaussian_scheme() -> None:
    params = jax.device_get(layered(v=Bernoulli(60), h=Bernoulli(40)).init(zoo.KEY))
    weight = params["v:h"].astype(float)
    assert_law(weight.mean(), 0, 0.01 / np.sqrt(weight.size), 2)
    assert_law(weight.std(), 0.01, 0.01 / np.sqrt(2 * weight.size), 2)
    assert not np.any(params["v"]) and not np.any(params["h"])


@pytest.mark.parametrize("size", [nightly(3), 8])
def test_orthogonal_scheme(size: int) -> None:
    params = layered(v=Bernoulli(size), h=Spin(5)).init(zoo.KEY, scheme="orthogonal")
    weight = np.asarray(params["v:h"])
    product = weight @ weight.T if size < 5 else weight.T @ weight
    np.testing.assert_allclose(product, np.eye(min(size, 5)), atol=1e-5)


def test_logistic_biases_stay_in_the_domain() -> None:
    graph = layered(v=Bernoulli(3000), e=ebmpp.Exponential(50))
    params = graph.init(zoo.KEY, scheme={"weight": "zero", "bias": "logistic"})
    bias = np.asarray(params["v"], float)
    deviation = 0.5 * np.pi / np.sqrt(3)  # of Logistic(0, 0.5), whose kurtosis is 4.2
    assert_law(bias.mean(), 0, deviation / np.sqrt(bias.size), 2)
    assert_law(bias.var(), deviation**2, deviation**2 * np.sqrt(3.2 / bias.size), 2)
    assert not np.any(params["v:e"]) and (np.asarray(params["e"]) < 0).all()


@pytest.mark.parametrize(
    "name",
    often(FAMILIES, "bernoulli", "categorical", "poisson"),
)
def test_biases_from_base_rates(name: str) -> None:
    """The mean at the initial bias is that of the data and one row of the default distribution."""
    family = FAMILIES[name]
    data = random_state(family, seed=2, rows=(9,))
    graph = alone(family)
    bias = graph.init(zoo.KEY, data=data)["a"]
    total = family.statistics(data).sum(0) + family.mean(family.default_eta())
    np.testing.assert_allclose(family.mean(bias), total / 10, rtol=1e-4, atol=1e-5)
    graph.check({"a": bias})


@pytest.mark.parametrize("has_missing", [nightly(False), True])
@pytest.mark.parametrize("name", often(FAMILIES, "bernoulli"))
def test_few_rows_of_units_that_share_a_bias(name: str, has_missing: bool) -> None:
    """Each value counts as much as the default distribution, whose weight is one value."""
    family = dataclasses.replace(FAMILIES[name], shape=(2, 30))
    graph = FactorGraph({"a": family}, factors=[Bias("a", shared=(1,))])
    data = random_state(family, seed=2, rows=(2,))
    known = np.random.default_rng(1).random((2, 2, 30)) < (0.7 if has_missing else 1.1)
    table = {"a": ebmpp.Observed(data, known) if has_missing else data}
    bias = graph.init(zoo.KEY, data=table)["a"]
    assert bias.shape[:2] == (2, 1)
    statistics = np.asarray(family.statistics(data), float)
    weight = known.reshape(known.shape + (1,) * (statistics.ndim - 3))
    count = weight.sum((0, 2))
    sums = (weight * statistics).sum((0, 2))
    default = np.asarray(family.mean(family.default_eta()), float)[:, 0]
    mean = np.asarray(family.mean(bias), float)[:, 0]
    if name == "gaussian_learned":  # the row is within the data, not at 0
        mean = mean[:, 0]
        sums = sums[:, 0]
        default = default[:, 0]
        count = count[:, 0]
    np.testing.assert_allclose(mean, (sums + default) / (count + 1), atol=1e-4)


def test_one_network_starts_at_its_density() -> None:
    dyads = FactorGraph({"x": Bernoulli(120)}, factors=[Bias("x", shared=(0,))])
    rows = (np.arange(120) < 20).astype(float)[None]
    density = 1 / (1 + np.exp(-dyads.init(zoo.KEY, data=rows)["x"]))
    np.testing.assert_allclose(density, 20.5 / 121, rtol=1e-5)


def test_init_of_custom_factors() -> None:
    init = lambda key: {"scale": jax.random.normal(key)}
    factor = Factor("a", energy=lambda p, a: -(p["scale"] * a).sum(), init=init)
    scale = FactorGraph({"a": Bernoulli(2)}, factors=[factor]).init(zoo.KEY)["a"][
        "scale"
    ]
    assert (scale.shape, scale.dtype) == ((), np.float32)
    free = Factor("a", energy=lambda p, a: -a.sum())
    assert FactorGraph({"a": Bernoulli(2)}, factors=[free]).init(zoo.KEY) == {"a": ()}


@pytest.mark.nightly
@pytest.mark.parametrize("latents", [nightly(0), 3])
def test_large_means_with_learned_variance(latents: int) -> None:
    """A row at 0 widened the columns to a standard deviation of 224, and -E and log Z cancelled."""
    rows = np.random.default_rng(0).normal(1e4, 3, (2000, 4))
    family, factors = (
        Gaussian(4, variance="learned"),
        [Bias("v"), Bias("h"), Bilinear("v", "h")],
    )
    latent = {"h": Bernoulli(latents)} if latents else {}
    graph = FactorGraph({"v": family}, latent, factors if latents else factors[:1])
    params = graph.init(zoo.KEY, data=rows)
    mean, deviation = family.moments(params["v"])
    np.testing.assert_allclose(mean, rows.mean(0), atol=0.02)
    np.testing.assert_allclose(deviation, rows.std(0), rtol=1e-2)
    expected = -4 * 0.5 * np.log(2 * np.pi * np.e * 9)  # -10.07
    assert abs(exact.log_likelihood(graph, params, rows).mean() - expected) < 0.03
    # masks and weights take the same path
    known = np.random.default_rng(1).random(rows.shape) < 0.7
    partial = graph.init(
        zoo.KEY, data=ebmpp.Observed(rows, known), weights=np.ones(2000)
    )
    np.testing.assert_allclose(family.moments(partial["v"])[0], rows.mean(0), atol=0.3)
    unit = FactorGraph({"v": Gaussian(4)}, factors=[Bias("v")])
    np.testing.assert_allclose(
        unit.init(zoo.KEY, data=rows)["v"], rows.mean(0), atol=0.01
    )


def test_scales_that_do_not_fit_a_gaussian_are_named() -> None:
    rows = np.random.default_rng(0).normal(size=(1000, 3))
    unit, learned = (
        layered(v=Gaussian(3), h=Bernoulli(2)),
        layered(v=Gaussian(3, "learned"), h=Bernoulli(2)),
    )
    unit.init(zoo.KEY, data=rows)  # may be rows of the model
    learned.init(zoo.KEY, data=(rows - rows.mean(0)) / rows.std(0))
    FactorGraph({"v": Gaussian(3)}, factors=[Bias("v")]).init(zoo.KEY, data=0.1 * rows)
    narrow, constant = rows * [1, 0.5, 2], rows * [1, 0, 1] + 7
    for graph, data, words in (
        (unit, (rows - rows.mean(0)) / rows.std(0, ddof=1), "'v'.*[0, 1, 2].*learned"),
        (unit, narrow, r"'v'.*\[1\].*learned"),
        (learned, constant, r"'v'.*\[1\].*constant"),
    ):
        with pytest.warns(UserWarning, match=words):
            params = graph.init(zoo.KEY, data=data)
        graph.check(params)


def test_latents_that_training_cannot_move_are_named() -> None:
    graph, rows = layered(v=Bernoulli(3), h=Gaussian(2)), np.eye(3)
    with pytest.warns(UserWarning, match="'h'"):
        graph.init(zoo.KEY, data=rows, scheme={"weight": "zero", "bias": "base_rate"})
    graph.init(zoo.KEY, data=rows)
