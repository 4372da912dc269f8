# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validation of arrays of rows, and squared distances between them."""

from collections.abc import Iterator
from typing import Any

from jaxtyping import Float32, Shaped
import numpy as np

from ebmpp.core import checks
from ebmpp.errors import ArgumentError


def as_rows(**arrays: Any) -> list[Float32[np.ndarray, "_ units"]]:
    """Return arrays as float32 rows with the same number of values.

    :raises ArgumentError: an array without rows, with values that are not finite, or
        with another row shape than the first array.
    """
    arrays = {name: np.asarray(value) for name, value in arrays.items()}
    first, shape = next((name, array.shape[1:]) for name, array in arrays.items())
    result = []
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub" or array.ndim < 2 or not array.size:
            raise ArgumentError(
                f"{name} must be an array of numbers of shape (rows, *shape) with at "
                f"least one row, got shape {array.shape} of {array.dtype}"
            )
        if array.shape[1:] != shape:
            raise ArgumentError(
                f"{name} must have rows of the shape of {first}, {shape}, got {array.shape[1:]}"
            )
        rows = array.reshape(len(array), -1).astype(np.float32)
        invalid = np.argwhere(~np.isfinite(rows))
        if len(invalid):
            raise ArgumentError(
                f"{name} must be finite, got {len(invalid)} other values, the first in "
                f"row {invalid[0][0]}"
            )
        result.append(rows)
    return result


def square_distances(
    rows: Shaped[np.ndarray, "rows units"],
    others: Shaped[np.ndarray, "others units"],
    chunk: int,
) -> Iterator[Float32[np.ndarray, "chunk others"]]:
    """Yield squared distances of ``chunk`` rows from all others; exact for small integers."""
    from sklearn.metrics.pairwise import euclidean_distances  # half a second to import

    others = others.astype(float)  # in float32 the subtraction of squares loses digits
    for first in range(0, len(rows), checks.count("chunk", chunk)):
        part = rows[first : first + chunk].astype(float)
        yield euclidean_distances(part, others, squared=True).astype(np.float32)
