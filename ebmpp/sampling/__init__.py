# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Whole runs: the engine of coupled pairs, expectations, perfect draws, search, completion, enumeration."""

from ebmpp.sampling.completion import Completion, complete
from ebmpp.sampling.expectation import UnbiasedEstimate, unbiased_expectation
from ebmpp.sampling.knot_partitions import Bridges, bridges
from ebmpp.sampling.particle_pairs import particle_expectation
from ebmpp.sampling.particles import ParticleSystem, smc
from ebmpp.sampling.path import Path
from ebmpp.sampling.perfect import perfect_sample
from ebmpp.sampling.pools import mixture_pool

__all__ = [
    "Bridges",
    "Completion",
    "UnbiasedEstimate",
    "ParticleSystem",
    "Path",
    "bridges",
    "complete",
    "mixture_pool",
    "particle_expectation",
    "perfect_sample",
    "smc",
    "unbiased_expectation",
]
