# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of NumPyro's Gibbs declared as graphs: kernels, chain methods, latents, Metropolis steps."""

import pickle
from typing import Any

from block_tools import (
    EVEN,
    NOISY,
    WEIGHTS,
    assert_posterior,
    lattice,
    run_chains,
    short_hmc,
    spin_block,
    spin_model,
)
from model_cases import run_alone
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import Gibbs, HMCGibbs
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Categorical, Factor, FactorGraph, Gaussian, GibbsBlock, Pairwise, layered
from ebmpp.moves import Clusters
from ebmpp.ppl import gibbs_fn
from helpers import assert_rows_law


def composite(block: GibbsBlock | None = None) -> Gibbs:
    return Gibbs([(block or spin_block(), ["x"]), (short_hmc(spin_model), None)])


@pytest.mark.parametrize("kind", ["gibbs", "function"])
def test_kernels_have_the_posterior(kind: str) -> None:
    graph, layout = lattice()
    params = {
        "even": lambda sites: NOISY[EVEN] - sites["offset"],
        "odd": lambda sites: NOISY[~EVEN] - sites["offset"],
        "even:odd": WEIGHTS,
    }
    update = gibbs_fn(graph, {"x": layout}, params)  # HMCGibbs passes no arguments on
    kernel = composite() if kind == "gibbs" else HMCGibbs(short_hmc(spin_model), update, ["x"])
    assert_posterior(run_chains(kernel))


# NumPyro's own, of any extra field under jax.vmap
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_likelihood_as_a_weight_is_corrected_by_metropolis() -> None:
    graph, layout = lattice()
    params = {"even": np.zeros(3), "odd": np.zeros(3), "even:odd": WEIGHTS}

    def likelihood(x: dict, sites: dict, y: jax.Array) -> jax.Array:
        return dist.Normal(x["x"] + sites["offset"], 1.0).log_prob(y).sum()

    block = GibbsBlock(graph, {"x": layout}, params, log_weight=likelihood, fraction=0.5)
    block.verify(spin_model, NOISY)
    mcmc = run_chains(composite(block), extra_fields=("block_states.0.accepted",))
    assert_posterior(mcmc)
    accepted = mcmc.get_extra_fields()["block_states.0.accepted"]
    assert block.num_sweeps == 2  # as many as propose every unit once
    assert 0 < np.mean(accepted) < 2 * 2 * 70
    assert "acceptance" in block.get_diagnostics_str(mcmc.last_state.block_states[0])


@pytest.mark.parametrize("init", ["uniform", "local_mode"])
def test_latent_blocks_are_sampled_along(init: str) -> None:
    graph = layered(x=Bernoulli(3), h=Bernoulli(2))
    params = {"x": np.zeros(3, np.float32), "h": np.zeros(2, np.float32)}
    params |= {"x:h": 1.5 * np.float32([[1.0, -1], [0.5, 1], [-1, 0.2]])}

    def model(y: jax.Array) -> None:
        x = numpyro.sample("x", dist.Bernoulli(0.5).expand((3,)).to_event(1))
        numpyro.factor("prior", -graph.free_energy(params, {"x": 1.0 * x}))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(1.0 * x, scale).to_event(1), obs=y)

    y = np.float32([0.9, 0.2, 0.4])
    field = lambda sites, y: params["x"] + (y - 0.5) / sites["scale"] ** 2
    block = GibbsBlock(graph, ["x"], params | {"x": field}, init=init)
    block.verify(model, y)
    draws = run_alone(block, {"x": np.zeros(3)}, 30, 4000, (y,), scale=np.float32(0.8)).z["x"]
    states = np.array([[i & 1, i >> 1 & 1, i >> 2] for i in range(8)], float)
    log = np.logaddexp(0, states @ params["x:h"]).sum(1) - 0.5 * ((y - states) ** 2).sum(1) / 0.8**2
    assert_rows_law(draws, np.exp(log) @ states / np.exp(log).sum())


def test_chain_methods_give_the_same_chains() -> None:
    options = {"key": jax.random.key(3), "chains": 2, "draws": 8}
    parallel, mapped = (run_chains(composite(), chain_method=m, **options) for m in ("parallel", jax.vmap))
    assert (parallel.get_samples()["x"] == mapped.get_samples()["x"]).all()


