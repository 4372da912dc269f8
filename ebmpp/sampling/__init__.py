# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs: the engine of coupled pairs, expectations, perfect draws, search, completion, enumeration."""

from ebmpp.sampling.completion import Completion, complete
from ebmpp.sampling.expectation import Estimate, unbiased_expectation
from ebmpp.sampling.perfect import perfect_sample
from ebmpp.sampling.pools import mixture_pool

__all__ = ["Completion", "Estimate", "complete", "mixture_pool", "perfect_sample", "unbiased_expectation"]
