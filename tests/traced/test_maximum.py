# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Maxima of likelihoods with discrete sites summed out, against closed forms and publications.

Tests traced/maximum.py.
"""

import itertools
from typing import Any

import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.util import log_density
import pytest
from scipy.special import logsumexp

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.errors import StateError

KEY = jax.random.key(0)
#: large earthquakes of each year from 1900 (Zucchini, MacDonald, Langrock 2016)
QUAKES = np.array(
    """
    13 14 8 10 16 26 32 27 18 32 36 24 22 23 22 18 25 21 21 14 8 11 14 23 18 17 19 20 22
    19 13 26 13 14 22 24 21 22 26 21 23 24 27 41 31 27 35 26 28 36 39 21 17 22 17 19 15
    34 10 15 22 18 15 20 15 22 19 16 30 27 29 23 20 16 21 21 25 16 18 15 18 14 10 15 8
    15 6 11 8 7 18 16 13 12 13 20 15 16 12 18 15 16 13 15 16 11 11
    """.split(),
    int,
)
#: answers of 216 respondents to four items, in the order of their binary numbers from
#: 1111 down (Stouffer and Toby 1951)
ROLES = [42, 23, 6, 25, 6, 24, 7, 38, 1, 4, 1, 6, 2, 9, 2, 20]


def visits(seen: Any) -> None:
    """Sites are occupied or not, and visited five times (MacKenzie et al. 2002)."""
    psi, p = (numpyro.sample(name, dist.Uniform(0, 1)) for name in ("psi", "p"))
    with numpyro.plate("sites", len(seen)):
        z = numpyro.sample("z", dist.Bernoulli(psi))
        prob = jnp.broadcast_to(z * p, (5, len(seen))).T
        numpyro.sample("seen", dist.Bernoulli(prob).to_event(1), obs=seen)


#: 30 detections at 18 of 39 sites; the likelihood depends on these numbers alone
SALAMANDERS = (np.arange(5) < np.repeat([0, 1, 2], [21, 6, 12])[:, None]).astype(int)


def test_occupancy_and_its_standard_errors() -> None:
    block = GibbsBlock.from_model(visits, ["z"], SALAMANDERS)
    result = block.maximise(rng_key=KEY, prior=False, num_starts=2)
    assert result.converged
    assert -2 * result.log_density == pytest.approx(161.7586, abs=1e-3)

    def loss(psi, p):
        missed = psi * (1 - p) ** 5 + 1 - psi
        seen = 18 * np.log(psi) + 30 * np.log(p) + 60 * np.log1p(-p)
        return -seen - 21 * np.log(missed)

    point = np.array([result.values["psi"], result.values["p"]], float)
    step = 1e-4 * np.eye(2)
    second = lambda a, b: sum(
        i * j * loss(*(point + i * a + j * b)) for i in (1, -1) for j in (1, -1)
    )
    hessian = np.array([[second(a, b) for b in step] for a in step]) / 4e-8
    errors = [result.standard_error["psi"], result.standard_error["p"]]
    np.testing.assert_allclose(point, [0.5946, 0.2587], atol=2e-4)
    exact = np.sqrt(np.diag(np.linalg.inv(hessian)))
    np.testing.assert_allclose(errors, exact, rtol=2e-3)


def counted(y: Any, seen: Any, counts: Any) -> None:
    p = numpyro.sample("p", dist.Beta(3, 5))
    with numpyro.plate("units", 3):
        with handlers.mask(mask=seen):
            z = numpyro.sample("z", dist.Categorical(jnp.ones(3) / 3))
        numpyro.factor("moves", jnp.where(seen, jnp.log(p) * z, 0))
        numpyro.sample("y", dist.Normal(jnp.where(seen, z, 0), 1.0), obs=y)
    numpyro.sample("counts", dist.Binomial(10, p), obs=counts)


def test_constants_of_masks_and_of_uniform_priors() -> None:
    y = np.array([0.3, 1.2, 0.8], np.float32)
    seen = np.array([True, False, True])
    args = y, seen, 4
    block = GibbsBlock.from_model(counted, ["z"], *args)
    values = {"p": jnp.array(0.4)}
    states = jnp.array(list(itertools.product(range(3), repeat=3)))
    at = lambda z: log_density(counted, args, {}, {**values, "z": z})[0]
    full = logsumexp(np.asarray(jax.vmap(at)(states), float))
    prior = float(dist.Beta(3, 5).log_prob(0.4))
    likelihood = full - prior - np.log(3)
    np.testing.assert_allclose(block.log_marginal(values), full, rtol=1e-6)
    np.testing.assert_allclose(block.log_likelihood(values), likelihood, rtol=1e-6)
    counting = block.log_likelihood(values, uniform=["z"])
    np.testing.assert_allclose(counting, likelihood + 2 * np.log(3), rtol=1e-6)
    with pytest.raises(StateError, match="'p'"):
        block.log_likelihood(values, uniform=["p"])


def test_missing_covariates_count_in_their_rows_alone() -> None:
    def model(x, seen, y):
        with numpyro.plate("rows", 4):
            x = numpyro.sample("x", dist.Bernoulli(0.3), obs=x, obs_mask=seen)
            numpyro.sample("y", dist.Bernoulli(jnp.array([0.2, 0.7])[x]), obs=y)

    x, y = np.array([[0, 1, 1, 0], [0, 1, 1, 0]])
    seen = np.array([True, False, True, True])
    block = GibbsBlock.from_model(model, ["x_unobserved"], x, seen, y)
    rows = [0.7 * 0.8, 0.7 * 0.2 + 0.3 * 0.7, 0.3 * 0.7, 0.7 * 0.8]
    np.testing.assert_allclose(block.log_likelihood({}), np.log(rows).sum(), rtol=1e-5)


def test_posterior_mode_is_of_the_natural_scale() -> None:
    def model(y):
        p = numpyro.sample("p", dist.Beta(3, 5))
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Binomial(20, p), obs=y)
        numpyro.sample("other", dist.Normal(1.0 * z, 1.0), obs=0.3)

    block = GibbsBlock.from_model(model, ["z"], jnp.asarray(10))
    result = block.maximise(jnp.asarray(12), rng_key=KEY, num_starts=2)
    mode = 14 / 26
    error = np.sqrt(mode * (1 - mode) / 26)
    np.testing.assert_allclose(result.values["p"], mode, rtol=1e-4)
    np.testing.assert_allclose(result.standard_error["p"], error, rtol=1e-3)
    expected = block.log_marginal(result.values, jnp.asarray(12))
    np.testing.assert_allclose(result.log_density, expected, rtol=1e-6)


def quakes(y: Any, num_states: int) -> None:
    """Start from the stationary distribution of the transitions."""
    rates = dist.Gamma(2, 0.1).expand([num_states]).to_event(1)
    rate = numpyro.sample("rate", rates)
    rows = dist.Dirichlet(jnp.ones(num_states)).expand([num_states]).to_event(1)
    rows = numpyro.sample("rows", rows)
    ones = jnp.ones((num_states, num_states))
    start = jnp.linalg.solve((jnp.eye(num_states) - rows + ones).T, ones[0])
    prior = dist.Categorical(ones[0] / num_states).expand([len(y)]).to_event(1)
    z = numpyro.sample("z", prior)
    log = jnp.log(start)[z[0]] + jnp.log(rows)[z[:-1], z[1:]].sum()
    numpyro.factor("chain", log)
    with numpyro.plate("years", len(y)):
        numpyro.sample("y", dist.Poisson(rate[z]), obs=y)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_states", "loss", "rates"),
    [(2, 342.3183, [15.472, 26.125]), (3, 329.4603, [13.146, 19.721, 29.714])],
)
def test_earthquakes(num_states: int, loss: float, rates: list) -> None:
    block = GibbsBlock.from_model(quakes, ["z"], QUAKES, num_states)
    result = block.maximise(rng_key=KEY, prior=False, uniform=["z"])
    assert result.converged
    assert -result.log_density == pytest.approx(loss, abs=2e-3)
    np.testing.assert_allclose(np.sort(result.values["rate"]), rates, atol=0.02)


def roles(y: Any) -> None:
    share = numpyro.sample("share", dist.Beta(1, 1))
    prob = numpyro.sample("prob", dist.Beta(1, 1).expand([2, 4]).to_event(2))
    with numpyro.plate("people", len(y)):
        z = numpyro.sample("z", dist.Bernoulli(share))
        numpyro.sample("y", dist.Bernoulli(prob[z]).to_event(1), obs=y)


@pytest.mark.nightly
def test_latent_classes() -> None:
    patterns = np.array(list(itertools.product((1, 0), repeat=4)))
    answers = np.repeat(patterns, ROLES, axis=0)
    block = GibbsBlock.from_model(roles, ["z"], answers)
    result = block.maximise(rng_key=KEY, prior=False)
    assert result.converged
    assert result.log_density == pytest.approx(-504.4677, abs=1e-3)
    share = float(result.values["share"])
    assert min(share, 1 - share) == pytest.approx(0.279, abs=2e-3)
