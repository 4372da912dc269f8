# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that follow from a model: conditionals against the model's own density, and laws of draws."""

import pickle
from typing import Any

import block_tools
from hypothesis import given, settings, strategies as st
from model_cases import CASES, Y5, Case, X, brute_force, centred_mixture, latents, made, mixture, regression
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import HMC, MCMC, Gibbs, HMCGibbs
from numpyro.infer.util import log_density
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.core import random
from ebmpp.errors import IntractableError, StateError
from ebmpp.kernels import LongRun
from ebmpp.ppl import CoupledComposite, composite_expectation, gibbs_fn
from ebmpp.ppl.sites import Call
from helpers import assert_law, assert_rows_law, often


@pytest.mark.parametrize("name", CASES)
def test_conditionals_are_those_of_the_joint_density(name: str) -> None:
    case, block = made(name)
    assert block.conditionals.num_layers == case.layers
    for seed in range(2):
        values = latents(case.model, case.args, seed)
        exact, found = brute_force(case, block, values), block.log_conditionals(values)
        for site in case.sites:
            np.testing.assert_allclose(np.exp(found[site]), np.exp(exact[site]), atol=2e-5, err_msg=site)


@pytest.mark.parametrize("name", often(["mixture", "weighed_groups", "convolved"], "convolved"))
def test_x64(name: str) -> None:
    with jax.enable_x64(True):
        case, block = made(name)
        values = latents(case.model, case.args, 0)
        exact, found = brute_force(case, block, values), block.log_conditionals(values)
        for site in case.sites:
            assert found[site].dtype == jnp.float64
            np.testing.assert_allclose(np.exp(found[site]), np.exp(exact[site]), atol=1e-6, err_msg=site)


@pytest.mark.parametrize("name", ["mixture", "sliced_lattice", "counts", "scanned_chain"])
def test_draws_follow_the_conditionals(name: str) -> None:
    """Of the first layer, whose units are drawn given the state as it is."""
    case, block = made(name)
    values = latents(case.model, case.args, 0)
    own = {site: values[site] for site in case.sites}
    call = Call({n: v for n, v in values.items() if n not in own}, case.args, {})
    step = jax.jit(jax.vmap(lambda key: block.advance(own, call, random.key_pair(key))[0]))
    draws = step(jax.random.split(jax.random.key(0), 4000))
    exact, layers = brute_force(case, block, values), block.layers
    for site in case.sites:
        table, valid = (np.moveaxis(np.asarray(a), 0, -1) for a in block.posterior.values[site])
        first, law = layers[site] == 0, np.exp(exact[site])
        hits = ((np.asarray(draws[site])[..., None] == table) & valid).mean(0)
        assert_law(hits[first], law[first], np.sqrt(law * (1 - law) / 4000)[first])


def test_the_posterior_in_gibbs() -> None:
    """A lattice seen through noise of unknown precision, against enumeration, by a chain a key."""
    block = GibbsBlock.from_model(block_tools.model, ["x"], jnp.asarray(block_tools.NOISY))
    assert block.conditionals.num_layers == 2
    block.verify(block_tools.model, jnp.asarray(block_tools.NOISY))
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False, "trajectory_length": None}
    noise = HMC(block_tools.model, step_size=0.25, num_steps=4, **fixed)
    for kernel in (Gibbs([(block, ["x"]), (noise, None)]), HMCGibbs(noise, gibbs_fn(block), ["x"])):
        mcmc = MCMC(
            kernel, num_warmup=40, num_samples=30, num_chains=200, chain_method=jax.vmap, progress_bar=False
        )
        mcmc.run(jax.random.key(0), jnp.asarray(block_tools.NOISY))
        draws = mcmc.get_samples(group_by_chain=True)
        probability, precision = block_tools.exact_posterior()
        assert_rows_law(np.asarray(draws["x"] > 0, float).mean(1), probability, comparisons=14)
        assert_rows_law(np.asarray(draws["precision"]).mean(1), precision, comparisons=14)


