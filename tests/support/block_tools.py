# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of blocks in NumPyro models: a lattice seen through noise, and its exact posterior."""

from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist

import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, EnergyDistribution, FactorGraph, GibbsBlock, Spin
from ebmpp.ppl import Conjugate, Layout

SHAPE, COUPLING = (2, 3), 0.35
_SITES = np.arange(6).reshape(SHAPE)
EVEN = np.indices(SHAPE).sum(0) % 2 == 0
NOISY = np.array([[0.9, -0.3, 0.4], [0.1, -0.6, -1.1]], np.float32)
#: of the Gamma prior of the noise's precision
SHAPE_RATE = (2.0, 1.0)


def adjacency() -> np.ndarray:
    """Of the lattice's sites, row by row."""
    made = np.zeros((6, 6))
    for a, b in [*zip(_SITES[:-1].ravel(), _SITES[1:].ravel(), strict=True)] + [
        *zip(_SITES[:, :-1].ravel(), _SITES[:, 1:].ravel(), strict=True)
    ]:
        made[a, b] = made[b, a] = 1
    return made


def lattice(family: type = Spin) -> tuple[FactorGraph, Layout, np.ndarray]:
    """Two blocks of a chessboard, where they are in the image, and the weights in -1 and +1."""
    graph = FactorGraph(
        {"even": family(3), "odd": family(3)}, factors=[Bias("even"), Bias("odd"), Bilinear("even", "odd")]
    )
    weights = COUPLING * adjacency()[np.ix_(_SITES[EVEN], _SITES[~EVEN])]
    return graph, Layout.at(graph, SHAPE, {"even": EVEN, "odd": ~EVEN}), weights.astype(np.float32)


def spin_field(sites: dict, y: Any, places: np.ndarray) -> Any:
    """What the likelihood adds to the biases of units in -1 and +1."""
    return y[..., places] * sites["precision"]


def even_field(sites: dict, y: Any) -> Any:
    """For the even units."""
    return spin_field(sites, y, EVEN)


def odd_field(sites: dict, y: Any) -> Any:
    """For the odd units."""
    return spin_field(sites, y, ~EVEN)


def spin_block(**options: Any) -> GibbsBlock:
    """The lattice's posterior, sites in -1 and +1."""
    graph, layout, weights = lattice()
    params = {"even": even_field, "odd": odd_field, "even:odd": weights}
    return GibbsBlock(graph, {"x": layout}, params, **options)


def model(y: Any) -> None:
    """Pixels in {0, 1} under an Ising prior, seen through noise of unknown precision."""
    precision = numpyro.sample("precision", dist.Gamma(*SHAPE_RATE))
    x = numpyro.sample("x", dist.Bernoulli(0.5).expand(SHAPE).to_event(2))
    spins = 2.0 * x - 1
    numpyro.factor("prior", 0.5 * COUPLING * jnp.einsum("i,ij,j", spins.ravel(), adjacency(), spins.ravel()))
    numpyro.sample("y", dist.Normal(spins, precision**-0.5).to_event(2), obs=y)


def spin_model(y: Any) -> None:
    """The same with pixels in -1 and +1, and the prior as a distribution."""
    graph, layout, weights = lattice()
    params = {"even": jnp.zeros(3), "odd": jnp.zeros(3), "even:odd": jnp.asarray(weights)}
    precision = numpyro.sample("precision", dist.Gamma(*SHAPE_RATE))
    x = numpyro.sample("x", EnergyDistribution(graph, params, layout=layout, num_sweeps=1))
    numpyro.sample("y", dist.Normal(x, precision**-0.5).to_event(2), obs=y)


def binary_even_field(sites: dict, y: Any) -> Any:
    """The same for units in {0, 1}."""
    return 2 * even_field(sites, y) - 2 * COUPLING * adjacency().sum(1)[EVEN.ravel()]


def binary_odd_field(sites: dict, y: Any) -> Any:
    """The same for units in {0, 1}."""
    return 2 * odd_field(sites, y) - 2 * COUPLING * adjacency().sum(1)[~EVEN.ravel()]


def binary_block(**options: Any) -> GibbsBlock:
    """The posterior of :func:`model`."""
    graph, layout, weights = lattice(Bernoulli)
    params = {"even": binary_even_field, "odd": binary_odd_field, "even:odd": 4 * weights}
    return GibbsBlock(graph, {"x": layout}, params, **options)


def precision_law(sites: dict, y: Any) -> dist.Distribution:
    """Of the precision given spins."""
    shape, rate = SHAPE_RATE
    return dist.Gamma(shape + y.size / 2, rate + 0.5 * ((y - sites["x"]) ** 2).sum())


def precision_step() -> Conjugate:
    """The precision's conjugate update."""
    return Conjugate("precision", precision_law, dist.Gamma(*SHAPE_RATE))


def exact_posterior(y: np.ndarray = NOISY) -> tuple[np.ndarray, float]:
    """P(x = +1) of every pixel and the mean precision: enumeration, and the precision integrated out."""
    states = ((np.arange(64)[:, None] >> np.arange(6)) & 1) * 2.0 - 1
    shape, rate = SHAPE_RATE[0] + 3.0, SHAPE_RATE[1] + 0.5 * ((y.ravel() - states) ** 2).sum(1)
    log_weight = 0.5 * COUPLING * np.einsum("ni,ij,nj->n", states, adjacency(), states) - shape * np.log(rate)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    return (weight @ (states > 0)).reshape(SHAPE), float(weight @ (shape / rate))
