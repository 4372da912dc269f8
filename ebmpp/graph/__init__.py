# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factor graphs: declaration, everything derived from the energy, transformations and files."""

from ebmpp.graph.factors import (
    Bias,
    Bilinear,
    Convolution,
    Coupling,
    Factor,
    Hyperedges,
    Linear,
    Pairwise,
    Table,
)
from ebmpp.graph.gauge import zero_sum_gauge
from ebmpp.graph.graph import FactorGraph, layered
from ebmpp.graph.saving import load, save
from ebmpp.graph.states import Observed
from ebmpp.graph.transforms.condition import condition
from ebmpp.graph.transforms.marginalize import marginalize

__all__ = [
    "Bias",
    "Bilinear",
    "Convolution",
    "Coupling",
    "Factor",
    "FactorGraph",
    "Hyperedges",
    "Linear",
    "Observed",
    "Pairwise",
    "Table",
    "condition",
    "layered",
    "load",
    "marginalize",
    "save",
    "zero_sum_gauge",
]
