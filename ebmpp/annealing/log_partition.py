# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Estimates of log Z with their errors, and the likelihoods that follow from them.

An estimate is doubtful if few particles are effective, if its independent parts
(particles or islands) differ so much that the error of a log by the delta method fails,
if sweeps leave particles near their old states, if they miss a mode, or if forward and
reverse runs contradict each other.
"""

import dataclasses
import math
from typing import NamedTuple
import warnings

from jaxtyping import Float
import numpy as np
from scipy.special import stdtrit

from ebmpp.core import Blocks, Params, PerState, StateLike, checks
from ebmpp.core.display import Card, Cell, Grid, Measured, Shown
from ebmpp.core.statistics import standard_error
from ebmpp.errors import DomainError
from ebmpp.exact import shifted
from ebmpp.graph import FactorGraph, tables
from ebmpp.graph.factors import zeros

_HEAD = ("", "value (nats)", "effective particles", "temperatures", "")
MAX_ERROR = 0.3
"""Standard error of log Z (nats) above which it is doubtful; ten islands then differ by
about 1 each."""
MIN_SHARE = 0.25
"""Share of effective particles below which a weighted mean is doubtful."""
MIN_PARTICLES = 30
"""Independent particles below which an error is doubtful: intervals of 20 held log Z in
0.82 to 0.95 of the runs without another doubt, of 30 in 0.88 to 0.96 (nine models and
ladders with two modes)."""
MIN_PER_ISLAND = 20
"""Particles of an island or pilot from which its correlation, its ancestry and missed
modes are measured."""
_NEGLIGIBLE = 1e-3
"""Standard error (nats) below which few particles are no reason for doubt."""
MAX_CORRELATION = 0.5
"""Correlation of log-densities before and after the sweeps of a rung above which modes
are found late. It is at most 0.38 on 16x16 and 64x16 machines (12 seeds each), where
intervals hold; 0.40 to 0.72 at 784x500, where 81 of 100 intervals of 20 sweeps held, as
one island in 60 has more than 4 times the mean Z."""
MIN_ANCESTRY = 0.9
"""Relative share of distinct ancestors below which particles are heirs of the modes
found first: islands that all miss the others agree. At 784x500 it is 0.71 to 0.88 with
one sweep per rung, which missed log Z by up to 1.5; 0.93 to 1.16 on the small machines
and on Ising models of up to 4,096 spins."""
_NOT_GUARANTEED = "upper end not guaranteed"
_MAX_Z = 4.0  # standard errors by which an upper estimate may be below a lower one


class AverageLogLikelihood(NamedTuple):
    """Mean of log p(v) over rows."""

    value: float
    standard_error: float
    """Standard error of log Z: the error of the value for these rows."""
    row_error: float
    """Standard error of a mean over so many rows: the error for their population at a
    known log Z."""


@dataclasses.dataclass(frozen=True)
class LogPartition(Shown):
    """Estimate of log Z; see :func:`ebmpp.ais` and :func:`ebmpp.annealing.reverse_ais`."""

    log_partition: float
    """Log of the mean weight; in reverse, minus the log of the mean inverse weight."""
    standard_error: float
    """Standard error of ``log_partition`` by the spread of independent particles or
    islands (delta method); too small where the effective sample size is."""
    effective_sample_size: float
    """(sum w)^2 / sum w^2, at most the number of particles."""
    log_weights: Float[np.ndarray, "num_particles"]
    """Logs of weights with mean Z; in reverse, with mean 1/Z."""
    betas: Float[np.ndarray, "num_temperatures"]
    """Inverse temperatures in the order in which they were used."""
    bound: str
    """"lower" (forward) or "upper" (reverse): the side of log Z on which
    ``log_partition`` is on average."""
    unbiased: bool
    """True if the weights have exactly that mean, which makes the bound a theorem.
    False in reverse from approximate samples."""
    graph: FactorGraph = dataclasses.field(repr=False)
    params: Params = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.log_partition:.6g} +- "
            f"{self.standard_error:.2g}, {self._side}, {self._effective} particles "
            f"effective, {len(self.betas)} temperatures)"
        )

    @property
    def _side(self) -> str:
        if not self.unbiased:
            return "no bound: approximate samples"
        return f"{self.bound} bound on average"

    @property
    def _independent(self) -> int:
        """Number of independent estimates of which this is the mean."""
        return len(self.log_weights)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval of log Z.

        It uses the t quantile of its independent particles or islands.

        :param level: between 0 and 1.
        """
        checks.number("interval: level", level, above=0, below=1)
        width = t_quantile(level, self._independent) * self.standard_error
        return self.log_partition - width, self.log_partition + width

    @property
    def doubt(self) -> str | None:
        """Reason for not trusting the estimate, as in the warning, or None."""
        error = self.standard_error
        if self.effective_sample_size < max(2.0, MIN_SHARE * len(self.log_weights)):
            return (
                f"the effective sample size is {self._effective} particles (standard "
                f"error {error:.2g}): too small for the standard error to be trusted."
            )
        if error > MAX_ERROR:
            return (
                f"the standard error of log Z is {error:.2g}, above {MAX_ERROR}: not "
                "to be trusted."
            )
        if self._has_few_particles and error > _NEGLIGIBLE:
            return (
                f"there are fewer than {MIN_PARTICLES} particles, or {MIN_PER_ISLAND} "
                "per island: too few for the standard error to be trusted. Raise "
                "num_particles."
            )
        return None

    @property
    def _has_few_particles(self) -> bool:
        return len(self.log_weights) < MIN_PARTICLES

    @property
    def _effective(self) -> str:
        return f"{self.effective_sample_size:.1f} of {len(self.log_weights)}"

    def _row(self) -> tuple[Cell, ...]:
        value = Measured(self.log_partition, self.standard_error)
        return value, self._effective, len(self.betas), self._side

    def _card(self) -> Card:
        rows = [("log Z", *self._row()), _interval_row(self)]
        return Card("An estimate of log Z", [Grid(_HEAD, rows)])

    def log_likelihood(self, rows: StateLike) -> PerState:
        """Return log p(v) of each row at this value of log Z, which all rows share.

        On average it is too large with a lower bound of log Z, and too small with an
        upper bound.

        :param rows: the visible blocks, each of shape ``(*batch, *shape)``; a bare
            array stands for the only visible block.
        :return: shape ``(*batch,)``.
        :raises IntractableError: where the latents given the visibles are not one
            layer, so that log Z alone does not give the likelihood;
            :func:`ebmpp.exact.log_likelihood` sums over them in small models.
        :raises StateError: rows of a wrong name, shape or value.
        """
        x = tables.as_table(self.graph, rows).observed()
        model = shifted.shift_origin(self.graph, self.params)
        log_z = self.log_partition - model.log_factor
        return -self.graph.free_energy(model.params, model.shift(x)) - log_z

    def average_log_likelihood(self, rows: StateLike) -> AverageLogLikelihood:
        """Return the mean of :meth:`log_likelihood` over rows, with its errors."""
        values = np.asarray(self.log_likelihood(rows), float).ravel()
        return AverageLogLikelihood(
            float(values.mean()), self.standard_error, float(standard_error(values))
        )


