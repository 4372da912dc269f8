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
import math

import numpy as np

import jax.numpy as jnp

from ebmpp.core import sharding
from ebmpp.dependence.program import Equation, evaluate_equation
from ebmpp.dependence.unit_sets import UnitSets

ReadSets = list[np.ndarray]
ElementMasks = list[np.ndarray]


@dataclasses.dataclass(eq=False)
class Flow:
    """Dependence of each element of the results on all elements of all operands."""

    eqn: Equation

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        """Return the sets read by the results, given those read by the operands."""
        number = sets.merge(np.concatenate([r.ravel() for r in reads]), (0,))
        return [np.broadcast_to(number, shape) for shape in self.eqn.results]

    def backward(self, live: ElementMasks) -> ElementMasks:
        """Return which elements of the operands matter, given which of the results do."""
        matters = any(mask.any() for mask in live)
        return [np.full(shape, matters) for shape in self.eqn.shapes]


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
        for i, (read, axes) in enumerate(zip(reads, self.axes)):
            read = np.where(self.zeros.get(i, False), 0, read)
            parts.append(np.expand_dims(sets.merge(read, axes), axes))
        joined = sets.union(*parts)
        joined = joined if self.remain else joined.squeeze(self.axes[0])
        return [np.broadcast_to(joined, shape) for shape in self.eqn.results]

    def backward(self, live: ElementMasks) -> ElementMasks:
        """Return masks of the operands; one that is smaller than the results matters as a whole."""
        at = np.logical_or.reduce(live)
        masks = []
        for i, (shape, axes) in enumerate(zip(self.eqn.shapes, self.axes)):
            mask = at & ~self.zeros.get(i, np.False_)
            if not self.remain:
                mask = np.expand_dims(mask, axes)
            elif shape == at.shape:
                mask = mask.any(axes, keepdims=True)
            else:
                mask = mask.any()
            masks.append(np.broadcast_to(mask, shape))
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
        ends = np.cumsum([math.prod(shape) for shape in self.eqn.shapes])
        flat = np.zeros(ends[-1] + 1, bool)
        for origin, mask in zip(self.origins, live):
            flat[origin[:, mask]] = True
        masks = np.split(flat, ends)  # the last, of the place -1, is left out
        return [mask.reshape(shape) for mask, shape in zip(masks, self.eqn.shapes)]


@dataclasses.dataclass(eq=False)
class Contraction(Flow):
    """Dependence of a matrix product on rows and columns, except at known zeros.

    :param nonzero: by operand, where it is not known to be zero.
    """

    nonzero: dict[int, np.ndarray]

    def __post_init__(self) -> None:
        self.nonzero = {
            i: self._fold(i, a) for i, a in self.nonzero.items() if not a.all()
        }

    def _fold(self, side: int, a: np.ndarray) -> np.ndarray:
        """Return an operand as (batch, free, summed)."""
        numbers = self.eqn.params["dimension_numbers"]
        summed, batch = (axes[side] for axes in numbers)
        free = [d for d in range(a.ndim) if d not in (*batch, *summed)]
        axes = (batch, free, summed)
        shape = [math.prod(a.shape[d] for d in part) for part in axes]
        return a.transpose([*batch, *free, *summed]).reshape(shape)

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        folded = [self._fold(side, read) for side, read in enumerate(reads)]
        num_batch, num_left, _ = folded[0].shape
        shape = (num_batch, num_left, folded[1].shape[1])
        result = np.zeros(shape, np.int64)
        for side, read in enumerate(folded):
            if not read.any():
                continue
            other = self.nonzero.get(1 - side)
            if other is None:
                part = np.expand_dims(sets.merge(read, (2,)), 2 - side)
            else:
                part = _merge_nonzero(sets, read, other)
                part = part if side else part.transpose(0, 2, 1)
            result = sets.union(result, part)
        return [result.reshape(self.eqn.results[0])]

    def backward(self, live: ElementMasks) -> ElementMasks:
        """Return which factors of the elements that matter are not multiplied by a known zero."""
        masks = [np.zeros(shape, bool) for shape in self.eqn.shapes]
        places = []
        for side, mask in enumerate(masks):
            numbers = np.arange(mask.size).reshape(mask.shape)
            places.append(self._fold(side, numbers))
        left, right = places
        at = live[0].reshape(len(left), left.shape[1], right.shape[1])
        for side, mask in enumerate(masks):
            facing = (at if side else at.transpose(0, 2, 1)).astype(np.float32)
            other = self.nonzero.get(1 - side, np.ones(places[1 - side].shape))
            count = np.einsum("bqp,bqk->bpk", facing, other.astype(np.float32))
            np.put(mask, places[side], count > 0)
        return masks


def _merge_nonzero(sets: UnitSets, read: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the sets that each product of a free index of ``other`` and one of ``read`` reads.

    Both are (batch, free, summed); ``other`` says where the second factor is not zero.
    """
    batch, row, summed = np.nonzero(other)
    shape = (len(read), other.shape[1], read.shape[1])
    first = (batch * shape[1] + row) * shape[2]
    place = first[:, None] + np.arange(shape[2])
    numbers = read[batch, :, summed]
    merged = sets.of_groups(place.ravel(), numbers.ravel(), math.prod(shape))
    return merged.reshape(shape)


@dataclasses.dataclass(eq=False)
class Lookup(Flow):
    """Dependence of a gather on its row of unknown indices and all elements these may pick."""

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        operand, indices = reads
        numbers = self.eqn.params["dimension_numbers"]
        rows = sets.merge(indices, (indices.ndim - 1,))
        result = np.expand_dims(rows, numbers.offset_dims)
        if operand.any():
            slices = zip(self.eqn.params["slice_sizes"], operand.shape)
            is_part = {d for d, (size, extent) in enumerate(slices) if size < extent}
            searched = tuple(is_part.difference(numbers.operand_batching_dims))
            merged = np.expand_dims(sets.merge(operand, searched), searched)
            # all elements that an index may pick are equal, so any index will do
            everywhere = np.broadcast_to(merged, operand.shape)
            with sharding.eager():
                inputs = jnp.asarray(everywhere), jnp.zeros(indices.shape, int)
                (picked,) = evaluate_equation(self.eqn, inputs)
            result = sets.union(result, np.asarray(picked))
        return [np.broadcast_to(result, self.eqn.results[0])]


@dataclasses.dataclass(eq=False)
class Scattered(Flow):
    """Dependence of a sum of updates on the array they are added to and the updates at each place.

    :param targets: the flat place of each update, or -1.
    """

    targets: np.ndarray

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        targets = self.targets.ravel()
        inside = targets >= 0
        (shape,) = self.eqn.results
        updates = reads[2].ravel()[inside]
        added = sets.of_groups(targets[inside], updates, math.prod(shape))
        return [sets.union(reads[0], added.reshape(shape))]

    def backward(self, live: ElementMasks) -> ElementMasks:
        return [
            live[0],
            np.zeros(self.eqn.shapes[1], bool),
            np.append(live[0].ravel(), False)[self.targets],
        ]
