# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Transformations of graphs: conditioning and marginalisation."""
