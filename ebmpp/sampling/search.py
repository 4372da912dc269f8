# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local search: layer after layer set to its conditional mode, until nothing changes.

A pass never lowers the density, and a family's mode decides a tie between values one way, so passes that
change something rise in the density or, at equal density, in the order of ties: of finitely many states they
end at one that stays. A float32 natural parameter within rounding of 0 may have the wrong sign, and then
states could come round again; a pass is a function of the state, so they are seen by comparing with one state
of the past, taken anew after 1, 2, 4, ... passes (Brent's algorithm), and the search ends as well.
"""

from typing import Any, NamedTuple

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Keep, Rows, Schedule
from ebmpp.graph import FactorGraph, energy
from ebmpp.moves.couplings import where_rows
from ebmpp.moves.gibbs import sweep_rows, visit


class Search(NamedTuple):
    """Searches under way, one a row."""

    x: dict[str, Array]
    """Full states, ``(rows, *shape)`` a block."""
    value: Array
    """Unnormalised log-density of each."""
    steps: Array
    """Passes over the layers that changed the state."""
    going: Array
    """Whether the last pass did: otherwise the search is over."""


def begin(graph: FactorGraph, params: Any, x: Rows, layers: Schedule, pairs: Array, keep: Keep) -> Search:
    """Each row starts at a layer of its own, at random: the layers from there on, in a first part of a pass.

    With two layers this is the random order of Taniguchi et al. (2023), Algorithms 1 and 5.

    :param pairs: key pairs, one a row.
    :param keep: units that are held.
    """
    rows = len(pairs)
    search = Search(
        dict(x), energy.log_density(graph, params, x), jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool)
    )
    first = random.words(pairs, 1)[:, 0] % jnp.uint32(len(layers))
    moved = dict(x)
    for index, blocks in enumerate(layers):
        at = (first > 0) & (first <= index)
        moved |= {
            b: where_rows(at, v, moved[b]) for b, v in _modes(graph, params, moved, blocks, keep).items()
        }
    return _improve(graph, params, search, moved)._replace(going=search.going)


def one_pass(graph: FactorGraph, params: Any, search: Search, layers: Schedule, keep: Keep) -> Search:
    """One pass over the layers; rows whose search is over stay."""
    moved = dict(search.x)
    for blocks in layers:
        moved |= _modes(graph, params, moved, blocks, keep)
    return _improve(graph, params, search, moved)


def local_modes(
    graph: FactorGraph, params: Any, x: Rows, layers: Schedule, pairs: Array, keep: Keep
) -> Search:
    """Passes until no row changes."""
    return _to_the_end(graph, params, begin(graph, params, x, layers, pairs, keep), layers, keep)


def climb(graph: FactorGraph, params: Any, x: Rows, layers: Schedule, keep: Keep) -> Search:
    """The same from the first layer on in every row: a function of ``x``, without a random word."""
    rows = len(next(iter(x.values())))
    zero, going = jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool)
    return _to_the_end(
        graph, params, Search(dict(x), energy.log_density(graph, params, x), zero, going), layers, keep
    )


def _to_the_end(graph: FactorGraph, params: Any, start: Search, layers: Schedule, keep: Keep) -> Search:
    def step(carry: tuple[Array, Rows, Search]) -> tuple[Array, Rows, Search]:
        number, past, search = carry
        search = one_pass(graph, params, search, layers, keep)
        search = search._replace(going=search.going & ~_equal(search.x, past))  # rounding goes in circles
        anew = number & (number - 1) == 0
        return number + 1, {b: jnp.where(anew, v, past[b]) for b, v in search.x.items()}, search

    carry = jnp.ones((), jnp.int32), start.x, start
    return lax.while_loop(lambda carry: carry[2].going.any(), step, carry)[2]


def near_modes(
    graph: FactorGraph, params: Any, x: Rows, layers: Schedule, pairs: Array, keep: Keep
) -> dict[str, Array]:
    """One Gibbs sweep from a local mode: a start that can be anywhere, likely where the density is high.

    Taniguchi et al. (2023), section 3.3.
    """
    found = local_modes(graph, params, x, layers, random.fold_in(pairs, 1), keep).x
    return sweep_rows(graph, params, found, layers, random.fold_in(pairs, 2), keep)


def _modes(graph: FactorGraph, params: Any, x: Rows, blocks: tuple[str, ...], keep: Keep) -> dict[str, Array]:
    new = lambda eta, view, _: {b: view.families[b].mode(e).astype(x[b].dtype) for b, e in eta.items()}
    return visit(graph, params, x, blocks, new, keep)


def _improve(graph: FactorGraph, params: Any, search: Search, moved: Rows) -> Search:
    """Take ``moved`` where it is another state. Not where the density rises: in float32 the energy of many
    units does not see one of them change."""
    changed = search.going & ~_equal(moved, search.x)
    x = {b: where_rows(changed, moved[b], v) for b, v in search.x.items()}
    return Search(
        x, energy.log_density(graph, params, x), search.steps + changed.astype(search.steps.dtype), changed
    )


def _equal(x: Rows, y: Rows) -> Array:
    """Which rows are one state; nan is equal to itself, for nothing moves it."""
    alike = [((x[b] == v) | ((x[b] != x[b]) & (v != v))).reshape(len(v), -1).all(-1) for b, v in y.items()]
    return jnp.stack(alike).all(0)
