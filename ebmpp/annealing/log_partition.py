# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Estimates of log Z with their errors, and the likelihoods that follow from them."""

from collections.abc import Mapping
import dataclasses
import math
from typing import NamedTuple
import warnings

from jaxtyping import Float
import numpy as np

from jax import Array

from ebmpp.core.display import Card, Cell, Grid, Measured, Shown
from ebmpp.core.statistics import standard_error
from ebmpp.core.types import Blocks, Params
from ebmpp.errors import DomainError
from ebmpp.graph import FactorGraph, tables

Data = Mapping[str, Array] | Array

_LOW_ESS = 0.25  # share of the particles below which an effective sample size causes a warning
_HEAD = ("", "value (nats)", "effective particles", "temperatures", "")


class AverageLogLikelihood(NamedTuple):
    """Mean of log p(v) over rows."""

    value: float
    standard_error: float
    """Standard error of log Z: the error of the value for these rows."""
    row_error: float
    """Standard error of a mean over so many rows: the error for their population at a known log Z."""


@dataclasses.dataclass(frozen=True)
class LogPartition(Shown):
    """Estimate of log Z; see :func:`ebmpp.ais` and :func:`ebmpp.annealing.reverse_ais`."""

    log_partition: float
    """Log of the mean weight; in reverse, minus the log of the mean inverse weight."""
    standard_error: float
    """Standard error of ``log_partition`` (delta method); too small where the effective sample size is."""
    effective_sample_size: float
    """(sum w)**2 / sum w**2, at most the number of particles."""
    log_weights: Float[np.ndarray, "num_particles"]
    """Logs of weights with mean Z; in reverse, with mean 1/Z."""
    betas: Float[np.ndarray, "num_temperatures"]
    """Inverse temperatures in the order in which they were used."""
    bound: str
    """"lower" (forward) or "upper" (reverse): the side of log Z on which ``log_partition`` is on average."""
    unbiased: bool
    """True if the weights have exactly that mean, which makes the bound a theorem. False in reverse from
    approximate samples."""
    graph: FactorGraph = dataclasses.field(repr=False)
    params: Params = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        bound = f"{self.bound} bound on average" if self.unbiased else "from approximate samples: no bound"
        return (
            f"LogPartition({self.log_partition:.6g} +- {self.standard_error:.2g}, {bound}, "
            f"{self._effective} particles effective, {len(self.betas)} temperatures)"
        )

    @property
    def _effective(self) -> str:
        return f"{self.effective_sample_size:.1f} of {len(self.log_weights)}"

    def _row(self) -> tuple[Cell, ...]:
        bound = f"{self.bound} bound on average" if self.unbiased else "no bound: approximate samples"
        value = Measured(self.log_partition, self.standard_error)
        return value, self._effective, len(self.betas), bound

    def _card(self) -> Card:
        return Card("An estimate of log Z", [Grid(_HEAD, [("log Z", *self._row())])])

    def log_likelihood(self, data: Data) -> Float[Array, "*batch"]:
        """Return log p(v) of each row at this value of log Z, which all rows share.

        On average it is too large with a lower bound of log Z, and too small with an upper bound.

        :param data: the visible blocks, each of shape ``(*batch, *shape)``; a bare array stands for the
            only visible block.
        :return: shape ``(*batch,)``.
        :raises IntractableError: where the latents given the visibles are not one layer, so that log Z alone
            does not give the likelihood; :func:`ebmpp.exact.log_likelihood` sums over them in small models.
        :raises StateError: data of a wrong name, shape or value.
        """
        rows = tables.as_table(self.graph, data).observed()
        return -self.graph.free_energy(self.params, rows) - self.log_partition

    def average_log_likelihood(self, data: Data) -> AverageLogLikelihood:
        """Return the mean of :meth:`log_likelihood` over rows, with its errors; see there for ``data``."""
        values = np.asarray(self.log_likelihood(data), float).ravel()
        return AverageLogLikelihood(float(values.mean()), self.standard_error, float(standard_error(values)))


