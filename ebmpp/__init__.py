# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""ebmpp: energy-based models with latent variables, as a plug-in for NumPyro on JAX.

The names that most programs use are here. The others are in their rooms:
:mod:`ebmpp.families`, :mod:`ebmpp.graph`, :mod:`ebmpp.moves`, :mod:`ebmpp.exact`,
:mod:`ebmpp.coupling`, :mod:`ebmpp.annealing`, :mod:`ebmpp.kernels`,
:mod:`ebmpp.estimators`, :mod:`ebmpp.evaluate`, :mod:`ebmpp.training`, :mod:`ebmpp.ppl`,
:mod:`ebmpp.diagnostics`, :mod:`ebmpp.reporting`, :mod:`ebmpp.data`,
:mod:`ebmpp.sklearn` and :mod:`ebmpp.contrib`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ebmpp import data, evaluate, exact
from ebmpp.annealing import ais, bracket, particle_expectation, smc
from ebmpp.core import VERSION as __version__  # noqa: N811
from ebmpp.core.compile import enable_compilation_cache
from ebmpp.coupling import unbiased_expectation
from ebmpp.estimators import (
    CD,
    PCD,
    PTT,
    UCD,
    Centered,
    MeanField,
    ParticleUCD,
    TemperedPCD,
    WeightedPCD,
)
from ebmpp.evaluate import complete, expectation, from_dataframe
from ebmpp.exact import perfect_sample
from ebmpp.families import (
    Bernoulli,
    Binomial,
    Categorical,
    Exponential,
    Family,
    Gaussian,
    Poisson,
    Spin,
    VonMises,
)
from ebmpp.graph import (
    Bias,
    Bilinear,
    Convolution,
    Coupling,
    Factor,
    FactorGraph,
    Hyperedges,
    Linear,
    Observed,
    Pairwise,
    Table,
    condition,
    layered,
    load,
    marginalize,
    save,
)
from ebmpp.kernels import (
    BlockedGibbs,
    MaximalCoupling,
    ParallelTempering,
    SwendsenWang,
    local_search,
    sample,
)
from ebmpp.ppl import EnergyDistribution, GibbsBlock
from ebmpp.training import (
    EarlyStop,
    FitResult,
    Stage,
    estimate,
    fit,
    monitors,
    optimizers,
)

if TYPE_CHECKING:
    from ebmpp.diagnostics import plots, to_datatree, tv_upper_bound
    from ebmpp.reporting import report

__all__ = [
    "CD",
    "PCD",
    "PTT",
    "UCD",
    "Bernoulli",
    "Bias",
    "Bilinear",
    "Binomial",
    "BlockedGibbs",
    "Categorical",
    "Centered",
    "Convolution",
    "Coupling",
    "EarlyStop",
    "EnergyDistribution",
    "Exponential",
    "Factor",
    "FactorGraph",
    "Family",
    "FitResult",
    "Gaussian",
    "GibbsBlock",
    "Hyperedges",
    "Linear",
    "MaximalCoupling",
    "MeanField",
    "Observed",
    "Pairwise",
    "ParticleUCD",
    "ParallelTempering",
    "Poisson",
    "Spin",
    "Stage",
    "SwendsenWang",
    "Table",
    "TemperedPCD",
    "VonMises",
    "WeightedPCD",
    "ais",
    "bracket",
    "complete",
    "condition",
    "data",
    "enable_compilation_cache",
    "estimate",
    "evaluate",
    "exact",
    "expectation",
    "fit",
    "from_dataframe",
    "layered",
    "load",
    "local_search",
    "marginalize",
    "monitors",
    "optimizers",
    "particle_expectation",
    "perfect_sample",
    "plots",
    "report",
    "sample",
    "save",
    "smc",
    "to_datatree",
    "tv_upper_bound",
    "unbiased_expectation",
    "__version__",
]

#: Names imported at their first use, and their packages: xarray, pandas and
#: scipy.stats, which these need, take two fifths of the time of importing everything.
_LAZY = {
    "plots": "diagnostics",
    "to_datatree": "diagnostics",
    "tv_upper_bound": "diagnostics",
}
_LAZY |= {"report": "reporting"}

if not TYPE_CHECKING:  # to a type checker a name that is not there is an error

    def __getattr__(name: str) -> Any:
        """Import a package or name of results at its first use."""
        if name in _LAZY.values():
            return import_module(f"ebmpp.{name}")
        if name in _LAZY:
            value = globals()[name] = getattr(
                import_module(f"ebmpp.{_LAZY[name]}"), name
            )
            return value
        raise AttributeError(f"module 'ebmpp' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY, *_LAZY.values()})