@pytest.mark.slow
def test_pairs_of_a_composite_are_unbiased_and_meet() -> None:
    """The lattice's prior as an energy model, the precision conjugate: means against enumeration."""
    noisy = jnp.asarray(block_tools.NOISY)
    block = GibbsBlock.from_model(block_tools.spin_model, ["x"], noisy)
    assert block.conditionals.num_layers == 2
    kernel = CoupledComposite([block, block_tools.precision_step()])
    made = composite_expectation(
        kernel,
        lambda sites: {"x": sites["x"] > 0, "precision": sites["precision"]},
        noisy,
        rng_key=jax.random.key(3),
        num_pairs=3000,
        k=3,
        m=6,
    )
    probability, precision = block_tools.exact_posterior()
    assert made.num_unmet == 0 and (made.meeting_time > 1).any()
    assert_law(made.value["x"], probability, made.standard_error["x"], comparisons=7)
    assert_law(made.value["precision"], precision, made.standard_error["precision"], comparisons=7)


def test_coupled_chains_have_their_own_laws_and_meet_as_often_as_they_can() -> None:
    case, block = made("counts")
    sides = []
    for seed in range(2):
        values = latents(case.model, case.args, seed)
        sides.append((values, ({"z": values["z"]}, Call({"rate": values["rate"]}, case.args, {}))))
    step = jax.jit(jax.vmap(lambda key: block.couple(sides[0][1], sides[1][1], random.key_pair(key))))
    x, y, broken = step(jax.random.split(jax.random.key(0), 4000))
    assert not broken.any()
    laws = [np.exp(brute_force(case, block, values)["z"]) for values, _ in sides]
    for drawn, law in zip((x, y), laws, strict=True):
        hits = (np.asarray(drawn["z"])[..., None] == np.arange(4)).mean(0)
        assert_law(hits, law, np.sqrt(law * (1 - law) / 4000))
    together, same = np.asarray(x["z"] == y["z"]).mean(0), np.minimum(*laws).sum(-1)
    assert_law(together, same, np.sqrt(same * (1 - same) / 4000))


def test_it_pickles_and_draws_depend_on_the_key_and_the_step() -> None:
    case, block = made("markov_chain")
    values = latents(case.model, case.args, 0)
    kwargs = {"_gibbs_sites": {"rows": values["rows"]}}

    def chain(block: Any, steps: int, state: Any = None) -> Any:
        state = state or block.init(jax.random.key(1), 0, {"z": values["z"]}, case.args, kwargs)
        return jax.lax.fori_loop(0, steps, lambda _, s: block.sample(s, case.args, kwargs), state)

    long, again = chain(block, 6), chain(pickle.loads(pickle.dumps(block)), 3)
    assert (long.z["z"] == chain(block, 3, again).z["z"]).all()
    assert int(long.i) == 6 and int(long.kept) == 0
    assert long.z["z"].dtype == values["z"].dtype


def test_a_model_is_traced_once() -> None:
    called = []

    def counted(y: Any) -> None:
        called.append(0)
        mixture(y)

    block = GibbsBlock.from_model(counted, ["z"], Y5)
    values, before = latents(counted, (Y5,), 0), len(called) + 1
    kwargs = {"_gibbs_sites": {name: v for name, v in values.items() if name != "z"}}
    state = block.init(jax.random.key(1), 0, {"z": values["z"]}, (Y5,), kwargs)
    step = jax.jit(lambda state, y: block.sample(state, (y,), kwargs))
    state = step(step(state, Y5), Y5 + 1)
    assert step._cache_size() == 1
    assert len(called) == before - 1


def test_where_all_units_interact_it_must_be_asked_for() -> None:
    with pytest.raises(
        IntractableError, match=r"all 12 units .* 12 x 2 = 24 evaluations .* unit_by_unit=True"
    ):
        GibbsBlock.from_model(regression, ["z"], Y5, X)
    block = GibbsBlock.from_model(regression, ["z"], Y5, X, unit_by_unit=True)
    case = Case(regression, ("z",), (Y5, X), 12)
    values = latents(regression, (Y5, X), 0)
    found = block.log_conditionals(values)["z"]
    exact = brute_force(case, block, values)["z"]
    np.testing.assert_allclose(np.exp(found), np.exp(exact), atol=2e-5)
    block.verify(regression, Y5, X)
    call = Call({"b": values["b"]}, (Y5, X), {})
    step = lambda key: block.advance({"z": values["z"]}, call, random.key_pair(key))[0]["z"]
    draws = jax.jit(jax.vmap(step))(jax.random.split(jax.random.key(0), 4000))
    assert_rows_law(np.asarray(draws[:, 0], float), np.exp(exact)[0, 1])


