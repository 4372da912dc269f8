# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What an estimate of log Z tells: its value, its errors, and the likelihoods that follow from it."""

from collections.abc import Mapping
import dataclasses
import math
from typing import NamedTuple

from jaxtyping import Float
import numpy as np

from jax import Array

from ebmpp.core.display import Card, Cell, Grid, Measured, Shown
from ebmpp.core.statistics import standard_error
from ebmpp.core.types import Params
from ebmpp.errors import IntractableError, StateError, clash
from ebmpp.graph import FactorGraph, tables

Data = Mapping[str, Array] | Array


_HEAD = ("", "value (nats)", "effective particles", "temperatures", "")


class AverageLogLikelihood(NamedTuple):
    """Mean of log p(v) over rows."""

    value: float
    standard_error: float
    """Of log Z: how far off the value may be for these rows."""
    row_error: float
    """Of a mean over so many rows: how far off that of the rows' population may be, log Z known."""


@dataclasses.dataclass(frozen=True)
class LogPartition(Shown):
    """An estimate of log Z; see :func:`ebmpp.ais` and :func:`ebmpp.annealing.reverse_ais`."""

    log_partition: float
    """Log of the mean weight, or minus that of the mean inverse weight in reverse."""
    standard_error: float
    """Of ``log_partition``, by the delta method: too small where the effective sample size is."""
    effective_sample_size: float
    """(sum w)**2 / sum w**2: at most the number of particles."""
    log_weights: Float[np.ndarray, "num_particles"]
    """exp of them has mean Z, or 1/Z in reverse."""
    betas: Float[np.ndarray, "num_temperatures"]
    """The ladder that was used, in the order in which it was."""
    bound: str
    """"lower" (forward) or "upper" (reverse): where ``log_partition`` lies of log Z, on average."""
    sound: bool
    """Whether that is a theorem here: False in reverse from samples that are not exact draws."""
    graph: FactorGraph = dataclasses.field(repr=False)
    params: Params = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        told = f"{self.bound} bound on average" if self.sound else "from approximate samples: no bound"
        return (
            f"LogPartition({self.log_partition:.6g} +- {self.standard_error:.2g}, {told}, "
            f"{self.effective_sample_size:.1f} of {len(self.log_weights)} particles effective, "
            f"{len(self.betas)} temperatures)"
        )

    def _row(self) -> tuple[Cell, ...]:
        particles = f"{self.effective_sample_size:.1f} of {len(self.log_weights)}"
        told = f"{self.bound} bound on average" if self.sound else "no bound: approximate samples"
        return Measured(self.log_partition, self.standard_error), particles, len(self.betas), told

    def _card(self) -> Card:
        return Card("An estimate of log Z", [Grid(_HEAD, [("log Z", *self._row())])])

    def log_likelihood(self, data: Data) -> Float[Array, "*batch"]:
        """log p(v) row by row, at this value of log Z, which all rows share.

        A lower bound of log Z makes it too large on average, and an upper bound too small.

        :param data: the visible blocks, each of shape ``(*batch, *shape)``; a bare array stands for the
            only visible block.
        :return: shape ``(*batch,)``.
        :raises IntractableError: where the latents given the visibles are not one layer.
        :raises StateError: data of a wrong name, shape or value.
        """
        for a, b in self.graph.interacting(self.graph.latent):
            raise IntractableError(
                f"latent {clash(a, b)} given the visible ones, so the free energy of a row "
                "has no closed form, and log Z alone does not give its likelihood; exact.log_likelihood sums "
                "over the latents of small models"
            )
        rows = tables.as_table(self.graph, data).observed()
        return -self.graph.free_energy(self.params, rows) - self.log_partition

    def average_log_likelihood(self, data: Data) -> AverageLogLikelihood:
        """The mean of :meth:`log_likelihood` over rows, with its errors.

        :param data: as for :meth:`log_likelihood`, at least one row.
        :raises IntractableError: as :meth:`log_likelihood`.
        :raises StateError: likewise, and without rows.
        """
        each = np.asarray(self.log_likelihood(data), float).ravel()
        if not each.size:
            raise StateError("average_log_likelihood: data has no rows")
        return AverageLogLikelihood(float(each.mean()), self.standard_error, float(standard_error(each)))


@dataclasses.dataclass(frozen=True)
class Bracket(Shown):
    """log Z from both sides; see :func:`ebmpp.bracket`."""

    lower: LogPartition
    upper: LogPartition
    exact: float | None
    """Where the states can be summed; else None."""

    @property
    def gap(self) -> float:
        """How far apart the two are: small only if both have converged, where the upper one is sound."""
        return self.upper.log_partition - self.lower.log_partition

    @property
    def standard_error(self) -> float:
        """Of the gap."""
        return math.hypot(self.lower.standard_error, self.upper.standard_error)

    def __repr__(self) -> str:
        known = "" if self.exact is None else f", exact {self.exact:.6g}"
        sound = "" if self.upper.sound else ", upper from approximate samples"
        lower, upper = (
            f"{m.log_partition:.6g} +- {m.standard_error:.2g} "
            f"({m.effective_sample_size:.1f} of {len(m.log_weights)} particles effective)"
            for m in (self.lower, self.upper)
        )
        return f"Bracket(lower {lower}, upper {upper}{known}{sound})"

    def _card(self) -> Card:
        """Both sides, how far apart they are, and the exact value where it is known."""
        rows = [("lower", *self.lower._row()), ("upper", *self.upper._row())]
        rows += [("gap", Measured(self.gap, self.standard_error), "", "", "upper less lower")]
        rows += [] if self.exact is None else [("exact", f"{self.exact:.9g}", "", "", "all states summed")]
        return Card("log Z from both sides", [Grid(_HEAD, rows)])
