# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Forest move: finite units that interact along chains and trees are drawn jointly, exactly."""

from collections.abc import Iterable
import dataclasses
import functools
from typing import cast

from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Chains,
    HashableArray,
    Keys,
    Rows,
    checks,
    num_rows,
    random,
    select,
)
from ebmpp.errors import IntractableError
from ebmpp.graph import FactorGraph
from ebmpp.graph.declaration import schedule
from ebmpp.moves import forests
from ebmpp.moves.couplings import Attempt, Trial
from ebmpp.moves.forests.tables import ForestTables
from ebmpp.moves.gibbs import keep_observed
from ebmpp.moves.move import (
    Drawn,
    Layer,
    Move,
    as_chains,
    both_as_rows,
    final_attempt,
)
from ebmpp.moves.target import Target


@dataclasses.dataclass(frozen=True)
class Forests(Move[tuple[Array, Array]]):
    """Joint draw of units that make a forest given all others: see :func:`forest_sweep`.

    Sums go from the leaves to the roots, and draws go back, coupled maximally unit by
    unit.

    :param units: units of each block by number, in increasing order.
    """

    units: tuple[tuple[str, HashableArray], ...]

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(b for b, _ in self.units)

    def check(self, graph: FactorGraph) -> None:
        """Refuse units that make a cycle, or of a factor that is not affine."""
        for b in graph.evaluated.intersection(self.blocks):
            raise IntractableError(
                f"block {b!r} is in a factor with affine=False or impossible values, so "
                "it has no tables of pairs of units. Use Layer."
            )
        _tables(graph, self.units)

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        complete = _tables(graph, self.units).complete
        partial = [b for b in self.blocks if b not in complete]
        return (*graph.neighbours(self.blocks), *partial)

    def _weighted(self, target: Target, x: Rows) -> tuple[ForestTables, Array, Array]:
        tables = _tables(target.graph, self.units)
        return tables, *tables.weights(target.params, x, target.keep)

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        tables, unary, pairwise = self._weighted(target, x)
        u = random.uniforms(keys, tables.forest.num_units)
        states = forests.draw(tables.forest, unary, pairwise, u)
        return keep_observed(target.keep, x, tables.put(x, states)), 0

    def marginals(
        self, target: Target, x: Rows
    ) -> tuple[Blocks, forests.MarginalsByPair]:
        """Return probabilities of the units' values given all others.

        Their means over draws have less noise than means of the values.

        :param x: states, ``(rows, *shape)`` each; the units of the move may have any
            values.
        :return: by block ``(rows, units, K)``, for the K values in rising order; and by
            two blocks the probabilities of neighbours,
            :class:`~ebmpp.moves.PairMarginals`.
        """
        tables, unary, pairwise = self._weighted(target, x)
        single, pairs = forests.marginals(tables.forest, unary, pairwise)
        by_block = {}
        units = {}
        for b, place in tables.places.items():
            num_states = len(cast(Array, tables.families[b].states()))
            by_block[b] = single[:, place, :num_states]
            units[b] = (tables.units[b], num_states)
        return by_block, forests.PairMarginals.by_name(tables.forest, pairs, units)

    def prepare(self, target: Target, z: Chains) -> tuple[Array, Array]:
        """Return tables ``(chains, rows, ...)``, with axes of 1 where they are equal."""
        chains = num_rows(z)
        target = target.twice() if chains == 2 else target
        _, unary, pairwise = self._weighted(target, both_as_rows(z))
        unary = unary.reshape(chains, -1, *unary.shape[1:])
        if pairwise.ndim == 3:
            return unary, pairwise[None, None]
        return unary, pairwise.reshape(chains, -1, *pairwise.shape[1:])

    def attempt(
        self,
        target: Target,
        focused: tuple[Array, Array],
        z: Chains,
        trial: Trial,
    ) -> Attempt:
        tables = _tables(target.graph, self.units)
        unary, pairwise = focused
        count = tables.forest.num_units
        u = random.uniforms(trial.keys, 3 * count).reshape(-1, count, 3)
        states = forests.draw_pair(tables.forest, unary, pairwise, u)

        x = both_as_rows(z)
        drawn = tables.put(x, states.reshape(-1, count))
        new = as_chains(keep_observed(target.twice().keep, x, drawn))
        return final_attempt(new, trial, jnp.isnan(unary).any((0, 2, 3)))


@functools.lru_cache(maxsize=64)
def _tables(
    graph: FactorGraph, units: tuple[tuple[str, HashableArray], ...]
) -> ForestTables:
    return ForestTables(graph, {b: numbers.array for b, numbers in units})


def forest_sweep(graph: FactorGraph, clamped: Iterable[str] = ()) -> tuple[Move, ...]:
    """Return joint draws of forests of finite units, and draws of the other layers.

    The interacting units of the free blocks are split into layers that are induced
    forests: a hidden Markov chain is one exact draw given the data, a lattice two.
    Blocks of more than 256 values per unit, or whose units interact with 16 others on
    average or more, are drawn from their conditionals. Two blocks of several units each
    that share a factor are drawn one after the other.

    :param graph: the declaration.
    :param clamped: names of clamped blocks.
    :return: moves, for the arguments ``moves`` and ``coupling``; the latter also takes
        the function itself.
    :raises IntractableError: if no free block suits.

    **References**

    1. Hamze, de Freitas (2004), *From fields to trees*.

    **Example**

    >>> import jax, networkx as nx, ebmpp
    >>> from ebmpp.moves import forest_sweep
    >>> path = nx.path_graph(50)
    >>> chain = ebmpp.FactorGraph.from_networkx(path, lambda n: ebmpp.Categorical(n, 3))
    >>> params = {"x": jax.numpy.zeros((50, 3)), "x:x": 3 * jax.numpy.ones(49)}
    >>> est = ebmpp.unbiased_expectation(chain, params, lambda x: x["x"][0] == x["x"][1],
    ...                                  rng_key=jax.random.key(0), num_pairs=100,
    ...                                  coupling=forest_sweep)
    >>> int(est.meeting_time.max())  # exact draws meet in the first sweep after the lag
    2
    """
    checks.instance("forest_sweep: graph", graph, FactorGraph)
    free = [b for b in graph.families if b not in set(clamped)]
    finite = [b for b in free if forests.layers.suits(graph, b)]
    if not finite:
        raise checks.error(
            "forest_sweep: graph",
            "a free block of finite units that interact with few others",
            select(graph.families, free),
            IntractableError,
            "Use gibbs_sweep.",
        )
    moves = []
    drawn = set()
    for layer in forests.layers.split(graph, finite):
        units = tuple((b, HashableArray.copy(u)) for b, u in layer.items())
        moves.append(Forests(units))
        drawn.update(layer)
    fixed = [b for b in graph.families if b not in free or b in drawn]
    draws = [Layer(blocks, "maximal") for blocks in schedule(graph, fixed)]
    return (*moves, *draws)