def interacting(y: Any, x: Any) -> None:
    """Counts and indicators that a regression joins, seen through a function of whole numbers too."""
    z = numpyro.sample("z", dist.Binomial(jnp.array([2, 1, 2, 1, 1]), 0.4).to_event(1))
    w = numpyro.sample("w", dist.Bernoulli(0.5).expand([4, 1]).to_event(2))
    joined = x[:, :5] @ (z * jnp.array([1.0, -0.5, 0.7, 0.4, 1.2])) + (x[:, 5:] @ (1.0 - w))[:, 0]
    numpyro.sample("y", dist.Normal(joined, 1.0).to_event(1), obs=y)
    numpyro.factor("even", 0.4 * jnp.cos(1.0 * (z.sum() + w.sum())))


@pytest.mark.parametrize("tempering", often([None, (0.4, 1.0)], None))
def test_sweeps_unit_by_unit_leave_the_posterior_as_it_is(tempering: Any) -> None:
    """Three values a unit and two, two sites, forward and, in a transition, backward."""
    args = (Y5, X[:, :9])
    block = GibbsBlock.from_model(interacting, ["z", "w"], *args, unit_by_unit=True, tempering=tempering)
    assert block.conditionals.terms is None
    counts = np.stack(np.unravel_index(np.arange(9 * 2**7), (3, 2, 3, *[2] * 6)), 1)
    density = lambda c: log_density(interacting, args, {}, {"z": c[:5], "w": c[5:, None]})[0]
    log = np.asarray(jax.jit(jax.vmap(density))(jnp.asarray(counts)), float)
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    start = {"z": jnp.zeros(5, int), "w": jnp.zeros((4, 1), int)}

    def chain(key: Any) -> Any:
        state = block.init(key, 0, start, args, {})
        return jax.lax.fori_loop(0, 12, lambda _, s: block.sample(s, args, {}), state)

    state = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), 4000))
    found = np.concatenate([state.z["z"], state.z["w"][..., 0]], 1)
    assert int(state.kept.sum()) == 0
    assert_rows_law(np.asarray(found, float), weight @ counts, comparisons=18)
    pairs = lambda a: 1.0 * a[:, :8] * a[:, 1:]
    assert_rows_law(pairs(found), weight @ pairs(counts), comparisons=18)


def test_many_layers_share_one_program() -> None:
    """Six units that all interact: more layers than are compiled one by one."""

    def model(y: Any) -> None:
        z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([6]).to_event(1))
        w = numpyro.sample("w", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(z.sum() + w, 2.0), obs=y)
        numpyro.factor("pairs", 0.3 * w * (z[1:] * z[:-1]).sum())

    args = (jnp.array(3.0),)
    assert_conditionals(model, ["z", "w"], args, 7)
    GibbsBlock.from_model(model, ["z", "w"], *args).verify(model, *args)


def assert_conditionals(model: Any, sites: list, args: tuple, layers: int) -> None:
    block, values = GibbsBlock.from_model(model, sites, *args), latents(model, args, 0)
    assert block.conditionals.num_layers == layers
    exact = brute_force(Case(model, tuple(sites), args, layers), block, values)
    found = block.log_conditionals(values)
    for site in sites:
        np.testing.assert_allclose(np.exp(found[site]), np.exp(exact[site]), atol=5e-5, err_msg=site)


def test_units_that_many_elements_read() -> None:
    """One unit reads all of a plate, in one layer of two; and of seven layers that share a program."""
    y = np.random.default_rng(0).normal(size=60).astype(np.float32)
    assert_conditionals(centred_mixture, ["wide", "z"], (y,), 2)
    index = np.minimum(np.arange(60), 6) % 6

    def model(y: Any) -> None:
        z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([7]).to_event(1))
        numpyro.factor("all", jnp.cos(1.0 * z.sum()))
        numpyro.sample("y", dist.Normal(0.1 * z[index], 1.0).to_event(1), obs=y)

    assert_conditionals(model, ["z"], (y,), 7)


