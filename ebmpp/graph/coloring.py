# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Proper colourings of the block graph (layers) and of the interacting units of a block (parts)."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import networkx as nx
import numpy as np
from scipy import sparse

from ebmpp.core import positions_by_group
from ebmpp.families.family import Families
from ebmpp.graph.factors.evaluation import values_of
from ebmpp.graph.factors.factor import Factor
from ebmpp.graph.factors.interactions import interactions
from ebmpp.graph.factors.lateral import Local, Split
from ebmpp.graph.factors.terms import PairTerms, Terms

_STRATEGIES = ("DSATUR", "smallest_last", "largest_first")
# edges and nodes; DSATUR takes 9 s on a torus of 4096 nodes, 14 s on a clique of 784
_MAX_DSATUR = 20_000
_MAX_SMALLEST_LAST = 1_000_000  # edges and nodes; many seconds beyond


def color(graph: nx.Graph) -> tuple[tuple[Any, ...], ...]:
    """Split the nodes of an undirected graph into independent sets, as few as the strategies find.

    A bipartite graph gets two sets; others the best of networkx's greedy strategies.
    Sets keep the order of the nodes, and the first node of every connected component is
    in the first set. Nodes are coloured by position: networkx takes nodes out of Python
    sets, whose order for strings changes with ``PYTHONHASHSEED``, and layers, draws and
    resumed runs would change with it.
    """
    try:
        sides = nx.bipartite.color(graph)
    except nx.NetworkXError:
        colors = _greedy_colors(graph)
    else:  # the first node of a component has side 1 where it has neighbours
        colors = {node: bool(graph[node]) - side for node, side in sides.items()}
    classes: dict[int, list[Any]] = {}
    for node in graph:
        classes.setdefault(colors[node], []).append(node)
    return tuple(map(tuple, classes.values()))


def _greedy_colors(graph: nx.Graph) -> dict[Any, int]:
    """Return the best colouring of a few strategies, fewer for a large graph."""
    position = {node: i for i, node in enumerate(graph)}
    edges = sorted(tuple(sorted((position[a], position[b]))) for a, b in graph.edges)
    by_position = nx.empty_graph(len(position))
    by_position.add_edges_from(edges)
    size = len(edges) + len(position)
    too_large = (size > _MAX_DSATUR) + (size > _MAX_SMALLEST_LAST)
    strategy, *others = _STRATEGIES[too_large:]
    candidates = [nx.greedy_color(by_position, strategy)]
    if max(candidates[0].values()) > 2:  # an odd cycle needs three sets
        candidates += [nx.greedy_color(by_position, other) for other in others]
    best = min(candidates, key=lambda c: max(c.values()))
    return {node: best[i] for node, i in position.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class SplitBlock(Split):
    """A block in parts, with the factors in which its units interact and all others over it."""

    families: Families
    inner_factors: tuple[Factor, ...]
    outer_factors: tuple[Factor, ...]

    @functools.cached_property
    def fast_paths(self) -> tuple[Local | Terms | PairTerms | None, ...]:
        """Fast path of each factor of :attr:`inner_factors`, else its terms, if it has them."""
        return tuple(
            f.local(self.families, self) or Terms.find(f, self.families, self)
            for f in self.inner_factors
        )

    @functools.cached_property
    def shifts(self) -> list[Any]:
        """Slices of packed parts in place of each fast path; None where these do not pay."""
        return [getattr(path, "shifted", None) for path in self.fast_paths]

    def evaluations(self, factor: Factor) -> int:
        """Return how often a visit of the block evaluates a factor that is not affine."""
        path = self.fast_paths[self.inner_factors.index(factor)]
        if isinstance(path, Terms | PairTerms):
            return path.num_evaluations
        values = values_of(self.family)
        return 0 if values is None else self.family.size * len(values.statistics)


def split_blocks(
    families: Families, factors: Sequence[Factor]
) -> dict[str, SplitBlock]:
    """Split every block whose units interact."""
    splits = {}
    for block in dict.fromkeys(b for f in factors for b in f.blocks if f.splits(b)):
        inside = tuple(f for f in factors if f.splits(block))
        others = tuple(f for f in factors if block in f.blocks and f not in inside)
        pairs = [interactions(f, families, block) for f in inside]
        colors = _color_jointly(families[block].size, pairs)
        splits[block] = SplitBlock(
            block, families[block], colors, families, inside, others
        )
    return splits


def _color_jointly(size: int, lists: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return a colour per unit, given the pairs of several factors; None for all pairs."""
    known = [np.sort(edges, axis=1) for edges in lists if edges is not None]
    if len(known) < len(lists):
        return np.arange(size)
    if len(known) > 1:  # several factors may repeat a pair
        known = [np.unique(np.concatenate(known), axis=0)]
    return color_units(size, *known)


def color_units(size: int, edges: np.ndarray) -> np.ndarray:
    """Return a colour per unit, given distinct pairs; equal components get equal colours.

    Bipartite and complete components are coloured by array operations, others by
    networkx.
    """
    # complete: 50 million pairs for 10,000 units
    if 2 * len(edges) == size * (size - 1):
        return np.arange(size)
    label, colors = _two_colors(size, edges)
    if (colors >= 0).all():
        return colors
    count = label.max() + 1
    place = np.zeros(size, np.int64)
    members = positions_by_group(label, count)
    joined = positions_by_group(label[edges[:, 0]], count)
    for component in np.unique(label[colors < 0]):
        units = members[component]
        pairs = edges[joined[component]]
        if 2 * len(pairs) == len(units) * (len(units) - 1):
            colors[units] = np.arange(len(units))
            continue
        place[units] = np.arange(len(units))
        colors[units] = _color_component(len(units), place[pairs].tobytes())
    return colors


def _two_colors(size: int, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each unit's component and its colour 0 or 1, or -1 in components with an odd cycle.

    Each unit has two copies, and an edge joins unlike copies. The copies of a unit are
    in one component if there is an odd cycle; otherwise they separate the two sides.
    """
    a, b = edges.T
    rows = np.concatenate([a, a + size])
    columns = np.concatenate([b + size, b])
    entries = (np.ones(len(rows), np.int8), (rows, columns))
    cover = sparse.coo_matrix(entries, shape=(2 * size, 2 * size))
    _, twice = sparse.csgraph.connected_components(cover, directed=False)
    here = twice[:size]
    there = twice[size:]
    component = np.minimum(here, there)
    _, first, label = np.unique(component, return_index=True, return_inverse=True)
    # the first unit of a component has colour 0
    colors = (here != here[first][label]).astype(np.int64)
    return label, np.where(here == there, -1, colors)


@functools.lru_cache(maxsize=64)
def _color_component(size: int, edges: bytes) -> np.ndarray:
    graph = nx.empty_graph(size)
    graph.add_edges_from(np.frombuffer(edges, np.int64).reshape(-1, 2).tolist())
    colors = np.zeros(size, np.int64)
    for part, units in enumerate(color(graph)):
        colors[list(units)] = part
    return colors
