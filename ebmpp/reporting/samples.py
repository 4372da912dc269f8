# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sections that compare samples with data: moments, nearest training rows, and pictures."""

from collections.abc import Iterator, Mapping
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np
import pandas as pd
from sklearn.metrics.pairwise import euclidean_distances

import jax.numpy as jnp

from ebmpp.core.types import Rows
from ebmpp.diagnostics.plots import plot_units
from ebmpp.diagnostics.style import COLORS, INK, grid, tidy
from ebmpp.errors import StateError
from ebmpp.evaluate.activity import conditional_moments
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, tables
from ebmpp.reporting.model import weights
from ebmpp.reporting.page import Section
from ebmpp.reporting.subject import Chains, Subject, spread_draws

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_PAIRS = 3000  # covariances, chosen at random if there are more
_NUM_WORST = 8  # means in the table of the largest differences
_CHUNK = 4096  # training rows that are compared at a time
_PER_CHAIN, _COLUMNS = 3, 10  # pictures of samples: draws per chain, and chains
_FILTERS = 64
_MAX_FILTERED = 4096  # latent statistics whose filters are computed
_MIN_SIDE = 3  # of a square image


# -- moments ---------------------------------------------------------------------------------------


class _Moments(NamedTuple):
    """Moments of data and model, and standard errors of their differences."""

    names: list[str]
    data: Float[np.ndarray, "moments"]
    model: Float[np.ndarray, "moments"]
    error: Float[np.ndarray, "moments"]

    def rms(self) -> tuple[float, float]:
        """Return root mean squares of the differences and of their errors."""
        difference, error = (np.sqrt(np.mean(x**2)) for x in (self.data - self.model, self.error))
        return float(difference), float(error)


def moments(section: Section, subject: Subject) -> None:
    """Compare means and covariances of the visible statistics, and means of the latent ones."""
    chains = subject.chains(section)
    if not chains:
        section.missing("moments of the model", "No sampler supports the model.")
        return
    name = list(chains)[-1]  # tempered chains, if there are any
    section.text(
        f"Each dot is a moment of the training rows (horizontal) and of the {subject.budget.chains} {name} "
        "chains from noise (vertical). The likelihood's gradient vanishes where they agree. Latent means of "
        "the data are conditional on the rows."
    )
    groups = _visible(subject, chains[name]) | _latent(subject, chains[name])
    rows, worst, differing = [], [], []
    for kind, group in groups.items():
        difference, error = group.rms()
        correlation = np.nan
        if group.data.std() * group.model.std():
            correlation = np.corrcoef(group.data, group.model)[0, 1]
        row = {"moments": kind, "number": len(group.data), "rms difference": difference}
        rows.append(row | {"rms error": error, "correlation": correlation})
        if kind != "covariances":
            z = (group.model - group.data) / np.where(group.error > 0, group.error, np.inf)
            columns = {"statistic": group.names, "data": group.data, "model": group.model}
            worst.append(pd.DataFrame(columns | {"error": group.error, "in errors": z}))
        if kind != "latent means":
            section.fact(f"Model minus data, {kind}: {difference:.2g} rms, standard error {error:.2g}.")
        if difference > 3 * error:
            differing.append(kind)
    section.figure("moments", _draw(groups), "The bar is two standard errors of a difference.")
    section.table("moments", pd.DataFrame(rows), "Root mean squares over all moments of a kind.")
    frame = pd.concat(worst, ignore_index=True)
    order = frame["in errors"].abs().sort_values(ascending=False, kind="stable").index[:_NUM_WORST]
    frame = frame.loc[order].reset_index(drop=True)
    section.table("moments_worst", frame, "Means with the largest differences, in standard errors.")
    words = "moments of model and data agree within their errors"
    if differing:
        words = f"{' and '.join(differing)} of model and data differ by more than their errors"
    section.judge(not differing, words)


def _statistics(subject: Subject, block: str, values: np.ndarray) -> np.ndarray:
    """Return statistics of a block, ``(*batch, statistics)``."""
    family = subject.graph.families[block]
    batch = values.shape[: values.ndim - len(family.shape)]
    return np.asarray(family.statistics(jnp.asarray(values)), np.float64).reshape(*batch, -1)


def _labels(subject: Subject, blocks: Any) -> list[str]:
    shapes = {b: subject.graph.families[b].statistic_shape for b in blocks}
    return [f"{b}{list(index)}" for b, shape in shapes.items() for index in np.ndindex(*shape)]


