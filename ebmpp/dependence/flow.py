# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Propagation of dependence through one primitive.

A :class:`Flow` maps, forward, the sets of units that each element of the operands reads
(arrays of numbers of :class:`~ebmpp.dependence.unit_sets.UnitSets`) to the sets
that the results read. Backward, for primitives through which a sum passes, it maps a
mask of the results' elements that matter to masks of the operands. A primitive without
a rule reads all of its operands.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from ebmpp.dependence.unit_sets import UnitSets

ReadSets = list[np.ndarray]
ElementMasks = list[np.ndarray]
Shapes = Sequence[tuple[int, ...]]


@dataclasses.dataclass(eq=False)
class Flow:
    """Dependence of each element of the results on all elements of all operands, by their shapes."""

    shapes: Shapes
    results: Shapes

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        """Return the sets read by the results, given those read by the operands."""
        number = sets.merge(np.concatenate([r.ravel() for r in reads]), (0,))
        return [np.broadcast_to(number, shape) for shape in self.results]

    def backward(self, live: ElementMasks) -> ElementMasks:
        """Return which elements of the operands matter, given which of the results do."""
        matters = any(mask.any() for mask in live)
        return [np.full(shape, matters) for shape in self.shapes]


@dataclasses.dataclass(eq=False)
class Joined(Flow):
    """Dependence on the elements at the same place along some axes, and on all along the others.

    :param axes: per operand, the axes along which all elements are read; scalars are
        read everywhere.
    :param remain: False if the results lack these axes.
    :param zeros: by operand, where it is multiplied by a known zero.
    """

    axes: Sequence[tuple[int, ...]]
    remain: bool = True
    zeros: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        parts = []
        for i, (read, axes) in enumerate(zip(reads, self.axes, strict=True)):
            read = np.where(self.zeros.get(i, False), 0, read)
            parts.append(np.expand_dims(sets.merge(read, axes), axes) if axes else read)
        joined = sets.union(*parts)
        joined = joined if self.remain else joined.squeeze(self.axes[0])
        return [np.broadcast_to(joined, shape) for shape in self.results]

    def backward(self, live: ElementMasks) -> ElementMasks:
        """Return the results' masks, extended along the axes; a smaller operand matters as a whole."""
        at = np.logical_or.reduce(live)
        masks = []
        for i, (shape, axes) in enumerate(zip(self.shapes, self.axes, strict=True)):
            mask = at & ~self.zeros.get(i, np.False_)
            mask = (
                mask.any(axes, keepdims=True)
                if self.remain
                else np.expand_dims(mask, axes)
            )
            is_smaller = self.remain and shape != at.shape
            masks.append(
                np.full(shape, mask.any())
                if is_smaller
                else np.broadcast_to(mask, shape)
            )
        return masks


@dataclasses.dataclass(eq=False)
class Gathered(Flow):
    """Dependence on one element of the operands, or none, by each of several maps.

    :param origins: per result, ``(maps, *shape)``: positions in all flattened operands
        together, or -1.
    """

    origins: Sequence[np.ndarray]

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        flat = np.concatenate([*(r.ravel() for r in reads), [0]])  # -1 is the last
        return [sets.union(*flat[origin]) for origin in self.origins]

    def backward(self, live: ElementMasks) -> ElementMasks:
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        flat = np.zeros(sum(sizes) + 1, bool)
        for origin, mask in zip(self.origins, live, strict=True):
            flat[origin[:, mask]] = True
        masks = np.split(flat[:-1], np.cumsum(sizes)[:-1])
        return [
            mask.reshape(shape) for mask, shape in zip(masks, self.shapes, strict=True)
        ]


