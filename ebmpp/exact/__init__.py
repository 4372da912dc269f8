# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exact results: sums over all states of small models, and perfect draws."""

from ebmpp.exact.perfect import perfect_sample
from ebmpp.exact.sums import (
    grad_log_likelihood,
    log_likelihood,
    log_partition,
    moments,
    probabilities,
    variances,
)

__all__ = [
    "grad_log_likelihood",
    "log_likelihood",
    "log_partition",
    "moments",
    "perfect_sample",
    "probabilities",
    "variances",
]
