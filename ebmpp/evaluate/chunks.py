# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rows of numbers to compare, checked, and cut into chunks of one shape."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ebmpp.core import checks
from ebmpp.errors import ArgumentError


def as_rows(**given: Any) -> list[np.ndarray | None]:
    """Arrays as float32 rows of the same number of values; None stays None.

    :raises ArgumentError: for what has no rows, is not finite, or has other units than the first.
    """
    made, first = [], None
    for name, value in given.items():
        if value is None:
            made.append(None)
            continue
        array = np.asarray(value)
        if array.dtype.kind not in "fiub" or array.ndim < 2 or not array.size:
            raise ArgumentError(
                f"{name} is an array of numbers of shape (rows, *shape) with at least one row; got shape "
                f"{array.shape} of {array.dtype}"
            )
        if first is None:
            first = name, array.shape[1:]
        elif array.shape[1:] != first[1]:
            raise ArgumentError(f"{name} has rows of shape {array.shape[1:]}, and {first[0]} of {first[1]}")
        array = array.reshape(len(array), -1).astype(np.float32)
        wrong = np.argwhere(~np.isfinite(array))
        if len(wrong):
            raise ArgumentError(
                f"{name} has {len(wrong)} values that are not finite, the first in row {wrong[0][0]}"
            )
        made.append(array)
    return made


def chunks(rows: np.ndarray, size: int) -> Iterator[tuple[int, np.ndarray, int]]:
    """Chunks of ``size`` rows, the last filled up with zeros: one shape, so one program.

    :return: the number of the first row, the chunk, and how many of its rows are rows.
    """
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        fill = np.zeros((size - len(part), *rows.shape[1:]), rows.dtype)
        yield first, np.concatenate([part, fill]) if len(fill) else part, len(part)


def fitting(chunk: int, rows: np.ndarray) -> int:
    """The size of chunks: ``chunk``, or a power of two that holds all the rows.

    :raises ArgumentError: for a chunk that is not a positive int.
    """
    return min(checks.count("chunk", chunk), 1 << max(0, len(rows) - 1).bit_length())
