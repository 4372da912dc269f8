# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Continuous sites of blocks made from models: conjugate conditionals against the model's density.

Tests traced/sweep/continuous.py.
"""

from collections.abc import Callable
from typing import Any

from model_cases import Y5, Y23, X, advance, latents
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer.util import log_density
import pytest
from scipy import stats
from scipy.special import gammaln

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.errors import IntractableError
from ebmpp.traced.block import Call
from helpers import assert_rows_law, often


def mixture(y: Any) -> None:
    """Means and precisions of components."""
    means = numpyro.sample("means", dist.Normal(0, 2).expand([3]).to_event(1))
    precision = numpyro.sample(
        "precision", dist.Gamma(2.0, 1.0).expand([3]).to_event(1)
    )
    with numpyro.plate("points", len(y)):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.2, 0.3, 0.5])))
        numpyro.sample("y", dist.Normal(means[z], precision[z] ** -0.5), obs=y)


def regression(y: Any, x: Any) -> None:
    """Coefficients that all interact, a plate of offsets that do not, and the noise's variance."""
    variance = numpyro.sample("variance", dist.InverseGamma(3.0, 1.0))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([12]).to_event(1))
    with numpyro.plate("rows", len(y)):
        a = numpyro.sample("a", dist.Normal(0.3, 0.5))
        numpyro.sample("y", dist.Normal(a + x @ b, jnp.sqrt(variance)), obs=y)


def groups(y: Any) -> None:
    """One level per group and members around it; groups do not interact."""
    rate = numpyro.sample("rate", dist.Exponential(0.7))
    with numpyro.plate("groups", 2, dim=-1):
        level = numpyro.sample("level", dist.Normal(1.0, 2.0))
    with numpyro.plate("rows", 2, dim=-2), numpyro.plate("members", 3, dim=-1):
        x = numpyro.sample("x", dist.Normal(level[:, None], 1.0))
        numpyro.sample("y", dist.Normal(x, rate**-0.5), obs=y)


def walk(y: Any) -> None:
    """Two random walks seen through noise; units of one row interact."""
    start = jnp.zeros((2, 1))
    x = numpyro.sample("x", dist.Normal(0, 3).expand([2, 3]).to_event(2))
    numpyro.factor(
        "steps", -0.5 * ((x - jnp.concatenate([start, x[:, :-1]], 1)) ** 2).sum()
    )
    numpyro.sample("y", dist.Normal(x, 0.5).to_event(2), obs=y)


def annotators(labels: Any) -> None:
    """Every item has a class, and each annotator confuses classes by probabilities of their own."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.array([1.0, 2.0, 0.5])))
    with numpyro.plate("annotator", 2, dim=-2), numpyro.plate("class", 3, dim=-1):
        confusion = numpyro.sample(
            "confusion", dist.Dirichlet(jnp.ones(3) + 2 * jnp.eye(3))
        )
    with numpyro.plate("items", len(labels)):
        z = numpyro.sample("z", dist.Categorical(share))
        probs = confusion[jnp.arange(2), z[:, None]]
        numpyro.sample("labels", dist.Categorical(probs).to_event(1), obs=labels)


def scanned(y: Any) -> None:
    """A hidden Markov chain, and a random walk around it, by NumPyro's scan."""
    with numpyro.plate("states", 2):
        rows = numpyro.sample("rows", dist.Dirichlet(jnp.ones(2)))

    def step(last: Any, y: Any) -> Any:
        z = numpyro.sample("z", dist.Categorical(rows[last[0]]))
        x = numpyro.sample("x", dist.Normal(0.7 * last[1] + z, 1.0))
        numpyro.sample("y", dist.Normal(x, 0.5), obs=y)
        return (z, x), None

    scan(step, (0, 0.0), y)


def occupancy(seen: Any) -> None:
    """Probabilities that a latent site multiplies and selects, and complements of these."""
    occupied = numpyro.sample("occupied", dist.Beta(2.0, 3.0))
    detected, false = (
        numpyro.sample(name, dist.Uniform(0, 1)) for name in ("detected", "false")
    )
    with numpyro.plate("places", len(seen)):
        z = numpyro.sample("z", dist.Bernoulli(occupied))
        numpyro.sample("seen", dist.Binomial(5, z * detected), obs=seen)
        numpyro.sample(
            "missed",
            dist.Bernoulli(jnp.stack([1 - false, 1 - detected])[z]),
            obs=seen == 0,
        )


