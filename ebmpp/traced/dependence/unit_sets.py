# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sets of units, each known by a number, so that arrays of numbers tell which units every element reads."""

import numpy as np

_MOST = 2**25  # members that are looked at in one go
_ABSORBING = 32  # a set this large that holds what it is joined with is found without joining them


class UnitSets:
    """Sets of units 0, ..., ``size`` - 1: number 0 is the empty set, u + 1 holds unit u alone, others follow.

    Equal sets have equal numbers. Where joining sets would take more memory than is reasonable the result is
    the set of all units: larger than it need be, never smaller.

    :param size: how many units there are.

    **Example**

    >>> import numpy as np
    >>> from ebmpp.traced.dependence.unit_sets import UnitSets
    >>> sets = UnitSets(4)
    >>> chain = sets.union(np.array([1, 2, 3]), np.array([2, 3, 4]))  # units (0, 1), (1, 2), (2, 3)
    >>> sets.sizes(chain).tolist(), (sets.union(chain, np.array([1, 3, 3])) == chain).tolist()
    ([2, 2, 2], [True, True, True])
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # sums of 128 random bits a unit: that two of a million sets agree has probability 1e-27
        self._marks = np.random.default_rng(0).integers(0, 2**64, (size, 2), np.uint64)
        self._start = np.concatenate([[0], np.arange(size + 1)])  # of set s: _units[_start[s]:_start[s + 1]]
        self._units = np.arange(size)
        self._numbers: dict[tuple[int, int], int] = {}

    def sizes(self, numbers: np.ndarray) -> np.ndarray:
        """How many units sets have."""
        return self._start[numbers + 1] - self._start[numbers]

    def members(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions in ``numbers`` and units, a pair a member, in order of both."""
        numbers = np.asarray(numbers).ravel()
        sizes = self.sizes(numbers)
        which = np.repeat(np.arange(len(numbers)), sizes)
        offset = np.repeat(self._start[numbers] - (np.cumsum(sizes) - sizes), sizes)
        return which, self._units[offset + np.arange(len(which))]

    def union(self, *numbers: np.ndarray) -> np.ndarray:
        """The union, element by element, of arrays of numbers that broadcast."""
        made, *others = np.broadcast_arrays(*numbers)
        for other in others:
            made = self._union(made, other)
        return made

    def _union(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        made = np.where(a == 0, b, a)
        mixed = (a != b) & (a != 0) & (b != 0)
        if not mixed.any():
            return made
        small, large = a[mixed], b[mixed]
        swap = self.sizes(small) > self.sizes(large)
        small, large = np.where(swap, large, small), np.where(swap, small, large)
        pairs, back = np.unique(np.stack([small, large], 1), axis=0, return_inverse=True)
        joined = self._absorbed(*pairs.T)
        left = np.flatnonzero(joined < 0)
        joined[left] = self.of_groups(np.tile(np.arange(len(left)), 2), pairs[left].T.ravel(), len(left))
        made[mixed] = joined[back.ravel()]
        return made

    def _absorbed(self, small: np.ndarray, large: np.ndarray) -> np.ndarray:
        """The large set where it holds the small one, which has one unit; -1 where that is not known."""
        made = np.full(len(small), -1)
        candidates = (self.sizes(small) == 1) & (self.sizes(large) >= _ABSORBING)
        for number in np.unique(large[candidates])[:_ABSORBING]:
            inside = np.zeros(self.size, bool)
            inside[self.members(np.array([number]))[1]] = True
            here = np.flatnonzero(candidates & (large == number))
            made[here[inside[small[here] - 1]]] = number
        return made

    def merge(self, numbers: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        """The union along axes, which go."""
        kept = [d for d in range(numbers.ndim) if d not in axes]
        shape = tuple(numbers.shape[d] for d in kept)
        rows = numbers.transpose([*kept, *axes]).reshape(int(np.prod(shape)), -1)
        if rows.shape[1] == 1 or not rows.any():
            return (rows[:, 0] if rows.shape[1] else np.zeros(len(rows), int)).reshape(shape)
        group = np.repeat(np.arange(len(rows)), rows.shape[1])
        return self.of_groups(group, rows.ravel(), len(rows)).reshape(shape)

    def of_groups(self, group: np.ndarray, numbers: np.ndarray, count: int) -> np.ndarray:
        """The union of all sets of a group.

        :param group: which group each of ``numbers`` belongs to, below ``count``.
        """
        made = np.zeros(count, np.int64)
        base = len(self._start)
        codes = np.unique((group * base + numbers)[numbers > 0])
        group, numbers = codes // base, codes % base
        made[group] = numbers  # right where a group has one
        several = np.bincount(group, minlength=count) > 1
        if not several.any():
            return made
        mixed = several[group]
        group, numbers = group[mixed], numbers[mixed]
        if self.sizes(numbers).sum() > _MOST:
            made[several] = self._find(np.zeros(self.size, np.int64), np.arange(self.size), 1)[0]
            return made
        which, units = self.members(numbers)
        codes = np.unique(group[which] * self.size + units)
        rows = np.flatnonzero(several)
        made[rows] = self._find(np.searchsorted(rows, codes // self.size), codes % self.size, len(rows))
        return made

    def _find(self, row: np.ndarray, units: np.ndarray, count: int) -> np.ndarray:
        """Numbers of sets, each row's units given in order and once; new sets get new numbers."""
        sizes = np.bincount(row, minlength=count)
        ends = np.cumsum(sizes)
        marks = np.add.reduceat(self._marks[units], ends - sizes, axis=0)
        made, fresh = np.empty(count, np.int64), []
        for i, mark in enumerate(map(tuple, marks.tolist())):
            if sizes[i] == 1:
                made[i] = units[ends[i] - 1] + 1
                continue
            if mark not in self._numbers:
                self._numbers[mark] = len(self._start) - 1 + len(fresh)
                fresh.append(i)
            made[i] = self._numbers[mark]
        if fresh:
            new = np.isin(row, fresh)
            self._start = np.concatenate([self._start, self._start[-1] + np.cumsum(sizes[fresh])])
            self._units = np.concatenate([self._units, units[new]])
        return made
