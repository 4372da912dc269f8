# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Estimators of the gradient of the log-likelihood: a positive minus a negative phase."""

from ebmpp.estimators.base import Batch, Estimator
from ebmpp.estimators.centering import CSDCP, Centered
from ebmpp.estimators.certificate import GradientBias, gradient_bias
from ebmpp.estimators.contrastive import CD, FPCD, PCD
from ebmpp.estimators.discriminative import Discriminative
from ebmpp.estimators.herding import Herding
from ebmpp.estimators.local_modes import LocalModeUCD
from ebmpp.estimators.mean_field import MeanField
from ebmpp.estimators.mean_statistics import rates
from ebmpp.estimators.particles import ParticleUCD
from ebmpp.estimators.sdcp import SDCP
from ebmpp.estimators.tempered import TemperedPCD
from ebmpp.estimators.ucd import UCD
from ebmpp.estimators.weighted import WeightedPCD

__all__ = [
    "CD",
    "CSDCP",
    "FPCD",
    "PCD",
    "SDCP",
    "UCD",
    "Batch",
    "Centered",
    "Discriminative",
    "Estimator",
    "GradientBias",
    "Herding",
    "LocalModeUCD",
    "MeanField",
    "ParticleUCD",
    "TemperedPCD",
    "WeightedPCD",
    "gradient_bias",
    "rates",
]
