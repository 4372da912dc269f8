# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Models whose priors are energies with latents, and what enumeration says of them."""

from collections.abc import Callable
import dataclasses
from functools import lru_cache
from typing import Any

from model_cases import latents
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.util import log_density

import jax

import ebmpp
from ebmpp import EnergyDistribution, GibbsBlock
from ebmpp.ppl import Layout
from ebmpp.ppl.sites import Call

Y = np.array([0.9, -0.3, 0.4, 0.2], np.float32)
Y2 = np.stack([Y, -Y])


def strong(graph: ebmpp.FactorGraph, seed: int, size: float = 1.0) -> dict:
    """Params that tie units."""
    keys = jax.random.split(jax.random.key(seed), len(graph.param_shapes))
    each = zip(keys, graph.param_shapes.items(), strict=True)
    return {name: size * jax.random.normal(key, wanted.shape) for key, (name, wanted) in each}


RBM = ebmpp.layered(v=ebmpp.Spin(4), h=ebmpp.Spin(3))
PRIOR = strong(RBM, 0, 0.7)


def image(y: Any) -> None:
    """The prior of four pixels in noise of unknown precision."""
    precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
    z = numpyro.sample("z", EnergyDistribution(RBM, PRIOR, num_sweeps=1))
    numpyro.sample("y", dist.Normal(z, precision**-0.5).to_event(1), obs=y)


LABELS = ebmpp.layered(v=ebmpp.Categorical(3, 3), h=ebmpp.Categorical(2, 3))


def labels(y: Any) -> None:
    """Categorical units and latents."""
    levels = numpyro.sample("levels", dist.Normal(0, 1).expand([3]).to_event(1))
    z = numpyro.sample("z", EnergyDistribution(LABELS, strong(LABELS, 1), num_sweeps=1))
    numpyro.sample("y", dist.Normal(levels[z.astype(int)], 1.0).to_event(1), obs=y[:3])


DEEP = ebmpp.layered(v=ebmpp.Bernoulli(3), h=ebmpp.Bernoulli(2), top=ebmpp.Spin(3), g=ebmpp.Bernoulli(3))
PLACES = {"v": np.array([1, 1, 1, 0, 0, 0], bool), "top": np.array([0, 0, 0, 1, 1, 1], bool)}
LAYOUT = Layout.at(DEEP, (2, 3), {b: mask.reshape(2, 3) for b, mask in PLACES.items()})


def deep(y: Any) -> None:
    """Two layers of latents; every other layer is a part of the value, which two families share."""
    z = numpyro.sample("z", EnergyDistribution(DEEP, strong(DEEP, 2), layout=LAYOUT, num_sweeps=1))
    numpyro.sample("y", dist.Normal(z[0], 1.0).to_event(1), obs=y[:3])


def rows(y: Any, mask: Any) -> None:
    """A plate of two images, each with weights of its own, read from siblings; one prior is masked."""
    gain = numpyro.sample("gain", dist.HalfNormal(1.0).expand([2]).to_event(1))
    params = PRIOR | {"v:h": gain[:, None, None] * PRIOR["v:h"]}
    with numpyro.plate("images", 2), handlers.mask(mask=mask):
        z = numpyro.sample("z", EnergyDistribution(RBM, params, num_sweeps=1, log_partition=exact_partition))
    with numpyro.plate("images", 2), handlers.scale(scale=0.7):
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


def exact_partition(params: dict) -> Any:
    return ebmpp.exact.log_partition(RBM, params)


SMOOTH = ebmpp.FactorGraph(
    {"v": ebmpp.Spin(5)},
    {"h": ebmpp.Gaussian(2)},
    [
        ebmpp.Bias("v"),
        ebmpp.Bias("h"),
        ebmpp.Bilinear("v", "h"),
        ebmpp.Pairwise("v", np.array([[0, 1], [1, 2], [2, 3], [3, 4]])),
    ],
)


def smooth(y: Any) -> None:
    """Neighbours that like to be alike, all of them pulled by real-valued latents, in a plate."""
    with numpyro.plate("one", 1):
        z = numpyro.sample("z", EnergyDistribution(SMOOTH, strong(SMOOTH, 3, 0.7), num_sweeps=1))
    numpyro.sample("y", dist.Normal(z[0, :4], 1.0).to_event(1), obs=y)


def switched(y: Any) -> None:
    """A discrete sibling in the block chooses the prior's biases, whose log Z is known."""
    k = numpyro.sample("k", dist.Bernoulli(0.4))
    params = PRIOR | {"v": PRIOR["v"] + 1.5 * k, "h": PRIOR["h"] - k}
    z = numpyro.sample("z", EnergyDistribution(RBM, params, num_sweeps=1, log_partition=exact_partition))
    numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


@dataclasses.dataclass
class Prior:
    model: Callable[..., None]
    args: tuple
    latents: int
    layers: int = 1
    sites: tuple[str, ...] = ("z",)


CASES = {
    case.model.__name__: case
    for case in [
        Prior(image, (Y,), 3),
        Prior(labels, (Y,), 2),
        Prior(deep, (Y,), 5),
        Prior(rows, (Y2, np.array([True, False])), 6),
        Prior(smooth, (Y,), 2, 2),
        Prior(switched, (Y,), 3, 2, ("k", "z")),
    ]
}


@lru_cache
def made(name: str, **options: Any) -> tuple[Prior, Any, dict]:
    case = CASES[name]
    block = GibbsBlock.from_model(case.model, list(case.sites), *case.args, **options)
    return case, block, latents(case.model, case.args, 1)


def enumerated(name: str) -> tuple[dict, np.ndarray]:
    """All joint values of a block's sites, and their probabilities given the siblings: the slow sum."""
    case, block, values = made(name)
    shapes = {s: values[s].shape for s in case.sites}
    tables = {
        s: np.broadcast_to(v.table, (len(v.table), *shapes[s])) for s, v in block.posterior.values.items()
    }
    flat = np.concatenate([tables[s].reshape(len(tables[s]), -1) for s in case.sites], 1).T  # one K for all
    counts = np.stack(np.unravel_index(np.arange(flat.shape[1] ** len(flat)), flat.shape[1:] * len(flat)), 1)
    states, start, all_of = flat[np.arange(len(flat)), counts], 0, {}
    for s in case.sites:
        stop = start + int(np.prod(shapes[s]))
        all_of[s] = states[:, start:stop].reshape(-1, *shapes[s]).astype(values[s].dtype)
        start = stop
    density = lambda own: log_density(case.model, case.args, {}, {**values, **own})[0]
    log = np.asarray(jax.jit(jax.vmap(density))(all_of), float)
    weight = np.exp(log - log.max())
    return all_of, weight / weight.sum()


def around(name: str) -> tuple[dict, Call]:
    case, _, values = made(name)
    own = {s: values[s] for s in case.sites}
    return own, Call({n: v for n, v in values.items() if n not in own}, case.args, {})


def features(z: dict) -> np.ndarray:
    """Units, and products of all pairs."""
    flat = np.concatenate([np.asarray(v, float).reshape(len(v), -1) for v in z.values()], 1)
    pairs = flat[:, :, None] * flat[:, None]
    return np.concatenate([flat, pairs[:, *np.triu_indices(flat.shape[1], 1)]], 1)
