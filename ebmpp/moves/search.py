# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local search: each layer in turn is set to its conditional mode, until nothing changes.

A pass never lowers the density, and a family's mode decides ties in a fixed order, so a
pass that changes something rises in the density or, at equal density, in that order:
with finitely many states the search ends. A float32 natural parameter within rounding
of 0 may have the wrong sign, and states could then recur. A pass is a function of the
state, so a cycle is detected by comparison with a state stored after 1, 2, 4, ...
passes (Brent's algorithm), and the search ends there too.
"""

from collections.abc import Iterable
import dataclasses
from typing import NamedTuple

import numpy as np

import jax
from jax import lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Counts,
    Keys,
    PerRow,
    RowMask,
    Rows,
    State,
    compiled,
    is_concrete,
    random,
)
from ebmpp.errors import StateError
from ebmpp.graph import energy
from ebmpp.graph.declaration import schedule
from ebmpp.graph.factors.evaluation import values_of
from ebmpp.graph.factors.zeros import BARRIER, CERTAIN
from ebmpp.moves import Layer, Target
from ebmpp.moves.couplings import where_rows, where_states
from ebmpp.moves.gibbs import initial_rows, visit
from ebmpp.moves.gradients import informed
from ebmpp.moves.move import draw_sweep, gibbs_sweep
from ebmpp.moves.rungs import Tempering

_FIRST_PASSES = 32  # of the first cycle of a search for a possible state
_MOST_PASSES = 4096
_FEWEST = 20  # rows from which on units that differ are known to be stuck


class Search(NamedTuple):
    """Results of searches, one per row."""

    x: Blocks
    """Full states."""
    value: PerRow
    """Unnormalised log-density of each row."""
    steps: Counts
    """Number of passes over the layers that changed the state."""


def local_modes(target: Target, x: Rows, keys: Keys | None = None) -> Search:
    """Make passes until no row changes, from a random layer or, without keys, from the first."""
    start = dict(x)
    if keys is not None:
        start = _first_pass(target, x, keys)
    is_new = ~_rows_equal(start, x)

    def step(carry):
        number, past, x, steps, going = carry
        moved = dict(x)
        for blocks in target.layers:
            moved |= _modes(target, moved, blocks)
        # the density does not decide: in float32 the energy of many units may not
        # change with one of them
        going &= ~_rows_equal(moved, x)
        x = where_states(going, moved, x)
        steps += going.astype(steps.dtype)
        # a cycle by rounding
        going &= ~_rows_equal(x, past)
        store = number & (number - 1) == 0
        past = {b: jnp.where(store, v, past[b]) for b, v in x.items()}
        return number + 1, past, x, steps, going

    carry = jnp.int32(1), start, start, is_new.astype(jnp.int32), jnp.ones_like(is_new)
    _, _, x, steps, _ = lax.while_loop(lambda carry: carry[-1].any(), step, carry)
    return Search(x, energy.log_density(target.graph, target.params, x), steps)


def _first_pass(target: Target, x: Rows, keys: Keys) -> Blocks:
    """Make a pass of each row from a random layer to the last one.

    With two layers this is the random order of Taniguchi et al. (2023), Algorithms 1
    and 5.
    """
    first = random.words(keys, 1)[:, 0] % jnp.uint32(len(target.layers))
    moved = dict(x)
    for index, blocks in enumerate(target.layers):
        at = (first > 0) & (first <= index)
        for b, mode in _modes(target, moved, blocks).items():
            moved[b] = where_rows(at, mode, moved[b])
    return moved


def _modes(target: Target, x: Rows, blocks: tuple[str, ...]) -> Blocks:
    def new(natural, families, _):
        return {b: families[b].mode(e).astype(x[b].dtype) for b, e in natural().items()}

    return visit(target, x, blocks, new)


def _rows_equal(x: Rows, y: Rows) -> RowMask:
    """Return True for the rows with equal states; nan equals nan, as it stays nan."""
    equal = [jnp.isclose(x[b], v, 0, 0, equal_nan=True) for b, v in y.items()]
    return jnp.stack([e.reshape(len(e), -1).all(-1) for e in equal]).all(0)


#: Kinds of starts.
STARTS = ("uniform", "local_mode")


def initial_states(
    target: Target,
    keys: Keys,
    init: State | None = None,
    kind: str = "uniform",
    blocks: Iterable[str] = (),
) -> Blocks:
    """Return initial draws, overridden by ``init`` and by clamped values.

    Blocks that a nonempty ``init`` lacks are drawn from their conditionals: a sweep
    that begins with the blocks of ``init`` would forget them beside uniform draws.

    :param init: values of some blocks, as rows or one row for all.
    :param kind: "uniform", or "local_mode" to continue with :func:`near_modes`.
    :param blocks: blocks for which words are drawn; default: all.
    """
    init = init or {}
    families = target.graph.families
    x = initial_rows(target.graph, tuple(blocks) or families, keys)
    for b, v in {**init, **target.clamped}.items():
        rows = jnp.broadcast_to(v, (len(keys), *v.shape[1:]))
        x[b] = rows.astype(families[b].dtype)
    x = target.with_observed(x)
    if init:
        x = draw_rest(target, x, random.fold_in(keys, 3), init)
    x = find_possible(target, x, random.fold_in(keys, 4), init)
    return near_modes(target, x, keys) if kind == "local_mode" else x


#: :func:`initial_states` compiled, for the host: it has some seventy operations, each
#: of which would be compiled.
compiled_initial_states = jax.jit(initial_states, static_argnames=("kind", "blocks"))


def find_possible(
    target: Target, x: Rows, keys: Keys, held: Iterable[str] = ()
) -> Blocks:
    """Return rows, with impossible ones moved in search of a possible state.

    Such a row starts again with one value in the units of a part. A violated constraint
    costs an energy that rises from 4 to 8 in cycles, each twice as long as the one
    before. A row is moved until it is possible, for at most 4,064 sweeps. (Colourings
    of a 32x32 lattice by three colours take 10 in the median of 300 rows and at most
    87, and 90 to 2,400 from uniform values, where walls between ordered regions
    diffuse.)

    :param held: blocks that stay, beside the clamped ones.
    """
    graph = target.graph
    infinite = (b for b, f in graph.families.items() if f.states() is None)
    fixed = {*target.clamped, *held, *infinite}
    moves = gibbs_sweep(graph, fixed)
    if not (graph.has_zeros and moves):
        return dict(x)

    def is_impossible(x):
        return jnp.isinf(log_density(target, x))

    def cond(carry):
        number, is_stuck, _ = carry
        return is_stuck.any() & (number < _MOST_PASSES)

    def body(carry):
        number, is_stuck, x = carry
        length = 2.0 ** jnp.floor(jnp.log2(number))
        tempering = Tempering(4 * number / length / BARRIER)
        rung = dataclasses.replace(target, tempering=tempering)
        moved, _ = draw_sweep(rung, x, moves, random.fold_in(keys, number))
        x = where_states(is_stuck, moved, x)
        return number + 1, is_impossible(x), x

    is_stuck = is_impossible(x)
    blocks = [b for b in graph.splits if b not in fixed]
    ordered = target.with_observed({**x, **_ordered(target, keys, blocks)})
    x = where_states(is_stuck, ordered, x)
    return lax.while_loop(cond, body, (jnp.int32(_FIRST_PASSES), is_stuck, x))[2]


def _ordered(target: Target, keys: Keys, blocks: Iterable[str]) -> Blocks:
    """Return values of blocks, one per part, in a random order, cyclically."""
    result = {}
    for b in blocks:
        family = target.graph.families[b]
        values = informed.values_of(family)
        ranks = random.words(random.fold_in(keys, 0), len(values)).argsort(-1)
        parts = target.graph.splits[b].colors.reshape(family.shape)
        result[b] = values[ranks[:, parts % len(values)]].astype(family.dtype)
    return result


def log_density(target: Target, x: Rows) -> PerRow:
    """Return the unnormalised log-density of rows, -inf for impossible states."""
    value = energy.log_density(target.graph, target.params, x)
    return energy.with_infinities(target.graph, value)


_log_density = compiled(log_density)


def check_starts(who: str, target: Target, x: Rows) -> str:
    """Refuse starts of probability zero, and describe units that stay at their starts.

    No change of a single unit changes these: all units of all rows, or units in none of
    at least 20 rows, which have different values there.

    :return: an empty text without such units, or for traced rows.
    :raises StateError: saying how many of the rows are impossible.
    """
    if not target.graph.has_zeros or not is_concrete((x, target)):
        return ""
    wrong = np.isinf(_log_density(target, x))
    if wrong.any():
        raise StateError(
            f"{who}: starts must have positive probability, got {wrong.sum()} of "
            f"{len(wrong)} without, after a search of {_MOST_PASSES} sweeps. Give "
            "possible states as init, and check that infinite energies and clamped "
            "values leave any."
        )
    counts = {}
    frozen = jax.tree.map(np.asarray, _frozen(target, x))
    are_all = all(flags.all() for flags in frozen.values())
    if are_all or len(wrong) >= _FEWEST:
        for b, flags in frozen.items():
            value = np.asarray(x[b])
            differs = (value != value[:1]).any(0) | (len(wrong) == 1)
            counts[b] = int((flags.all(0) & differs).sum())
    names = ", ".join(f"{count} of block {b!r}" for b, count in counts.items() if count)
    return names and (
        f"no change of a single unit keeps the state possible for units {names}, so "
        "they stay at their starts (a fixed sum, say, holds all units). Use moves that "
        "change several units at once."
    )


@compiled
def _frozen(target: Target, x: Rows) -> Rows:
    """Return True for units of free blocks that have one possible value given all others."""
    result = {}
    for b in target.free:
        family = target.graph.families[b]
        if values_of(family) is None:
            result[b] = jnp.zeros(x[b].shape, bool)
            continue
        eta = target.natural(x, [b])[b]
        if family.stat_shape:
            is_possible = eta > eta.max(-1, keepdims=True) - CERTAIN
            result[b] = is_possible.sum(-1) == 1
        else:
            result[b] = abs(eta) >= CERTAIN
        if b in target.keep:
            result[b] &= ~target.keep[b]
    return result


def draw_rest(target: Target, x: Rows, keys: Keys, known: Iterable[str]) -> Blocks:
    """Draw each free block that is not known once, neighbours of known blocks first."""
    graph = target.graph
    x = dict(x)
    known = {*known, *target.clamped}
    while rest := [b for layer in schedule(graph, known) for b in layer]:
        near = [b for b in rest if not known.isdisjoint(graph.neighbours([b]))] or rest
        layers = [[b for b in layer if b in near] for layer in graph.block_layers]
        first = Layer(tuple(next(filter(None, layers))))
        drawn, _ = first.draw(target, x, random.fold_in(keys, len(known)))
        x |= drawn
        known.update(first.blocks)
    return x


def near_modes(target: Target, x: Rows, keys: Keys) -> Blocks:
    """Return states one Gibbs sweep after a local mode (Taniguchi et al. 2023, section 3.3)."""
    modes = local_modes(target, x, random.fold_in(keys, 1)).x
    sweep = [Layer(blocks) for blocks in target.layers]
    moved, _ = draw_sweep(target, modes, sweep, random.fold_in(keys, 2))
    return moved
