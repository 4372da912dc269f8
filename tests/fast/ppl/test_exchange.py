# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The exchange algorithm: posteriors against quadrature with the exact log Z, and NumPyro's contract."""

from functools import cache, partial
import pickle
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
import pytest

import jax
import jax.numpy as jnp

from ebmpp import EnergyDistribution, FactorGraph, Spin, exact, layered
from ebmpp.errors import IntractableError, UnmetError
from ebmpp.ppl import Exchange
from helpers import assert_law, assert_rows_law, pair, slow

# the two colours of a 2x4 board, and which squares touch
PLACES = np.stack(np.divmod(np.arange(8), 4), 1)
COLOUR = PLACES.sum(1) % 2
DISTANCE = np.abs(PLACES[COLOUR == 0][:, None] - PLACES[COLOUR == 1]).sum(-1)
TOUCH = (DISTANCE == 1).astype(np.float32)
FIELD = np.full(4, 0.1, np.float32)


@cache
def spins() -> FactorGraph:
    return layered(a=Spin(4), b=Spin(4))


@cache
def observations() -> dict[str, np.ndarray]:
    """Five rows at coupling 0.3, drawn by enumeration."""
    states = ((np.arange(256)[:, None] >> np.arange(8)) & 1) * 2.0 - 1
    log = states @ np.tile(FIELD, 2) + 0.3 * np.einsum("ni,ij,nj->n", states[:, :4], TOUCH, states[:, 4:])
    weight = np.exp(log) / np.exp(log).sum()
    rows = states[np.random.default_rng(5).choice(256, 5, p=weight)].astype(np.float32)
    return {"a": rows[:, :4], "b": rows[:, 4:]}


def lattice(sites: Any, *_: Any, **__: Any) -> dict:
    return {"a": FIELD, "b": FIELD, "a:b": sites["J"] * TOUCH}


def observed(_: Any, x: Any, **__: Any) -> Any:
    return x


def kernel(auxiliary: Any = "enumerate", top: float = 1.5, **options: Any) -> Exchange:
    return Exchange(spins(), {"J": dist.Uniform(0, top)}, lattice, observed, auxiliary=auxiliary, **options)


def sampler(kernel: Any, num_samples: int, chains: int = 1, num_warmup: int = 5, **options: Any) -> MCMC:
    options = {"chain_method": "vectorized", "progress_bar": False} | options
    return MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=chains, **options)


def quadrature(log_joint: Any, low: float, high: float) -> tuple[float, float]:
    """Mean and variance of one number from its unnormalised log density."""
    grid = np.linspace(low, high, 402)[1:-1].astype(np.float32)
    log = np.asarray(jax.jit(jax.vmap(log_joint))(grid), float)
    weight = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
    return weight @ grid, weight @ (grid - weight @ grid) ** 2


def assert_posterior(draws: Any, mean: Any, variance: Any) -> None:
    """Chains are independent, so their averages give the standard error, however they mix."""
    draws = np.asarray(draws, float)
    averages = np.stack([draws.mean(1), ((draws - mean) ** 2).mean(1)])
    error = averages.std(1, ddof=1) / np.sqrt(len(draws))
    assert_law(averages.mean(1), [mean, variance], error)


def log_likelihood(coupling: Any, x: dict) -> Any:
    params = lattice({"J": coupling})
    return spins().log_density(params, x).sum() - 5 * exact.log_partition(spins(), params)


@pytest.mark.parametrize(
    ("auxiliary", "top", "chains"),
    [("enumerate", 1.5, 60), slow("coupling_from_the_past", 0.4, 30), slow("random_cluster", 1.5, 20)],
)
def test_posterior_matches_quadrature(auxiliary: str, top: float, chains: int) -> None:
    exchange, x = kernel(auxiliary, top), observations()
    mcmc = sampler(exchange, 120, chains, 60)
    mcmc.run(jax.random.key(1), x)
    assert_posterior(
        mcmc.get_samples(group_by_chain=True)["J"], *quadrature(partial(log_likelihood, x=x), 0, top)
    )
    assert int(mcmc.last_state.failures.sum()) == 0
    accepted = np.asarray(mcmc.last_state.mean_accept_prob).mean()
    assert 0.3 < accepted < 0.9 and f"acc. prob={accepted:.2f}" in exchange.get_diagnostics_str(
        mcmc.last_state
    )
    steps = np.asarray(mcmc.last_state.step_size)
    assert steps.std() > 0 and (steps != 0.5).all()  # every chain adapted its own