@dataclasses.dataclass(eq=False)
class Contraction(Flow):
    """Dependence of a matrix product on a row of one side and a column of the other, except at known zeros.

    :param dimensions: ``dimension_numbers`` of ``lax.dot_general``.
    :param nonzero: by operand, where it is not known to be zero.
    """

    dimensions: Any
    nonzero: dict[int, np.ndarray]

    def __post_init__(self) -> None:
        self.nonzero = {
            i: self._fold(i, a) for i, a in self.nonzero.items() if not a.all()
        }

    def _order(self, side: int) -> list[list[int]]:
        summed, batch = (axes[side] for axes in self.dimensions)
        free = [d for d in range(len(self.shapes[side])) if d not in (*batch, *summed)]
        return [list(batch), free, list(summed)]

    def _fold(self, side: int, a: np.ndarray) -> np.ndarray:
        """Return an operand as (batch, free, summed)."""
        axes = self._order(side)
        return a.transpose(sum(axes, [])).reshape(
            [int(np.prod([a.shape[d] for d in part])) for part in axes]
        )

    def _unfold(self, side: int, a: np.ndarray) -> np.ndarray:
        order = sum(self._order(side), [])
        return a.reshape([self.shapes[side][d] for d in order]).transpose(
            np.argsort(order)
        )

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        folded = [self._fold(side, read) for side, read in enumerate(reads)]
        shape = (len(folded[0]), folded[0].shape[1], folded[1].shape[1])
        result = np.zeros(shape, np.int64)
        for side, read in enumerate(folded):
            other = self.nonzero.get(1 - side)
            if not read.any():
                continue
            if other is None:
                part = np.broadcast_to(
                    np.expand_dims(sets.merge(read, (2,)), 2 - side), shape
                )
            else:
                b, q, k = np.nonzero(other)
                p = np.arange(read.shape[1])
                num_free = other.shape[1]
                group = (b[:, None] * num_free + q[:, None]) * len(p) + p
                count = len(read) * num_free * len(p)
                part = sets.of_groups(group.ravel(), read[b, :, k].ravel(), count)
                part = part.reshape(-1, num_free, len(p))
                part = part if side else part.transpose(0, 2, 1)
            result = sets.union(result, part)
        return [result.reshape(self.results[0])]

    def backward(self, live: ElementMasks) -> ElementMasks:
        """Return which factors of the elements that matter are not multiplied by a known zero."""
        ones = [
            self._fold(side, np.ones(shape, bool))
            for side, shape in enumerate(self.shapes)
        ]
        at = live[0].reshape(len(ones[0]), ones[0].shape[1], ones[1].shape[1])
        masks = []
        for side in range(2):
            facing = (at if side else at.transpose(0, 2, 1)).astype(np.float32)
            other = self.nonzero.get(1 - side, ones[1 - side]).astype(np.float32)
            masks.append(
                self._unfold(side, np.einsum("bqp,bqk->bpk", facing, other) > 0)
            )
        return masks


@dataclasses.dataclass(eq=False)
class Lookup(Flow):
    """Dependence of a gather by unknown indices on its row of indices and all elements these may pick."""

    params: Any

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        operand, indices = reads
        (shape,) = self.results
        numbers = self.params["dimension_numbers"]
        batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
        result = self._place(sets.merge(indices, (indices.ndim - 1,)), batch)
        if operand.any():
            removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
            offsets = (d for d in range(operand.ndim) if d not in removed)
            places = dict(zip(offsets, numbers.offset_dims, strict=True))
            places = {
                d: o
                for d, o in places.items()
                if self.params["slice_sizes"][d] == operand.shape[d]
            }
            pairs = zip(
                numbers.operand_batching_dims,
                numbers.start_indices_batching_dims,
                strict=True,
            )
            places |= {d: batch[i] for d, i in pairs}
            rest = sets.merge(
                operand, tuple(d for d in range(operand.ndim) if d not in places)
            )
            result = sets.union(
                result, self._place(rest, [places[d] for d in sorted(places)])
            )
        return [np.broadcast_to(result, shape)]

    def _place(self, a: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        """Return ``a`` with its axes at ``axes`` of the result."""
        a = a.transpose(np.argsort(axes))
        return np.expand_dims(
            a, tuple(d for d in range(len(self.results[0])) if d not in axes)
        )


@dataclasses.dataclass(eq=False)
class Scattered(Flow):
    """Dependence of a sum of updates on the array they are added to, and on the updates at each place.

    :param targets: the flat place of each update, or -1.
    """

    targets: np.ndarray

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        inside = self.targets.ravel() >= 0
        size = int(np.prod(self.results[0]))
        added = sets.of_groups(
            self.targets.ravel()[inside], reads[2].ravel()[inside], size
        )
        return [sets.union(reads[0], added.reshape(self.results[0]))]

    def backward(self, live: ElementMasks) -> ElementMasks:
        return [
            live[0],
            np.zeros(self.shapes[1], bool),
            np.append(live[0].ravel(), False)[self.targets],
        ]