def _visible(subject: Subject, chains: Chains) -> dict[str, _Moments]:
    blocks = list(subject.graph.visible)
    data = np.concatenate([_statistics(subject, b, np.asarray(subject.train[b])) for b in blocks], -1)
    model = np.concatenate([_statistics(subject, b, chains.draws[b]) for b in blocks], -1)
    names, size = _labels(subject, blocks), data.shape[1]
    result = {"visible means": _compare(names, data, model, subject.share)}
    if size > 1:
        first, second = _pairs(size)
        pairs = [f"{names[i]}, {names[j]}" for i, j in zip(first, second, strict=True)]
        product = lambda x, mean: (x[..., first] - mean[first]) * (x[..., second] - mean[second])
        products = product(data, data.mean(0)), np.stack([product(c, model.mean((0, 1))) for c in model])
        result["covariances"] = _compare(pairs, *products, subject.share)
    return result


def _pairs(size: int) -> np.ndarray:
    """Return at most 3,000 pairs of different statistics, ``(2, pairs)``."""
    generator = np.random.default_rng(0)
    if size > 2000:  # a list of all pairs takes too much memory
        pairs = generator.integers(size, size=(2, 2 * _MAX_PAIRS))
        pairs = pairs[:, pairs[0] != pairs[1]]
        generator = np.random.default_rng(0)
    else:
        pairs = np.stack(np.triu_indices(size, 1))
    if pairs.shape[1] > _MAX_PAIRS:
        pairs = pairs[:, generator.choice(pairs.shape[1], _MAX_PAIRS, replace=False)]
    return pairs


def _latent(subject: Subject, chains: Chains) -> dict[str, _Moments]:
    """Return means of the latents, if those given the data have a closed form."""
    graph = subject.graph
    if not graph.latent or not subject.has_free_energy:
        return {}
    given_rows = conditional_moments(graph, tuple(graph.latent), subject.params, dict(subject.train))
    means = [np.asarray(given_rows[b][0], np.float64) for b in graph.latent]
    data = np.concatenate([mean.reshape(len(mean), -1) for mean in means], -1)
    model = np.concatenate([_statistics(subject, b, chains.draws[b]) for b in graph.latent], -1)
    return {"latent means": _compare(_labels(subject, graph.latent), data, model, subject.share)}


def _compare(names: list[str], data: np.ndarray, model: np.ndarray, share: float) -> _Moments:
    """Compare means over rows and over independent chains.

    :param data: ``(rows, moments)``.
    :param model: ``(chains, draws, moments)``.
    :param share: share of all training rows in ``data``; the mean of all of them has no error.
    """
    means = model.mean(1)
    data_error = data.std(0, ddof=1) / np.sqrt(len(data)) if len(data) > 1 else np.zeros(data.shape[1])
    model_error = means.std(0, ddof=1) / np.sqrt(len(means))
    error = np.hypot(np.sqrt(1 - share) * data_error, model_error)
    return _Moments(names, data.mean(0), means.mean(0), error)


def _draw(groups: dict[str, _Moments]) -> "Figure":
    figure, panels = grid(len(groups), (3.5, 3.3), ncols=3)
    for ax, (kind, group) in zip(panels, groups.items(), strict=True):
        both = np.concatenate([group.data, group.model])
        low, high = both.min(), both.max()
        margin = 0.06 * (high - low) + 1e-9
        ends = low - margin, high + margin
        ax.plot(ends, ends, color=INK, linewidth=0.8, linestyle="--")
        ax.plot(group.data, group.model, "o", color=COLORS[0], markersize=3, alpha=0.45, markeredgewidth=0)
        typical = float(np.median(group.error))
        at = low + 0.05 * (high - low), high - 0.05 * (high - low) - 2 * typical
        ax.errorbar(*at, 2 * typical, color=COLORS[1], capsize=3, linewidth=1.4)
        ax.set(xlim=ends, ylim=ends, xlabel="training rows", ylabel="model", title=kind, aspect="equal")
        ax.title.set_fontsize(10)
        tidy(ax)
    return figure


# -- nearest training rows -------------------------------------------------------------------------


class _Nearest(NamedTuple):
    """Nearest training row of each row."""

    distance: Float[np.ndarray, "rows"]
    index: Int[np.ndarray, "rows"]


