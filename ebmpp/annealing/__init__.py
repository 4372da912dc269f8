# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Annealing: paths of models from independent units, and particles that follow them."""

from ebmpp.annealing.bidirectional import ais, bracket, reverse_ais
from ebmpp.annealing.log_partition import Bracket, LogPartition, ParticleSystem
from ebmpp.annealing.particle_pairs import particle_expectation
from ebmpp.annealing.particles import smc
from ebmpp.annealing.path import Path

__all__ = [
    "Bracket",
    "LogPartition",
    "ParticleSystem",
    "Path",
    "ais",
    "bracket",
    "particle_expectation",
    "reverse_ais",
    "smc",
]
