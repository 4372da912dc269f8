# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Plots of filters and samples, of training, and of meeting times.

They need matplotlib (the extra ``plots``), which is imported when something is drawn.
"""

from collections.abc import Iterable
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from jax.typing import ArrayLike

from ebmpp.core import checks
from ebmpp.diagnostics.meeting import (
    MeetingSource,
    meeting_data,
    survival,
    tv_upper_bound,
)
from ebmpp.diagnostics.style import LineStyle, grid, look, new_axes, tidy
from ebmpp.estimators.base import COLUMNS, column_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_units(
    images: ArrayLike,
    shape: tuple[int, int] | None = None,
    *,
    ncols: int | None = None,
    ax: "Axes | None" = None,
    colorbar: bool = True,
) -> "Axes":
    """Draw a grid of images: filters (weights), samples or means.

    Values within [0, 1] are drawn from white to black. Other values are drawn from red
    to blue on a scale symmetric about 0 and common to all images, so that filters can
    be compared.

    :param images: shape ``(count, height, width)``, or ``(count, height * width)`` with
        ``shape``; for the weights of a factor "v:h", ``params["v:h"].T``.
    :param shape: ``(height, width)``; None for square images.
    :param ncols: images per line; None for an approximately square grid.
    :param ax: axes to draw into; None for a new figure.
    :param colorbar: show the scale of values outside [0, 1].
    :raises ArgumentError: images of another shape, or no images.

    **Example**

    >>> plot_units(np.eye(4), shape=(2, 2), ncols=2).images[0].get_array().shape
    (7, 7)
    """
    from matplotlib import colormaps

    tiles = np.asarray(checks.numbers("images", images), float)
    if shape is None and tiles.ndim == 2:
        side = math.isqrt(tiles.shape[1])
        shape = (side, side)
    elif shape is None and tiles.ndim == 3:
        shape = tiles.shape[1:]
    is_grid = shape is not None and tiles.ndim > 1 and tiles.size
    if not is_grid or tiles[0].size != math.prod(shape):
        raise checks.error(
            "images",
            "of shape (count, height, width), or (count, pixels) with shape=(height, "
            f"width), not {shape}",
            tiles.shape,
            hint="Weights may need a transpose.",
        )
    height, width = shape
    tiles = tiles.reshape(-1, height, width)
    count = len(tiles)
    square = math.ceil(math.sqrt(count * height / width))
    ncols = square if ncols is None else min(ncols, count)
    nrows = math.ceil(count / ncols)
    # one line of nan, drawn in grey, around each image
    padded = np.pad(
        tiles, ((0, nrows * ncols - count), (1, 0), (1, 0)), constant_values=np.nan
    )
    mosaic = padded.reshape(nrows, ncols, height + 1, width + 1).swapaxes(1, 2)
    mosaic = mosaic.reshape(nrows * (height + 1), ncols * (width + 1))
    mosaic = np.pad(mosaic, ((0, 1), (0, 1)), constant_values=np.nan)
    if ax is None:
        size = np.array([ncols, nrows * height / width])
        ax = new_axes(tuple(np.clip(0.25 + 0.7 * size, 2.0, 10.0)))
    finite = tiles[np.isfinite(tiles)]
    is_unit = bool(finite.size) and finite.min() >= 0 and finite.max() <= 1
    reach = max(float(np.abs(finite).max(initial=0.0)), 1e-12)
    cmap = colormaps["gray_r" if is_unit else "RdBu"].with_extremes(bad="#d9dee3")
    low, high = (0, 1) if is_unit else (-reach, reach)
    image = ax.imshow(mosaic, interpolation="nearest", cmap=cmap, vmin=low, vmax=high)
    if colorbar and not is_unit:
        ax.figure.colorbar(image, ax=ax, shrink=0.7, pad=0.02)
    ax.axis("off")
    return ax


def plot_history(
    history: object, *, axes: Iterable["Axes"] | None = None
) -> np.ndarray:
    """Draw learning curves: a panel per monitor and metric, and one for meeting times.

    Costs and settings of the estimator, such as ``sweeps`` and ``k``, are in the
    history only.

    :param history: a fit, or its ``history``: an xarray Dataset over ``step`` (and
        ``monitor_step``).
    :param axes: one per panel; None for a new figure.
    :return: the axes, one-dimensional.
    :raises ArgumentError: another type, a history without curves, or too few axes.

    **Example**

    >>> norm = xr.Dataset({"gradient_norm": ("step", [3.0, 2.0, 1.0])}, {"step": [0, 1, 2]})
    >>> [ax.get_ylabel() for ax in plot_history(norm)]
    ['gradient norm']
    """
    dataset, variables = panels("history", history)
    count = len(variables)
    if axes is None:
        axes = grid(count, (3.6, 2.6), ncols=2 if count == 4 else 3, pyplot=True)[1]
    axes = np.asarray(axes, dtype=object).ravel()
    if not len(axes) >= count:
        raise checks.error("number of axes", f"{count}, one per panel", len(axes))
    for ax, (label, names) in zip(axes, variables.items()):
        _plot_curves(ax, dataset, label, names)
    return axes[:count]


def panels(argument: str, fit: object) -> tuple[xr.Dataset, dict[str, list[str]]]:
    """Return a history, and the variables in each panel of :func:`plot_history` by label.

    Monitors come first, then the gradient norm and other metrics, then meeting times.
    Costs and settings of an estimator are left out.
    """
    history: Any = getattr(fit, "history", fit)
    expected = "a fit or its history, with variables over steps"
    checks.instance(argument, history, xr.Dataset, expected)
    numeric = []
    for name, values in history.data_vars.items():
        over_time = values.ndim == 1 and str(values.dims[0]).endswith("step")
        is_empty = str(name).endswith("num_unmet") and not values.any()
        if over_time and values.dtype.kind in "fiub" and not is_empty:
            numeric.append(str(name))
    monitors = [n for n in numeric if "monitor_step" in history[n].dims]
    metrics = [n for n in numeric if n not in monitors]
    result = {n.replace("_", " "): [n] for n in monitors}
    for name in metrics:
        column = column_of(name)
        if column.panel == "own":
            result[column.label] = [name]
    meeting = [n for n in COLUMNS if n in metrics and COLUMNS[n].panel == "meeting"]
    if meeting:
        result["meeting time (sweeps)"] = meeting
    if not result:
        raise checks.error(argument, expected, type(history))
    return history, result


def _plot_curves(ax: "Axes", history: xr.Dataset, label: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        curve = history[name]
        dim = curve.dims[0]
        steps = history[dim].values if dim in history.coords else np.arange(curve.size)
        legend = column_of(name).label if len(names) > 1 else None
        style = look(index)
        y = curve.values.astype(float)
        window = curve.size // 50
        if name == "lag" or window < 2:
            (line,) = ax.plot(steps, y, linewidth=1.4, label=legend, **style)
            if name == "lag":
                line.set_drawstyle("steps-post")
            elif len(y) <= 30:
                line.set(marker="o", markersize=3)
        else:  # noisy steps are drawn pale, with their running mean on top
            ax.plot(steps, y, color=style["color"], linewidth=0.6, alpha=0.3)
            mean = np.convolve(y, np.ones(window) / window, mode="valid")
            ax.plot(steps[window - 1 :], mean, linewidth=1.6, label=legend, **style)
    if label.startswith("meeting") and any((history[n] > 0).any() for n in names):
        ax.set_yscale("log")
    ax.set(xlabel="step", ylabel=label)
    tidy(ax, legend=len(names) > 1)


def plot_meeting_times(
    times: MeetingSource | ArrayLike,
    lag: int = 1,
    met: ArrayLike | None = None,
    *,
    ax: "Axes | None" = None,
    label: str | None = None,
    **line: object,
) -> "Axes":
    """Draw the survival curve P(tau > t) of meeting times on a logarithmic axis.

    The estimate is that of Kaplan and Meier (1958), with unmet pairs as right-censored.
    If there are unmet pairs, the curve ends at the last sweep, and a tick marks the
    last sweep of each. A straight line is a geometric tail.

    :param times: meeting times of any shape (the last sweep of an unmet pair), a
        DataTree with the group ``meeting``, or an estimate.
    :param lag: lag of the pairs for the axis label, which curves of several lags leave
        out; a DataTree or estimate has its own.
    :param met: False for unmet pairs, in the shape of ``times``; None if all pairs met.
    :param ax: axes to draw into; None for a new figure.
    :param label: legend entry, shown beside the axes.
    :param line: matplotlib's ``color``, ``linestyle`` and so on. By default up to eight
        curves in the same axes differ in both.
    :raises ArgumentError: no times, times that are not finite, or ``met`` of another
        shape.

    **Example**

    >>> ax = plot_meeting_times([1, 2, 2, 5], met=[True, True, True, False])
    >>> ax.lines[0].get_ydata().tolist()
    [1.0, 0.75, 0.25, 0.25]
    """
    if isinstance(times, MeetingSource):
        times, met, lag = meeting_data(times)
    times = np.asarray(times, float)
    met = np.ones(times.shape, bool) if met is None else np.asarray(met, bool)
    bad = (~np.isfinite(times)).sum()
    if not times.size or met.shape != times.shape or bad:
        raise checks.error(
            "times",
            f"at least one, finite, and of the shape of met {met.shape}",
            f"shape {times.shape}, {bad} of {times.size} not finite",
            hint="Pass met=False for unmet pairs.",
        )
    times = times.ravel()
    met = met.ravel()
    t = np.union1d([0.0], times)
    alive = survival(times, met, t)
    ax = new_axes() if ax is None else ax
    floor = 0.5 / len(times)  # a logarithmic axis has no zero
    style: dict[str, Any] = _next_look(ax) | {"linewidth": 1.6} | line
    height = np.where(alive > 0, alive, floor)
    (curve,) = ax.step(t, height, where="post", label=label, **style)
    if not met.all():
        censored = np.unique(times[~met])
        at = np.searchsorted(t, censored, side="right") - 1
        (ticks,) = ax.plot(censored, alive[at], "|", color=curve.get_color())
        ticks.set(markersize=9, markeredgewidth=1.4)
    _annotate_unmet(ax, label, (~met).sum(), len(met))
    ax.set_yscale("log")
    bottom = floor * 1.05
    if len(ax.lines) > 2:
        bottom = min(bottom, ax.get_ylim()[0])
    ax.set_ylim(bottom, 1.3)
    ax.set_xlim(left=0, auto=True)  # the right end adapts to later, longer curves
    name = f"t (sweeps, lag {lag})"
    if ax.get_xlabel() not in ("", name):
        name = "t (sweeps)"  # curves of several lags
    ax.set(xlabel=name, ylabel=r"$P(\tau > t)$")
    tidy(ax, legend=label is not None)
    return ax


def _annotate_unmet(ax: "Axes", label: str | None, unmet: int, pairs: int) -> None:
    """Add the number of unmet pairs, if any, on the right, away from the curve's end."""
    if unmet:
        text = f"{unmet} of {pairs} pairs unmet"
        if label:
            text = f"{label}: {text}"
        offset = 0.05 + 0.07 * len(ax.texts)
        is_high = 4 * unmet <= pairs
        ax.annotate(
            text,
            (0.97, 1 - offset if is_high else offset),
            xycoords="axes fraction",
            ha="right",
            va="top" if is_high else "bottom",
            fontsize=8,
        )


