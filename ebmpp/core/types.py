# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What is passed from room to room."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool, Float, Integer, Real, Shaped, UInt32
import numpy as np

from jax import Array
from jax.typing import ArrayLike

# -- of one block; ``*units`` are any leading axes and the block's shape -----------------------------

#: Random words, some for each unit.
Words = UInt32[Array, "*units words"]
#: Values as they are given.
Values = Shaped[ArrayLike, "*units"]
#: Values as they are drawn.
Draws = Real[Array, "*units"]
PerUnit = Float[Array, "*units"]
Truths = Bool[Array, "*units"]
#: Natural parameters, statistics, or means of these: ``(*units, *stat_shape)``.
Natural = Float[Array, "*natural"]
#: Numbers on the host or on the device.
Numbers = np.ndarray | Array

# -- of a graph --------------------------------------------------------------------------------------

#: Params of a graph: a pytree of arrays a factor, by its name.
Params = dict[str, Any]
#: A state or data as a user gives them: arrays, lists, data frames, Observed ones, or one for the only block.
StateLike = Mapping[str, Any] | ArrayLike
#: A state: an array a block, ``(*batch, *shape)``.
State = Mapping[str, Array]
#: Many states: an array a block, ``(rows, *shape)``.
Rows = Mapping[str, Shaped[Array, "rows ..."]]
#: Chains side by side, the two of a pair: ``(chains, rows, *shape)`` a block.
Chains = Mapping[str, Shaped[Array, "chains rows ..."]]
#: Rows, or one state, where it was made here and may be added to.
Blocks = dict[str, Array]
#: Sufficient statistics, or their means: an array a block, ``(*batch, *shape, *stat_shape)``.
Statistics = Mapping[str, Float[Array, "..."]]
#: Natural parameters, of the same shapes.
Eta = dict[str, Float[Array, "..."]]
#: Units of a block that stay as they are: a mask a block, of shape ``(rows or 1, *shape)``.
Keep = Mapping[str, Bool[Array, "rows_or_1 ..."]]
#: Two words of random bits from which others are drawn, and two a row.
Key = UInt32[Array, "2"]
Keys = UInt32[Array, "rows 2"]
#: A number, and a number a row.
Scalar = Float[Array, ""]
PerRow = Float[Array, "rows"]
#: Which rows, and how many of something in each.
Which = Bool[Array, "rows"]
Counts = Integer[Array, "rows"]
#: The blocks of one sweep, a tuple of blocks that do not interact at a time.
Schedule = tuple[tuple[str, ...], ...]
