# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How a colouring of the units of a block that interact splits it into parts."""

from collections.abc import Iterable, Mapping
import dataclasses
import functools

import networkx as nx
import numpy as np

from ebmpp.families.family import Family
from ebmpp.graph import coloring
from ebmpp.graph.factors import Factor
from ebmpp.graph.factors.lateral import Local, Split


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
        colors = _color_units(families[block].size, np.concatenate(edges))
        made[block] = SplitBlock(block, families[block], colors, inside, others)
    return made


def _color_units(size: int, edges: np.ndarray) -> np.ndarray:
    """Colours, component by component, so that components alike (replicas, say) are coloured alike."""
    graph = nx.empty_graph(size)
    graph.add_edges_from(edges.tolist())
    colors = np.zeros(size, np.int64)
    if nx.is_connected(graph):
        return _color_component(size, edges.tobytes())
    label = np.zeros(size, np.int64)
    for number, units in enumerate(nx.connected_components(graph)):
        label[list(units)] = number
    order = np.argsort(label, kind="stable")
    place = np.zeros(size, np.int64)
    by_edge = np.argsort(label[edges[:, 0]], kind="stable")
    ends = np.cumsum(np.bincount(label[edges[:, 0]], minlength=label.max() + 1))
    for units, own in zip(
        np.split(order, np.cumsum(np.bincount(label))[:-1]), np.split(edges[by_edge], ends[:-1]), strict=True
    ):
        if len(own):
            place[units] = np.arange(len(units))
            colors[units] = _color_component(len(units), place[own].tobytes())
    return colors


@functools.lru_cache(maxsize=64)
def _color_component(size: int, edges: bytes) -> np.ndarray:
    graph = nx.empty_graph(size)
    graph.add_edges_from(np.frombuffer(edges, np.int64).reshape(-1, 2).tolist())
    colors = np.zeros(size, np.int64)
    for part, units in enumerate(coloring.color(graph)):
        colors[list(units)] = part
    return colors
