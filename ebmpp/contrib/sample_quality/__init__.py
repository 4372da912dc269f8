# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Scores of samples beside data rows: Frechet distance, kernel density, nearest neighbours."""

from ebmpp.contrib.sample_quality.features import ClassifierFeatures, ImageFeatures
from ebmpp.contrib.sample_quality.frechet import (
    FrechetDistance,
    frechet_distance,
    gaussian_frechet,
)
from ebmpp.contrib.sample_quality.neighbours import (
    AdversarialAccuracy,
    adversarial_accuracy,
)
from ebmpp.contrib.sample_quality.parzen import SampleLikelihood, indirect_likelihood

__all__ = [
    "AdversarialAccuracy",
    "ClassifierFeatures",
    "FrechetDistance",
    "ImageFeatures",
    "SampleLikelihood",
    "adversarial_accuracy",
    "frechet_distance",
    "gaussian_frechet",
    "indirect_likelihood",
]
