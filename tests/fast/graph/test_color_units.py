# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Colours of units, made by arrays: proper, as few as networkx finds, alike where components are alike."""

from hypothesis import given, strategies as st
import networkx as nx
import numpy as np
import pytest

from ebmpp import Bias, FactorGraph, Pairwise, Spin
from ebmpp.graph import coloring
from ebmpp.graph.coloring import color, color_units


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    size = draw(st.integers(1, 14))
    pairs = [(a, b) for a in range(size) for b in range(a)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    flipped = draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
    edges = [(b, a) if flip else (a, b) for (a, b), flip in zip(chosen, flipped, strict=True)]
    return size, np.array(edges, np.int64).reshape(-1, 2)


@given(networks())
def test_colors_are_proper_and_as_few_as_networkx_finds(network: tuple[int, np.ndarray]) -> None:
    size, edges = network
    colors = color_units(size, edges)
    assert colors.shape == (size,) and colors.min() == 0
    assert (colors[edges[:, 0]] != colors[edges[:, 1]]).all()
    graph = nx.empty_graph(size)
    graph.add_edges_from(edges.tolist())
    for units in nx.connected_components(graph):
        ordered = sorted(units)
        own = colors[ordered]
        assert own[0] == 0 and set(own) == set(range(own.max() + 1))
        piece = nx.Graph()
        piece.add_nodes_from(ordered)
        piece.add_edges_from(graph.subgraph(units).edges)
        assert own.max() + 1 <= len(color(piece))


def test_replicas_are_colored_alike() -> None:
    ring = np.array([(0, 3), (3, 1), (1, 4), (4, 2), (2, 0)])  # an odd one
    colors = color_units(15, np.concatenate([ring, ring + 5, ring + 10]))
    np.testing.assert_array_equal(colors.reshape(3, 5), np.tile(colors[:5], (3, 1)))


def test_all_joined_units_have_a_color_each() -> None:
    np.testing.assert_array_equal(color_units(7, np.stack(np.triu_indices(7, 1), -1)), np.arange(7))


def test_pairs_of_two_factors_count_once() -> None:
    square = [(0, 1), (1, 2), (2, 3), (3, 0)]
    factors = [Bias("x"), Pairwise("x", square), Pairwise("x", [(1, 0), (2, 1)], name="more")]
    assert FactorGraph({"x": Spin(4)}, factors=factors).layers == (("x[0]",), ("x[1]",))


@pytest.mark.parametrize("side", [400])
def test_a_large_torus_is_declared_as_arrays(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    number = np.arange(side * side).reshape(side, side)
    right, down = (np.stack([number, np.roll(number, -1, axis)], -1).reshape(-1, 2) for axis in (0, 1))
    monkeypatch.setattr(coloring, "_color_component", None)  # networkx's
    made = FactorGraph({"x": Spin(side * side)}, factors=[Pairwise("x", np.concatenate([right, down]))])
    parts = made.splits["x"].units
    np.testing.assert_array_equal(np.bincount(made.splits["x"].colors), [side * side // 2] * 2)
    assert {(int(n) // side + int(n) % side) % 2 for n in parts[0]} == {0}
