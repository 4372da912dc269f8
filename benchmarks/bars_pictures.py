# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The pictures of ``bars_and_stripes.py``."""

from collections.abc import Callable, Mapping, Sequence
import math
from pathlib import Path
import textwrap
from typing import Any

import numpy as np
import xarray as xr

from ebmpp.diagnostics import style

_TICKS = (-109, -110, -112, -115, -120, -130, -150, -200, -300, -500, -1000)


def _likelihoods(ax: Any, best: float, low: float, across: bool = False) -> None:
    """An axis from the best possible down to the lowest value: no fall is cut off."""
    style.below(ax, best + 1, [t for t in _TICKS if t > low], across)
    limits = best + 1 - 1.15 * (best + 1 - low), best + 0.2
    (ax.set_xlim if across else ax.set_ylim)(*limits)
    line = {"color": style.INK, "linewidth": 0.8, "linestyle": "--", "label": f"best possible, {best:.2f}"}
    (ax.axvline if across else ax.axhline)(best, **line)


def falls(rows: list[dict[str, Any]], labels: Sequence[str], best: float, path: Path) -> None:
    """The best and the last value of every run, by method and by what the run cost.

    :param rows: the numbers of each run, as they are kept.
    :param labels: of the methods, in their order.
    :param best: the best value that any model can reach.
    """
    import matplotlib

    matplotlib.use("agg")

    methods = [label for label in labels if any(row["method"] == label for row in rows)]
    low = min(row["last"] for row in rows)
    figure, (left, right) = style.grid(2, (5.6, 0.9 + 0.55 * len(methods)))
    for index, method in enumerate(methods):
        own = [row for row in rows if row["method"] == method]
        color = {"color": style.look(index)["color"]}
        offset = np.linspace(-0.3, 0.3, len(own)) if len(own) > 1 else [0.0]
        for place, row in zip(index + np.array(offset), own, strict=True):
            left.plot([row["best"], row["last"]], [place] * 2, linewidth=1, **color)
            left.plot(row["best"], place, "o", markersize=4, markerfacecolor="white", **color)
            left.plot(row["last"], place, style.marker(index), markersize=4, **color)
        mark = {"marker": style.marker(index), "linestyle": "none", "markersize": 5}
        seconds, last = ([row[n] for row in own] for n in ("seconds", "last"))
        right.plot(seconds, last, markerfacecolor="none", **mark, **color)
    names = [_wrapped(m, sum(row["method"] == m for row in rows)) for m in methods]
    left.set_yticks(range(len(methods)), names, fontsize=8)
    left.invert_yaxis()
    for tick, index in zip(left.get_yticklabels(), range(len(methods)), strict=True):
        tick.set_color(style.look(index)["color"])
    _likelihoods(left, best, low, across=True)
    _likelihoods(right, best, low)
    left.set_xlabel("total log-likelihood of the 32 rows (nats)")
    left.set_title("hollow: the best of a run; filled: its last value", fontsize=9)
    right.set(xscale="log", xlabel="seconds of a run (busy machines)", ylabel="last value (nats)")
    right.set_title("what it cost (marks as on the left; dashed: best possible)", fontsize=9)
    for ax in (left, right):
        style.tidy(ax)
    left.tick_params(axis="x", labelsize=8)
    figure.savefig(path, dpi=120)


def discarded(made: xr.Dataset) -> xr.DataArray:
    """Draws a coupled sweep over the two of its layers, one trial a layer."""
    return 2 * (made["trials"] - 1)


def _wrapped(method: str, runs: int) -> str:
    """A name in lines, and how many runs there are."""
    return textwrap.fill(f"{method} ({runs} seed{'s' if runs > 1 else ''})", 34)


def curves(
    runs: dict[tuple[str, int], xr.Dataset], labels: Mapping[str, str], best: float, path: Path
) -> None:
    """Log-likelihood, meeting times, discarded draws and variances against the step: medians, and bands from
    10 to 90 %.

    Dotted where fewer than half of a method's runs go on.
    """
    import matplotlib

    matplotlib.use("agg")

    coupled = any("meeting_time_mean" in made for made in runs.values())
    varied = any("variance" in made for made in runs.values())
    figure, axes = style.grid(1 + 2 * coupled + varied, (5.4, 3.9), ncols=2)
    lowest = math.inf
    for index, method in enumerate(dict.fromkeys(m for m, _ in runs)):
        label, own = labels[method], [made for (m, _), made in runs.items() if m == method]
        many = f", {len(own)} seeds" if len(own) > 1 else ""
        look = {**style.look(index), "linewidth": 1.3, "label": label + many}
        _band(axes[0], own, "monitor_step", lambda made: made["log_likelihood"].values, look)
        lowest = min(lowest, *(float(made["log_likelihood"].min()) for made in own))
        if "meeting_time_mean" in own[0]:  # the lag's sweeps are not coupled
            waited = lambda made: _smooth((made["meeting_time_mean"] - made["lag"]).values)
            _band(axes[1], own, "step", waited, look)
            _band(axes[2], own, "step", lambda made: _smooth(discarded(made).values), look)
        own = [made for made in own if "variance" in made]
        if own:
            _band(axes[-1], own, "variance_step", lambda made: made["variance"].values, look)
    _likelihoods(axes[0], best, lowest)
    axes[0].set(ylabel="total log-likelihood of the 32 rows (nats)")
    if coupled:
        far = axes[1].dataLim.y1 > 10
        axes[1].set(ylabel="sweeps to meet, after the lag, mean", yscale="log" if far else "linear")
        axes[2].set(ylabel="discarded draws a coupled sweep")
    if varied:
        axes[-1].set(ylabel="variance of a gradient (trace)", yscale="log")
    for ax in axes:
        ax.set_xlabel("step")
        style.tidy(ax)
    style.legend_below(figure, axes, ncols=3)
    figure.savefig(path, dpi=110)


def _band(ax: Any, runs: list[xr.Dataset], x: str, of: Callable, look: dict[str, Any]) -> None:
    """The median of runs, as far as half of them go, and where 80 % of them are; the longer ones' median."""
    values = [of(made) for made in runs]
    steps = max((made[x].values for made in runs), key=len)
    full = np.full((len(runs), len(steps)), np.nan)
    for row, v in zip(full, values, strict=True):
        row[: len(v)] = v
    there = np.isfinite(full).sum(0) * 2 >= len(runs)
    low, middle, high = np.nanquantile(full[:, there], [0.1, 0.5, 0.9], axis=0)
    ax.plot(steps[there], middle, **look)
    if len(runs) > 1:
        ax.fill_between(steps[there], low, high, color=look["color"], alpha=0.15, linewidth=0)
    beyond = np.isfinite(full).any(0) & ~there
    if beyond.any():
        ax.plot(steps[beyond], np.nanmedian(full[:, beyond], axis=0), color=look["color"], linestyle=":")


def _smooth(y: np.ndarray, window: int = 20) -> np.ndarray:
    """Means over the ``window`` steps before; fewer at the beginning."""
    first = int(np.argmax(np.isfinite(y)))  # a part without meeting times comes before
    before, y = y[:first], y[first:]
    sums = np.concatenate([[0.0], np.cumsum(y)])
    end = np.arange(1, len(y) + 1)
    start = np.maximum(end - window, 0)
    return np.concatenate([before, (sums[end] - sums[start]) / (end - start)])
