# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Replicas of blocks whose units interact: conditionals, colours, and laws against enumeration."""

import networkx as nx
import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    FactorGraph,
    Gaussian,
    Observed,
    Pairwise,
    ParallelTempering,
    Spin,
    exact,
)
from ebmpp.graph import parts
from ebmpp.graph.transforms.replicate import replicate, tempered_params
from ebmpp.kernels import TemperingCoupling, tempered_expectation
from helpers import assert_law, assert_rows_law, random_params, random_state

BETAS = (0.0, 0.5, 1.0)
GRAPHS = {
    "ising": FactorGraph.from_networkx(nx.grid_2d_graph(2, 3), Spin),
    "potts": FactorGraph.from_networkx(nx.cycle_graph(5), lambda n: Categorical(n, 3)),
    "many parts": FactorGraph.from_networkx(nx.complete_graph(6), Bernoulli),
    "uneven parts": FactorGraph.from_networkx(nx.lollipop_graph(5, 40), Spin),
    "learned variance": FactorGraph.from_networkx(nx.cycle_graph(4), lambda n: Gaussian(n, "learned")),
    "semi-restricted": FactorGraph(
        {"v": Bernoulli((2, 2))},
        {"h": Spin(2)},
        [Bias("v"), Bias("h"), Bilinear("v", "h"), Pairwise("v", nx.grid_2d_graph(2, 2))],
    ),
}
PARAMS = {name: random_params(graph, seed=3, scale=1.2) for name, graph in GRAPHS.items()}


slow = pytest.mark.slow
QUICK = ("potts", "uneven parts")  # a table unrolled and one that is not


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else slow) for n in GRAPHS])
def test_conditionals_of_parts_are_those_of_each_temperature(name: str) -> None:
    graph, params = GRAPHS[name], PARAMS[name]
    (block,) = graph.splits
    whole = replicate(graph, 3)
    split, single = whole.splits[block], graph.splits[block]
    np.testing.assert_array_equal(split.colors, np.tile(single.colors, 3))
    assert None not in split.locals
    x = {b: random_state(f, seed, (4,)) for seed, (b, f) in enumerate(whole.families.items())}
    tempered = tempered_params(graph, params, jnp.array(BETAS))
    around = parts.surround(whole, tempered, x, block)
    units = parts.to_units(jnp.asarray(x[block]), split.family)
    inner = [f.name for f in graph.factors if f.interacts]
    wanted = [
        graph.natural_parameters(
            params | {f: beta * params[f] for f in inner}, {b: v[:, r] for b, v in x.items()}, block
        ).reshape(4, single.family.size, *single.family.stat_shape)
        for r, beta in enumerate(BETAS)
    ]
    wanted = np.concatenate(wanted, axis=1)
    for part in range(split.num_parts):
        eta = parts.natural_part(whole, tempered, x, units, block, around, part)
        own = split.units[part]
        np.testing.assert_allclose(eta[:, : len(own)], wanted[:, own], rtol=1e-4, atol=1e-5)


def simulate(kernel, params, chains: int, sweeps: int):
    """The last state of many chains, and whether pairs had met after each sweep."""

    @jax.jit
    def run(keys):
        state = kernel.init(keys, 0, None, (params,), {})

        def step(state, _):
            state = kernel.sample(state, (params,), {})
            return state, getattr(state, "met", ())

        return jax.lax.scan(step, state, length=sweeps)

    return run(jax.random.split(jax.random.key(11), chains))


NAMES = [pytest.param(n, marks=slow) for n in ("ising", "potts", "many parts", "semi-restricted")]


@slow
@pytest.mark.parametrize("name", ["ising", "potts", "many parts", "semi-restricted"])
def test_every_replica_has_the_law_of_its_temperature(name: str) -> None:
    graph, params = GRAPHS[name], PARAMS[name]
    state, _ = simulate(ParallelTempering(graph, BETAS), params, 3000, 15)
    inner = [f.name for f in graph.factors if f.interacts]
    for r, beta in enumerate(BETAS):
        wanted = exact.moments(graph, params | {f: beta * params[f] for f in inner})
        for b, statistics in graph.statistics({b: v[:, r] for b, v in state.replicas.items()}).items():
            assert_rows_law(statistics, wanted[b], comparisons=60)


@pytest.mark.parametrize("name", NAMES)
def test_both_chains_of_a_pair_have_the_law_of_the_model(name: str) -> None:
    graph, params = GRAPHS[name], PARAMS[name]
    state, met = simulate(TemperingCoupling(graph, BETAS, lag=2), params, 3000, 15)
    wanted = exact.moments(graph, params)
    for chain in (state.z, state.y):
        for b, statistics in graph.statistics(chain).items():
            assert_rows_law(statistics, wanted[b], comparisons=60)
    assert (np.diff(met.astype(int), axis=0) >= 0).all() and met[-1].mean() > 0.8 and not met[0].all()


@slow
@pytest.mark.parametrize("name", ["many parts", "semi-restricted"])
def test_estimates_are_unbiased_given_held_units(name: str) -> None:
    graph, params = GRAPHS[name], PARAMS[name]
    block = next(iter(graph.visible))
    family = graph.families[block]
    known = (np.arange(family.size) == 1).reshape(family.shape)
    found = tempered_expectation(
        graph,
        params,
        graph.statistics,
        betas=BETAS,
        rng_key=jax.random.key(1),
        num_pairs=3000,
        **{block: Observed(np.ones(family.shape), known)},
    )
    listed, probs = exact.probabilities(graph, params)
    agree = np.asarray(listed[block])[:, known][:, 0] == 1
    for b, value in graph.statistics({b: v[agree] for b, v in listed.items()}).items():
        wanted = np.average(value, axis=0, weights=np.asarray(probs)[agree])
        assert_law(found.value[b], wanted, found.standard_error[b])


@slow
def test_pairs_meet_where_plain_ones_stay_apart() -> None:
    """A magnet with two modes: replicas of a lattice exchange them."""
    graph = FactorGraph.from_networkx(nx.grid_2d_graph(4, 4), Spin, shared=True)
    params = {"x": jnp.full(16, 0.02), "x:x": jnp.asarray(0.9)}
    state, _ = simulate(TemperingCoupling(graph, (0.0, 0.3, 0.45, 0.6, 1.0)), params, 40, 150)
    plain, _ = simulate(ebmpp.MaximalCoupling(graph), params, 40, 150)
    assert state.met.all() and plain.met.mean() < 0.9
