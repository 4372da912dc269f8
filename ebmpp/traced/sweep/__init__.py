# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditionals of the sites of a model given everything else, and sweeps over them."""

from ebmpp.traced.sweep.collapsed import CollapsedSweep, collapsed_sweep
from ebmpp.traced.sweep.forests import ForestLayers
from ebmpp.traced.sweep.sweep import BlockSweep

__all__ = ["BlockSweep", "CollapsedSweep", "ForestLayers", "collapsed_sweep"]
