# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased expectations with clusters, mixtures, metropolized draws and tempering, under observed units."""

from typing import Any

import networkx as nx
import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, FactorGraph, MaximalCoupling, Observed, Spin, exact, layered
from ebmpp.graph import parts
from ebmpp.graph.transforms.replicate import replicate, tempered_params
from ebmpp.kernels import TemperingCoupling, tempered_expectation
from ebmpp.moves import Clusters, gibbs_sweep, metropolized_sweep
from ebmpp.sampling import mixture_pool
from helpers import assert_law, pair, random_params, random_state


def conditional_means(graph: FactorGraph, params: Any, **given: Any) -> dict[str, np.ndarray]:
    """Exact mean statistics given clamped blocks and observed units."""
    states, probs = exact.probabilities(graph, params)
    probs = np.asarray(probs, float)
    for block, value in given.items():
        values, known = (
            (value.values, value.known)
            if isinstance(value, Observed)
            else (value, np.full(np.shape(value), True))
        )
        agrees = np.asarray(states[block])[:, np.asarray(known)] == np.asarray(values)[np.asarray(known)]
        probs = probs * agrees.all(1)
    statistics = graph.statistics(states)
    return {b: np.tensordot(probs / probs.sum(), np.asarray(t, float), 1) for b, t in statistics.items()}


def potts() -> tuple[FactorGraph, dict]:
    graph = FactorGraph.from_networkx(nx.cycle_graph(5), lambda n: Categorical(n, 3))
    params = random_params(graph, seed=3)
    return graph, params | {"x:x": jnp.abs(params["x:x"])}


FIRST_TWO = Observed(np.array([1.0, -1.0, 1, 1, 1, 1, 1, 1, 1]), np.arange(9) < 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lattice", {"coupling": Clusters("x"), "lag": 2}),
        ("lattice", {"coupling": Clusters("x"), "x": FIRST_TWO}),
        ("potts", {"coupling": Clusters("x")}),
        ("potts", {"coupling": Clusters("x"), "x": Observed(np.array([2, 0, 0, 0, 0]), np.arange(5) < 1)}),
        ("lattice", {"coupling": "metropolized", "x": FIRST_TWO}),
        (
            "deep",
            {"coupling": "mixture", "pool": {"h1": np.eye(3, dtype=np.float32)}, "h2": np.float32([1, 0])},
        ),
    ],
)
def test_expectations_are_unbiased(name: str, options: dict) -> None:
    graph, params = potts() if name == "potts" else (zoo.graph(name), random_params(zoo.graph(name), seed=3))
    given = {b: v for b, v in options.items() if b in graph.families}
    if options["coupling"] == "metropolized":
        options = options | {"coupling": (*metropolized_sweep(graph), *gibbs_sweep(graph))}
    result = ebmpp.unbiased_expectation(
        graph,
        params,
        graph.statistics,
        rng_key=jax.random.key(1),
        num_pairs=3000,
        **({"k": 1, "m": 3} | options),
    )
    assert result.met.all()
    for b, mean in conditional_means(graph, params, **given).items():
        if b in result.value:
            assert_law(result.value[b], mean, result.standard_error[b])


@pytest.mark.parametrize("name", ["complete", "lattice"])
def test_tempered_expectations_are_unbiased_given_observed_units(name: str) -> None:
    graph = (
        FactorGraph.from_networkx(nx.complete_graph(6), Bernoulli)
        if name == "complete"
        else zoo.graph("lattice")
    )
    params = random_params(graph, seed=3, scale=1.2)
    size = graph.families["x"].size
    observed = Observed(np.ones(size), np.arange(size) == 1)
    result = tempered_expectation(
        graph,
        params,
        graph.statistics,
        betas=(0.0, 0.5, 1.0),
        rng_key=jax.random.key(1),
        num_pairs=3000,
        x=observed,
    )
    assert_law(
        result.value["x"], conditional_means(graph, params, x=observed)["x"], result.standard_error["x"]
    )


