# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What is passed from room to room."""

from collections.abc import Mapping
from typing import Any

from jax import Array

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
