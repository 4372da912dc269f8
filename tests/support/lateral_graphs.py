# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Graphs with blocks whose units interact, shared by the fast and the slow tests of them."""

from functools import cache
from typing import Any

import networkx as nx
import numpy as np

import jax

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Factor,
    FactorGraph,
    Pairwise,
    Spin,
)
from helpers import random_params


def gate(w: jax.Array, v: jax.Array, h: jax.Array) -> jax.Array:
    """Two visible units and a latent one at a time."""
    return -w[0] * v[0] * v[1] * h[0] - w[1] * v[1] * v[2] * h[1]


def triples(w: jax.Array, t: jax.Array) -> jax.Array:
    """Three units of one block, and a pair."""
    return -w[0] * t[0] * t[1] * t[2] - w[1] * t[1] * t[3]


TRIPLES = Factor(
    "x",
    energy=triples,
    init=np.zeros(2),
    name="w",
    lateral={"x": [(0, 1), (1, 2), (0, 2), (1, 3)]},
)


def two_blocks(v: Any, h: Any, *lateral: Factor) -> FactorGraph:
    """A visible and a latent block, biases, a bilinear factor, and lateral factors."""
    return FactorGraph(
        {"v": v}, {"h": h}, [Bias("v"), Bias("h"), Bilinear("v", "h"), *lateral]
    )


_GRAPHS = {
    "potts": lambda: FactorGraph.from_networkx(
        nx.cycle_graph(5), lambda n: Categorical(n, 3)
    ),
    "many parts": lambda: FactorGraph.from_networkx(nx.complete_graph(6), Bernoulli),
    "semi-restricted": lambda: two_blocks(
        Bernoulli(4), Bernoulli(2), Pairwise("v", nx.cycle_graph(4))
    ),
    "lateral latents": lambda: two_blocks(
        Bernoulli(2), Spin(3), Pairwise("h", nx.path_graph(3))
    ),
    "custom": lambda: two_blocks(
        Bernoulli(3),
        Spin(2),
        Factor(
            "v",
            "h",
            energy=gate,
            init=np.zeros(2),
            lateral={"v": [(0, 1), (1, 2)]},
            name="gate",
        ),
    ),
    "triples": lambda: FactorGraph({"x": Bernoulli(4)}, factors=[Bias("x"), TRIPLES]),
}
NAMES = tuple(_GRAPHS)


@cache
def lateral(name: str) -> tuple[FactorGraph, dict[str, Any]]:
    """A graph and params of strong interactions."""
    graph = _GRAPHS[name]()
    return graph, random_params(graph, seed=3, scale=0.9)


@cache
def enumerated(name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Every joint state, and its probability, in float64."""
    graph, params = lateral(name)
    axes = [
        u
        for f in graph.families.values()
        for u in [np.asarray(f.states(), float)] * f.size
    ]
    flat = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], -1)
    states, start = {}, 0
    for b, f in graph.families.items():
        states[b] = flat[:, start : (start := start + f.size)].astype(f.dtype)
    log_weights = np.asarray(jax.jit(graph.log_density)(params, states), float)
    return states, np.exp(log_weights - np.logaddexp.reduce(log_weights))
