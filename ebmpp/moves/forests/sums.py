# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Sums, draws, marginals and modes of a forest of finite units, from tables of log weights.

.. math:: \log p(s) = \sum_u a_u(s_u) + \sum_e b_e(s_{e_0}, s_{e_1}) - \log Z

Tables are a, ``(..., units, states)``, padded with -inf for units of fewer states, and
b, ``(..., edges, states, states)``, with the states of ``edges[e, 0]`` first. Leading
axes broadcast. A log weight of -inf is impossible, and no result or gradient becomes
nan. Where all states are impossible, the log of the sum is -inf, marginals are 0 and
draws arbitrary.

Sums are shifted by their maxima: the logs of a long chain would lose the digits of the
differences between states.

Source: Pearl (1988), *Probabilistic reasoning in intelligent systems*, chapter 4.
"""

from collections.abc import Mapping
import math
from typing import NamedTuple

from jaxtyping import Float, Int32, Integer
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import BatchShape, PerState
from ebmpp.moves.forests import logs, paths, trees
from ebmpp.moves.forests.structure import Forest

UnaryTable = Float[Array, "*#batch units states"]
PairwiseTable = Float[Array, "*#batch edges states states"]
States = Int32[Array, "*batch units"]


class PairMarginals(NamedTuple):
    """Pairs of neighbouring units, and the probabilities of their values."""

    units: Integer[np.ndarray, "pairs 2"]
    """Numbers of the units in their flattened blocks or sites."""
    probabilities: Float[Array, "*batch pairs K L"]
    """By value of the first unit and of the second, in rising order."""

    @classmethod
    def by_name(
        cls,
        forest: Forest,
        table: PairwiseTable,
        units: Mapping[str, tuple[np.ndarray, int]],
    ) -> "MarginalsByPair":
        """Split pairwise marginals by blocks.

        :param units: numbers of each block's units, in order, and how many values they
            have.
        """
        names = list(units)
        numbers = np.concatenate([u for u, _ in units.values()])
        owner = np.repeat(np.arange(len(units)), [len(u) for u, _ in units.values()])
        first, second = forest.edges.T
        is_reversed = (first > second)[:, None, None]
        table = jnp.where(is_reversed, jnp.swapaxes(table, -1, -2), table)
        edges = np.sort(forest.edges, 1)
        result = {}
        for i, j in np.unique(owner[edges], axis=0):
            here = (owner[edges] == (i, j)).all(1)
            _, num_first = units[names[i]]
            _, num_second = units[names[j]]
            probabilities = table[..., here, :num_first, :num_second]
            result[names[i], names[j]] = cls(numbers[edges[here]], probabilities)
        return result


#: Marginals of pairs by the two blocks or sites of their units.
MarginalsByPair = dict[tuple[str, str], PairMarginals]


def log_sum(forest: Forest, unary: UnaryTable, pairwise: PairwiseTable) -> PerState:
    """Return the log of the sum of the weights of all states of the forest."""
    tables = _arrange(unary, pairwise)
    passes = trees if forest.arms is None else paths
    _, total = passes.up(forest, tables.unary, tables.pairwise, logs.log_sum_exp)
    return total.reshape(tables.batch)


def log_sums_by_tree(
    forest: Forest, unary: UnaryTable, pairwise: PairwiseTable
) -> Float[Array, "*batch trees"]:
    """Return the logs of the sums over the states of each tree, in the order of the roots."""
    tables = _arrange(unary, pairwise)
    sums = trees.by_tree(forest, tables.unary, tables.pairwise, logs.log_sum_exp)
    return sums.T.reshape(*tables.batch, -1)


def draw(
    forest: Forest,
    unary: UnaryTable,
    pairwise: PairwiseTable,
    uniforms: Float[Array, "*#batch units"],
) -> States:
    """Draw all units jointly, by one uniform each."""
    tables = _arrange(unary, pairwise, uniforms.shape[:-1])
    u = _broadcast(uniforms, tables.batch, 1)
    states, _ = _states(forest, tables, logs.draw_states, _rows_last(u, 1)[None])
    return states


def draw_pair(
    forest: Forest,
    unary: UnaryTable,
    pairwise: PairwiseTable,
    uniforms: Array,
) -> States:
    """Draw two chains; each unit is coupled maximally given the unit above it.

    The first axis of the tables, and of the states, is that of the two chains;
    ``uniforms`` lack it, and have three numbers per unit, ``(..., units, 3)``.
    """
    tables = _arrange(unary, pairwise, (1, *uniforms.shape[:-2]))
    u = _broadcast(uniforms, tables.batch[1:], 2)
    u = jnp.moveaxis(_rows_last(u, 2), 1, 0)
    states, _ = _states(forest, tables, logs.couple_states, u)
    return states


def marginals(
    forest: Forest, unary: UnaryTable, pairwise: PairwiseTable
) -> tuple[UnaryTable, PairwiseTable]:
    """Return the probabilities of the states of each unit and of the ends of each edge."""
    batch = jnp.broadcast_shapes(unary.shape[:-2], pairwise.shape[:-3])

    def total(unary, pairwise):
        return log_sum(forest, unary, pairwise).sum()

    gradient = jax.grad(total, (0, 1))
    return gradient(_broadcast(unary, batch, 2), _broadcast(pairwise, batch, 3))


def most_probable(
    forest: Forest, unary: UnaryTable, pairwise: PairwiseTable
) -> tuple[States, PerState]:
    """Return the state of the largest weight, and the log of that weight."""
    tables = _arrange(unary, pairwise)
    u = jnp.zeros((1, forest.num_units, 1))
    states, log_weight = _states(forest, tables, logs.best_states, u, jnp.max)
    return states, log_weight.reshape(tables.batch)


class _Tables(NamedTuple):
    """Tables with rows last; pairwise ones have one row if all are equal."""

    batch: BatchShape
    unary: Array
    pairwise: Array


def _states(
    forest: Forest,
    tables: _Tables,
    pick: logs.Pick,
    u: Array,
    reduce: logs.Reduce = logs.log_sum_exp,
) -> tuple[States, Array]:
    """Return states, and the log of the whole sum, ``(rows,)``."""
    passes = trees if forest.arms is None else paths
    sums, total = passes.up(forest, tables.unary, tables.pairwise, reduce)
    states = passes.down(forest, sums, pick, u).T
    return states.reshape(*tables.batch, -1), total


def _arrange(
    unary: UnaryTable, pairwise: PairwiseTable, batch: BatchShape = ()
) -> _Tables:
    """Return tables with rows last, of the batch shape to which all broadcast."""
    batch = jnp.broadcast_shapes(batch, unary.shape[:-2], pairwise.shape[:-3])
    unary = _broadcast(unary, batch, 2)
    if math.prod(pairwise.shape[:-3]) > 1:
        pairwise = _broadcast(pairwise, batch, 3)
    return _Tables(batch, _rows_last(unary, 2), _rows_last(pairwise, 3))


def _broadcast(values: Array, batch: BatchShape, num_axes: int) -> Array:
    """Broadcast all axes but the last ``num_axes`` to a shape."""
    return jnp.broadcast_to(values, (*batch, *values.shape[-num_axes:]))


def _rows_last(values: Array, num_axes: int) -> Array:
    """Flatten the leading axes to one, and move it behind the last ``num_axes``."""
    leading = values.ndim - num_axes
    rows = math.prod(values.shape[:leading])
    return jnp.moveaxis(values.reshape(rows, *values.shape[leading:]), 0, -1)
