# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditionals of the sites of a model given everything else, and sweeps over them."""

from ebmpp.traced.sweep.continuous import ContinuousSite
from ebmpp.traced.sweep.layers import Conditionals, Layer
from ebmpp.traced.sweep.posterior import Posterior
from ebmpp.traced.sweep.sweep import Sweep

__all__ = ["Conditionals", "ContinuousSite", "Layer", "Posterior", "Sweep"]
