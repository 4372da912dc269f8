# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training: `fit`, its schedule, batches, callbacks, monitors, history, checkpoints and optimisers."""

from ebmpp.training import monitors, optimizers
from ebmpp.training.callbacks import EarlyStop, Progress
from ebmpp.training.fitting import Fit, fit
from ebmpp.training.pretraining import pretrain
from ebmpp.training.schedule import Stage

__all__ = [
    "EarlyStop",
    "Fit",
    "Progress",
    "Stage",
    "fit",
    "monitors",
    "optimizers",
    "pretrain",
]
