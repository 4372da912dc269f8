# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Forests of units, and the order in which sums visit their edges. On the host only."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Integer
import numpy as np

from ebmpp.core.types import HashableArray


@dataclasses.dataclass(frozen=True, init=False)
class Forest:
    """Units joined by edges without a cycle; each tree is rooted at its centre, so that a chain is two arms.

    :param num_units: number of units; those without an edge are trees of one unit.
    :param edges: pairs of different units, ``(edges, 2)``, in any order.
    :raises ValueError: for units out of range, and edges that make a cycle or are
        parallel.
    """

    num_units: int
    pairs: HashableArray

    def __init__(self, num_units: int, edges: Any) -> None:
        edges = np.asarray(edges, np.int64).reshape(-1, 2)
        object.__setattr__(self, "num_units", num_units)
        object.__setattr__(self, "pairs", HashableArray.copy(edges))
        outside = edges[((edges < 0) | (edges >= num_units)).any(1)]
        if len(outside):
            raise ValueError(
                f"edges must join units from 0 to {num_units - 1}, got {outside[0]}."
            )
        left = np.setdiff1d(np.arange(num_units), [*self._peeled[0][0], *self.roots])[
            :10
        ].tolist()
        if left:
            raise ValueError(
                f"edges must not make a cycle or be parallel, got one among units {left}."
            )

    @property
    def edges(self) -> Integer[np.ndarray, "edges 2"]:
        """Pairs of units."""
        return self.pairs.array

    @functools.cached_property
    def _peeled(self) -> tuple[np.ndarray, np.ndarray]:
        """Units, parents and edges, ``(3, edges)``, in the order in which leaves are removed; and the roots.

        The last unit of a tree is its centre. The exclusive or of the numbers of a
        unit's remaining edges is, at a leaf, the number of its only edge.
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
        return np.array(removed, np.int64).reshape(-1, 3).T, np.sort(
            np.array(roots, np.int64)
        )

    @property
    def roots(self) -> Integer[np.ndarray, "trees"]:
        """Root of each tree, in increasing order."""
        return self._peeled[1]

    @functools.cached_property
    def depth(self) -> Integer[np.ndarray, "units"]:
        """Number of edges between each unit and its root."""
        depth = [0] * self.num_units
        for unit, parent, _ in self._peeled[0].T[::-1].tolist():
            depth[unit] = depth[parent] + 1
        return np.array(depth, np.int64)

    @functools.cached_property
    def steps(self) -> Integer[np.ndarray, "3 steps width"]:
        """Lower units, upper units and edges in steps from the deepest edges to the roots.

        A depth takes several steps if it has more edges than the mean, so that at most
        half of the places or so are padding, however unlike the trees are. Padding is
        out of range.
        """
        depth = self.depth[self._peeled[0][0]]
        edges = self._peeled[0][:, np.argsort(-depth, kind="stable")]
        width = max(1, -(-len(depth) // depth.max(initial=1)))
        counts = np.bincount(depth)[::-1]
        blocks = -(-counts // width)
        rank = np.arange(len(depth)) - np.repeat(np.cumsum(counts) - counts, counts)
        step = np.repeat(np.cumsum(blocks) - blocks, counts) + rank // width
        steps = np.full(
            (3, blocks.sum(), width), max(self.num_units, len(depth)), np.int64
        )
        steps[:, step, rank % width] = edges
        return steps

    @functools.cached_property
    def arms(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Units and edges of the arms of paths, ``(steps, arms)`` each from ends to centres, and arms' roots.

        Roots are positions in ``roots``. Short arms are padded by -1 in front. None if
        a tree is no path, or most places would be padding.
        """
        units, parents, edges = self._peeled[0]
        depth = self.depth
        is_first = depth[units] == 1
        steps = depth.max(initial=0)
        count = is_first.sum()
        if (
            not count
            or np.bincount(self.edges.ravel()).max() > 2
            or steps * count > 2 * len(edges)
        ):
            return None
        arm = np.empty(self.num_units, np.int64)
        arm[units[is_first]] = np.arange(count)
        for unit, parent in self._peeled[0][:2, ~is_first].T[::-1].tolist():
            arm[unit] = arm[parent]
        table = np.full((2, steps, count), -1)
        table[:, steps - depth[units], arm[units]] = units, edges
        return *table, np.searchsorted(self.roots, parents[is_first])
