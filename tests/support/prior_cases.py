# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""NumPyro models whose priors are energies with latents, and their enumerated distributions."""

from collections.abc import Callable
import dataclasses
from functools import cache
from typing import Any

from model_cases import latents
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.util import log_density

import jax

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    EnergyDistribution,
    FactorGraph,
    Gaussian,
    GibbsBlock,
    Pairwise,
    Spin,
    layered,
)
from ebmpp.ppl import Layout
from ebmpp.traced.block import Call

Y = np.array([0.9, -0.3, 0.4, 0.2], np.float32)
PLACES = {"v": np.array([1, 1, 1, 0, 0, 0], bool), "top": np.array([0, 0, 0, 1, 1, 1], bool)}


def strong_params(graph: FactorGraph, seed: int, scale: float = 1.0) -> dict:
    """Params that tie units."""
    generator = np.random.default_rng(seed)
    normal = lambda shape: np.float32(scale * generator.normal(size=shape))
    return {name: normal(expected.shape) for name, expected in graph.param_shapes.items()}


@cache
def prior(name: str) -> tuple[FactorGraph, dict]:
    """A graph with latents, and its params."""
    chain = np.array([[0, 1], [1, 2], [2, 3], [3, 4]])
    factors = [Bias("v"), Bias("h"), Bilinear("v", "h"), Pairwise("v", chain)]
    graph, scale = {
        "spins": lambda: (layered(v=Spin(4), h=Spin(3)), 0.7),
        "deep": lambda: (layered(v=Bernoulli(3), h=Bernoulli(2), top=Spin(3), g=Bernoulli(3)), 1.0),
        "smooth": lambda: (FactorGraph({"v": Spin(5)}, {"h": Gaussian(2)}, factors), 0.7),
    }[name]()
    return graph, strong_params(graph, 0, scale)


def energy(name: str, changed: dict | None = None, **options: Any) -> EnergyDistribution:
    """One of the priors, some of its params replaced."""
    graph, params = prior(name)
    return EnergyDistribution(graph, params | (changed or {}), num_sweeps=1, **options)


def image(y: Any) -> None:
    """The prior of four pixels in noise of unknown precision."""
    precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
    z = numpyro.sample("z", energy("spins"))
    numpyro.sample("y", dist.Normal(z, precision**-0.5).to_event(1), obs=y)


def deep(y: Any) -> None:
    """Two layers of latents; every other layer is a part of the value, which two families share."""
    places = {block: mask.reshape(2, 3) for block, mask in PLACES.items()}
    z = numpyro.sample("z", energy("deep", layout=Layout.at(prior("deep")[0], (2, 3), places)))
    numpyro.sample("y", dist.Normal(z[0], 1.0).to_event(1), obs=y[:3])


def exact_partition(params: dict) -> Any:
    """log Z of the spins."""
    return ebmpp.exact.log_partition(prior("spins")[0], params)


def rows(y: Any, mask: Any) -> None:
    """A plate of two images whose weights depend on siblings; one prior is masked."""
    gain = numpyro.sample("gain", dist.HalfNormal(1.0).expand([2]).to_event(1))
    weights = {"v:h": gain[:, None, None] * prior("spins")[1]["v:h"]}
    with numpyro.plate("images", 2), handlers.mask(mask=mask):
        z = numpyro.sample("z", energy("spins", weights, log_partition=exact_partition))
    with numpyro.plate("images", 2), handlers.scale(scale=0.7):
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


def smooth(y: Any) -> None:
    """Neighbours that attract, with real-valued latents, in a plate."""
    with numpyro.plate("one", 1):
        z = numpyro.sample("z", energy("smooth"))
    numpyro.sample("y", dist.Normal(z[0, :4], 1.0).to_event(1), obs=y)


def switched(y: Any) -> None:
    """A discrete sibling in the block chooses the prior's biases, whose log Z is known."""
    k = numpyro.sample("k", dist.Bernoulli(0.4))
    params = prior("spins")[1]
    biases = {"v": params["v"] + 1.5 * k, "h": params["h"] - k}
    z = numpyro.sample("z", energy("spins", biases, log_partition=exact_partition))
    numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


@dataclasses.dataclass
class PriorCase:
    """A model, its arguments, and how many latents and layers its block has."""

    model: Callable[..., None]
    args: tuple
    latents: int
    layers: int = 1
    sites: tuple[str, ...] = ("z",)


CASES = {
    case.model.__name__: case
    for case in [
        PriorCase(image, (Y,), 3),
        PriorCase(deep, (Y,), 5),
        PriorCase(rows, (np.stack([Y, -Y]), np.array([True, False])), 6),
        PriorCase(smooth, (Y,), 2, 2),
        PriorCase(switched, (Y,), 3, 2, ("k", "z")),
    ]
}


@cache
def block_of(name: str, **options: Any) -> tuple[PriorCase, Any, dict]:
    """A case, its block, and values of all sites."""
    case = CASES[name]
    block = GibbsBlock.from_model(case.model, list(case.sites), *case.args, **options)
    return case, block, latents(case.model, case.args, 1)


@cache
def enumerated(name: str) -> tuple[dict, np.ndarray]:
    """All joint values of a block's sites, and their probabilities given the siblings."""
    case, block, values = block_of(name)
    shapes = {s: values[s].shape for s in case.sites}
    tables = {
        s: np.broadcast_to(v.table, (len(v.table), *shapes[s])) for s, v in block.posterior.values.items()
    }
    flat = np.concatenate([tables[s].reshape(len(tables[s]), -1) for s in case.sites], 1).T  # one K for all
    counts = np.stack(np.unravel_index(np.arange(flat.shape[1] ** len(flat)), flat.shape[1:] * len(flat)), 1)
    states, start, result = flat[np.arange(len(flat)), counts], 0, {}
    for s in case.sites:
        stop = start + int(np.prod(shapes[s]))
        result[s] = states[:, start:stop].reshape(-1, *shapes[s]).astype(values[s].dtype)
        start = stop
    density = lambda own: log_density(case.model, case.args, {}, {**values, **own})[0]
    log = np.asarray(jax.jit(jax.vmap(density))(result), float)
    weight = np.exp(log - log.max())
    return result, weight / weight.sum()


def around(name: str) -> tuple[dict, Call]:
    """The block's own sites and their surroundings."""
    case, _, values = block_of(name)
    own = {s: values[s] for s in case.sites}
    return own, Call({n: v for n, v in values.items() if n not in own}, case.args, {})


def features(z: dict) -> np.ndarray:
    """Units, and products of all pairs."""
    flat = np.concatenate([np.asarray(v, float).reshape(len(v), -1) for v in z.values()], 1)
    pairs = flat[:, :, None] * flat[:, None]
    return np.concatenate([flat, pairs[:, *np.triu_indices(flat.shape[1], 1)]], 1)
