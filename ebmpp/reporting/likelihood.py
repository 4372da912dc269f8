# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sections on the likelihood: log Z and log p of rows, free energies, and likelihood proxies."""

from collections.abc import Mapping
import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

import jax.numpy as jnp

from ebmpp import exact
from ebmpp.annealing import (
    Bracket,
    LogPartition,
    bidirectional,
    bracket,
    log_partition,
    reference,
    smc,
)
from ebmpp.core import Rows, merge_axes, num_rows, statistics
from ebmpp.diagnostics.style import COLORS, INK, grid, look, tidy
from ebmpp.errors import IntractableError
from ebmpp.exact import enumeration
from ebmpp.reporting.page import Section
from ebmpp.reporting.subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_LATENT_STATES = 2**24  # over all rows
# particles of the systems per annealed particle, whose ladder is many times as long
_SYSTEM_FACTOR = 10


class _LogZ(NamedTuple):
    """Bounds of log Z, equal if it is a sum over states."""

    lower: float
    upper: float
    error: float
    is_exact: bool


def likelihood(section: Section, subject: Subject) -> None:
    """Report log Z and log p of the rows: exact by a sum over states, or from two estimates."""
    log_z = _summed(section, subject) or _estimated(section, subject)
    table = _table(subject, log_z)
    if log_z.is_exact and table["exact"].isna().any():
        section.missing(
            "exact likelihoods of rows",
            "The rows' latents have too many states to sum.",
        )
    if not subject.has_free_energy:
        section.note(
            "Latent blocks interact given the visibles, so the free energy of a row "
            "has no closed form. The table has its mean-field bound, and with it a "
            "lower bound of the likelihood."
        )
    section.table(
        "log_likelihood",
        table,
        "Mean log p per row. All rows share the error of log Z.",
    )
    section.figure(
        "log_likelihood",
        _draw(table),
        "Bars add two standard errors, of log Z and of the rows.",
    )
    for name, row in table.iterrows():
        has_value = subject.has_free_energy or np.isfinite(row["exact"])
        bound = "" if has_value else " (mean-field lower bound)"
        baseline = f"independent units {row['independent units']:.2f}"
        section.fact(f"Log-likelihood, {name}: {_describe(row)}{bound}; {baseline}.")
    _judge(section, str(table.index[-1]), table.iloc[-1])


def _summed(section: Section, subject: Subject) -> _LogZ | None:
    """Return log Z by a sum over all states, None if there are too many."""
    value = bidirectional.exact_log_partition(subject.graph, subject.params)
    if value is None:
        return None
    section.text("log Z is an exact sum over all states.")
    section.table("log_partition", [{"log Z": "exact", "value": value}])
    return _LogZ(value, value, 0.0, is_exact=True)


def _estimated(section: Section, subject: Subject) -> _LogZ:
    """Return log Z by annealing and particles from below, and by annealing from above."""
    graph = subject.graph
    params = subject.params
    data = subject.train
    budget = subject.budget
    result = bracket(
        graph,
        params,
        rng_key=subject.key(5),
        num_particles=budget.particles,
        num_temperatures=budget.temperatures,
        ladder="adaptive",
        data=data,
    )
    num = _SYSTEM_FACTOR * budget.particles
    systems = smc(graph, params, rng_key=subject.key(12), num_particles=num, data=data)
    annealed = result.lower
    if systems.log_partition > annealed.log_partition:  # both are too small on average
        result = dataclasses.replace(result, lower=systems)
    source = "exact draws" if result.guaranteed else "draws of a separate annealed run"
    section.text(
        f"log Z by annealed importance sampling with {budget.particles} particles and "
        f"{budget.temperatures} temperatures, forward from independent units and in "
        f"reverse from {source}; and by particle systems of {num} particles in ten "
        "islands, which start from the same units and are resampled. Forward estimates "
        "are too small on average."
    )
    if not result.guaranteed:
        section.note(
            "The reverse estimate is not a guaranteed upper bound: its draws are "
            "approximate. If they miss a mode, both estimates are too small, with "
            "small errors, and the likelihood looks better than it is. Read the "
            "sections on mixing first."
        )
    _log_z_table(
        section,
        result,
        {"forward (lower)": annealed, "particle systems (lower)": systems},
    )
    reason = log_partition.contradiction(result.gap, result.standard_error)
    if reason is not None:
        section.judge(False, "the two estimates of log Z contradict each other")
        section.note(reason)
    section.missing(
        "the exact value", "There are too many states to sum, or infinitely many."
    )
    error = max(result.lower.standard_error, result.upper.standard_error)
    return _LogZ(
        result.lower.log_partition, result.upper.log_partition, error, is_exact=False
    )


def _log_z_table(
    section: Section, result: Bracket, lower: Mapping[str, LogPartition]
) -> None:
    rows = []
    for name, side in {**lower, "reverse (upper)": result.upper}.items():
        low, high = side.interval()
        bound = "yes" if side.unbiased else "not guaranteed: approximate draws"
        rows.append(
            {
                "log Z": name,
                "value": side.log_partition,
                "standard error": side.standard_error,
                "95 % from": low,
                "to": high,
                "effective particles": side.effective_sample_size,
                "particles": len(side.log_weights),
                "a bound on average": bound,
            }
        )
    low, high = result.interval()
    section.table(
        "log_partition",
        rows,
        f"Likelihoods use {low:.6g} to {high:.6g} (95 %); the estimates differ by "
        f"{result.gap:.3g} +- {result.standard_error:.2g}.",
    )


