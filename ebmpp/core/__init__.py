# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random words, validation of arguments, files, compiled programs and types, for all rooms."""

from importlib.metadata import PackageNotFoundError, version

from ebmpp.core import random
from ebmpp.core.types import (
    Blocks,
    Eta,
    Key,
    Keys,
    Natural,
    Numbers,
    Params,
    PerUnit,
    Rows,
    State,
)

__all__ = [
    "Blocks",
    "Eta",
    "Key",
    "Keys",
    "Natural",
    "Numbers",
    "Params",
    "PerUnit",
    "Rows",
    "State",
    "random",
]

try:
    VERSION = version("ebmpp")
except PackageNotFoundError:  # a source tree that is not installed
    VERSION = "unknown"
