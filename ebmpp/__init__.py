# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""ebmpp: energy-based models with latent variables, as a plug-in for NumPyro on JAX."""

from ebmpp import data, evaluate
from ebmpp.core.version import VERSION as __version__  # noqa: F401, N811
from ebmpp.diagnostics import plots, summary, to_datatree
from ebmpp.diagnostics.efficiency import cost_times_variance, suggest_k_m
from ebmpp.diagnostics.meeting import tv_upper_bound, wasserstein_upper_bound
from ebmpp.diagnostics.plots import plot_meeting_times, plot_tv_bound
from ebmpp.diagnostics.reporting import Report, report
from ebmpp.estimators import (
    CD,
    CSDCP,
    FPCD,
    PCD,
    SDCP,
    UCD,
    Centered,
    Discriminative,
    Herding,
    LocalModeUCD,
    MeanField,
    TemperedPCD,
    rates,
)
from ebmpp.evaluate import exact
from ebmpp.evaluate.annealed import ais, bracket, reverse_ais
from ebmpp.families import Bernoulli, Binomial, Categorical, Exponential, Family, Gaussian, Poisson, Spin
from ebmpp.graph import FactorGraph, layered
from ebmpp.graph.factors import Bias, Bilinear, Factor
from ebmpp.graph.factors.convolution import Convolution
from ebmpp.graph.factors.linear import Linear
from ebmpp.graph.factors.pairwise import Pairwise
from ebmpp.graph.saving import load, save
from ebmpp.graph.states import Observed
from ebmpp.graph.transforms.condition import clamp, condition, rename, split
from ebmpp.graph.transforms.marginalize import marginalize
from ebmpp.graph.transforms.merge import merge, stack
from ebmpp.kernels import (
    BlockedGibbs,
    GibbsLangevin,
    LocalSearch,
    MaximalCoupling,
    MetropolisCoupling,
    ParallelTempering,
    RatesFPCD,
    RatesHerding,
    SamplePenalization,
    SwendsenWang,
    TemperingCoupling,
    local_search,
    tempered_expectation,
)
from ebmpp.moves.clusters import Clusters
from ebmpp.moves.sweeps import cluster_sweep, langevin_sweep, metropolis_sweep
from ebmpp.ppl import Conjugate, CoupledComposite, Exchange, GibbsBlock, composite_expectation, gibbs_fn
from ebmpp.ppl.distribution import EnergyDistribution, check_model
from ebmpp.ppl.layout import Layout
from ebmpp.sampling.completion import Completion, complete
from ebmpp.sampling.expectation import unbiased_expectation
from ebmpp.sampling.perfect import perfect_sample
from ebmpp.training import Fit, fit, monitors, optimizers
from ebmpp.training.callbacks import EarlyStop, Progress
from ebmpp.training.pretraining import pretrain
from ebmpp.training.schedule import Stage
from ebmpp.training.spectral import spectral_descent

__all__ = [
    "CD",
    "CSDCP",
    "FPCD",
    "PCD",
    "SDCP",
    "UCD",
    "Bernoulli",
    "Bias",
    "Bilinear",
    "Binomial",
    "BlockedGibbs",
    "Categorical",
    "Completion",
    "Centered",
    "Clusters",
    "Conjugate",
    "Convolution",
    "CoupledComposite",
    "Discriminative",
    "EarlyStop",
    "EnergyDistribution",
    "Exchange",
    "Exponential",
    "Factor",
    "FactorGraph",
    "Family",
    "Fit",
    "Gaussian",
    "GibbsBlock",
    "GibbsLangevin",
    "Herding",
    "Layout",
    "Linear",
    "LocalModeUCD",
    "LocalSearch",
    "MaximalCoupling",
    "MeanField",
    "MetropolisCoupling",
    "Observed",
    "Pairwise",
    "ParallelTempering",
    "Poisson",
    "Progress",
    "RatesFPCD",
    "RatesHerding",
    "Report",
    "SamplePenalization",
    "Spin",
    "Stage",
    "SwendsenWang",
    "TemperedPCD",
    "TemperingCoupling",
    "ais",
    "bracket",
    "check_model",
    "cluster_sweep",
    "clamp",
    "complete",
    "composite_expectation",
    "condition",
    "cost_times_variance",
    "data",
    "evaluate",
    "exact",
    "fit",
    "gibbs_fn",
    "langevin_sweep",
    "layered",
    "load",
    "local_search",
    "marginalize",
    "merge",
    "metropolis_sweep",
    "monitors",
    "optimizers",
    "perfect_sample",
    "plot_meeting_times",
    "plot_tv_bound",
    "plots",
    "pretrain",
    "rates",
    "rename",
    "report",
    "reverse_ais",
    "save",
    "spectral_descent",
    "split",
    "stack",
    "suggest_k_m",
    "summary",
    "tempered_expectation",
    "to_datatree",
    "tv_upper_bound",
    "unbiased_expectation",
    "wasserstein_upper_bound",
]