def change_point(counts: Any) -> None:
    """Rates before and after a change, of one count by index too."""
    early = numpyro.sample("early", dist.Exponential(0.2))
    late = numpyro.sample("late", dist.Gamma(2.0, 0.5))
    tau = numpyro.sample("tau", dist.Categorical(jnp.ones(len(counts)) / len(counts)))
    rate = jnp.where(jnp.arange(len(counts)) < tau, early, late)
    numpyro.sample("counts", dist.Poisson(rate).to_event(1), obs=counts)
    scale = jnp.stack([early, late])[(tau > 2).astype(int)] ** -0.5
    numpyro.sample("mean", dist.Normal(0.0, scale), obs=1.3)


def gated(counts: Any) -> None:
    rates = numpyro.sample("rates", dist.Gamma(2.0, 0.5).expand([2]).to_event(1))
    low, high = (numpyro.sample(name, dist.Beta(1.0, 2.0)) for name in ("low", "high"))
    with numpyro.plate("counts", len(counts)):
        z = numpyro.sample("z", dist.Bernoulli(0.4))
        numpyro.sample("y", dist.Poisson(rates[0] * (1 - z) + z * rates[1]), obs=counts)
        numpyro.sample(
            "hit", dist.Bernoulli((1.0 - z) * low + z * high), obs=counts > 2
        )


LABELS = np.array([[0, 0], [2, 1], [1, 1], [0, 2], [2, 2]])
SEEN = np.array([0, 5, 4, 5, 0])
COUNTS = np.array([1, 0, 2, 5, 4, 6])

#: model, arguments, site, family of its conditional, and how many of its units interact
CASES: dict[str, tuple[Callable, tuple, str, str, int]] = {
    "means": (mixture, (Y5,), "means", "Gaussian", 1),
    "precision": (mixture, (Y5,), "precision", "Gamma", 1),
    "coefficients": (regression, (Y5, X), "b", "Gaussian", 12),
    "offsets": (regression, (Y5, X), "a", "Gaussian", 1),
    "variance": (regression, (Y5, X), "variance", "InverseGamma", 1),
    "level": (groups, (Y23,), "level", "Gaussian", 1),
    "members": (groups, (Y23,), "x", "Gaussian", 1),
    "rate": (groups, (Y23,), "rate", "Gamma", 1),
    "walk": (walk, (Y23,), "x", "Gaussian", 3),
    "share": (annotators, (LABELS,), "share", "Dirichlet", 1),
    "confusion": (annotators, (LABELS,), "confusion", "Dirichlet", 1),
    "scanned rows": (scanned, (Y5,), "rows", "Dirichlet", 1),
    "scanned walk": (scanned, (Y5,), "x", "Gaussian", 5),
    "occupied": (occupancy, (SEEN,), "occupied", "Beta", 1),
    "detected": (occupancy, (SEEN,), "detected", "Beta", 1),
    "false": (occupancy, (SEEN,), "false", "Beta", 1),
    "early": (change_point, (COUNTS,), "early", "Gamma", 1),
    "gated rates": (gated, (COUNTS,), "rates", "Gamma", 1),
    "gated probability": (gated, (COUNTS,), "low", "Beta", 1),
    "late": (change_point, (COUNTS,), "late", "Gamma", 1),
}


def elsewhere(value: Any, family: str) -> Any:
    """Values of a site in its support."""
    shifts = np.array([1.0, 0.7, 1.3, 2.0], np.float32).reshape(-1, *[1] * value.ndim)
    if family not in ("Dirichlet", "Beta"):
        return value * shifts
    powers = value**shifts
    return powers / powers.sum(-1, keepdims=True) if family == "Dirichlet" else powers


