# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that follow from models whose priors are energies with latents: laws against enumeration."""

from collections.abc import Callable
import dataclasses
from functools import lru_cache
from typing import Any

from model_cases import Case, brute_force, latents
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import HMC, MCMC, Gibbs, HMCGibbs
from numpyro.infer.util import log_density
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import EnergyDistribution, GibbsBlock
from ebmpp.core import random
from ebmpp.errors import IntractableError, StateError
from ebmpp.ppl import Conjugate, CoupledComposite, Layout, composite_expectation, gibbs_fn
from ebmpp.ppl.sites import Call
from helpers import assert_law, assert_rows_law

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


@pytest.mark.parametrize("name", CASES)
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


@pytest.mark.parametrize("name", CASES)
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


@pytest.mark.parametrize("kind", ["gibbs", "function", "both"])
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


def test_chain_methods_give_the_same_chains() -> None:
    kernel = made("deep")[1]
    one, *others = (of_chains(kernel, m, 3, 10) for m in ("sequential", jax.vmap, "parallel"))
    for other in others:
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
        pytest.param("smooth", {"tempering": (0.5, 1.0)}, marks=pytest.mark.slow),
        ("rows", {"tempering": (0.5, 1.0)}),
        ("smooth", {"clusters": True}),
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


def blurred(y: Any) -> None:
    """A likelihood that reads all pixels: units interact also given the latents."""
    z = numpyro.sample("z", EnergyDistribution(RBM, PRIOR, num_sweeps=1))
    wide = numpyro.sample("w", dist.Bernoulli(0.5).expand([8]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.tanh(z.sum() + wide.sum()), 1.0), obs=y[0])


def raised(y: Any) -> None:
    with handlers.scale(scale=0.5):
        z = numpyro.sample("z", EnergyDistribution(WIDE, WIDE_PRIOR, num_sweeps=1))
    numpyro.sample("y", dist.Normal(z[:4], 1.0).to_event(1), obs=y)


WIDE = ebmpp.layered(v=ebmpp.Spin(9), h=ebmpp.Spin(2))
WIDE_PRIOR = strong(WIDE, 4, 0.5)


def test_where_latents_do_not_help_units_are_drawn_one_by_one_when_asked() -> None:
    """With the latents summed out, as before."""
    with pytest.raises(IntractableError, match="all 12 units .* unit_by_unit=True"):
        GibbsBlock.from_model(blurred, ["z", "w"], Y)
    block = GibbsBlock.from_model(blurred, ["z", "w"], Y, unit_by_unit=True)
    assert block.sweep.augmented is None
    block.verify(blurred, Y)
    with pytest.raises(IntractableError, match="'z' is scaled .* latents cannot be drawn along"):
        GibbsBlock.from_model(raised, ["z"], Y)
    block = GibbsBlock.from_model(raised, ["z"], Y, unit_by_unit=True)
    assert block.sweep.augmented is None
    block.verify(raised, Y)


def test_few_layers_with_the_latents_summed_out_are_taken_as_they_are() -> None:
    """A latent that ties two units is better summed out than drawn."""
    pair = ebmpp.layered(v=ebmpp.Spin(2), h=ebmpp.Spin(1))

    def model() -> None:
        numpyro.sample("z", EnergyDistribution(pair, strong(pair, 0), num_sweeps=1))

    block = GibbsBlock.from_model(model, ["z"])
    assert block.sweep.augmented is None and block.conditionals.num_layers == 2


def test_another_model_is_told() -> None:
    def tighter(y: Any) -> None:
        precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
        z = numpyro.sample("z", EnergyDistribution(RBM, PRIOR | {"h": PRIOR["h"] + 1}, num_sweeps=1))
        numpyro.sample("y", dist.Normal(z, precision**-0.5).to_event(1), obs=y)

    with pytest.raises(StateError, match="log density changes by"):
        made("image")[1].verify(tighter, Y)


def test_a_latent_without_a_law_keeps_the_units_and_is_counted() -> None:
    def model(y: Any) -> None:
        bias = numpyro.sample("bias", dist.Normal(0, 1))
        params = PRIOR | {"h": PRIOR["h"] + bias}
        z = numpyro.sample("z", EnergyDistribution(RBM, params, num_sweeps=1, validate_args=False))
        numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)

    block = GibbsBlock.from_model(model, ["z"], Y)
    kwargs = {"_gibbs_sites": {"bias": jnp.array(jnp.nan)}}
    state = block.init(jax.random.key(0), 0, {"z": jnp.ones(4)}, (Y,), kwargs)
    state = block.sample(state, (Y,), kwargs)
    assert int(state.kept) == 4 and (state.z["z"] == 1).all()


def leaning(y: Any, log_partition: Any = None) -> None:
    """A site that the prior's biases are made of."""
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    lean = numpyro.sample("lean", dist.Normal(0, 1))
    params = PRIOR | {"v": k * lean * jnp.ones(4)}
    law = EnergyDistribution(RBM, params, num_sweeps=1, log_partition=log_partition)
    z = numpyro.sample("z", law)
    numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


def offset(y: Any) -> None:
    """A site that the prior's biases are made of, and which is Gaussian, log Z being what it likes."""
    lean = numpyro.sample("lean", dist.Normal(0, 1))
    law = EnergyDistribution(RBM, PRIOR | {"v": lean * jnp.ones(4)}, num_sweeps=1, log_partition=0.0)
    z = numpyro.sample("z", law)
    numpyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("sites", "told"), [(["k"], r"depend on sites \['k'\]"), (["z", "lean"], r"depend on sites \['lean'\]")]
)
def test_params_without_log_z_are_not_drawn(sites: list, told: str) -> None:
    """Which would be silently wrong; the site itself is drawn whatever its params are made of."""
    with pytest.raises(IntractableError, match=told + ".* doubly intractable"):
        GibbsBlock.from_model(leaning, sites, Y)
    assert GibbsBlock.from_model(leaning, ["z"], Y).sweep.augmented is not None
    known = GibbsBlock.from_model(leaning, ["k", "z"], Y, log_partition=exact_partition)
    assert known.sweep.augmented is not None


def test_refusals_of_options() -> None:
    with pytest.raises(IntractableError, match="clusters=True .* no two units interact"):
        GibbsBlock.from_model(image, ["z"], Y, clusters=True)
    GibbsBlock.from_model(offset, ["z", "lean"], Y)
    with pytest.raises(IntractableError, match="tempering heats the latents of site 'z' too.* 'lean'"):
        GibbsBlock.from_model(offset, ["z", "lean"], Y, tempering=[0.5, 1.0])
    endless = ebmpp.layered(v=ebmpp.Gaussian(3), h=ebmpp.Bernoulli(2))
    model = lambda: numpyro.sample("z", EnergyDistribution(endless, endless.init(jax.random.key(0))))
    with pytest.raises(IntractableError, match="block 'v' of site 'z' is Gaussian"):
        GibbsBlock.from_model(model, ["z"])