@dataclasses.dataclass(frozen=True, repr=False)
class ParticleSystem(LogPartition):
    """Weighted particles of a model, and an estimate of its log Z; see :func:`ebmpp.smc`.

    ``betas`` are the places of the rungs on the path; on a line they are inverse
    temperatures.
    """

    particles: Blocks
    """All blocks, ``(num_particles, *shape)`` each, one island after another."""
    weights: Float[np.ndarray, "num_particles"]
    """Weights that sum to 1 over all islands; weighted means have an error of order
    1/num_particles."""
    log_z: Float[np.ndarray, "num_islands"]
    """Estimate of log Z by each island; ``log_partition`` is the log of the mean of their Z."""
    num_rungs: int
    distinct_ancestors: float
    """Share of the initial particles that have descendants among the final ones, at most 1."""
    num_sweeps: int = 1
    """Sweeps per rung."""
    correlation: float = math.nan
    """Correlation of the particles' log-densities before and after the sweeps of a
    rung, largest along the path, in the pilot that found the ladder; nan without a
    pilot. This and the next two are nan where islands have fewer than 20 particles."""
    relative_ancestry: float = math.nan
    """``distinct_ancestors`` over the share that the resamplings would leave of
    particles that forget their ancestors in between; below 1 where a few lineages found
    a mode and grew."""
    log_missed: float = math.nan
    """Increase of log Z by modes that pilots from other starts find and these particles
    hardly have; nan without a pilot, or with several processes."""

    @property
    def doubt(self) -> str | None:
        if (reason := super().doubt) is not None:
            return reason
        if self.log_missed > self.standard_error:
            return (
                f"systems that start from another mode find {self.log_missed:.2g} more "
                "of log Z, beyond its stated error: the particles miss a mode."
            )
        is_correlated = self.correlation > MAX_CORRELATION
        if not is_correlated and not self.relative_ancestry < MIN_ANCESTRY:
            return None
        return (
            f"{self.num_sweeps} sweeps per rung leave log-densities correlated by "
            f"{self.correlation:.2f} (doubtful above {MAX_CORRELATION}), and "
            f"{self.relative_ancestry:.0%} of the ancestors that resampling alone "
            f"would leave (doubtful below {MIN_ANCESTRY:.0%}): modes are found late; "
            "log Z and its stated error may be too small. More sweeps help, more "
            "particles do not."
        )

    @property
    def _independent(self) -> int:
        return len(self.log_z)

    @property
    def _has_few_particles(self) -> bool:
        return len(self.log_weights) < MIN_PER_ISLAND * len(self.log_z)

    def _card(self) -> Card:
        rows = [
            ("islands", len(self.log_z)),
            ("share of distinct ancestors", self.distinct_ancestors),
            ("rungs", self.num_rungs),
            ("sweeps per rung", self.num_sweeps),
        ]
        grids = [*super()._card().grids, Grid(("", ""), rows)]
        return Card("Weighted particles", grids)


