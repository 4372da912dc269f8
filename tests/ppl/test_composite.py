# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled composites: unbiased estimates, kernels, and refusals.

Tests ppl/composite.py, ppl/conjugate.py, ppl/expectation.py.
"""

from functools import partial
from typing import Any

from block_tools import (
    COUPLING,
    NOISY,
    SHAPE,
    exact_posterior,
    offset_step,
    run_chains,
    spin_block,
)
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, FactorGraph, GibbsBlock, Pairwise, Spin, layered
from ebmpp.errors import StateError, UnmetError
from ebmpp.moves import forest_sweep
from ebmpp.ppl import Conjugate, CoupledComposite, composite_expectation
from helpers import assert_law, assert_rows_law, nightly


def forest_block() -> GibbsBlock:
    """The posterior with one block of six spins, drawn along forests under the params
    of each chain."""
    factors = [Bias("x"), Pairwise("x", nx.grid_2d_graph(*SHAPE), shared=True)]
    grid = FactorGraph({"x": Spin(SHAPE)}, factors=factors)
    params = {"x": lambda sites, y: y - sites["offset"], "x:x": np.float32(COUPLING)}
    return GibbsBlock(grid, ["x"], params, moves=forest_sweep(grid))


@pytest.mark.nightly
@pytest.mark.parametrize("declare", [spin_block, nightly(forest_block)])
def test_estimates_of_the_posterior_are_unbiased(declare: Any) -> None:
    kernel = CoupledComposite([declare(), offset_step()], lag=2)
    fn = lambda sites: {"x": sites["x"] > 0, "offset": sites["offset"]}
    options = {"rng_key": jax.random.key(3), "num_pairs": 3000, "k": 3, "m": 6}
    result = composite_expectation(kernel, fn, NOISY, **options)
    for name, exact in zip(("x", "offset"), exact_posterior(), strict=True):
        assert_law(
            result.value[name], exact, result.standard_error[name], comparisons=7
        )
    assert result.num_unmet == 0 and (result.meeting_time > 2).any()


def composite(lag: int = 1, **options: object) -> CoupledComposite:
    return CoupledComposite([spin_block(**options), offset_step()], lag=lag)


FIELDS = np.array([-1, -0.5, 0, 0.5, 1, 1.5], np.float32)


def conserved(fields: jax.Array, size: int, kind: str, penalty: float = 50.0) -> None:
    """A sum of bits that is nearly, or exactly, half of their number."""
    with numpyro.plate("units", size):
        x = numpyro.sample("x", dist.Bernoulli(logits=fields))
    gap = (x.sum() - size // 2) ** 2
    numpyro.factor(
        "sum", -penalty * gap if kind == "soft" else jnp.where(gap == 0, 0.0, -jnp.inf)
    )


def bits(sites: dict) -> jax.Array:
    return sites["x"] > 0


@pytest.mark.nightly
def test_pairs_that_meet_in_one_of_many_modes_are_reported() -> None:
    arguments = FIELDS, 6, "soft"  # a length and a string are static
    block = GibbsBlock.from_model(conserved, ["x"], *arguments, sequential=True)
    run = partial(composite_expectation, CoupledComposite([block]), bits, *arguments)
    options = {"rng_key": jax.random.key(1), "num_pairs": 100, "k": 100, "m": 200}
    with pytest.warns(UserWarning, match="overlap z"):
        result = run(**options)
    assert result.met.all() and result.overlap > 10
    with pytest.raises(UnmetError):
        run(**options, independent_starts=True, max_sweeps=300)
    start = {"x": np.array([1, 1, 1, 0, 0, 0])}
    with pytest.warns(UserWarning, match="where it started in all chains"):
        result = run(**options, init_params=start)
    assert (result.value == np.asarray(start["x"])).all() and np.isinf(result.overlap)
    for wrong in ({"x": np.ones(5)}, {"y": np.ones(6)}):
        with pytest.raises(StateError, match=next(iter(wrong))):
            run(**options, init_params=wrong)


@pytest.mark.nightly
def test_starts_are_possible() -> None:
    block = GibbsBlock.from_model(conserved, ["x"], FIELDS, 6, "hard", sequential=True)
    kernel, keys = CoupledComposite([block]), jax.random.split(jax.random.key(2), 200)
    state = kernel.init(keys, 0, {}, (FIELDS, 6, "hard"), {})
    assert (state.y["x"].sum(1) == 3).all() and len(
        np.unique(state.y["x"], axis=0)
    ) > 15
    assert state.still["x"].all() and not state.broken.any()
    with pytest.raises(StateError, match="'x'"):
        kernel.init(keys, 0, {"x": jnp.ones((200, 6), int)}, (FIELDS, 6, "hard"), {})


@pytest.mark.nightly
def test_metropolis_steps_are_coupled_too() -> None:
    def weight(x: dict, sites: dict, y: jax.Array) -> jax.Array:
        return -0.3 * (x["x"].sum() - 1.0) ** 2

    kernel, options = (
        composite(log_likelihood=weight, fraction=0.7),
        {"num_pairs": 3000, "k": 4},
    )
    result = composite_expectation(
        kernel, lambda s: s["x"] > 0, NOISY, rng_key=jax.random.key(4), **options
    )
    options = {"num_warmup": 30, "key": jax.random.key(5), "chain_method": "vectorized"}
    single = run_chains(composite(log_likelihood=weight), NOISY, 4000, 1, **options)
    draws = np.asarray(single.get_samples()["x"] > 0, float)
    error = np.hypot(result.standard_error, draws.std(0) / len(draws) ** 0.5)
    assert_law(result.value, draws.mean(0), error)


@pytest.fixture(scope="module")
def pairs() -> MCMC:
    fields = ("y", "met", "meeting_time", "t")
    options = {"num_warmup": 0, "key": jax.random.key(6), "chain_method": "vectorized"}
    return run_chains(composite(lag=2), NOISY, 400, 60, extra_fields=fields, **options)


@pytest.mark.nightly
def test_pairs_meet_and_stay_together(pairs: MCMC) -> None:
    fields = pairs.get_extra_fields(group_by_chain=True)
    draws = pairs.get_samples(group_by_chain=True)
    equal = np.ones(fields["met"].shape, bool)
    for site, value in draws.items():
        equal &= (
            np.asarray(value == fields["y"][site]).reshape(*equal.shape, -1).all(-1)
        )
    met, times = np.asarray(fields["met"]), np.asarray(fields["meeting_time"])
    assert (met == equal).all() and (np.diff(met.astype(int), axis=1) >= 0).all()
    assert met[:, -1].mean() > 0.95
    first = np.where(met.any(1), met.argmax(1) + 3, np.asarray(fields["t"])[:, -1])
    assert (times[:, -1] == np.where(times[:, 0] == 2, 2, first)).all()


@pytest.mark.nightly
def test_both_chains_of_a_pair_have_the_posterior(pairs: MCMC) -> None:
    probability, offset = exact_posterior()
    for chain in (pairs.last_state.z, pairs.last_state.y):
        assert_rows_law(np.asarray(chain["x"] > 0, float), probability, comparisons=14)
        assert_rows_law(np.asarray(chain["offset"]), offset, comparisons=14)


@pytest.mark.nightly
def test_latents_of_a_prior_are_part_of_the_pair() -> None:
    graph = layered(x=Bernoulli(3), h=Bernoulli(2))
    weights = 1.5 * np.float32([[1.0, -1], [0.5, 1], [-1, 0.2]])
    params = {"h": np.float32([0.0, 0.0]), "x": np.zeros(3, np.float32), "x:h": weights}
    block = GibbsBlock(
        graph, ["x"], params | {"x": lambda sites, y: (y - 0.5) * sites["precision"]}
    )
    conditional = lambda sites, y: dist.Gamma(
        2.0 + 1.5, 1.0 + 0.5 * ((y - sites["x"]) ** 2).sum()
    )
    kernel = CoupledComposite(
        [block, Conjugate("precision", conditional, dist.Gamma(2.0, 1.0))]
    )
    y = jnp.array([0.9, 0.2, 0.4])
    options = {"rng_key": jax.random.key(8), "num_pairs": 3000, "k": 2}
    result = composite_expectation(kernel, lambda s: s["x"], y, **options)
    states = np.array([[i & 1, i >> 1 & 1, i >> 2] for i in range(8)], float)
    rate = 1.0 + 0.5 * ((np.asarray(y) - states) ** 2).sum(1)
    weight = np.exp(np.logaddexp(0, states @ weights).sum(1) - 3.5 * np.log(rate))
    assert_law(result.value, weight @ states / weight.sum(), result.standard_error)
