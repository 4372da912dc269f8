# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Printed summary and matplotlib drawing of a graph."""

import itertools
import math
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

import jax

from ebmpp.core.display import Card, Grid
from ebmpp.core.types import Params
from ebmpp.graph.declaration import Declaration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_VISIBLE = "#c6d8ea"
_LATENT = "#ffffff"
_EDGE = "#7b8794"
# distances between blocks in inches
_COLUMN = 3.0
_ROW = 1.8


def card(graph: Declaration, kind: str = "FactorGraph") -> Card:
    """Return tables of the blocks and factors of a graph; the title begins with ``kind``."""
    units = sum(f.size for f in graph.families.values())
    layers = len(graph.layers)
    params = sum(map(_size, graph.param_shapes.values()))

    def role(b):
        return "visible" if b in graph.visible else "latent"

    named = zip(graph.block_layers, _layer_names(graph), strict=True)
    drawn_in = [(b, graph.families[b], name) for blocks, name in named for b in blocks]
    rows = [
        (b, repr(family), family.size, role(b), name) for b, family, name in drawn_in
    ]
    title = (
        f"{kind}: {_count(units, 'unit')} in {_count(len(rows), 'block')}, "
        f"{_count(layers, 'layer')}"
    )
    title += f", {_count(params, 'param')} in {_count(len(graph.factors), 'factor')}"
    return Card(
        title,
        (
            Grid(("block", "family", "units", "role", "drawn in"), rows),
            factor_grid(graph),
        ),
    )


def factor_grid(graph: Declaration, params: Params | None = None) -> Grid:
    """Return a table of the factors, their params' shapes and, if ``params`` is given, root mean squares."""
    rows = []
    for f in graph.factors:
        leaves = jax.tree_util.tree_leaves_with_path(graph.param_shapes[f.name])
        shapes = ", ".join(
            f"{jax.tree_util.keystr(p)} {a.shape}".strip() for p, a in leaves
        )
        size = _size(graph.param_shapes[f.name])
        arrays = (
            np.asarray(a, float) for a in jax.tree.leaves(params and params[f.name])
        )
        square = sum(float((a**2).sum()) for a in arrays)
        value = (
            [] if params is None else [math.sqrt(square / size) if size else math.nan]
        )
        rows.append(
            (f.name, type(f).__name__, ", ".join(f.blocks), shapes, size, *value)
        )
    head = ("factor", "kind", "blocks", "shape", "params")
    return Grid(head if params is None else (*head, "root mean square"), rows)


def _size(shapes: Params) -> int:
    return sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))


def _count(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def _layer_names(graph: Declaration) -> list[str]:
    """Return a name per layer of blocks; a block in several parts spans several layers."""
    counts = [graph.num_parts(layer[0]) for layer in graph.block_layers]
    spans = zip(itertools.accumulate(counts, initial=0), counts, strict=False)
    return [
        f"layer {i}" if count == 1 else f"layers {i} to {i + count - 1}"
        for i, count in spans
    ]


def plot_graph(graph: Declaration, ax: "Axes | None" = None) -> "Axes":
    """See :meth:`ebmpp.FactorGraph.plot`."""
    from matplotlib import pyplot as plt  # an extra

    blocks = graph.to_networkx()
    at = _positions(graph)
    if ax is None:
        size = (
            _COLUMN * len(graph.block_layers),
            _ROW * max(map(len, graph.block_layers)) + 0.6,
        )
        ax = plt.figure(figsize=size, layout="constrained").add_subplot()
    nx.draw_networkx_edges(blocks, at, ax=ax, edge_color=_EDGE)
    factors = {(a, b): "\n".join(names) for a, b, names in blocks.edges(data="factors")}
    nx.draw_networkx_edge_labels(blocks, at, factors, ax=ax, font_size=8, rotate=False)
    for side, colour in ((graph.visible, _VISIBLE), (graph.latent, _LATENT)):
        labels = {b: f"{b}\n{family!r}" for b, family in side.items()}
        for b in side:
            names = ", ".join(f.name for f in graph.factors if f.blocks == (b,))
            labels[b] += f"\nfactors: {names}" if names else ""
        box = {"facecolor": colour, "edgecolor": _EDGE, "boxstyle": "round,pad=0.6"}
        nx.draw_networkx_labels(blocks, at, labels, ax=ax, font_size=9, bbox=box)
    for layer, name in zip(graph.block_layers, _layer_names(graph), strict=True):
        top = max(at[b][1] for b in layer) + 0.35 * _ROW
        ax.text(
            at[layer[0]][0],
            top,
            name,
            ha="center",
            va="bottom",
            color=_EDGE,
            fontsize=9,
        )
    xs, ys = zip(*at.values(), strict=True)
    ax.set(
        xlim=(min(xs) - _COLUMN / 2, max(xs) + _COLUMN / 2),
        ylim=(min(ys) - _ROW / 2, max(ys) + _ROW / 2),
    )
    ax.axis("off")
    return ax


def _positions(graph: Declaration) -> dict[str, tuple[float, float]]:
    """Place the blocks in one column per layer."""
    at = {}
    for column, layer in enumerate(graph.block_layers):
        for row, block in enumerate(layer):
            # Shifted columns keep an edge between the first and the third off the
            # blocks of the second.
            shift = 0.0 if len(graph.block_layers) < 3 else 0.9 * (column % 2)
            at[block] = (_COLUMN * column, _ROW * ((len(layer) - 1) / 2 - row) - shift)
    return at
