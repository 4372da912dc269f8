# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A sampler for dimod, from the extra ``dimod``."""

from ebmpp.dimod.sampler import BoltzmannSampler

__all__ = ["BoltzmannSampler"]
