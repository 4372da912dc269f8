# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exponential families: densities, means, draws, couplings and modes against sums over
a unit's values.

Tests families/bernoulli.py, families/binomial.py, families/categorical.py,
families/exponential.py, families/family.py, families/gaussian.py, families/poisson.py,
families/spin.py, families/values.py, families/von_mises.py.
"""

import functools
import itertools
from typing import Any

import numpy as np
from oracle import log_base, numpy_statistics
from own_families import Ternary
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Binomial,
    Categorical,
    Exponential,
    Family,
    Gaussian,
    Poisson,
    Spin,
    VonMises,
)
from ebmpp.core import random
from ebmpp.families.family import log_ratio
import helpers
from helpers import FINITE, assert_law, assert_rows_law, often

FAMILIES = helpers.FAMILIES | {"von_mises": VonMises(2)}
ROWS = 20_000


def etas(family: Family, seed: int = 0) -> np.ndarray:
    """Natural parameters in the domain, different for each unit."""
    noise = np.random.default_rng(seed).uniform(-1, 1, family.statistic_shape)
    if isinstance(family, Exponential):
        noise = -np.exp(noise)
    if isinstance(family, Gaussian) and family.learned:
        noise[..., 1] = -np.exp(noise[..., 1])
    return noise.astype(np.float32)


def grid(family: Family) -> tuple[np.ndarray, float]:
    """A unit's values and the width of a step: every count, or a fine mesh."""
    if isinstance(family, Gaussian):
        return np.linspace(-15, 15, 6001), 30 / 6000
    if isinstance(family, VonMises):
        return (np.arange(6000) / 3000 - 1) * np.pi, np.pi / 3000
    if isinstance(family, Exponential):
        return np.arange(0.0005, 60, 0.001), 0.001
    if isinstance(family, Poisson):
        return np.arange(60.0), 1.0
    return np.asarray(family.states(), float), 1.0


def log_ratio_of(
    family: Family, eta: jax.Array, other: jax.Array, statistics: jax.Array
) -> jax.Array:
    return log_ratio({"x": family}, {"x": eta}, {"x": other}, {"x": statistics})


def compute(family: Family, eta: jax.Array, other: jax.Array) -> dict[str, Any]:
    """Everything that a family computes at two natural parameters."""
    keys = random.fold_in(random.key_pair(zoo.KEY), jnp.arange(ROWS + 20))
    words = lambda count, number: random.words(
        random.fold_in(keys, number), family.size * count
    ).reshape(ROWS + 20, *family.shape, count)
    rows = lambda e, count=ROWS: jnp.broadcast_to(e, (count, *e.shape))
    drawn, coupled = words(family.num_words, 0), words(family.num_couple_words, 1)
    # the last rows have equal parameters; one call, because a sampler takes seconds to
    # compile
    x, y = family.couple(
        coupled, rows(eta, ROWS + 20), jnp.concatenate([rows(other), rows(eta, 20)])
    )
    sample = (
        family.sample(drawn[:ROWS], rows(eta)) if family.num_words == 1 else x[:ROWS]
    )
    result = {
        "log_normalizer": family.log_normalizer(eta),
        "mean": family.mean(eta),
        "other_mean": family.mean(other),
        "hessian": jax.hessian(lambda e: family.log_normalizer(e).sum())(eta),
        "from_mean": family.from_mean(family.mean(eta)),
        "mode": family.mode(eta),
        "sample": sample,
        "supported": family.in_support(sample).all(),
        "couple": (x[:ROWS], y[:ROWS]),
        "equal": (x[ROWS:], y[ROWS:]),
        "log_base": family.log_base_measure(sample[:20]),
        "log_prob": family.distribution(eta).log_prob(sample[:20]),
        "log_ratio": log_ratio_of(
            family, rows(eta, 20), rows(other, 20), family.statistics(sample[:20])
        ),
    }
    if family.num_words == 1:
        default = family.mean(family.default_eta())
        result["initial"] = family.statistics(family.initial(drawn)), default
    return result


@functools.cache
def results(name: str) -> dict[str, Any]:
    """:func:`compute` in one compiled program."""
    family = FAMILIES[name]
    return jax.device_get(
        jax.jit(functools.partial(compute, family))(etas(family), etas(family, seed=1))
    )


def log_weights(name: str, x: np.ndarray, seed: int = 0) -> np.ndarray:
    """<eta, t(x)> + log r(x), shape ``(len(x), units)``, for every unit and every value."""
    family = FAMILIES[name]
    eta = etas(family, seed).astype(float).reshape(family.size, -1)
    base = log_base(family, x)
    return base[:, None] + numpy_statistics(family, x).reshape(len(x), -1) @ eta.T


