# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sections that compare samples with data: moments and pictures."""

from collections.abc import Mapping
import math
from typing import TYPE_CHECKING

from jaxtyping import Float
import numpy as np
import pandas as pd

import jax.numpy as jnp

from ebmpp.core import Numbers, statistics
from ebmpp.diagnostics.plots import plot_units
from ebmpp.diagnostics.style import COLORS, INK, grid, tidy
from ebmpp.evaluate.activity import conditional_moments, exact_moments
from ebmpp.families.family import Families, Family
from ebmpp.graph import energy
from ebmpp.reporting.page import Section
from ebmpp.reporting.subject import SamplerRun, Subject, spread_draws

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_PAIRS = 3000  # covariances, chosen at random if there are more
_NUM_WORST = 8  # means in the table of the largest differences
# pictures of samples: draws per chain, and chains
_PER_CHAIN = 3
_COLUMNS = 10
_FILTERS = 64
_MIN_SIDE = 3  # of a square image


def moments(section: Section, subject: Subject) -> None:
    """Compare means and covariances of the visible statistics, and means of the latent ones."""
    chains = subject.chains(section)
    if not chains:
        section.missing("moments of the model", "No sampler supports the model.")
        return
    name = list(chains)[-1]  # tempered chains, if there are any
    section.text(
        "Each dot is a moment of the training rows (horizontal) and of the "
        f"{subject.budget.chains} {name} chains from noise (vertical). The "
        "likelihood's gradient vanishes where they agree. Latent means of the data are "
        "conditional on the rows."
    )
    groups = _visible(subject, chains[name]) | _latent(subject, chains[name])
    rows = []
    differing = []
    for kind, group in groups.items():
        difference = _root_mean_square(group["model"] - group["data"])
        error = _root_mean_square(group["error"])
        rows.append(
            {
                "moments": kind,
                "number": len(group),
                "rms difference": difference,
                "rms error": error,
            }
        )
        if kind != "latent means":
            section.fact(
                f"Model minus data, {kind}: {difference:.2g} rms, standard error {error:.2g}."
            )
        if difference > 3 * error:
            differing.append(kind)
    section.figure(
        "moments", _draw(groups), "Bars are two standard errors of a difference."
    )
    section.table("moments", rows, "Root mean squares over all moments of a kind.")
    means = pd.concat(
        [group for kind, group in groups.items() if kind != "covariances"]
    )
    error = means["error"].where(means["error"] > 0, np.inf)
    means["in errors"] = (means["model"] - means["data"]) / error
    worst = means.sort_values("in errors", key=np.abs, ascending=False, kind="stable")
    section.table(
        "moments_worst",
        worst[:_NUM_WORST].reset_index(drop=True),
        "Largest differences of means, in standard errors.",
    )
    words = "moments of model and data agree within their errors"
    if differing:
        words = f"{' and '.join(differing)} of model and data differ by more than their errors"
    section.judge(not differing, words)


def _root_mean_square(values: pd.Series) -> float:
    return np.sqrt(np.mean(values**2))


def _statistics(families: Families, values: Mapping[str, Numbers]) -> np.ndarray:
    """Return statistics of blocks, ``(*batch, statistics)``."""
    result = []
    for b, family in families.items():
        x = jnp.asarray(values[b])
        batch = x.shape[: x.ndim - len(family.shape)]
        statistics = np.asarray(family.statistics(x), np.float64)
        result.append(statistics.reshape(*batch, -1))
    return np.concatenate(result, -1)


def _labels(families: Families) -> list[str]:
    """Return names of the statistics of blocks, such as "v[0]"."""
    return [
        f"{b}{list(index)}"
        for b, family in families.items()
        for index in np.ndindex(*family.statistic_shape)
    ]


def _visible(subject: Subject, chains: SamplerRun) -> dict[str, pd.DataFrame]:
    families = subject.graph.visible
    data = _statistics(families, subject.train)
    model = _statistics(families, chains.draws)
    names = _labels(families)
    size = data.shape[1]
    result = {"visible means": _compare(names, data, model, subject.share)}
    if size > 1:
        first, second = _pairs(size)
        pairs = [f"{names[i]}, {names[j]}" for i, j in zip(first, second)]

        def products(x, mean):
            deviation = x - mean
            return deviation[..., first] * deviation[..., second]

        result["covariances"] = _compare(
            pairs,
            products(data, data.mean(0)),
            products(model, model.mean((0, 1))),
            subject.share,
        )
    return result


def _pairs(size: int) -> np.ndarray:
    """Return all pairs of different statistics, or 3,000 random ones, ``(2, pairs)``."""
    if math.comb(size, 2) <= _MAX_PAIRS:
        return np.stack(np.triu_indices(size, 1))
    first, offset = np.random.default_rng(0).integers([[0], [1]], size, (2, _MAX_PAIRS))
    return np.stack([first, (first + offset) % size])


def _latent(subject: Subject, chains: SamplerRun) -> dict[str, pd.DataFrame]:
    """Return means of the latents, if those conditional on the data have a closed form."""
    graph = subject.graph
    if not graph.latent or not subject.has_free_energy:
        return {}
    posterior = exact_moments(
        graph, tuple(graph.latent), subject.params, dict(subject.train)
    )
    data = np.concatenate([posterior[b][0] for b in graph.latent], -1)
    model = _statistics(graph.latent, chains.draws)
    means = _compare(_labels(graph.latent), data, model, subject.share)
    return {"latent means": means}


