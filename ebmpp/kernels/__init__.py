# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""NumPyro MCMC kernels for energy-based models."""

from ebmpp.kernels.base import Conditions, RowKernel
from ebmpp.kernels.coupling import CouplingState, MaximalCoupling
from ebmpp.kernels.gibbs import BlockedGibbs, GibbsState
from ebmpp.kernels.local_search import LocalMode, local_search

__all__ = [
    "BlockedGibbs",
    "Conditions",
    "CouplingState",
    "GibbsState",
    "LocalMode",
    "MaximalCoupling",
    "RowKernel",
    "local_search",
]
