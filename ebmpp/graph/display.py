# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Printed summary and matplotlib drawing of a graph."""

import itertools
import math
from typing import TYPE_CHECKING

from jaxtyping import PyTree
import networkx as nx
import numpy as np

import jax

from ebmpp.core import Params
from ebmpp.core.display import Card, Grid
from ebmpp.graph.declaration import Declaration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_VISIBLE = "#c6d8ea"
_LATENT = "#ffffff"
_EDGE = "#7b8794"
# distances between blocks in inches
_COLUMN = 3.0
_ROW = 1.8


def card(graph: Declaration) -> Card:
    """Return tables of the blocks and factors of a graph."""
    params = sum(map(_size, graph.param_shapes.values()))
    title = (
        f"FactorGraph: {_count(graph.num_units, 'unit')} in "
        f"{_count(len(graph.families), 'block')}, {_count(len(graph.layers), 'layer')}, "
        f"{_count(params, 'param')} in {_count(len(graph.factors), 'factor')}"
    )
    rows = []
    for layer, name in zip(graph.block_layers, _layer_names(graph), strict=True):
        for block in layer:
            family = graph.families[block]
            role = "visible" if block in graph.visible else "latent"
            rows.append((block, repr(family), family.size, role, name))
    blocks = Grid(("block", "family", "units", "role", "drawn in"), rows)
    return Card(title, (blocks, factor_grid(graph)))


def factor_grid(graph: Declaration, params: Params | None = None) -> Grid:
    """Return a table of factors and their params' shapes, and root mean squares of ``params``."""
    head = ["factor", "kind", "blocks", "shape", "params"]
    is_affine = all(factor.affine for factor in graph.factors)
    if not is_affine:
        head.append("evaluations per sweep")
    if params is not None:
        head.append("root mean square")
    rows = []
    for factor in graph.factors:
        tree = graph.param_shapes[factor.name]
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        shapes = [f"{jax.tree_util.keystr(p)} {a.shape}".strip() for p, a in leaves]
        kind = type(factor).__name__
        row = [factor.name, kind, ", ".join(factor.blocks), ", ".join(shapes)]
        row.append(_size(tree))
        if not is_affine:
            evaluated = [] if factor.affine else factor.blocks
            row.append(sum(graph.splits[b].evaluations(factor) for b in evaluated))
        if params is not None:
            row.append(_root_mean_square(params[factor.name]))
        rows.append(tuple(row))
    return Grid(tuple(head), rows)


def _root_mean_square(params: PyTree) -> float:
    arrays = [np.asarray(a, float) for a in jax.tree.leaves(params)]
    size = sum(a.size for a in arrays)
    square = sum(float((a**2).sum()) for a in arrays)
    return math.sqrt(square / size) if size else math.nan


def _size(shapes: Params) -> int:
    return sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))


def _count(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


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
        width = _COLUMN * len(graph.block_layers)
        height = _ROW * max(map(len, graph.block_layers)) + 0.6
        figure = plt.figure(figsize=(width, height), layout="constrained")
        ax = figure.add_subplot()
    nx.draw_networkx_edges(blocks, at, ax=ax, edge_color=_EDGE)
    factors = {(a, b): "\n".join(names) for a, b, names in blocks.edges(data="factors")}
    nx.draw_networkx_edge_labels(blocks, at, factors, ax=ax, font_size=8, rotate=False)
    for side, colour in ((graph.visible, _VISIBLE), (graph.latent, _LATENT)):
        labels = {b: f"{b}\n{family!r}" for b, family in side.items()}
        for b in side:
            names = ", ".join(f.name for f in graph.factors if f.blocks == (b,))
            if names:
                labels[b] += f"\nfactors: {names}"
        box = {"facecolor": colour, "edgecolor": _EDGE, "boxstyle": "round,pad=0.6"}
        nx.draw_networkx_labels(blocks, at, labels, ax=ax, font_size=9, bbox=box)
    for layer, name in zip(graph.block_layers, _layer_names(graph), strict=True):
        left = at[layer[0]][0]
        top = max(at[b][1] for b in layer) + 0.35 * _ROW
        text = ax.text(left, top, name, ha="center", va="bottom")
        text.set(color=_EDGE, fontsize=9)
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
