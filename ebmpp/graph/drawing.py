# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A picture of a declaration. Matplotlib is an extra, so it is imported when something is drawn."""

from typing import TYPE_CHECKING

import networkx as nx

from ebmpp.graph.declaration import Declaration

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_VISIBLE, _LATENT, _INK, _EDGE = "#c6d8ea", "#ffffff", "#1f2933", "#7b8794"
COLUMN, _ROW = 3.0, 1.8  # distances between nodes, in inches of a figure of our own
_HALF_WIDTH, _HALF_HEIGHT = 0.78, 0.42


def draw_graph(graph: Declaration, ax: "Axes | None" = None) -> "Axes":
    """See :meth:`ebmpp.FactorGraph.draw`."""
    from matplotlib import pyplot as plt

    blocks = graph.to_networkx()
    at = positions(graph)
    if ax is None:
        tallest = max(map(len, graph.block_layers))
        size = (COLUMN * len(graph.block_layers), _ROW * tallest + 0.6)
        ax = plt.figure(figsize=size, layout="constrained").add_subplot()
    _draw_edges(ax, blocks, at)
    for name in blocks:
        _draw_block(ax, graph, name, at[name])
    for layer, named in zip(graph.block_layers, layer_names(graph), strict=True):
        top = max(at[b][1] for b in layer) + _HALF_HEIGHT + 0.22
        ax.text(at[layer[0]][0], top, named, ha="center", va="bottom", color=_EDGE, fontsize=9)
    _frame(ax, at)
    return ax


def layer_names(graph: Declaration) -> list[str]:
    """Of the columns, one a layer; a block in parts has several."""
    made, index = [], 0
    for layer in graph.block_layers:
        parts = graph.splits[layer[0]].num_parts if layer[0] in graph.splits else 1
        made.append(f"layer {index}" if parts == 1 else f"layers {index} to {index + parts - 1}")
        index += parts
    return made


def family_lines(graph: Declaration, block: str) -> list[str]:
    """A block's family, its last option on a second line where one is too short for all."""
    told = repr(graph.families[block])
    first, comma, last = told.rpartition(", ")
    return [f"{first},", last] if len(told) > 22 and comma else [told]


def positions(graph: Declaration) -> dict[str, tuple[float, float]]:
    """Where the blocks go, upwards, in inches: a column a layer."""
    at = {}
    for column, layer in enumerate(graph.block_layers):
        for row, block in enumerate(layer):
            # Columns are shifted a little against one another, so that an edge between the first and
            # the third does not run through a block of the second.
            shift = 0.0 if len(graph.block_layers) < 3 else 0.9 * (column % 2)
            at[block] = (COLUMN * column, _ROW * ((len(layer) - 1) / 2 - row) - shift)
    return at


def _draw_edges(ax: "Axes", blocks: nx.Graph, at: dict[str, tuple[float, float]]) -> None:
    for a, b, factors in blocks.edges(data="factors"):
        (x0, y0), (x1, y1) = at[a], at[b]
        ax.plot([x0, x1], [y0, y1], color=_EDGE, linewidth=1.4, zorder=1)
        # In a gap between columns, so that a long edge's label is not on top of a block.
        share = 0.5 if abs(x1 - x0) <= COLUMN else 0.5 * COLUMN / abs(x1 - x0)
        place = (x0 + share * (x1 - x0), y0 + share * (y1 - y0))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        ax.text(*place, "\n".join(factors), ha="center", va="center", fontsize=8, color=_INK, bbox=box)


def _draw_block(ax: "Axes", graph: Declaration, name: str, at: tuple[float, float]) -> None:
    from matplotlib.patches import FancyBboxPatch

    visible = name in graph.visible
    corner, size = (at[0] - _HALF_WIDTH, at[1] - _HALF_HEIGHT), (2 * _HALF_WIDTH, 2 * _HALF_HEIGHT)
    patch = FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=0.12", zorder=2)
    patch.set(facecolor=_VISIBLE if visible else _LATENT, edgecolor=_INK, linewidth=1.2)
    ax.add_patch(patch)
    ax.text(at[0], at[1] + 0.2, name, ha="center", va="center", fontsize=12, weight="bold", zorder=3)
    lines = family_lines(graph, name)
    family, longest = "\n".join(lines), max(map(len, lines))
    size = min(8.5, 8.5 * 22 / longest)
    ax.text(at[0], at[1] - 0.17, family, ha="center", va="center", fontsize=size, color=_INK, zorder=3)
    own = [f.name for f in graph.factors if f.blocks == (name,)]
    if own:
        below = f"factor{'s' if len(own) > 1 else ''}: {', '.join(own)}"
        lower = at[1] - _HALF_HEIGHT - 0.08
        ax.text(at[0], lower, below, ha="center", va="top", fontsize=7.5, color=_EDGE, zorder=3)


def _frame(ax: "Axes", at: dict[str, tuple[float, float]]) -> None:
    xs, ys = zip(*at.values(), strict=True)
    ax.set_xlim(min(xs) - _HALF_WIDTH - 0.2, max(xs) + _HALF_WIDTH + 0.2)
    ax.set_ylim(min(ys) - _HALF_HEIGHT - 0.4, max(ys) + _HALF_HEIGHT + 0.55)
    ax.set_aspect("equal")
    ax.axis("off")
