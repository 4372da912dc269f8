# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What is passed from room to room."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool, Float, Real, Shaped, UInt32
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
#: A state as a caller gives it: an array a block, ``(*batch, *shape)``.
State = Mapping[str, Array]
#: Many states: an array a block, ``(rows, *shape)``.
Rows = Mapping[str, Array]
#: The same, or one state, where it was made here and may be added to.
Blocks = dict[str, Array]
#: Natural parameters: an array a block, ``(*batch, *shape, *stat_shape)``.
Eta = dict[str, Array]
#: Units of a block that stay as they are: a mask a block, of shape ``(rows or 1, *shape)``.
Keep = Mapping[str, Array]
#: The blocks of one sweep, a tuple of blocks that do not interact at a time.
Schedule = tuple[tuple[str, ...], ...]
