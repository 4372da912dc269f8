# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How good a model is: exact sums where they are feasible, estimates where they are not; and its samples."""

from ebmpp.evaluate import exact
from ebmpp.evaluate.activity import unit_activity
from ebmpp.evaluate.annealed import ais, bracket, reverse_ais
from ebmpp.evaluate.features import ClassifierFeatures, ImageFeatures
from ebmpp.evaluate.frechet import FrechetDistance, frechet_distance, gaussian_frechet
from ebmpp.evaluate.neighbours import AdversarialAccuracy, adversarial_accuracy
from ebmpp.evaluate.parzen import SampleLikelihood, indirect_likelihood
from ebmpp.evaluate.pseudo import pseudo_log_likelihood
from ebmpp.evaluate.variational import mean_field_bound

__all__ = [
    "AdversarialAccuracy",
    "ClassifierFeatures",
    "FrechetDistance",
    "ImageFeatures",
    "SampleLikelihood",
    "adversarial_accuracy",
    "ais",
    "bracket",
    "exact",
    "frechet_distance",
    "gaussian_frechet",
    "indirect_likelihood",
    "mean_field_bound",
    "pseudo_log_likelihood",
    "reverse_ais",
    "unit_activity",
]