@pytest.mark.parametrize("name", often(CASES, "gated rates"))
def test_conditional_matches_the_joint_density_and_draws_follow_it(name: str) -> None:
    """log density - log conditional is one constant, wherever the site is."""
    model, args, site, family, size = CASES[name]
    block = GibbsBlock.from_model(model, [site], *args)
    assert [(c.family, c.most) for c in block.sweep.continuous] == [(family, size)]
    values = {name: jnp.asarray(v) for name, v in latents(model, args, 1).items()}
    value = values.pop(site)

    def gap(new: Any) -> Any:
        conditional = block.conditional(site, values | {site: value}, *args)
        flat = (
            family == "Gaussian"
            and conditional.event_shape
            and conditional.event_shape != new.shape
        )
        density = log_density(model, args, {}, values | {site: new})[0]
        mean, variance = (
            jnp.reshape(v, new.shape) for v in (conditional.mean, conditional.variance)
        )
        covariance = conditional.covariance_matrix[0, 1] if size > 1 else jnp.zeros(())
        return (
            density - conditional.log_prob(new.ravel() if flat else new).sum(),
            mean,
            variance,
            covariance,
        )

    states = elsewhere(value, family)
    gaps, mean, variance, covariance = jax.tree.map(
        np.asarray, jax.jit(jax.vmap(gap))(states)
    )
    np.testing.assert_allclose(gaps, gaps[0], rtol=2e-4, atol=2e-3)
    result = advance(block, {site: value}, Call(values, args, {}))
    assert not result.degenerate.any()
    draws = result.z[site]
    assert_rows_law(draws, mean[0], comparisons=20)
    if family != "InverseGamma":  # whose square has no finite variance
        assert_rows_law(draws**2, variance[0] + mean[0] ** 2, comparisons=20)
    if size > 1:
        pair, exact = (
            draws.reshape(4000, -1)[:, :2],
            covariance[0] + mean[0].ravel()[:2].prod(),
        )
        assert_rows_law(pair.prod(1, keepdims=True), np.array([exact]), comparisons=20)


def every_sampler() -> None:
    """A Gamma, an InverseGamma, a Beta and a Dirichlet site, drawn by jax's samplers."""
    precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
    variance = numpyro.sample("variance", dist.InverseGamma(3.0, 1.0))
    chance = numpyro.sample("chance", dist.Beta(2.0, 3.0))
    share = numpyro.sample("share", dist.Dirichlet(np.ones(3, np.float32)))
    numpyro.sample("x", dist.Normal(0.0, precision**-0.5), obs=0.7)
    numpyro.sample("y", dist.Normal(0.0, variance**0.5), obs=1.2)
    numpyro.sample("hits", dist.Binomial(5, chance), obs=2)
    numpyro.sample("label", dist.Categorical(share), obs=1)


@pytest.mark.nightly
def test_draws_do_not_depend_on_the_default_generator() -> None:
    start = {"precision": 1.0, "variance": 1.0, "chance": 0.5, "share": np.ones(3) / 3}
    values = {name: np.asarray(v, np.float32) for name, v in start.items()}
    keys = np.array([1, 2], np.uint32)

    def draw() -> dict[str, jax.Array]:
        block = GibbsBlock.from_model(every_sampler, list(values))
        return jax.jit(lambda x: block.advance(x, Call({}, (), {}), keys).z)(values)

    expected = draw()
    with jax.default_prng_impl("rbg"):
        drawn = draw()
    for name, value in values.items():
        assert not np.array_equal(expected[name], value)
        np.testing.assert_array_equal(drawn[name], expected[name])


#: present values, far from all conditionals
EXTREMES = np.float32([1e-38, 1e-30, 1e-20, 1e-12, 1e-6, 1, 1e6, 1e12, 1e20, 1e30])


def vague(y: Any) -> None:
    """Sites of all families, of which one has no data."""
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    precision = numpyro.sample("precision", dist.Gamma(0.01, 0.01))
    variance = numpyro.sample("variance", dist.InverseGamma(0.01, 0.01))
    numpyro.sample("spare", dist.Gamma(0.01, 2.0))
    hits = numpyro.sample("hits", dist.Beta(0.01, 0.01))
    numpyro.sample("seen", dist.Binomial(9, hits), obs=3)
    numpyro.sample("y", dist.Normal(mean, precision**-0.5).expand([3]), obs=y)
    numpyro.sample("w", dist.Normal(mean, jnp.sqrt(variance)).expand([3]), obs=y)
    scan(lambda x, _: (numpyro.sample("x", dist.Normal(x, 1.0)),) * 2, mean, None, 2)


