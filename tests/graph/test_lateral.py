# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks whose units interact: sweeps of one chain and of a pair, search, and mean field.

Tests core/groups.py, graph/factors/lateral.py.
"""

import dataclasses
import itertools

from lateral_graphs import NAMES, enumerated, lateral
import networkx as nx
import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import FactorGraph
from ebmpp.core import random
from ebmpp.estimators import MeanField
from ebmpp.moves import gibbs_sweep
from ebmpp.moves.move import coupled_sweep, draw_sweep
from ebmpp.moves.target import Target
from helpers import assert_law, often

ROWS = 4000
CASES = {
    f"{name}, {kind}": (name, kind)
    for name, kind in itertools.product(NAMES, ("maximal", "common"))
}


def features(graph: FactorGraph, x: dict[str, np.ndarray]) -> np.ndarray:
    """Statistics of all units, and products of two."""
    # x may be in another order
    states = {b: np.asarray(f.states()) for b, f in graph.families.items()}
    indicators = [
        (x[b][..., None] == v[1:]).reshape(len(x[b]), -1) for b, v in states.items()
    ]
    t = np.concatenate([np.ones((len(indicators[0]), 1)), *indicators], 1)
    return (t[:, :, None] * t[:, None, :])[:, *np.triu_indices(t.shape[1], 1)]


@pytest.mark.parametrize("case", often(CASES, "semi-restricted, maximal"))
def test_sweeps_keep_the_distribution(case: str) -> None:
    """A sweep of exact draws, and a coupled sweep of exact pairs, of which the last
    quarter are equal."""
    name, kind = CASES[case]
    graph, params = lateral(name)
    states, probs = enumerated(name)
    generator = np.random.default_rng(0)
    draw = lambda: generator.choice(len(probs), ROWS, p=probs)
    first, second = draw(), draw()
    second[-ROWS // 4 :] = first[-ROWS // 4 :]
    z = {b: np.stack([x[first], x[second]]) for b, x in states.items()}

    @jax.jit
    def sweep(params: dict, z: dict) -> tuple:
        keys = random.fold_in(random.key_pair(zoo.KEY), jnp.arange(ROWS))
        target, moves = Target(graph, params), gibbs_sweep(graph)
        alone, _ = draw_sweep(target, {b: v[0] for b, v in z.items()}, moves, keys)
        coupled = [dataclasses.replace(move, kind=kind) for move in moves]
        both, met, broken, _ = coupled_sweep(target, z, coupled, keys)
        return alone, both, met, broken

    alone, both, met, broken = jax.device_get(sweep(params, z))
    chains = [alone, *({b: v[i] for b, v in both.items()} for i in range(2))]
    assert (
        not broken.any() and met[-ROWS // 4 :].all() and 0 < met[: ROWS // 2].mean() < 1
    )
    # every unit is drawn again
    for chain in (
        alone,
        {b: v[0] for b, v in both.items()},
    ):
        assert all((chain[b] != start[0]).any(0).all() for b, start in z.items())
    equal = np.all([(v[0] == v[1]).reshape(ROWS, -1).all(1) for v in both.values()], 0)
    np.testing.assert_array_equal(met, equal)
    mean = probs @ features(graph, states)
    error = np.sqrt(mean * (1 - mean) / ROWS)
    for chain in chains:
        assert_law(features(graph, chain).mean(0), mean, error, 3 * mean.size)


def test_mean_field_of_interacting_latents_is_a_fixed_point() -> None:
    graph, params = lateral("lateral latents")
    v = {"v": np.float32([[1, 0]])}
    mean = jax.jit(lambda p: MeanField(100).statistics(graph, p, v)["h"][0])(params)
    weight = np.zeros((3, 3))
    for w, (i, j) in zip(params["h:h"], nx.path_graph(3).edges, strict=True):
        weight[i, j] = weight[j, i] = w
    eta = (
        np.asarray(params["h"])
        + v["v"][0] @ np.asarray(params["v:h"])
        + weight @ np.asarray(mean)
    )
    np.testing.assert_allclose(mean, np.tanh(eta), atol=1e-5)


@pytest.mark.nightly
def test_search_ends_where_no_unit_would_change() -> None:
    graph, params = lateral("many parts")
    start = {"x": np.random.default_rng(0).integers(0, 2, (20, 6)).astype(np.float32)}
    state = ebmpp.local_search(graph, params, rng_key=zoo.KEY, init=start).state
    np.testing.assert_array_equal(graph.mode(params, state, "x"), state["x"])
