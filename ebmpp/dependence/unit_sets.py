# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sets of units as numbered rows of a sparse matrix."""

import math

import numpy as np
from scipy import sparse

_MOST_MEMBERS = 2**25  # of all sets that one operation joins


class UnitSets:
    """Numbered subsets of the units 0, ..., ``size`` - 1: 0 is the empty set, u + 1 is {u}.

    Equal sets have equal numbers, so an array of numbers says which units each element
    of an array reads. Where a union would exceed the memory limit, it becomes the set
    of all units, a superset.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._rows = sparse.eye_array(size + 1, size, k=-1, dtype=bool, format="csr")
        # a set's key sums 128 random bits per unit: two of a million sets collide with
        # probability 1e-27
        self._bits = np.random.default_rng(0).integers(0, 2**64, (size, 2), np.uint64)
        self._numbers: dict[tuple[int, int], int] = {}

    def rows(self, numbers: np.ndarray) -> sparse.csr_array:
        """Return the sets as rows of a boolean matrix, ``(numbers.size, size)``."""
        return self._rows[np.ravel(numbers)]

    def sizes(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of units of each set."""
        return np.diff(self._rows.indptr).astype(np.int64)[numbers]

    def union(self, *numbers: np.ndarray) -> np.ndarray:
        """Return the union, element by element, of arrays of numbers that broadcast."""
        result, *others = np.broadcast_arrays(*numbers)
        for other in others:
            mixed = (result != other) & (result != 0) & (other != 0)
            base = self._rows.shape[0]
            codes = result[mixed] * base + other[mixed]
            result = np.where(result == 0, other, result)
            if not mixed.any():
                continue
            distinct, position = np.unique(codes, return_inverse=True)
            group = np.tile(np.arange(len(distinct)), 2)
            members = np.concatenate(np.divmod(distinct, base))
            joined = self.of_groups(group, members, len(distinct))
            result[mixed] = joined[position]
        return result

    def merge(self, numbers: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        """Return the union along axes, which are removed."""
        remaining = [d for d in range(numbers.ndim) if d not in axes]
        shape = tuple(numbers.shape[d] for d in remaining)
        count = math.prod(shape)
        width = math.prod(numbers.shape[d] for d in axes)
        if width == 1:
            return numbers.reshape(shape)
        rows = numbers.transpose([*remaining, *axes])
        group = np.repeat(np.arange(count), width)
        merged = self.of_groups(group, rows.ravel(), count)
        return merged.reshape(shape)

    def of_groups(
        self, group: np.ndarray, numbers: np.ndarray, count: int
    ) -> np.ndarray:
        """Return the union of the sets of each group; ``group`` is that of each of ``numbers``."""
        entries = numbers > 0, (group, numbers)
        picked = sparse.csr_array(entries, (count, self._rows.shape[0]))
        picked.eliminate_zeros()
        lengths = np.diff(picked.indptr)
        result = np.zeros(count, np.int64)
        row = np.repeat(np.arange(count), lengths)
        is_union = lengths > 1
        result[row] = picked.indices  # final for groups of one set
        is_all = self.sizes(picked.indices) == self.size
        result[row[is_all]] = picked.indices[is_all]
        is_union[row[is_all]] = False
        if not is_union.any():
            return result
        picked = picked[np.flatnonzero(is_union)]
        if self.sizes(picked.indices).sum() > _MOST_MEMBERS:
            joined = sparse.csr_array(np.ones((1, self.size), bool))
        else:
            joined = picked @ self._rows
        result[is_union] = self._number(joined)
        return result

    def _number(self, rows: sparse.csr_array) -> np.ndarray:
        """Return the sets' numbers, new ones for new sets; no set is empty."""
        rows.sort_indices()
        bits = self._bits[rows.indices]
        marks = np.add.reduceat(bits, rows.indptr[:-1], axis=0)
        keys = list(map(tuple, marks.tolist()))
        new = []
        for row, key in enumerate(keys):
            if key not in self._numbers:
                self._numbers[key] = self._rows.shape[0] + len(new)
                new.append(row)
        self._rows = sparse.vstack([self._rows, rows[new]], format="csr")
        return np.array([self._numbers[key] for key in keys])
