# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for arrays whose leading axis counts rows."""

from collections.abc import Mapping, Sized
from typing import Any, Protocol, Self, TypeVar


class _Shaped(Protocol):
    """An array of NumPy or jax."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...

    def reshape(self, shape: Any, /) -> Self: ...


A = TypeVar("A", bound=_Shaped)


def num_rows(x: Mapping[str, Sized]) -> int:
    """Return the length of the first axis of a state, which its blocks share."""
    return len(next(iter(x.values())))


def expand(x: A, target: _Shaped) -> A:
    """Append axes of length 1 to ``x`` until it has as many as ``target``.

    >>> import numpy as np
    >>> expand(np.ones(3), target=np.ones((3, 4, 2))).shape
    (3, 1, 1)
    """
    return x.reshape(x.shape + (1,) * (target.ndim - x.ndim))
