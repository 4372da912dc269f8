# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A graph inside a NumPyro model: as a distribution, as a block of a Gibbs sampler, coupled, exchanged."""

from ebmpp.ppl import divergence as divergence  # registers itself
from ebmpp.ppl.composite import CompositeState, Conjugate, CoupledComposite
from ebmpp.ppl.distribution import EnergyDistribution
from ebmpp.ppl.exchange import Exchange, ExchangeState
from ebmpp.ppl.expectation import composite_expectation
from ebmpp.ppl.gibbs_block import BlockState, GibbsBlock
from ebmpp.ppl.gibbs_function import gibbs_fn
from ebmpp.ppl.intractable import check_model
from ebmpp.ppl.layout import Layout
from ebmpp.ppl.model_block import ModelBlock, ModelBlockState

__all__ = [
    "BlockState",
    "CompositeState",
    "Conjugate",
    "CoupledComposite",
    "EnergyDistribution",
    "Exchange",
    "ExchangeState",
    "GibbsBlock",
    "Layout",
    "ModelBlock",
    "ModelBlockState",
    "check_model",
    "composite_expectation",
    "gibbs_fn",
]
