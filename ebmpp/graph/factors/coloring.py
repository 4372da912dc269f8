# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Proper colourings: of the block graph into layers, and of the units of a block that interact into parts."""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
from typing import Any

import networkx as nx
import numpy as np
from scipy import sparse

from ebmpp.errors import ArgumentError
from ebmpp.families import Family
from ebmpp.graph.factors import Factor
from ebmpp.graph.factors.lateral import Local, Split

_STRATEGIES = ("DSATUR", "smallest_last", "largest_first")
_EXHAUSTIVE = 20_000  # edges; DSATUR takes 9 s on a torus of 4096 nodes and 14 s on 784 all joined
_DENSE = 1_000_000  # edges and nodes; smallest-last takes many seconds beyond


def color(graph: nx.Graph) -> tuple[tuple[Any, ...], ...]:
    """Split the nodes into independent sets, as few as the strategies find.

    Two colours where the graph is bipartite (exact and fast), else the best of networkx's greedy strategies.
    Layers keep the order in which nodes were added: the first node is in the first layer, and so is the
    first node of every connected component.

    Nodes are coloured by position. networkx takes nodes out of sets, whose order for strings changes with
    ``PYTHONHASHSEED``, and so would the layers, the draws and the continuation of a saved run.

    :param graph: undirected, without self-loops.
    :return: the layers, each a tuple of nodes in their order in ``graph``.
    :raises ArgumentError: when a node has a self-loop.
    """
    loops = sorted(str(a) for a, b in graph.edges if a == b)
    if loops:
        raise ArgumentError(f"nodes {loops} are connected to themselves: no colouring separates them")
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    by_position = nx.empty_graph(len(nodes))
    by_position.add_edges_from(sorted(tuple(sorted((position[a], position[b]))) for a, b in graph.edges))
    if nx.is_bipartite(by_position):
        colors = _bipartite(by_position)
    else:
        size = by_position.number_of_edges() + len(nodes)
        strategies = _STRATEGIES[0 if size <= _EXHAUSTIVE else 1 if size <= _DENSE else 2 :]
        candidates = [nx.greedy_color(by_position, strategy) for strategy in strategies]
        colors = min(candidates, key=lambda c: max(c.values()))
    for a, b in by_position.edges:
        if colors[a] == colors[b]:
            raise ArgumentError(f"{nodes[a]!r} and {nodes[b]!r} interact but were given the same layer")
    classes: dict[int, list[Any]] = {}
    for i, node in enumerate(nodes):
        classes.setdefault(colors[i], []).append(node)
    return tuple(tuple(members) for members in classes.values())


def _bipartite(graph: nx.Graph) -> dict[int, int]:
    raw = nx.bipartite.color(graph)
    colors = {}
    for component in nx.connected_components(graph):
        first = min(component)
        colors |= {node: raw[node] ^ raw[first] for node in component}
    return colors


# -- units of a block ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class SplitBlock(Split):
    """A block of a graph in parts, and the factors over it.

    :param own: the factors in which its units interact.
    :param others: the other factors over the block.
    """

    own: tuple[Factor, ...]
    others: tuple[Factor, ...]

    @functools.cached_property
    def locals(self) -> tuple[Local | None, ...]:
        """The quicker way of each factor of :attr:`own`, where it has one."""
        return tuple(f.local({self.block: self.family}, self) for f in self.own)


def split_blocks(families: Mapping[str, Family], factors: Iterable[Factor]) -> dict[str, SplitBlock]:
    """A split of every block whose units interact.

    :raises DeclarationError: for pairs that are wrong.
    """
    factors = tuple(factors)
    found: dict[str, list[np.ndarray]] = {}
    for factor in factors:
        for block, edges in factor.edges(families).items():
            if len(edges):
                found.setdefault(block, []).append(edges)
    made = {}
    for block, edges in found.items():
        inside = tuple(f for f in factors if any(b == block for b, _ in f.lateral))
        others = tuple(f for f in factors if block in f.blocks and f not in inside)
        colors = color_units(families[block].size, edges[0] if len(edges) == 1 else _once(edges))
        made[block] = SplitBlock(block, families[block], colors, inside, others)
    return made


def _once(edges: Iterable[np.ndarray]) -> np.ndarray:
    """Pairs of several factors, each once, in their order."""
    every = np.concatenate(list(edges))
    _, first = np.unique(np.sort(every, axis=1), axis=0, return_index=True)
    return every[np.sort(first)]


def color_units(size: int, edges: np.ndarray) -> np.ndarray:
    """Colours, component by component, so that components alike (replicas, say) are coloured alike.

    As arrays where two colours will do, or all units of a component are joined; networkx colours the others.

    :param edges: each pair once.
    """
    if 2 * len(edges) == size * (size - 1):  # all joined: of 10,000 units 50 million pairs
        return np.arange(size)
    label, colors = _in_two(size, edges)
    order = np.argsort(label, kind="stable")
    left = np.unique(label[colors < 0])
    place = np.zeros(size, np.int64)
    by_edge = np.argsort(label[edges[:, 0]], kind="stable")
    starts = np.searchsorted(label[order], [left, left + 1])
    ends = np.searchsorted(label[edges[by_edge, 0]], [left, left + 1])
    for units, own in zip(starts.T, ends.T, strict=True):
        inside, own = order[slice(*units)], edges[by_edge[slice(*own)]]
        if 2 * len(own) == len(inside) * (len(inside) - 1):  # all joined: a colour each
            colors[inside] = np.arange(len(inside))
            continue
        place[inside] = np.arange(len(inside))
        colors[inside] = _color_component(len(inside), place[own].tobytes())
    return colors


def _in_two(size: int, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each unit's component and its colour, 0 or 1; -1 in components that two colours do not suffice for.

    In the graph of two copies of each unit, where an edge joins copies that differ, the copies of a unit are
    in one component if there is an odd cycle, and else tell the sides apart.
    """
    a, b = edges.T
    rows, columns = np.concatenate([a, a + size]), np.concatenate([b + size, b])
    cover = sparse.coo_matrix((np.ones(len(rows), np.int8), (rows, columns)), shape=(2 * size, 2 * size))
    _, twice = sparse.csgraph.connected_components(cover, directed=False)
    here, there = twice[:size], twice[size:]
    _, first, label = np.unique(np.minimum(here, there), return_index=True, return_inverse=True)
    colors = (here != here[first][label]).astype(np.int64)  # the first unit of a component has colour 0
    return label, np.where(here == there, -1, colors)


@functools.lru_cache(maxsize=64)
def _color_component(size: int, edges: bytes) -> np.ndarray:
    graph = nx.empty_graph(size)
    graph.add_edges_from(np.frombuffer(edges, np.int64).reshape(-1, 2).tolist())
    colors = np.zeros(size, np.int64)
    for part, units in enumerate(color(graph)):
        colors[list(units)] = part
    return colors
