# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Drawing layers of many rows at once: what every sampler is made of.

A *row* is one state: of a dict of blocks of shape ``(rows, *shape)``, and of keys of shape
``(rows, 2)``. A row's draws depend on its own key alone. Nothing is checked here.
"""

from collections.abc import Callable, Iterable
from typing import Any

from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.compile import is_fast_compile
from ebmpp.core.loops import apart, pays
from ebmpp.core.types import Blocks, Keep, Keys, Rows
from ebmpp.graph import FactorGraph, energy
from ebmpp.moves import halves
from ebmpp.moves.target import Target

#: All that a draw needs of a graph: its families.
Families = FactorGraph | energy.PartView
#: From natural parameters, the families and the part of a visit to new values; the part is None where a
#: layer is drawn at once.
New = Callable[[Blocks, Families, Any], Rows]


def hold(keep: Keep, x: Rows, new: Rows) -> Blocks:
    """``new`` where units are free, ``x`` where they are held."""
    return {b: jnp.where(keep[b], x[b], v) if b in keep else v for b, v in new.items()}


def visit(target: Target, x: Rows, blocks: Iterable[str], new: New) -> Blocks:
    """New values of the ``blocks`` of a layer: all at once, or part by part where the units interact.

    :param new: makes the values of what can be drawn at once; units that are held stay as they are.
    """
    graph, params, keep, blocks = target.graph, target.params, target.keep, tuple(blocks)
    if graph.splits.keys().isdisjoint(blocks):
        eta = energy.natural_rows(graph, params, x, blocks)
        # in the layer's order, which random words go by; a gradient comes sorted by name
        return hold(keep, x, dict(new({b: eta[b] for b in blocks}, graph, None)))
    (block,) = blocks
    split, around = graph.splits[block], energy.part_context(graph, params, x, block)
    held = energy.to_units(keep[block], split.family) if block in keep else None

    def step(part: Any, units: Array) -> Array:
        eta = energy.natural_part(graph, params, x, units, block, around, part)
        made = new({block: eta}, energy.part_view(graph, block, part), part)[block].T
        if held is not None:
            made = jnp.where(split.take(held, part), split.take(units, part), made)
        return split.put(units, part, made)

    return {block: energy.to_rows(split.each(step, energy.to_units(x[block], split.family)), split.family)}


def num_words(graph: Families, blocks: Iterable[str], *, coupled: bool = False) -> int:
    """How many random words a row's draw of ``blocks`` takes."""
    families = [graph.families[b] for b in blocks]
    return sum(f.size * (f.num_couple_words if coupled else f.num_words) for f in families)


def split_words(graph: Families, blocks: Iterable[str], words: Array, *, coupled: bool = False) -> Blocks:
    """The words of each block, of shape ``(rows, *shape, words a unit)``."""
    parts, start = {}, 0
    for b in blocks:
        family = graph.families[b]
        each = family.num_couple_words if coupled else family.num_words
        stop = start + family.size * each
        parts[b] = words[:, start:stop].reshape(-1, *family.shape, each)
        start = stop
    return parts


def draw_rows(graph: Families, blocks: Iterable[str], eta: Rows, words: Array) -> Blocks:
    """Draw ``blocks`` from their families at ``eta``."""
    parts = split_words(graph, blocks, words)
    return {b: graph.families[b].sample(parts[b], eta[b]) for b in blocks}


def draw(graph: Families, blocks: Iterable[str], eta: Rows, keys: Keys) -> Blocks:
    """Draw ``blocks`` from their families at ``eta``, by words of the ``keys``."""
    blocks = tuple(blocks)
    count = num_words(graph, blocks)
    make = lambda eta: draw_rows(graph, blocks, eta, random.words(keys, count))
    # a loop keeps draws out of the place of their parameters: 100 rows at 784x500 took 1.6 as long there
    return apart(make, dict(eta)) if is_fast_compile() and pays(len(keys) * count) else make(eta)


def draw_part(view: Families, eta: Blocks, keys: Keys) -> Blocks:
    """The same of the units of a part."""
    ((block, natural),) = eta.items()
    family = view.families[block]
    if not pays(len(keys) * family.size):
        return draw(view, eta, eta, keys)
    units_first = jnp.swapaxes(natural, 0, 1)
    if halves.suits(family):
        return {block: halves.draw(family, units_first, keys).T}

    def plain(units_first: Array) -> Array:
        natural = {block: jnp.swapaxes(units_first, 0, 1)}
        return draw_rows(view, natural, natural, random.words(keys, num_words(view, natural)))[block].T

    return {block: apart(plain, units_first).T}


def initial_rows(graph: FactorGraph, blocks: Iterable[str], keys: Keys) -> Blocks:
    """Initial values of ``blocks``: uniform where the family has a uniform law."""
    blocks = tuple(blocks)
    parts = split_words(graph, blocks, random.words(keys, num_words(graph, blocks)))
    return {b: graph.families[b].initial(parts[b]) for b in blocks}
