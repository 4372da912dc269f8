# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Energy-based distributions in NUTS, DiscreteHMCGibbs and variational inference."""

import itertools
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs, TraceGraph_ELBO
from oracle import enumerate_numpy
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Categorical, EnergyDistribution, Gaussian, Spin, exact
from ebmpp.families.spin import SpinDistribution
from helpers import assert_law, assert_rows_law, pair, random_params

pytestmark = pytest.mark.nightly

SPINS = pair(Spin(2), Spin(2))
X = np.float32([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
STATES = np.array(list(itertools.product([-1.0, 1.0], repeat=2)), np.float32)


def spin_params(coupling: Any) -> dict:
    return {
        "a": jnp.full(2, 0.1),
        "b": jnp.zeros(2),
        "a:b": coupling * jnp.ones((2, 2)),
    }


def log_z(params: Any) -> Any:
    return exact.log_partition(SPINS, params)


def run(
    model: Any, chains: int, *args: Any, kernel: Any = NUTS, draws: int = 100
) -> dict:
    method = "vectorized" if kernel is NUTS else jax.vmap
    options = {"num_warmup": 100, "num_samples": draws, "progress_bar": False}
    mcmc = MCMC(kernel(model), num_chains=chains, chain_method=method, **options)
    mcmc.run(jax.random.key(0), *args)
    return mcmc.get_samples(group_by_chain=True)


def test_nuts_samples_a_gaussian_block() -> None:
    graph = pair(Gaussian(2), Bernoulli(2))
    params = random_params(graph, 5) | {"a:b": np.float32([[1.5, -1.0], [0.5, 1.0]])}
    tilt = np.float32([0.3, -0.4])

    def model(params: Any) -> None:  # params as an argument: no gradient goes there
        x = numpyro.sample("x", EnergyDistribution(graph, params, num_sweeps=5))
        numpyro.factor("tilt", x @ tilt)  # as if the bias were larger

    expected = exact.moments(graph, params | {"a": params["a"] + tilt})["a"]
    assert_rows_law(np.asarray(run(model, 40, params)["x"]).mean(1), expected)


def intractable(x: Any) -> None:
    coupling = numpyro.sample("J", dist.Uniform(-1, 2))
    with numpyro.plate("rows", 3):
        law = EnergyDistribution(
            SPINS, spin_params(coupling), blocks="all", log_partition=log_z
        )
        numpyro.sample("x", law, obs=x)


def grid_posterior() -> tuple[float, float]:
    """Mean and variance of the coupling."""
    grid = np.linspace(-1, 2, 602)[1:-1].astype(np.float32)
    x = {"a": X[:, :2], "b": X[:, 2:]}
    log = jax.vmap(
        lambda j: SPINS.log_density(spin_params(j), x).sum() - 3 * log_z(spin_params(j))
    )(grid)
    weight = np.asarray(jax.nn.softmax(log), float)
    return weight @ grid, weight @ (grid - weight @ grid) ** 2


def test_nuts_with_log_partition_has_the_posterior() -> None:
    draws = np.asarray(run(intractable, 40, X)["J"])
    mean, variance = grid_posterior()
    assert_rows_law(
        np.stack([draws.mean(1), ((draws - mean) ** 2).mean(1)], 1),
        np.array([mean, variance]),
    )


def test_discrete_hmc_gibbs_has_the_posterior() -> None:
    graph = pair(Categorical(1, 3), Bernoulli(2))
    params = random_params(graph, 1)

    def model(y: Any) -> None:
        scale = numpyro.sample("scale", dist.Uniform(0.5, 2))
        with numpyro.plate("rows", 3):
            x = numpyro.sample("x", EnergyDistribution(graph, params, num_sweeps=5))
        numpyro.sample("y", dist.Normal(x[:, 0], scale), obs=y)

    y = np.float32([0.2, 1.4, 2.2])
    draws = np.asarray(
        run(model, 60, y, kernel=lambda m: DiscreteHMCGibbs(NUTS(m)), draws=60)["x"]
    )[..., 0]
    states, probs, _ = enumerate_numpy(graph, params)
    values = np.array([x["a"][0] for x in states])
    probs = np.bincount(values.astype(int), probs)
    scale = np.linspace(0.5, 2, 401)
    table = np.exp(-0.5 * ((y[:, None] - np.arange(3)) / scale[:, None, None]) ** 2)
    table = probs * table / scale[:, None, None]  # (scales, rows, values)
    weight = table.sum(-1).prod(-1)
    expected = np.einsum(
        "s,srv->rv", weight / weight.sum(), table / table.sum(-1, keepdims=True)
    )
    assert_rows_law((draws[..., None] == np.arange(3)).mean(1), expected)


def test_gradient_of_a_guide_is_unbiased() -> None:
    """Treated as reparametrised, the gradient would lack the whole score function."""
    units = dist.Independent(SpinDistribution(jnp.array([0.5, -1.0])), 1)
    law = lambda j: EnergyDistribution(SPINS, spin_params(j), log_partition=log_z)
    model, loss = lambda: numpyro.sample("x", units), TraceGraph_ELBO()

    def estimate(j: Any, key: Any) -> Any:
        return loss.loss(key, {"j": j}, model, lambda: numpyro.sample("x", law(j)))

    def bound(j: Any) -> Any:
        log = law(j).log_prob(STATES)
        return -(jnp.exp(log) * (units.log_prob(STATES) - log)).sum()

    keys = jax.random.split(jax.random.key(0), 4000)
    gradients = np.asarray(jax.jit(jax.vmap(jax.grad(estimate), (None, 0)))(0.4, keys))
    assert_law(
        gradients.mean(),
        jax.grad(bound)(0.4),
        gradients.std() / np.sqrt(len(gradients)),
    )
