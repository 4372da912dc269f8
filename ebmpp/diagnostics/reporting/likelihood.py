# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How probable the data are: log Z from both sides, and what stands in for it where it is not known."""

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

import jax.numpy as jnp

from ebmpp import exact
from ebmpp.annealing import annealing_path, bracket, smc
from ebmpp.annealing.log_partition import Bracket, LogPartition
from ebmpp.core.statistics import standard_error
from ebmpp.core.types import Rows
from ebmpp.diagnostics.reporting.page import Section
from ebmpp.diagnostics.reporting.subject import Subject
from ebmpp.diagnostics.style import COLORS, INK, grid, look, tidy
from ebmpp.errors import IntractableError
from ebmpp.evaluate import pseudo_log_likelihood
from ebmpp.exact import enumeration
from ebmpp.training import monitors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_SUMMED = 2**20  # states, beyond which log Z is estimated
_MOST_STATES = 2**24  # of all rows' latents together
_PSEUDO_UNITS = 20
_A_PARTICLE = 10  # particles of the systems for one of annealing, whose ladder is many times as long


def likelihood(subject: Subject) -> Section:
    """log p of the rows: exact where that can be summed, else between two estimates."""
    section = Section("Log-likelihood")
    sides = _summed(section, subject) or _estimated(section, subject)
    exact_rows = {name: _exact_rows(subject, rows, sides) for name, rows in subject.data.items()}
    if sides.is_exact and any(v is None for v in exact_rows.values()):
        section.missing("exact likelihoods of rows", "the rows' latents have too many states to sum")
    if not subject.closed:
        section.caveat(
            "Latent blocks interact given the visibles, so a row's free energy has no closed form: log p(v) "
            "+ log Z is bounded from below by mean field, and so is the likelihood."
        )
    table = _table(subject, sides, exact_rows)
    caption = "log Z error is shared by all rows; row error is that of a mean over so many rows."
    section.table("log_likelihood", table, f"Mean log p of a row. {caption}")
    caption = "With two standard errors of log Z and of the rows together."
    section.figure("log_likelihood", _draw(table), caption)
    for name, row in table.iterrows():
        text = in_words(row) + ("" if subject.closed or np.isfinite(row["exact"]) else _BY_MEAN_FIELD)
        section.fact(f"Log-likelihood, {name}: {text}; independent units {row['independent units']:.2f}.")
    _judge(section, str(table.index[-1]), table.iloc[-1])
    return section


class _LogZ(NamedTuple):
    """Two sides of log Z, equal where it is a sum over states."""

    lower: float
    upper: float
    error: float
    is_exact: bool


def _summed(section: Section, subject: Subject) -> _LogZ | None:
    """log Z by a sum over all states; None where there are too many."""
    try:
        plan = enumeration.make_plan(subject.graph)
    except IntractableError:
        return None
    if enumeration.num_states(subject.graph, plan.enumerated) > _MOST_SUMMED:
        return None
    value = float(exact.log_partition(subject.graph, subject.params))
    section.text("log Z is the sum over all states, so no estimate of it is needed.")
    section.table("log_partition", pd.DataFrame([{"log Z": "exact", "value": value}]))
    return _LogZ(value, value, 0.0, is_exact=True)


def _estimated(section: Section, subject: Subject) -> _LogZ:
    """log Z by particle systems from below, and by annealing in reverse from above."""
    work = subject.work
    starts, sound, origin = subject.starts
    made = bracket(
        subject.graph,
        subject.params,
        rng_key=subject.key(5),
        samples={b: jnp.asarray(v) for b, v in starts.items()},
        samples_are_exact=sound,
        num_temperatures=work.temperatures,
        ladder="adaptive",
        data=subject.train,
    )
    annealed, made = made.lower, dataclasses.replace(made, lower=_systems(subject))
    section.text(
        f"log Z by annealed importance sampling, {work.particles} particles over {work.temperatures} "
        f"temperatures, forward from independent units and in reverse from {origin}; and by particle "
        f"systems, {_A_PARTICLE * work.particles} particles in ten islands, which start from the same units "
        "and are resampled on the way. What goes forward is too small on average; likelihoods are at the "
        "systems'."
    )
    if not sound:
        section.caveat(
            "The reverse estimate bounds log Z from above only if its chains have the model's law. Where "
            "they miss a mode both estimates are too small, with small errors, and the likelihood is "
            "flattered: read the sections on mixing first."
        )
    _log_z(section, made, annealed)
    if made.gap < -3 * made.standard_error:
        section.judge(False, "the two estimates of log Z contradict each other")
        section.caveat(
            f"The reverse estimate is {-made.gap:.3g} below the forward one, beyond their errors: its chains "
            "miss a part of the model that the forward run has found."
        )
    section.missing("the exact value", "there are too many states to sum, or states without number")
    error = max(made.lower.standard_error, made.upper.standard_error)
    return _LogZ(made.lower.log_partition, made.upper.log_partition, error, is_exact=False)


