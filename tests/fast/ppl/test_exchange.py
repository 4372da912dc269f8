# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The exchange algorithm: posteriors against quadrature with the exact log Z, and NumPyro's contract."""

from functools import cache, partial
import pickle
from typing import Any

import numpy as np
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

import jax

from ebmpp import FactorGraph, Spin, exact, layered
from ebmpp.errors import IntractableError
from ebmpp.ppl import Exchange
from helpers import assert_law, pair, slow

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
    assert not hasattr(exchange, "model") and exchange.wrap_model(None) is exchange
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
