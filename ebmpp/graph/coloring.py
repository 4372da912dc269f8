# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Layers: a proper colouring of the block graph."""

from collections.abc import Mapping
from typing import Any

import networkx as nx

from ebmpp.errors import ArgumentError

_STRATEGIES = ("DSATUR", "smallest_last", "largest_first")
_EXHAUSTIVE = 20_000  # edges; DSATUR takes 9 s on a torus of 4096 nodes and 14 s on 784 all joined
_DENSE = 1_000_000  # edges and nodes; smallest-last takes many seconds beyond


def color(graph: nx.Graph) -> tuple[tuple[Any, ...], ...]:
    """Split the nodes into independent sets, as few as the strategies find.

    Two colours wherever the graph is bipartite (exact and fast), else the best of networkx's greedy
    strategies. Layers keep the order in which nodes were added: the first node is in the first layer,
    and so is the first node of every connected component.

    :param graph: undirected, without self-loops.
    :return: the layers, each a tuple of nodes in their order in ``graph``.
    :raises ArgumentError: when a node has a self-loop.

    **Example**

    >>> import networkx as nx
    >>> color(nx.path_graph(["v", "h1", "h2"]))
    (('v', 'h2'), ('h1',))
    """
    loops = sorted(str(a) for a, b in graph.edges if a == b)
    if loops:
        raise ArgumentError(f"nodes {loops} are connected to themselves: no colouring separates them")
    if nx.is_bipartite(graph):
        colors = _bipartite(graph)
    else:
        size = graph.number_of_edges() + len(graph)
        strategies = _STRATEGIES[0 if size <= _EXHAUSTIVE else 1 if size <= _DENSE else 2 :]
        found = [nx.greedy_color(graph, strategy) for strategy in strategies]
        colors = min(found, key=lambda c: max(c.values()))
    validate(graph, colors)
    classes: dict[int, list[Any]] = {}
    for node in graph.nodes:
        classes.setdefault(colors[node], []).append(node)
    return tuple(tuple(nodes) for nodes in classes.values())


def _bipartite(graph: nx.Graph) -> dict[Any, int]:
    raw = nx.bipartite.color(graph)
    colors = {}
    position = {node: i for i, node in enumerate(graph.nodes)}
    for component in nx.connected_components(graph):
        first = min(component, key=position.__getitem__)
        colors |= {node: raw[node] ^ raw[first] for node in component}
    return colors


def validate(graph: nx.Graph, colors: Mapping[Any, int]) -> None:
    """Check that no edge joins two nodes of one colour.

    :raises ArgumentError: naming the first pair that does.
    """
    for a, b in graph.edges:
        if colors[a] == colors[b]:
            raise ArgumentError(f"{a!r} and {b!r} interact but were given the same layer")
