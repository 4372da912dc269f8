# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A transformer and a classifier for scikit-learn, and conversion of BernoulliRBM."""

from ebmpp.sklearn.classifier import HarmoniumClassifier
from ebmpp.sklearn.conversion import from_bernoulli_rbm, to_bernoulli_rbm
from ebmpp.sklearn.transformer import HarmoniumTransformer

__all__ = [
    "HarmoniumClassifier",
    "HarmoniumTransformer",
    "from_bernoulli_rbm",
    "to_bernoulli_rbm",
]
