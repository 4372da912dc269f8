# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Split of the units of a graph into layers that are induced forests. On the host only."""

from collections.abc import Sequence
import itertools

from jaxtyping import Integer
import networkx as nx
import numpy as np

from ebmpp.core import Edges, sharding
from ebmpp.graph.declaration import Declaration

#: Units of a block, by number in increasing order.
UnitsByBlock = dict[str, Integer[np.ndarray, "units"]]

_MAX_STATES = 256  # tables have the square of this many entries per edge
_MAX_DEGREE = 16  # mean number of neighbours; layers are unrolled, and the parts of a block are not


def suits(graph: Declaration, block: str) -> bool:
    """Return True for blocks of few values per unit, whose units interact with few others."""
    family = graph.families[block]
    with sharding.eager():
        states = family.states()
    if states is None or len(states) > _MAX_STATES or block in graph.evaluated:
        return False
    return 2 * len(_lateral(graph, block)) < _MAX_DEGREE * family.size


def split(graph: Declaration, blocks: Sequence[str]) -> list[UnitsByBlock]:
    """Split the units into layers that are induced forests.

    Blocks whose units are independent are left out.

    A torus takes two layers, and any graph at most half as many as its largest degree,
    plus one. Blocks of two units or more that share a factor are in separate layers, as
    if all their units interacted.
    """
    edges, conflicts = interactions(graph, blocks)
    sizes = graph.sizes(blocks)
    block_of = np.repeat(np.arange(len(blocks)), sizes)
    block_of_end = block_of[edges]
    joined = [b for i, b in enumerate(blocks) if i in block_of_end]
    if not joined:
        return []
    if len(joined) < len(blocks):
        return split(graph, joined)
    layers = forest_layers(edges, block_of.tolist(), conflicts)
    by_block = np.split(layers, np.cumsum(sizes)[:-1])
    result = [{} for _ in range(layers.max() + 1)]
    for b, layer_of in zip(blocks, by_block, strict=True):
        for number in np.unique(layer_of):
            result[number][b] = np.flatnonzero(layer_of == number)
    return result


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
    trees = []
    layer_of = {}
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
) -> tuple[Edges, list[set[int]]]:
    """Return pairs of interacting units, and by block, the blocks that conflict with it.

    Units are numbered block after block. All units that share a factor interact, except
    for units of one block that its ``lateral`` does not name. So no three units of one
    term are in one forest, and the energy of a forest is one of pairs. Two blocks of
    several units that share a factor conflict.
    """
    sizes = graph.sizes(blocks)
    starts = np.cumsum([0, *sizes])
    units = [np.arange(*starts[i : i + 2]) for i in range(len(blocks))]
    conflicts = [set() for _ in blocks]
    pairs = []
    for (i, a), (j, b) in itertools.combinations(enumerate(blocks), 2):
        if (a, b) not in graph.edges and (b, a) not in graph.edges:
            continue
        if min(sizes[i], sizes[j]) > 1:
            conflicts[i].add(j)
            conflicts[j].add(i)
        else:
            pairs.append(np.stack(np.broadcast_arrays(units[i], units[j]), 1))
    for start, b in zip(starts, blocks, strict=False):
        pairs.append(start + _lateral(graph, b))
    return np.concatenate(pairs), conflicts


def _lateral(graph: Declaration, block: str) -> Edges:
    """Return the distinct pairs of interacting units of a block."""
    edges = [np.empty((0, 2), np.int64)]
    if block in graph.splits:
        factors = graph.splits[block].inner_factors
        edges += [f.edges(graph.families)[block] for f in factors if f.affine]
    return np.unique(np.sort(np.concatenate(edges), axis=1), axis=0)
