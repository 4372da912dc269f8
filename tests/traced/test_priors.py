# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of models whose priors are energies with latents, against enumeration.

Tests traced/sweep/augmented.py, traced/sweep/posterior.py.
"""

from collections.abc import Callable
import dataclasses
from functools import cache
from typing import Any

import block_tools
from model_cases import Case, advance, brute_force, latents
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import Gibbs, HMCGibbs
from numpyro.infer.util import log_density
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    EnergyDistribution,
    FactorGraph,
    Gaussian,
    GibbsBlock,
    Spin,
    layered,
)
from ebmpp.contrib import ClusterBlock
from ebmpp.core import random
from ebmpp.errors import IntractableError, StateError
from ebmpp.ppl import (
    Conjugate,
    CoupledComposite,
    Layout,
    ModelBlock,
    composite_expectation,
    gibbs_fn,
)
from ebmpp.traced.block import Call
from helpers import assert_law, assert_rows_law, often

Y = np.array([0.9, -0.3, 0.4, 0.2], np.float32)
PLACES = {
    "v": np.array([1, 1, 1, 0, 0, 0], bool),
    "top": np.array([0, 0, 0, 1, 1, 1], bool),
}


def strong_params(graph: FactorGraph, seed: int, scale: float = 1.0) -> dict:
    """Params that tie units."""
    generator = np.random.default_rng(seed)
    normal = lambda shape: np.float32(scale * generator.normal(size=shape))
    return {
        name: normal(expected.shape) for name, expected in graph.param_shapes.items()
    }


@cache
def prior(name: str) -> tuple[FactorGraph, dict]:
    """A graph with latents, and its params."""
    chain = np.array([[0, 1], [1, 2], [2, 3], [3, 4]])
    factors = [
        Bias("v"),
        Bias("h"),
        ebmpp.Bilinear("v", "h"),
        ebmpp.Pairwise("v", chain),
    ]
    graph, scale = {
        "spins": lambda: (layered(v=Spin(4), h=Spin(3)), 0.7),
        "deep": lambda: (
            layered(v=Bernoulli(3), h=Bernoulli(2), top=Spin(3), g=Bernoulli(3)),
            1.0,
        ),
        "smooth": lambda: (
            FactorGraph({"v": Spin(5)}, {"h": Gaussian(2)}, factors),
            0.7,
        ),
    }[name]()
    return graph, strong_params(graph, 0, scale)


def energy(
    name: str, changed: dict | None = None, **options: Any
) -> EnergyDistribution:
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
    z = numpyro.sample(
        "z", energy("deep", layout=Layout.at(prior("deep")[0], (2, 3), places))
    )
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
    """A model, its arguments, and how many latents its block has."""

    model: Callable[..., None]
    args: tuple
    latents: int
    sites: tuple[str, ...] = ("z",)


CASES = {
    case.model.__name__: case
    for case in [
        PriorCase(image, (Y,), 3),
        PriorCase(deep, (Y,), 5),
        PriorCase(rows, (np.stack([Y, -Y]), np.array([True, False])), 6),
        PriorCase(smooth, (Y,), 2),
        PriorCase(switched, (Y,), 3, ("k", "z")),
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
        s: np.broadcast_to(v.table, (len(v.table), *shapes[s]))
        for s, v in block.posterior.values.items()
    }
    # one K for all
    flat = np.concatenate(
        [tables[s].reshape(len(tables[s]), -1) for s in case.sites], 1
    ).T
    counts = np.stack(
        np.unravel_index(
            np.arange(flat.shape[1] ** len(flat)), flat.shape[1:] * len(flat)
        ),
        1,
    )
    states, start, result = flat[np.arange(len(flat)), counts], 0, {}
    for s in case.sites:
        stop = start + int(np.prod(shapes[s]))
        result[s] = (
            states[:, start:stop].reshape(-1, *shapes[s]).astype(values[s].dtype)
        )
        start = stop
    density = lambda sites: log_density(case.model, case.args, {}, {**values, **sites})[
        0
    ]
    log = np.asarray(jax.jit(jax.vmap(density))(result), float)
    weight = np.exp(log - log.max())
    return result, weight / weight.sum()


def around(name: str) -> tuple[dict, Call]:
    """The block's sites and their surroundings."""
    case, _, values = block_of(name)
    sites = {s: values[s] for s in case.sites}
    return sites, Call(
        {n: v for n, v in values.items() if n not in sites}, case.args, {}
    )


def features(z: dict) -> np.ndarray:
    """Units, and products of all pairs."""
    flat = np.concatenate(
        [np.asarray(v, float).reshape(len(v), -1) for v in z.values()], 1
    )
    pairs = flat[:, :, None] * flat[:, None]
    return np.concatenate([flat, pairs[:, *np.triu_indices(flat.shape[1], 1)]], 1)


