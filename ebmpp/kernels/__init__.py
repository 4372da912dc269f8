# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""NumPyro MCMC kernels for energy-based models."""

from ebmpp.kernels.base import Conditions, RowKernel
from ebmpp.kernels.block import BlockState, GibbsBlock, gibbs_fn
from ebmpp.kernels.composite import CompositeState, Conjugate, CoupledComposite
from ebmpp.kernels.coupled import CoupledKernel, CouplingState
from ebmpp.kernels.coupling import MaximalCoupling, MetropolisCoupling
from ebmpp.kernels.exchange import Exchange, ExchangeState
from ebmpp.kernels.expectation import composite_expectation
from ebmpp.kernels.gibbs import BlockedGibbs, GibbsState
from ebmpp.kernels.langevin import GibbsLangevin, LangevinState
from ebmpp.kernels.local_search import LocalMode, LocalSearch, SearchState, local_search
from ebmpp.kernels.rates import RatesFPCD, RatesHerding, RatesState, SamplePenalization
from ebmpp.kernels.swendsen_wang import SwendsenWang
from ebmpp.kernels.tempering import (
    ParallelTempering,
    TemperingCoupling,
    TemperingCouplingState,
    TemperingState,
    tempered_expectation,
)

__all__ = [
    "BlockState",
    "BlockedGibbs",
    "CompositeState",
    "Conditions",
    "Conjugate",
    "CoupledComposite",
    "CoupledKernel",
    "CouplingState",
    "Exchange",
    "ExchangeState",
    "GibbsBlock",
    "GibbsLangevin",
    "GibbsState",
    "LangevinState",
    "LocalMode",
    "LocalSearch",
    "MaximalCoupling",
    "MetropolisCoupling",
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
    "composite_expectation",
    "gibbs_fn",
    "local_search",
    "tempered_expectation",
]