_BY_MEAN_FIELD = ", by its mean-field lower bound"


def in_words(row: "pd.Series") -> str:
    """A likelihood in words: exact; a value with its error where two estimates lie within that; or both."""
    if np.isfinite(row["exact"]):
        return f"{row['exact']:.2f} a row (exact)"
    low, high = sorted((row["at upper log Z"], row["at lower log Z"]))
    error = row["log Z error"]
    if high - low <= 2 * error:
        return f"{(low + high) / 2:.2f} +- {error:.2g} a row (two estimates of log Z agree)"
    return f"{low:.2f} to {high:.2f} a row (two estimates of log Z)"


def _judge(section: Section, name: str, row: "pd.Series") -> None:
    """Whether the model is better than units that know nothing of one another, by more than its errors."""
    known = np.isfinite(row["exact"])
    ends = [row["exact"]] if known else [row["at upper log Z"], row["at lower log Z"]]
    margin = 0.0 if known else 2 * row["log Z error"]
    low, high = min(ends) - margin - row["independent units"], max(ends) + margin - row["independent units"]
    if low > 0:
        section.judge(True, f"{name} rows are {low:.3g} nats or more above independent units")
    elif high < 0:
        section.judge(False, f"{name} rows are {-high:.3g} nats or more below independent units")
    else:
        section.judge(False, f"whether {name} rows are above independent units is not known")


def _systems(subject: Subject) -> LogPartition:
    """log Z by particle systems, whose error is that of independent islands."""
    num = _A_PARTICLE * subject.work.particles
    key = subject.key(12)
    return smc(subject.graph, subject.params, rng_key=key, num_particles=num, data=subject.train)


def _log_z(section: Section, made: Bracket, annealed: LogPartition) -> None:
    rows = []
    ways = {"forward (lower)": annealed, "particle systems (lower)": made.lower}
    for name, side in (ways | {"reverse (upper)": made.upper}).items():
        value = {"log Z": name, "value": side.log_partition, "standard error": side.standard_error}
        value |= {"effective particles": side.effective_sample_size, "particles": len(side.log_weights)}
        rows.append({**value, "a bound on average": "yes" if side.sound else "if the chains have mixed"})
    caption = f"The two are {made.gap:.3g} +- {made.standard_error:.2g} apart."
    section.table("log_partition", pd.DataFrame(rows), caption)


def _exact_rows(subject: Subject, rows: Rows, sides: _LogZ) -> np.ndarray | None:
    if not sides.is_exact:
        return None
    if subject.closed:
        return subject.log_weight(rows) - sides.lower
    try:
        plan = enumeration.make_plan(subject.graph, subject.graph.visible)
    except IntractableError:
        return None
    size = len(next(iter(rows.values())))
    if enumeration.num_states(subject.graph, plan.enumerated) * size > _MOST_STATES:
        return None
    return np.asarray(exact.log_likelihood(subject.graph, subject.params, rows), float)


def _table(subject: Subject, sides: _LogZ, exact_rows: dict[str, np.ndarray | None]) -> pd.DataFrame:
    columns: dict[str, dict[str, float]] = {}
    for name, rows in subject.data.items():
        weight, known = subject.log_weight(rows), exact_rows[name]
        own = {"rows": len(weight), "exact": math.nan if known is None else float(known.mean())}
        own |= {f"at {n} log Z": weight.mean() - getattr(sides, n) for n in ("upper", "lower")}
        own |= {"log Z error": sides.error, "row error": float(standard_error(weight))}
        columns[name] = own | {"independent units": _independent(subject, rows)}
    return pd.DataFrame.from_dict(columns, orient="index")


def _independent(subject: Subject, rows: Rows) -> float:
    """Mean log p of rows under units of the training rows' own rates: what a model must beat."""
    graph, total = subject.graph, 0.0
    eta = annealing_path.base_rates(graph, subject.train)
    for b, family in graph.visible.items():
        stats = np.asarray(family.statistics(rows[b]), float).reshape(len(rows[b]), -1)
        normalizer = float(family.log_normalizer(eta[b]).sum())
        base = np.asarray(family.log_base_measure(rows[b]), float).reshape(len(rows[b]), -1).sum(1)
        total += float((stats @ np.asarray(eta[b], float).ravel() - normalizer + base).mean())
    return total