def nearest_rows(section: Section, subject: Subject) -> None:
    """Report distances to the nearest training row, and show both."""
    chains = {f"{name} samples": c.draws for name, c in subject.chains(section).items()}
    samples = {name: spread_draws(draws, subject.budget.chains, _PER_CHAIN) for name, draws in chains.items()}
    section.text(
        "Squared distances, with values scaled to their range: for binary units and for categories, the "
        "number of units that differ. Samples much nearer to training rows than held-out rows are copies of "
        "them; samples much farther away do not resemble the data."
    )
    train, *others = subject.data
    sets = samples | {f"{name} rows": subject.data[name] for name in others}
    nearest = {name: _nearest(subject, rows) for name, rows in sets.items()}
    nearest[f"{train} rows (without themselves)"] = _nearest(subject, subject.train, exclude_self=True)
    table = {}
    for name, result in nearest.items():
        low, median, high = np.quantile(result.distance, [0.1, 0.5, 0.9])
        row = {"count": len(result.distance), "10 %": low, "median": median, "90 %": high}
        table[name] = row | {"the same": int((result.distance < 1e-6).sum())}
    frame = pd.DataFrame.from_dict(table, orient="index")
    section.table("nearest", frame, f"Nearest of {subject.table.batch[0]} training rows.")
    if samples:
        labels = [list(samples)[-1], *(name for name in nearest if name not in samples)]
        medians = "; ".join(f"{name} {frame['median'][name]:.3g}" for name in labels)
        section.fact(f"Median distance to the nearest training row: {medians}.")
    for b, shape in subject.image_shapes.items():
        if samples and subject.graph.families[b].interaction_shape == subject.graph.families[b].shape:
            figure = _draw_nearest(subject, b, shape, {n: (samples[n], nearest[n].index) for n in samples})
            caption = "States of ten chains, each above the nearest training row."
            section.figure(f"nearest_{b}", figure, caption)


def _features(subject: Subject, rows: Mapping[str, Any]) -> Float[np.ndarray, "rows features"]:
    """Return values scaled to their range, and indicators of categories divided by sqrt(2)."""
    features = []
    for b, family in subject.graph.visible.items():
        v, states = np.asarray(rows[b]), family.states()
        if family.stat_shape and states is not None:  # categories have no order
            indicators = v.reshape(len(v), -1, 1) == np.asarray(states)
            features.append(indicators.reshape(len(v), -1) / math.sqrt(2))
        else:
            features.append(_grey(family, v))
    return np.concatenate(features, 1)


def _grey(family: Family, values: Any) -> Float[np.ndarray, "count units"]:
    """Return values scaled to [0, 1], or unchanged if the family has no bounds."""
    values = np.asarray(values, float).reshape(len(values), -1)
    states = family.states()
    low, high = family.bounds if states is None else (float(min(states)), float(max(states)))
    return (values - low) / (high - low) if np.isfinite(high - low) else values


def _training_rows(subject: Subject, index: np.ndarray) -> Rows:
    return tables.check_table(subject.graph, subject.table.take(index)).rows


