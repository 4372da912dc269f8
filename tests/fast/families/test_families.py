# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Binomial, Categorical, Exponential, Family, Gaussian, Poisson, Spin
from ebmpp.core import random
from ebmpp.errors import ArgumentError
from helpers import FAMILIES, FINITE, assert_law, assert_rows_law, numpy_log_base, numpy_statistics

ROWS = 20_000


def etas(family: Family, seed: int = 0) -> jax.Array:
    """Natural parameters in the domain, different for each unit."""
    noise = np.random.default_rng(seed).uniform(-1, 1, family.statistic_shape)
    if isinstance(family, Exponential):
        noise = -np.exp(noise)
    if isinstance(family, Gaussian) and family.learned:
        noise[..., 1] = -np.exp(noise[..., 1])
    return jnp.asarray(noise, jnp.float32)


def words(family: Family, count: int, seed: int = 0) -> jax.Array:
    """Random words of ``ROWS`` rows."""
    pairs = random.fold_in(random.key_pair(jax.random.key(seed)), jnp.arange(ROWS))
    return random.words(pairs, family.size * count).reshape(ROWS, *family.shape, count)


def grid(family: Family) -> tuple[np.ndarray, float]:
    """A unit's values and the width of a step: every count, or a fine mesh."""
    if isinstance(family, Gaussian):
        return np.linspace(-15, 15, 6001), 30 / 6000
    if isinstance(family, Exponential):
        return np.arange(0.0005, 60, 0.001), 0.001
    if isinstance(family, Poisson):
        return np.arange(60.0), 1.0
    return np.asarray(family.states(), float), 1.0


@functools.cache
def everything(name: str) -> dict[str, np.ndarray]:
    """All that a family computes at ``etas``, in one compiled function: compiling is what takes time."""
    family, rows = (
        FAMILIES[name],
        functools.partial(jnp.broadcast_to, shape=(ROWS, *etas(FAMILIES[name]).shape)),
    )

    def compute(eta: jax.Array, other: jax.Array, drawn: jax.Array, both: jax.Array) -> dict[str, Any]:
        x, y = family.couple(both, rows(eta), rows(other))
        sample, few = family.sample(drawn, rows(eta)), family.sample(drawn[:20], rows(eta)[:20])
        return {
            "log_normalizer": family.log_normalizer(eta),
            "mean": family.mean(eta),
            "other_mean": family.mean(other),
            "numpyro_mean": numpyro_mean(family, eta),
            "hessian": jax.hessian(lambda e: family.log_normalizer(e).sum())(eta),
            "back": family.from_mean(family.mean(eta)),
            "mean_of_back": family.mean(family.from_mean(family.mean(eta))),
            "mode": family.mode(eta),
            "sample": sample,
            "one": family.sample(drawn[5:6], rows(eta)[:1])[0],
            "t": family.statistics(sample),
            "supported": family.in_support(sample).all(),
            "initial": family.statistics(family.initial(drawn)),
            "default_mean": family.mean(family.default_eta()),
            "couple": (x, y),
            "couple_t": (family.statistics(x), family.statistics(y)),
            "same": family.couple(both, rows(eta), rows(eta)),
            "few": few,
            "log_base": family.log_base_measure(few),
            "log_prob": family.distribution(eta).log_prob(few),
            "other_log_prob": family.distribution(other).log_prob(few),
            "log_ratio": family.log_ratio(rows(eta)[:20], rows(other)[:20], family.statistics(few)),
        }

    drawn, both = words(family, family.num_words), words(family, family.num_couple_words, seed=2)
    made = jax.jit(compute)(etas(family), etas(family, seed=1), drawn, both)
    return jax.tree.map(np.asarray, made)


def numpyro_mean(family: Family, eta: jax.Array) -> jax.Array:
    """Mean statistics from NumPyro's own moments."""
    law = family.unit_distribution(eta)
    if isinstance(family, Categorical):
        return law.probs
    if family.stat_shape:
        return jnp.stack([law.mean, law.variance + law.mean**2], -1)
    return law.mean


