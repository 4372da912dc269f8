# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How fast chains mix: coupled pairs, and Gibbs chains against parallel tempering."""

import dataclasses
from typing import TYPE_CHECKING, Any
import warnings

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from jax import Array
import jax.numpy as jnp

from ebmpp.coupling.expectation import UnbiasedEstimate, unbiased_expectation
from ebmpp.diagnostics.datatree import summary
from ebmpp.diagnostics.meeting import meeting_data, tv_upper_bound
from ebmpp.diagnostics.plots import plot_meeting_times, plot_tv_bound
from ebmpp.diagnostics.reporting.page import Section
from ebmpp.diagnostics.reporting.subject import Chains, Subject
from ebmpp.diagnostics.style import COLORS, INK, grid, tidy
from ebmpp.errors import UnmetError
from ebmpp.graph import FactorGraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_QUANTILE = 0.95
_GOOD = 1.01  # R-hat


# -- meeting times -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _BlockMeans:
    """Mean value of each block's units, of one state."""

    graph: FactorGraph

    def __call__(self, x: dict[str, Array]) -> dict[str, Array]:
        return {b: x[b].astype(float).mean() for b in self.graph.families}


def meeting(subject: Subject) -> Section:
    """Meeting times of coupled pairs from noise, and what they bound."""
    section, work = Section("Mixing: meeting times of coupled chains"), subject.work
    section.text(
        f"{work.pairs} pairs of coupled Gibbs chains, each chain from noise of its own. Once a pair has met, "
        f"neither chain remembers its start. A pair is watched for {work.max_sweeps} sweeps."
    )
    pilot = _pairs(subject, 1)
    times, met = np.full(work.pairs, work.max_sweeps + 1.0), np.zeros(work.pairs, bool)
    if pilot is not None:
        times, met, _ = meeting_data(pilot)
    unmet = int((~met).sum())
    told = f"{work.pairs - unmet} of {work.pairs} pairs met within {work.max_sweeps} sweeps"
    if met.any():
        told += f", after {np.median(times):.0f} in the median, the last after {times[met].max():.0f}"
    section.fact(f"Mixing from noise: {told}.")
    apart = f"{unmet} of {work.pairs} coupled pairs did not meet in {work.max_sweeps} sweeps"
    section.judge(not unmet, apart if unmet else "coupled chains from noise meet")
    section.text(told + ".")
    if unmet:
        section.caveat(
            f"{unmet} of {work.pairs} pairs had not met. Chains shorter than that may not have forgotten "
            "where they started, and what they tell below is to be doubted."
        )
    lag = int(max(1, min(np.quantile(times, _QUANTILE), work.max_sweeps // 4)))
    lagged = None if pilot is None else _pairs(subject, lag)
    figure, panels = grid(1 if lagged is None else 2, (4.4, 3.2))
    plot_meeting_times(times, 1, met, ax=panels[0])
    if lagged is None:
        why = "no pair met, so the bound is 1" if pilot is None else f"no pair met at lag {lag}"
        section.missing("the bound of the distance to stationarity", why)
    else:
        plot_tv_bound(lagged, ax=panels[1])
        _bounded(section, lagged)
        _means(section, subject, lagged)
    caption = "P(meeting time > t) at lag 1, and the bound of the distance to stationarity."
    section.figure("meeting_times", figure, "" if lagged is None else caption)
    return section


def _pairs(subject: Subject, lag: int) -> UnbiasedEstimate | None:
    """An estimate from the pairs that met, of the sweeps from lag to twice that; None where none did."""
    graph, params, work = subject.graph, subject.params, subject.work
    window: dict[str, Any] = {"k": lag, "m": 2 * lag, "lag": lag, "max_sweeps": work.max_sweeps + lag}
    # in one state they would be in one mode, and meet there
    pairs: dict[str, Any] = {"num_pairs": work.pairs, "independent_starts": True, "unmet": "drop"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unmet pairs are told on the page
        try:
            return unbiased_expectation(
                graph, params, _BlockMeans(graph), rng_key=subject.key(8), **window, **pairs
            )
        except UnmetError:
            return None


def _bounded(section: Section, made: UnbiasedEstimate) -> None:
    if made.num_unmet:
        section.caveat(
            f"At lag {made.lag}, {made.num_unmet} pairs were unmet. How much longer they would take is not "
            "known, so the bound is 1: nothing is said on the distance to stationarity."
        )
    bound = tv_upper_bound(made)
    rows = []
    for level in (0.5, 0.1, 0.01):
        below = np.flatnonzero(bound["bound"].values <= level)
        sweeps = str(int(bound["t"][below[0]])) if len(below) else "more than were seen"
        rows.append({"total variation at most": level, "after sweeps": sweeps})
    caption = f"From {len(made.met)} pairs at lag {made.lag}, {made.num_unmet} of them unmet."
    section.table("tv_bound", pd.DataFrame(rows), caption)


def _means(section: Section, subject: Subject, made: UnbiasedEstimate) -> None:
    """Means without the bias of any start, next to those of chains."""
    if made.num_unmet:
        why = f"{made.num_unmet} pairs are unmet, and without them means are biased"
        return section.missing("unbiased means", why)
    gibbs = subject.gibbs.draws
    rows = []
    for b in subject.graph.families:
        unbiased = {"unbiased mean": float(made.value[b]), "standard error": float(made.standard_error[b])}
        seen = float(np.mean(subject.train[b])) if b in subject.graph.visible else np.nan
        rows.append({"block": b, **unbiased, "Gibbs chains": float(gibbs[b].mean()), "training rows": seen})
    caption = "Mean value of a block's units, from the pairs and from chains."
    section.table("means", pd.DataFrame(rows), caption)


# -- chains ------------------------------------------------------------------------------------------


def chains(subject: Subject) -> Section:
    """Effective sample sizes and R-hat of Gibbs chains and of parallel tempering."""
    section, work = Section("Mixing: Gibbs chains against parallel tempering"), subject.work
    section.text(
        f"{work.chains} chains of each from noise, {work.sweeps} sweeps after as many that are left out. A "
        f"sweep of tempering is {2 * work.replicas} passes ({work.replicas} temperatures, twice), so "
        "effective draws are told by passes too."
    )
    tables, curves = [], {}
    for name, made in subject.chains(section).items():
        values = _summaries(subject, made)
        curves[name] = values["energy"]
        tables.append(_table(name, made, values))
        section.text(f"{name}: {made.told}; {made.seconds:.1f} s with compilation.")
    table = pd.concat(tables, ignore_index=True)
    section.table("chains", table, "Of the energy, and of the mean value of each block's units.")
    frozen = table[table["frozen"]]
    if len(frozen):
        section.caveat(f"{len(frozen)} values never moved in any chain: they have no effective sample size.")
    for name in curves:
        worst = table.loc[table["chains"] == name, "r_hat"].max()
        section.fact(f"Largest R-hat of {name} chains from noise: {worst:.3f}.")
        agree = "agree" if worst <= _GOOD else "disagree"
        section.judge(worst <= _GOOD, f"{name} chains from noise {agree} (R-hat {worst:.3f})")
        if worst > _GOOD:
            section.caveat(
                f"R-hat of {name} chains is up to {worst:.3f}, above {_GOOD}: they disagree, and their "
                "samples are not yet the model's."
            )
    section.figure("chains", _draw(curves), _RANKS)
    section.caveat(
        "R-hat near 1 says that these chains agree, and not that they have seen every mode: all may have "
        "missed the same one. Tempered chains and meeting times are the better witnesses."
    )
    return section


def _summaries(subject: Subject, made: Chains) -> dict[str, np.ndarray]:
    draws = {b: jnp.asarray(v) for b, v in made.draws.items()}
    values = {"energy": np.asarray(subject.graph.energy(subject.params, draws), float)}
    for b, v in made.draws.items():
        values[f"mean of {b}"] = v.reshape(*v.shape[:2], -1).mean(-1, dtype=float)
    return values


def _table(name: str, made: Chains, values: dict[str, Any]) -> pd.DataFrame:
    import arviz_base  # brings matplotlib with it where that is installed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # values that never move are told in a column
        table = summary(arviz_base.from_dict({"posterior": values}), round_to="none")
    draws = next(iter(values.values())).size
    table = table[["mean", "sd", "ess_bulk", "ess_tail", "r_hat", "frozen"]].copy()
    table.insert(4, "ess per 1000 passes", 1000 * table["ess_bulk"] / (draws * made.passes))
    return table.rename_axis("value").reset_index().assign(chains=name)[["chains", "value", *table.columns]]


_BINS = 20
_RANKS = (
    "A line a chain: how often its energies are of each rank among those of all chains, the lowest on the "
    "left. Chains that have mixed are flat, but for noise, at the dotted line; one that is high on a side "
    "was somewhere else than the others."
)


def ranks(values: np.ndarray, bins: int = _BINS) -> np.ndarray:
    """How many of each chain's values are of which rank among all, by bins; ties share their ranks.

    :param values: ``(chains, draws)``.
    :return: ``(chains, bins)``, of which each row sums to the draws.
    """
    rank = rankdata(values, method="average") - 0.5
    place = np.minimum((rank * bins / values.size).astype(int), bins - 1).reshape(values.shape)
    return np.stack([np.bincount(row, minlength=bins) for row in place])


def _draw(curves: dict[str, np.ndarray]) -> "Figure":
    tallest = max(len(v) for v in curves.values())
    figure, panels = grid(len(curves), (4.4, 1.0 + 0.34 * tallest))
    for ax, (name, energy) in zip(panels, curves.items(), strict=True):
        found, level = ranks(energy), energy.shape[1] / _BINS
        edges, scale = np.arange(_BINS + 1) / _BINS, 0.9 / max(found.max(), 2 * level)
        for chain, counts in enumerate(found):
            base = len(found) - 1 - chain
            ax.stairs(base + scale * counts, edges, baseline=base, fill=True, color=COLORS[0], alpha=0.35)
            ax.stairs(base + scale * counts, edges, baseline=base, color=COLORS[0], linewidth=0.9)
            ax.axhline(base + scale * level, color=INK, linewidth=0.6, linestyle=":")
        ax.set_yticks(np.arange(len(found)), [f"{len(found) - i}" for i in range(len(found))])
        ax.set(xlabel="rank of the energy, of all draws", ylabel="chain", title=f"{name}: ranks", xlim=(0, 1))
        tidy(ax)
    return figure
