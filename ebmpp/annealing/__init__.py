# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Paths of models from independent units to a model, and the particle systems that follow them."""

from ebmpp.annealing.ais import ais, bracket, reverse_ais
from ebmpp.annealing.knot_partitions import Bridges, bridges
from ebmpp.annealing.particle_pairs import particle_expectation
from ebmpp.annealing.particles import ParticleSystem, smc
from ebmpp.annealing.path import Path

__all__ = [
    "Bridges",
    "ParticleSystem",
    "Path",
    "ais",
    "bracket",
    "bridges",
    "particle_expectation",
    "reverse_ais",
    "smc",
]
