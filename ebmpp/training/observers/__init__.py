# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Observers of a training run: what happens between its programs of steps."""
