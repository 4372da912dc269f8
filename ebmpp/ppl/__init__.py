# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Graphs in NumPyro models: blocks of a Gibbs sampler, composites, the exchange algorithm."""

from ebmpp.distribution import EnergyDistribution, Layout, check_tractable
from ebmpp.ppl.composite import CompositeState, CoupledComposite
from ebmpp.ppl.conjugate import Conjugate
from ebmpp.ppl.exchange import Exchange, ExchangeState
from ebmpp.ppl.expectation import composite_expectation
from ebmpp.ppl.gibbs_block import GibbsBlock, ModelBlock, gibbs_fn
from ebmpp.ppl.hamiltonian import CoupledHMC
from ebmpp.traced import BlockState
from ebmpp.traced.maximum import Maximum

__all__ = [
    "BlockState",
    "CompositeState",
    "Conjugate",
    "CoupledComposite",
    "CoupledHMC",
    "EnergyDistribution",
    "Exchange",
    "ExchangeState",
    "GibbsBlock",
    "Layout",
    "Maximum",
    "ModelBlock",
    "check_tractable",
    "composite_expectation",
    "gibbs_fn",
]