def _training_chunks(subject: Subject) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield indices and features of all training rows."""
    indices = np.arange(subject.table.batch[0])
    for index in np.split(indices, np.arange(_CHUNK, len(indices), _CHUNK)):
        yield index, _features(subject, _training_rows(subject, index))


def _nearest(subject: Subject, rows: Mapping[str, Any], exclude_self: bool = False) -> _Nearest:
    """Return the nearest of all training rows, or the second nearest for training rows themselves."""
    features, keep = _features(subject, rows), 2 if exclude_self else 1
    best = np.full((len(features), keep), np.inf)
    best_index = np.zeros((len(features), keep), int)
    for index, train in _training_chunks(subject):
        distance = np.concatenate([best, euclidean_distances(features, train, squared=True)], 1)
        index = np.concatenate([best_index, np.broadcast_to(index, (len(features), len(index)))], 1)
        order = np.argsort(distance, 1, kind="stable")[:, :keep]
        best, best_index = np.take_along_axis(distance, order, 1), np.take_along_axis(index, order, 1)
    return _Nearest(best[:, -1], best_index[:, -1])


def _draw_nearest(subject: Subject, block: str, shape: tuple[int, int], samples: Mapping) -> "Figure":
    family = subject.graph.families[block]
    figure, axes = grid(len(samples), (7.0, 0.5 + 1.4 * shape[0] / shape[1]), ncols=1)
    for ax, (name, (rows, index)) in zip(axes, samples.items(), strict=True):
        index = index[:_COLUMNS]
        train = _training_rows(subject, index)[block]
        both = np.concatenate([_grey(family, rows[block][:_COLUMNS]), _grey(family, train)])
        plot_units(both, shape, ncols=len(index), ax=ax)
        ax.set_title(f"{name}, and the nearest training row below each", fontsize=10)
    return figure


# -- pictures --------------------------------------------------------------------------------------


def image_shapes(graph: FactorGraph, image_shape: Any) -> dict[str, tuple[int, int]]:
    """Return the height and width of the visible blocks that are images.

    :param image_shape: one shape for every visible block, shapes by block, or None for squares from 3x3.
    :raises StateError: a shape that does not fit its block, or a block that is not visible.
    """
    shapes = dict(image_shape) if isinstance(image_shape, Mapping) else {}
    if image_shape is not None and not isinstance(image_shape, Mapping):
        shapes = dict.fromkeys(graph.visible, image_shape)
    for b, shape in shapes.items():
        if b not in graph.visible:
            raise StateError(f"image_shape must name visible blocks, {list(graph.visible)}, got {b!r}")
        size = graph.families[b].size
        if len(shape) != 2 or math.prod(shape) != size:
            raise StateError(f"image_shape of block {b!r} must have {size} units, got {shape}")
    for b, family in graph.visible.items():
        side = math.isqrt(family.size)
        if b not in shapes and len(family.shape) == 2:
            shapes[b] = family.shape
        elif b not in shapes and side**2 == family.size and side >= _MIN_SIDE:
            shapes[b] = (side, side)
    return {b: tuple(shapes[b]) for b in graph.visible if b in shapes}


def pictures(section: Section, subject: Subject) -> None:
    """Show rows, samples and filters of the blocks that are images."""
    others = [b for b in subject.graph.visible if b not in subject.image_shapes]
    if others:
        reason = "Their numbers of units are not squares; give image_shape=(height, width)."
        section.missing(f"pictures of {others}", reason)
    for b, shape in subject.image_shapes.items():
        _sample_pictures(section, subject, b, shape)
        _filter_pictures(section, subject, b, shape)


def _sample_pictures(section: Section, subject: Subject, block: str, shape: tuple[int, int]) -> None:
    family, count = subject.graph.families[block], _COLUMNS * _PER_CHAIN
    images = {f"{name} rows": _grey(family, v[block][:count]) for name, v in subject.data.items()}
    for name, chains in subject.chains(section).items():
        state = spread_draws(chains.draws, _COLUMNS, _PER_CHAIN)
        kind, values = "states", state[block]
        if not family.stat_shape:
            kind = "means given the rest"
            values = conditional_moments(subject.graph, (block,), subject.params, state)[block][0]
        images[f"{name} chains: {kind}"] = _grey(family, values)
    lines = max(-(-len(v) // _COLUMNS) for v in images.values())
    figure, axes = grid(len(images), (4.6, 0.4 + 4.6 * lines * shape[0] / (_COLUMNS * shape[1])), ncols=2)
    for ax, (name, values) in zip(axes, images.items(), strict=True):
        plot_units(values, shape, ncols=_COLUMNS, ax=ax)
        ax.set_title(name, fontsize=10)
    caption = "Each line of samples shows the last states of ten chains from noise; lower lines are earlier."
    section.figure(f"samples_{block}", figure, caption)


def _filter_pictures(section: Section, subject: Subject, block: str, shape: tuple[int, int]) -> None:
    graph = subject.graph
    latent = [b for b in graph.neighbours([block]) if b in graph.latent]
    if not latent:
        section.missing(f"filters of {block}", "No latent block shares a factor with it.")
    elif graph.families[block].interaction_shape != graph.families[block].shape:
        section.missing(f"filters of {block}", "Its units have several weights each.")
        return
    for b in latent:
        # of a Gaussian's statistics x comes before its square
        filters = weights(graph, subject.params, block, b, _MAX_FILTERED)[:, :, 0]
        order = np.argsort(-np.linalg.norm(filters, axis=1), kind="stable")[:_FILTERS]
        count, total = len(order), math.prod(graph.families[b].statistic_shape)
        ncols = math.ceil(math.sqrt(count * shape[0] / shape[1]))
        width = min(8.0, 1.0 + 0.75 * ncols)
        figure, (ax,) = grid(1, (width, width * math.ceil(count / ncols) * shape[0] / (ncols * shape[1])))
        plot_units(filters[np.sort(order)], shape, ncols=ncols, ax=ax)
        of_first = "" if len(filters) == total else f" of the first {len(filters)}"
        selection = "all units" if count == total else f"the {count} strongest{of_first} of {total}"
        caption = f"Weights of the units of {b} to {block}: {selection}."
        section.figure(f"filters_{block}_{b}", figure, caption)
