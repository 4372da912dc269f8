# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Moves: steps of chains and of coupled pairs of chains."""

from ebmpp.moves.clusters import Clusters, cluster_sweep
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.forest_moves import Forests, forest_sweep
from ebmpp.moves.forests import PairMarginals
from ebmpp.moves.gradients import Hamiltonian, Informed, informed_sweep
from ebmpp.moves.mixture import Mixture, mixture_sweep
from ebmpp.moves.move import Drawn, Layer, Move, gibbs_sweep, one_chain
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Pool, Target
from ebmpp.moves.tempering import Tempered, tempered

__all__ = [
    "Attempt",
    "Clusters",
    "Drawn",
    "Forests",
    "Hamiltonian",
    "Informed",
    "Layer",
    "Mixture",
    "Move",
    "PairMarginals",
    "Pool",
    "Target",
    "Tempered",
    "Trial",
    "cluster_sweep",
    "forest_sweep",
    "gibbs_sweep",
    "informed_sweep",
    "mixture_sweep",
    "one_chain",
    "resolve_moves",
    "tempered",
    "where_rows",
]
