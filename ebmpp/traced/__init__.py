# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of a Gibbs sampler derived from any NumPyro model by tracing its log density."""

from ebmpp.traced.block import BlockState

__all__ = ["BlockState"]