def _draw(table: pd.DataFrame) -> "Figure":
    figure, (ax,) = grid(1, (6.4, 0.9 + 0.7 * len(table)))
    place = np.arange(len(table))[::-1]
    margin = 2 * np.hypot(table["log Z error"], table["row error"].fillna(0))
    ends = table[["at upper log Z", "at lower log Z"]]
    low, high = ends.min(axis=1), ends.max(axis=1)
    ax.hlines(place, low - margin, high + margin, color=COLORS[0], linewidth=1.2)
    ax.hlines(place, low, high, color=COLORS[0], linewidth=6, alpha=0.5, label="between the two estimates")
    if table["exact"].notna().any():
        ax.plot(table["exact"], place, "D", color=INK, markersize=5, label="exact")
    ax.plot(table["independent units"], place, "|", color=COLORS[1], markersize=14, label="independent units")
    ax.set_yticks(place, table.index)
    ax.set(xlabel="log p a row (nats)", ylim=(-0.6, len(table) - 0.4))
    tidy(ax, legend=True)
    return figure


def free_energies(subject: Subject) -> Section:
    """Free energies of rows and of samples."""
    section = Section("Free energies of rows and samples")
    name = "free energy" if subject.closed else "mean-field bound of the free energy"
    sets = {name: -subject.log_weight(rows) for name, rows in subject.data.items()}
    for label, chains in subject.chains(section).items():
        last = {b: jnp.asarray(v[:, ::10].reshape(-1, *v.shape[2:])) for b, v in chains.draws.items()}
        sets[f"{label} samples"] = -subject.log_weight(last)
    figure, (ax,) = grid(1, (7.0, 3.2))
    low, high = min(v.min() for v in sets.values()), max(v.max() for v in sets.values())
    bins = np.linspace(low, high + 1e-6 * max(1, abs(high)), 41)
    for index, (label, values) in enumerate(sets.items()):
        ax.hist(values, bins=bins, density=True, histtype="step", linewidth=1.5, label=label, **look(index))
    ax.set(xlabel=f"{name} (nats)", ylabel="density")
    tidy(ax, legend=True)
    section.figure("free_energies", figure)
    section.text(
        "Held-out rows above training rows: the model has fitted these more than their like. Samples beside "
        "the rows: the model puts its mass elsewhere, or the chains have not reached it."
    )
    stats = {n: {"count": len(v), "mean": v.mean(), "sd": v.std()} for n, v in sets.items()}
    section.table("free_energies", pd.DataFrame.from_dict(stats, orient="index"), f"The {name}.")
    means = [stats[n]["mean"] for n in subject.data]
    if len(means) > 1:
        section.fact(f"Free-energy gap, {list(subject.data)[1]} minus train: {means[1] - means[0]:.3g}.")
    return section


def proxies(subject: Subject) -> Section:
    """Reconstruction error and pseudo-likelihood."""
    section, columns = Section("Reconstruction and pseudo-likelihood"), {}
    units = sum(f.size for f in subject.graph.visible.values())
    some = _PSEUDO_UNITS if units > 3 * _PSEUDO_UNITS else None
    why = None
    for name, rows in subject.data.items():
        squared = monitors.reconstruction(subject.graph, rows, subject.key(6))(subject.params)
        columns[name] = {"reconstruction error": float(squared)}
        try:
            which = {"num_units": some, "rng_key": subject.key(7)}
            each = pseudo_log_likelihood(subject.graph, subject.params, rows, **which)
            error = standard_error(np.asarray(each, float))
            columns[name] |= {"pseudo-log-likelihood": float(each.mean()), "its row error": float(error)}
        except IntractableError as refused:
            why = refused
    section.table("proxies", pd.DataFrame.from_dict(columns, orient="index"), "Means over rows.")
    section.caveat(
        "Neither is the likelihood. The reconstruction error (squared, a unit's statistic) is of one step "
        "from the data, and a chain that does not move makes it small too. The pseudo-likelihood asks for "
        "each unit given all others, and can rise while the likelihood falls. Compare each with itself "
        "along one run."
    )
    if why is not None:
        section.missing("the pseudo-likelihood", why)
    elif some is not None:
        section.text(
            f"Pseudo-likelihood from {some} units of each row, drawn at random, scaled to all {units}."
        )
    return section