@dataclasses.dataclass(frozen=True, repr=False)
class ParticleSystem(LogPartition):
    """Weighted particles of a model, and an estimate of its log Z; see :func:`ebmpp.smc`.

    ``betas`` are the places of the rungs on the path; on a line they are inverse temperatures.
    """

    particles: Blocks
    """All blocks, ``(num_particles, *shape)`` each, one island after another."""
    weights: Float[np.ndarray, "num_particles"]
    """Weights that sum to 1 over all islands; weighted means have an error of order 1/num_particles."""
    log_z: Float[np.ndarray, "num_islands"]
    """Estimate of log Z by each island; ``log_partition`` is the log of the mean of their Z."""
    num_rungs: int
    distinct_ancestors: float
    """Share of the initial particles that have descendants among the final ones, at most 1."""

    def __repr__(self) -> str:
        return (
            f"ParticleSystem({self.log_partition:.6g} +- {self.standard_error:.2g} from {len(self.log_z)} "
            f"islands, {self._effective} particles effective, {self.distinct_ancestors:.2g} of them distinct "
            f"ancestors, {self.num_rungs} rungs)"
        )

    def _card(self) -> Card:
        rows = [("islands", len(self.log_z)), ("share of distinct ancestors", self.distinct_ancestors)]
        grids = *super()._card().grids, Grid(("", ""), [*rows, ("rungs", self.num_rungs)])
        return Card("Weighted particles, and an estimate of log Z", grids)


@dataclasses.dataclass(frozen=True)
class Bracket(Shown):
    """Estimates of log Z from both sides; see :func:`ebmpp.bracket`."""

    lower: LogPartition
    upper: LogPartition
    exact: float | None
    """log Z, where the states can be summed."""

    @property
    def gap(self) -> float:
        """Upper minus lower estimate. With an unbiased upper one it is small only if both have converged."""
        return self.upper.log_partition - self.lower.log_partition

    @property
    def standard_error(self) -> float:
        """Standard error of the gap."""
        return math.hypot(self.lower.standard_error, self.upper.standard_error)

    def __repr__(self) -> str:
        exact = "" if self.exact is None else f", exact {self.exact:.6g}"
        note = "" if self.upper.unbiased else ", upper from approximate samples"
        lower, upper = (
            f"{m.log_partition:.6g} +- {m.standard_error:.2g} ({m._effective} particles effective)"
            for m in (self.lower, self.upper)
        )
        return f"Bracket(lower {lower}, upper {upper}{exact}{note})"

    def _card(self) -> Card:
        rows = [("lower", *self.lower._row()), ("upper", *self.upper._row())]
        rows += [("gap", Measured(self.gap, self.standard_error), "", "", "upper less lower")]
        rows += [] if self.exact is None else [("exact", f"{self.exact:.9g}", "", "", "all states summed")]
        return Card("log Z from both sides", [Grid(_HEAD, rows)])


# -- from weights to estimates ---------------------------------------------------------------------


class WeightSummary(NamedTuple):
    """Mean of weights over independent islands of particles."""

    log_mean: float
    standard_error: float
    """Standard error of the log of the mean, by the delta method."""
    effective_sample_size: float
    log_island_means: Float[np.ndarray, "islands"]
    weights: Float[np.ndarray, "islands particles"]
    """Weights that sum to 1."""


def summarize(name: str, log_weights: Float[np.ndarray, "islands particles"]) -> WeightSummary:
    """Return the mean of weights, its error and the effective sample size.

    :raises DomainError: where weights are not finite.
    """
    top = log_weights.max()  # NaN if some weight is
    if not np.isfinite(top):
        raise not_finite(f"{name}: the weights of some particles")
    w = np.exp(log_weights - top)
    islands = w.mean(1)
    mean = islands.mean()
    ess = w.sum() ** 2 / (w**2).sum()
    error = float(standard_error(islands) / mean)
    return WeightSummary(float(math.log(mean) + top), error, float(ess), np.log(islands) + top, w / w.sum())


def not_finite(what: str) -> DomainError:
    """Return the error for weights along a path that are not finite."""
    return DomainError(
        f"{what} are not finite: a model on the path may not normalise, or natural parameters overflow. "
        "Check the params, and those of the path. A reference nearer to the model (data=...) may help."
    )


def warn_low_ess(advice: str, *results: LogPartition) -> None:
    """Warn once if some of the results of a public function have few effective particles.

    :param advice: in the imperative.
    """
    low = [m for m in results if m.effective_sample_size < max(2.0, _LOW_ESS * len(m.log_weights))]
    if low:
        sides = (f"{m._effective} particles (standard error {m.standard_error:.2g})" for m in low)
        warnings.warn(
            f"the effective sample size is {' and '.join(sides)}: too small for the standard error to be "
            f"trusted. {advice}",
            stacklevel=3,
        )
