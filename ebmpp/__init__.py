# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""ebmpp: energy-based models with latent variables, as a plug-in for NumPyro on JAX."""

from ebmpp import plots
from ebmpp.diagnostics import summary, to_datatree
from ebmpp.evaluate import exact
from ebmpp.factors import Bias, Bilinear, Factor
from ebmpp.families import (
    Bernoulli,
    Binomial,
    Categorical,
    Exponential,
    Family,
    Gaussian,
    Poisson,
    Spin,
)
from ebmpp.graph import FactorGraph, layered
from ebmpp.kernels import BlockedGibbs

__all__ = [
    "Bernoulli",
    "Bias",
    "Bilinear",
    "Binomial",
    "BlockedGibbs",
    "Categorical",
    "Exponential",
    "Factor",
    "FactorGraph",
    "Family",
    "Gaussian",
    "Poisson",
    "Spin",
    "exact",
    "layered",
    "plots",
    "summary",
    "to_datatree",
]