def _compare(
    names: list[str], data: np.ndarray, model: np.ndarray, share: float
) -> pd.DataFrame:
    """Compare means of ``(rows, moments)`` and of independent chains, ``(chains, draws, moments)``.

    :param share: share of all training rows in ``data``; the mean of all of them has no
        error.
    """
    means = model.mean(1)
    error = statistics.standard_error(means.T)
    if len(data) > 1:
        data_error = np.sqrt(1 - share) * statistics.standard_error(data.T)
        error = np.hypot(data_error, error)
    columns = {"data": data.mean(0), "model": means.mean(0), "error": error}
    return pd.DataFrame({"statistic": names, **columns})


def _draw(groups: dict[str, pd.DataFrame]) -> "Figure":
    figure, panels = grid(len(groups), (3.5, 3.3), ncols=3)
    for ax, (kind, group) in zip(panels, groups.items()):
        ax.errorbar(
            group["data"],
            group["model"],
            2 * group["error"],
            fmt="o",
            color=COLORS[0],
            markersize=3,
            alpha=0.4,
            linewidth=0.6,
        )
        ax.axline(
            [group["data"].mean()] * 2,
            slope=1,
            color=INK,
            linewidth=0.8,
            linestyle="--",
            zorder=3,
        )
        ax.set(xlabel="training rows", ylabel="model", title=kind)
        ax.title.set_fontsize(10)
        tidy(ax)
    return figure


def _image_shape(family: Family) -> tuple[int, int] | None:
    """Return the height and width of a block of two axes, or of a square of 3x3 or more units."""
    if len(family.shape) == 2:
        height, width = family.shape
        return height, width
    side = math.isqrt(family.size)
    return (side, side) if side**2 == family.size and side >= _MIN_SIDE else None


def pictures(section: Section, subject: Subject) -> None:
    """Show rows, samples and filters of the blocks that are images."""
    for b, family in subject.graph.visible.items():
        shape = _image_shape(family)
        if shape is None:
            advice = "Declare the block with shape (height, width) if it is an image."
            section.missing(f"pictures of {b}", advice)
            continue
        _sample_pictures(section, subject, b, shape)
        _filter_pictures(section, subject, b, shape)


def _sample_pictures(
    section: Section, subject: Subject, block: str, shape: tuple[int, int]
) -> None:
    graph = subject.graph
    family = graph.families[block]
    count = _COLUMNS * _PER_CHAIN
    images = {
        f"{name} rows": _grey(family, rows[block][:count])
        for name, rows in subject.data.items()
    }
    for name, chains in subject.chains(section).items():
        state = spread_draws(chains.draws, _COLUMNS, _PER_CHAIN)
        kind = "states"
        values = state[block]
        if not family.stat_shape:
            kind = "means given the rest"
            means = conditional_moments(graph, (block,), subject.params, state)
            values = means[block][0]
        images[f"{name} chains: {kind}"] = _grey(family, values)
    lines = max(-(-len(v) // _COLUMNS) for v in images.values())
    height = 4.6 * lines * shape[0] / (_COLUMNS * shape[1])
    figure, axes = grid(len(images), (4.6, 0.4 + height), ncols=2)
    for ax, (name, values) in zip(axes, images.items()):
        plot_units(values, shape, ncols=_COLUMNS, ax=ax)
        ax.set_title(name, fontsize=10)
    section.figure(
        f"samples_{block}",
        figure,
        "Each line of samples shows the last states of ten chains from noise; lower "
        "lines are earlier.",
    )


def _filter_pictures(
    section: Section, subject: Subject, block: str, shape: tuple[int, int]
) -> None:
    graph = subject.graph
    family = graph.families[block]
    near = graph.neighbours([block])
    latent = [b for b in near if b in graph.latent and b not in graph.evaluated]
    if not latent:
        section.missing(
            f"filters of {block}", "No latent block shares a factor with it."
        )
    elif family.interaction_shape != family.shape:
        section.missing(f"filters of {block}", "Its units have several weights each.")
        return
    zero = energy.zero_statistics(graph, graph.families)
    for b in latent:
        total = math.prod(graph.families[b].statistic_shape)
        slope = energy.slope(graph, block, b, subject.params, zero)
        # of a Gaussian's statistics x comes before its square
        filters = np.asarray(slope).reshape(family.size, -1, total)[:, 0].T
        order = np.argsort(-np.linalg.norm(filters, axis=1), kind="stable")[:_FILTERS]
        ncols = math.ceil(math.sqrt(len(order) * shape[0] / shape[1]))
        width = min(8.0, 1.0 + 0.75 * ncols)
        nrows = math.ceil(len(order) / ncols)
        figure, (ax,) = grid(1, (width, width * nrows * shape[0] / (ncols * shape[1])))
        plot_units(filters[np.sort(order)], shape, ncols=ncols, ax=ax)
        selection = "all units"
        if len(order) < total:
            selection = f"the {len(order)} strongest of {total}"
        section.figure(
            f"filters_{block}_{b}",
            figure,
            f"Weights of the units of {b} to {block}: {selection}.",
        )


def _grey(family: Family, values: Numbers) -> Float[np.ndarray, "count units"]:
    """Return values scaled to [0, 1], or unchanged if the family has no bounds."""
    values = np.asarray(values, float).reshape(len(values), -1)
    states = family.states()
    low, high = family.bounds
    if states is not None:
        low = float(min(states))
        high = float(max(states))
    return (values - low) / (high - low) if np.isfinite(high - low) else values