def exact_draws(
    name: str, num_draws: int = 4000, seed: int = 0
) -> dict[str, np.ndarray]:
    states, probability = enumerated(name)
    index = np.random.default_rng(seed).choice(
        len(probability), num_draws, p=probability
    )
    return {site: values[index] for site, values in states.items()}


@pytest.mark.parametrize("name", often(CASES, "image"))
def test_step_preserves_the_posterior_with_latents_summed_out(name: str) -> None:
    case, block, _ = block_of(name)
    assert block.conditionals.num_layers == 1  # all are forests given the latents
    assert block.sweep.augmented.num_latents == case.latents
    start, (states, probability) = exact_draws(name), enumerated(name)
    moved = advance(block, start, around(name)[1], rows=True).z
    assert any((moved[s] != start[s]).mean() > 0.05 for s in case.sites)
    assert_rows_law(
        features({s: moved[s] for s in case.sites}), probability @ features(states)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", often(["image", "smooth"], "image"))
def test_coupled_step_preserves_both_marginals_and_equality(name: str) -> None:
    _, block, _ = block_of(name)
    call, (states, probability) = around(name)[1], enumerated(name)
    step = jax.jit(
        jax.vmap(
            lambda x, y, key: block.couple((x, call), (y, call), random.key_pair(key))
        )
    )
    first, second = exact_draws(name), exact_draws(name, seed=1)
    keys = jax.random.split(jax.random.key(0), 4000)
    *pair, broken = step(first, second, keys)
    assert not broken.any()
    exact = probability @ features(states)
    for draws in pair:
        assert_rows_law(features(draws), exact, comparisons=2 * len(exact))
    x, y, _ = step(first, first, keys)
    assert np.array_equal(x["z"], y["z"])
    assert np.asarray(pair[0]["z"] == pair[1]["z"]).mean() > 0.5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            "image", {"tempering": (0.3, 0.6, 1.0)}, marks=pytest.mark.nightly
        ),
        pytest.param("rows", {"tempering": (0.5, 1.0)}, marks=pytest.mark.nightly),
        pytest.param("smooth", {"tempering": (0.5, 1.0)}, marks=pytest.mark.nightly),
        pytest.param("smooth", {"block": ClusterBlock}, marks=pytest.mark.nightly),
    ],
)
def test_options_preserve_the_distribution(name: str, options: dict) -> None:
    """Latents are heated with the block; clusters are of units given the latents."""
    case, (states, probability) = CASES[name], enumerated(name)
    kind = options.pop("block", ModelBlock)
    block = kind(case.model, list(case.sites), case.args, {}, **options)
    result = advance(block, exact_draws(name, 6000), around(name)[1], 6000, rows=True)
    if "tempering" in options:
        assert 0.02 < result.transitions.mean() < 0.98
    assert_rows_law(features(result.z), probability @ features(states))


def test_scaled_prior_is_refused() -> None:
    graph = layered(v=Spin(9), h=Spin(2))
    params = {
        name: np.ones(s.shape, np.float32) for name, s in graph.param_shapes.items()
    }

    def model(y: Any) -> None:
        with handlers.scale(scale=0.5):
            z = numpyro.sample("z", EnergyDistribution(graph, params, num_sweeps=1))
        numpyro.sample("y", dist.Normal(z[:4], 1.0).to_event(1), obs=y)

    with pytest.raises(IntractableError, match="all 9 units"):
        GibbsBlock.from_model(model, ["z"], Y)


@pytest.mark.nightly
def test_verify_refuses_another_prior() -> None:
    def model(y: Any) -> None:
        precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
        z = numpyro.sample("z", energy("spins", {"h": prior("spins")[1]["h"] + 1}))
        numpyro.sample("y", dist.Normal(z, precision**-0.5).to_event(1), obs=y)

    block = block_of("image")[1]
    block.verify(image, Y)
    with pytest.raises(StateError, match="log density changes by"):
        block.verify(model, Y)


def shifted(y: Any, log_partition: Any = None) -> None:
    """Sites on which the prior's biases depend."""
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    z = numpyro.sample(
        "z",
        energy("spins", {"v": k * shift * jnp.ones(4)}, log_partition=log_partition),
    )
    numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        (["k"], r"\['k'\].* doubly intractable"),
        (["z", "shift"], r"\['shift'\].* doubly"),
    ],
)
def test_sites_of_params_without_log_partition_are_refused(
    sites: list, message: str
) -> None:
    with pytest.raises(IntractableError, match=message):
        GibbsBlock.from_model(shifted, sites, Y)


def test_site_of_params_with_log_partition_is_accepted() -> None:
    assert GibbsBlock.from_model(shifted, ["z"], Y).sweep.augmented is not None
    block = GibbsBlock.from_model(shifted, ["k", "z"], Y, log_partition=exact_partition)
    assert block.sweep.augmented is not None


