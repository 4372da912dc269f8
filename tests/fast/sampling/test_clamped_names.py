# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that bear the names of arguments: every call clamps them by ``clamped={...}``."""

from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, FactorGraph
from ebmpp.errors import StateError
from helpers import assert_law

# "k", "fn" and "init_params" are arguments of what is called below
GRAPH = FactorGraph(
    {"k": Bernoulli(2), "init_params": Bernoulli(2)},
    {"fn": Bernoulli(2)},
    [Bias("k"), Bias("fn"), Bias("init_params"), Bilinear("k", "fn"), Bilinear("init_params", "fn")],
)
PARAMS = GRAPH.init(jax.random.key(0))
HELD = {"k": jnp.array([1.0, 0.0]), "init_params": jnp.array([1.0, 1.0])}
EXACT = GRAPH.mean(PARAMS, HELD, "fn")


def test_an_estimate_clamps_them():
    made = ebmpp.unbiased_expectation(
        GRAPH, PARAMS, lambda x: x["fn"], rng_key=jax.random.key(1), num_pairs=400, clamped=HELD
    )
    assert_law(made.value, EXACT, made.standard_error)


@pytest.mark.slow
def test_a_tempered_estimate_clamps_them():
    made = ebmpp.kernels.tempered_expectation(
        GRAPH,
        PARAMS,
        lambda x: x["fn"],
        betas=[0, 1],
        rng_key=jax.random.key(1),
        num_pairs=400,
        clamped=HELD,
    )
    assert_law(made.value, EXACT, made.standard_error)


def test_a_kernel_clamps_them():
    mcmc = MCMC(ebmpp.BlockedGibbs(GRAPH), num_warmup=0, num_samples=400, progress_bar=False)
    mcmc.run(jax.random.key(2), PARAMS, clamped=HELD)
    draws = mcmc.get_samples()
    assert set(draws) == {"fn"}
    assert_law(draws["fn"].mean(0), EXACT, draws["fn"].std(0) / 20)


def test_searches_completions_and_surgery_clamp_them():
    found = ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(3), clamped=HELD)
    assert found.state["k"].tolist() == [1.0, 0.0]
    made = ebmpp.complete(GRAPH, PARAMS, rng_key=jax.random.key(3), clamped=HELD, num_samples=1)
    assert jnp.allclose(made.mean["fn"], EXACT, atol=1e-6)
    posterior = ebmpp.condition(GRAPH, clamped=HELD)
    assert jnp.allclose(posterior.mean(PARAMS, {}, "fn"), EXACT, atol=1e-6)


def test_a_block_is_clamped_once_and_by_a_dict():
    def run(**given):
        ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(3), **given)

    with pytest.raises(StateError, match="block 'k' is given by keyword and in clamped: give it once"):
        run(k=HELD["k"], clamped={"k": HELD["k"]})
    with pytest.raises(StateError, match="clamped is a dict of blocks, such as {'v': v}, not 3"):
        run(clamped=3)
    with pytest.raises(StateError, match="unknown block 'z'"):
        run(clamped={"z": HELD["k"]})
