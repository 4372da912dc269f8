# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Samples and filters of blocks that are images."""

from collections.abc import Mapping
import math
from typing import Any

from jaxtyping import Float
import numpy as np

from jax import Array

from ebmpp.core.types import Params
from ebmpp.diagnostics.plots import panels, plot_history, plot_units
from ebmpp.diagnostics.reporting.nearest import grey
from ebmpp.diagnostics.reporting.page import Section
from ebmpp.diagnostics.reporting.subject import Subject
from ebmpp.diagnostics.reporting.weights import response
from ebmpp.diagnostics.style import grid
from ebmpp.errors import StateError
from ebmpp.evaluate.activity import conditional_moments
from ebmpp.graph import FactorGraph

_LEAST_SIDE = 3
_SHOWN = 30
_COLUMNS = 10
_FILTERS = 64
_MOST_FILTERED = 4096  # latent statistics whose filters are computed, to choose among


def image_shapes(graph: FactorGraph, given: Any) -> dict[str, tuple[int, int]]:
    """The visible blocks that are images, and their shapes.

    :param given: one shape for every visible block, a shape a block, or None for squares of 3x3 and more.
    :raises StateError: for a shape that does not fit its block, or a block that is not visible.
    """
    chosen = dict(given) if isinstance(given, Mapping) else {}
    if given is not None and not isinstance(given, Mapping):
        chosen = dict.fromkeys(graph.visible, given)
    for b, shape in chosen.items():
        if b not in graph.visible:
            raise StateError(f"image_shape names block {b!r}; the visible ones are {list(graph.visible)}")
        if len(shape) != 2 or math.prod(shape) != graph.families[b].size:
            raise StateError(
                f"image_shape of block {b!r} is {shape}, and it has {graph.families[b].size} units"
            )
    for b, family in graph.visible.items():
        side = math.isqrt(family.size)
        if b not in chosen and len(family.shape) == 2:
            chosen[b] = family.shape
        elif b not in chosen and side**2 == family.size and side >= _LEAST_SIDE:
            chosen[b] = (side, side)
    return {b: tuple(chosen[b]) for b in graph.visible if b in chosen}


def samples(subject: Subject) -> Section:
    """Rows beside samples, and filters."""
    section, graph = Section("Samples and filters"), subject.graph
    shapes = image_shapes(graph, subject.image_shape)
    others = [b for b in graph.visible if b not in shapes]
    if others:
        why = "no square number of units; give image_shape=(height, width)"
        section.missing(f"pictures of {others}", why)
    for b, shape in shapes.items():
        _sample_pictures(section, subject, b, shape)
        _filter_pictures(section, subject, b, shape)
    return section


def _sample_pictures(section: Section, subject: Subject, block: str, shape: tuple[int, int]) -> None:
    family = subject.graph.families[block]
    rows = {f"{name} rows": grey(family, v[block][:_SHOWN]) for name, v in subject.data.items()}
    kind = "states" if family.stat_shape else "means given the rest"
    for label, chains in subject.chains(section).items():
        rows[f"{label} chains: {kind}"] = grey(family, _last(subject, chains.draws, block))
    lines = max(-(-len(v) // _COLUMNS) for v in rows.values())
    figure, drawn = grid(len(rows), (4.6, 0.4 + 4.6 * lines * shape[0] / (_COLUMNS * shape[1])), ncols=2)
    for ax, (label, images) in zip(drawn, rows.items(), strict=True):
        plot_units(images, shape, ncols=_COLUMNS, ax=ax)
        ax.set_title(label, fontsize=10)
    told = "A row of ten samples is ten chains, started from noise; the next row is the same chains earlier. "
    told += "Rows of data are as they are; below, samples are shown as states too."
    section.figure(f"samples_{block}", figure, told)


def _last(subject: Subject, draws: Mapping[str, np.ndarray], block: str) -> Array:
    """Ten chains' last draws, then those a third of the run earlier, and earlier still."""
    sweeps, each = subject.work.sweeps, -(-_SHOWN // _COLUMNS)
    place = [max(0, sweeps - 1 - i * sweeps // each) for i in range(each)]
    pick = lambda v: np.moveaxis(v[:_COLUMNS, place], 1, 0).reshape(-1, *v.shape[2:])
    state = {b: pick(v) for b, v in draws.items()}
    if subject.graph.families[block].stat_shape:
        return state[block]
    return conditional_moments(subject.graph, (block,), subject.params, state)[block][0]


def _filter_pictures(section: Section, subject: Subject, block: str, shape: tuple[int, int]) -> None:
    graph = subject.graph
    latent = [b for b in graph.neighbours([block]) if b in graph.latent]
    if not latent:
        section.missing(f"filters of {block}", "no latent block shares a factor with it")
        return
    if graph.families[block].interaction_shape != graph.families[block].shape:
        why = "its units have several weights each, and so no single picture"
        section.missing(f"filters of {block}", why)
        return
    for b in latent:
        made = filters(graph, subject.params, block, b)
        strength = np.linalg.norm(made, axis=1)
        order = np.sort(np.argsort(-strength, kind="stable")[:_FILTERS])
        count = len(order)
        ncols = math.ceil(math.sqrt(count * shape[0] / shape[1]))
        width = min(8.0, 1.0 + 0.75 * ncols)
        figure, (ax,) = grid(1, (width, width * math.ceil(count / ncols) * shape[0] / (ncols * shape[1])))
        plot_units(made[order], shape, ncols=ncols, ax=ax)
        total = math.prod(graph.families[b].statistic_shape)
        told = f"What a unit of {b} adds to the natural parameters of {block}: "
        told += "all units." if count == total else f"the {count} strongest of {len(made)}"
        if count < total:
            told += "." if len(made) == total else f" (the first of {total})."
        section.figure(f"filters_{block}_{b}", figure, told)


def filters(
    graph: FactorGraph, params: Params, block: str, latent: str
) -> Float[np.ndarray, "statistics units"]:
    """What a latent statistic adds to the natural parameters of a block's units.

    :return: for the latent block's statistics, at most 4096, and the visible one's units.
    """
    made = response(graph, params, block, latent, _MOST_FILTERED)
    return made[:, :, 0]  # a Gaussian's x comes before its square


def training(history: Any) -> Section:
    """The course of training."""
    section = Section("Training")
    if history is None:
        section.missing("the course of training", "no history was given (history=fit)")
        return section
    data = getattr(history, "history", history)
    figure, drawn = grid(max(1, len(panels(data))), (3.6, 2.6), ncols=3)
    plot_history(data, axes=drawn)
    section.figure("training", figure)
    return section
