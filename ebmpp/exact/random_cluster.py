# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Perfect draws of ferromagnets by the bonds of their random-cluster model, coupled from the past.

Units of two values that pull one another the same way are drawn in two steps: bonds between pairs, with a
weight of two for each cluster that they make, and one value a cluster. Given all other bonds, one is open
with probability p where its ends are joined without it, and with p / (2 - p) where not; p = 1 - exp(-gain) of
the pair. More bonds make more bonds, so chains from no bond and from every bond keep all others between them.
A field is a bond to one unit more, which is up. Where couplings are strong the bonds agree after a few
sweeps, while single units, which would have to cross from one phase to the other, never do.

**References**

1. Fortuin, Kasteleyn (1972), *On the random-cluster model I*.
2. Propp, Wilson (1996), *Exact sampling with coupled Markov chains and applications to statistical
   mechanics*, section 4.2.
"""

from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Integer
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Blocks, Keys, Which
from ebmpp.errors import IntractableError
from ebmpp.exact.from_the_past import check_edges, from_the_past, slopes
from ebmpp.families import Bernoulli, Family, Spin
from ebmpp.graph import FactorGraph, Pairwise, energy
from ebmpp.graph.factors import pairwise
from ebmpp.moves.clusters import components
from ebmpp.moves.target import Target


class _Bonds(NamedTuple):
    """What every pair, and then every field, adds to the log density where it is content."""

    gains: Float[Array, "bonds"]
    up: Float[Array, ""]
    """Which way the fields pull, 1 or -1."""
    told: dict[str, Bool[Array, ""]]
    """What must hold of the params, by what is said where it does not."""


def check_graph(graph: FactorGraph) -> None:
    """:raises IntractableError: for other units than of two values, or factors that do not join pairs."""
    for b, family in graph.families.items():
        if type(family) not in (Bernoulli, Spin):
            raise IntractableError(
                f"block {b!r} ({family!r}) has no random-cluster draws: they are of Bernoulli and Spin units"
            )
    check_edges(graph, "random-cluster sampling")


def check_params(graph: FactorGraph, params: Any) -> None:
    """:raises IntractableError: for pairs that pull apart, or fields of both signs."""
    for told, holds in _told(graph, params).items():
        if not bool(holds):
            raise IntractableError(
                f"{told}, so more bonds need not make more bonds, and they cannot be coupled from the past; "
                "method='coupling_from_the_past' takes fields of both signs, and 'enumerate' a small model"
            )


def draw_rows(target: Target, keys: Keys, max_sweeps: int) -> tuple[Blocks, Which]:
    """Perfect draws, and which rows are such; see :func:`ebmpp.exact.perfect.draw_rows`."""
    graph, rows = target.graph, len(keys)
    bonds, edges = _bonds(graph, target.params), _edges(graph)
    size = sum(f.size for f in graph.families.values())
    neighbours, fine = pairwise.table(size + 1, edges), jnp.stack(list(bonds.told.values())).all()
    ends, joined = jnp.asarray(edges), -jnp.expm1(-bonds.gains)
    apart = joined / (2 - joined)

    def sweep(time: Array, opened: Array) -> Array:
        """Every bond anew, given all others, in both chains by the same uniforms."""
        u = jnp.tile(random.uniform(random.words(random.fold_in(keys, time), len(edges))).T, 2)

        def one(e: Array, opened: Array) -> Array:
            without = opened.at[e].set(False)

            def look(without: Array) -> Array:
                label = components(neighbours, without)
                return label[ends[e, 0]] == label[ends[e, 1]]

            # the clusters matter in between alone: 1 in 10 at a gain of 2, and 1 in 30 at one of 3
            asked = ((u[e] >= apart[e]) & (u[e] < joined[e])).any()
            connected = lax.cond(asked, look, lambda without: jnp.zeros(2 * rows, bool), without)
            return without.at[e].set(u[e] < jnp.where(connected, joined[e], apart[e]))

        return lax.fori_loop(0, len(edges), one, opened)

    met = lambda opened: (opened[:, :rows] == opened[:, rows:]).all(0)
    start = jnp.broadcast_to(jnp.arange(2 * rows) >= rows, (len(edges), 2 * rows))  # of none, and of all
    opened = from_the_past(sweep, met, start, max_sweeps, fine)
    label = components(neighbours, opened[:, :rows])
    words = random.words(random.fold_in(keys, 0), size + 1)  # times before 0 begin at 1
    coin = random.uniform(words).T < 0.5
    spin = jnp.where(jnp.take_along_axis(coin, label, 0), 1.0, -1.0)
    spin = jnp.where(label == label[size], bonds.up, spin)
    return _to_blocks(graph, spin[:size].T), met(opened) & fine


# -- from a graph to bonds -------------------------------------------------------------------------


def _scale(family: Family) -> tuple[float, float]:
    """Middle and half width of a unit's two values."""
    low, high = family.bounds
    return (low + high) / 2, (high - low) / 2


