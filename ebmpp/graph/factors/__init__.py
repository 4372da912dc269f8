# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factors: the terms of an energy."""

from ebmpp.graph.factors.convolution import Convolution
from ebmpp.graph.factors.factor import Factor
from ebmpp.graph.factors.linear import Bias, Bilinear, Linear
from ebmpp.graph.factors.pairwise import Hyperedges, Pairwise
from ebmpp.graph.factors.table import Coupling, Table

__all__ = [
    "Bias",
    "Bilinear",
    "Convolution",
    "Coupling",
    "Factor",
    "Hyperedges",
    "Linear",
    "Pairwise",
    "Table",
]