def _next_look(ax: "Axes") -> LineStyle:
    return look(sum(line.get_drawstyle() == "steps-post" for line in ax.lines))


def plot_tv_bound(
    source: MeetingSource | xr.Dataset,
    *,
    ax: "Axes | None" = None,
    label: str | None = None,
) -> "Axes":
    """Draw an upper bound on the distance to stationarity against sweeps, with its band.

    :param source: a DataTree with the group ``meeting`` or an estimate (for the total
        variation bound), or the result of :func:`~ebmpp.tv_upper_bound` or
        :func:`~ebmpp.diagnostics.wasserstein_upper_bound`.
    :param ax: axes to draw into; None for a new figure.
    :param label: legend entry.
    :raises ArgumentError: a source without meeting times.

    **Example**

    >>> names = ("bound", "lower", "upper")
    >>> bound = xr.Dataset({name: ("t", [1.0, 0.2]) for name in names}, {"t": [0, 1]})
    >>> plot_tv_bound(bound).lines[0].get_ydata().tolist()
    [1.0, 0.2]
    """
    bound = source
    distance = "distance to stationarity"
    if not isinstance(bound, xr.Dataset):
        bound = tv_upper_bound(bound)
        distance = "total variation distance"
    ax = new_axes() if ax is None else ax
    t = bound["t"].values
    height = bound["bound"].values
    (line,) = ax.plot(t, height, linewidth=1.6, label=label, **_next_look(ax))
    line.set_drawstyle("steps-post")
    low = bound["lower"].values
    high = bound["upper"].values
    band = ax.fill_between(t, low, high, step="post")
    band.set(color=line.get_color(), alpha=0.2, linewidth=0)
    _annotate_unmet(ax, label, bound.attrs.get("unmet", 0), bound.attrs.get("pairs", 0))
    lag = f", lag {bound.attrs['lag']}" if "lag" in bound.attrs else ""
    ax.set_ylim(bottom=0)
    ax.set(xlabel=f"t (sweeps{lag})", ylabel=f"{distance}, at most")
    tidy(ax, legend=label is not None)
    return ax
