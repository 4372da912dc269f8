# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws of layers, for many rows at once: the base of every sampler.

A *row* is one state, of blocks of shape ``(rows, *shape)``, with a key of shape
``(rows, 2)``. A row's draws depend on its own key only. Random words are assigned to
blocks in the order of the argument ``families``. Nothing is checked here.
"""

from collections.abc import Callable, Iterable

import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Keys,
    Rows,
    UnitMasks,
    fold_parts,
    random,
    select,
    sharding,
)
from ebmpp.core.backend import barrier_pays, fusion_barrier
from ebmpp.core.compile import is_fast_compile
from ebmpp.families.family import (
    Families,
    Family,
    draw_rows,
    num_words,
    split_words,
)
from ebmpp.graph import FactorGraph, energy
from ebmpp.moves.couplings import PartIndex
from ebmpp.moves.target import Target

#: From natural parameters, families and the index of the part to new values; the index
#: is None where a layer is drawn at once.
Drawer = Callable[[Blocks, Families, PartIndex | None], Rows]


def keep_observed(keep: UnitMasks, x: Rows, new: Rows) -> Blocks:
    """Return ``new`` where units are free, ``x`` where they are observed."""
    return {b: jnp.where(keep[b], x[b], v) if b in keep else v for b, v in new.items()}


def visit(
    target: Target,
    x: Rows,
    blocks: tuple[str, ...],
    new: Drawer,
) -> Blocks:
    """Return new values of a layer's ``blocks``, part by part where units interact."""
    graph = target.graph
    if graph.splits.keys().isdisjoint(blocks):
        eta = target.natural(x, blocks)
        # in the layer's order; a gradient is sorted by name
        eta = select(eta, blocks)
        families = select(graph.families, blocks)
        return keep_observed(target.keep, x, new(eta, families, None))
    (block,) = blocks
    split = graph.splits[block]
    context = energy.part_context(graph, target.params, x, block)
    observed = None
    if block in target.keep:
        observed = energy.to_units(target.keep[block], split.family)

    def step(part, state):
        units, carried = state
        now = context._replace(carried=carried)
        eta, advance = target.natural_part(x, units, block, now, part)
        drawn = new({block: eta}, {block: split.part_family(part)}, part)[block].T
        if observed is not None:
            is_observed = split.take(observed, part)
            drawn = jnp.where(is_observed, split.take(units, part), drawn)
        units = split.put(units, part, drawn)
        return units, advance(units)

    start = energy.to_units(x[block], split.family), context.carried
    units, _ = fold_parts(split.num_parts, step, start)
    return {block: energy.to_rows(units, split.family)}


def draw(families: Families, eta: Rows, keys: Keys) -> Blocks:
    """Draw blocks from their families at ``eta``, with words of the ``keys``."""
    count = num_words(families)

    def draw_at(eta):
        return draw_rows(families, eta, random.words(keys, count))

    # written into the buffer of their parameters, draws of 100 rows at 784x500 took 1.6
    # times as long
    if is_fast_compile() and barrier_pays(len(keys) * count):
        return fusion_barrier(draw_at, dict(eta))
    return draw_at(eta)


def draw_part(families: Families, eta: Blocks, keys: Keys) -> Blocks:
    """Draw the units of a part."""
    ((block, family),) = families.items()
    # a loop pays for fewer values than elsewhere: 10 rows of 512 units of a lattice,
    # whose fields are gathered, took 0.03 in place of 0.20 ms per sweep
    if not barrier_pays(4 * len(keys) * family.size):
        return draw(families, eta, keys)
    units_first = jnp.swapaxes(eta[block], 0, 1)
    if fits_bytes(family):
        return {block: draw_pairs(family, units_first, keys).T}

    def draw_at(units_first):
        rows_first = {block: jnp.swapaxes(units_first, 0, 1)}
        words = random.words(keys, num_words(families))
        return draw_rows(families, rows_first, words)[block].T

    return {block: fusion_barrier(draw_at, units_first).T}


def initial_rows(graph: FactorGraph, blocks: Iterable[str], keys: Keys) -> Blocks:
    """Draw initial values of ``blocks``: uniform where the family has a uniform distribution."""
    families = select(graph.families, blocks)
    parts = split_words(families, random.words(keys, num_words(families)))
    return {b: family.initial(parts[b]) for b, family in families.items()}


_FEW_ROWS = 16  # up to which units, not rows, are the inner axis of XLA's loops


def fits_bytes(family: Family) -> bool:
    """Return True if a unit takes one word and its values fit in a byte."""
    if family.num_words != 1:
        return False
    with sharding.eager():  # also called in a trace
        states = family.states()
        return states is not None and bool((np.abs(np.asarray(states)) < 128).all())


def draw_pairs(family: Family, eta: Array, keys: Keys) -> Array:
    """Draw a block of one axis, units first, from the words of :func:`draw_rows`, two per hash.

    A hash has two words, of which :func:`ebmpp.core.random.words` keeps one: XLA would
    otherwise not vectorise the loop that it fuses with. Here two units use both, and
    their values share 16 bits.
    """
    size = family.size
    half = (size + 1) // 2
    padding = [(0, 2 * half - size), *[(0, 0)] * (eta.ndim - 1)]

    def turn(a):
        """Put the rows first if they are few."""
        return jnp.swapaxes(a, 0, 1) if len(keys) <= _FEW_ROWS else a

    def sample_bits(words, eta):
        values = family.sample(words[..., None], turn(eta)).astype(jnp.int8)
        return lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)

    def sample_pairs(eta):
        number = jnp.arange(half, dtype=jnp.uint32)[:, None]
        low, high = random.threefry(
            turn(keys[None]), turn(number), turn(number + jnp.uint32(half))
        )
        low = sample_bits(low, eta[:half])
        high = sample_bits(high, jnp.pad(eta[half:], padding))
        return low | (high << jnp.uint16(8))

    pairs = turn(fusion_barrier(sample_pairs, eta))
    packed = jnp.concatenate([pairs, pairs >> jnp.uint16(8)])[:size].astype(jnp.uint8)
    return lax.bitcast_convert_type(packed, jnp.int8).astype(family.dtype)
