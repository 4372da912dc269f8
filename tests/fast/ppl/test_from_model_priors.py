# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that follow from models whose priors are energies with latents: laws against enumeration."""

from typing import Any

from model_cases import Case, brute_force
import numpy as np
import numpyro.distributions as dist
from numpyro.infer import HMC, MCMC, Gibbs, HMCGibbs
from prior_cases import CASES, PRIOR, RBM, Y, around, enumerated, features, image, made
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.core import random
from ebmpp.ppl import Conjugate, CoupledComposite, composite_expectation, gibbs_fn
from helpers import assert_law, assert_rows_law, often, slow


@pytest.mark.parametrize("name", often(CASES, "image"))
def test_chains_have_the_posterior_with_latents_summed_out(name: str) -> None:
    """From one state, and one sweep from states drawn exactly by enumeration."""
    case, block, _ = made(name)
    assert block.conditionals.num_layers == case.layers
    assert block.sweep.augmented.num_latents == case.latents
    own, call = around(name)
    states, probability = enumerated(name)
    picked = np.random.default_rng(0).choice(len(probability), 4000, p=probability)
    exactly = {s: jnp.asarray(v[picked]) for s, v in states.items()}
    step = jax.vmap(lambda z, key: block.advance(z, call, random.key_pair(key)).z)
    moved = jax.jit(step)(exactly, jax.random.split(jax.random.key(1), 4000))
    assert any((np.asarray(moved[s]) != exactly[s]).mean() > 0.05 for s in case.sites)
    fixed = {s: jnp.broadcast_to(v, (4000, *v.shape)) for s, v in own.items()}
    keys = jax.random.split(jax.random.key(2), (80, 4000))
    chained = jax.jit(lambda z: jax.lax.scan(lambda z, k: (step(z, k), None), z, keys)[0])(fixed)
    exact = probability @ features(states)
    for found in (moved, chained):
        ordered = {s: found[s] for s in case.sites}
        assert_rows_law(features(ordered), exact, comparisons=2 * len(exact))


@pytest.mark.parametrize("name", often(CASES, "rows"))
def test_what_the_model_says_of_conditionals(name: str) -> None:
    case, block, values = made(name)
    block.verify(case.model, *case.args)
    exact = brute_force(Case(case.model, case.sites, case.args, 0), block, values)
    found = block.log_conditionals(values)
    for site in case.sites:
        count = exact[site].shape[-1]
        np.testing.assert_allclose(np.exp(found[site])[..., :count], np.exp(exact[site]), atol=5e-5)


def test_it_is_the_conditional_of_the_block_declared_by_hand() -> None:
    """Of pixels given the latents, and of the latents given the pixels."""
    _, block, values = made("image")
    field = lambda sites, y: PRIOR["v"] + y * sites["precision"]
    by_hand = GibbsBlock(RBM, {"z": "v"}, PRIOR | {"v": field})
    by_hand.verify(image, Y)
    own, call = around("image")
    bound = by_hand.within.bind(own, call)
    h = np.array([1.0, -1.0, 1.0])
    whole = own | {"h of z": h, "law of z": 1.0}
    table = block.conditionals.table(own, block.sweep.given(block.sweep.drawn, whole, call))
    eta = RBM.natural_parameters(bound.params, {"v": own["z"], "h": jnp.asarray(h)}, "v")
    np.testing.assert_allclose(table[:, 1] - table[:, 0], 2 * eta, rtol=1e-5)
    of_latents = RBM.natural_parameters(bound.params, {"v": own["z"], "h": jnp.asarray(h)}, "h")
    np.testing.assert_allclose(block.sweep.augmented.parameters(own, call)["h of z"], of_latents, rtol=1e-5)


def image_posterior() -> tuple[np.ndarray, float]:
    """Means of pixels and of the precision of :func:`image`, which is integrated out."""
    states = ((np.arange(16)[:, None] >> np.arange(4)) & 1) * 2.0 - 1
    prior = {name: np.asarray(v, float) for name, v in PRIOR.items()}
    log = states @ prior["v"] + np.log(2 * np.cosh(prior["h"] + states @ prior["v:h"])).sum(1)
    rate = 1.0 + 0.5 * ((Y - states) ** 2).sum(1)
    weight = np.exp(log - 4.0 * np.log(rate))
    weight /= weight.sum()
    return weight @ states, float(weight @ (4.0 / rate))


def of_chains(kernel: Any, method: Any = jax.vmap, chains: int = 300, draws: int = 30) -> dict:
    options = {"num_warmup": 40, "num_samples": draws, "progress_bar": False}
    mcmc = MCMC(kernel, num_chains=chains, chain_method=method, **options)
    mcmc.run(jax.random.key(0), jnp.asarray(Y))
    return mcmc.get_samples(group_by_chain=True)


