# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The pictures of ``image_quality.py``."""

from collections.abc import Callable, Sequence
from pathlib import Path
import textwrap
from typing import Any

import numpy as np

import ebmpp
from ebmpp.diagnostics import style

COLUMNS, LINES = 10, 2
"""Of images shown as drawn, and as many with pixels at their modes."""

Run = dict[str, Any]
_PARTS = {"drawn": "as drawn", "modes": "pixels at their modes"}


def shown(drawn: np.ndarray, modes: np.ndarray) -> list[list[int]]:
    """The first images as drawn, and as many with pixels at their modes."""
    count = COLUMNS * LINES
    return np.concatenate([drawn[:count], modes[:count]]).astype(int).tolist()


def images(runs: Sequence[Run], label: Callable[[Run], str], told: str, path: Path) -> None:
    """Images of each, with the distances."""
    import matplotlib

    matplotlib.use("agg")

    figure, axes = style.grid(len(runs), (4.7, 2.25), ncols=2)
    for ax, made in zip(axes, runs, strict=True):
        ax.axis("off")
        rows = np.array(made["shown"], float)
        side = round(rows.shape[1] ** 0.5)
        ebmpp.plots.plot_units(rows, (side, side), ncols=COLUMNS, ax=ax)
        distance = f"{made['drawn']['distance']:.1f}"
        distance += f"; pixels at modes {made['modes']['distance']:.1f}" if "modes" in made else ""
        ax.set_title(f"{label(made)}\ndistance {distance}", fontsize=9, loc="left")
    figure.suptitle(
        f"{told}\nUpper two lines as drawn, lower two the same with pixels at their modes", fontsize=9
    )
    figure.savefig(path, dpi=110)


def distances(runs: Sequence[Run], label: Callable[[Run], str], told: str, path: Path) -> None:
    """The distance of every method and sampler, with two standard errors; and what training cost.

    :param runs: as they are kept.
    """
    import matplotlib

    matplotlib.use("agg")

    figure, (left, right) = style.grid(2, (5.6, 1.4 + 0.36 * len(runs)))
    for place, made in enumerate(runs):
        for index, (part, name) in enumerate(_PARTS.items()):
            if part not in made:
                continue
            look = {"color": style.COLORS[index], "marker": style.marker(index), "linestyle": "none"}
            look |= {"markersize": 6, "markerfacecolor": "white", "label": name}
            value, error = made[part]["distance"], 2 * made[part]["error"]
            left.errorbar(value, place + 0.16 * (2 * index - 1), xerr=error, capsize=2, **look)
            if "train_seconds" in made:
                right.errorbar(made["train_seconds"], value, yerr=error, capsize=2, **look)
        if "train_seconds" in made:
            at = made["train_seconds"], made["drawn"]["distance"]
            right.annotate(
                f"{place + 1}", at, xytext=(7, 4), textcoords="offset points", fontsize=8, color=style.INK
            )
    names = [textwrap.fill(f"{place + 1}  {label(made)}", 40) for place, made in enumerate(runs)]
    left.set_yticks(range(len(runs)), names, fontsize=8)
    left.invert_yaxis()
    told_distance = "Frechet distance from held-out images,\nin a small classifier's features (not the FID)"
    left.set_xlabel(told_distance)
    right.set(xlabel="seconds of training", xscale="log", yscale="log", ylabel=told_distance)
    right.set_title("what it cost; numbers as on the left", fontsize=9)
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
        axis.set_tick_params(labelsize=8, which="both")
    for ax in (left, right):
        style.tidy(ax)
    figure.suptitle(f"{told}; bars: two standard errors over samples", fontsize=9)
    style.legend_below(figure, left, ncols=2)
    figure.savefig(path, dpi=120)
