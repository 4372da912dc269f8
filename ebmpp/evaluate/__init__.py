# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How good a model is: exact sums where they are feasible, estimates where they are not; and its samples."""

from ebmpp.evaluate.frechet import ClassifierFeatures, FrechetDistance, frechet_distance, gaussian_frechet
from ebmpp.evaluate.neighbours import AdversarialAccuracy, adversarial_accuracy
from ebmpp.evaluate.parzen import SampleLikelihood, indirect_likelihood
from ebmpp.evaluate.pseudo import pseudo_log_likelihood

__all__ = [
    "AdversarialAccuracy",
    "ClassifierFeatures",
    "FrechetDistance",
    "SampleLikelihood",
    "adversarial_accuracy",
    "frechet_distance",
    "gaussian_frechet",
    "indirect_likelihood",
    "pseudo_log_likelihood",
]
