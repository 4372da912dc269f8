# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""NumPyro MCMC kernels for energy-based models."""

from ebmpp.kernels.base import RowKernel, sharded_chains
from ebmpp.kernels.coupling import CouplingState, MaximalCoupling
from ebmpp.kernels.gibbs import BlockedGibbs, GibbsState, SwendsenWang
from ebmpp.kernels.long_run import LongDraws, LongRun
from ebmpp.kernels.modes import LocalMode, local_search
from ebmpp.kernels.sampling import sample
from ebmpp.kernels.streaming import Moments
from ebmpp.kernels.tempering import ParallelTempering, TemperingState

__all__ = [
    "BlockedGibbs",
    "CouplingState",
    "GibbsState",
    "LocalMode",
    "LongDraws",
    "LongRun",
    "MaximalCoupling",
    "Moments",
    "ParallelTempering",
    "RowKernel",
    "SwendsenWang",
    "TemperingState",
    "local_search",
    "sample",
    "sharded_chains",
]
