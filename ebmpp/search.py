# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local search: layer after layer set to its conditional mode, until the density stops rising."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp import bits, derived
from ebmpp.couplings import where_rows
from ebmpp.sweeps import Keep, Rows, Schedule, sweep_rows, visit

if TYPE_CHECKING:
    from ebmpp.graph import FactorGraph


class Search(NamedTuple):
    """Searches under way, one a row."""

    x: dict[str, Array]
    """Full states, ``(rows, *shape)`` a block."""
    value: Array
    """Unnormalised log-density of each."""
    steps: Array
    """Passes over the layers that raised it."""
    going: Array
    """Whether the last pass raised it: otherwise the search is over."""


def begin(graph: "FactorGraph", params: Any, x: Rows, layers: Schedule, pairs: Array, keep: Keep) -> Search:
    """Each row starts at a layer of its own, at random: the layers from there on, in a first part of a pass.

    With two layers this is the random order of Taniguchi et al. (2023), Algorithms 1 and 5.

    :param pairs: key pairs, one a row.
    :param keep: units that are held.
    """
    rows = len(pairs)
    search = Search(dict(x), log_density(graph, params, x), jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool))
    first = bits.words(pairs, 1)[:, 0] % jnp.uint32(len(layers))
    moved = dict(x)
    for index, blocks in enumerate(layers):
        at = (first > 0) & (first <= index)
        moved |= {
            b: where_rows(at, v, moved[b]) for b, v in _modes(graph, params, moved, blocks, keep).items()
        }
    return _improve(graph, params, search, moved)._replace(going=search.going)


def one_pass(graph: "FactorGraph", params: Any, search: Search, layers: Schedule, keep: Keep) -> Search:
    """One pass over the layers; rows whose search is over stay."""
    moved = dict(search.x)
    for blocks in layers:
        moved |= _modes(graph, params, moved, blocks, keep)
    return _improve(graph, params, search, moved)


def local_modes(
    graph: "FactorGraph", params: Any, x: Rows, layers: Schedule, pairs: Array, keep: Keep
) -> Search:
    """Passes until no row's density rises."""
    return _to_the_end(graph, params, begin(graph, params, x, layers, pairs, keep), layers, keep)


def climb(graph: "FactorGraph", params: Any, x: Rows, layers: Schedule, keep: Keep) -> Search:
    """The same from the first layer on in every row: a function of ``x``, without a random word."""
    rows = len(next(iter(x.values())))
    zero, going = jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool)
    return _to_the_end(
        graph, params, Search(dict(x), log_density(graph, params, x), zero, going), layers, keep
    )


def _to_the_end(graph: "FactorGraph", params: Any, start: Search, layers: Schedule, keep: Keep) -> Search:
    step = lambda search: one_pass(graph, params, search, layers, keep)  # noqa: E731
    return lax.while_loop(lambda search: search.going.any(), step, start)


def near_modes(
    graph: "FactorGraph", params: Any, x: Rows, layers: Schedule, pairs: Array, keep: Keep
) -> dict[str, Array]:
    """One Gibbs sweep from a local mode: a start that can be anywhere, likely where the density is high.

    Taniguchi et al. (2023), section 3.3.
    """
    found = local_modes(graph, params, x, layers, bits.fold_in(pairs, 1), keep).x
    return sweep_rows(graph, params, found, layers, bits.fold_in(pairs, 2), keep)


def _modes(
    graph: "FactorGraph", params: Any, x: Rows, blocks: tuple[str, ...], keep: Keep
) -> dict[str, Array]:
    new = lambda eta, view, _: {b: view.families[b].mode(e).astype(x[b].dtype) for b, e in eta.items()}  # noqa: E731
    return visit(graph, params, x, blocks, new, keep)


def _improve(graph: "FactorGraph", params: Any, search: Search, moved: Rows) -> Search:
    """Take ``moved`` where it is better. Only a rise counts, so ties and rounding cannot cycle."""
    value = log_density(graph, params, moved)
    better = search.going & (value > search.value)
    x = {b: where_rows(better, moved[b], v) for b, v in search.x.items()}
    return Search(
        x, jnp.where(better, value, search.value), search.steps + better.astype(search.steps.dtype), better
    )


def log_density(graph: "FactorGraph", params: Any, x: Rows) -> Array:
    """Unnormalised log-density of each row."""

    def one(row: dict[str, Array]) -> Array:
        energy = derived.energy(graph, params, graph.statistics(row))
        return derived.log_base_measure(graph, row) - energy

    return jax.vmap(one)(dict(x))