@pytest.fixture(params=sorted(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# -- the law -------------------------------------------------------------------------------------


def log_density(name: str, x: np.ndarray) -> np.ndarray:
    """<eta, t(x)> + log r(x), shape ``(len(x), units)``, for every unit and every value."""
    family = FAMILIES[name]
    eta = np.asarray(etas(family), float).reshape(family.size, -1)
    base = np.array([numpy_log_base(family, value) for value in x])
    return base[:, None] + numpy_statistics(family, x).reshape(len(x), -1) @ eta.T


def test_log_normalizer_normalizes(name: str) -> None:
    x, step = grid(FAMILIES[name])
    sums = np.log(np.exp(log_density(name, x)).sum(0) * step)
    np.testing.assert_allclose(everything(name)["log_normalizer"], sums, atol=1e-5)


def test_distribution_has_the_density_of_the_family(name: str) -> None:
    family, made = FAMILIES[name], everything(name)
    eta, x = np.asarray(etas(family), float), made["few"]
    base = np.array([numpy_log_base(family, row) for row in x])
    inner = (eta * numpy_statistics(family, x)).reshape(20, -1).sum(-1)
    np.testing.assert_allclose(made["log_base"].sum(-1), base, rtol=1e-5, atol=1e-5)
    assert made["log_prob"].shape == (20,)
    expected = inner + base - made["log_normalizer"].sum()
    np.testing.assert_allclose(made["log_prob"], expected, rtol=1e-5, atol=1e-5)


def test_mean_by_autodiff(name: str) -> None:
    made = everything(name)
    np.testing.assert_allclose(made["mean"], made["numpyro_mean"], rtol=1e-5, atol=1e-6)


def test_draws_have_the_law(name: str) -> None:
    family, made = FAMILIES[name], everything(name)
    assert made["sample"].shape == (ROWS, *family.shape)
    assert made["sample"].dtype == family.dtype
    assert made["supported"]
    t, mean = made["t"].reshape(ROWS, -1).astype(float), made["mean"].ravel()
    assert_rows_law(t, mean, 4 * len(mean))
    # second moments too, and no correlation between units: the Hessian of the log-normaliser
    products = (t - mean)[:, :, None] * (t - mean)[:, None, :]
    assert_rows_law(products, made["hessian"].reshape(len(mean), -1), 4 * len(mean) ** 2)


def test_a_draw_depends_on_its_row_alone(name: str) -> None:
    made = everything(name)
    np.testing.assert_array_equal(made["one"], made["sample"][5])


def test_initial_draws_are_at_the_default(name: str) -> None:
    assert_rows_law(everything(name)["initial"], everything(name)["default_mean"])


# -- coupled draws -------------------------------------------------------------------------------


def test_both_coupled_draws_have_their_law(name: str) -> None:
    made = everything(name)
    for t, mean in zip(made["couple_t"], ("mean", "other_mean"), strict=True):
        assert_rows_law(t, made[mean], 2 * made[mean].size)


def test_equal_parameters_give_equal_draws(name: str) -> None:
    np.testing.assert_array_equal(*everything(name)["same"])


@pytest.mark.parametrize("name", ["bernoulli", "spin", "categorical"])
def test_unequal_with_the_probability_of_total_variation(name: str) -> None:
    family = FAMILIES[name]
    x, y = everything(name)["couple"]
    t = numpy_statistics(family, np.asarray(family.states(), float)).reshape(len(family.states()), -1)
    weights = [np.exp(t @ np.asarray(etas(family, s), float).reshape(family.size, -1).T) for s in (0, 1)]
    p, q = (w / w.sum(0) for w in weights)
    distance = 0.5 * np.abs(p - q).sum(0)
    assert (distance > 0.05).all(), "the two laws should differ for this test to mean anything"
    assert_law((x != y).mean(0), distance, np.sqrt(distance * (1 - distance) / ROWS))


# -- the other maps ------------------------------------------------------------------------------


def test_from_mean_inverts_mean(name: str) -> None:
    made = everything(name)
    np.testing.assert_allclose(made["mean_of_back"], made["mean"], rtol=1e-4, atol=1e-5)
    if name != "categorical":  # whose natural parameter is determined up to a constant
        np.testing.assert_allclose(made["back"], etas(FAMILIES[name]), rtol=1e-4, atol=1e-5)


def test_mode_is_the_most_probable_value(name: str) -> None:
    x, step = grid(FAMILIES[name])
    tolerance = 0 if step == 1 else step
    np.testing.assert_allclose(everything(name)["mode"], x[log_density(name, x).argmax(0)], atol=tolerance)


def test_log_ratio_is_a_difference_of_log_densities(name: str) -> None:
    made = everything(name)
    assert made["log_ratio"].shape == (20,)
    expected = made["other_log_prob"] - made["log_prob"]
    np.testing.assert_allclose(made["log_ratio"], expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=50)
@given(st.floats(-80, 80, width=32), st.floats(-80, 80, width=32), st.sampled_from(FINITE), st.integers(0, 1))
def test_log_ratio_of_large_parameters_is_exact(eta: float, other: float, name: str, top: int) -> None:
    family = dataclasses.replace(FAMILIES[name], shape=(1,))
    x = family.states()[-1 if top else 0][None]
    stats = numpy_statistics(family, np.asarray(x))
    direction = (
        np.arange(math.prod(family.stat_shape)).reshape(family.stat_shape) - 1 if family.stat_shape else 1.0
    )
    a, b = (np.float32(value) * direction * np.ones_like(stats) for value in (eta, other))
    ratio = family.log_ratio(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), jnp.asarray(stats))
    values = numpy_statistics(family, np.asarray(family.states()))
    base = np.array([numpy_log_base(family, v) for v in np.asarray(family.states())])
    flat = values.reshape(len(base), -1)
    exact_normalizer = [np.logaddexp.reduce(base + flat @ e.astype(float).ravel()) for e in (a, b)]
    expected = ((b - a).astype(float) * stats).sum() - exact_normalizer[1] + exact_normalizer[0]
    assert np.isfinite(float(ratio))
    # float32 terms of up to 240 cancel
    assert abs(float(ratio) - expected) <= 2e-6 * (240 + abs(expected))


def test_what_is_in_the_support() -> None:
    cases = {
        "bernoulli": ([0, 1], [2, 0.5, -1, math.nan]),
        "spin": ([-1, 1], [0, 2, math.nan]),
        "categorical": ([0, 1, 2], [3, 7, -1, 0.5, math.nan]),
        "binomial": ([0, 1, 2, 3], [4, -1, 1.5, math.nan]),
        "poisson": ([0, 5], [-1, 0.5, math.inf, math.nan]),
        "exponential": ([0, 0.3], [-0.1, math.inf, math.nan]),
        "gaussian": ([-3, 0.2], [math.inf, math.nan]),
        "gaussian_learned": ([-3, 0.2], [-math.inf, math.nan]),
    }
    for name, (inside, outside) in cases.items():
        assert FAMILIES[name].in_support(jnp.array(inside)).all(), name
        assert not FAMILIES[name].in_support(jnp.array(outside)).any(), name


def test_gaussian_draws_are_never_infinite() -> None:
    extreme = jnp.array([[[0]], [[2**32 - 1]]], jnp.uint32)
    assert bool(jnp.isfinite(Gaussian(1).sample(extreme, jnp.zeros((2, 1)))).all())
    assert bool(jnp.isfinite(Exponential(1).sample(extreme, -jnp.ones((2, 1)))).all())


def test_default_draws_do_not_depend_on_the_default_generator() -> None:
    family = Poisson(3)
    drawn, eta = words(family, 2)[:4], jnp.zeros((4, 3))
    expected = family.sample(drawn, eta)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(family.sample(drawn, eta), expected)


# -- declarations --------------------------------------------------------------------------------


def test_shapes() -> None:
    assert Bernoulli(3).shape == (3,)
    assert Bernoulli((2, 3)).shape == (2, 3)
    assert Bernoulli(3) == Bernoulli((3,))
    assert hash(Bernoulli(3)) == hash(Bernoulli((3,)))
    assert Bernoulli(3) != Spin(3)
    assert Categorical(3, num_categories=4).statistic_shape == (3, 4)
    assert Gaussian((2, 2), "learned").statistic_shape == (2, 2, 2)
    assert Binomial((2, 3), total_count=4).size == 6


def test_how_a_family_prints() -> None:
    assert repr(Bernoulli(3)) == "Bernoulli(3)"
    assert repr(Categorical((2, 3), num_categories=4)) == "Categorical((2, 3), num_categories=4)"
    assert repr(Gaussian(2, "learned")) == "Gaussian(2, variance='learned')"


def test_numbers_of_numpy_are_numbers() -> None:
    assert Bernoulli(np.int64(3)) == Bernoulli(3)
    assert repr(Bernoulli((np.int32(2), 3))) == "Bernoulli((2, 3))"
    assert Categorical(2, np.int64(4)) == Categorical(2, 4)
    assert repr(Binomial(2, np.uint8(4))) == "Binomial(2, total_count=4)"
    assert hash(Binomial(2, np.uint8(4))) == hash(Binomial(2, 4))


WRONG = [
    (lambda: Bernoulli(0), "Bernoulli: shape is an int of at least 1, not 0"),
    (lambda: Spin(-1), "Spin: shape is an int of at least 1, not -1"),
    (lambda: Bernoulli(3.0), r"Bernoulli: shape is an int of at least 1, not 3.0 \(give 3\)"),
    (lambda: Bernoulli((2, 0)), "shape is an int of at least 1, not 0"),
    (lambda: Bernoulli((2, 1.5)), "shape is an int of at least 1, not 1.5"),
    (lambda: Bernoulli(()), r"shape is an int or a tuple of ints, not the empty \(\)"),
    (lambda: Bernoulli("3"), "shape is an int of at least 1, not '3'"),
    (lambda: Bernoulli(True), "shape is an int of at least 1, not True"),
    (lambda: Categorical(3, num_categories=1), "Categorical: num_categories is an int of at least 2, not 1"),
    (lambda: Categorical(3, 4.0), r"Categorical: num_categories is an int of at least 2, not 4.0 \(give 4\)"),
    (lambda: Binomial(3, total_count=0), "Binomial: total_count is an int of at least 1, not 0"),
    (lambda: Binomial(3, 2.5), "Binomial: total_count is an int of at least 1, not 2.5"),
    (lambda: Gaussian(3, variance="full"), "Gaussian: variance is one of 'unit', 'learned', not 'full'"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[m for _, m in WRONG])
def test_wrong_arguments(make: Callable[[], Family], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_the_mean_of_units_of_two_values_is_one_sigmoid_and_differentiates_on() -> None:
    eta = jnp.array([-80.0, -3.0, 0.0, 2.0, 80.0])
    for family, count in ((Bernoulli(5), 1), (Binomial(5, 7), 7)):
        np.testing.assert_allclose(family.mean(eta), count * jax.nn.sigmoid(eta), rtol=1e-6)
        curvature = jax.vmap(jax.grad(lambda e, family=family: family.mean(e)))(eta)
        mean = jax.nn.sigmoid(eta)
        np.testing.assert_allclose(curvature, count * mean * (1 - mean), rtol=1e-5)
        np.testing.assert_array_equal(family.log_normalizer(eta), count * jax.nn.softplus(eta))
        assert "log" not in str(jax.jit(family.mean).lower(eta).as_text()).replace("logistic", "")