def params_of(conditional: Any) -> list:
    """Return two parameters of a conditional."""
    names = {
        dist.Normal: ("loc", "scale"),
        dist.Beta: ("concentration1", "concentration0"),
        dist.MultivariateNormal: ("loc", "precision_matrix"),
    }
    pair = names.get(type(conditional), ("concentration", "rate"))
    return [getattr(conditional, name) for name in pair]


@pytest.mark.nightly
def test_conditionals_do_not_depend_on_the_present_value() -> None:
    """Each is compared with its closed form, given the others at 0.5."""
    y = np.float32([0.1, -0.7, 1.5])
    sites = ["mean", "precision", "variance", "spare", "hits", "x"]
    block = GibbsBlock.from_model(vague, sites, y)
    half = {name: jnp.full(2 if name == "x" else (), 0.5) for name in sites}

    def params(value: Any) -> dict:
        at = {name: jnp.full_like(half[name], value) for name in sites}
        at["hits"] = jnp.minimum(value, 1 - 1e-7)
        return {
            name: params_of(block.conditional(name, half | {name: at[name]}))
            for name in sites
        }

    result = jax.jit(jax.vmap(params))(EXTREMES)
    squares = 0.5 * ((y - 0.5) ** 2).sum()
    tau = 0.01 + 3 * 0.5 + 3 / 0.5 + 1
    exact = {
        "mean": (((0.5 + 2) * y.sum() + 0.5) / tau, tau**-0.5),
        "precision": (1.51, 0.01 + squares),
        "variance": (1.51, 0.01 + squares),
        "spare": (0.01, 2.0),
        "hits": (3.01, 6.01),
        "x": ([0.5, 0.5], [[2, -1], [-1, 1]]),
    }
    for name, pair in exact.items():
        for values, expected in zip(result[name], pair, strict=True):
            expected = np.broadcast_to(expected, values.shape)
            np.testing.assert_allclose(values, expected, 1e-4, err_msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize("unit", [1e-9, 1e-4, 1e5, 1e7])
def test_precision_and_variance_are_right_in_any_unit(unit: float) -> None:
    """Data and priors in other units, far from 1."""

    def model(y: Any) -> None:
        precision = numpyro.sample("precision", dist.Gamma(2.0, unit**2))
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, unit**2))
        numpyro.sample("y", dist.Normal(0, precision**-0.5).expand([3]), obs=y)
        numpyro.sample("w", dist.Normal(0, jnp.sqrt(variance)).expand([3]), obs=y)

    y = np.float32([0.1, -0.7, 1.5])
    sites = {"precision": np.float32(1), "variance": np.float32(1)}
    block = GibbsBlock.from_model(model, [*sites], np.float32(unit) * y)
    for name in sites:
        count, rate = params_of(block.conditional(name, sites))
        np.testing.assert_allclose(count, 3.5, rtol=2e-4)
        np.testing.assert_allclose(
            rate / unit**2, 1 + 0.5 * (y.astype(float) ** 2).sum(), rtol=2e-4
        )


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [0.01, 0.1, 0.5, 3.0])
def test_draws_without_data_follow_vague_priors(shape: float) -> None:
    """Whatever the start; draws below the least float are raised to it."""

    def model() -> None:
        numpyro.sample("x", dist.Gamma(shape, shape).expand([4000]).to_event(1))
        numpyro.sample("v", dist.InverseGamma(shape, 2.0).expand([4000]).to_event(1))

    block = GibbsBlock.from_model(model, ["x", "v"])
    start = jnp.asarray(np.resize(EXTREMES, 4000))
    result = jax.jit(
        lambda: block.advance(
            {"x": start, "v": start}, Call({}, (), {}), jnp.array([1, 2], jnp.uint32)
        )
    )()
    assert int(result.degenerate) == 0
    for name, prior in {
        "x": stats.gamma(shape, scale=1 / shape),
        "v": stats.invgamma(shape, scale=2.0),
    }.items():
        at = np.array([1e-37, 1e-30, 1e-20, 1e-10, 1e-3, 0.1, 1, 10, 1e5, 1e20, 1e38])
        below = np.asarray(result.z[name])[:, None] < at
        exact = prior.cdf(at)
        is_common = (exact > 0.01) & (exact < 0.99)
        assert_rows_law(below[:, is_common], exact[is_common], comparisons=80)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [0.1, 0.01, 0.001])
