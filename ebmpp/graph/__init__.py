# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The declaration: a factor graph of visible and latent blocks, and what follows from its energy."""

from ebmpp.graph.factors import Bias, Bilinear, Convolution, Factor, Linear, Pairwise
from ebmpp.graph.graph import FactorGraph, layered
from ebmpp.graph.saving import load, save
from ebmpp.graph.states import Observed
from ebmpp.graph.transforms.condition import condition, rename, split
from ebmpp.graph.transforms.marginalize import marginalize
from ebmpp.graph.transforms.merge import merge, stack

__all__ = [
    "Bias",
    "Bilinear",
    "Convolution",
    "Factor",
    "FactorGraph",
    "Linear",
    "Observed",
    "Pairwise",
    "condition",
    "layered",
    "load",
    "marginalize",
    "merge",
    "rename",
    "save",
    "split",
    "stack",
]
