# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exact sums and joint draws of finite units that interact along the edges of a forest."""

from ebmpp.moves.forests.layers import forest_layers
from ebmpp.moves.forests.structure import Forest
from ebmpp.moves.forests.sums import (
    MarginalsByPair,
    PairMarginals,
    draw,
    draw_pair,
    log_sum,
    log_sums_by_tree,
    marginals,
    most_probable,
)

__all__ = [
    "Forest",
    "MarginalsByPair",
    "PairMarginals",
    "draw",
    "draw_pair",
    "forest_layers",
    "log_sum",
    "log_sums_by_tree",
    "marginals",
    "most_probable",
]
