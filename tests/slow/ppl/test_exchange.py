# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The exchange algorithm within Gibbs, in several dimensions, and by chain method."""

from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
import pytest

import jax
import jax.numpy as jnp

from ebmpp import EnergyDistribution, Spin, exact, layered
from ebmpp.errors import UnmetError
from ebmpp.ppl import Exchange
from helpers import assert_rows_law

GRAPH = layered(a=Spin(3), b=Spin(3))
TOUCH = np.float32([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
X = {
    "a": np.float32([[1, 1, -1], [1, 1, 1], [-1, -1, -1]]),
    "b": np.float32([[1, 1, 1], [1, -1, 1], [-1, -1, 1]]),
}
UNIFORM = {"J": dist.Uniform(0, 1.5)}


def params_of(sites: Any, *_: Any, **__: Any) -> dict:
    """Params at a coupling J and a field."""
    field = jnp.broadcast_to(sites.get("field", 0.1), (3,))
    return {"a": field, "b": field, "a:b": sites["J"] * TOUCH}


def run(kernel: Any, draws: int, chains: int, *args: Any, **options: Any) -> dict:
    settings = {"num_warmup": 60, "chain_method": "vectorized", "progress_bar": False} | options
    mcmc = MCMC(kernel, num_samples=draws, num_chains=chains, **settings)
    mcmc.run(jax.random.key(1), *args)
    return {name: np.asarray(v, float) for name, v in mcmc.get_samples(group_by_chain=True).items()}


def grid_weights(x: dict, *axes: np.ndarray, log_prior: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Points of a grid over (J, field) and their posterior probabilities."""
    grid = np.stack(np.meshgrid(*axes), -1).reshape(-1, len(axes)).astype(np.float32)

    def log_joint(point: Any) -> Any:
        params = params_of(dict(zip(("J", "field"), point, strict=False)))
        density = GRAPH.log_density(params, x) if "b" in x else -GRAPH.free_energy(params, x)
        return density.sum() - 3 * exact.log_partition(GRAPH, params)

    log = np.asarray(jax.jit(jax.vmap(log_joint))(grid), float)
    log = log + (log_prior(grid) if log_prior else 0.0)
    return grid, np.exp(log - log.max()) / np.exp(log - log.max()).sum()


COUPLINGS = np.linspace(0, 1.5, 402)[1:-1]


@pytest.mark.parametrize("kind", ["latents", "sweeps"])
def test_posterior_matches_quadrature(kind: str) -> None:
    """Latents are summed out; and many sweeps from the data are approximate, but close."""
    x = {"a": X["a"]} if kind == "latents" else X
    if kind == "latents":
        kernel = Exchange(GRAPH, UNIFORM, params_of, lambda _, x: x)
    else:
        with pytest.warns(UserWarning, match=r"approximate .double Metropolis-Hastings"):
            kernel = Exchange(GRAPH, UNIFORM, params_of, lambda _, x: x, auxiliary=60)
    draws = run(kernel, 150, 60, x)["J"]
    grid, weight = grid_weights(x, COUPLINGS)
    mean = weight @ grid
    moments = np.stack([draws.mean(1), ((draws - mean) ** 2).mean(1)], 1)
    assert_rows_law(moments, np.append(mean, weight @ (grid - mean) ** 2))


def test_several_dimensions_and_a_prior_on_the_line() -> None:
    prior = {"J": dist.Normal(0.2, 0.3), "field": dist.Normal(0.0, 0.3)}
    kernel = Exchange(GRAPH, prior, params_of, lambda _, x: x)
    assert kernel.auxiliary == "enumerate" and kernel.target_accept == 0.234
    draws = run(kernel, 200, 60, X, num_warmup=100)
    log_prior = lambda grid: -0.5 * (((grid - [0.2, 0.0]) / 0.3) ** 2).sum(1)
    axes = np.linspace(-1.2, 1.6, 61), np.linspace(-1.4, 1.4, 61)
    grid, weight = grid_weights(X, *axes, log_prior=log_prior)
    assert_rows_law(np.stack([draws["J"].mean(1), draws["field"].mean(1)], 1), weight @ grid)


def test_block_of_gibbs_beside_nuts() -> None:
    """y is J plus an offset of unit variance, plus noise."""

    def model(x: Any, y: Any) -> None:
        coupling = numpyro.sample("J", UNIFORM["J"])
        offset = numpyro.sample("offset", dist.Normal())
        with numpyro.plate("rows", 3):
            numpyro.sample("x", EnergyDistribution(GRAPH, params_of({"J": coupling}), blocks="all"), obs=x)
        numpyro.sample("y", dist.Normal(coupling + offset, 0.1), obs=y)

    def likelihood(sites: Any, x: Any, y: Any) -> Any:
        return dist.Normal(sites["J"] + sites["offset"], 0.1).log_prob(y)

    data = lambda sites, x, y: {"a": x[:, :3], "b": x[:, 3:]}
    block = Exchange(GRAPH, UNIFORM, params_of, data, log_weight=likelihood)
    kernel = Gibbs([(block, ["J"]), (NUTS(model), None)])
    x = np.concatenate([X["a"], X["b"]], 1)
    draws = run(kernel, 80, 40, x, 1.5, chain_method=jax.vmap)
    log_prior = lambda grid: -0.5 * (1.5 - grid[:, 0]) ** 2 / 1.01
    grid, weight = grid_weights(X, COUPLINGS, log_prior=log_prior)
    mean = weight @ grid[:, 0]
    means = np.stack([draws["J"].mean(1), draws["offset"].mean(1)], 1)
    assert_rows_law(means, np.array([mean, (1.5 - mean) / 1.01]))


def test_start_without_auxiliary_draws_is_refused() -> None:
    prior, options = {"J": dist.Uniform(0, 9)}, {"auxiliary": "coupling_from_the_past", "max_sweeps": 4}
    kernel = Exchange(GRAPH, prior, params_of, lambda _, x: x, **options)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(UnmetError, match=r"no auxiliary data.*not met after 4 sweeps"):
        mcmc.run(jax.random.key(0), X, init_params={"J": np.float32(6.0)})