@pytest.mark.parametrize("kind", often(["gibbs", "function", "both"], "function", "both"))
def test_the_posterior_of_pixels_and_noise(kind: str) -> None:
    """In Gibbs, by HMCGibbs, and with the noise's precision in the block too, which is Gamma."""
    pixels = made("image")[1]
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False, "trajectory_length": None}
    noise = HMC(image, step_size=0.25, num_steps=4, **fixed)
    kernels = {
        "gibbs": lambda: Gibbs([(pixels, ["z"]), (noise, None)]),
        "function": lambda: HMCGibbs(noise, gibbs_fn(pixels), ["z"]),
        "both": lambda: GibbsBlock.from_model(image, ["z", "precision"], Y, num_sweeps=2),
    }
    draws = of_chains(kernels[kind]())
    mean, precision = image_posterior()
    assert_rows_law(np.asarray(draws["z"], float).mean(1), mean, comparisons=5)
    assert_rows_law(np.asarray(draws["precision"], float).mean(1), precision, comparisons=5)


@pytest.mark.parametrize("method", often([jax.vmap, "parallel"], jax.vmap))
def test_chain_methods_give_the_same_chains(method: Any) -> None:
    kernel = made("deep")[1]
    one, other = (of_chains(kernel, m, 3, 10) for m in ("sequential", method))
    for site in one:
        assert np.array_equal(one[site], other[site])


def test_a_model_is_traced_once() -> None:
    called = []

    def counted(y: Any) -> None:
        called.append(0)
        image(y)

    block = GibbsBlock.from_model(counted, ["z"], Y)
    before = len(called)
    kwargs = {"_gibbs_sites": {"precision": jnp.array(1.0)}}
    state = block.init(jax.random.key(1), 0, {"z": jnp.ones(4)}, (Y,), kwargs)
    assert set(state.z) == {"z"}
    step = jax.jit(lambda state, y: block.sample(state, (y,), kwargs))
    step(step(state, Y), Y + 1)
    assert step._cache_size() == 1 and len(called) == before


# -- coupled ---------------------------------------------------------------------------------------


def precision_law(sites: dict, y: Any) -> dist.Distribution:
    return dist.Gamma(4.0, 1.0 + 0.5 * ((y - sites["z"]) ** 2).sum())


def test_pairs_are_unbiased_and_meet() -> None:
    steps = [made("image")[1], Conjugate("precision", precision_law, dist.Gamma(2.0, 1.0))]
    options = {"rng_key": jax.random.key(3), "num_pairs": 2000, "k": 2, "m": 5}
    found = composite_expectation(CoupledComposite(steps), lambda sites: sites, jnp.asarray(Y), **options)
    assert set(found.value) == {"z", "precision"}  # latents are no state
    mean, precision = image_posterior()
    assert found.num_unmet == 0 and (found.meeting_time > 1).any()
    assert_law(found.value["z"], mean, found.standard_error["z"], comparisons=5)
    assert_law(found.value["precision"], precision, found.standard_error["precision"], comparisons=5)


@pytest.mark.parametrize("name", ["labels", "smooth"])
def test_coupled_chains_have_their_own_laws_and_stay_together(name: str) -> None:
    """From states drawn exactly, one pair apart and one together, each chain keeps its law."""
    _, block, _ = made(name)
    _, call = around(name)
    states, probability = enumerated(name)
    pick = lambda seed: np.random.default_rng(seed).choice(len(probability), 4000, p=probability)
    drawn = [{"z": jnp.asarray(states["z"][pick(seed)])} for seed in range(2)]
    step = jax.jit(jax.vmap(lambda x, y, key: block.couple((x, call), (y, call), random.key_pair(key))))
    keys = jax.random.split(jax.random.key(0), 4000)
    *pair, broken = step(*drawn, keys)
    assert not broken.any()
    exact = probability @ features(states)
    for found in pair:
        assert_rows_law(features(found), exact, comparisons=2 * len(exact))
    x, y, _ = step(drawn[0], drawn[0], keys)
    assert np.array_equal(x["z"], y["z"])
    assert (np.asarray(pair[0]["z"] == pair[1]["z"])).mean() > 0.5


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("image", {"tempering": (0.3, 0.6, 1.0)}),
        slow("smooth", {"tempering": (0.5, 1.0)}),
        ("rows", {"tempering": (0.5, 1.0)}),
        slow("smooth", {"clusters": True}),
    ],
)
def test_options_leave_the_law_as_it_is(name: str, options: dict) -> None:
    """Latents are heated with the block; clusters are those of units given the latents."""
    _, block, _ = made(name, **options)
    _, call = around(name)
    states, probability = enumerated(name)
    picked = np.random.default_rng(0).choice(len(probability), 6000, p=probability)
    step = jax.jit(jax.vmap(lambda z, key: block.advance(z, call, random.key_pair(key))))
    found = step({"z": jnp.asarray(states["z"][picked])}, jax.random.split(jax.random.key(1), 6000))
    if "tempering" in options:
        assert 0.02 < found.transitions.mean() < 0.98
    assert_rows_law(features(found.z), probability @ features(states))
