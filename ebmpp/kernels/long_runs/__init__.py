# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Runs whose draws are not kept in memory."""

from ebmpp.kernels.long_runs.long_run import LongDraws, LongRun
from ebmpp.kernels.long_runs.totals import Moments

__all__ = ["LongDraws", "LongRun", "Moments"]