def test_copy_resumes_exactly_and_takes_legacy_keys() -> None:
    kernel = pickle.loads(pickle.dumps(composite()))
    options = {"chains": 1, "key": jax.random.key(4), "chain_method": "sequential"}
    long, short = run_chains(kernel, draws=12, **options), run_chains(kernel, draws=6, **options)
    first = np.asarray(short.get_samples()["x"])
    short.post_warmup_state = short.last_state
    short.run(short.post_warmup_state.rng_key, jnp.asarray(NOISY))
    resumed = np.concatenate([first, short.get_samples()["x"]])
    assert (resumed == np.asarray(long.get_samples()["x"])).all()
    legacy = run_chains(composite(), draws=12, **options | {"key": jax.random.PRNGKey(4)})
    assert (legacy.get_samples()["x"] == long.get_samples()["x"]).all()


def mixture_energy(params: Any, z: Any, m: Any) -> Any:
    """-log N(y; m_z, 1), in the statistics of a mean, m and m^2."""
    return (z * (0.5 * m[:, 1] - params["y"][:, None] * m[:, 0])).sum()


def test_real_valued_sites_are_heated_along() -> None:
    """A mixture whose means are in the block; labels switch in tempered transitions, hardly in sweeps."""
    y = np.float32([-2.0, -1.6, 1.7, 2.1, 2.4])
    init = lambda *_: {"y": jnp.zeros(5)}
    likelihood = Factor("z", "m", energy=mixture_energy, init=init, name="likelihood")
    blocks = {"z": Categorical(5, 2), "m": Gaussian(2, variance="learned")}
    graph = FactorGraph(blocks, factors=[Bias("m"), likelihood])
    params = {"m": np.float32([[0.0, -0.5 / 9]] * 2), "likelihood": {"y": y}}
    start = {"z": np.array([0, 0, 1, 1, 1]), "m": np.float32([-1.8, 2.0])}
    block = GibbsBlock(graph, ["z", "m"], params, tempering=np.linspace(0.1, 1, 8))
    state = run_alone(block, start, 40, 2000)
    # labels are exchangeable, so every point is of either component as often
    assert_rows_law(np.asarray(state.z["z"], float), np.full(5, 0.5), comparisons=7)
    assert_rows_law(state.z["m"], np.full(2, mixture_mean(y)), comparisons=7)


def mixture_mean(y: np.ndarray) -> float:
    """E(m_0 | y) by a sum over all assignments."""
    states = (np.arange(32)[:, None] >> np.arange(5)) & 1
    log, means = 0.0, []
    for k in range(2):
        precision = 1 / 9 + (states == k).sum(1)
        mean = (states == k) @ y / precision
        log = log + 0.5 * precision * mean**2 - 0.5 * np.log(precision)
        means.append(mean)
    weight = np.exp(log - np.max(log))
    return float(weight / weight.sum() @ means[0])


def joint_energy(weight: Any, z: Any, h: Any) -> Any:
    return -(weight @ z) * h[0]


def test_latents_are_drawn_before_the_moves() -> None:
    """A latent block beside a site that moves by clusters, with params that a sibling changes."""
    joint = Factor("z", "h", energy=joint_energy, init=lambda *_: jnp.zeros(3))
    factors = [Bias("z"), Bias("h"), Pairwise("z", np.array([[0, 1], [1, 2]])), joint]
    graph = FactorGraph({"z": Bernoulli(3)}, {"h": Bernoulli(1)}, factors)
    field, weights = np.float32([1.0, -1.0, 0.5]), np.float32([1.5, -1.0, 0.7])
    params = {"h": np.float32([0.3]), "z:z": np.float32([1.0, 0.8]), "z:h": weights}
    params |= {"z": lambda sites: sites["field"] * field}
    block = GibbsBlock(graph, ["z"], params, moves=Clusters("z"))
    state = run_alone(block, {"z": np.zeros(3, int)}, 20, 4000, field=np.float32(0.6))
    states = (np.arange(16)[:, None] >> np.arange(4)) & 1
    z, h = states[:, :3], states[:, 3]
    log = 0.6 * z @ field + 0.3 * h + z[:, 0] * z[:, 1] + 0.8 * z[:, 1] * z[:, 2] + h * (z @ weights)
    assert_rows_law(state.z["z"], np.exp(log) @ z / np.exp(log).sum())
