# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of models whose priors are energies with latents, against enumeration."""

from typing import Any

from model_cases import advance
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from prior_cases import (
    CASES,
    Y,
    around,
    block_of,
    energy,
    enumerated,
    exact_partition,
    features,
    image,
    prior,
)
import pytest

import jax
import jax.numpy as jnp

from ebmpp import EnergyDistribution, Gaussian, GibbsBlock, Spin, layered
from ebmpp.core import random
from ebmpp.errors import IntractableError, StateError
from helpers import assert_rows_law, often


def exact_draws(name: str, num_draws: int = 4000, seed: int = 0) -> dict[str, np.ndarray]:
    states, probability = enumerated(name)
    index = np.random.default_rng(seed).choice(len(probability), num_draws, p=probability)
    return {site: values[index] for site, values in states.items()}


@pytest.mark.parametrize("name", often(CASES, "image"))
def test_step_preserves_the_posterior_with_latents_summed_out(name: str) -> None:
    case, block, _ = block_of(name)
    assert block.conditionals.num_layers == case.layers
    assert block.sweep.augmented.num_latents == case.latents
    start, (states, probability) = exact_draws(name), enumerated(name)
    moved = advance(block, start, around(name)[1], rows=True).z
    assert any((moved[s] != start[s]).mean() > 0.05 for s in case.sites)
    assert_rows_law(features({s: moved[s] for s in case.sites}), probability @ features(states))


@pytest.mark.parametrize("name", often(["image", "smooth"], "image"))
def test_coupled_step_preserves_both_marginals_and_equality(name: str) -> None:
    _, block, _ = block_of(name)
    call, (states, probability) = around(name)[1], enumerated(name)
    step = jax.jit(jax.vmap(lambda x, y, key: block.couple((x, call), (y, call), random.key_pair(key))))
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
        pytest.param("image", {"tempering": (0.3, 0.6, 1.0)}, marks=pytest.mark.slow),
        pytest.param("rows", {"tempering": (0.5, 1.0)}, marks=pytest.mark.slow),
        pytest.param("smooth", {"tempering": (0.5, 1.0)}, marks=pytest.mark.slow),
        pytest.param("smooth", {"clusters": True}, marks=pytest.mark.slow),
    ],
)
def test_options_preserve_the_distribution(name: str, options: dict) -> None:
    """Latents are heated with the block; clusters are of units given the latents."""
    case, (states, probability) = CASES[name], enumerated(name)
    block = GibbsBlock.from_model(case.model, list(case.sites), *case.args, **options)
    result = advance(block, exact_draws(name, 6000), around(name)[1], 6000, rows=True)
    if "tempering" in options:
        assert 0.02 < result.transitions.mean() < 0.98
    assert_rows_law(features(result.z), probability @ features(states))


def test_scaled_prior_is_refused() -> None:
    graph = layered(v=Spin(9), h=Spin(2))
    params = {name: np.ones(s.shape, np.float32) for name, s in graph.param_shapes.items()}

    def model(y: Any) -> None:
        with handlers.scale(scale=0.5):
            z = numpyro.sample("z", EnergyDistribution(graph, params, num_sweeps=1))
        numpyro.sample("y", dist.Normal(z[:4], 1.0).to_event(1), obs=y)

    with pytest.raises(IntractableError, match="'z' is scaled .* latents cannot be drawn along"):
        GibbsBlock.from_model(model, ["z"], Y)


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
    z = numpyro.sample("z", energy("spins", {"v": k * shift * jnp.ones(4)}, log_partition=log_partition))
    numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("sites", "message"),
    [(["k"], r"\['k'\].* doubly intractable"), (["z", "shift"], r"\['shift'\].* doubly")],
)
def test_sites_of_params_without_log_partition_are_refused(sites: list, message: str) -> None:
    with pytest.raises(IntractableError, match=message):
        GibbsBlock.from_model(shifted, sites, Y)


def test_site_of_params_with_log_partition_is_accepted() -> None:
    assert GibbsBlock.from_model(shifted, ["z"], Y).sweep.augmented is not None
    block = GibbsBlock.from_model(shifted, ["k", "z"], Y, log_partition=exact_partition)
    assert block.sweep.augmented is not None


def test_wrong_options_are_refused() -> None:
    with pytest.raises(IntractableError, match="clusters=True .* no two units interact"):
        GibbsBlock.from_model(image, ["z"], Y, clusters=True)

    def offset(y: Any) -> None:
        shift = numpyro.sample("shift", dist.Normal(0, 1))
        z = numpyro.sample("z", energy("spins", {"v": shift * jnp.ones(4)}, log_partition=0.0))
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)

    with pytest.raises(IntractableError, match="tempering heats the latents .* 'shift'"):
        GibbsBlock.from_model(offset, ["z", "shift"], Y, tempering=[0.5, 1.0])
    graph = layered(v=Gaussian(3), h=Spin(2))
    params = {"v": np.zeros(3), "h": np.zeros(2), "v:h": np.zeros((3, 2))}
    model = lambda: numpyro.sample("z", EnergyDistribution(graph, params))
    with pytest.raises(IntractableError, match="block 'v' of site 'z' is Gaussian"):
        GibbsBlock.from_model(model, ["z"])
