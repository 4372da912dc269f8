# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Shared types of arrays and pytrees."""

from collections.abc import Mapping
import dataclasses
from typing import Any, Self

from jaxtyping import Bool, Float, Integer, Real, Shaped, UInt32
import numpy as np

from jax import Array
from jax.typing import ArrayLike

# -- of one block; ``*units`` are any leading axes and the block's shape --------------

#: Random words of each unit.
Words = UInt32[Array, "*units words"]
#: Values from a user.
Values = Shaped[ArrayLike, "*units"]
#: Drawn values.
Draws = Real[Array, "*units"]
PerUnit = Float[Array, "*units"]
UnitMask = Bool[Array, "*units"]
#: Natural parameters, statistics, or means of these: ``(*units, *stat_shape)``.
Natural = Float[Array, "*natural"]
#: Numbers on the host or on the device.
Numbers = np.ndarray | Array

# -- of a graph -----------------------------------------------------------------------

#: Params of a graph: a pytree of arrays for each factor name.
Params = dict[str, Any]
#: A state or data from a user: arrays, lists, data frames or Observed; without a dict
#: for a single block.
StateLike = Mapping[str, Any] | ArrayLike
#: A state: an array ``(*batch, *shape)`` for each block.
State = Mapping[str, Array]
#: Many states: an array ``(rows, *shape)`` for each block.
Rows = Mapping[str, Shaped[Array, "rows ..."]]
#: Both chains of pairs: an array ``(chains, rows, *shape)`` for each block.
Chains = Mapping[str, Shaped[Array, "chains rows ..."]]
#: Rows or one state in a dict that may be changed.
Blocks = dict[str, Array]
#: Values of a program's sites in a dict that may be changed.
SiteArrays = dict[str, Array]
#: Sufficient statistics or their means: an array ``(*batch, *shape, *stat_shape)`` for
#: each block.
Statistics = Mapping[str, Float[Array, "..."]]
#: Natural parameters, with the shapes of the statistics.
Eta = dict[str, Float[Array, "..."]]
#: Masks of observed units, ``(rows or 1, *shape)`` for each block.
UnitMasks = Mapping[str, Bool[Array, "rows_or_1 ..."]]
#: A key of two random words, and one key per row.
Key = UInt32[Array, "2"]
Keys = UInt32[Array, "rows 2"]
#: Leading axes.
BatchShape = tuple[int, ...]
#: A number, one number per state, and one per row.
Scalar = Float[Array, ""]
PerState = Float[Array, "*batch"]
PerRow = Float[Array, "rows"]
#: A mask of rows, a count, and a count for each row.
RowMask = Bool[Array, "rows"]
Count = Integer[Array, ""]
Counts = Integer[Array, "rows"]
#: The layers of one sweep.
Schedule = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class HashableArray:
    """An array that compares and hashes by value."""

    shape: tuple[int, ...]
    dtype: np.dtype
    data: bytes = dataclasses.field(repr=False)

    @classmethod
    def copy(cls, array: ArrayLike) -> Self:
        """Copy an array."""
        values = np.asarray(array)
        return cls(values.shape, values.dtype, values.tobytes())

    @property
    def array(self) -> np.ndarray:
        """The array, read-only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)
