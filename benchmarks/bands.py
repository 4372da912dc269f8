# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Curves of several runs as a median with a band, in colours that differ for everybody, legend below."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Okabe and Ito (2008): told apart whatever the eye, and in grey by their order
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#999999")


def new(panels: int, width: float = 5.2, height: float = 4.4) -> tuple[Any, Any]:
    """A figure and its axes, side by side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    size = (width * panels, height)
    figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    return figure, axes[0]


def band(ax: Any, x: Sequence, runs: Sequence[np.ndarray], **style: Any) -> None:
    """The median of runs at x, and from the least to the largest of them; as far as the longest goes."""
    full = np.full((len(runs), max(map(len, runs))), np.nan)
    for row, values in zip(full, runs, strict=True):
        row[: len(values)] = values
    there = np.isfinite(full).any(0)
    at, full = np.asarray(x)[: full.shape[1]][there], full[:, there]
    ax.plot(at, np.nanmedian(full, axis=0), linewidth=1.4, **style)
    if len(runs) > 1:
        low, high = np.nanmin(full, axis=0), np.nanmax(full, axis=0)
        ax.fill_between(at, low, high, color=style["color"], alpha=0.16, linewidth=0)


def save(figure: Any, axes: Sequence[Any], path: Path, note: str, columns: int = 3) -> None:
    """With one legend for all axes under them, and what the bands are."""
    from matplotlib import pyplot as plt

    entries: dict[str, Any] = {}
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        entries.values(),
        entries,
        frameon=False,
        ncols=columns,
        loc="outside lower center",
        fontsize=8,
        title=note,
        title_fontsize=8,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
