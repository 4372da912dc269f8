# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Split of the units of a graph into layers that are induced forests. On the host only."""

from collections.abc import Sequence
import itertools

from jaxtyping import Integer
import networkx as nx
import numpy as np

from ebmpp.core import sharding
from ebmpp.core.groups import Edges
from ebmpp.graph.declaration import Declaration

#: Units of a block, by number in increasing order.
UnitsByBlock = dict[str, Integer[np.ndarray, "units"]]

_MAX_STATES = 256  # tables have the square of this many entries per edge
_MAX_DEGREE = 16  # mean number of neighbours; layers are unrolled, and the parts of a block are not


def suits(graph: Declaration, block: str) -> bool:
    """Return True for blocks of few values per unit, whose units interact with few others."""
    with sharding.eager():
        states = graph.families[block].states()
    edges = (
        _lateral(graph, block)
        if states is not None and len(states) <= _MAX_STATES
        else None
    )
    return (
        edges is not None and 2 * len(edges) < _MAX_DEGREE * graph.families[block].size
    )


def split(graph: Declaration, blocks: Sequence[str]) -> list[UnitsByBlock]:
    """Split the units into layers that are induced forests, without blocks whose units are independent.

    A torus takes two layers, and any graph at most half as many as its largest degree,
    plus one. Blocks of two units or more that share a factor are in separate layers, as
    if all their units interacted.
    """
    edges, dense = interactions(graph, blocks)
    sizes = [graph.families[b].size for b in blocks]
    block_of = np.repeat(np.arange(len(blocks)), sizes)
    joined = [b for i, b in enumerate(blocks) if (block_of[edges] == i).any()]
    if len(joined) < len(blocks):
        return split(graph, joined) if joined else []
    conflicts = [
        {j for j in range(len(blocks)) if {(i, j), (j, i)} & dense}
        for i in range(len(blocks))
    ]
    layers = forest_layers(edges, block_of.tolist(), conflicts)
    by_block = list(zip(blocks, np.split(layers, np.cumsum(sizes)[:-1]), strict=True))
    return [
        {b: np.flatnonzero(p == i) for b, p in by_block if i in p}
        for i in range(layers.max() + 1)
    ]


def forest_layers(
    edges: Edges, groups: Sequence[int], conflicts: Sequence[set[int]] = (set(),)
) -> Integer[np.ndarray, "units"]:
    """Return the layer of each unit, the first that it can join without a cycle.

    :param edges: distinct pairs of units.
    :param groups: the group of each unit.
    :param conflicts: by group, the groups that must be in other layers.
    """
    network = nx.empty_graph(len(groups))
    network.add_edges_from(edges.tolist())
    trees: list[tuple[nx.utils.UnionFind, set[int]]] = []
    layer_of: dict[int, int] = {}
    for unit, group in enumerate(groups):
        for number in itertools.count():
            if number == len(trees):
                trees.append((nx.utils.UnionFind(), set()))
            union, present = trees[number]
            joined = [union[v] for v in network[unit] if layer_of.get(v) == number]
            if len(set(joined)) == len(joined) and present.isdisjoint(conflicts[group]):
                break
        union.union(unit, *joined)
        present.add(group)
        layer_of[unit] = number
    return np.array(list(layer_of.values()), np.int64)


def interactions(
    graph: Declaration, blocks: Sequence[str]
) -> tuple[Edges, set[tuple[int, int]]]:
    """Return pairs of interacting units of ``blocks``, numbered block after block, and dense pairs of blocks.

    All units that share a factor interact, except for units of one block that its
    ``lateral`` does not name. So no three units of one term are in one forest, and the
    energy of a forest is one of pairs.
    """
    sizes = [graph.families[b].size for b in blocks]
    starts = np.cumsum([0, *sizes])
    pairs = [np.empty((0, 2), np.int64)]
    dense = set()
    for (i, a), (j, b) in itertools.combinations(enumerate(blocks), 2):
        if (a, b) not in graph.edges and (b, a) not in graph.edges:
            continue
        if min(sizes[i], sizes[j]) > 1:
            dense.add((i, j))
        else:
            first, second = np.meshgrid(
                starts[i] + np.arange(sizes[i]), starts[j] + np.arange(sizes[j])
            )
            pairs.append(np.stack([first.ravel(), second.ravel()], 1))
    pairs += [
        start + _lateral(graph, b) for start, b in zip(starts, blocks, strict=False)
    ]
    return np.concatenate(pairs), dense


def _lateral(graph: Declaration, block: str) -> Edges:
    """Return the distinct pairs of interacting units of a block."""
    factors = graph.splits[block].inner_factors if block in graph.splits else ()
    edges = [
        np.empty((0, 2), np.int64),
        *(f.edges(graph.families)[block] for f in factors),
    ]
    return np.unique(np.sort(np.concatenate(edges), axis=1), axis=0)
