# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Colours, lines, markers and legends of all figures.

The colours are the palette of Okabe and Ito for colour-blind readers, with brown in
place of yellow. The first eight lines also differ in dashes and markers, for print.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Options of matplotlib's lines.
LineStyle = dict[str, Any]
Dashes = str | tuple[int, tuple[float, ...]]

#: Blue, vermillion, green, black, purple, sky blue, orange and brown.
COLORS = "#0072B2 #D55E00 #009E73 #1A202C #CC79A7 #56B4E9 #E69F00 #6B4C1E".split()
#: Lengths of dashes and gaps in line widths; None is a solid line.
DASHES = (
    None,
    (5, 1.5),
    (1, 1),
    (7, 1.5, 1.5, 1.5),
    (3, 1),
    (9, 2),
    (3, 1, 1, 1, 1, 1),
    (2, 2.5),
)
MARKERS = "os^DvPX*"
#: Colours of reference lines.
INK = "#1A202C"
FAINT = "#9AA5B1"


def look(index: int) -> LineStyle:
    """Return the colour and style of a curve by its number; colours are repeated after eight.

    >>> look(0)
    {'color': '#0072B2', 'linestyle': 'solid'}
    >>> look(1)["linestyle"]
    (0, (5, 1.5))
    """
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": dashes(index + index // len(COLORS)),
    }


def dashes(index: int) -> Dashes:
    """Return a line style by number, for curves whose colour has another meaning."""
    pattern = DASHES[index % len(DASHES)]
    return "solid" if pattern is None else (0, pattern)


def marker(index: int) -> str:
    """Return a marker by number."""
    return MARKERS[index % len(MARKERS)]


def grid(
    count: int,
    size: tuple[float, float] = (4.2, 3.1),
    ncols: int | None = None,
    pyplot: bool = False,
) -> "tuple[Figure, np.ndarray]":
    """Return a figure with ``count`` axes of one size, in a row or in ``ncols`` columns."""
    from matplotlib import figure as figures, pyplot as plt

    ncols = count if ncols is None else min(count, ncols)
    nrows = -(-count // ncols)
    make = plt.figure if pyplot else figures.Figure
    figure = make(figsize=(size[0] * ncols, size[1] * nrows), layout="constrained")
    axes = [figure.add_subplot(nrows, ncols, i + 1) for i in range(count)]
    return figure, np.array(axes, dtype=object)


def new_axes(size: tuple[float, float] = (4.4, 3.2)) -> "Axes":
    """Return the only axes of a new figure of pyplot."""
    return grid(1, size, pyplot=True)[1][0]


def tidy(ax: "Axes", legend: bool = False, **place: object) -> None:
    """Remove the box, add a pale grid, and a legend beside the axes or at ``place``."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    if legend:
        options: dict[str, Any] = place or {
            "loc": "upper left",
            "bbox_to_anchor": (1.0, 1.0),
        }
        ax.legend(frameon=False, fontsize=8, handlelength=3.2, **options)