@functools.cache
def probabilities(name: str, seed: int = 0) -> np.ndarray:
    """Probabilities of the values of :func:`grid`, one column per unit."""
    weights = log_weights(name, grid(FAMILIES[name])[0], seed)
    return np.exp(weights - np.logaddexp.reduce(weights))


def exact_mean(name: str, seed: int = 0) -> np.ndarray:
    """Mean statistics by sums over the values of a unit."""
    family = FAMILIES[name]
    t = numpy_statistics(family, grid(family)[0])
    return (probabilities(name, seed).T @ t.reshape(len(t), -1)).reshape(
        family.statistic_shape
    )


@pytest.fixture(
    params=often(
        sorted(FAMILIES), *(set(FAMILIES) - {"binomial", "poisson", "spin", "gaussian"})
    )
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_log_normalizer_mean_and_mode_match_sums(name: str) -> None:
    result, (x, step) = results(name), grid(FAMILIES[name])
    sums = np.logaddexp.reduce(log_weights(name, x)) + np.log(step)
    np.testing.assert_allclose(result["log_normalizer"], sums, atol=1e-5)
    np.testing.assert_allclose(result["mean"], exact_mean(name), rtol=1e-4, atol=1e-4)
    mode = x[log_weights(name, x).argmax(0)]
    np.testing.assert_allclose(result["mode"], mode, atol=0 if step == 1 else step)


def test_numpyro_distribution_has_the_density_of_the_family(name: str) -> None:
    family, result = FAMILIES[name], results(name)
    x = result["sample"][:20]
    base = log_base(family, x)
    np.testing.assert_allclose(result["log_base"].sum(-1), base, rtol=1e-5, atol=1e-5)
    inner = (
        (etas(family).astype(float) * numpy_statistics(family, x))
        .reshape(20, -1)
        .sum(-1)
    )
    expected = inner + base - result["log_normalizer"].sum()
    np.testing.assert_allclose(result["log_prob"], expected, rtol=1e-5, atol=1e-5)


def test_draws_have_the_distribution(name: str) -> None:
    family, result = FAMILIES[name], results(name)
    assert result["sample"].shape == (ROWS, *family.shape)
    assert result["sample"].dtype == family.dtype and result["supported"]
    t = numpy_statistics(family, result["sample"]).reshape(ROWS, -1)
    mean = result["mean"].ravel()
    assert_rows_law(t, mean, 4 * len(mean))
    # second moments too, and no correlation between units: the Hessian of the
    # log-normaliser
    products = (t - mean)[:, :, None] * (t - mean)[:, None, :]
    assert_rows_law(
        products, result["hessian"].reshape(len(mean), -1), 4 * len(mean) ** 2
    )
    if "initial" in result:
        assert_rows_law(*result["initial"])


def test_coupled_draws_have_their_distributions(name: str) -> None:
    family, result = FAMILIES[name], results(name)
    for x, mean in zip(result["couple"], ("mean", "other_mean"), strict=True):
        assert_rows_law(
            numpy_statistics(family, x), result[mean], 2 * result[mean].size
        )
    np.testing.assert_allclose(*result["equal"], rtol=1e-6)


@pytest.mark.parametrize("name", ["bernoulli", "spin", "categorical"])
def test_coupled_draws_differ_with_the_total_variation_distance(name: str) -> None:
    x, y = results(name)["couple"]
    distance = 0.5 * np.abs(probabilities(name) - probabilities(name, seed=1)).sum(0)
    assert (distance > 0.05).all()
    assert_law((x != y).mean(0), distance, np.sqrt(distance * (1 - distance) / ROWS))


def test_from_mean_inverts_mean(name: str) -> None:
    eta, inverse = etas(FAMILIES[name]), results(name)["from_mean"]
    if name == "categorical":  # natural parameters are determined up to a constant
        eta, inverse = (e - e.mean(-1, keepdims=True) for e in (eta, inverse))
    np.testing.assert_allclose(inverse, eta, rtol=1e-4, atol=1e-5)


def test_log_ratio_is_a_difference_of_log_densities(name: str) -> None:
    family, result = FAMILIES[name], results(name)
    t = numpy_statistics(family, result["sample"][:20]).reshape(20, -1)
    change = (etas(family, seed=1).astype(float) - etas(family)).ravel()
    x, _ = grid(family)
    normalizers = [
        np.logaddexp.reduce(log_weights(name, x, seed)).sum() for seed in (0, 1)
    ]
    expected = t @ change - normalizers[1] + normalizers[0]
    np.testing.assert_allclose(result["log_ratio"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FINITE)
def test_log_ratio_of_large_parameters_is_accurate(name: str) -> None:
    family = type(FAMILIES[name])(
        1, *([3] if name in ("categorical", "binomial") else [])
    )
    values = np.asarray(family.states(), float)
    t = numpy_statistics(family, values).reshape(len(values), -1)
    base = log_base(family, values)
    scales = np.float32([-80, -30, -5, -1e-3, 0, 0.3, 17, 80])
    direction = np.arange(t.shape[1]) - 1 if t.shape[1] > 1 else np.ones(1)
    eta, other = (
        np.outer(s, direction)
        for s in zip(*itertools.product(scales, scales), strict=True)
    )
    normalizers = [np.logaddexp.reduce(base + e @ t.T, axis=1) for e in (eta, other)]
    log_ratio = jax.jit(functools.partial(log_ratio_of, family))
    shape = (-1, *family.statistic_shape)
    for statistic in t[[0, -1]]:
        expected = (other - eta) @ statistic - normalizers[1] + normalizers[0]
        stats = np.broadcast_to(statistic, eta.shape).reshape(shape)
        args = (a.reshape(shape).astype(np.float32) for a in (eta, other, stats))
        # float32 terms of up to 240 cancel
        assert (
            np.abs(log_ratio(*args) - expected) <= 2e-6 * (240 + np.abs(expected))
        ).all()


SUPPORTS = {
    "bernoulli": ([0, 1], [2, 0.5, -1, np.nan]),
    "spin": ([-1, 1], [0, 2, np.nan]),
    "categorical": ([0, 1, 2], [3, -1, 0.5, np.nan]),
    "binomial": ([0, 1, 2, 3], [4, -1, 1.5, np.nan]),
    "poisson": ([0, 5], [-1, 0.5, np.inf, np.nan]),
    "exponential": ([0, 0.3], [-0.1, np.inf, np.nan]),
    "gaussian": ([-3, 0.2], [np.inf, np.nan]),
    "von_mises": ([-3, 3.1], [-3.2, 4, np.nan]),
}


@pytest.mark.parametrize("name", SUPPORTS)
def test_support(name: str) -> None:
    inside, outside = SUPPORTS[name]
    values = np.float32(inside + outside)
    expected = [True] * len(inside) + [False] * len(outside)
    for result in (
        FAMILIES[name].in_support(values),
        jax.jit(FAMILIES[name].in_support)(values),
    ):
        np.testing.assert_array_equal(result, expected)


def test_draws_at_extreme_words_are_finite() -> None:
    words = np.array([[[0]], [[2**32 - 1]]], np.uint32)
    for family, eta in ((Gaussian(1), 0.0), (Exponential(1), -1.0)):
        draws = jax.jit(family.sample)(words, np.full((2, 1), eta, np.float32))
        assert np.isfinite(draws).all()


def test_initial_angles_are_in_the_support_under_jit() -> None:
    words = np.arange(24, dtype=np.uint32).reshape(4, 3, 2)
    angles = VonMises(3)
    x = jax.jit(angles.initial)(words)
    assert np.asarray(angles.in_support(x)).all() and np.std(x) > 0.5


def test_draws_do_not_depend_on_the_default_generator() -> None:
    words, eta = (
        np.arange(24, dtype=np.uint32).reshape(4, 3, 2),
        np.zeros((4, 3), np.float32),
    )
    expected = jax.jit(Ternary(3).sample)(words, eta)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(jax.jit(Ternary(3).sample)(words, eta), expected)


def test_mean_of_two_valued_units_is_an_exact_sigmoid() -> None:
    """Differentiable twice, and accurate in the tails."""
    eta = np.float32([-80, -3, 0, 2, 80])
    mean = 1 / (1 + np.exp(-eta.astype(float)))
    for family, count in ((Bernoulli(5), 1), (Binomial(5, 7), 7)):
        slope = jax.jit(
            lambda e, f=family: (f.mean(e), jax.grad(lambda e: f.mean(e).sum())(e))
        )
        result, curvature = slope(eta)
        np.testing.assert_allclose(result, count * mean, rtol=1e-6)
        np.testing.assert_allclose(curvature, count * mean * (1 - mean), rtol=1e-5)


def test_shapes_and_equality() -> None:
    assert Bernoulli(3) == Bernoulli((3,)) == Bernoulli(np.int64(3)) != Spin(3)
    assert hash(Bernoulli(3)) == hash(Bernoulli((3,)))
    assert Categorical(2, np.int64(4)) == Categorical(2, 4) != Categorical(2, 3)
    assert Categorical(3, num_categories=4).statistic_shape == (3, 4)
    assert Gaussian((2, 2), "learned").statistic_shape == (2, 2, 2)
    assert Binomial((2, 3), total_count=4).size == 6
    assert repr(Bernoulli((np.int32(2), 3))) == "Bernoulli((2, 3))"
    assert repr(Binomial(2, np.uint8(4))) == "Binomial(2, total_count=4)"
    assert repr(Gaussian(2, "learned")) == "Gaussian(2, variance='learned')"
