# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rows of numbers to compare: checked, and how far apart they are."""

from collections.abc import Iterator
from typing import Any

from jaxtyping import Float32, Shaped
import numpy as np

from ebmpp.core import checks
from ebmpp.errors import ArgumentError


def as_rows(**given: Any) -> list[Float32[np.ndarray, "_ units"]]:
    """Arrays as float32 rows of the same number of values.

    :raises ArgumentError: for what has no rows, is not finite, or has other units than the first.
    """
    arrays = {name: np.asarray(value) for name, value in given.items()}
    first, shape = next((name, array.shape[1:]) for name, array in arrays.items())
    made = []
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub" or array.ndim < 2 or not array.size:
            raise ArgumentError(
                f"{name} is an array of numbers of shape (rows, *shape) with at least one row; got shape "
                f"{array.shape} of {array.dtype}"
            )
        if array.shape[1:] != shape:
            raise ArgumentError(f"{name} has rows of shape {array.shape[1:]}, and {first} of {shape}")
        array = array.reshape(len(array), -1).astype(np.float32)
        wrong = np.argwhere(~np.isfinite(array))
        if len(wrong):
            raise ArgumentError(
                f"{name} has {len(wrong)} values that are not finite, the first in row {wrong[0][0]}"
            )
        made.append(array)
    return made


def square_distances(
    rows: Shaped[np.ndarray, "rows units"], others: Shaped[np.ndarray, "others units"], chunk: int
) -> Iterator[Float32[np.ndarray, "chunk others"]]:
    """Squared distances of ``chunk`` rows at a time from all others: exact where values are small integers.

    :raises ArgumentError: for a chunk that is not a positive int.
    """
    from sklearn.metrics.pairwise import euclidean_distances  # half a second, for those who compare rows

    others = others.astype(float)  # where squares are subtracted, float32 loses digits
    for first in range(0, len(rows), checks.count("chunk", chunk)):
        part = rows[first : first + chunk].astype(float)
        yield euclidean_distances(part, others, squared=True).astype(np.float32)
