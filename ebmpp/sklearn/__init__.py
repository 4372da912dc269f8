# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A scikit-learn transformer that learns features, and conversion of BernoulliRBM."""

from ebmpp.sklearn.conversion import from_bernoulli_rbm, to_bernoulli_rbm
from ebmpp.sklearn.transformer import HarmoniumTransformer

__all__ = ["HarmoniumTransformer", "from_bernoulli_rbm", "to_bernoulli_rbm"]
