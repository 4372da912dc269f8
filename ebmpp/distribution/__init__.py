# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""An energy-based model as a NumPyro distribution."""

from ebmpp.distribution.energy_distribution import EnergyDistribution
from ebmpp.distribution.layout import Layout
from ebmpp.distribution.tractability import check_tractable

__all__ = ["EnergyDistribution", "Layout", "check_tractable"]