def _interval_row(
    estimate: "LogPartition | Bracket", note: str = ""
) -> tuple[Cell, ...]:
    low, high = estimate.interval()
    return "95 % interval", f"{low:.6g} to {high:.6g}", "", "", note


@dataclasses.dataclass(frozen=True)
class Bracket(Shown):
    """Estimates of log Z from both sides; see :func:`ebmpp.bracket`."""

    lower: LogPartition
    upper: LogPartition
    exact: float | None
    """log Z, where the states can be summed."""

    @property
    def guaranteed(self) -> bool:
        """True if the upper estimate starts from exact draws.

        It is then an upper bound on average. Approximate draws may miss a mode, and
        then both estimates are too small.
        """
        return self.upper.unbiased

    @property
    def gap(self) -> float:
        """Upper minus lower estimate.

        With an unbiased upper one it is small only if both have converged.
        """
        return self.upper.log_partition - self.lower.log_partition

    @property
    def standard_error(self) -> float:
        """Standard error of the gap."""
        return math.hypot(self.lower.standard_error, self.upper.standard_error)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the low end of the lower interval, and the high end of the upper one."""
        ends = self.lower.interval(level) + self.upper.interval(level)
        return min(ends), max(ends)

    @property
    def doubt(self) -> str | None:
        """Reasons for not trusting the two estimates, or None."""
        contradicted = contradiction(self.gap, self.standard_error)
        doubts = (self.lower.doubt, self.upper.doubt, contradicted)
        return " ".join(dict.fromkeys(filter(None, doubts))) or None

    def __repr__(self) -> str:
        ends = [
            f"{end.log_partition:.6g} +- {end.standard_error:.2g}"
            for end in (self.lower, self.upper)
        ]
        parts = [" to ".join(ends)]
        if self.exact is not None:
            parts.append(f"exact {self.exact:.6g}")
        if not self.guaranteed:
            parts.append(_NOT_GUARANTEED)
        return f"Bracket({', '.join(parts)})"

    def _card(self) -> Card:
        gap = Measured(self.gap, self.standard_error)
        rows = [
            ("lower", *self.lower._row()),
            ("upper", *self.upper._row()),
            _interval_row(self, "" if self.guaranteed else _NOT_GUARANTEED),
            ("gap", gap, "", "", "upper less lower"),
        ]
        if self.exact is not None:
            rows.append(("exact", f"{self.exact:.9g}", "", "", "all states summed"))
        return Card("log Z from both sides", [Grid(_HEAD, rows)])


class WeightSummary(NamedTuple):
    """Mean of weights over independent islands of particles."""

    log_mean: float
    standard_error: float
    """Standard error of the log of the mean, by the delta method."""
    effective_sample_size: float
    log_island_means: Float[np.ndarray, "islands"]
    weights: Float[np.ndarray, "islands particles"]
    """Weights that sum to 1."""


def summarize(
    name: str, log_weights: Float[np.ndarray, "islands particles"]
) -> WeightSummary:
    """Return the mean of weights and its error; refuse infinite weights."""
    top = log_weights.max()  # NaN if some weight is
    if not np.isfinite(top):
        raise not_finite(f"{name}: the weights of some particles")
    if zeros.is_impossible(-top):
        raise DomainError(
            f"{name}: no particle ended in a state of positive probability. Raise the "
            "numbers of particles and temperatures, and check that the zeros of the "
            "model leave a possible state."
        )
    w = np.exp(log_weights - top)
    islands = w.mean(1)
    mean = islands.mean()
    with np.errstate(divide="ignore"):  # islands whose particles are all impossible
        log_islands = np.log(islands) + top
    return WeightSummary(
        log_mean=float(math.log(mean) + top),
        standard_error=float(standard_error(islands) / mean),
        effective_sample_size=float(w.sum() ** 2 / (w**2).sum()),
        log_island_means=log_islands,
        weights=w / w.sum(),
    )


def not_finite(what: str) -> DomainError:
    """Return the error for weights along a path that are not finite."""
    return DomainError(
        f"{what} are not finite: a model on the path may not normalise, or natural "
        "parameters overflow. Check the params, and those of the path. A reference "
        "nearer to the model (data=...) may help."
    )


def t_quantile(level: float, count: int) -> float:
    """Return the half-width of a confidence interval of a mean, in standard errors.

    :param count: number of independent values of the mean.

    >>> round(t_quantile(0.95, 10), 3), round(t_quantile(0.95, 1000), 3)
    (2.262, 1.962)
    """
    return float(stdtrit(count - 1, 0.5 + level / 2))


def contradiction(gap: float, standard_error: float) -> str | None:
    """Return a message if an upper estimate is below a lower one beyond their errors."""
    if gap >= -_MAX_Z * standard_error:
        return None
    return (
        f"the reverse estimate of log Z is {-gap:.3g} below the forward one, beyond "
        f"their errors ({standard_error:.2g}): the draws that it starts from miss a "
        "part of the model."
    )


def warn(advice: str, doubt: str | None) -> None:
    """Warn of the doubt of a public function's result, if there is one, with advice."""
    if doubt is not None:
        warnings.warn(f"{doubt} {advice}", stacklevel=3)
