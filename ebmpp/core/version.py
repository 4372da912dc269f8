# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Installed version of ebmpp."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("ebmpp")
except PackageNotFoundError:  # a source tree that is not installed
    VERSION = "unknown"
