# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Graphs from graphs: blocks fixed, renamed, cut, joined, summed out, repeated."""
