# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for arrays whose leading axis counts rows."""

from collections.abc import Mapping, Sized
from typing import TypeVar, cast

import numpy as np

from jax import Array

A = TypeVar("A", np.ndarray, Array)


def num_rows(x: Mapping[str, Sized]) -> int:
    """Return the length of the first axis of a state, which its blocks share."""
    return len(next(iter(x.values())))


def expand(x: A, target: np.ndarray | Array) -> A:
    """Append axes of length 1 to ``x`` until it has as many as ``target``.

    >>> import numpy as np
    >>> expand(np.ones(3), target=np.ones((3, 4, 2))).shape
    (3, 1, 1)
    """
    return cast(A, x.reshape(x.shape + (1,) * (target.ndim - x.ndim)))
