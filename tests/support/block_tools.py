# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A lattice seen through noise as a NumPyro model, blocks that sample it, and its exact posterior."""

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
#: of the Gamma prior of the noise's precision
SHAPE_RATE = (2.0, 1.0)

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
    return y[..., EVEN] * sites["precision"]


def odd_field(sites: dict, y: Any) -> Any:
    """Bias of the odd units from the likelihood."""
    return y[..., ~EVEN] * sites["precision"]


def spin_block(**options: Any) -> GibbsBlock:
    """The lattice's posterior, declared as a graph."""
    graph, layout = lattice()
    params = {"even": even_field, "odd": odd_field, "even:odd": WEIGHTS}
    return GibbsBlock(graph, {"x": layout}, params, **options)


def binary_model(y: Any) -> None:
    """Pixels in {0, 1} under an Ising prior as a factor, seen through noise of unknown precision."""
    precision = numpyro.sample("precision", dist.Gamma(*SHAPE_RATE))
    x = numpyro.sample("x", dist.Bernoulli(0.5).expand(SHAPE).to_event(2))
    spins = 2.0 * x - 1
    numpyro.factor("prior", 0.5 * COUPLING * jnp.einsum("i,ij,j", spins.ravel(), ADJACENCY, spins.ravel()))
    numpyro.sample("y", dist.Normal(spins, precision**-0.5).to_event(2), obs=y)


def spin_model(y: Any) -> None:
    """The same model with pixels in -1 and +1, and the prior as a distribution."""
    graph, layout = lattice()
    params = {"even": jnp.zeros(3), "odd": jnp.zeros(3), "even:odd": jnp.asarray(WEIGHTS)}
    precision = numpyro.sample("precision", dist.Gamma(*SHAPE_RATE))
    x = numpyro.sample("x", EnergyDistribution(graph, params, layout=layout, num_sweeps=1))
    numpyro.sample("y", dist.Normal(x, precision**-0.5).to_event(2), obs=y)


def precision_conditional(sites: dict, y: Any) -> dist.Distribution:
    """Distribution of the precision given spins."""
    shape, rate = SHAPE_RATE
    return dist.Gamma(shape + y.size / 2, rate + 0.5 * ((y - sites["x"]) ** 2).sum())


def precision_step() -> Conjugate:
    """The precision's conjugate update."""
    return Conjugate("precision", precision_conditional, dist.Gamma(*SHAPE_RATE))


def short_hmc(model: Any) -> HMC:
    """HMC with four fixed steps, which compiles fast."""
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False, "trajectory_length": None}
    return HMC(model, step_size=0.25, num_steps=4, **fixed)


def run_chains(kernel: Any, y: Any = NOISY, chains: int = 200, draws: int = 30, **options: Any) -> MCMC:
    """Run one chain per key, vectorised unless ``chain_method`` says otherwise."""
    key, fields = options.pop("key", jax.random.key(0)), options.pop("extra_fields", ())
    settings = {"num_warmup": 40, "chain_method": jax.vmap, "progress_bar": False} | options
    mcmc = MCMC(kernel, num_samples=draws, num_chains=chains, **settings)
    mcmc.run(key, jnp.asarray(y), extra_fields=fields)
    return mcmc


def assert_posterior(mcmc: MCMC) -> None:
    """Compare with the exact posterior; means of chains are independent, whatever the autocorrelation."""
    draws = mcmc.get_samples(group_by_chain=True)
    probability, precision = exact_posterior()
    assert_rows_law(np.asarray(draws["x"] > 0, float).mean(1), probability, comparisons=7)
    assert_rows_law(np.asarray(draws["precision"]).mean(1), precision, comparisons=7)


def exact_posterior() -> tuple[np.ndarray, float]:
    """P(x = +1) of every pixel and the mean precision: enumeration, and the precision integrated out."""
    states = ((np.arange(64)[:, None] >> np.arange(6)) & 1) * 2.0 - 1
    shape, rate = SHAPE_RATE[0] + 3.0, SHAPE_RATE[1] + 0.5 * ((NOISY.ravel() - states) ** 2).sum(1)
    log_weight = 0.5 * COUPLING * np.einsum("ni,ij,nj->n", states, ADJACENCY, states) - shape * np.log(rate)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    return (weight @ (states > 0)).reshape(SHAPE), float(weight @ (shape / rate))
