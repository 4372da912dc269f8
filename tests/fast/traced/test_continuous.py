# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Continuous sites of blocks made from models: conjugate conditionals against the model's density."""

from collections.abc import Callable
from typing import Any

from block_tools import run_chains
from model_cases import Y5, Y23, X, advance, latents
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import log_density
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.traced.block import Call
from helpers import assert_law, assert_rows_law, often


def mixture(y: Any) -> None:
    """Means and precisions of components."""
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
    numpyro.factor("steps", -0.5 * ((x - jnp.concatenate([start, x[:, :-1]], 1)) ** 2).sum())
    numpyro.sample("y", dist.Normal(x, 0.5).to_event(2), obs=y)


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
}


@pytest.mark.parametrize("name", often(CASES, "precision", "walk"))
def test_conditional_matches_the_joint_density_and_draws_follow_it(name: str) -> None:
    """log density - log conditional is one constant, wherever the site is."""
    model, args, site, family, size = CASES[name]
    block = GibbsBlock.from_model(model, [site], *args)
    assert [(c.family, c.most) for c in block.sweep.continuous] == [(family, size)]
    values = {name: jnp.asarray(v) for name, v in latents(model, args, 1).items()}
    value = values.pop(site)

    def gap(new: Any) -> Any:
        conditional = block.conditional(site, values | {site: value}, *args)
        flat = conditional.event_shape and conditional.event_shape != new.shape
        density = log_density(model, args, {}, values | {site: new})[0]
        mean, variance = (
            jnp.reshape(conditional.mean, new.shape),
            jnp.reshape(conditional.variance, new.shape),
        )
        covariance = conditional.covariance_matrix[0, 1] if size > 1 else jnp.zeros(())
        return density - conditional.log_prob(new.ravel() if flat else new).sum(), mean, variance, covariance

    shifts = np.array([1.0, 0.7, 1.3, 2.0], np.float32).reshape(-1, *[1] * value.ndim)
    gaps, mean, variance, covariance = jax.tree.map(np.asarray, jax.jit(jax.vmap(gap))(value * shifts))
    np.testing.assert_allclose(gaps, gaps[0], rtol=2e-4, atol=2e-3)
    result = advance(block, {site: value}, Call(values, args, {}))
    assert not result.degenerate.any()
    draws = result.z[site]
    assert_rows_law(draws, mean[0], comparisons=20)
    if family != "InverseGamma":  # whose square has no finite variance
        assert_rows_law(draws**2, variance[0] + mean[0] ** 2, comparisons=20)
    if size > 1:
        pair, exact = draws.reshape(4000, -1)[:, :2], covariance[0] + mean[0].ravel()[:2].prod()
        assert_rows_law(pair.prod(1, keepdims=True), np.array([exact]), comparisons=20)


def enumerated(y: np.ndarray) -> tuple[np.ndarray, float]:
    """P(z = 1) and the mean level of :func:`segments`, by a sum over z of Gaussians."""
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
def test_discrete_and_continuous_sites_have_their_posterior(tempering: Any) -> None:
    y = np.array([0.1, 2.2, 1.4, -0.3], np.float32)
    block = GibbsBlock.from_model(segments, ["z", "level"], y, tempering=tempering)

    def chain(key: Any) -> Any:
        start = {"z": jnp.zeros(4, int), "level": jnp.float32(0)}
        state = block.init(key, 0, start, (y,), {})

        def body(step: Any, carry: tuple) -> tuple:
            state = block.sample(carry[0], (y,), {})
            counted = step >= 10
            return state, carry[1] + counted * state.z["z"], carry[2] + counted * state.z["level"]

        return jax.lax.fori_loop(0, 30, body, (state, jnp.zeros(4), jnp.zeros(())))

    state, z, level = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), 1000))
    probability, mean = enumerated(y)
    assert_rows_law(np.asarray(z) / 20, probability, comparisons=5)
    assert_rows_law(np.asarray(level)[:, None] / 20, np.array([mean]), comparisons=5)
    assert int(np.sum(state.degenerate)) == 0
    accepted = float(np.mean(state.transitions)) / 30
    assert accepted == 0 if tempering is None else 0.3 < accepted < 1
    text = block.get_diagnostics_str(jax.tree.map(lambda a: a[0], state))
    assert ("tempered transitions" in text) == (tempering is not None)


def test_rate_of_counts_is_gamma() -> None:
    """A weight of 0 with no count adds nothing."""

    def model(y: Any, w: Any) -> None:
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.5))
        unit_rate = numpyro.sample("unit_rate", dist.Gamma(3.0, rate).expand([3]).to_event(1))
        numpyro.sample("y", dist.Poisson(w * rate * unit_rate).to_event(1), obs=y)

    y, w = np.float32([4.0, 0.0, 2.0]), np.float32([0.5, 0.0, 3.0])
    block = GibbsBlock.from_model(model, ["rate", "unit_rate"], y, w)
    values = {"rate": np.float32(0.7), "unit_rate": np.float32([0.2, 1.3, 0.8])}
    ask = lambda site: (lambda law: (law.concentration, law.rate))(block.conditional(site, values))
    rate, unit_rate = jax.jit(lambda: (ask("rate"), ask("unit_rate")))()
    total = values["unit_rate"].sum() + (w * values["unit_rate"]).sum()
    np.testing.assert_allclose(rate, (2 + 3 * 3 + 6, 1.5 + total), rtol=1e-5)
    np.testing.assert_allclose(unit_rate, (3 + y, 0.7 + 0.7 * w), rtol=1e-5)


def single_walk(y: Any) -> None:
    """A random walk seen through noise."""
    x = numpyro.sample("x", dist.Normal(0, 3).expand([3]).to_event(1))
    numpyro.factor("steps", -0.5 * (jnp.diff(x) ** 2).sum())
    numpyro.sample("y", dist.Normal(x, 0.5).to_event(1), obs=y)


@pytest.mark.slow
def test_numpyro_runs_a_block_of_all_sites() -> None:
    """It starts at a draw from the prior, and its draws are independent."""
    y = np.float32([0.3, -1.2, 0.8])
    block = GibbsBlock.from_model(single_walk, ["x"], y)
    assert repr(block).endswith("Gaussian 'x'") and block.layers == {}
    mcmc = run_chains(block, y, 1, 2000, num_warmup=0, chain_method="sequential")
    conditional = block.conditional("x", {"x": jnp.zeros(3)})
    draws = np.asarray(mcmc.get_samples()["x"])
    assert_law(draws.mean(0), conditional.mean, np.sqrt(np.asarray(conditional.variance) / 2000))
