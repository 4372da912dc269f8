# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A lattice seen through noise as a NumPyro model, blocks that sample it, and its exact
posterior."""

from functools import cache
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import HMC, MCMC

import jax
import jax.numpy as jnp

from ebmpp import Bias, Bilinear, EnergyDistribution, FactorGraph, GibbsBlock, Spin
from ebmpp.ppl import Conjugate, Layout
from helpers import assert_rows_law

SHAPE, COUPLING = (2, 3), 0.35
NOISY = np.array([[0.9, -0.3, 0.4], [0.1, -0.6, -1.1]], np.float32)

_POSITIONS = np.stack(np.divmod(np.arange(6), 3), 1)
ADJACENCY = (np.abs(_POSITIONS[:, None] - _POSITIONS).sum(-1) == 1).astype(np.float32)
EVEN = (_POSITIONS.sum(1) % 2 == 0).reshape(SHAPE)
WEIGHTS = COUPLING * ADJACENCY[np.ix_(EVEN.ravel(), ~EVEN.ravel())]


@cache
def lattice() -> tuple[FactorGraph, Layout]:
    """Two blocks of a chessboard, and their places in the image."""
    factors = [Bias("even"), Bias("odd"), Bilinear("even", "odd")]
    graph = FactorGraph({"even": Spin(3), "odd": Spin(3)}, factors=factors)
    return graph, Layout.at(graph, SHAPE, {"even": EVEN, "odd": ~EVEN})


# at module level, so that blocks pickle
def even_field(sites: dict, y: Any) -> Any:
    """Bias of the even units from the likelihood."""
    return y[..., EVEN] - sites["offset"]


def odd_field(sites: dict, y: Any) -> Any:
    """Bias of the odd units from the likelihood."""
    return y[..., ~EVEN] - sites["offset"]


def spin_block(**options: Any) -> GibbsBlock:
    """The lattice's posterior, declared as a graph."""
    graph, layout = lattice()
    params = {"even": even_field, "odd": odd_field, "even:odd": WEIGHTS}
    return GibbsBlock(graph, {"x": layout}, params, **options)


def binary_model(y: Any) -> None:
    """Pixels in {0, 1} under an Ising prior as a factor, seen through noise of unknown offset."""
    offset = numpyro.sample("offset", dist.Normal(0, 1))
    x = numpyro.sample("x", dist.Bernoulli(0.5).expand(SHAPE).to_event(2))
    spins = 2.0 * x - 1
    numpyro.factor(
        "prior",
        0.5 * COUPLING * jnp.einsum("i,ij,j", spins.ravel(), ADJACENCY, spins.ravel()),
    )
    numpyro.sample("y", dist.Normal(spins + offset, 1.0).to_event(2), obs=y)


def spin_model(y: Any) -> None:
    """Model with pixels in -1 and +1, whose prior is a distribution."""
    graph, layout = lattice()
    params = {
        "even": jnp.zeros(3),
        "odd": jnp.zeros(3),
        "even:odd": jnp.asarray(WEIGHTS),
    }
    offset = numpyro.sample("offset", dist.Normal(0, 1))
    x = numpyro.sample(
        "x", EnergyDistribution(graph, params, layout=layout, num_sweeps=1)
    )
    numpyro.sample("y", dist.Normal(x + offset, 1.0).to_event(2), obs=y)


def offset_conditional(sites: dict, y: Any) -> dist.Distribution:
    """Distribution of the offset given spins."""
    return dist.Normal((y - sites["x"]).sum() / 7, 7**-0.5)


def offset_step() -> Conjugate:
    """The offset's conjugate update."""
    return Conjugate("offset", offset_conditional, dist.Normal(0, 1))


def short_hmc(model: Any) -> HMC:
    """HMC with four fixed steps, which compiles fast."""
    fixed = {
        "adapt_step_size": False,
        "adapt_mass_matrix": False,
        "trajectory_length": None,
    }
    return HMC(model, step_size=0.25, num_steps=4, **fixed)


def run_chains(
    kernel: Any, y: Any = NOISY, chains: int = 200, draws: int = 30, **options: Any
) -> MCMC:
    """Run one chain per key, vectorised unless ``chain_method`` says otherwise."""
    key, fields = options.pop("key", jax.random.key(0)), options.pop("extra_fields", ())
    settings = {
        "num_warmup": 40,
        "chain_method": jax.vmap,
        "progress_bar": False,
    } | options
    mcmc = MCMC(kernel, num_samples=draws, num_chains=chains, **settings)
    mcmc.run(key, jnp.asarray(y), extra_fields=fields)
    return mcmc


def assert_posterior(mcmc: MCMC) -> None:
    """Compare with the exact posterior; means of chains are independent, whatever the
    autocorrelation."""
    draws = mcmc.get_samples(group_by_chain=True)
    probability, offset = exact_posterior()
    assert_rows_law(
        np.asarray(draws["x"] > 0, float).mean(1), probability, comparisons=7
    )
    assert_rows_law(np.asarray(draws["offset"]).mean(1), offset, comparisons=7)


def exact_posterior() -> tuple[np.ndarray, float]:
    """P(x = +1) of every pixel and the mean offset: enumeration, and the offset integrated out."""
    states = ((np.arange(64)[:, None] >> np.arange(6)) & 1) * 2.0 - 1
    rest = NOISY.ravel() - states
    log = 0.5 * COUPLING * np.einsum("ni,ij,nj->n", states, ADJACENCY, states)
    log += -0.5 * ((rest**2).sum(1) - rest.sum(1) ** 2 / 7)
    weight = np.exp(log) / np.exp(log).sum()
    return (weight @ (states > 0)).reshape(SHAPE), float(weight @ rest.sum(1) / 7)
