# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Estimators of the gradient of the log-likelihood: a positive minus a negative phase."""

from ebmpp.estimators.base import (
    Batch,
    Choice,
    Estimate,
    Estimator,
    HasChains,
    Repeats,
    StepMetrics,
)
from ebmpp.estimators.centering import Centered
from ebmpp.estimators.certificate import GradientBias, gradient_bias
from ebmpp.estimators.contrastive import CD, PCD, TemperedPCD
from ebmpp.estimators.discriminative import Discriminative
from ebmpp.estimators.lengths import Quantile, TargetCost, TargetVariance
from ebmpp.estimators.particles import ParticleUCD
from ebmpp.estimators.phases import MeanField
from ebmpp.estimators.trajectory import PTT
from ebmpp.estimators.ucd import UCD
from ebmpp.estimators.weighted import WeightedPCD

__all__ = [
    "CD",
    "PCD",
    "PTT",
    "UCD",
    "Batch",
    "Centered",
    "Choice",
    "Discriminative",
    "Estimate",
    "Estimator",
    "GradientBias",
    "HasChains",
    "MeanField",
    "ParticleUCD",
    "Quantile",
    "Repeats",
    "StepMetrics",
    "TargetCost",
    "TargetVariance",
    "TemperedPCD",
    "WeightedPCD",
    "gradient_bias",
]
