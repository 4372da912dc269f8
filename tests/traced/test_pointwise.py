# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The log likelihood of each observation, with discrete sites summed out, against enumeration.

Tests traced/sweep/pointwise.py.
"""

from collections.abc import Callable
import itertools
from typing import Any

import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer.util import log_density
import pytest
from scipy.special import logsumexp

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.errors import IntractableError
from helpers import often

Y = np.array([0.3, -1.2, 0.8, 2.0], np.float32)
FAR = np.array([0.3, 90.0, 0.8, 2.0], np.float32)  # a weight of exp(-8000) and one of 1
ROWS = jnp.array([[0.9, 0.1], [0.3, 0.7]])
SEEN = np.array([True, True, False, True])
VALUES = {"m": jnp.array([0.0, 1.7])}


def means() -> Any:
    return numpyro.sample("m", dist.Normal(0, 5).expand([2]).to_event(1))


def mixture(y: Any) -> None:
    """One point is masked, and each has a second value that reads no unit."""
    m = means()
    with numpyro.plate("points", 4):
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        with handlers.mask(mask=SEEN):
            both = jnp.stack([m[z], jnp.zeros(4)], -1)
            value = jnp.stack([y, y], -1)
            numpyro.sample("y", dist.Normal(both, 1.0).to_event(1), obs=value)
    numpyro.sample("other", dist.Normal(m[0], 1.0), obs=0.4)


def chain(y: Any) -> None:
    """A chain of which steps read one unit, or two, without a batch."""
    m = means()
    z = numpyro.sample("z", dist.Categorical(jnp.ones(2) / 2).expand([4]).to_event(1))
    numpyro.factor("moves", jnp.log(ROWS)[z[:-1], z[1:]].sum())
    numpyro.sample("y", dist.Normal(m[z], 1.0).to_event(1), obs=y)
    numpyro.sample("steps", dist.Poisson(1.0 + z[1:] + 2.0 * z[:-1]), obs=np.arange(3))


def scanned(y: Any) -> None:
    m = means()

    def step(before, y):
        z = numpyro.sample("z", dist.Categorical(ROWS[before]))
        numpyro.sample("y", dist.Normal(m[z], 1.0), obs=y)
        return z, None

    scan(step, 0, y)


def series(y: Any) -> None:
    """Two chains in a plate, all steps of one observation of each."""
    m = means()
    with numpyro.plate("animals", 2):
        z = numpyro.sample("z", dist.Bernoulli(0.4).expand([2, 2]).to_event(1))
        numpyro.factor("pair", 0.7 * z[:, 0] * z[:, 1])
        fn = dist.Normal(m[z], 1.0).to_event(1)
        numpyro.sample("y", fn, obs=np.reshape(y, (2, 2)))


def scaled(y: Any) -> None:
    m = means()
    with numpyro.plate("points", 4), handlers.scale(scale=0.5):
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(m[z], 1.0), obs=y)


MODELS = {f.__name__: f for f in (mixture, chain, scanned, series, scaled)}


def by_enumeration(model: Callable, y: Any) -> dict[str, np.ndarray]:
    """Return log p(y) - log p(all y but one), from the model's own log density."""

    def at(z):
        values = {**VALUES, "z": jnp.reshape(z, shape)}
        inner = handlers.substitute(model, data=values)
        trace = handlers.trace(inner).get_trace(y)
        density, _ = log_density(model, (y,), {}, values)
        parts = {}
        for name, site in trace.items():
            if (
                site["type"] == "sample"
                and np.size(site["value"])
                and name not in values
            ):
                fn = site["fn"]
                fn = fn if fn.batch_shape else getattr(fn, "base_dist", fn)
                scale = 1.0 if site["scale"] is None else site["scale"]
                parts[name] = scale * fn.log_prob(site["value"])
        return density, parts

    shape = jnp.shape(
        handlers.trace(handlers.seed(model, 0)).get_trace(y)["z"]["value"]
    )
    states = jnp.array(list(itertools.product(range(2), repeat=4)))
    log, parts = jax.vmap(at)(states)
    log = np.asarray(log, float)
    result = {}
    for name, part in parts.items():
        without = np.expand_dims(log, tuple(range(1, part.ndim))) - np.asarray(part)
        result[name] = logsumexp(log) - logsumexp(without, 0)
    return result


@pytest.mark.parametrize("name", often(MODELS, "mixture", "chain"))
def test_each_observation_matches_enumeration(name: str) -> None:
    block = GibbsBlock.from_model(MODELS[name], ["z"], Y)
    exact = by_enumeration(MODELS[name], Y)
    result = block.pointwise(VALUES)
    assert set(result) == set(exact)
    for site, expected in exact.items():
        assert result[site].shape == expected.shape
        np.testing.assert_allclose(result[site], expected, rtol=1e-5, atol=2e-6)
    if name == "mixture":
        assert result["y"][2] == 0


def test_other_data_and_weights_below_the_smallest_float() -> None:
    block = GibbsBlock.from_model(mixture, ["z"], Y)
    exact = by_enumeration(mixture, FAR)["y"]
    np.testing.assert_allclose(block.pointwise(VALUES, FAR)["y"], exact, rtol=1e-4)


def test_without_discrete_sites_and_with_cycles() -> None:
    def line(y):
        m = numpyro.sample("m", dist.Normal(0, 1))
        with numpyro.plate("points", 4):
            numpyro.sample("y", dist.Normal(m, 1.0), obs=y)

    def ring(y):
        z = numpyro.sample("z", dist.Bernoulli(0.4).expand([4]).to_event(1))
        numpyro.factor("ring", (z * jnp.roll(z, 1)).sum())
        numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)

    result = GibbsBlock.from_model(line, ["m"], Y).pointwise({"m": 0.2})["y"]
    exact = -0.5 * (Y - 0.2) ** 2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(result, exact, rtol=1e-5)
    with pytest.raises(IntractableError, match="form a forest"):
        GibbsBlock.from_model(ring, ["z"], Y).pointwise({})
