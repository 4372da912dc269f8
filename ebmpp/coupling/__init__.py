# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled pairs of chains: their engine, and unbiased expectations."""

from ebmpp.coupling.expectation import UnbiasedEstimate, unbiased_expectation
from ebmpp.moves.sweeps import mixture_pool

__all__ = ["UnbiasedEstimate", "mixture_pool", "unbiased_expectation"]