def _describe(row: "pd.Series") -> str:
    """Return a likelihood in words: exact, with an error, or as a range of two estimates."""
    if np.isfinite(row["exact"]):
        return f"{row['exact']:.2f} per row (exact)"
    low, high = sorted((row["at upper log Z"], row["at lower log Z"]))
    error = row["log Z error"]
    if high - low <= 2 * error:
        return f"{(low + high) / 2:.2f} +- {error:.2g} per row (two estimates of log Z agree)"
    return f"{low:.2f} to {high:.2f} per row (two estimates of log Z)"


def _judge(section: Section, name: str, row: "pd.Series") -> None:
    """Check that the rows are more likely than under independent units, beyond the errors."""
    low = high = row["exact"]
    margin = 0.0
    if not np.isfinite(low):
        low, high = sorted((row["at upper log Z"], row["at lower log Z"]))
        margin = 2 * row["log Z error"]
    above = low - margin - row["independent units"]
    below = row["independent units"] - high - margin
    words = f"{name} rows may be no more likely than under independent units"
    if above > 0:
        words = f"{name} rows are at least {above:.3g} nats above independent units"
    elif below > 0:
        words = f"{name} rows are at least {below:.3g} nats below independent units"
    section.judge(above > 0, words)


def _exact_rows(subject: Subject, rows: Rows, log_z: _LogZ) -> np.ndarray | None:
    if not log_z.is_exact:
        return None
    if subject.has_free_energy:
        return subject.log_density(rows) - log_z.lower
    try:
        plan = enumeration.make_plan(subject.graph, subject.graph.visible)
    except IntractableError:
        return None
    count = enumeration.num_states(subject.graph, plan.enumerated)
    if count * num_rows(rows) > _MAX_LATENT_STATES:
        return None
    return np.asarray(exact.log_likelihood(subject.graph, subject.params, rows), float)


def _table(subject: Subject, log_z: _LogZ) -> pd.DataFrame:
    table = {}
    for name, rows in subject.data.items():
        log_density = subject.log_density(rows)
        known = _exact_rows(subject, rows, log_z)
        table[name] = {
            "rows": len(log_density),
            "exact": math.nan if known is None else float(known.mean()),
            "at upper log Z": log_density.mean() - log_z.upper,
            "at lower log Z": log_density.mean() - log_z.lower,
            "log Z error": log_z.error,
            "row error": float(statistics.standard_error(log_density)),
            "independent units": _independent(subject, rows),
        }
    return pd.DataFrame.from_dict(table, orient="index")


def _independent(subject: Subject, rows: Rows) -> float:
    """Return the mean log p of rows under independent units with the training rows' rates."""
    eta = reference.base_rates(subject.graph, subject.train)

    total = 0.0
    for b, family in subject.graph.visible.items():
        log_prob = family.distribution(eta[b]).log_prob(rows[b])
        total += float(jnp.mean(log_prob))
    return total


def _draw(table: pd.DataFrame) -> "Figure":
    figure, (ax,) = grid(1, (6.4, 0.9 + 0.7 * len(table)))
    y = np.arange(len(table))[::-1]
    margin = 2 * np.hypot(table["log Z error"], table["row error"].fillna(0))
    ends = table[["at upper log Z", "at lower log Z"]]
    low = ends.min(axis=1)
    high = ends.max(axis=1)
    ax.hlines(y, low - margin, high + margin, color=COLORS[0], linewidth=1.2)
    ax.hlines(
        y,
        low,
        high,
        color=COLORS[0],
        linewidth=6,
        alpha=0.5,
        label="between the two estimates",
    )
    if table["exact"].notna().any():
        ax.plot(table["exact"], y, "D", color=INK, markersize=5, label="exact")
    ax.plot(
        table["independent units"],
        y,
        "|",
        color=COLORS[1],
        markersize=14,
        label="independent units",
    )
    ax.set_yticks(y, table.index)
    ax.set(xlabel="log p per row (nats)", ylim=(-0.6, len(table) - 0.4))
    tidy(ax, legend=True)
    return figure


def free_energies(section: Section, subject: Subject) -> None:
    """Compare free energies of rows and of samples."""
    name = "free energy"
    if not subject.has_free_energy:
        name = "mean-field bound of the free energy"
    sets = {name: -subject.log_density(rows) for name, rows in subject.data.items()}
    for label, chains in subject.chains(section).items():
        thinned = {
            b: jnp.asarray(merge_axes(v[:, ::10])) for b, v in chains.draws.items()
        }
        sets[f"{label} samples"] = -subject.log_density(thinned)
    figure, (ax,) = grid(1, (7.0, 3.2))
    bins = np.histogram_bin_edges(np.concatenate(list(sets.values())), 40)
    for index, (label, values) in enumerate(sets.items()):
        ax.hist(
            values,
            bins=bins,
            density=True,
            histtype="step",
            linewidth=1.5,
            label=label,
            **look(index),
        )
    ax.set(xlabel=f"{name} (nats)", ylabel="density")
    tidy(ax, legend=True)
    section.figure("free_energies", figure)
    section.text(
        "Held-out rows above training rows indicate overfitting. Samples apart from "
        "the rows mean that the model puts its mass elsewhere, or that the chains have "
        "not reached it."
    )
    stats = {
        n: {"count": len(v), "mean": v.mean(), "sd": v.std()} for n, v in sets.items()
    }
    section.table(
        "free_energies", pd.DataFrame.from_dict(stats, orient="index"), f"The {name}."
    )
    means = [stats[n]["mean"] for n in subject.data]
    if len(means) > 1:
        section.fact(
            f"Free-energy gap, {list(subject.data)[1]} minus train: {means[1] - means[0]:.3g}."
        )