def _starts(graph: FactorGraph) -> dict[str, int]:
    """The number of each block's first unit."""
    sizes = [f.size for f in graph.families.values()]
    return dict(zip(graph.families, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))


def _has_fields(graph: FactorGraph) -> bool:
    """Whether a field can be there at all: not where spins are in pairs and nothing else."""
    alone = any(len(f.blocks) == 1 and not f.lateral for f in graph.factors)
    return alone or any(_scale(f)[0] != 0 for f in graph.families.values())


def _edges(graph: FactorGraph) -> Integer[np.ndarray, "edges 2"]:
    """Pairs of units by their numbers, those inside blocks first; then one a field, to the unit past all."""
    start, made = _starts(graph), []
    for block, split in graph.splits.items():
        made += [f.edges(graph.families)[block] + start[block] for f in split.own]
    for a, b in sorted(graph.edges):
        ends = np.indices((graph.families[a].size, graph.families[b].size)).reshape(2, -1)
        made.append((ends + np.array([[start[a]], [start[b]]])).T)
    size = sum(f.size for f in graph.families.values())
    if _has_fields(graph):
        made.append(np.stack([np.arange(size), np.full(size, size)], 1))
    return np.concatenate([np.zeros((0, 2), np.int64), *made])


def _bonds(graph: FactorGraph, params: Any) -> _Bonds:
    gains, told = [], {}
    for block, split in graph.splits.items():
        for factor in split.own:
            assert isinstance(factor, Pairwise)  # check_graph has refused others
            weights = factor.weights(params[factor.name])
            told[f"factor {factor.name!r} has weights below 0"] = (weights >= 0).all()
            gains.append(2 * _scale(split.family)[1] ** 2 * weights)
    for (a, b), slope in slopes(graph, params, sorted(graph.edges)).items():
        told[f"blocks {a!r} and {b!r} have interactions below 0"] = (slope >= 0).all()
        gains.append(2 * _scale(graph.families[a])[1] * _scale(graph.families[b])[1] * slope.reshape(-1))
    up = jnp.ones(())
    if _has_fields(graph):
        middle = {b: jnp.full(f.shape, _scale(f)[0]) for b, f in graph.families.items()}
        eta = {b: energy.natural(graph, params, middle, [b])[b].reshape(-1) for b in middle}
        field = jnp.concatenate([_scale(f)[1] * eta[b] for b, f in graph.families.items()])
        up = jnp.where((field >= 0).all(), 1.0, -1.0)
        told["the fields are of both signs (of units in 0 and 1 too: at 1/2)"] = (up * field >= 0).all()
        gains.append(2 * jnp.abs(field))
    return _Bonds(jnp.concatenate([jnp.zeros(0), *gains]), up, told | {"": jnp.bool_(True)})


_told = jax.jit(lambda graph, params: _bonds(graph, params).told, static_argnums=0)


def _to_blocks(graph: FactorGraph, spin: Float[Array, "rows units"]) -> Blocks:
    """Units in -1 and 1 as values of the blocks."""
    made, start = {}, _starts(graph)
    for b, family in graph.families.items():
        middle, half = _scale(family)
        own = spin[:, start[b] : start[b] + family.size].reshape(-1, *family.shape)
        made[b] = (middle + half * own).astype(family.dtype)
    return made
