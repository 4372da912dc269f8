# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Colourings of the units of a block: proper, with as few colours as networkx needs,
and reproducible.

Tests graph/coloring.py.
"""

import itertools
import os
import subprocess
import sys

from hypothesis import given, settings, strategies as st
import networkx as nx
import numpy as np
import pytest

from ebmpp import Bias, FactorGraph, Pairwise, Spin
from ebmpp.graph import coloring
from ebmpp.graph.coloring import color, color_units


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    """A number of units, and pairs of them in any order."""
    size = draw(st.integers(1, 14))
    pairs = [(a, b) for a in range(size) for b in range(a)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    if draw(st.booleans()):
        edges = [(b, a) for a, b in edges]
    return size, np.array(edges, np.int64).reshape(-1, 2)


@settings(max_examples=60)
@given(networks())
def test_colours_are_proper_and_as_few_as_networkx_needs(
    network: tuple[int, np.ndarray],
) -> None:
    size, edges = network
    colors = color_units(size, edges)
    assert colors.shape == (size,) and colors.min() == 0
    assert (colors[edges[:, 0]] != colors[edges[:, 1]]).all()
    graph = nx.empty_graph(size)
    graph.add_edges_from(edges.tolist())
    for units in map(sorted, nx.connected_components(graph)):
        component = nx.Graph()
        component.add_nodes_from(units)
        component.add_edges_from(graph.subgraph(units).edges)
        assert colors[units[0]] == 0
        assert set(colors[units]) == set(range(colors[units].max() + 1))
        layers = color(component)
        assert sorted(itertools.chain(*layers)) == units and layers[0][0] == units[0]
        assert not any(component.subgraph(layer).edges for layer in layers)
        assert (
            colors[units].max() + 1
            <= len(layers)
            <= (2 if nx.is_bipartite(component) else size)
        )


def test_replicas_have_the_same_colours() -> None:
    ring = np.array([(0, 3), (3, 1), (1, 4), (4, 2), (2, 0)])  # an odd one
    colors = color_units(15, np.concatenate([ring, ring + 5, ring + 10]))
    np.testing.assert_array_equal(colors.reshape(3, 5), np.tile(colors[:5], (3, 1)))


def test_pairs_of_two_factors_count_once() -> None:
    square = [(0, 1), (1, 2), (2, 3), (3, 0)]
    factors = [
        Bias("x"),
        Pairwise("x", square),
        Pairwise("x", [(1, 0), (2, 1)], name="more"),
    ]
    assert FactorGraph({"x": Spin(4)}, factors=factors).layers == (("x[0]",), ("x[1]",))


def test_large_torus_is_coloured_without_networkx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = 400
    number = np.arange(side * side).reshape(side, side)
    right, down = (
        np.stack([number, np.roll(number, -1, axis)], -1).reshape(-1, 2)
        for axis in (0, 1)
    )
    monkeypatch.setattr(coloring, "_color_component", None)
    colors = color_units(side * side, np.concatenate([right, down]))
    np.testing.assert_array_equal(
        colors.reshape(side, side), np.indices((side, side)).sum(0) % 2
    )


def colored() -> str:
    """Layers of graphs that networkx's smallest_last, fed with strings, colours by hash."""
    layers = []
    for seed in (17, 180, 188, 202, 241, 340):
        numbers = nx.gnp_random_graph(12, 0.4, seed=seed)
        graph = nx.Graph()
        graph.add_nodes_from(f"block{i}" for i in numbers)
        graph.add_edges_from({(f"block{a}", f"block{b}") for a, b in numbers.edges})
        layers.append(color(graph))
    return str(layers)


@pytest.mark.nightly
def test_layers_are_the_same_in_another_process() -> None:
    environment = os.environ | {
        "PYTHONHASHSEED": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    program = f"import runpy; print(runpy.run_path({__file__!r})['colored']())"
    command = [sys.executable, "-c", program]
    other = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == colored()
