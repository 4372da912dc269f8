# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The exchange algorithm: posteriors against quadrature with the exact log Z, and
NumPyro's contract.

Tests ppl/exchange.py.
"""

import pickle
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
import pytest

import jax
import jax.numpy as jnp

from ebmpp import EnergyDistribution, Spin, exact, layered
from ebmpp.errors import IntractableError, UnmetError
from ebmpp.ppl import Exchange
from helpers import assert_rows_law, nightly, pair

GRAPH = layered(a=Spin(3), b=Spin(3))
CONNECTIONS = np.float32([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
X = {
    "a": np.float32([[1, 1, -1], [1, 1, 1], [-1, -1, -1]]),
    "b": np.float32([[1, 1, 1], [1, -1, 1], [-1, -1, 1]]),
}
UNIFORM = {"J": dist.Uniform(0, 1.5)}


# at module level, so that kernels pickle
def params_of(sites: Any, *_: Any, **__: Any) -> dict:
    """Params at a coupling J and a field."""
    field = jnp.broadcast_to(sites.get("field", 0.1), (3,))
    return {"a": field, "b": field, "a:b": sites["J"] * CONNECTIONS}


def observed(_: Any, x: Any, **__: Any) -> Any:
    return x


def kernel(prior: dict = UNIFORM, **options: Any) -> Exchange:
    return Exchange(GRAPH, prior, params_of, observed, **options)


def run(
    kernel: Any,
    draws: int,
    chains: int,
    *args: Any,
    num_warmup: int = 60,
    **options: Any,
) -> MCMC:
    settings = {
        "num_warmup": num_warmup,
        "chain_method": options.pop("method", "vectorized"),
    }
    mcmc = MCMC(
        kernel, num_samples=draws, num_chains=chains, progress_bar=False, **settings
    )
    mcmc.run(jax.random.key(1), *args, **options)
    return mcmc


def by_chain(mcmc: MCMC) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(v, float)
        for name, v in mcmc.get_samples(group_by_chain=True).items()
    }


def grid_weights(
    x: dict, *axes: np.ndarray, log_prior: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Points of a grid over (J, field) and their posterior probabilities."""
    grid = np.stack(np.meshgrid(*axes), -1).reshape(-1, len(axes)).astype(np.float32)

    def log_joint(point: Any) -> Any:
        params = params_of(dict(zip(("J", "field"), point, strict=False)))
        density = (
            GRAPH.log_density(params, x) if "b" in x else -GRAPH.free_energy(params, x)
        )
        return density.sum() - 3 * exact.log_partition(GRAPH, params)

    log = np.asarray(jax.jit(jax.vmap(log_joint))(grid), float)
    log = log + (log_prior(grid) if log_prior else 0.0)
    return grid, np.exp(log - log.max()) / np.exp(log - log.max()).sum()


COUPLINGS = np.linspace(0, 1.5, 402)[1:-1]


def assert_posterior(mcmc: MCMC, x: dict, couplings: np.ndarray = COUPLINGS) -> None:
    """Compare mean and variance of J; averages of chains are independent, however they mix."""
    draws, (grid, weight) = by_chain(mcmc)["J"], grid_weights(x, couplings)
    mean = weight @ grid
    moments = np.stack([draws.mean(1), ((draws - mean) ** 2).mean(1)], 1)
    assert_rows_law(moments, np.append(mean, weight @ (grid - mean) ** 2))


@pytest.mark.parametrize(
    ("auxiliary", "top", "chains"),
    [
        ("enumerate", 1.5, 60),
        nightly("coupling_from_the_past", 0.4, 30),
        nightly("random_cluster", 1.5, 20),
    ],
)
def test_posterior_matches_quadrature(auxiliary: str, top: float, chains: int) -> None:
    exchange = kernel({"J": dist.Uniform(0, top)}, auxiliary=auxiliary)
    mcmc = run(exchange, 120, chains, X)
    assert_posterior(mcmc, X, COUPLINGS * top / 1.5)
    state = mcmc.last_state
    accepted = np.asarray(state.mean_accept_prob).mean()
    assert int(state.failures.sum()) == 0 and 0.3 < accepted < 0.9
    assert f"acc. prob={accepted:.2f}" in exchange.get_diagnostics_str(state)
    steps = np.asarray(state.step_size)
    assert steps.std() > 0 and (steps != 0.5).all()  # every chain adapted its own


def test_copy_resumes_exactly_from_initial_values() -> None:
    exchange = pickle.loads(pickle.dumps(kernel()))
    assert not hasattr(exchange, "model")
    step = jax.jit(lambda state: exchange.sample(state, (X,), {}))
    states = [exchange.init(jax.random.key(0), 4, {"J": np.float32(0.2)}, (X,), {})]
    assert np.isclose(states[0].z["J"], 0.2)
    for _ in range(8):
        states.append(step(states[-1]))
    sizes = [float(state.step_size) for state in states]
    # fixed after the warm-up
    assert len(set(sizes[:5])) > 1 and len(set(sizes[4:])) == 1
    resumed = pickle.loads(pickle.dumps(states[5]))
    for state in states[6:]:
        resumed = step(resumed)
        np.testing.assert_array_equal(resumed.z["J"], state.z["J"])


