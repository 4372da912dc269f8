# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Which version of ebmpp this is, as its installation says."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("ebmpp")
except PackageNotFoundError:  # a source tree that is not installed
    VERSION = "unknown"