def test_chains_leave_every_start_from_vague_priors(shape: float) -> None:
    """After three sweeps, chains from draws of the prior have the posterior."""
    y = np.random.default_rng(1).normal(3.0, 2.0, 20).astype(np.float32)

    def model(y: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
        precision = numpyro.sample("precision", dist.Gamma(shape, shape))
        with numpyro.plate("points", 20):
            numpyro.sample("y", dist.Normal(mean, precision**-0.5), obs=y)

    block = GibbsBlock.from_model(model, ["mean", "precision"], y)
    rng = np.random.default_rng(2)
    starts = {
        "mean": jnp.asarray(rng.normal(0, 10, 2000), jnp.float32),
        "precision": jnp.clip(
            jnp.asarray(rng.gamma(shape, 1 / shape, 2000), jnp.float32), 1.2e-38
        ),
    }

    def chain(start: dict, key: Any) -> Any:
        for step in range(5):
            words = jax.random.bits(jax.random.fold_in(key, step), (2,))
            start = block.advance(start, Call({}, (y,), {}), words).z
        return start

    keys = jax.random.split(jax.random.key(0), 2000)
    result = jax.jit(jax.vmap(chain))(starts, keys)
    grid = np.exp(np.linspace(-6, 3, 20001))  # of precisions
    total = 20 * grid + 0.01
    log = (shape + 10) * np.log(grid) - shape * grid - 0.5 * np.log(total)
    log -= 0.5 * (grid * (y.astype(float) ** 2).sum() - (grid * y.sum()) ** 2 / total)
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    exact = [weight @ grid, weight @ (grid * y.sum() / total)]
    drawn = np.stack([result["precision"], result["mean"]], 1)
    assert_rows_law(drawn, np.array(exact), comparisons=6)


def enumerated(y: np.ndarray) -> tuple[np.ndarray, float]:
    """P(z = 1) and the mean level of :func:`segments`, by a sum over z of Gaussians."""
    states = (np.arange(2 ** len(y))[:, None] >> np.arange(len(y))) & 1
    prior = 0.7 * (states[:, 1:] == states[:, :-1]).sum(1)
    precision = 1 / 4 + states.sum(1)
    mean = (states @ y + 1 / 4) / precision
    log = prior - 0.5 * (y**2 * (1 - states)).sum(1)
    log += -0.5 * ((states * y**2).sum(1) + 1 / 4 - precision * mean**2) - 0.5 * np.log(
        precision
    )
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    return weight @ states, float(weight @ mean)


def segments(y: Any) -> None:
    """A chain of two states, one of them of unknown level."""
    level = numpyro.sample("level", dist.Normal(1.0, 2.0))
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand([len(y)]).to_event(1))
    numpyro.factor("chain", 0.7 * (z[1:] == z[:-1]).sum())
    numpyro.sample("y", dist.Normal(z * level, 1.0).to_event(1), obs=y)


def run(block: Any, start: dict, y: Any, features: Callable) -> tuple[Any, Any]:
    """The last states of 1,000 chains, and means of features of their draws 10 to 30."""

    def chain(key: Any) -> Any:
        state = block.init(key, 0, start, (y,), {})

        def body(step: Any, carry: tuple) -> tuple:
            state = block.sample(carry[0], (y,), {})
            return state, jax.tree.map(
                lambda total, v: total + (step >= 10) * v, carry[1], features(state.z)
            )

        zeros = jax.tree.map(
            lambda a: jnp.zeros(a.shape), jax.eval_shape(features, state.z)
        )
        return jax.lax.fori_loop(0, 30, body, (state, zeros))

    state, totals = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), 1000))
    assert int(np.sum(state.degenerate)) == 0
    return state, jax.tree.map(lambda a: np.asarray(a) / 20, totals)


