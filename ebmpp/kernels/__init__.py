# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""NumPyro MCMC kernels for energy-based models."""

from ebmpp.kernels.base import Conditions, RowKernel
from ebmpp.kernels.block import BlockState, GibbsBlock, gibbs_fn
from ebmpp.kernels.composite import CompositeState, Conjugate, CoupledComposite
from ebmpp.kernels.coupled import CoupledKernel, CouplingState
from ebmpp.kernels.coupling import MaximalCoupling, MetropolisCoupling
from ebmpp.kernels.expectation import composite_expectation
from ebmpp.kernels.gibbs import BlockedGibbs, GibbsState
from ebmpp.kernels.local_search import LocalMode, LocalSearch, SearchState, local_search

__all__ = [
    "BlockState",
    "BlockedGibbs",
    "CompositeState",
    "Conditions",
    "Conjugate",
    "CoupledComposite",
    "CoupledKernel",
    "CouplingState",
    "GibbsBlock",
    "GibbsState",
    "LocalMode",
    "LocalSearch",
    "MaximalCoupling",
    "MetropolisCoupling",
    "RowKernel",
    "SearchState",
    "composite_expectation",
    "gibbs_fn",
    "local_search",
]
