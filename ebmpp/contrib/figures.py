# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Legends and axes of the figures of experiments; see :mod:`ebmpp.diagnostics.style`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def legend_below(
    figure: "Figure", axes: "Axes | np.ndarray", ncols: int, **others: Any
) -> None:
    """Add one legend for several axes below them, with each name once."""
    handles: dict[str, Any] = {}
    for ax in np.ravel(np.asarray(axes, dtype=object)):
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    options: dict[str, Any] = {
        "loc": "outside lower center",
        "frameon": False,
        "fontsize": 8,
    }
    options |= {"handlelength": 3.2} | others
    figure.legend(list(handles.values()), list(handles), ncols=ncols, **options)


def below(
    ax: "Axes", top: float, ticks: "Sequence[float]", across: bool = False
) -> None:
    """Make the distance below ``top`` logarithmic on an axis, for log-likelihoods of any size.

    :param top: a number above all values.
    :param ticks: values of the ticks.
    :param across: change the horizontal axis instead of the vertical one.
    """
    from matplotlib.ticker import NullFormatter, NullLocator

    axis, scale = (ax.xaxis, ax.set_xscale) if across else (ax.yaxis, ax.set_yscale)

    def forward(y):
        return -np.log(np.maximum(top - y, 1e-30))

    def inverse(z):
        return top - np.exp(-z)

    scale("function", functions=(forward, inverse))
    axis.set_ticks(list(ticks), [f"{t:g}" for t in ticks])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
