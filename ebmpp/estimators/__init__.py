# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Estimators of the gradient of the log-likelihood: a positive minus a negative phase."""

from ebmpp.estimators.base import Batch, Estimator
from ebmpp.estimators.centering import CSDCP, Centered
from ebmpp.estimators.contrastive import CD, FPCD, PCD
from ebmpp.estimators.dc import SDCP
from ebmpp.estimators.unbiased import UCD

__all__ = ["CD", "CSDCP", "FPCD", "PCD", "SDCP", "UCD", "Batch", "Centered", "Estimator"]
