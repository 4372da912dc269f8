# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exponential families of units."""

from ebmpp.families.bernoulli import Bernoulli
from ebmpp.families.binomial import Binomial
from ebmpp.families.categorical import Categorical
from ebmpp.families.exponential import Exponential
from ebmpp.families.family import Family
from ebmpp.families.gaussian import Gaussian
from ebmpp.families.poisson import Poisson
from ebmpp.families.spin import Spin
from ebmpp.families.von_mises import VonMises

__all__ = [
    "Bernoulli",
    "Binomial",
    "Categorical",
    "Exponential",
    "Family",
    "Gaussian",
    "Poisson",
    "Spin",
    "VonMises",
]
