# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks made from NumPyro models: posteriors in NumPyro, random structures, many layers, x64."""

from typing import Any

import block_tools
from hypothesis import given, settings, strategies as st
from model_cases import CASES, Y5, Case, compare
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS, Gibbs, HMCGibbs
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.ppl import CoupledComposite, composite_expectation, gibbs_fn
from helpers import assert_law


@pytest.mark.parametrize("name", ["mixture", "grouped_sums", "convolved"])
def test_conditionals_in_x64(name: str) -> None:
    with jax.enable_x64(True):
        case = compare(CASES[name])
        assert all(a.dtype == np.float64 for a in case.reported.values())
        case.check(1e-6)


@pytest.mark.parametrize("kind", ["gibbs", "function"])
def test_gibbs_has_the_posterior(kind: str) -> None:
    block = GibbsBlock.from_model(block_tools.binary_model, ["x"], block_tools.NOISY)
    assert block.conditionals.num_layers == 2
    block.verify(block_tools.binary_model, block_tools.NOISY)
    noise = block_tools.short_hmc(block_tools.binary_model)
    gibbs = kind == "gibbs"
    kernel = Gibbs([(block, ["x"]), (noise, None)]) if gibbs else HMCGibbs(noise, gibbs_fn(block), ["x"])
    mcmc = block_tools.run_chains(kernel)
    block_tools.assert_posterior(mcmc)
    assert mcmc.get_samples()["x"].dtype == jnp.int32


def test_gibbs_with_nuts_infers_logits() -> None:
    """100 chains, whose means are independent, against quadrature."""
    y = np.array([0.3, -1.0, 2.0], np.float32)

    def model(y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("n", 3):
            z = numpyro.sample("z", dist.Bernoulli(logits=a))
            numpyro.sample("y", dist.Normal(3.0 * z, 1.0), obs=y)

    block = GibbsBlock.from_model(model, ["z"], y)
    block.verify(model, y)
    kernel = Gibbs([(block, ["z"]), (NUTS(model), None)])
    draws = block_tools.run_chains(kernel, y, 100, 50, num_warmup=100).get_samples(group_by_chain=True)
    means = np.concatenate([np.asarray(draws["z"]).mean(1), np.asarray(draws["a"]).mean(1)[:, None]], 1)
    a = np.linspace(-6, 6, 2001)
    up = np.exp(-0.5 * (y[:, None] - 3) ** 2) / (1 + np.exp(-a))
    down = np.exp(-0.5 * y[:, None] ** 2) / (1 + np.exp(a))
    weight = np.exp(-a * a / 2) * (up + down).prod(0)
    weight /= weight.sum()
    exact = np.append((weight * up / (up + down)).sum(1), (weight * a).sum())
    assert_law(means.mean(0), exact, means.std(0) / 10)


def test_coupled_composite_is_unbiased() -> None:
    """The lattice's prior as an energy model, and a conjugate offset."""
    block = GibbsBlock.from_model(block_tools.spin_model, ["x"], block_tools.NOISY)
    assert block.conditionals.num_layers == 2
    kernel = CoupledComposite([block, block_tools.offset_step()])
    fn = lambda sites: {"x": sites["x"] > 0, "offset": sites["offset"]}
    options = {"rng_key": jax.random.key(3), "num_pairs": 3000, "k": 3, "m": 6}
    result = composite_expectation(kernel, fn, block_tools.NOISY, **options)
    assert result.num_unmet == 0 and (result.meeting_time > 1).any()
    for name, exact in zip(("x", "offset"), block_tools.exact_posterior(), strict=True):
        assert_law(result.value[name], exact, result.standard_error[name], comparisons=7)


def test_many_layers_and_widely_read_units() -> None:
    """Seven layers, which share one program; and units that many elements read."""

    def model(y: Any) -> None:
        z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([6]).to_event(1))
        w = numpyro.sample("w", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(z.sum() + w, 2.0), obs=y)
        numpyro.factor("pairs", 0.3 * w * (z[1:] * z[:-1]).sum())

    index = np.minimum(np.arange(60), 6) % 6

    def wide(y: Any) -> None:
        z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([7]).to_event(1))
        numpyro.factor("all", jnp.cos(1.0 * z.sum()))
        numpyro.sample("y", dist.Normal(0.1 * z[index], 1.0).to_event(1), obs=y)

    y = np.random.default_rng(0).normal(size=60).astype(np.float32)
    compare(Case(model, ("z", "w"), (np.float32(3.0),), 7)).check(5e-5)
    compare(Case(wide, ("z",), (y,), 7)).check(5e-5)
    compare(Case(CASES["switched_scale"].model, ("wide", "z"), (y,), 2)).check(5e-5)


@given(data=st.data())
@settings(max_examples=6, derandomize=True)
def test_random_index_structures(data: st.DataObject) -> None:
    """Pairs by random indices, joined by a random function, multiplied by a sibling."""
    edges = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
    join = data.draw(st.sampled_from([jnp.maximum, jnp.multiply, jnp.equal, jnp.hypot, jnp.subtract]))
    first, second = np.array(edges).T

    def model(y: Any) -> None:
        weight = numpyro.sample("weight", dist.Normal(0, 1))
        z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([5]).to_event(1))
        numpyro.factor("pairs", weight * (1.0 * join(z[first], 1.0 * z[second])).sum())
        numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)

    case = compare(Case(model, ("z",), (Y5,), 0))
    np.testing.assert_allclose(np.exp(case.reported["z"]), np.exp(case.exact["z"]), atol=2e-5)
