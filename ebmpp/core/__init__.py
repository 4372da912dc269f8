# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random words, validation of arguments, files, compiled programs and types, for all rooms."""

from importlib.metadata import PackageNotFoundError, version

from ebmpp.core import random
from ebmpp.core.backend import full_precision
from ebmpp.core.compile import compiled, is_concrete
from ebmpp.core.groups import (
    Edges,
    fold_parts,
    induced_edges,
    positions_by_group,
    ranks_in_groups,
    sum_by_halves,
)
from ebmpp.core.rows import (
    at_index,
    expand,
    in_chunks,
    merge_axes,
    num_rows,
    omit,
    select,
)
from ebmpp.core.types import (
    BatchShape,
    Blocks,
    Chains,
    Count,
    Counts,
    Draws,
    Eta,
    HashableArray,
    Key,
    Keys,
    Natural,
    Numbers,
    Params,
    PerRow,
    PerState,
    PerUnit,
    RowMask,
    Rows,
    Scalar,
    Schedule,
    SiteArrays,
    State,
    StateLike,
    Statistics,
    UnitMask,
    UnitMasks,
    Values,
    Words,
)

__all__ = [
    "BatchShape",
    "Blocks",
    "Chains",
    "Count",
    "Counts",
    "Draws",
    "Edges",
    "Eta",
    "HashableArray",
    "Key",
    "Keys",
    "Natural",
    "Numbers",
    "Params",
    "PerRow",
    "PerState",
    "PerUnit",
    "RowMask",
    "Rows",
    "Scalar",
    "Schedule",
    "SiteArrays",
    "State",
    "StateLike",
    "Statistics",
    "UnitMask",
    "UnitMasks",
    "Values",
    "Words",
    "at_index",
    "compiled",
    "expand",
    "fold_parts",
    "full_precision",
    "induced_edges",
    "is_concrete",
    "in_chunks",
    "merge_axes",
    "num_rows",
    "omit",
    "positions_by_group",
    "random",
    "ranks_in_groups",
    "select",
    "sum_by_halves",
]

try:
    VERSION = version("ebmpp")
except PackageNotFoundError:  # a source tree that is not installed
    VERSION = "unknown"
