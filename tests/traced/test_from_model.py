# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks made from NumPyro models with discrete sites: conditionals, draws, couplings and refusals.

Tests traced/block.py, traced/data.py, traced/model.py, traced/model_block.py,
traced/rows.py, traced/sweep/conditionals.py, traced/sweep/sequential.py,
traced/sweep/sweep.py.
"""

import copy
from functools import cache
import pickle
from typing import Any

import block_tools
from model_cases import CASES, Y5, Call, X, advance, compare, conditionals, mixture
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
from ebmpp import GibbsBlock
from ebmpp.core import random
from ebmpp.errors import ArgumentError, IntractableError, StateError
from ebmpp.ppl import gibbs_fn
from ebmpp.traced.block import BlockState
from helpers import assert_law, assert_rows_law, often

FAST = (
    "scanned_chain",
    "lattice",
    "masked_and_scaled",
    "counts",
)


@pytest.mark.parametrize("name", often(CASES, *FAST))
def test_conditionals_match_the_joint_density(name: str) -> None:
    conditionals(name).check()


def test_a_model_and_a_graph_make_gibbs_blocks() -> None:
    graph = ebmpp.layered(z=ebmpp.Bernoulli(2), h=ebmpp.Bernoulli(1))
    of_graph = GibbsBlock(graph, ["z"], graph.init(jax.random.key(0)))
    of_model = GibbsBlock.from_model(mixture, ["z"], Y5)
    for block, sites in ((of_graph, ("z",)), (of_model, ("z",))):
        assert isinstance(block, GibbsBlock) and block.sites == sites
    assert of_graph.graph is graph and not hasattr(of_model, "graph")
    assert copy.copy(of_graph).sites == copy.copy(of_model).sites == ("z",)


@pytest.mark.parametrize(
    "name", often(["lattice", "mixture", "counts", "scanned_chain"], "lattice")
)
def test_draws_of_the_first_layer_match_the_conditionals(name: str) -> None:
    case = conditionals(name)
    draws = advance(case.block, *case.around()).z
    for site in case.case.sites:
        table, valid = (
            np.moveaxis(np.asarray(a), 0, -1) for a in case.block.posterior.values[site]
        )
        first, exact = case.block.layers[site] == 0, np.exp(case.exact[site][0])
        shares = ((draws[site][..., None] == table) & valid).mean(0)
        assert_law(
            shares[first], exact[first], np.sqrt(exact * (1 - exact) / 4000)[first]
        )


def test_coupled_draws_have_their_marginals_and_meet_maximally() -> None:
    case = conditionals("counts")
    step = jax.vmap(
        lambda key: case.block.couple(
            case.around(0), case.around(1), random.key_pair(key)
        )
    )
    x, y, broken = jax.jit(step)(jax.random.split(jax.random.key(0), 4000))
    assert not broken.any()
    exact = np.exp(case.exact["z"])
    for draws, probability in zip((x, y), exact, strict=True):
        shares = (np.asarray(draws["z"])[..., None] == np.arange(4)).mean(0)
        assert_law(shares, probability, np.sqrt(probability * (1 - probability) / 4000))
    overlap = np.minimum(*exact).sum(-1)
    meets = np.asarray(x["z"] == y["z"]).mean(0)
    assert_law(meets, overlap, np.sqrt(overlap * (1 - overlap) / 4000))


def test_steps_resume_exactly_and_never_call_the_model_again() -> None:
    calls = []

    def counted(y: Any) -> None:
        calls.append(0)
        CASES["lattice"].model(y)

    case = CASES["lattice"]
    block, num_calls = GibbsBlock.from_model(counted, ["z"], *case.args), len(calls)
    kwargs = {"_gibbs_sites": {"coupling": jnp.float32(0.4)}}
    start = block.init(
        jax.random.key(1), 0, {"z": jnp.zeros((2, 3), int)}, case.args, kwargs
    )
    step = jax.jit(lambda state, y: block.sample(state, (y,), kwargs))
    state = start
    for _ in range(6):
        middle, state = state, step(state, *case.args)
    assert (
        int(state.i) == 6
        and int(state.degenerate) == 0
        and state.z["z"].dtype == start.z["z"].dtype
    )
    assert (
        step(pickle.loads(pickle.dumps(middle)), *case.args).z["z"] == state.z["z"]
    ).all()
    assert not (middle.z["z"] == state.z["z"]).all()
    assert len(calls) == num_calls and step._cache_size() == 1
    copied = pickle.loads(
        pickle.dumps(GibbsBlock.from_model(case.model, ["z"], *case.args))
    )
    assert (copied.layers["z"] == block.layers["z"]).all()


def interacting(y: Any, x: Any) -> None:
    """Counts and indicators that a regression joins, and a function of their sum."""
    z = numpyro.sample("z", dist.Binomial(jnp.array([2, 1, 2, 1, 1]), 0.4).to_event(1))
    w = numpyro.sample("w", dist.Bernoulli(0.5).expand([4, 1]).to_event(2))
    joined = (
        x[:, :5] @ (z * jnp.array([1.0, -0.5, 0.7, 0.4, 1.2]))
        + (x[:, 5:] @ (1.0 - w))[:, 0]
    )
    numpyro.sample("y", dist.Normal(joined, 1.0).to_event(1), obs=y)
    numpyro.factor("even", 0.4 * jnp.cos(1.0 * (z.sum() + w.sum())))


@cache
def interacting_posterior() -> tuple[np.ndarray, np.ndarray]:
    """All joint values of :func:`interacting`, and their probabilities."""
    counts = np.stack(np.unravel_index(np.arange(9 * 2**7), (3, 2, 3, *[2] * 6)), 1)
    density = lambda c: log_density(
        interacting, (Y5, X[:, :9]), {}, {"z": c[:5], "w": c[5:, None]}
    )[0]
    log = np.asarray(jax.jit(jax.vmap(density))(counts), float)
    return counts, np.exp(log - log.max()) / np.exp(log - log.max()).sum()


def neighbours(draws: np.ndarray) -> np.ndarray:
    return 1.0 * draws[:, :8] * draws[:, 1:]


def assert_interacting(draws: dict, comparisons: int) -> None:
    """Compare means of units and of products of neighbours with the posterior."""
    flat = np.concatenate([draws["z"], np.asarray(draws["w"])[..., 0]], 1)
    counts, weight = interacting_posterior()
    assert_rows_law(flat, weight @ counts, comparisons)
    assert_rows_law(neighbours(flat), weight @ neighbours(counts), comparisons)


def interacting_draws() -> list[dict]:
    """Exact draws of two independent chains."""
    counts, weight = interacting_posterior()
    picked = np.random.default_rng(0).choice(len(counts), (2, 4000), p=weight)
    return [{"z": counts[i, :5], "w": counts[i, 5:, None]} for i in picked]


@pytest.mark.parametrize("tempering", often([None, (0.4, 1.0)], None))
def test_sequential_sweeps_preserve_the_posterior(tempering: Any) -> None:
    args, start = (Y5, X[:, :9]), interacting_draws()[0]
    with pytest.raises(IntractableError, match="all 9 units .* sequential=True"):
        GibbsBlock.from_model(interacting, ["z", "w"], *args)
    block = GibbsBlock.from_model(
        interacting, ["z", "w"], *args, sequential=True, tempering=tempering
    )
    state = advance(block, start, Call({}, args, {}), rows=True)
    assert int(state.degenerate.sum()) == 0
    assert all((state.z[site] != start[site]).any(0).all() for site in start)
    assert_interacting(state.z, 18)


@pytest.mark.nightly
def test_coupled_sequential_sweep_preserves_the_posterior_and_equality() -> None:
    args = (Y5, X[:, :9])
    block = GibbsBlock.from_model(interacting, ["z", "w"], *args, sequential=True)
    first, second = interacting_draws()
    call = Call({}, args, {})
    step = jax.vmap(
        lambda x, y, key: block.couple((x, call), (y, call), random.key_pair(key))
    )
    step, keys = jax.jit(step), jax.random.split(jax.random.key(0), 4000)
    *pair, broken = step(first, second, keys)
    assert not broken.any()
    for draws in pair:
        assert_interacting(draws, 36)
    x, y, _ = step(first, first, keys)
    assert all(np.array_equal(x[site], y[site]) for site in x)
    met = lambda x, y: np.all(
        [(np.asarray(x[s]) == y[s]).reshape(4000, -1).all(1) for s in x], 0
    ).mean()
    assert met(*pair) > met(first, second)


@pytest.mark.nightly
def test_verify_refuses_another_model() -> None:
    block = conditionals("mixture").block
    block.verify(mixture, Y5)

    def scaled(y: Any) -> None:
        with handlers.scale(scale=2.0):
            mixture(y)

    with pytest.raises(StateError, match="log density changes by"):
        block.verify(scaled, Y5)


def test_unit_without_possible_value_stays_and_is_counted() -> None:
    def model() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.4).expand([3]).to_event(1))
        numpyro.factor(
            "never", jnp.where(jnp.arange(3) == 1, -jnp.exp(1e3 + z), 0.0).sum()
        )

    block, start = (
        GibbsBlock.from_model(model, ["z"]),
        {"z": jnp.array([0, 1, 0], jnp.int32)},
    )
    count, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    state = BlockState(start, {}, zero, count, count, count, jax.random.key(0), start)
    state = jax.jit(
        lambda s: jax.lax.fori_loop(0, 3, lambda _, s: block.sample(s, (), {}), s)
    )(state)
    assert state.z["z"][1] == 1 and state.degenerate == 3
    assert "3 draws kept a value" in block.get_diagnostics_str(state)


# -- refusals
# --------------------------------------------------------------------------------------


def indexed(y: Any, pairs: Any) -> None:
    z = numpyro.sample("z", dist.Bernoulli(0.4).expand([5]).to_event(1))
    numpyro.factor("prior", (z[pairs[:, 0]] * z[pairs[:, 1]]).sum())


def test_arguments_that_decide_the_structure_may_not_change() -> None:
    pairs, values = np.array([[0, 1], [2, 3]]), {"z": np.zeros(5, int)}
    block = GibbsBlock.from_model(indexed, ["z"], Y5, pairs)
    with pytest.raises(StateError, match=r"args\[1\] .* another value"):
        block.log_conditionals(values, Y5, pairs + 1)
    with pytest.raises(StateError, match="jit_model_args"):
        jax.jit(lambda pairs: block.log_conditionals(values, Y5, pairs))(pairs)
    with pytest.raises(StateError, match=r"outside of jax\.jit"):
        jax.jit(
            lambda y: GibbsBlock.from_model(mixture, ["z"], y).log_conditionals({})
        )(Y5)
    with pytest.raises(ArgumentError, match="sites and options"):
        gibbs_fn(block, ["z"])


@pytest.mark.nightly
def test_arguments_of_a_wider_dtype_are_refused() -> None:
    def model(y: Any) -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.4).expand([5]).to_event(1))
        numpyro.factor("f", (z * y).sum())

    values, new = {"z": np.zeros(5, int)}, np.arange(5) + 300
    logits = GibbsBlock.from_model(model, ["z"], np.ones(5)).log_conditionals(
        values, new
    )["z"]
    np.testing.assert_allclose(
        np.diff(logits)[:, 0], np.log(0.4 / 0.6) + new, rtol=1e-5
    )
    with pytest.raises(StateError, match=r"args\[0\] .* of dtype int32"):
        GibbsBlock.from_model(model, ["z"], np.ones(5, np.int8)).log_conditionals(
            values, new
        )
    # half precision is widened exactly, and never narrowed
    half = np.array([0.1, -2.0, 1 / 3, 4.0, 0.0], np.float16)
    for dtype in (np.float16, jnp.bfloat16):
        block = GibbsBlock.from_model(model, ["z"], np.ones(5, np.float32))
        logits = block.log_conditionals(values, half.astype(dtype))["z"]
        exact = np.log(0.4 / 0.6) + half.astype(dtype).astype(float)
        np.testing.assert_allclose(np.diff(logits)[:, 0], exact, rtol=1e-5, atol=1e-6)
        block = GibbsBlock.from_model(model, ["z"], half.astype(dtype))
        with pytest.raises(StateError, match=r"args\[0\] .* of dtype float32"):
            block.log_conditionals(values, half.astype(np.float32))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mixture", "grouped_sums", "convolved"])
def test_conditionals_in_x64(name: str) -> None:
    with jax.enable_x64(True):
        case = compare(CASES[name])
        assert all(a.dtype == np.float64 for a in case.reported.values())
        case.check(1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gibbs", "function"])
def test_gibbs_has_the_posterior(kind: str) -> None:
    block = GibbsBlock.from_model(block_tools.binary_model, ["x"], block_tools.NOISY)
    assert block.conditionals.num_layers == 2
    block.verify(block_tools.binary_model, block_tools.NOISY)
    noise = block_tools.short_hmc(block_tools.binary_model)
    gibbs = kind == "gibbs"
    kernel = (
        Gibbs([(block, ["x"]), (noise, None)])
        if gibbs
        else HMCGibbs(noise, gibbs_fn(block), ["x"])
    )
    mcmc = block_tools.run_chains(kernel)
    block_tools.assert_posterior(mcmc)
    assert mcmc.get_samples()["x"].dtype == jnp.int32
