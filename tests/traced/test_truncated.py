# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditionals restricted to the support of a prior: against quadrature, coupled, refused.

Tests traced/truncated.py.
"""

from collections.abc import Callable
from typing import Any

from model_cases import advance
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import log_density
import pytest
from scipy.integrate import cumulative_trapezoid

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.errors import IntractableError
from ebmpp.traced.block import Call
from ebmpp.traced.maximal import maximal
from ebmpp.traced.truncated import Truncated
from helpers import assert_law, assert_rows_law

INF = np.inf
NUM_DRAWS = 10_000

#: by family and power: a, n, and the interval of t
CASES: dict[str, tuple[str, int, list[tuple]]] = {
    "gaussian": (
        "Gaussian",
        1,
        [
            (0.0, 1.0, -1.0, 2.0),
            (-5.0, 1.0, 0.0, INF),
            (-1000.0, 1.0, 0.0, INF),  # a thousand standard deviations away
            (0.3, 1.0, -INF, 0.5),
            (0.0, 0.0, 2.0, 3.0),  # uniform
            (4.0, 0.0, -1.0, 2.0),  # exponential
            (3e5, 1e6, 0.0, 1.0),
        ],
    ),
    "gamma": (
        "Gamma",
        1,
        [
            (3.0, 1.0, -INF, 0.7),
            (3.0, 100.0, 0.0, 0.7),
            (0.01, 1.0, -7.0, 1.6),
            (1000.0, 10.0, -INF, 4.55),
            (1e5, 1.0, 11.51, 20.0),
        ],
    ),
    "scale": (
        "Gamma",
        -2,
        [
            (-0.5, 0.0, -9.2, INF),
            (4.5, 3.0, -9.2, INF),
            (0.5, 3.0, -INF, -1.0),
            (0.0, 1e-9, -2.2, INF),  # flat over 20 units
        ],
    ),
}


def shifts_and_integrals(name: str) -> tuple[Truncated, np.ndarray, np.ndarray]:
    """Return the distributions, and grids of t with the density relative to the mode."""
    family, power, cases = CASES[name]
    a, n, low, high = np.array(cases).T
    ends = np.stack([low, high])
    if family == "Gamma":
        ends = np.sort(np.exp(ends / power), 0)
    truncated = Truncated(family, power, *map(np.float32, (a, n, *ends)))
    peak = np.asarray(truncated.peak, float)
    low, high = np.sort(np.asarray(truncated.ends, float), 0)
    # of a scale that the density leaves, from both sides of the mode
    steps = np.geomspace(1e-9, 1e4, 100_001)[:, None]
    steps = np.concatenate([-steps[::-1], 0 * steps[:1], steps])
    width = np.asarray(truncated.integral, float)
    shift = np.clip(steps * width, low, high)
    growth = shift * (peak + shift / 2)
    if family == "Gamma":
        growth = np.exp(peak) * np.expm1(np.minimum(shift, 500.0))
    return truncated, shift, np.exp(a * shift - n * growth)


@pytest.mark.parametrize("name", CASES)
def test_draws_and_densities_match_quadrature(name: str) -> None:
    truncated, shift, density = shifts_and_integrals(name)
    below = cumulative_trapezoid(density, shift, axis=0, initial=0)
    np.testing.assert_allclose(truncated.integral, below[-1], rtol=2e-5)

    @jax.jit
    def draw(key: Any) -> Any:
        x = truncated.sample(key, (NUM_DRAWS,))
        return x, truncated.log_prob(x)

    x, log_prob = map(np.asarray, draw(jax.random.key(1)))
    low, high = map(np.asarray, truncated.bounds)
    assert (low <= x).all()
    assert (x <= high).all()
    t = x if truncated.family == "Gaussian" else truncated.power * np.log(x)
    drawn = t - np.asarray(truncated.peak)
    for i in range(shift.shape[1]):
        cdf = np.interp(drawn[:, i], shift[:, i], below[:, i] / below[-1, i])
        assert_rows_law(cdf[:, None] ** [1, 2, 8], np.array([1 / 2, 1 / 3, 1 / 9]), 45)
        expected = np.interp(drawn[:, i], shift[:, i], density[:, i]) / below[-1, i]
        if truncated.family == "Gamma":
            expected = expected * abs(truncated.power) / x[:, i]
        np.testing.assert_allclose(log_prob[:, i], np.log(expected), atol=5e-3)


def test_improper_densities_are_nan() -> None:
    a, n = np.float32([0.0, -1.0, 1.0, 1.0]), np.float32([1.0, 1.0, 0.0, -1.0])
    truncated = Truncated("Gamma", 1, a, n, 0.0, INF)
    assert np.isnan(jax.jit(truncated.sample)(jax.random.key(0))).all()


def test_coupled_draws_have_their_marginals_and_overlap() -> None:
    p, q = (Truncated("Gaussian", 1, a, 1.0, 0.0, INF) for a in (-1.0, 0.5))
    grid = np.linspace(0, 10, 20_001)
    densities = [np.exp(np.asarray(d.log_prob(grid), float)) for d in (p, q)]
    keys = jax.random.split(jax.random.key(2), NUM_DRAWS)
    x, y, valid = jax.jit(jax.vmap(lambda key: maximal(key, p, q)))(keys)
    assert valid.all()
    for draws, density in zip((x, y), densities):
        cdf = np.interp(draws, grid, cumulative_trapezoid(density, grid, initial=0))
        assert_rows_law(cdf[:, None] ** [1, 2], np.array([1 / 2, 1 / 3]), 6)
    overlap = np.trapezoid(np.minimum(*densities), grid)
    error = np.sqrt(overlap * (1 - overlap) / NUM_DRAWS)
    assert_law(np.mean(np.asarray(x == y)), overlap, error, 6)


def bounded(y: Any, counts: Any) -> None:
    """Sites of all forms, independent given the data."""

    def observe(name: str, conditional: Any, values: Any) -> None:
        numpyro.sample(f"y_{name}", conditional.expand([4]).to_event(1), obs=values)

    location = numpyro.sample("location", dist.Uniform(0.5, 3.0))
    observe("location", dist.Normal(location, 1.0), y)
    half = numpyro.sample("half", dist.HalfNormal(2.0).expand([4]).to_event(1))
    numpyro.sample("y_half", dist.Normal(half, 1.0).to_event(1), obs=y - 1)
    low, high = np.array([[-1.0, 0.5], [2.0, 2.0]], np.float32)
    two_sided = dist.TruncatedNormal(0.0, 1.0, low=low, high=high)
    numpyro.sample("two_sided", two_sided.to_event(1))
    one_sided = numpyro.sample("one_sided", dist.TruncatedNormal(0.0, 1.0, high=-1.0))
    observe("one_sided", dist.Normal(one_sided, 1.0), y)
    waiting = numpyro.sample("waiting", dist.Exponential(2.0))
    observe("waiting", dist.Normal(waiting, 1.5), y)
    numpyro.sample("spare", dist.Uniform(1000.0, 1001.0))
    scale = numpyro.sample("scale", dist.Uniform(0, 100))
    observe("scale", dist.Normal(0.3, scale), y)
    precision = numpyro.sample("precision", dist.Uniform(0.1, 0.9))
    observe("precision", dist.Normal(0.0, precision**-0.5), y)
    variance = numpyro.sample("variance", dist.Uniform(0.0, 1.5))
    observe("variance", dist.Normal(0.0, jnp.sqrt(variance)), y)
    rate = numpyro.sample("rate", dist.Uniform(0.0, 1.5))
    observe("rate", dist.Poisson(rate), counts)


DATA = np.float32([0.3, 1.2, -0.4, 0.8]), np.float32([2.0, 0.0, 4.0, 1.0])
SITES = {
    "location": 1.0,
    "half": np.ones(4),
    "two_sided": np.ones(2),
    "one_sided": -2.0,
    "waiting": 1.0,
    "spare": 1000.5,
    "scale": 1.0,
    "precision": 0.5,
    "variance": 1.0,
    "rate": 1.0,
}


def test_draws_of_a_model_follow_its_density() -> None:
    block = GibbsBlock.from_model(bounded, list(SITES), *DATA)
    start = {name: jnp.asarray(v, jnp.float32) for name, v in SITES.items()}
    result = advance(block, start, Call({}, DATA, {}))
    assert not result.degenerate.any()

    @jax.jit
    def densities(grids: dict) -> dict:
        def at(site: str, value: Any) -> Any:
            x = start[site]
            x = x.at[0].set(value) if x.ndim else value
            return log_density(bounded, DATA, {}, start | {site: x})[0]

        return {
            site: jax.vmap(lambda value, site=site: at(site, value))(grid)
            for site, grid in grids.items()
        }

    draws = {site: v.reshape(len(v), -1)[:, 0] for site, v in result.z.items()}
    grids = {}
    for site, x in draws.items():
        low, high = (np.ravel(end)[0] for end in block.info.bounds(site))
        low = max(low + 1e-6 * np.ptp(x), x.min() - np.ptp(x))
        grids[site] = np.linspace(low, min(high, x.max() + np.ptp(x)), 4001)
    for site, values in densities({k: np.float32(v) for k, v in grids.items()}).items():
        density = np.exp(np.asarray(values, float) - np.max(values))
        below = cumulative_trapezoid(density, grids[site], initial=0)
        cdf = np.interp(draws[site], grids[site], below / below[-1])
        assert_rows_law(cdf[:, None] ** [1, 2, 8], np.array([1 / 2, 1 / 3, 1 / 9]), 90)


def interacting() -> None:
    slopes = numpyro.sample("site", dist.HalfNormal(1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(slopes.sum(), 1.0), obs=0.3)


def probability() -> None:
    chance = numpyro.sample("site", dist.Uniform(0.2, 0.6))
    numpyro.sample("y", dist.Binomial(5, chance), obs=2)


def moving() -> None:
    high = numpyro.sample("high", dist.Gamma(1.0, 1.0))
    numpyro.sample("site", dist.Uniform(0.0, high))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (interacting, "at most 1"),
        (probability, "it has"),
        (moving, "other sites"),
    ],
)
def test_other_sites_are_refused(model: Callable, message: str) -> None:
    with pytest.raises(IntractableError, match=f"'site'.*{message}"):
        GibbsBlock.from_model(model, ["site"])


def test_truncated_sites_are_not_collapsed() -> None:
    def model() -> None:
        level = numpyro.sample("level", dist.HalfNormal(1.0))
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(level * z, 1.0), obs=0.3)

    with pytest.raises(IntractableError, match="collapse: sites .'level'."):
        GibbsBlock.from_model(model, ["level", "z"], collapse=["level"])
