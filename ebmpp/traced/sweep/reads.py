# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sums over the elements of terms that read a unit, or a pair of units."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.graph.factors.lateral import ranks
from ebmpp.traced.sweep.conditionals import MOST_COLUMNS

_MOST_PADDING = 4  # padded entries of a table per entry in use


class Reads(NamedTuple):
    """Elements of terms that read each of some readers: units, or pairs of units.

    Arrays are of one layer; or of several, padded equally and stacked, for a scan.
    """

    tables: dict[int, Any]
    """By term, its elements that read each reader, ``(readers, most)``; padded by the term's size."""
    ragged: dict[int, tuple[Any, Any]]
    """By term of which few readers read many elements: elements, and positions among the readers."""

    @property
    def slots(self) -> list[int]:
        """Terms that are read."""
        return [*self.tables, *self.ragged]

    def sums(self, terms: Mapping[int, Array], count: int) -> Array:
        """Return the sum of the elements that each of ``count`` readers reads."""
        total = jnp.zeros(count)
        for slot, table in self.tables.items():
            total = total + _sum_at(terms[slot].ravel(), table)
        for slot, (elements, positions) in self.ragged.items():
            picked = terms[slot].ravel().at[elements].get(mode="fill", fill_value=0)
            total = total.at[positions].add(picked, mode="drop")
        return total


def place(
    slot: int, padding: int, reads: Sequence[Reads], sizes: Sequence[int], pairs: list[tuple], stacked: bool
) -> None:
    """Record the elements of a term that layers read: as a table, or as a list where that is smaller.

    :param reads: of each layer.
    :param sizes: number of readers of each layer.
    :param pairs: by layer, elements and the positions of the readers that read them.
    :param stacked: True if all layers must have the same sizes.
    """
    counts = [int(np.bincount(positions).max(initial=0)) for _, positions in pairs]
    width = max(len(elements) for elements, _ in pairs)
    total, most = sum(len(elements) for elements, _ in pairs), max(counts)
    ragged = most * sum(sizes) > _MOST_PADDING * total + sum(sizes)
    for layer, size, (elements, positions), count in zip(reads, sizes, pairs, counts, strict=True):
        if not stacked and not len(elements):
            continue
        if not ragged:
            table = layer.tables[slot] = np.full((size, most if stacked else count), padding, np.int32)
            table[positions, ranks(positions)] = elements
            continue
        spare = (0, width - len(elements) if stacked else 0)
        fill = lambda a, value, spare=spare: np.pad(a, spare, constant_values=value).astype(np.int32)
        layer.ragged[slot] = fill(elements, padding), fill(positions, size)


def _sum_at(values: Array, table: Any) -> Array:
    """Return the sums of the values at each row of a table."""
    is_all = isinstance(table, np.ndarray) and np.array_equal(table.ravel(), np.arange(len(values)))
    if table.shape[1] > MOST_COLUMNS:
        picked = values.reshape(table.shape) if is_all else values.at[table].get(mode="fill", fill_value=0)
        return picked.sum(1)
    # column by column: XLA on CPU sums a short last axis twenty times slower
    column = lambda j: values.reshape(table.shape)[:, j]
    pick = lambda j: values.at[table[:, j]].get(mode="fill", fill_value=0)
    return sum(((column if is_all else pick)(j) for j in range(table.shape[1])), jnp.zeros(()))
