# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Methods of single papers. They are tested and supported; no other package of ebmpp imports them."""

from ebmpp.contrib import graphs, readers, sample_quality
from ebmpp.contrib.fpcd import FPCD
from ebmpp.contrib.herding import Herding
from ebmpp.contrib.local_mode_ucd import LocalModeUCD
from ebmpp.contrib.mean_statistics import data_statistics
from ebmpp.contrib.metropolis_coupling import MetropolisCoupling
from ebmpp.contrib.metropolized import Metropolized, metropolized_sweep
from ebmpp.contrib.pretraining import pretrain
from ebmpp.contrib.rates import RatesFPCD, RatesHerding, RatesState, SamplePenalization
from ebmpp.contrib.sdcp import CSDCP, SDCP
from ebmpp.contrib.spectral import spectral_descent

__all__ = [
    "CSDCP",
    "FPCD",
    "SDCP",
    "Herding",
    "LocalModeUCD",
    "MetropolisCoupling",
    "Metropolized",
    "RatesFPCD",
    "RatesHerding",
    "RatesState",
    "SamplePenalization",
    "data_statistics",
    "graphs",
    "metropolized_sweep",
    "pretrain",
    "readers",
    "sample_quality",
    "spectral_descent",
]