@pytest.mark.nightly
def test_wrong_options_are_refused() -> None:
    with pytest.raises(IntractableError, match="ClusterBlock"):
        ClusterBlock(image, ["z"], (Y,))

    def offset(y: Any) -> None:
        shift = numpyro.sample("shift", dist.Normal(0, 1))
        z = numpyro.sample(
            "z", energy("spins", {"v": shift * jnp.ones(4)}, log_partition=0.0)
        )
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)

    with pytest.raises(
        IntractableError, match="tempering heats the latents .* 'shift'"
    ):
        GibbsBlock.from_model(offset, ["z", "shift"], Y, tempering=[0.5, 1.0])
    graph = layered(v=Gaussian(3), h=Spin(2))
    params = {"v": np.zeros(3), "h": np.zeros(2), "v:h": np.zeros((3, 2))}
    model = lambda: numpyro.sample("z", EnergyDistribution(graph, params))
    with pytest.raises(IntractableError, match="site 'z' has block 'v', Gaussian"):
        GibbsBlock.from_model(model, ["z"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_conditionals_match_the_joint_density(name: str) -> None:
    case, block, values = block_of(name)
    block.verify(case.model, *case.args)
    exact = jax.jit(
        lambda v: brute_force(Case(case.model, case.sites, case.args, 0), block, v)
    )(values)
    reported = block.log_conditionals(values)
    for site in case.sites:
        count = exact[site].shape[-1]
        np.testing.assert_allclose(
            np.exp(reported[site])[..., :count], np.exp(exact[site]), atol=5e-5
        )


def image_posterior() -> tuple[np.ndarray, float]:
    """Means of pixels and of the precision of :func:`image`, which is integrated out."""
    states = ((np.arange(16)[:, None] >> np.arange(4)) & 1) * 2.0 - 1
    params = prior("spins")[1]
    log = states @ params["v"] + np.log(
        2 * np.cosh(params["h"] + states @ params["v:h"])
    ).sum(1)
    rate = 1.0 + 0.5 * ((Y - states) ** 2).sum(1)
    weight = np.exp(log - 4.0 * np.log(rate))
    weight /= weight.sum()
    return weight @ states, float(weight @ (4.0 / rate))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gibbs", "function", "both"])
def test_kernels_have_the_posterior(kind: str) -> None:
    """In Gibbs, by HMCGibbs, and with the precision in the block."""
    block, noise = block_of("image")[1], block_tools.short_hmc(image)
    kernels = {
        "gibbs": lambda: Gibbs([(block, ["z"]), (noise, None)]),
        "function": lambda: HMCGibbs(noise, gibbs_fn(block), ["z"]),
        "both": lambda: GibbsBlock.from_model(
            image, ["z", "precision"], Y, num_sweeps=2
        ),
    }
    draws = block_tools.run_chains(kernels[kind](), Y, 300).get_samples(
        group_by_chain=True
    )
    mean, precision = image_posterior()
    assert_rows_law(np.asarray(draws["z"], float).mean(1), mean, comparisons=5)
    assert_rows_law(
        np.asarray(draws["precision"], float).mean(1), precision, comparisons=5
    )


@pytest.mark.nightly
def test_coupled_composite_is_unbiased() -> None:
    conditional = lambda sites, y: dist.Gamma(
        4.0, 1.0 + 0.5 * ((y - sites["z"]) ** 2).sum()
    )
    steps = [
        block_of("image")[1],
        Conjugate("precision", conditional, dist.Gamma(2.0, 1.0)),
    ]
    options = {"rng_key": jax.random.key(3), "num_pairs": 2000, "k": 2, "m": 5}
    result = composite_expectation(
        CoupledComposite(steps), lambda sites: sites, Y, **options
    )
    assert set(result.value) == {"z", "precision"}  # latents are not part of the state
    mean, precision = image_posterior()
    assert result.num_unmet == 0 and (result.meeting_time > 1).any()
    assert_law(result.value["z"], mean, result.standard_error["z"], comparisons=5)
    assert_law(
        result.value["precision"],
        precision,
        result.standard_error["precision"],
        comparisons=5,
    )


@pytest.mark.nightly
def test_degenerate_latent_keeps_the_units_and_is_counted() -> None:
    def model(y: Any) -> None:
        bias = numpyro.sample("bias", dist.Normal(0, 1))
        biases = {"h": prior("spins")[1]["h"] + bias}
        z = numpyro.sample("z", energy("spins", biases, validate_args=False))
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)

    block = GibbsBlock.from_model(model, ["z"], Y)
    siblings = lambda bias: {"_gibbs_sites": {"bias": jnp.array(bias)}}
    begin = lambda bias: block.init(
        jax.random.key(0), 0, {"z": jnp.ones(4)}, (Y,), siblings(bias)
    )
    with pytest.raises(StateError, match="site 'z' is nan where it is -1"):
        begin(jnp.nan)
    state = block.sample(begin(0.3), (Y,), siblings(jnp.nan))
    assert int(state.degenerate) == 4 and (state.z["z"] == 1).all()
