# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Forests of units, and the order in which sums visit their edges. On the host only."""

import dataclasses
import functools
from typing import NamedTuple

from jaxtyping import Integer
import numpy as np

from jax.typing import ArrayLike

from ebmpp.core import HashableArray, ranks_in_groups


class Peeling(NamedTuple):
    """Order in which leaves are removed from a forest until its roots are left."""

    edges: Integer[np.ndarray, "3 edges"]
    """Leaf, its only neighbour, and number of each edge that is removed."""
    roots: Integer[np.ndarray, "trees"]
    """The last unit of each tree, its centre, in increasing order."""


class Arms(NamedTuple):
    """Arms of paths, from ends to centres; short arms are padded by -1 in front."""

    units: Integer[np.ndarray, "steps arms"]
    edges: Integer[np.ndarray, "steps arms"]
    """Numbers of the edges above the units."""
    roots: Integer[np.ndarray, "arms"]
    """Position of the centre of each arm in the roots of the forest."""


@dataclasses.dataclass(frozen=True, init=False)
class Forest:
    """Units joined by edges without a cycle.

    Each tree is rooted at its centre, so that a chain is two arms.

    :param num_units: number of units; those without an edge are trees of one unit.
    :param edges: pairs of different units, ``(edges, 2)``, in any order.
    :raises ValueError: for units out of range, and edges that make a cycle or are
        parallel.
    """

    num_units: int
    pairs: HashableArray

    def __init__(self, num_units: int, edges: ArrayLike) -> None:
        edges = np.asarray(edges, np.int64).reshape(-1, 2)
        object.__setattr__(self, "num_units", num_units)
        object.__setattr__(self, "pairs", HashableArray.copy(edges))
        outside = edges[((edges < 0) | (edges >= num_units)).any(1)]
        if len(outside):
            raise ValueError(
                f"edges must join units from 0 to {num_units - 1}, got {outside[0]}."
            )
        reached = np.append(self._peeling.edges[0], self.roots)
        left = np.setdiff1d(np.arange(num_units), reached)[:10].tolist()
        if left:
            raise ValueError(
                f"edges must not make a cycle or be parallel, got one among units {left}."
            )

    @property
    def edges(self) -> Integer[np.ndarray, "edges 2"]:
        """Pairs of units."""
        return self.pairs.array

    @functools.cached_property
    def _peeling(self) -> Peeling:
        """Leaves, removed until none is left.

        The exclusive or of the numbers of a unit's remaining edges is, at a leaf, the
        number of its only edge.
        """
        ends = self.edges.tolist()
        remaining = [0] * self.num_units
        degree = np.bincount(self.edges.ravel(), minlength=self.num_units).tolist()
        for number, (a, b) in enumerate(ends):
            remaining[a] ^= number
            remaining[b] ^= number
        removed = []
        roots = []
        queue = [unit for unit, count in enumerate(degree) if count <= 1]
        for unit in queue:  # grows
            if degree[unit] == 0:
                roots.append(unit)
                continue
            number = remaining[unit]
            parent = sum(ends[number]) - unit
            removed.append((unit, parent, number))
            remaining[parent] ^= number
            degree[parent] -= 1
            if degree[parent] == 1:
                queue.append(parent)
        edges = np.array(removed, np.int64).reshape(-1, 3).T
        return Peeling(edges, np.sort(np.array(roots, np.int64)))

    @property
    def roots(self) -> Integer[np.ndarray, "trees"]:
        """Root of each tree, in increasing order."""
        return self._peeling.roots

    @functools.cached_property
    def depth(self) -> Integer[np.ndarray, "units"]:
        """Number of edges between each unit and its root."""
        depth = [0] * self.num_units
        for unit, parent, _ in self._peeling.edges.T[::-1].tolist():
            depth[unit] = depth[parent] + 1
        return np.array(depth, np.int64)

    @functools.cached_property
    def trees(self) -> Integer[np.ndarray, "units"]:
        """Position of each unit's root among :attr:`roots`."""
        trees = np.zeros(self.num_units, np.int64)
        trees[self.roots] = np.arange(len(self.roots))
        for unit, parent, _ in self._peeling.edges.T[::-1].tolist():
            trees[unit] = trees[parent]
        return trees

    @functools.cached_property
    def steps(self) -> Integer[np.ndarray, "3 steps width"]:
        """Lower units, upper units and edges in steps from the deepest edges to the roots.

        A depth takes several steps if it has more edges than the mean, so that at most
        half of the places or so are padding, however unlike the trees are. Padding is
        out of range.
        """
        edges = self._peeling.edges
        depth = self.depth[edges[0]]
        width = max(1, -(-len(depth) // depth.max(initial=1)))
        num_steps = -(-np.bincount(depth) // width)  # by depth
        first = num_steps[::-1].cumsum()[::-1] - num_steps
        rank = ranks_in_groups(depth)
        padding = max(self.num_units, len(depth))
        steps = np.full((3, num_steps.sum(), width), padding, np.int64)
        steps[:, first[depth] + rank // width, rank % width] = edges
        return steps

    @functools.cached_property
    def arms(self) -> Arms | None:
        """Arms of paths; None if a tree is no path, or most places would be padding."""
        units, parents, edges = self._peeling.edges
        depth = self.depth
        num_steps = depth.max(initial=0)
        is_end = depth[units] == 1
        count = is_end.sum()
        if not count or np.bincount(self.edges.ravel()).max() > 2:
            return None
        if num_steps * count > 2 * len(edges):
            return None
        arm = np.empty(self.num_units, np.int64)
        arm[units[is_end]] = np.arange(count)
        for unit, parent, _ in self._peeling.edges[:, ~is_end].T[::-1].tolist():
            arm[unit] = arm[parent]
        table = np.full((2, num_steps, count), -1)
        table[:, num_steps - depth[units], arm[units]] = units, edges
        return Arms(*table, np.searchsorted(self.roots, parents[is_end]))
