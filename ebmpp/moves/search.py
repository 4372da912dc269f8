# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local search: layer after layer set to its conditional mode, until nothing changes.

A pass never lowers the density, and a family's mode decides a tie between values one way, so passes that
change something rise in the density or, at equal density, in the order of ties: of finitely many states they
end at one that stays. A float32 natural parameter within rounding of 0 may have the wrong sign, and then
states could come round again; a pass is a function of the state, so they are seen by comparing with one state
of the past, taken anew after 1, 2, 4, ... passes (Brent's algorithm), and the search ends as well.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Blocks, Counts, Keys, PerRow, Rows, State, Which
from ebmpp.graph import energy
from ebmpp.moves import Layer, Target
from ebmpp.moves.couplings import where_rows
from ebmpp.moves.gibbs import initial_rows, visit
from ebmpp.moves.move import draw_sweep


class Search(NamedTuple):
    """Searches under way, one a row."""

    x: Blocks
    """Full states."""
    value: PerRow
    """Unnormalised log-density of each."""
    steps: Counts
    """Passes over the layers that changed the state."""
    going: Which
    """Whether the last pass did: otherwise the search is over."""


def begin(target: Target, x: Rows, keys: Keys) -> Search:
    """Each row starts at a layer of its own, at random: the layers from there on, in a first part of a pass.

    With two layers this is the random order of Taniguchi et al. (2023), Algorithms 1 and 5.

    :param keys: one a row.
    """
    search = _not_yet(target, x)
    first = random.words(keys, 1)[:, 0] % jnp.uint32(len(target.layers))
    moved = dict(x)
    for index, blocks in enumerate(target.layers):
        at = (first > 0) & (first <= index)
        moved |= {b: where_rows(at, v, moved[b]) for b, v in _modes(target, moved, blocks).items()}
    return _improve(target, search, moved)._replace(going=search.going)


def one_pass(target: Target, search: Search) -> Search:
    """One pass over the layers; rows whose search is over stay."""
    moved = dict(search.x)
    for blocks in target.layers:
        moved |= _modes(target, moved, blocks)
    return _improve(target, search, moved)


def local_modes(target: Target, x: Rows, keys: Keys) -> Search:
    """Passes until no row changes."""
    return _to_the_end(target, begin(target, x, keys))


def climb(target: Target, x: Rows) -> Search:
    """The same from the first layer on in every row: a function of ``x``, without a random word."""
    return _to_the_end(target, _not_yet(target, x))


def _not_yet(target: Target, x: Rows) -> Search:
    rows = len(next(iter(x.values())))
    value = energy.log_density(target.graph, target.params, x)
    return Search(dict(x), value, jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool))


def _to_the_end(target: Target, start: Search) -> Search:
    def step(carry: tuple[Array, Rows, Search]) -> tuple[Array, Rows, Search]:
        number, past, search = carry
        search = one_pass(target, search)
        search = search._replace(going=search.going & ~_equal(search.x, past))  # rounding goes in circles
        anew = number & (number - 1) == 0
        return number + 1, {b: jnp.where(anew, v, past[b]) for b, v in search.x.items()}, search

    carry = jnp.ones((), jnp.int32), start.x, start
    return lax.while_loop(lambda carry: carry[2].going.any(), step, carry)[2]


def _modes(target: Target, x: Rows, blocks: tuple[str, ...]) -> Blocks:
    new = lambda eta, view, _: {b: view.families[b].mode(e).astype(x[b].dtype) for b, e in eta.items()}
    return visit(target, x, blocks, new)


def _improve(target: Target, search: Search, moved: Rows) -> Search:
    """Take ``moved`` where it is another state. Not where the density rises: in float32 the energy of many
    units does not see one of them change."""
    changed = search.going & ~_equal(moved, search.x)
    x = {b: where_rows(changed, moved[b], v) for b, v in search.x.items()}
    value = energy.log_density(target.graph, target.params, x)
    return Search(x, value, search.steps + changed.astype(search.steps.dtype), changed)


def _equal(x: Rows, y: Rows) -> Which:
    """Which rows are one state; nan is equal to itself, for nothing moves it."""
    alike = [((x[b] == v) | ((x[b] != x[b]) & (v != v))).reshape(len(v), -1).all(-1) for b, v in y.items()]
    return jnp.stack(alike).all(0)


# -- where chains start ----------------------------------------------------------------------------

#: Where chains start that are told no more.
STARTS = ("uniform", "local_mode")


def start(
    target: Target, keys: Keys, init: State | None = None, kind: str = "uniform", blocks: Iterable[str] = ()
) -> Blocks:
    """Rows at initial draws, where ``init`` and what is given do not say otherwise; and what that leads to.

    :param keys: one a row.
    :param init: values of some blocks, as rows or one row for all.
    :param kind: "uniform" to stay there, or "local_mode": see :func:`near_modes`.
    :param blocks: those that words are drawn for; all by default.
    """
    graph = target.graph
    x = initial_rows(graph, tuple(blocks) or tuple(graph.families), keys)
    spread = lambda b, v: jnp.broadcast_to(v, (len(keys), *v.shape[1:])).astype(graph.families[b].dtype)
    x |= {b: spread(b, v) for b, v in {**(init or {}), **target.clamped}.items()}
    return near_modes(target, target.hold(x), keys) if kind == "local_mode" else target.hold(x)


#: The same as a program, for the host: op by op it is some seventy, of which each compiles.
started = jax.jit(start, static_argnames=("kind", "blocks"))


def near_modes(target: Target, x: Rows, keys: Keys) -> Blocks:
    """One Gibbs sweep from a local mode: a start that can be anywhere, likely where the density is high.

    Taniguchi et al. (2023), section 3.3.
    """
    found = local_modes(target, x, random.fold_in(keys, 1)).x
    moves = tuple(map(Layer, target.layers))
    return draw_sweep(target, found, moves, random.fold_in(keys, 2))[0]
