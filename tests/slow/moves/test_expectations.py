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
from ebmpp import Categorical, FactorGraph, Observed, exact
from ebmpp.contrib import metropolized_sweep
from ebmpp.moves import Clusters, gibbs_sweep, tempered
from helpers import assert_law, random_params


def conditional_means(graph: FactorGraph, params: Any, **given: Any) -> dict[str, np.ndarray]:
    """Exact mean statistics given clamped blocks and observed units."""
    states, probs = exact.probabilities(graph, params)
    probs = np.asarray(probs, float)
    for block, value in given.items():
        seen = value if isinstance(value, Observed) else Observed(value, np.full(np.shape(value), True))
        probs = probs * (np.asarray(states[block])[:, seen.known] == seen.values[seen.known]).all(1)
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
        ("deep", {"coupling": "mixture", "pool": {"h1": np.float32(np.eye(3))}, "h2": np.float32([1, 0])}),
    ],
)
def test_expectations_are_unbiased(name: str, options: dict) -> None:
    graph, params = potts() if name == "potts" else (zoo.graph(name), random_params(zoo.graph(name), seed=3))
    given = {b: v for b, v in options.items() if b in graph.families}
    if options["coupling"] == "metropolized":
        options = options | {"coupling": (*metropolized_sweep(graph), *gibbs_sweep(graph))}
    options = {"rng_key": jax.random.key(1), "num_pairs": 3000, "k": 1, "m": 3} | options
    result = ebmpp.unbiased_expectation(graph, params, graph.statistics, **options)
    assert result.met.all()
    for b, mean in conditional_means(graph, params, **given).items():
        if b in result.value:
            assert_law(result.value[b], mean, result.standard_error[b])


def test_tempered_expectations_are_unbiased_given_observed_units() -> None:
    graph = zoo.graph("lattice")
    params, observed = random_params(graph, seed=3), Observed(np.ones(9), np.arange(9) == 1)
    options = {"coupling": tempered((0.0, 0.5, 1.0)), "rng_key": zoo.KEY, "num_pairs": 3000, "x": observed}
    result = ebmpp.unbiased_expectation(graph, params, graph.statistics, **options)
    exact_mean = conditional_means(graph, params, x=observed)["x"]
    assert_law(result.value["x"], exact_mean, result.standard_error["x"])
