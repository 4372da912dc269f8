# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factor graphs: declaration, everything derived from the energy, transformations and files."""

from ebmpp.graph.factors import (
    Bias,
    Bilinear,
    Convolution,
    Factor,
    Linear,
    Pairwise,
    Table,
)
from ebmpp.graph.graph import FactorGraph, layered
from ebmpp.graph.saving import load, save
from ebmpp.graph.states import Observed
from ebmpp.graph.transforms.condition import condition
from ebmpp.graph.transforms.marginalize import marginalize

__all__ = [
    "Bias",
    "Bilinear",
    "Convolution",
    "Factor",
    "FactorGraph",
    "Linear",
    "Observed",
    "Pairwise",
    "Table",
    "condition",
    "layered",
    "load",
    "marginalize",
    "save",
]
