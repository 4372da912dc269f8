# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Parts of the experiments' pictures: medians with bands, axes of likelihoods, legends
and files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from ebmpp.contrib import figures
from ebmpp.diagnostics import style as style

matplotlib.use("agg")


def band(ax: Any, x: Sequence, runs: Sequence[Sequence[float]], **look: Any) -> None:
    """Draw the median of the runs and their range at ``x``, up to the end of the longest run."""
    table = np.full((len(runs), max(map(len, runs))), np.nan)
    for row, values in zip(table, runs, strict=True):
        row[: len(values)] = np.array(values, float)
    valid = np.isfinite(table).any(0)
    at = np.asarray(x)[: table.shape[1]][valid]
    table = table[:, valid]
    ax.plot(at, np.nanmedian(table, axis=0), **look)
    if len(runs) > 1:
        low = np.nanmin(table, axis=0)
        high = np.nanmax(table, axis=0)
        ax.fill_between(at, low, high, color=look["color"], alpha=0.16, linewidth=0)


def over(seeds: int) -> str:
    """Describe the bands."""
    return f"medians, and the range over {seeds} seeds" if seeds > 1 else "one seed"


def likelihoods(
    ax: Any, best: float, low: float, ticks: Sequence[float], label: str
) -> None:
    """Set a y axis that is logarithmic below ``best``, with a line there, and shows all
    down to ``low``."""
    top = best + 0.02 * (best - low) + 0.1
    figures.below(ax, top, [t for t in ticks if low < t < top])
    ax.set_ylim(top - 1.15 * (top - low), best + 0.2 * (top - best))
    ax.axhline(best, color=style.INK, linestyle="--", linewidth=0.8, label=label)


def save(figure: Any, axes: Any, path: Path, title: str = "", ncols: int = 3) -> None:
    """Tidy the axes, put one legend below them, and write the figure."""
    for ax in np.atleast_1d(axes):
        style.tidy(ax)
    if title:
        figure.suptitle(title, fontsize=9)
    figures.legend_below(figure, axes, ncols=ncols)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
