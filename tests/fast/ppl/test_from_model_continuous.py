# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Continuous sites of blocks made from models: their laws against the density itself, and what is refused."""

from collections.abc import Callable
from typing import Any

from model_cases import Y5, Y23, X, latents
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.util import log_density
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.core import random
from ebmpp.errors import IntractableError, StateError
from ebmpp.ppl.sites import Call
from helpers import assert_law, assert_rows_law, often


def mixture(y: Any) -> None:
    """Means and precisions of components, which assignments pick."""
    means = numpyro.sample("means", dist.Normal(0, 2).expand([3]).to_event(1))
    precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0).expand([3]).to_event(1))
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
    """A level a group and members around it; groups do not interact."""
    rate = numpyro.sample("rate", dist.Exponential(0.7))
    with numpyro.plate("groups", 2, dim=-1):
        level = numpyro.sample("level", dist.Normal(1.0, 2.0))
    with numpyro.plate("rows", 2, dim=-2), numpyro.plate("members", 3, dim=-1):
        x = numpyro.sample("x", dist.Normal(level[:, None], 1.0))
        numpyro.sample("y", dist.Normal(x, rate**-0.5), obs=y)


def walk(y: Any) -> None:
    """A random walk seen through noise, rows of two of them: each row is a group."""
    start = jnp.zeros((2, 1))
    x = numpyro.sample("x", dist.Normal(0, 3).expand([2, 3]).to_event(2))
    numpyro.factor("steps", -0.5 * ((x - jnp.concatenate([start, x[:, :-1]], 1)) ** 2).sum())
    numpyro.sample("y", dist.Normal(x, 0.5).to_event(2), obs=y)


CASES: dict[str, tuple[Callable, tuple, dict[str, tuple[str, int]]]] = {
    "mixture": (mixture, (Y5,), {"means": ("Gaussian", 1), "precision": ("Gamma", 1)}),
    "regression": (
        regression,
        (Y5, X),
        {"b": ("Gaussian", 12), "a": ("Gaussian", 1), "variance": ("InverseGamma", 1)},
    ),
    "groups": (groups, (Y23,), {"level": ("Gaussian", 1), "x": ("Gaussian", 1), "rate": ("Gamma", 1)}),
    "walk": (walk, (Y23,), {"x": ("Gaussian", 3)}),
}


@pytest.mark.parametrize("name", often(CASES, "groups"))
def test_the_law_is_the_density_given_everything_else(name: str) -> None:
    """log density - log law is one constant, wherever the site is."""
    model, args, sites = CASES[name]
    block = GibbsBlock.from_model(model, list(sites), *args)
    families = {c.name: (c.family, c.most) for c in block.sweep.continuous}
    assert families == sites
    values = latents(model, args, 0)
    for site in sites:
        law = block.conditional(site, values)
        flat = law.event_shape and law.event_shape != values[site].shape
        gaps = []
        for seed in range(4):
            new = latents(model, args, seed)[site]
            density = log_density(model, args, {}, values | {site: new})[0]
            gaps.append(float(density - law.log_prob(new.ravel() if flat else new).sum()))
        np.testing.assert_allclose(gaps, gaps[0], rtol=2e-4, atol=2e-3, err_msg=site)
    block.verify(model, *args)


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_law(name: str) -> None:
    model, args, sites = CASES[name]
    block = GibbsBlock.from_model(model, list(sites), *args)
    values = latents(model, args, 1)
    for one in block.sweep.continuous:
        own, call = (
            {s: values[s] for s in sites},
            Call({s: v for s, v in values.items() if s not in sites}, args, {}),
        )

        def draw(key: Any, one: Any = one, own: Any = own, call: Any = call) -> Any:
            law = one.law(own[one.name], block.sweep.given(one.posterior, own, call))
            return one.draw(law, random.key_pair(key))

        draws, kept = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 4000))
        law, shape = block.conditional(one.name, values), values[one.name].shape
        assert not kept.any()
        assert_rows_law(draws, np.reshape(law.mean, shape), comparisons=20)
        square = np.reshape(law.variance + law.mean**2, shape)
        if one.family == "Gaussian":
            assert_rows_law(draws**2, square, comparisons=20)
            if one.most > 1:
                pair = np.asarray(draws).reshape(4000, -1)[:, :2]
                exact = law.covariance_matrix[0, 1] + law.mean[0] * law.mean[1]
                assert_rows_law(pair.prod(1, keepdims=True), np.array([exact]), comparisons=20)


