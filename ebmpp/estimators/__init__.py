# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Estimators of the gradient of the log-likelihood: a positive minus a negative phase."""

from ebmpp.estimators.base import Batch, Estimator
from ebmpp.estimators.centering import Centered
from ebmpp.estimators.certificate import GradientBias, gradient_bias
from ebmpp.estimators.contrastive import CD, FPCD, PCD
from ebmpp.estimators.discriminative import Discriminative
from ebmpp.estimators.mean_field import MeanField
from ebmpp.estimators.particles import ParticleUCD
from ebmpp.estimators.tempered import TemperedPCD
from ebmpp.estimators.ucd import UCD
from ebmpp.estimators.weighted import WeightedPCD

__all__ = [
    "CD",
    "FPCD",
    "PCD",
    "UCD",
    "Batch",
    "Centered",
    "Discriminative",
    "Estimator",
    "GradientBias",
    "MeanField",
    "ParticleUCD",
    "TemperedPCD",
    "WeightedPCD",
    "gradient_bias",
]
