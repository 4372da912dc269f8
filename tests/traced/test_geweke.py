# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Geweke's test of the conjugate families that blocks made from models draw.

Chains start at draws of the prior and of data given these, and alternate between a
sweep given the data and new data. All states then follow the prior if the sweeps are
exact.

**References**

1. Geweke (2004), *Getting it right: joint distribution tests of posterior simulators*.
2. Gandy, Scott (2020), *Unit testing for MCMC and other Monte Carlo methods*.
"""

from functools import partial
from typing import Any

import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.traced.block import Call
from helpers import assert_rows_law

pytestmark = pytest.mark.nightly

CHAINS, SWEEPS, POINTS = 4000, 5, 4

#: how a binary unit selects one of two values
SELECTIONS = {
    "where": lambda z, pair: jnp.where(z, pair[1], pair[0]),
    "index": lambda z, pair: pair[z],
    "blend": lambda z, pair: pair[0] * (1 - z) + pair[1] * z,
}

#: by family: the prior of two values, the distribution of an observation given one of
#: them, and the prior's cumulative distribution function
FAMILIES: dict[str, tuple] = {
    "gaussian": (
        dist.Normal(1.0, 2.0),
        lambda x: dist.Normal(x, 1.5),
        stats.norm(1, 2).cdf,
    ),
    "gamma": (
        dist.Gamma(0.3, 0.5),
        dist.Poisson,
        stats.gamma(0.3, scale=2).cdf,
    ),
    "precision": (
        dist.Gamma(1.5, 2.0),
        lambda x: dist.Normal(0.4, x**-0.5),
        stats.gamma(1.5, scale=0.5).cdf,
    ),
    "inverse_gamma": (
        dist.InverseGamma(0.6, 0.8),
        lambda x: dist.Normal(0.4, jnp.sqrt(x)),
        stats.invgamma(0.6, scale=0.8).cdf,
    ),
    "beta": (dist.Beta(0.4, 2.0), dist.Bernoulli, stats.beta(0.4, 2).cdf),
    "dirichlet": (
        dist.Dirichlet(jnp.array([0.3, 1.0, 2.0])),
        lambda x: dist.Multinomial(2, x),
        lambda x: stats.beta(0.3, 3).cdf(x[..., 0]),
    ),
}

#: the same of priors that restrict a conditional to an interval
TRUNCATED: dict[str, tuple] = {
    "half_normal": (
        dist.HalfNormal(2.0),
        lambda x: dist.Normal(x, 1.5),
        stats.halfnorm(scale=2).cdf,
    ),
    "location": (
        dist.Uniform(-1.0, 2.0),
        lambda x: dist.Normal(x, 1.5),
        stats.uniform(-1, 3).cdf,
    ),
    "rate": (dist.Uniform(0.2, 3.0), dist.Poisson, stats.uniform(0.2, 2.8).cdf),
    "precision": (
        dist.Uniform(0.2, 3.0),
        lambda x: dist.Normal(0.4, x**-0.5),
        stats.uniform(0.2, 2.8).cdf,
    ),
    "scale": (
        dist.Uniform(0.0, 3.0),
        lambda x: dist.Normal(0.4, x),
        stats.uniform(0, 3).cdf,
    ),
}


def select(how: str, z: Any, pair: Any) -> Any:
    """Return one of two numbers, or of two rows, per unit."""
    z = z[..., None] if how != "index" and jnp.ndim(pair) > 1 else z
    return SELECTIONS[how](z, pair)


def families(how: str, data: Any, table: dict[str, tuple] = FAMILIES) -> None:
    for name, (prior, likelihood, _) in table.items():
        expanded = prior.expand([2]).to_event(1)
        pair = numpyro.sample(name, expanded)
        z = numpyro.sample(
            f"z_{name}", dist.Bernoulli(0.4).expand([POINTS]).to_event(1)
        )
        observed = None if data is None else data[f"y_{name}"]
        conditional = likelihood(select(how, z, pair))
        num_axes = len(conditional.batch_shape)
        numpyro.sample(f"y_{name}", conditional.to_event(num_axes), obs=observed)


def kalman(how: str, data: Any) -> None:
    """Return a chain inside of a scan, of which some states are seen."""
    rows = jnp.zeros(POINTS) if data is None else data["y_chain"]

    def step(last: Any, row: Any) -> Any:
        x = numpyro.sample("chain", dist.Normal(0.8 * last, 1.0))
        z = numpyro.sample("z_chain", dist.Bernoulli(0.4))
        mean = select(how, z, jnp.stack([jnp.zeros(()), x]))
        observed = None if data is None else row
        numpyro.sample("y_chain", dist.Normal(mean, 0.5), obs=observed)
        return x, None

    scan(step, jnp.zeros(()), rows)


def draw(model: Any, how: str, key: Any, values: dict) -> tuple[dict, dict]:
    """Draw latent sites that have no values, and data."""
    substituted = handlers.substitute(handlers.seed(model, key), data=values)
    trace = handlers.trace(substituted).get_trace(how, None)
    sites = {n: site["value"] for n, site in trace.items() if site["type"] == "sample"}
    data = {name: sites.pop(name) for name in list(sites) if name[:2] == "y_"}
    return sites, data


def regression(how: str, data: Any) -> None:
    """Return indicators of regressors, whose coefficients share an intercept."""
    design = jnp.asarray(np.random.default_rng(0).normal(size=(6, POINTS)))
    shift = numpyro.sample("shift", dist.Normal(1.0, 2.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.5).expand([POINTS]).to_event(1))
    z = numpyro.sample("z_beta", dist.Bernoulli(0.4).expand([POINTS]).to_event(1))
    zero = jnp.zeros(POINTS)
    mean = design @ jax.vmap(partial(select, how))(z, jnp.stack([zero, beta], 1))
    observed = None if data is None else data["y_beta"]
    numpyro.sample("y_beta", dist.Normal(mean + shift, 0.7).to_event(1), obs=observed)


def final_states(model: Any, how: str, collapse: bool = False) -> dict[str, np.ndarray]:
    """Return the last states of all chains."""
    sites, data = draw(model, how, jax.random.key(0), {})
    options = {"collapse": collapse, "sequential": collapse}
    block = GibbsBlock.from_model(model, sorted(sites), how, data, **options)

    def chain(key: Any) -> Any:
        start = draw(model, how, key, {})

        def body(step: Any, carry: tuple) -> tuple:
            sites, data = carry
            sweep_key, data_key = jax.random.split(jax.random.fold_in(key, step))
            words = jax.random.bits(sweep_key, (2,))
            result = block.advance(sites, Call({}, (how, data), {}), words)
            return draw(model, how, data_key, result.z)

        return jax.lax.fori_loop(0, SWEEPS, body, start)[0]

    keys = jax.random.split(jax.random.key(1), CHAINS)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(chain))(keys))


def assert_prior(uniform: np.ndarray, z: np.ndarray) -> None:
    """Assert that values are uniform and independent, also of units of probability 0.4."""
    columns = [uniform, uniform**2, uniform**8]
    exact = [0.5, 1 / 3, 1 / 9]
    pairs = uniform[:, :1] * uniform[:, 1:]
    joint = uniform[:, :1] * z
    values = np.concatenate([*columns, pairs, joint, z], 1)
    expected = np.repeat(exact, uniform.shape[1]).tolist()
    expected += [0.25] * pairs.shape[1] + [0.2] * joint.shape[1] + [0.4] * z.shape[1]
    assert_rows_law(values, np.array(expected), comparisons=100)


@pytest.mark.parametrize("collapse", [False, True])
@pytest.mark.parametrize("how", SELECTIONS)
def test_families_keep_the_prior(how: str, collapse: bool) -> None:
    states = final_states(families, how, collapse)
    for name, (*_, cdf) in FAMILIES.items():
        assert_prior(cdf(states[name]), states[f"z_{name}"])


@pytest.mark.parametrize("how", ["where", "index"])
def test_truncated_families_keep_the_prior(how: str) -> None:
    states = final_states(partial(families, table=TRUNCATED), how)
    for name, (*_, cdf) in TRUNCATED.items():
        assert_prior(cdf(states[name]), states[f"z_{name}"])


@pytest.mark.parametrize("collapse", [False, True])
@pytest.mark.parametrize("how", SELECTIONS)
def test_regressions_keep_the_prior(how: str, collapse: bool) -> None:
    states = final_states(regression, how, collapse)
    assert_prior(stats.norm.cdf(states["beta"] / 1.5), states["z_beta"])
    assert_rows_law(states["shift"][:, None] ** [1, 2], np.array([1.0, 5.0]))


@pytest.mark.parametrize("how", SELECTIONS)
def test_chains_inside_of_scans_keep_the_prior(how: str) -> None:
    states = final_states(kalman, how)
    x = states["chain"]
    steps = np.diff(x, axis=1, prepend=0) + 0.2 * np.roll(x, 1, 1) * (
        np.arange(POINTS) > 0
    )
    assert_prior(stats.norm.cdf(steps), states["z_chain"])
