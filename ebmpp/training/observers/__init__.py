# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Observers of a training run: what happens between its programs of steps."""

from ebmpp.training.observers.base import Observer
from ebmpp.training.observers.checkpoints import CheckpointWriter
from ebmpp.training.observers.deadline import Deadline
from ebmpp.training.observers.estimators import EstimatorDiagnosis
from ebmpp.training.observers.guard import Guard
from ebmpp.training.observers.likelihood import LikelihoodWatch
from ebmpp.training.observers.monitoring import BestParams, Monitoring
from ebmpp.training.observers.pairs import PairWatch
from ebmpp.training.observers.path import PathRecorder
from ebmpp.training.observers.progress import ProgressBar

__all__ = [
    "BestParams",
    "CheckpointWriter",
    "Deadline",
    "EstimatorDiagnosis",
    "Guard",
    "LikelihoodWatch",
    "Monitoring",
    "Observer",
    "PairWatch",
    "PathRecorder",
    "ProgressBar",
]
