# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sections on mixing: meeting times, and Gibbs chains against parallel tempering."""

import contextlib
from typing import TYPE_CHECKING
import warnings

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from ebmpp.core import Blocks
from ebmpp.coupling.expectation import UnbiasedEstimate, unbiased_expectation
from ebmpp.diagnostics import plot_meeting_times, plot_tv_bound, summary, tv_upper_bound
from ebmpp.diagnostics.meeting import meeting_data
from ebmpp.diagnostics.style import COLORS, INK, grid, tidy
from ebmpp.errors import UnmetError
from ebmpp.reporting.page import Section
from ebmpp.reporting.subject import SamplerRun, Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LAG_QUANTILE = 0.95  # of the meeting times at lag 1
_MAX_R_HAT = 1.01
_BINS = 20  # of a rank plot


def _block_means(x: Blocks) -> Blocks:
    """Return the mean value of each block's units in one state."""
    return {b: v.astype(float).mean() for b, v in x.items()}


def meeting_times(section: Section, subject: Subject) -> None:
    """Report meeting times of coupled pairs from noise, and the bound that follows from them."""
    budget = subject.budget
    section.text(
        f"{budget.pairs} pairs of coupled Gibbs chains; each chain starts from its own "
        "noise. Once a pair has met, neither chain depends on its start. A pair runs "
        f"for at most {budget.max_sweeps} sweeps."
    )
    pilot = _pairs(subject, 1)
    times = np.full(budget.pairs, budget.max_sweeps + 1.0)
    met = np.zeros(budget.pairs, bool)
    if pilot is not None:
        times, met, _ = meeting_data(pilot)
    unmet = (~met).sum()
    result = f"{budget.pairs - unmet} of {budget.pairs} pairs met within {budget.max_sweeps} sweeps"
    if met.any():
        result += (
            f", after {np.median(times[met]):.0f} in the median and at most "
            f"{times[met].max():.0f}"
        )
    section.fact(f"Mixing from noise: {result}.")
    section.text(result + ".")
    words = "coupled chains from noise meet"
    if unmet:
        words = (
            f"{unmet} of {budget.pairs} coupled pairs did not meet in "
            f"{budget.max_sweeps} sweeps"
        )
        section.note(
            f"{unmet} of {budget.pairs} pairs had not met: chains below may depend on their start."
        )
    section.judge(not unmet, words)
    lag = int(max(1, min(np.quantile(times, _LAG_QUANTILE), budget.max_sweeps // 4)))
    lagged = None if pilot is None else _pairs(subject, lag)
    figure, panels = grid(1 if lagged is None else 2, (4.4, 3.2))
    plot_meeting_times(times, 1, met, ax=panels[0])
    caption = ""
    if lagged is None:
        reason = f"No pair met at lag {lag}."
        if pilot is None:
            reason = "No pair met, so the bound is 1."
        section.missing("the bound on the distance to stationarity", reason)
    else:
        plot_tv_bound(lagged, ax=panels[1])
        _bound_table(section, lagged)
        _means_table(section, subject, lagged)
        caption = "P(meeting time > t) at lag 1, and the bound on the distance to stationarity."
    section.figure("meeting_times", figure, caption)


def _pairs(subject: Subject, lag: int) -> UnbiasedEstimate | None:
    """Return an estimate from the pairs that met, over lag to 2 lag; None if none met."""
    budget = subject.budget
    with warnings.catch_warnings(), contextlib.suppress(UnmetError):
        warnings.simplefilter("ignore")  # the page reports unmet pairs
        return unbiased_expectation(
            subject.graph,
            subject.params,
            _block_means,
            rng_key=subject.key(8),
            num_pairs=budget.pairs,
            k=lag,
            m=2 * lag,
            lag=lag,
            max_sweeps=budget.max_sweeps + lag,
            # chains with a common start would be in one mode and meet there
            independent_starts=True,
            unmet="drop",
        )
    return None


def _bound_table(section: Section, estimate: UnbiasedEstimate) -> None:
    if estimate.num_unmet:
        section.note(
            f"At lag {estimate.lag}, {estimate.num_unmet} pairs did not meet. Their "
            "meeting times are unknown, so the bound is 1 and says nothing about the "
            "distance to stationarity."
        )
    bound = tv_upper_bound(estimate)
    rows = []
    for level in (0.5, 0.1, 0.01):
        below = np.flatnonzero(bound["bound"].values <= level)
        sweeps = str(int(bound["t"][below[0]])) if len(below) else "more than were run"
        rows.append({"total variation at most": level, "after sweeps": sweeps})
    section.table(
        "tv_bound",
        rows,
        f"From {len(estimate.met)} pairs at lag {estimate.lag}, {estimate.num_unmet} "
        "of them unmet.",
    )


def _means_table(
    section: Section, subject: Subject, estimate: UnbiasedEstimate
) -> None:
    """Compare unbiased means of the blocks with means over chains."""
    if estimate.num_unmet:
        section.missing(
            "unbiased means",
            f"{estimate.num_unmet} pairs did not meet, and means without them are biased.",
        )
        return
    rows = [
        {
            "block": b,
            "unbiased mean": float(estimate.value[b]),
            "standard error": float(estimate.standard_error[b]),
            "Gibbs chains": float(subject.gibbs.draws[b].mean()),
            "training rows": float(np.mean(subject.train.get(b, np.nan))),
        }
        for b in subject.graph.families
    ]
    section.table(
        "means", rows, "Mean value of a block's units, from the pairs and from chains."
    )


def chains(section: Section, subject: Subject) -> None:
    """Report effective sample sizes and R-hat of Gibbs chains and of parallel tempering."""
    budget = subject.budget
    section.text(
        f"{budget.chains} chains of each sampler from noise, {budget.sweeps} sweeps "
        "after as many warm-up sweeps. A sweep of tempering takes "
        f"{2 * budget.replicas} passes ({budget.replicas} temperatures, twice), so "
        "effective draws are also given per pass."
    )
    tables = {}
    energies = {}
    for name, result in subject.chains(section).items():
        energy = subject.graph.energy(subject.params, result.draws)
        values = {"energy": np.asarray(energy, float)}
        for b, v in result.draws.items():
            values[f"mean of {b}"] = v.reshape(*v.shape[:2], -1).mean(-1, dtype=float)
        energies[name] = values["energy"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tables[name] = _table(result, values)
        for w in caught:
            if issubclass(w.category, UserWarning):
                section.note(f"{name} chains: {w.message}.")
        section.text(
            f"{name}: {result.diagnostics}; {result.seconds:.1f} s with compilation."
        )
    table = pd.concat(tables, names=["chains", "value"]).reset_index()
    section.table(
        "chains",
        table,
        "Statistics of the energy and of the mean value of each block's units.",
    )
    for name in energies:
        rows = table[table["chains"] == name]
        worst = rows["r_hat"].max()
        stuck = (rows["frozen"] & rows["r_hat"].notna()).sum()
        section.fact(f"Largest R-hat of {name} chains from noise: {worst:.3f}.")
        do_agree = worst <= _MAX_R_HAT
        verb = "agree" if do_agree else "disagree"
        section.judge(do_agree, f"{name} chains from noise {verb} (R-hat {worst:.3f})")
        if stuck:
            section.judge(
                False,
                f"{name} chains from noise are stuck in {stuck} of {len(rows)} values",
            )
        if not do_agree:
            section.note(
                f"{name} chains disagree (R-hat above {_MAX_R_HAT}): they do not sample the model."
            )
    section.figure(
        "chains",
        _draw(energies),
        "Ranks of a chain's energies among those of all chains; flat, at the dotted "
        "line, if they mix.",
    )
    section.note(
        "R-hat near 1 says that the chains agree, not that they have visited every "
        "mode: all may miss the same one. Tempered chains and meeting times are better "
        "evidence."
    )


def _table(chains: SamplerRun, values: dict[str, np.ndarray]) -> pd.DataFrame:
    import arviz_base  # imports matplotlib, if installed

    table = summary(arviz_base.from_dict({"posterior": values}))
    draws = next(iter(values.values())).size
    table = table[["mean", "sd", "ess_bulk", "ess_tail", "r_hat", "frozen"]].copy()
    per_pass = 1000 * table["ess_bulk"] / (draws * chains.passes)
    table.insert(4, "ess per 1000 passes", per_pass)
    return table


def _draw(energies: dict[str, np.ndarray]) -> "Figure":
    figure, panels = grid(
        len(energies), (4.4, 1.0 + 0.34 * max(map(len, energies.values())))
    )
    for ax, (name, energy) in zip(panels, energies.items()):
        # histograms of each chain's ranks among all values
        ranks = rankdata(energy).reshape(energy.shape) - 0.5
        level = energy.shape[1] / _BINS
        counts = np.stack(
            [np.histogram(row, _BINS, (0, energy.size))[0] for row in ranks]
        )
        edges = np.arange(_BINS + 1) / _BINS
        scale = 0.9 / max(counts.max(), 2 * level)
        for chain, row in enumerate(counts):
            base = len(counts) - 1 - chain
            height = base + scale * row
            look = {"baseline": base, "color": COLORS[0]}
            ax.stairs(height, edges, fill=True, alpha=0.35, **look)
            ax.stairs(height, edges, linewidth=0.9, **look)
            ax.axhline(base + scale * level, color=INK, linewidth=0.6, linestyle=":")
        ax.set_yticks(np.arange(len(counts)), np.arange(len(counts), 0, -1))
        ax.set(
            xlabel="rank of the energy among all draws",
            ylabel="chain",
            title=name,
            xlim=(0, 1),
        )
        tidy(ax)
    return figure
