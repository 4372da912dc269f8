# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""NumPyro MCMC kernels for energy-based models."""

from ebmpp.kernels.base import Conditions, RowKernel
from ebmpp.kernels.coupled import CoupledKernel, CouplingState
from ebmpp.kernels.coupling import MaximalCoupling, MetropolisCoupling
from ebmpp.kernels.gibbs import BlockedGibbs, GibbsState
from ebmpp.kernels.local_search import LocalMode, LocalSearch, SearchState, local_search

__all__ = [
    "BlockedGibbs",
    "Conditions",
    "CoupledKernel",
    "CouplingState",
    "GibbsState",
    "LocalMode",
    "LocalSearch",
    "MaximalCoupling",
    "MetropolisCoupling",
    "RowKernel",
    "SearchState",
    "local_search",
]
