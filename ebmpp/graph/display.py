# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Printed summary and matplotlib drawing of a graph."""

import math
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

import jax

from ebmpp.core.display import Card, Grid
from ebmpp.core.types import Params
from ebmpp.graph.declaration import Declaration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_VISIBLE, _LATENT, _INK, _EDGE = "#c6d8ea", "#ffffff", "#1f2933", "#7b8794"
_COLUMN, _ROW = 3.0, 1.8  # distances between blocks in inches
_HALF_WIDTH, _HALF_HEIGHT = 0.78, 0.42

# -- text ----------------------------------------------------------------------------------------


def card(graph: Declaration, kind: str = "FactorGraph") -> Card:
    """Return tables of the blocks and factors of a graph.

    :param kind: the first word of the title.
    """
    units, layers = sum(f.size for f in graph.families.values()), len(graph.layers)
    params = sum(map(_size, graph.param_shapes.values()))
    rows = [
        (
            b,
            repr(family := graph.families[b]),
            family.size,
            "visible" if b in graph.visible else "latent",
            name,
        )
        for layer, name in zip(graph.block_layers, _layer_names(graph), strict=True)
        for b in layer
    ]
    title = f"{kind}: {_count(units, 'unit')} in {_count(len(rows), 'block')}, {_count(layers, 'layer')}"
    title += f", {_count(params, 'param')} in {_count(len(graph.factors), 'factor')}"
    return Card(title, (Grid(("block", "family", "units", "role", "drawn in"), rows), factor_grid(graph)))


def factor_grid(graph: Declaration, params: Params | None = None) -> Grid:
    """Return a table of the factors, their params' shapes and, if ``params`` is given, root mean squares."""
    rows = []
    for f in graph.factors:
        leaves = jax.tree_util.tree_leaves_with_path(graph.param_shapes[f.name])
        shapes = ", ".join(f"{jax.tree_util.keystr(p)} {a.shape}".strip() for p, a in leaves)
        row = (f.name, type(f).__name__, ", ".join(f.blocks), shapes, _size(graph.param_shapes[f.name]))
        rows.append(row if params is None else (*row, root_mean_square(params[f.name])))
    head = ("factor", "kind", "blocks", "shape", "params")
    return Grid(head if params is None else (*head, "root mean square"), rows)


def root_mean_square(tree: Params) -> float:
    """Return the root mean square of all numbers in some params, nan if there are none."""
    leaves = [np.asarray(a, float) for a in jax.tree.leaves(tree)]
    size = sum(a.size for a in leaves)
    return math.sqrt(sum(float((a**2).sum()) for a in leaves) / size) if size else math.nan


def _size(shapes: Params) -> int:
    return sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))


def _count(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def _layer_names(graph: Declaration) -> list[str]:
    """Return a name per layer of blocks; a block in several parts spans several layers."""
    names, index = [], 0
    for layer in graph.block_layers:
        parts = graph.splits[layer[0]].num_parts if layer[0] in graph.splits else 1
        names.append(f"layer {index}" if parts == 1 else f"layers {index} to {index + parts - 1}")
        index += parts
    return names


# -- drawing -------------------------------------------------------------------------------------


def draw_graph(graph: Declaration, ax: "Axes | None" = None) -> "Axes":
    """See :meth:`ebmpp.FactorGraph.draw`."""
    from matplotlib import pyplot as plt  # an extra

    blocks, at = graph.to_networkx(), _positions(graph)
    if ax is None:
        size = (_COLUMN * len(graph.block_layers), _ROW * max(map(len, graph.block_layers)) + 0.6)
        ax = plt.figure(figsize=size, layout="constrained").add_subplot()
    _draw_edges(ax, blocks, at)
    for name in blocks:
        _draw_block(ax, graph, name, at[name])
    for layer, name in zip(graph.block_layers, _layer_names(graph), strict=True):
        top = max(at[b][1] for b in layer) + _HALF_HEIGHT + 0.22
        ax.text(at[layer[0]][0], top, name, ha="center", va="bottom", color=_EDGE, fontsize=9)
    xs, ys = zip(*at.values(), strict=True)
    ax.set_xlim(min(xs) - _HALF_WIDTH - 0.2, max(xs) + _HALF_WIDTH + 0.2)
    ax.set_ylim(min(ys) - _HALF_HEIGHT - 0.4, max(ys) + _HALF_HEIGHT + 0.55)
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def _positions(graph: Declaration) -> dict[str, tuple[float, float]]:
    """Place the blocks in one column per layer."""
    at = {}
    for column, layer in enumerate(graph.block_layers):
        for row, block in enumerate(layer):
            # Shifted columns keep an edge between the first and the third off the blocks of the second.
            shift = 0.0 if len(graph.block_layers) < 3 else 0.9 * (column % 2)
            at[block] = (_COLUMN * column, _ROW * ((len(layer) - 1) / 2 - row) - shift)
    return at


def _draw_edges(ax: "Axes", blocks: nx.Graph, at: dict[str, tuple[float, float]]) -> None:
    for a, b, factors in blocks.edges(data="factors"):
        (x0, y0), (x1, y1) = at[a], at[b]
        ax.plot([x0, x1], [y0, y1], color=_EDGE, linewidth=1.4, zorder=1)
        # The label of a long edge lies in a gap between columns, not on a block.
        share = 0.5 if abs(x1 - x0) <= _COLUMN else 0.5 * _COLUMN / abs(x1 - x0)
        place = (x0 + share * (x1 - x0), y0 + share * (y1 - y0))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        ax.text(*place, "\n".join(factors), ha="center", va="center", fontsize=8, color=_INK, bbox=box)


def _draw_block(ax: "Axes", graph: Declaration, name: str, at: tuple[float, float]) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner, size = (at[0] - _HALF_WIDTH, at[1] - _HALF_HEIGHT), (2 * _HALF_WIDTH, 2 * _HALF_HEIGHT)
    patch = FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=0.12", zorder=2)
    patch.set(facecolor=_VISIBLE if name in graph.visible else _LATENT, edgecolor=_INK, linewidth=1.2)
    ax.add_patch(patch)
    style: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 3}
    ax.text(at[0], at[1] + 0.2, name, fontsize=12, weight="bold", **style)
    family = repr(graph.families[name])
    first, comma, last = family.rpartition(", ")
    family = f"{first},\n{last}" if len(family) > 22 and comma else family
    fontsize = min(8.5, 8.5 * 22 / max(map(len, family.split("\n"))))
    ax.text(at[0], at[1] - 0.17, family, fontsize=fontsize, color=_INK, **style)
    names = [f.name for f in graph.factors if f.blocks == (name,)]
    if names:
        label, below = f"factor{'s' * (len(names) > 1)}: {', '.join(names)}", at[1] - _HALF_HEIGHT - 0.08
        style["va"] = "top"
        ax.text(at[0], below, label, fontsize=7.5, color=_EDGE, **style)
