# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What pictures are drawn on: axes in a grid, and how they look.

Plain matplotlib (the extra ``plots``), which is imported when something is drawn.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#718096")


def grid(
    count: int, size: tuple[float, float] = (4.2, 3.1), ncols: int | None = None, shown: bool = False
) -> "tuple[Figure, np.ndarray]":
    """A figure with so many axes, in a row or in ``ncols`` columns.

    :param size: width and height of each.
    :param shown: whether pyplot knows of it, as a notebook or a window that shows it must.
    """
    from matplotlib import figure, pyplot

    ncols = count if ncols is None else min(count, ncols)
    nrows = -(-count // ncols)
    make = pyplot.figure if shown else figure.Figure
    made = make(figsize=(size[0] * ncols, size[1] * nrows), layout="constrained")
    return made, np.array([made.add_subplot(nrows, ncols, i + 1) for i in range(count)], dtype=object)


def shown(size: tuple[float, float] = (4.4, 3.2)) -> "Axes":
    """The only axes of a new figure."""
    return grid(1, size, shown=True)[1][0]


def tidy(ax: "Axes", legend: bool = False, **place: Any) -> None:
    """No box around it, and a pale grid.

    :param legend: whether there is one; ``place`` is where, in matplotlib's words.
    """
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    if legend:
        ax.legend(frameon=False, fontsize=8, **place)
