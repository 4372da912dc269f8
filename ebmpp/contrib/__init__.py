# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Methods of single papers, tested and supported; no other package of ebmpp imports them."""

from ebmpp.contrib import graphs, readers, sample_quality
from ebmpp.contrib.cluster_block import ClusterBlock
from ebmpp.contrib.estimators.fpcd import FPCD
from ebmpp.contrib.estimators.gradient_variance import gradient_variance
from ebmpp.contrib.estimators.herding import Herding
from ebmpp.contrib.estimators.local_mode_ucd import LocalModeUCD
from ebmpp.contrib.estimators.sdcp import CSDCP, SDCP
from ebmpp.contrib.gibbs_langevin import GibbsLangevin, langevin_sweep
from ebmpp.contrib.langevin import Langevin
from ebmpp.contrib.mean_statistics import data_statistics
from ebmpp.contrib.metropolis import Metropolis, MetropolisCoupling, metropolis_sweep
from ebmpp.contrib.metropolized import (
    GibbsWithGradients,
    Metropolized,
    metropolized_sweep,
)
from ebmpp.contrib.pretraining import pretrain
from ebmpp.contrib.rates import RatesFPCD, RatesHerding, RatesState, SamplePenalization
from ebmpp.contrib.spectral import spectral_descent

__all__ = [
    "CSDCP",
    "FPCD",
    "SDCP",
    "ClusterBlock",
    "GibbsLangevin",
    "GibbsWithGradients",
    "Herding",
    "Langevin",
    "LocalModeUCD",
    "Metropolis",
    "MetropolisCoupling",
    "Metropolized",
    "RatesFPCD",
    "RatesHerding",
    "RatesState",
    "SamplePenalization",
    "data_statistics",
    "gradient_variance",
    "graphs",
    "langevin_sweep",
    "metropolis_sweep",
    "metropolized_sweep",
    "pretrain",
    "readers",
    "sample_quality",
    "spectral_descent",
]