def enumerated(y: np.ndarray) -> tuple[np.ndarray, float]:
    """Of :func:`segments`: P(z = 1), and the mean of the level, by a sum over z of Gaussians."""
    states = (np.arange(2 ** len(y))[:, None] >> np.arange(len(y))) & 1
    prior = 0.7 * (states[:, 1:] == states[:, :-1]).sum(1)
    precision = 1 / 4 + states.sum(1)
    mean = (states @ y + 1 / 4) / precision
    log = prior - 0.5 * (y**2 * (1 - states)).sum(1)
    log += -0.5 * ((states * y**2).sum(1) + 1 / 4 - precision * mean**2) - 0.5 * np.log(precision)
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    return weight @ states, float(weight @ mean)


def segments(y: Any) -> None:
    """A chain of two states, one of them of unknown level."""
    level = numpyro.sample("level", dist.Normal(1.0, 2.0))
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand([len(y)]).to_event(1))
    numpyro.factor("chain", 0.7 * (z[1:] == z[:-1]).sum())
    numpyro.sample("y", dist.Normal(z * level, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize("tempering", often([None, (0.4, 0.7, 1.0)], None))
def test_a_whole_posterior_by_one_block(tempering: Any) -> None:
    """Discrete and continuous sites together, against enumeration, with tempered transitions and without."""
    y = np.array([0.1, 2.2, 1.4, -0.3], np.float32)
    block = GibbsBlock.from_model(segments, ["z", "level"], y, tempering=tempering)
    block.verify(segments, y)

    def chain(key: Any) -> Any:
        start = {"z": jnp.zeros(4, int), "level": jnp.float32(0)}
        state = block.init(key, 0, start, (y,), {})
        state = jax.lax.fori_loop(0, 10, lambda _, s: block.sample(s, (y,), {}), state)
        add = lambda _, c: (lambda s: (s, c[1] + s.z["z"], c[2] + s.z["level"]))(block.sample(c[0], (y,), {}))
        return jax.lax.fori_loop(0, 20, add, (state, jnp.zeros(4), jnp.zeros(())))

    state, z, level = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), 1000))
    probability, mean = enumerated(y)
    assert_rows_law(z / 20, probability, comparisons=5)
    assert_rows_law(level[:, None] / 20, np.array([mean]), comparisons=5)
    assert int(state.kept.sum()) == 0
    taken = float(state.transitions.mean()) / 30
    assert taken == 0 if tempering is None else 0.3 < taken < 1
    told = block.get_diagnostics_str(jax.tree.map(lambda a: a[0], state))
    assert ("tempered transitions taken" in told) == (tempering is not None)


def test_continuous_sites_alone_and_numpyro_runs_the_block() -> None:
    block = GibbsBlock.from_model(walk, ["x"], Y23)
    assert repr(block).endswith("Gaussian 'x'") and block.layers == {}
    mcmc = MCMC(block, num_warmup=0, num_samples=2000, progress_bar=False)
    mcmc.run(jax.random.key(0), Y23)  # a block of all sites begins at a draw of the prior
    law = block.conditional("x", {"x": jnp.zeros((2, 3))})
    draws = np.asarray(mcmc.get_samples()["x"]).reshape(2000, 6)
    assert_law(draws.mean(0), law.mean, np.sqrt(np.asarray(law.variance) / 2000))


def test_one_trace_serves_all_draws() -> None:
    block = GibbsBlock.from_model(segments, ["z", "level"], Y5, tempering=(0.5, 1.0))
    state = block.init(jax.random.key(0), 0, {"z": jnp.zeros(5, int), "level": jnp.float32(0)}, (Y5,), {})
    step = jax.jit(lambda state, y: block.sample(state, (y,), {}))
    step(step(state, Y5), Y5 + 1)
    assert step._cache_size() == 1


