# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""NumPyro MCMC kernels for energy-based models."""

from ebmpp.kernels.base import RowKernel
from ebmpp.kernels.coupling import CouplingState, MaximalCoupling, MetropolisCoupling
from ebmpp.kernels.devices import over_devices
from ebmpp.kernels.gibbs import BlockedGibbs, GibbsLangevin, GibbsState, LangevinState, SwendsenWang
from ebmpp.kernels.long_run import LongDraws, LongRun
from ebmpp.kernels.modes import LocalMode, LocalSearch, SearchState, local_search
from ebmpp.kernels.moments import Moments
from ebmpp.kernels.rates import RatesFPCD, RatesHerding, RatesState, SamplePenalization
from ebmpp.kernels.tempered_pairs import TemperingCoupling, TemperingCouplingState, tempered_expectation
from ebmpp.kernels.tempering import ParallelTempering, TemperingState

__all__ = [
    "BlockedGibbs",
    "CouplingState",
    "GibbsLangevin",
    "GibbsState",
    "LangevinState",
    "LocalMode",
    "LocalSearch",
    "LongDraws",
    "LongRun",
    "MaximalCoupling",
    "MetropolisCoupling",
    "Moments",
    "ParallelTempering",
    "RatesFPCD",
    "RatesHerding",
    "RatesState",
    "RowKernel",
    "SamplePenalization",
    "SearchState",
    "SwendsenWang",
    "TemperingCoupling",
    "TemperingCouplingState",
    "TemperingState",
    "local_search",
    "over_devices",
    "tempered_expectation",
]
