# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks made from NumPyro models with discrete sites: conditionals, draws, couplings and refusals."""

import pickle
from typing import Any

from model_cases import CASES, Y5, X, advance, conditionals, mixture, run_alone
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.util import log_density
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.core import random
from ebmpp.errors import ArgumentError, IntractableError, StateError
from ebmpp.ppl import gibbs_fn
from helpers import assert_law, assert_rows_law, often

FAST = ("mixture", "scanned_chain", "lattice", "nested_plates", "masked_and_scaled", "counts", "energy_prior")


@pytest.mark.parametrize("name", often(CASES, *FAST))
def test_conditionals_match_the_joint_density(name: str) -> None:
    conditionals(name).check()


@pytest.mark.parametrize("name", often(["lattice", "mixture", "counts", "scanned_chain"], "lattice"))
def test_draws_of_the_first_layer_match_the_conditionals(name: str) -> None:
    case = conditionals(name)
    draws = advance(case.block, *case.around()).z
    for site in case.case.sites:
        table, valid = (np.moveaxis(np.asarray(a), 0, -1) for a in case.block.posterior.values[site])
        first, exact = case.block.layers[site] == 0, np.exp(case.exact[site][0])
        shares = ((draws[site][..., None] == table) & valid).mean(0)
        assert_law(shares[first], exact[first], np.sqrt(exact * (1 - exact) / 4000)[first])


def test_coupled_draws_have_their_marginals_and_meet_maximally() -> None:
    case = conditionals("counts")
    step = jax.vmap(lambda key: case.block.couple(case.around(0), case.around(1), random.key_pair(key)))
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
    start = block.init(jax.random.key(1), 0, {"z": jnp.zeros((2, 3), int)}, case.args, kwargs)
    step = jax.jit(lambda state, y: block.sample(state, (y,), kwargs))
    state = start
    for _ in range(6):
        middle, state = state, step(state, *case.args)
    assert int(state.i) == 6 and int(state.kept) == 0 and state.z["z"].dtype == start.z["z"].dtype
    assert (step(pickle.loads(pickle.dumps(middle)), *case.args).z["z"] == state.z["z"]).all()
    assert not (middle.z["z"] == state.z["z"]).all()
    assert len(calls) == num_calls and step._cache_size() == 1
    copied = pickle.loads(pickle.dumps(GibbsBlock.from_model(case.model, ["z"], *case.args)))
    assert (copied.layers["z"] == block.layers["z"]).all()


def interacting(y: Any, x: Any) -> None:
    """Counts and indicators that a regression joins, and a function of their sum."""
    z = numpyro.sample("z", dist.Binomial(jnp.array([2, 1, 2, 1, 1]), 0.4).to_event(1))
    w = numpyro.sample("w", dist.Bernoulli(0.5).expand([4, 1]).to_event(2))
    joined = x[:, :5] @ (z * jnp.array([1.0, -0.5, 0.7, 0.4, 1.2])) + (x[:, 5:] @ (1.0 - w))[:, 0]
    numpyro.sample("y", dist.Normal(joined, 1.0).to_event(1), obs=y)
    numpyro.factor("even", 0.4 * jnp.cos(1.0 * (z.sum() + w.sum())))


@pytest.mark.parametrize("tempering", often([None, (0.4, 1.0)], None))
def test_sequential_sweeps_have_the_posterior(tempering: Any) -> None:
    args = (Y5, X[:, :9])
    with pytest.raises(IntractableError, match="all 9 units .* unit_by_unit=True"):
        GibbsBlock.from_model(interacting, ["z", "w"], *args)
    block = GibbsBlock.from_model(interacting, ["z", "w"], *args, unit_by_unit=True, tempering=tempering)
    counts = np.stack(np.unravel_index(np.arange(9 * 2**7), (3, 2, 3, *[2] * 6)), 1)
    density = lambda c: log_density(interacting, args, {}, {"z": c[:5], "w": c[5:, None]})[0]
    log = np.asarray(jax.jit(jax.vmap(density))(counts), float)
    weight = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
    state = run_alone(block, {"z": np.zeros(5, int), "w": np.zeros((4, 1), int)}, 12, 4000, args)
    draws = np.concatenate([state.z["z"], np.asarray(state.z["w"])[..., 0]], 1)
    assert int(state.kept.sum()) == 0
    assert_rows_law(draws, weight @ counts, comparisons=18)
    products = lambda a: 1.0 * a[:, :8] * a[:, 1:]
    assert_rows_law(products(draws), weight @ products(counts), comparisons=18)


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
        numpyro.factor("never", jnp.where(jnp.arange(3) == 1, -jnp.exp(1e3 + z), 0.0).sum())

    block = GibbsBlock.from_model(model, ["z"])
    state = run_alone(block, {"z": np.array([0, 1, 0])}, 3, 2)
    assert (state.z["z"][:, 1] == 1).all() and (state.kept == 3).all()
    assert "3 draws kept a value" in block.get_diagnostics_str(jax.tree.map(lambda a: a[0], state))


# -- refusals --------------------------------------------------------------------------------------


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
        jax.jit(lambda y: GibbsBlock.from_model(mixture, ["z"], y).log_conditionals({}))(Y5)
    with pytest.raises(ArgumentError, match="sites and options"):
        gibbs_fn(block, ["z"])


@pytest.mark.parametrize(
    ("old", "new", "fits"),
    [
        (np.ones(5, int), np.full(5, 0.6), False),
        (np.ones(5, np.int8), np.arange(5) + 300, False),
        (np.ones(5), np.arange(5), True),
    ],
)
def test_arguments_of_a_wider_dtype_are_refused(old: Any, new: Any, fits: bool) -> None:
    def model(y: Any) -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.4).expand([5]).to_event(1))
        numpyro.factor("f", (z * y).sum())

    block, values = GibbsBlock.from_model(model, ["z"], old), {"z": np.zeros(5, int)}
    if fits:
        logits = np.diff(block.log_conditionals(values, new)["z"])[:, 0]
        np.testing.assert_allclose(logits, np.log(0.4 / 0.6) + new, rtol=1e-5)
        return
    with pytest.raises(StateError, match=rf"args\[0\] .* of dtype {jnp.result_type(new)}"):
        block.log_conditionals(values, new)