@pytest.mark.parametrize("graph", [nx.cycle_graph(5), nx.lollipop_graph(5, 40)], ids=["unrolled", "table"])
def test_parts_of_replicas_have_the_conditionals_of_their_temperatures(graph: nx.Graph) -> None:
    """Interactions of few neighbours are unrolled, those of a hub come from a table."""
    betas = (0.0, 0.5, 1.0)
    graph = FactorGraph.from_networkx(graph, Spin)
    params, replicas = random_params(graph, seed=3, scale=1.2), replicate(graph, 3)
    split = replicas.splits["x"]
    np.testing.assert_array_equal(split.colors, np.tile(graph.splits["x"].colors, 3))
    x = {"x": random_state(replicas.families["x"], 0, (4,))}
    tempered = tempered_params(graph, params, jnp.array(betas))
    around, units = (
        parts.surround(replicas, tempered, x, "x"),
        parts.to_units(jnp.asarray(x["x"]), split.family),
    )
    expected = np.concatenate(
        [
            graph.natural_parameters(params | {"x:x": beta * params["x:x"]}, {"x": x["x"][:, r]}, "x")
            for r, beta in enumerate(betas)
        ],
        axis=1,
    )
    for part in range(split.num_parts):
        eta = parts.natural_part(replicas, tempered, x, units, "x", around, part)
        members = split.units[part]
        np.testing.assert_allclose(eta[:, : len(members)], expected[:, members], rtol=1e-4, atol=1e-5)


def test_tempered_pairs_meet_where_gibbs_pairs_do_not() -> None:
    """A ferromagnet with two modes, between which replicas exchange states."""
    graph = FactorGraph.from_networkx(nx.grid_2d_graph(4, 4), Spin, shared=True)
    params = {"x": jnp.full(16, 0.02), "x:x": jnp.asarray(0.9)}

    def met(kernel: Any) -> np.ndarray:
        @jax.jit
        def run(keys):
            state = kernel.init(keys, 0, None, (params,), {})
            step = lambda state, _: (kernel.sample(state, (params,), {}), None)
            return jax.lax.scan(step, state, length=150)[0].met

        return np.asarray(run(jax.random.split(jax.random.key(11), 40)))

    assert met(TemperingCoupling(graph, (0.0, 0.3, 0.45, 0.6, 1.0))).all()
    assert met(MaximalCoupling(graph)).mean() < 0.9


def test_rows_and_a_prepared_pool_give_the_same_expectation() -> None:
    graph = layered(a=Bernoulli(2), h1=Spin(2), h2=Bernoulli(2))
    params = random_params(graph, seed=3, scale=2.5)
    options = {"rng_key": jax.random.key(1), "num_pairs": 100, "coupling": "mixture"}
    rows = {"a": np.eye(2, dtype=np.float32), "h2": np.ones((2, 2), np.float32)}
    pool = mixture_pool(graph, params, rows, rng_key=jax.random.key(0))
    assert pool.eta["h1"].shape == (2, 2) and pool.log_normalizer.shape == (2,)
    fn = lambda x: x["a"]
    results = (ebmpp.unbiased_expectation(graph, params, fn, pool=p, **options) for p in (rows, pool))
    np.testing.assert_array_equal(*(result.value for result in results))
    partial = ebmpp.unbiased_expectation(graph, params, fn, pool={"a": rows["a"]}, **options)  # h2 is drawn
    assert np.isfinite(partial.value).all()


def test_pools_that_do_not_help_cause_a_warning() -> None:
    graph = pair(Bernoulli(60), Bernoulli(60))
    params = {"a": jnp.zeros(60), "b": jnp.zeros(60), "a:b": 2 * jnp.eye(60)}  # 60 pairs of units, mostly 1
    far = {b: np.zeros((5, 60), np.float32) for b in "ab"}
    options = {"rng_key": jax.random.key(0), "num_pairs": 8, "k": 400}
    with pytest.warns(UserWarning, match="pool"):
        result = ebmpp.unbiased_expectation(
            graph, params, lambda x: x["b"].mean(), coupling="mixture", pool=far, **options
        )
    assert result.met.all()
