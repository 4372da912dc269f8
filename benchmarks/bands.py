# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Curves of several runs as a median with a band."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def band(ax: Any, x: Sequence, runs: Sequence[np.ndarray], **look: Any) -> None:
    """The median of runs at x, and from the least to the largest of them; as far as the longest goes."""
    full = np.full((len(runs), max(map(len, runs))), np.nan)
    for row, values in zip(full, runs, strict=True):
        row[: len(values)] = values
    there = np.isfinite(full).any(0)
    at, full = np.asarray(x)[: full.shape[1]][there], full[:, there]
    ax.plot(at, np.nanmedian(full, axis=0), **look)
    if len(runs) > 1:
        low, high = np.nanmin(full, axis=0), np.nanmax(full, axis=0)
        ax.fill_between(at, low, high, color=look["color"], alpha=0.16, linewidth=0)


def over(seeds: int) -> str:
    """What bands are."""
    return f"medians, and the range over {seeds} seeds" if seeds > 1 else "one seed"
