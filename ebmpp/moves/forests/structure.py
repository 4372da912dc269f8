# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Forests of units, and the order in which sums visit their edges. On the host only."""

import dataclasses
import functools
import heapq
from typing import Any, NamedTuple

from jaxtyping import Integer
import numpy as np


class Steps(NamedTuple):
    """Edges in the order of a pass towards the roots, padded with numbers that are out of range."""

    child: Integer[np.ndarray, "steps width"]
    parent: Integer[np.ndarray, "steps width"]
    edge: Integer[np.ndarray, "steps width"]


@dataclasses.dataclass(frozen=True, eq=False)
class Forest:
    """Units joined by edges without a cycle; immutable and compared by value.

    Each tree is rooted at its centre, so that a chain of length n takes n / 2 steps.

    :param num_units: number of units; those without an edge are trees of one unit.
    :param edges: pairs of different units, ``(edges, 2)``, in any order.
    :raises ValueError: for units out of range, and edges that make a cycle or are parallel.

    **Example**

    >>> from ebmpp.moves.forests import Forest
    >>> Forest(4, [(0, 1), (2, 1)]).roots.tolist()
    [1, 3]
    """

    num_units: int
    edges: Any

    def __post_init__(self) -> None:
        edges = np.array(self.edges, np.int64).reshape(-1, 2)  # a copy
        outside = edges[(edges < 0).any(1) | (edges >= self.num_units).any(1)]
        if len(outside):
            raise ValueError(f"edges must join units from 0 to {self.num_units - 1}, got {outside[0]}.")
        edges.flags.writeable = False
        object.__setattr__(self, "edges", edges)
        if len(self._order) + len(self.roots) < self.num_units:
            left = np.setdiff1d(np.arange(self.num_units), np.concatenate([self._order, self.roots]))
            raise ValueError(
                f"edges must not make a cycle or be parallel, got one among units {left[:10].tolist()}. "
                "Split the units into forests first."
            )

    @functools.cached_property
    def _identity(self) -> tuple[int, bytes]:
        return self.num_units, self.edges.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Forest) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"Forest({self.num_units} units, {len(self.edges)} edges)"

    @functools.cached_property
    def _peeled(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Units in the order in which leaves are removed, their parents and edges; and the roots.

        The last unit of a tree is its centre. The exclusive or of a unit's remaining edges is, at a leaf,
        the number of its only edge.
        """
        ends = self.edges.tolist()
        degree = np.bincount(self.edges.ravel(), minlength=self.num_units).tolist()
        remaining = [0] * self.num_units
        for number, (a, b) in enumerate(ends):
            remaining[a] ^= number
            remaining[b] ^= number
        queue = [u for u, count in enumerate(degree) if count <= 1]
        order, parents, edges, roots = [], [], [], []
        for unit in queue:  # grows
            if degree[unit] == 0:
                roots.append(unit)
                continue
            number = remaining[unit]
            parent = sum(ends[number]) - unit
            order.append(unit), parents.append(parent), edges.append(number)
            remaining[parent] ^= number
            degree[parent] -= 1
            if degree[parent] == 1:
                queue.append(parent)
        return order, parents, edges, sorted(roots)

    @property
    def _order(self) -> list[int]:
        return self._peeled[0]

    @property
    def roots(self) -> Integer[np.ndarray, "trees"]:
        """Root of each tree, in increasing order."""
        return np.array(self._peeled[3], np.int64)

    @functools.cached_property
    def depth(self) -> Integer[np.ndarray, "units"]:
        """Number of edges between each unit and its root."""
        depth = [0] * self.num_units
        for unit, parent in zip(*(reversed(a) for a in self._peeled[:2]), strict=True):
            depth[unit] = depth[parent] + 1
        return np.array(depth, np.int64)

    @functools.cached_property
    def steps(self) -> Steps:
        """Edges in few steps of equal width, each after all edges below it.

        The deepest edges come first. Steps are as wide as an even spread over the depth needs, so there are
        at most about twice as many places as edges, however unlike the trees are.

        **References**

        1. Hu (1961), *Parallel sequencing and assembly line problems*.
        """
        order, parents, edges, _ = self._peeled
        depth = self.depth.tolist()
        width = -(-len(order) // max(1, *depth, 1))
        above = {unit: (parent, edge) for unit, parent, edge in zip(order, parents, edges, strict=True)}
        waiting = np.bincount(parents, minlength=self.num_units).tolist()
        ready = [(-depth[u], u) for u in order if not waiting[u]]
        heapq.heapify(ready)
        rows: list[tuple[int, int, int]] = []
        while ready:
            taken = [heapq.heappop(ready)[1] for _ in range(min(width, len(ready)))]
            for unit in taken:
                parent = above[unit][0]
                waiting[parent] -= 1
                if not waiting[parent] and parent in above:
                    heapq.heappush(ready, (-depth[parent], parent))
            rows += [(unit, *above[unit]) for unit in taken]
            rows += [(self.num_units, self.num_units, len(edges))] * (width - len(taken))
        return Steps(*np.array(rows, np.int64).reshape(-1, max(1, width), 3).transpose(2, 0, 1))
