# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs: the engine of coupled pairs, expectations, perfect draws, search, completion, enumeration."""

from ebmpp.sampling.completion import Completion, complete
from ebmpp.sampling.expectation import Estimate, unbiased_expectation
from ebmpp.sampling.perfect import perfect_sample

__all__ = ["Completion", "Estimate", "complete", "perfect_sample", "unbiased_expectation"]