def test_another_model_is_told() -> None:
    _, block = made("mixture")
    block.verify(mixture, Y5)

    def sharper(y: Any) -> None:
        with handlers.scale(scale=2.0):
            mixture(y)

    with pytest.raises(StateError, match="log density changes by"):
        block.verify(sharper, Y5)


def test_what_the_model_looks_at_is_fixed() -> None:
    """Arguments whose values decide shapes are taken as they are."""

    def model(y: Any, groups: Any) -> None:
        with numpyro.plate("groups", int(groups.max()) + 1):
            z = numpyro.sample("z", dist.Bernoulli(0.4))
        numpyro.sample("y", dist.Normal(1.0 * z[groups], 1.0).to_event(1), obs=y)

    groups = np.array([0, 1, 1, 0, 2])
    block = GibbsBlock.from_model(model, ["z"], Y5, groups)
    assert block.conditionals.num_layers == 1
    values = {"z": jnp.array([0, 1, 0])}
    exact = brute_force(Case(model, ("z",), (Y5, groups), 1), block, values)["z"]
    np.testing.assert_allclose(np.exp(block.log_conditionals(values)["z"]), np.exp(exact), atol=2e-5)
    with pytest.raises(StateError, match="another value"):
        block.log_conditionals(values, Y5, groups[::-1].copy())


def test_impossible_values_stay() -> None:
    """A unit none of whose values is possible keeps the one that it has, and that is counted."""

    def model() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.4).expand([3]).to_event(1))
        numpyro.factor("never", jnp.where(jnp.arange(3) == 1, -jnp.exp(1e3 + z), 0.0).sum())

    block = GibbsBlock.from_model(model, ["z"])
    state = block.init(jax.random.key(0), 0, {"z": jnp.array([0, 1, 0])}, (), {})
    for _ in range(3):
        state = block.sample(state, (), {})
        assert int(state.z["z"][1]) == 1
    assert int(state.kept) == 3
    assert "3 draws kept a value" in block.get_diagnostics_str(state)


@given(data=st.data())
@settings(max_examples=6, derandomize=True)
def test_random_index_structures(data: st.DataObject) -> None:
    """Pairs by random indices, joined by a random function, weighed by a sibling."""
    edges = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
    join = data.draw(st.sampled_from([jnp.maximum, jnp.multiply, jnp.equal, jnp.hypot, jnp.subtract]))
    first, second = np.array(edges).T

    def model(y: Any) -> None:
        weight = numpyro.sample("weight", dist.Normal(0, 1))
        z = numpyro.sample("z", dist.Categorical(logits=jnp.zeros(3)).expand([5]).to_event(1))
        numpyro.factor("pairs", weight * (1.0 * join(z[first], 1.0 * z[second])).sum())
        numpyro.sample("y", dist.Normal(1.0 * z, 1.0).to_event(1), obs=y)

    block, values = GibbsBlock.from_model(model, ["z"], Y5), latents(model, (Y5,), 1)
    exact = brute_force(Case(model, ("z",), (Y5,), 0), block, values)["z"]
    np.testing.assert_allclose(np.exp(block.log_conditionals(values)["z"]), np.exp(exact), atol=2e-5)


@pytest.mark.slow
def test_a_long_run_of_a_block_alone_makes_the_steps_of_numpyro() -> None:
    """The kernel is copied where the run is traced, and is not made anew there."""
    noisy = jnp.asarray(block_tools.NOISY)
    block = GibbsBlock.from_model(block_tools.model, ["x", "precision"], noisy)
    options = {"num_warmup": 2, "num_samples": 6, "num_chains": 2, "progress_bar": False}
    mcmc = MCMC(block, chain_method=jax.vmap, **options)
    mcmc.run(jax.random.key(0), noisy)
    long = LongRun(MCMC(block, chain_method=jax.vmap, **options), lambda draw: draw["x"], batch_length=3)
    made = long.run(jax.random.key(0), noisy)
    assert np.array_equal(made.last_state.z["x"], mcmc.last_state.z["x"])
    np.testing.assert_allclose(made.last_state.z["precision"], mcmc.last_state.z["precision"], rtol=1e-5)
