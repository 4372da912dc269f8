# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditionals of the sites of a model given everything else, and sweeps over them."""

from ebmpp.traced.sweep.conditionals import Conditionals
from ebmpp.traced.sweep.posterior import Posterior
from ebmpp.traced.sweep.sweep import Sweep

__all__ = ["Conditionals", "Posterior", "Sweep"]
