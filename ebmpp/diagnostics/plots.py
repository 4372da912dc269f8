# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of filters and samples, of training, and of meeting times.

Plain matplotlib (the extra ``plots``), which is imported when something is drawn.
"""

from collections.abc import Iterable
import math
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Float, Real
import numpy as np
import xarray as xr

from ebmpp.core import checks
from ebmpp.diagnostics.meeting import meeting_data, survival, tv_upper_bound
from ebmpp.diagnostics.style import grid, look, shown, tidy
from ebmpp.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEETING = ("meeting_time_mean", "meeting_time_max", "lag")
_TITLES = {"gradient_norm": "gradient norm", "num_unmet": "unmet pairs"}


def plot_units(
    images: Any,
    shape: tuple[int, int] | None = None,
    *,
    ncols: int | None = None,
    ax: "Axes | None" = None,
    colorbar: bool = True,
) -> "Axes":
    """A grid of images: filters (weights), samples or means.

    Values within [0, 1] are shown white to black; others red to blue on a scale symmetric about 0,
    the same for every image, so that filters can be compared.

    :param images: shape ``(count, height, width)``, or ``(count, height * width)`` with ``shape``
        (for the weights of a factor "v:h", pass ``params["v:h"].T``).
    :param shape: ``(height, width)``; a square if None and the images are vectors.
    :param ncols: images a row; about a square if None.
    :param ax: where to; a new figure if None.
    :param colorbar: whether to show the scale of values outside [0, 1].
    :raises ArgumentError: when ``images`` does not have that many values an image, or none.

    **Example**

    >>> plot_units(np.eye(4), shape=(2, 2), ncols=2).images[0].get_array().shape
    (7, 7)
    """
    from matplotlib import colormaps

    tiles = _as_images(np.asarray(checks.numbers("images", images), float), shape)
    count, height, width = tiles.shape
    ncols = math.ceil(math.sqrt(count * height / width)) if ncols is None else min(ncols, count)
    nrows = math.ceil(count / ncols)
    mosaic = _mosaic(tiles, nrows, ncols)
    if ax is None:
        size = (min(10, 0.25 + 0.7 * ncols), min(10, 0.25 + 0.7 * nrows * height / width))
        ax = shown((max(2.0, size[0]), max(2.0, size[1])))
    finite = tiles[np.isfinite(tiles)]
    unit = bool(finite.size) and finite.min() >= 0 and finite.max() <= 1
    reach = max(float(np.abs(finite).max(initial=0.0)), 1e-12)
    cmap = colormaps["gray_r" if unit else "RdBu"].with_extremes(bad="#d9dee3")
    low, high = (0, 1) if unit else (-reach, reach)
    image = ax.imshow(mosaic, interpolation="nearest", cmap=cmap, vmin=low, vmax=high)
    if colorbar and not unit:
        ax.figure.colorbar(image, ax=ax, shrink=0.7, pad=0.02)
    ax.axis("off")
    return ax


def _as_images(
    images: Float[np.ndarray, "..."], shape: tuple[int, int] | None
) -> Float[np.ndarray, "count height width"]:
    if shape is None and images.ndim == 2:
        side = math.isqrt(images.shape[1])
        shape = (side, side) if side * side == images.shape[1] else None
    if shape is None:
        if images.ndim == 3 and images.size:
            return images
        raise ArgumentError(
            f"images have shape {images.shape}, expected (count, height, width), or (count, pixels) and "
            "shape=(height, width)"
        )
    if images.ndim < 2 or not images.size or images[0].size != math.prod(shape):
        raise ArgumentError(
            f"images have shape {images.shape}, expected (count, {math.prod(shape)}) for shape={shape}; "
            "weights may need a transpose"
        )
    return images.reshape(-1, *shape)


def _mosaic(
    tiles: Float[np.ndarray, "count height width"], nrows: int, ncols: int
) -> Float[np.ndarray, "rows columns"]:
    """Images side by side, with a line of nan (drawn in grey) around each."""
    _, height, width = tiles.shape
    made = np.full((nrows * (height + 1) + 1, ncols * (width + 1) + 1), np.nan)
    for index, tile in enumerate(tiles):
        top, left = index // ncols * (height + 1) + 1, index % ncols * (width + 1) + 1
        made[top : top + height, left : left + width] = tile
    return made


def plot_history(history: Any, *, axes: Iterable["Axes"] | None = None) -> np.ndarray:
    """Learning curves: a panel a monitor, one for the gradient norm, one for meeting times.

    :param history: a fit, or its ``history``: an xarray Dataset over ``step`` (and, for monitors,
        ``monitor_step``).
    :param axes: as many as there are panels, or a new figure if None.
    :return: the axes, an array of one dimension.
    :raises ArgumentError: for anything else, a history with nothing to draw, or too few axes.

    **Example**

    >>> norm = xr.Dataset({"gradient_norm": ("step", [3.0, 2.0, 1.0])}, {"step": [0, 1, 2]})
    >>> [ax.get_ylabel() for ax in plot_history(norm)]
    ['gradient norm']
    """
    history = getattr(history, "history", history)
    if not isinstance(history, xr.Dataset):
        raise ArgumentError(f"plot_history takes a fit or its history, not {type(history).__name__}")
    wanted = panels(history)
    if not wanted:
        raise ArgumentError(f"nothing to draw: the history has {list(history.data_vars)} and no step axis")
    axes = _panel_axes(len(wanted), axes)
    for ax, (label, names) in zip(axes, wanted.items(), strict=False):
        _plot_curves(ax, history, label, names)
    return axes


def panels(history: xr.Dataset) -> dict[str, list[str]]:
    """What :func:`plot_history` draws, a list of variables by label.

    Monitors first, then the gradient norm, then what meeting tells.
    """
    each = {str(n): v for n, v in history.data_vars.items()}
    over_time = [n for n, v in each.items() if v.ndim == 1 and str(v.dims[0]).endswith("step")]
    numeric = [n for n in over_time if history[n].dtype.kind in "fiub"]
    # A count of failures that are none is not worth a panel.
    numeric = [n for n in numeric if not (n.endswith("num_unmet") and not history[n].any())]
    monitors = [n for n in numeric if "monitor_step" in history[n].dims]
    others = [n for n in numeric if n not in monitors and n not in _MEETING]
    panels = {n.replace("_", " "): [n] for n in monitors}
    panels |= {_TITLES.get(n, n.replace("_", " ")): [n] for n in others}
    meeting = [n for n in _MEETING if n in numeric]
    return panels | ({"meeting time (sweeps)": meeting} if meeting else {})


def _panel_axes(count: int, axes: Iterable["Axes"] | None) -> np.ndarray:
    if axes is None:
        return grid(count, (3.6, 2.6), ncols=2 if count == 4 else 3, shown=True)[1]
    axes = np.atleast_1d(np.asarray(axes, dtype=object)).ravel()
    if len(axes) < count:
        raise ArgumentError(f"plot_history got {len(axes)} axes, expected {count}")
    return axes[:count]


def _plot_curves(ax: "Axes", history: xr.Dataset, label: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        curve = history[name]
        dim = curve.dims[0]
        steps = history[dim].values if dim in history.coords else np.arange(curve.size)
        legend = name.removeprefix("meeting_time_") if len(names) > 1 else None
        style = look(index) | ({"drawstyle": "steps-post"} if name == "lag" else {})
        _plot_curve(ax, steps, curve.values.astype(float), legend, **style)
    if label.startswith("meeting") and any((history[n] > 0).any() for n in names):
        ax.set_yscale("log")
    ax.set(xlabel="step", ylabel=label)
    tidy(ax, legend=len(names) > 1)


def _plot_curve(ax: "Axes", steps: np.ndarray, y: np.ndarray, label: str | None, **style: Any) -> None:
    window = len(y) // 50
    stepped = "drawstyle" in style
    if window < 2 or stepped:
        markers: dict[str, Any] = {"marker": "o", "markersize": 3} if len(y) <= 30 and not stepped else {}
        ax.plot(steps, y, linewidth=1.4, label=label, **markers, **style)
        return
    # A curve of thousands of noisy steps is a band: show it pale, and its running mean on top.
    ax.plot(steps, y, color=style["color"], linewidth=0.6, alpha=0.3)
    mean = np.convolve(y, np.ones(window) / window, mode="valid")
    ax.plot(steps[window - 1 :], mean, linewidth=1.6, label=label, **style)


def plot_meeting_times(
    times: Any,
    lag: int = 1,
    met: Any = None,
    *,
    ax: "Axes | None" = None,
    label: str | None = None,
    **line: Any,
) -> "Axes":
    """The survival curve of meeting times, P(tau > t), on a logarithmic axis.

    The estimate is that of Kaplan and Meier: a pair that has not met counts as long as it was
    watched. Where pairs are unmet, the curve stops at the last time watched, and a tick marks each
    such time. A straight line is a geometric tail.

    :param times: meeting times, any shape (for an unmet pair, how long it was watched; an infinite
        time without ``met`` is an error), or a DataTree with the group ``meeting``, or an estimate.
    :param lag: the pairs' lag, said on the axis (a DataTree and an estimate know their own).
    :param met: which pairs met, of the shape of ``times``; all of them if None.
    :param ax: where to; a new figure if None.
    :param label: for the legend, which stands beside the axes.
    :param line: how the curve looks, in matplotlib's words (``color``, ``linestyle``); by default eight
        curves of one axes differ in both.
    :raises ArgumentError: no time, a nan or infinite one, or ``met`` of another shape.

    **References**

    1. Kaplan, Meier (1958), *Nonparametric estimation from incomplete observations*.
    2. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with L-lag couplings*.

    **Example**

    >>> ax = plot_meeting_times([1, 2, 2, 5], met=[True, True, True, False])
    >>> ax.lines[0].get_ydata().tolist()
    [1.0, 0.75, 0.25, 0.25]
    """
    if isinstance(times, xr.DataTree) or hasattr(times, "meeting_time"):
        times, met, lag = meeting_data(times)
    times, met = _check_times(times, met)
    t, alive = survival_curve(times, met)
    ax = shown() if ax is None else ax
    positive = alive > 0  # a logarithmic axis has no zero: the curve falls off its lower end
    floor = 0.5 / len(times)
    looks: dict[str, Any] = _next_look(ax) | {"linewidth": 1.6} | line
    (drawn,) = ax.step(t, np.where(positive, alive, floor), where="post", label=label, **looks)
    if not met.all():
        watched = np.unique(times[~met])
        height = alive[np.searchsorted(t, watched, side="right") - 1]
        ax.plot(watched, height, "|", color=drawn.get_color(), markersize=9, markeredgewidth=1.4)
    _tell_unmet(ax, label, int((~met).sum()), len(met))
    ax.set_yscale("log")
    ax.set_ylim(min(floor * 1.05, ax.get_ylim()[0]) if len(ax.lines) > 2 else floor * 1.05, 1.3)
    ax.set_xlim(left=0, auto=True)  # the right end still makes room for a longer curve to come
    ax.set(xlabel=f"t (sweeps, lag {lag})", ylabel=r"$P(\tau > t)$")
    tidy(ax, legend=label is not None)
    return ax


def _tell_unmet(ax: "Axes", label: str | None, unmet: int, pairs: int) -> None:
    """Of unmet pairs, where there are any: a line on the right, where their curve does not end, next to those
    that are there.
    """
    if unmet:
        told = f"{label + ': ' if label else ''}{unmet} of {pairs} pairs unmet"
        high = 4 * unmet <= pairs
        place = (0.97, 0.95 - 0.07 * len(ax.texts) if high else 0.05 + 0.07 * len(ax.texts))
        align = "top" if high else "bottom"
        ax.annotate(told, place, xycoords="axes fraction", ha="right", va=align, fontsize=8)


def _next_look(ax: "Axes") -> dict[str, Any]:
    return look(sum(line.get_drawstyle() == "steps-post" for line in ax.lines))


def _check_times(times: Any, met: Any) -> tuple[Float[np.ndarray, "pairs"], Bool[np.ndarray, "pairs"]]:
    times = np.asarray(times, float)
    met = np.ones(times.shape, bool) if met is None else np.asarray(met, bool)
    if met.shape != times.shape:
        raise ArgumentError(f"met has shape {met.shape}, expected that of the meeting times, {times.shape}")
    if not times.size or not np.isfinite(times).all():
        bad = int((~np.isfinite(times)).sum())
        raise ArgumentError(
            f"{bad} of {times.size} meeting times are not finite; expected at least one time, and for an "
            "unmet pair the time for which it was watched, with met=False"
        )
    return times.ravel(), met.ravel()


def survival_curve(
    times: Real[np.ndarray, "pairs"], met: Bool[np.ndarray, "pairs"]
) -> tuple[Float[np.ndarray, "times"], Float[np.ndarray, "times"]]:
    """The Kaplan-Meier estimate of P(tau > t) at 0 and at every time, as a right-continuous step.

    :param met: False where the time is censored.
    :return: increasing times from 0, and the estimate at each.

    **Example**

    >>> survival_curve(np.array([1.0, 3.0]), np.array([True, False]))[1].tolist()
    [1.0, 0.5, 0.5]
    """
    at = np.union1d([0.0], times)
    return at, survival(times, met, at)


def plot_tv_bound(source: Any, *, ax: "Axes | None" = None, label: str | None = None) -> "Axes":
    """Upper bounds of the distance to stationarity against sweeps, with their band.

    :param source: a DataTree with the group ``meeting`` or an estimate (their total variation bound), or
        a bound: what :func:`~ebmpp.tv_upper_bound` or :func:`~ebmpp.diagnostics.wasserstein_upper_bound`
        return.
    :param ax: where to; a new figure if None.
    :param label: for the legend.
    :raises ArgumentError: without meeting times.

    **References**

    1. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with L-lag couplings*.

    **Example**

    >>> bound = xr.Dataset({n: ("t", [1.0, 0.2]) for n in ("bound", "lower", "upper")}, {"t": [0, 1]})
    >>> plot_tv_bound(bound).lines[0].get_ydata().tolist()
    [1.0, 0.2]
    """
    own = not isinstance(source, xr.Dataset)
    bound = tv_upper_bound(source) if own else source
    ax = shown() if ax is None else ax
    t, height = bound["t"].values, bound["bound"].values
    (line,) = ax.plot(t, height, linewidth=1.6, label=label, **_next_look(ax))
    line.set_drawstyle("steps-post")
    low, high = bound["lower"].values, bound["upper"].values
    ax.fill_between(t, low, high, color=line.get_color(), alpha=0.2, linewidth=0, step="post")
    _tell_unmet(ax, label, bound.attrs.get("unmet", 0), bound.attrs.get("pairs", 0))
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"t (sweeps{', lag ' + str(bound.attrs['lag']) if 'lag' in bound.attrs else ''})")
    ax.set_ylabel("total variation distance, at most" if own else "distance to stationarity, at most")
    tidy(ax, legend=label is not None)
    return ax
