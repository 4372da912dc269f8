# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training: `fit`, its schedule, callbacks, monitors, history and optimisers; `estimate`."""

from ebmpp.training import monitors, optimizers
from ebmpp.training.callbacks import EarlyStop, Progress
from ebmpp.training.estimates import Estimates
from ebmpp.training.estimation import estimate
from ebmpp.training.fitting import fit
from ebmpp.training.result import FitResult
from ebmpp.training.steps import Stage

__all__ = [
    "EarlyStop",
    "Estimates",
    "FitResult",
    "Progress",
    "Stage",
    "estimate",
    "fit",
    "monitors",
    "optimizers",
]
