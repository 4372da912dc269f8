# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Moves: one step of a chain, and of a coupled pair of chains."""

from ebmpp.moves.clusters import Clusters
from ebmpp.moves.langevin import Langevin
from ebmpp.moves.layer import Layer, gibbs_sweep
from ebmpp.moves.metropolis import Metropolis
from ebmpp.moves.metropolized import Metropolized, metropolized_sweep
from ebmpp.moves.mixture import Mixture, mixture_sweep
from ebmpp.moves.move import Move
from ebmpp.moves.sweeps import cluster_sweep, langevin_sweep, metropolis_sweep
from ebmpp.moves.target import Pool, Target

__all__ = [
    "Clusters",
    "Langevin",
    "Layer",
    "Metropolis",
    "Metropolized",
    "Mixture",
    "Move",
    "Pool",
    "Target",
    "cluster_sweep",
    "gibbs_sweep",
    "langevin_sweep",
    "metropolis_sweep",
    "metropolized_sweep",
    "mixture_sweep",
]
