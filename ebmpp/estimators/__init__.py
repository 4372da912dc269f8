# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Estimators of the gradient of the log-likelihood: a positive minus a negative phase."""

from ebmpp.estimators.base import Batch, Estimator
from ebmpp.estimators.contrastive import CD, FPCD, PCD
from ebmpp.estimators.local_mode import LocalModeUCD
from ebmpp.estimators.mean_field import MeanField
from ebmpp.estimators.unbiased import UCD

__all__ = ["CD", "FPCD", "PCD", "UCD", "Batch", "Estimator", "LocalModeUCD", "MeanField"]