def frustrated(sites: Any, *_: Any) -> dict:
    """Attractive where J is at least 0."""
    weight = np.ones((2, 2), np.float32) + (sites["J"] - 1) * np.float32(
        [[1, 0], [0, 0]]
    )
    return {"a": np.zeros(2), "b": np.zeros(2), "a:b": weight}


@pytest.mark.nightly
def test_failed_auxiliary_draw_is_reported() -> None:
    x, prior = {name: v[:, :2] for name, v in X.items()}, {"J": dist.Uniform(-1, 1)}
    method = "coupling_from_the_past"
    exchange = Exchange(
        pair(Spin(2), Spin(2)), prior, frustrated, observed, auxiliary=method
    )
    with pytest.warns(UserWarning, match=r"1 chain\(s\) are NaN from here on"):
        mcmc = run(exchange, 30, 1, x, num_warmup=5, init_params={"J": np.float32(0.1)})
        jax.effects_barrier()
    assert np.isnan(mcmc.get_samples()["J"][-1]) and int(mcmc.last_state.failures) == 1
    assert "1 FAILED auxiliary draws" in exchange.get_diagnostics_str(mcmc.last_state)
    with pytest.raises(IntractableError, match="not attractive"):
        exchange.init(jax.random.key(0), 4, {"J": np.float32(-0.5)}, (x,), {})


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["latents", "sweeps"])
def test_posterior_with_latents_or_sweeps_matches_quadrature(kind: str) -> None:
    """Latents are summed out; and many sweeps from the data are approximate, but close."""
    x = {"a": X["a"]} if kind == "latents" else X
    if kind == "latents":
        exchange = kernel()
    else:
        with pytest.warns(
            UserWarning, match=r"approximate .double Metropolis-Hastings"
        ):
            exchange = kernel(auxiliary=60)
    assert_posterior(run(exchange, 150, 60, x), x)


@pytest.mark.nightly
def test_several_dimensions_and_a_prior_on_the_line() -> None:
    prior = {"J": dist.Normal(0.2, 0.3), "field": dist.Normal(0.0, 0.3)}
    exchange = kernel(prior)
    assert exchange.auxiliary == "enumerate" and exchange.target_accept == 0.234
    draws = by_chain(run(exchange, 200, 60, X, num_warmup=100))
    log_prior = lambda grid: -0.5 * (((grid - [0.2, 0.0]) / 0.3) ** 2).sum(1)
    axes = np.linspace(-1.2, 1.6, 61), np.linspace(-1.4, 1.4, 61)
    grid, weight = grid_weights(X, *axes, log_prior=log_prior)
    assert_rows_law(
        np.stack([draws["J"].mean(1), draws["field"].mean(1)], 1), weight @ grid
    )


@pytest.mark.nightly
def test_block_of_gibbs_beside_nuts() -> None:
    """y is J plus an offset of unit variance, plus noise."""

    def model(x: Any, y: Any) -> None:
        coupling = numpyro.sample("J", UNIFORM["J"])
        offset = numpyro.sample("offset", dist.Normal())
        with numpyro.plate("rows", 3):
            numpyro.sample(
                "x",
                EnergyDistribution(GRAPH, params_of({"J": coupling}), blocks="all"),
                obs=x,
            )
        numpyro.sample("y", dist.Normal(coupling + offset, 0.1), obs=y)

    def likelihood(sites: Any, x: Any, y: Any) -> Any:
        return dist.Normal(sites["J"] + sites["offset"], 0.1).log_prob(y)

    data = lambda sites, x, y: {"a": x[:, :3], "b": x[:, 3:]}
    block = Exchange(GRAPH, UNIFORM, params_of, data, log_likelihood=likelihood)
    kernel = Gibbs([(block, ["J"]), (NUTS(model), None)])
    x = np.concatenate([X["a"], X["b"]], 1)
    draws = by_chain(run(kernel, 80, 40, x, 1.5, method=jax.vmap))
    log_prior = lambda grid: -0.5 * (1.5 - grid[:, 0]) ** 2 / 1.01
    grid, weight = grid_weights(X, COUPLINGS, log_prior=log_prior)
    mean = weight @ grid[:, 0]
    means = np.stack([draws["J"].mean(1), draws["offset"].mean(1)], 1)
    assert_rows_law(means, np.array([mean, (1.5 - mean) / 1.01]))


@pytest.mark.nightly
def test_start_without_auxiliary_draws_is_refused() -> None:
    prior, options = (
        {"J": dist.Uniform(0, 9)},
        {"auxiliary": "coupling_from_the_past", "max_sweeps": 4},
    )
    with pytest.raises(UnmetError, match=r"not met after 4 sweeps"):
        kernel(prior, **options).init(
            jax.random.key(0), 1, {"J": np.float32(6.0)}, (X,), {}
        )
