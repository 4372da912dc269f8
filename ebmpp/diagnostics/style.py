# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How pictures look: one set of colours, lines and marks, and where a legend stands.

The colours are those of Okabe and Ito, with brown in place of yellow: colour-blind readers tell them apart;
in print a line is known by its dashes and marks, of which no two of the first eight are the same.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Blue, vermillion, green, black, purple, sky blue, orange and brown.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#1A202C", "#CC79A7", "#56B4E9", "#E69F00", "#6B4C1E")
#: As dashes on and off, in widths of the line; None is an unbroken one.
DASHES = (None, (5, 1.5), (1, 1), (7, 1.5, 1.5, 1.5), (3, 1), (9, 2), (3, 1, 1, 1, 1, 1), (2, 2.5))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
#: Of lines that something is compared with.
INK, FAINT = "#1A202C", "#9AA5B1"


def look(index: int) -> dict[str, Any]:
    """The colour and dashes of the curve of that number, in matplotlib's words.

    After eight a colour comes again, with other dashes.

    **Example**

    >>> look(0)
    {'color': '#0072B2', 'linestyle': 'solid'}
    >>> look(1)["linestyle"]
    (0, (5, 1.5))
    """
    return {"color": COLORS[index % len(COLORS)], "linestyle": dashes(index + index // len(COLORS))}


def dashes(index: int) -> Any:
    """The line of that number, for curves whose colour means something else."""
    pattern = DASHES[index % len(DASHES)]
    return "solid" if pattern is None else (0, pattern)


def marker(index: int) -> str:
    """The mark of that number."""
    return MARKERS[index % len(MARKERS)]


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

    :param legend: whether there is one: beside the axes, where no curve can lie under it. ``place`` is
        another place, in matplotlib's words.
    """
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    if legend:
        where: dict[str, Any] = place or {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        ax.legend(frameon=False, fontsize=8, handlelength=3.2, **where)


def legend_below(figure: "Figure", axes: "Axes | np.ndarray", ncols: int, **others: Any) -> None:
    """One legend for several axes, under all of them, each name once."""
    named: dict[str, Any] = {}
    for ax in np.ravel(np.asarray(axes, dtype=object)):
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    looks: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 8}
    looks |= {"handlelength": 3.2} | others
    figure.legend(list(named.values()), list(named), ncols=ncols, **looks)


def below(ax: "Axes", top: float, ticks: "Sequence[float]", across: bool = False) -> None:
    """An axis on which the distance below ``top`` is logarithmic: log-likelihoods of any size, and none cut.

    :param top: above every value.
    :param ticks: where numbers stand.
    :param across: the horizontal axis in place of the vertical one.
    """
    from matplotlib.ticker import NullFormatter, NullLocator

    there, back = lambda y: -np.log(np.maximum(top - y, 1e-30)), lambda z: top - np.exp(-z)
    scale, place, axis = (
        (ax.set_xscale, ax.set_xticks, ax.xaxis) if across else (ax.set_yscale, ax.set_yticks, ax.yaxis)
    )
    scale("function", functions=(there, back))
    place(list(ticks), [f"{t:g}" for t in ticks])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