@pytest.mark.nightly
@pytest.mark.parametrize("tempering", often([None, (0.4, 0.7, 1.0)], None))
def test_discrete_and_continuous_sites_have_their_posterior(tempering: Any) -> None:
    y = np.array([0.1, 2.2, 1.4, -0.3], np.float32)
    block = GibbsBlock.from_model(segments, ["z", "level"], y, tempering=tempering)
    start = {"z": jnp.zeros(4, int), "level": jnp.float32(0)}
    state, means = run(block, start, y, lambda z: z)
    probability, mean = enumerated(y)
    assert_rows_law(means["z"], probability, comparisons=5)
    assert_rows_law(means["level"][:, None], np.array([mean]), comparisons=5)
    accepted = float(np.mean(state.transitions)) / 30
    assert accepted == 0 if tempering is None else 0.3 < accepted < 1
    text = block.get_diagnostics_str(jax.tree.map(lambda a: a[0], state))
    assert ("tempered transitions" in text) == (tempering is not None)


@pytest.mark.nightly
@pytest.mark.parametrize("tempering", [None, (0.5, 1.0)])
def test_weights_drawn_along_have_their_posterior(tempering: Any) -> None:
    """With the weights integrated out, P(z) is proportional to a Dirichlet-multinomial
    probability."""
    y, prior, means = (
        np.float32([-1.8, 0.3, 2.5, 1.6]),
        np.array([0.5, 1.0, 2.0]),
        np.array([-2.0, 0.0, 2.0]),
    )

    def weighted(y: Any) -> None:
        weights = numpyro.sample("weights", dist.Dirichlet(prior))
        with numpyro.plate("points", len(y)):
            z = numpyro.sample("z", dist.Categorical(weights))
            numpyro.sample("y", dist.Normal(jnp.asarray(means)[z], 1.0), obs=y)

    states = np.stack(np.unravel_index(np.arange(3**4), (3,) * 4), 1)
    counts = (states[:, :, None] == np.arange(3)).sum(1)
    weight = np.exp(
        gammaln(prior + counts).sum(1) - 0.5 * ((y - means[states]) ** 2).sum(1)
    )
    weight /= weight.sum()
    block = GibbsBlock.from_model(weighted, ["weights", "z"], y, tempering=tempering)
    start = {"z": jnp.zeros(4, int), "weights": jnp.ones(3) / 3}
    _, draws = run(
        block,
        start,
        y,
        lambda z: {"z": jax.nn.one_hot(z["z"], 3), "weights": z["weights"]},
    )
    exact = np.einsum("s,skc->kc", weight, states[:, :, None] == np.arange(3))
    is_common = exact.ravel() > 0.01  # the others occur too seldom for a standard error
    assert_rows_law(
        draws["z"].reshape(1000, -1)[:, is_common],
        exact.ravel()[is_common],
        comparisons=15,
    )
    posterior = weight @ ((prior + counts) / (prior.sum() + 4))
    assert_rows_law(draws["weights"], posterior, comparisons=15)


@pytest.mark.nightly
def test_change_point_needs_no_other_kernel() -> None:
    """With both rates integrated out, P(tau) is a product of two Gamma integrals."""
    before, is_component = (
        np.arange(6) < np.arange(6)[:, None],
        np.stack([np.arange(6) <= 2, np.arange(6) > 2], 1),
    )
    shapes = (
        np.stack([before @ COUNTS, ~before @ COUNTS], 1)
        + [1.0, 2.0]
        + 0.5 * is_component
    )
    rates = (
        np.stack([before.sum(1), (~before).sum(1)], 1)
        + [0.2, 0.5]
        + 0.5 * 1.3**2 * is_component
    )
    weight = np.exp((gammaln(shapes) - shapes * np.log(rates)).sum(1))
    weight /= weight.sum()
    block = GibbsBlock.from_model(change_point, ["tau", "early", "late"], COUNTS)
    start = {"tau": jnp.int32(3), "early": jnp.float32(1), "late": jnp.float32(1)}
    _, draws = run(
        block, start, COUNTS, lambda z: {**z, "tau": jax.nn.one_hot(z["tau"], 6)}
    )
    assert_rows_law(draws["tau"], weight, comparisons=8)
    rates_drawn = np.stack([draws["early"], draws["late"]], 1)
    assert_rows_law(rates_drawn, weight @ (shapes / rates), comparisons=8)


