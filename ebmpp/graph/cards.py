# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What ``print`` and notebooks show of a graph: its blocks and factors, and a drawing of our own."""

import math

import numpy as np

import jax

from ebmpp.core.display import Card, Grid, svg, words
from ebmpp.core.types import Params
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.drawing import COLUMN, family_lines, layer_names, positions

#: Of Okabe and Ito, told apart by the colour-blind; dark text can be read on each.
_FILLS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00")
_INK, _PLAIN = "#111111", "#e4e7eb"
_SCALE, _WIDTH, _HEIGHT = 70, 112, 62  # pixels: of an inch of the drawing, and of a block
_MIDDLE = 'text-anchor="middle" '


def card(graph: Declaration, kind: str = "FactorGraph") -> Card:
    """Blocks, factors and the drawing.

    :param kind: what is shown, for the title.
    """
    units, layers = sum(f.size for f in graph.families.values()), len(graph.layers)
    params = sum(map(_size, graph.param_shapes.values()))
    rows = [
        (b, repr(graph.families[b]), graph.families[b].size, _role(graph, b), named)
        for layer, named in zip(graph.block_layers, layer_names(graph), strict=True)
        for b in layer
    ]
    blocks = Grid(("block", "family", "units", "role", "drawn in"), rows)
    title = f"{kind}: {_many(units, 'unit')} in {_many(len(rows), 'block')}, {_many(layers, 'layer')}"
    title += f", {_many(params, 'param')} in {_many(len(graph.factors), 'factor')}"
    return Card(title, (blocks, factor_grid(graph)), (drawn(graph),))


def factor_grid(graph: Declaration, params: Params | None = None) -> Grid:
    """The factors with their params' shapes, and of given params the root of the mean square."""
    rows = []
    for f in graph.factors:
        leaves = jax.tree_util.tree_leaves_with_path(graph.param_shapes[f.name])
        shapes = ", ".join(f"{jax.tree_util.keystr(p)} {a.shape}".strip() for p, a in leaves)
        row = (f.name, type(f).__name__, ", ".join(f.blocks), shapes, _size(graph.param_shapes[f.name]))
        rows.append(row if params is None else (*row, root_mean_square(params[f.name])))
    head = ("factor", "kind", "blocks", "shape", "params")
    return Grid(head if params is None else (*head, "root mean square"), rows)


def root_mean_square(tree: Params) -> float:
    """Over all numbers of some params; nan of none."""
    leaves = [np.asarray(a, float) for a in jax.tree.leaves(tree)]
    size = sum(a.size for a in leaves)
    return math.sqrt(sum(float((a**2).sum()) for a in leaves) / size) if size else math.nan


def _size(shapes: Params) -> int:
    return sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))


def _role(graph: Declaration, block: str) -> str:
    return "visible" if block in graph.visible else "latent"


def _many(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def drawn(graph: Declaration) -> str:
    """Blocks in columns, one a layer and in its colour, and the factors between them, as SVG."""
    at = {b: (_SCALE * x, -_SCALE * y) for b, (x, y) in positions(graph).items()}
    body, labels = _factors(graph, at)
    for i, (layer, named) in enumerate(zip(graph.block_layers, layer_names(graph), strict=True)):
        top = min(at[b][1] for b in layer) - _HEIGHT / 2 - 10
        body += words(at[layer[0]][0], top, named, more=_MIDDLE)
        body += "".join(_block(graph, b, at[b], _FILLS[i % len(_FILLS)]) for b in layer)
    body += labels
    xs, ys = zip(*at.values(), strict=True)
    left, top = min(xs) - _WIDTH / 2 - 20, min(ys) - _HEIGHT / 2 - 26
    size = max(xs) + _WIDTH / 2 + 20 - left, max(ys) + _HEIGHT / 2 + 24 - top
    return svg((left, top, *size), body, "the graph's blocks and factors")


def _block(graph: Declaration, name: str, at: tuple[float, float], fill: str) -> str:
    (x, y), family, ink = at, family_lines(graph, name), f'{_MIDDLE}fill="{_INK}"'
    fitted = lambda told, size: min(size, 1.7 * _WIDTH / len(told))
    made = (
        f'<rect x="{x - _WIDTH / 2:.1f}" y="{y - _HEIGHT / 2:.1f}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'rx="8" fill="{fill}" stroke="currentColor" stroke-width="{2.5 if name in graph.visible else 1}"/>'
        + words(x, y - 14, name, fitted(name, 14), f'{ink} font-weight="bold"')
        + "".join(words(x, y + 2 + 11 * i, told, fitted(told, 10), ink) for i, told in enumerate(family))
        + words(x, y + 25, _role(graph, name), 10, ink)
    )
    own = ", ".join(f.name for f in graph.factors if f.blocks == (name,))
    return made + (words(x, y + _HEIGHT / 2 + 13, f"factor {own}", fitted(own, 10), _MIDDLE) if own else "")


def _factors(graph: Declaration, at: dict[str, tuple[float, float]]) -> tuple[str, str]:
    """Lines from a factor's label to its blocks, and the labels; factors of the same blocks share one."""
    scopes: dict[tuple[str, ...], list[str]] = {}
    for f in graph.factors:
        if len(set(f.blocks)) > 1:
            scopes.setdefault(tuple(sorted(set(f.blocks), key=list(at).index)), []).append(f.name)
    taken: list[tuple[float, float]] = []
    lines, labels = "", ""
    for scope, names in scopes.items():
        told = ", ".join(names)
        x, y = _free([at[b] for b in scope], taken)
        taken.append((x, y))
        for b in scope:
            ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{at[b][0]:.1f}" y2="{at[b][1]:.1f}"'
            lines += f'<line {ends} stroke="currentColor" stroke-width="1.5" opacity="0.7"/>'
        wide = min(6.2 * len(told) + 12, 1.1 * _SCALE)
        labels += f'<rect x="{x - wide / 2:.1f}" y="{y - 9:.1f}" width="{wide:.1f}" height="18" rx="3" '
        labels += f'fill="{_PLAIN}" stroke="currentColor" stroke-width="0.8"/>'
        size = min(11, 1.7 * wide / len(told))
        labels += words(x, y + 4, told, size, f'{_MIDDLE}fill="{_INK}"')
    return lines, labels


def _free(ends: list[tuple[float, float]], taken: list[tuple[float, float]]) -> tuple[float, float]:
    """Where a label goes: amid its blocks, in a gap between columns, beside those that are there."""
    first, rest = np.array(ends[0]), np.mean(ends[1:], axis=0)
    columns = max(1.0, abs(rest[0] - first[0]) / (COLUMN * _SCALE))
    shares = [gap + share for share in (0.5, 0.32, 0.68) for gap in range(int(columns))]
    places = [first + share / columns * (rest - first) for share in shares]
    apart = lambda p: min((max(abs(p[0] - x) / 70, abs(p[1] - y) / 20) for x, y in taken), default=1.0)
    x, y = max(places, key=lambda p: min(1.0, apart(p)))  # the first that is free, else the freest
    return float(x), float(y)