def test_copy_resumes_exactly_from_initial_values() -> None:
    exchange, x = pickle.loads(pickle.dumps(kernel())), observations()
    assert not hasattr(exchange, "model")
    step = jax.jit(lambda state: exchange.sample(state, (x,), {}))
    states = [exchange.init(jax.random.key(0), 4, {"J": np.float32(0.2)}, (x,), {})]
    assert np.isclose(states[0].z["J"], 0.2)
    for _ in range(8):
        states.append(step(states[-1]))
    sizes = [float(state.step_size) for state in states]
    assert len(set(sizes[:5])) > 1 and len(set(sizes[4:])) == 1  # fixed after the warm-up
    resumed = pickle.loads(pickle.dumps(states[5]))
    for state in states[6:]:
        resumed = step(resumed)
        np.testing.assert_array_equal(resumed.z["J"], state.z["J"])


# -- auxiliary draws that fail ---------------------------------------------------------------------


def frustrated(sites: Any, *_: Any) -> dict:
    """Attractive where J is at least 0."""
    weight = np.ones((2, 2), np.float32) + (sites["J"] - 1) * np.float32([[1, 0], [0, 0]])
    return {"a": np.zeros(2), "b": np.zeros(2), "a:b": weight}


def test_failed_auxiliary_draw_is_reported() -> None:
    graph, x = pair(Spin(2), Spin(2)), {name: v[:, :2] for name, v in observations().items()}
    prior, method = {"J": dist.Uniform(-1, 1)}, "coupling_from_the_past"
    exchange = Exchange(graph, prior, frustrated, observed, auxiliary=method)
    mcmc = sampler(exchange, 30)
    with pytest.warns(UserWarning, match=r"1 chain\(s\) are NaN from here on"):
        mcmc.run(jax.random.key(0), x, init_params={"J": np.float32(0.1)})
        jax.effects_barrier()
    assert np.isnan(mcmc.get_samples()["J"][-1]) and int(mcmc.last_state.failures) == 1
    assert "1 FAILED auxiliary draws" in exchange.get_diagnostics_str(mcmc.last_state)
    with pytest.raises(IntractableError, match="not attractive"):
        sampler(exchange, 4).run(jax.random.key(0), x, init_params={"J": np.float32(-0.5)})


GRAPH = layered(a=Spin(3), b=Spin(3))


CONNECTIONS = np.float32([[1, 1, 0], [0, 1, 1], [1, 0, 1]])


X = {
    "a": np.float32([[1, 1, -1], [1, 1, 1], [-1, -1, -1]]),
    "b": np.float32([[1, 1, 1], [1, -1, 1], [-1, -1, 1]]),
}


UNIFORM = {"J": dist.Uniform(0, 1.5)}


def params_of(sites: Any, *_: Any, **__: Any) -> dict:
    """Params at a coupling J and a field."""
    field = jnp.broadcast_to(sites.get("field", 0.1), (3,))
    return {"a": field, "b": field, "a:b": sites["J"] * CONNECTIONS}


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latents", "sweeps"])
def test_posterior_with_latents_or_sweeps_matches_quadrature(kind: str) -> None:
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


@pytest.mark.slow
def test_several_dimensions_and_a_prior_on_the_line() -> None:
    prior = {"J": dist.Normal(0.2, 0.3), "field": dist.Normal(0.0, 0.3)}
    kernel = Exchange(GRAPH, prior, params_of, lambda _, x: x)
    assert kernel.auxiliary == "enumerate" and kernel.target_accept == 0.234
    draws = run(kernel, 200, 60, X, num_warmup=100)
    log_prior = lambda grid: -0.5 * (((grid - [0.2, 0.0]) / 0.3) ** 2).sum(1)
    axes = np.linspace(-1.2, 1.6, 61), np.linspace(-1.4, 1.4, 61)
    grid, weight = grid_weights(X, *axes, log_prior=log_prior)
    assert_rows_law(np.stack([draws["J"].mean(1), draws["field"].mean(1)], 1), weight @ grid)


@pytest.mark.slow
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
    block = Exchange(GRAPH, UNIFORM, params_of, data, log_likelihood=likelihood)
    kernel = Gibbs([(block, ["J"]), (NUTS(model), None)])
    x = np.concatenate([X["a"], X["b"]], 1)
    draws = run(kernel, 80, 40, x, 1.5, chain_method=jax.vmap)
    log_prior = lambda grid: -0.5 * (1.5 - grid[:, 0]) ** 2 / 1.01
    grid, weight = grid_weights(X, COUPLINGS, log_prior=log_prior)
    mean = weight @ grid[:, 0]
    means = np.stack([draws["J"].mean(1), draws["offset"].mean(1)], 1)
    assert_rows_law(means, np.array([mean, (1.5 - mean) / 1.01]))


@pytest.mark.slow
def test_start_without_auxiliary_draws_is_refused() -> None:
    prior, options = {"J": dist.Uniform(0, 9)}, {"auxiliary": "coupling_from_the_past", "max_sweeps": 4}
    kernel = Exchange(GRAPH, prior, params_of, lambda _, x: x, **options)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(UnmetError, match=r"not met after 4 sweeps"):
        mcmc.run(jax.random.key(0), X, init_params={"J": np.float32(6.0)})