#: priors, and log densities that are of no known family in their draws
FOREIGN: dict[str, tuple[dist.Distribution, Callable]] = {
    "squares": (dist.Beta(1.0, 1.0), lambda x: dist.Normal(x, 1.0).log_prob(0.3)),
    "scaled": (dist.Beta(1.0, 1.0), lambda x: dist.Bernoulli(0.5 * x).log_prob(0)),
    "clipped": (dist.Beta(1.0, 1.0), lambda x: jnp.log(jnp.clip(x, 0.3, 1.0))),
    "compared": (dist.Uniform(0.0, 1.0), lambda x: jnp.where(x > 0.5, jnp.log(x), 0.0)),
    "complement": (
        dist.Dirichlet(jnp.ones(3)),
        lambda x: dist.Bernoulli(x[0]).log_prob(0),
    ),
    "summed": (dist.Dirichlet(jnp.ones(3)), lambda x: jnp.log(x[0] + x[1])),
    "offset": (dist.Gamma(1.0, 1.0), lambda x: dist.Poisson(1.0 + x).log_prob(2)),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_site_without_a_known_conditional_is_refused_by_name(name: str) -> None:
    prior, log_factor = FOREIGN[name]

    def model() -> None:
        numpyro.factor("f", log_factor(numpyro.sample("site", prior)))

    with pytest.raises(IntractableError, match="site 'site'"):
        GibbsBlock.from_model(model, ["site"])


def test_interval_that_depends_on_a_site_is_refused() -> None:
    def model() -> None:
        high = numpyro.sample("high", dist.Bernoulli(1.0))
        numpyro.sample("site", dist.Uniform(0.0, 1.0 * high))

    with pytest.raises(IntractableError, match="site 'site'"):
        GibbsBlock.from_model(model, ["site"])


@pytest.mark.nightly
def test_rare_and_common_outcomes_are_both_counted() -> None:
    """Coefficients do not depend on the present value, which may be at the edge."""

    def model(hits: Any) -> None:
        p = numpyro.sample("p", dist.Beta(0.5, 0.5))
        numpyro.sample("hits", dist.Binomial(1_000_000, p), obs=hits)

    block = GibbsBlock.from_model(model, ["p"], np.array(3.0))
    conditional = block.conditional("p", {"p": np.float32(1e-30)})
    np.testing.assert_allclose(conditional.concentration1, 3.5, rtol=1e-3)
    np.testing.assert_allclose(
        conditional.concentration0, 1_000_000 - 3 + 0.5, rtol=1e-5
    )


@pytest.mark.nightly
def test_rate_of_counts_is_gamma() -> None:
    """A weight of 0 with no count adds nothing."""

    def model(y: Any, w: Any) -> None:
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.5))
        unit_rate = numpyro.sample(
            "unit_rate", dist.Gamma(3.0, rate).expand([3]).to_event(1)
        )
        numpyro.sample("y", dist.Poisson(w * rate * unit_rate).to_event(1), obs=y)

    y, w = np.float32([4.0, 0.0, 2.0]), np.float32([0.5, 0.0, 3.0])
    block = GibbsBlock.from_model(model, ["rate", "unit_rate"], y, w)
    values = {"rate": np.float32(0.7), "unit_rate": np.float32([0.2, 1.3, 0.8])}
    ask = lambda site: params_of(block.conditional(site, values))
    rate, unit_rate = jax.jit(lambda: (ask("rate"), ask("unit_rate")))()
    total = values["unit_rate"].sum() + (w * values["unit_rate"]).sum()
    np.testing.assert_allclose(rate, (2 + 3 * 3 + 6, 1.5 + total), rtol=1e-5)
    np.testing.assert_allclose(unit_rate, (3 + y, 0.7 + 0.7 * w), rtol=1e-5)
