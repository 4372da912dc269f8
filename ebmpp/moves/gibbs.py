# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws of layers, for many rows at once: the base of every sampler.

A *row* is one state, of blocks of shape ``(rows, *shape)``, with a key of shape
``(rows, 2)``. A row's draws depend on its own key only. Random words are assigned to
blocks in the order of the argument ``families``. Nothing is checked here.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from jax import Array, lax
import jax.numpy as jnp
from jax.tree_util import Partial

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
from ebmpp.core.backend import accelerated, barrier_pays, fusion_barrier
from ebmpp.core.compile import is_fast_compile
from ebmpp.families.family import (
    Families,
    Family,
    draw_rows,
    num_words,
    split_words,
)
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.coloring import SplitBlock
from ebmpp.graph.factors.shifts import pack, unpack
from ebmpp.moves.couplings import PartIndex
from ebmpp.moves.target import Target

#: Function without arguments that returns natural parameters, a pytree of what it reads.
Natural = Partial
#: From natural parameters, families and the index of the part to new values; the index
#: is None where a layer is drawn at once.
Drawer = Callable[[Natural, Families, PartIndex | None], Rows]


def keep_observed(keep: UnitMasks, x: Rows, new: Rows) -> Blocks:
    """Return ``new`` where units are free, ``x`` where they are observed."""
    return {b: jnp.where(keep[b], x[b], v) if b in keep else v for b, v in new.items()}


def known(eta: Rows) -> Natural:
    """Return a function that returns ``eta``."""
    return Partial(dict, eta)


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
        return keep_observed(target.keep, x, new(known(eta), families, None))
    (block,) = blocks
    split = graph.splits[block]
    context = energy.part_context(graph, target.params, x, block)
    packs = _packing_pays(split, len(x[block]))

    def packed(values):
        return pack(split, values) if packs else values

    if packs:
        shifts = zip(split.shifts, context.prepared, strict=True)
        weights = tuple(shifted.spread(prepared) for shifted, prepared in shifts)
        context = context._replace(eta=packed(context.eta), prepared=weights)
    observed = None
    if block in target.keep:
        observed = packed(energy.to_units(target.keep[block], split.family))

    def of_slices(part, target, units, context):
        return {block: target.natural_part(x, units, block, context, part)[0]}

    def step(part, state):
        units, carried = state
        now = context._replace(carried=carried)
        eta, advance = target.natural_part(x, units, block, now, part)
        natural = known({block: eta})
        if packs:  # computed in the loop of the draw, 0.4 of the time
            natural = Partial(partial(of_slices, part), target, units, now)
        drawn = new(natural, {block: split.part_family(part)}, part)[block]
        drawn = drawn if packs else drawn.T
        if observed is not None:
            old = split.take(units, part)
            is_observed = split.take(observed, part)
            drawn = jnp.where(is_observed, old, drawn.astype(old.dtype))
        units = split.put(units, part, drawn)
        return units, advance(units)

    values = energy.to_units(x[block], split.family)
    if packs and fits_bytes(split.family):
        values = values.astype(jnp.int8)
    start = packed(values), context.carried
    units, _ = fold_parts(split.num_parts, step, start)
    if packs:
        units = unpack(split, units).astype(x[block].dtype)
    return {block: energy.to_rows(units, split.family)}


def _packing_pays(split: SplitBlock, rows: int) -> bool:
    """Return True if slices of packed parts are faster than gathers.

    An H200 drew 136 to 142 spins per nanosecond by slices and 32 to 39 by gathers
    (1024x1024 spins, 64 chains). On two cores 16 to 50 chains of 64x64 spins take 0.5 to
    0.95 of the time of gathers, 64 to 256 chains 1.1 to 1.2, and 1 to 128 chains of
    256x256 spins 0.4 to 0.9.
    """
    size = split.family.size
    is_wide = rows < _MANY_ROWS or barrier_pays(size)
    is_large = barrier_pays(2 * rows * size) and is_wide
    return (accelerated() or is_large) and None not in split.shifts


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


def draw_part(families: Families, natural: Natural, keys: Keys) -> Blocks:
    """Draw the units of a part."""
    ((block, family),) = families.items()
    # a loop pays for fewer values than elsewhere: 10 rows of 512 units of a lattice,
    # whose fields are gathered, took 0.03 in place of 0.20 ms per sweep
    if not barrier_pays(4 * len(keys) * family.size):
        return draw(families, natural(), keys)
    if fits_bytes(family):
        return {block: draw_pairs(family, natural, keys)}
    units_first = jnp.swapaxes(natural()[block], 0, 1)

    def draw_at(units_first):
        rows_first = {block: jnp.swapaxes(units_first, 0, 1)}
        return draw(families, rows_first, keys)[block].T

    return {block: fusion_barrier(draw_at, units_first).T}


def initial_rows(graph: FactorGraph, blocks: Iterable[str], keys: Keys) -> Blocks:
    """Draw initial values of ``blocks``: uniform where the family has a uniform distribution."""
    families = select(graph.families, blocks)
    parts = split_words(families, random.words(keys, num_words(families)))
    return {b: family.initial(parts[b]) for b, family in families.items()}


_FEW_ROWS = 16  # up to which units, not rows, are the inner axis of XLA's loops
_MANY_ROWS = 64  # from which gathers of the rows of a unit are fast


def fits_bytes(family: Family) -> bool:
    """Return True if a unit takes one word and its values fit in a byte."""
    if family.num_words != 1:
        return False
    with sharding.eager():  # also called in a trace
        states = family.states()
        return states is not None and bool((np.abs(np.asarray(states)) < 128).all())


def draw_pairs(family: Family, natural: Natural, keys: Keys) -> Array:
    """Draw a block of one axis from the words of :func:`draw_rows`, two per hash.

    A hash has two words, of which :func:`ebmpp.core.random.words` keeps one: XLA would
    otherwise not vectorise the loop that it fuses with. Here two units use both, and
    their values share 16 bits.
    """
    size = family.size
    half = (size + 1) // 2
    is_gathered = natural.func is dict
    # of the units: the rows are last in gathered parameters
    axis = int(not is_gathered or len(keys) <= _FEW_ROWS)

    def turn(a):
        """Put the units first if there are many rows, and undo that."""
        return a if axis else jnp.swapaxes(a, 0, 1)

    def sample_bits(words, eta):
        values = family.sample(words[..., None], eta).astype(jnp.int8)
        return lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)

    def sample_pairs(keys, natural):
        (eta,) = natural().values()
        eta = turn(eta)
        number = turn(jnp.arange(half, dtype=jnp.uint32)[None])
        words = random.threefry(turn(keys[:, None]), number, number + jnp.uint32(half))
        padding = [(0, 0)] * eta.ndim
        padding[axis] = (0, 2 * half - size)
        etas = jnp.split(jnp.pad(eta, padding), 2, axis)
        low, high = map(sample_bits, words, etas)
        return low | (high << jnp.uint16(8))

    pairs = fusion_barrier(sample_pairs, keys, natural)
    halves = (p.astype(jnp.uint8) for p in (pairs, pairs >> jnp.uint16(8)))
    values = [lax.bitcast_convert_type(half, jnp.int8) for half in halves]
    return turn(jnp.concatenate(values, axis))[:, :size].astype(family.dtype)