def half_normal(y: Any) -> None:
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(0, scale).expand([5]).to_event(1), obs=y)


def softened(y: Any) -> None:
    x = numpyro.sample("x", dist.Normal(0, 1).expand([5]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.tanh(x), 1.0).to_event(1), obs=y)


def clipped(y: Any) -> None:
    """Quadratic but for values that no draw of the prior has."""
    x = numpyro.sample("x", dist.Normal(0, 1).expand([5]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.clip(x, -50, 50), 1.0).to_event(1), obs=y)


def quartic(y: Any) -> None:
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(x**2, 1.0).expand([5]).to_event(1), obs=y)


def summed_rates(y: Any) -> None:
    """log of a sum is no sum of logs."""
    rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Exponential(rate.sum()).expand([5]).to_event(1), obs=jnp.abs(y))


def rooted(y: Any) -> None:
    """The root of a square is no power of a real number."""
    x = numpyro.sample("x", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(jnp.sqrt(x**2), 1.0).expand([5]).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("model", "site", "told"),
    [
        (half_normal, "scale", r"'scale' is a sum of log x, x\^-2, x, x\^2, .* x and log x \(Gamma\)"),
        (softened, "x", "'x' enters the log density through 'tanh'"),
        (clipped, "x", "'x' enters the log density through '(max|clamp)'"),
        (quartic, "x", r"'x' is a sum of x, x\^2, x\^4, .* x and x\^2 \(Gaussian\)"),
        (summed_rates, "rate", "'rate' enters the log density through 'log'"),
        (rooted, "x", "'x' enters the log density through 'sqrt'"),
    ],
)
def test_what_is_no_family_is_refused_by_name(model: Any, site: str, told: str) -> None:
    with pytest.raises(IntractableError, match=told):
        GibbsBlock.from_model(model, [site], Y5)


def test_too_many_units_that_interact_are_refused() -> None:
    def model() -> None:
        x = numpyro.sample("x", dist.Normal(0, 1).expand([1100]).to_event(1))
        numpyro.sample("y", dist.Normal(x.sum(), 1.0), obs=0.0)

    with pytest.raises(IntractableError, match=r"1100 units of site 'x' interact"):
        GibbsBlock.from_model(model, ["x"])


def test_wrong_starts_and_names_are_told() -> None:
    block = GibbsBlock.from_model(mixture, ["z", "precision"], Y5)
    around = {"_gibbs_sites": {"means": jnp.zeros(3)}}
    start = {"z": jnp.zeros(5, int), "precision": jnp.array([1.0, -1.0, 1.0])}
    with pytest.raises(StateError, match=r"'precision' is .*expected positive"):
        block.init(jax.random.key(0), 0, start, (Y5,), around)
    with pytest.raises(StateError, match="unknown continuous site 'z'"):
        block.conditional("z", latents(mixture, (Y5,), 0))


def test_a_rate_of_counts_is_gamma() -> None:
    """Conjugate: a + sum y and b + sum of weights; a weight of 0 with no count says nothing."""

    def model(y: Any, w: Any) -> None:
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.5))
        each = numpyro.sample("each", dist.Gamma(3.0, rate).expand([3]).to_event(1))
        numpyro.sample("y", dist.Poisson(w * rate * each).to_event(1), obs=y)

    y, w = jnp.array([4.0, 0.0, 2.0]), jnp.array([0.5, 0.0, 3.0])
    block = GibbsBlock.from_model(model, ["rate", "each"], y, w)
    values = {"rate": jnp.array(0.7), "each": jnp.array([0.2, 1.3, 0.8])}
    rate, each = block.conditional("rate", values), block.conditional("each", values)
    total = values["each"].sum() + (w * values["each"]).sum()
    np.testing.assert_allclose((rate.concentration, rate.rate), (2 + 3 * 3 + 6, 1.5 + total), rtol=1e-5)
    np.testing.assert_allclose(each.concentration, 3 + y, rtol=1e-5)
    np.testing.assert_allclose(each.rate, 0.7 + 0.7 * w, rtol=1e-5)
