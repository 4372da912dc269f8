# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How what is read passes through one primitive: from operands to results, and what matters back again.

A :class:`Flow` takes, for each operand, an array of the operand's shape that numbers the set of units which
each element reads (:class:`~ebmpp.traced.dependence.unit_sets.UnitSets`), and makes those of the results.
Backward it takes which elements of the results matter, and tells which of the operands do; that is asked only
of primitives through which a sum passes. A primitive that nobody knows reads everything that it is given.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from ebmpp.traced.dependence.unit_sets import UnitSets

Reads = list[np.ndarray]
Live = list[np.ndarray]


class Flow:
    """Every element of the results reads all elements of all operands."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> None:
        self.shapes, self.results = list(shapes), list(results)

    def forward(self, sets: UnitSets, reads: Reads) -> Reads:
        """Sets read by the results, given those read by the operands."""
        every = np.concatenate([r.ravel() for r in reads])
        number = sets.merge(every, (0,))
        return [np.broadcast_to(number, shape) for shape in self.results]

    def backward(self, live: Live) -> Live:
        """Which elements of the operands matter, given which of the results do."""
        matters = any(a.any() for a in live)
        return [np.full(shape, matters) for shape in self.shapes]


class Elementwise(Flow):
    """An element reads those at its place, and scalars.

    :param zeros: by operand, where it is known to be multiplied by zero.
    """

    def __init__(
        self, shapes: Sequence, results: Sequence, zeros: dict[int, np.ndarray] | None = None
    ) -> None:
        super().__init__(shapes, results)
        self.zeros = zeros or {}

    def forward(self, sets: UnitSets, reads: Reads) -> Reads:
        kept = [np.where(self.zeros[i], 0, r) if i in self.zeros else r for i, r in enumerate(reads)]
        return [np.broadcast_to(sets.union(*kept), shape) for shape in self.results]

    def backward(self, live: Live) -> Live:
        at = live[0]
        for other in live[1:]:
            at = at | other
        made = []
        for i, shape in enumerate(self.shapes):
            own = at & ~self.zeros[i] if i in self.zeros else at
            made.append(own if shape == at.shape else np.full(shape, own.any()))
        return made


class Moved(Flow):
    """Every element of the results is one of the operands', or none.

    :param origins: one a result: places in the concatenation of all flattened operands, or -1.
    """

    def __init__(self, shapes: Sequence, results: Sequence, origins: Sequence[np.ndarray]) -> None:
        super().__init__(shapes, results)
        self.origins = origins

    def forward(self, sets: UnitSets, reads: Reads) -> Reads:
        every = np.concatenate([*(r.ravel() for r in reads), [0]])  # -1 is the last
        return [every[origin] for origin in self.origins]

    def backward(self, live: Live) -> Live:
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        every = np.zeros(sum(sizes) + 1, bool)
        for origin, at in zip(self.origins, live, strict=True):
            every[origin[at]] = True
        parts = np.split(every[:-1], np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Along(Flow):
    """An element reads all that differ from it along some axes only, which go or stay."""

    def __init__(self, shapes: Sequence, results: Sequence, axes: tuple[int, ...], stay: bool) -> None:
        super().__init__(shapes, results)
        self.axes, self.stay = axes, stay

    def forward(self, sets: UnitSets, reads: Reads) -> Reads:
        made = sets.merge(sets.union(*reads), self.axes)
        made = np.expand_dims(made, self.axes) if self.stay else made
        return [np.broadcast_to(made, shape) for shape in self.results]

    def backward(self, live: Live) -> Live:
        at = live[0].any(self.axes, keepdims=True) if self.stay else np.expand_dims(live[0], self.axes)
        return [np.broadcast_to(at, shape) for shape in self.shapes]


@dataclasses.dataclass
class _Axes:
    """The axes of a contraction's side, as (batch, free, summed)."""

    order: list[int]
    sizes: tuple[int, int, int]

    @classmethod
    def of(cls, shape: tuple[int, ...], batch: Sequence[int], summed: Sequence[int]) -> "_Axes":
        free = [d for d in range(len(shape)) if d not in (*batch, *summed)]
        count = lambda dims: int(np.prod([shape[d] for d in dims], dtype=int))
        return cls([*batch, *free, *summed], (count(batch), count(free), count(summed)))

    def fold(self, a: np.ndarray) -> np.ndarray:
        return a.transpose(self.order).reshape(self.sizes)

    def unfold(self, a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return a.reshape([shape[d] for d in self.order]).transpose(np.argsort(self.order))


class Contraction(Flow):
    """A matrix product: an element reads a row of one side and a column of the other, except at known zeros.

    :param dimensions: as of ``lax.dot_general``.
    :param nonzero: by operand, where it is not known to be zero.
    """

    def __init__(
        self, shapes: Sequence, results: Sequence, dimensions: Any, nonzero: dict[int, np.ndarray]
    ) -> None:
        super().__init__(shapes, results)
        summed, batch = dimensions
        self.axes = [_Axes.of(s, b, k) for s, b, k in zip(shapes, batch, summed, strict=True)]
        self.nonzero = {i: self.axes[i].fold(a) for i, a in nonzero.items() if not a.all()}

    def forward(self, sets: UnitSets, reads: Reads) -> Reads:
        (batches, m, summed), (_, n, _) = (a.sizes for a in self.axes)
        made = np.zeros((batches, m, n), np.int64)
        for side, read in enumerate(reads):
            if not read.any():
                continue
            own, other = self.axes[side].fold(read), self.nonzero.get(1 - side)
            if other is None:
                part = np.broadcast_to(np.expand_dims(sets.merge(own, (2,)), 2 - side), made.shape)
            else:  # (batch, free of the other, free of this side, summed), where the other is not zero
                b, q, k = np.nonzero(other)
                p = np.arange(own.shape[1])
                group = (b[:, None] * other.shape[1] + q[:, None]) * own.shape[1] + p
                shape = (batches, other.shape[1], own.shape[1])
                part = sets.of_groups(group.ravel(), own[b, :, k].ravel(), int(np.prod(shape))).reshape(shape)
                part = part if side else part.transpose(0, 2, 1)
            made = sets.union(made, part)
        return [made.reshape(self.results[0])]

    def backward(self, live: Live) -> Live:
        at, made = live[0].reshape([*self.axes[0].sizes[:2], self.axes[1].sizes[1]]), []
        for side, (axes, shape) in enumerate(zip(self.axes, self.shapes, strict=True)):
            facing = (at if side else at.transpose(0, 2, 1)).astype(
                np.float32
            )  # (batch, other's free, own free)
            other = self.nonzero.get(1 - side, np.ones((axes.sizes[0], facing.shape[1], axes.sizes[2]), bool))
            matters = np.einsum("bqp,bqk->bpk", facing, other.astype(np.float32)) > 0
            made.append(axes.unfold(matters, shape))
        return made


class Lookup(Flow):
    """A gather by indices that are not known: an element reads its own row of indices, and of the operand
    all that the indices may pick. Not asked backward.

    :param params: of ``lax.gather``.
    """

    def __init__(self, shapes: Sequence, results: Sequence, params: Any) -> None:
        super().__init__(shapes, results)
        self.numbers, self.slices = params["dimension_numbers"], params["slice_sizes"]

    def forward(self, sets: UnitSets, reads: Reads) -> Reads:
        (operand, indices), (shape,), numbers = reads, self.results, self.numbers
        batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
        rows = sets.merge(indices, (indices.ndim - 1,))
        made = self._place(rows, batch)
        if operand.any():
            gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
            places = dict(
                zip((d for d in range(operand.ndim) if d not in gone), numbers.offset_dims, strict=True)
            )
            places = {d: o for d, o in places.items() if self.slices[d] == operand.shape[d]}
            pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
            places |= {d: batch[i] for d, i in pairs}
            rest = sets.merge(operand, tuple(d for d in range(operand.ndim) if d not in places))
            made = sets.union(made, self._place(rest, [places[d] for d in sorted(places)]))
        return [np.broadcast_to(made, shape)]

    def _place(self, a: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        """``a`` with its axes at ``axes`` of the result."""
        a = a.transpose(np.argsort(axes))
        return np.expand_dims(a, tuple(d for d in range(len(self.results[0])) if d not in axes))


class Solution(Flow):
    """A triangular system solved: an element reads its batch's matrix, and its own right-hand side.

    :param axis: along which a right-hand side goes, from the end.
    """

    def __init__(self, shapes: Sequence, results: Sequence, axis: int) -> None:
        super().__init__(shapes, results)
        self.axis = axis

    def forward(self, sets: UnitSets, reads: Reads) -> Reads:
        matrix, sides = reads
        last = matrix.ndim - 1
        matrix = np.expand_dims(sets.merge(matrix, (last - 1, last)), (last - 1, last))
        sides = np.expand_dims(sets.merge(sides, (last + 1 + self.axis,)), last + 1 + self.axis)
        return [np.broadcast_to(sets.union(matrix, sides), self.results[0])]


class Taps(Flow):
    """Every element reads some of the operands': one, or none, by each of several maps."""

    def __init__(self, shapes: Sequence, results: Sequence, maps: Sequence[Moved]) -> None:
        super().__init__(shapes, results)
        self.maps = maps

    def forward(self, sets: UnitSets, reads: Reads) -> Reads:
        return [sets.union(*(m.forward(sets, reads)[0] for m in self.maps))]

    def backward(self, live: Live) -> Live:
        each = [m.backward(live) for m in self.maps]
        return [np.logical_or.reduce(parts) for parts in zip(*each, strict=True)]


class Scattered(Flow):
    """A sum of updates into an array: an element reads what was there, and the updates that are put there.

    :param targets: for each update the flat place that it goes to, or -1.
    """

    def __init__(self, shapes: Sequence, results: Sequence, targets: np.ndarray) -> None:
        super().__init__(shapes, results)
        self.targets = targets

    def forward(self, sets: UnitSets, reads: Reads) -> Reads:
        inside = self.targets.ravel() >= 0
        size = int(np.prod(self.results[0]))
        put = sets.of_groups(self.targets.ravel()[inside], reads[2].ravel()[inside], size)
        return [sets.union(reads[0], put.reshape(self.results[0]))]

    def backward(self, live: Live) -> Live:
        updates = np.append(live[0].ravel(), False)[self.targets]
        return [live[0], np.zeros(self.shapes[1], bool), updates]
