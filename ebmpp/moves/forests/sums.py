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
from typing import Any, NamedTuple

from jaxtyping import Float, Int32, Integer
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import BatchShape
from ebmpp.moves.forests import logs, paths, trees
from ebmpp.moves.forests.logs import Pick, Reduce
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
    ) -> dict:
        """Split pairwise marginals by blocks: of each its units, in order, and their number of values."""
        edges = np.sort(forest.edges, 1)
        names = list(units)
        result = {}
        is_reversed = (forest.edges[:, 0] > edges[:, 0])[:, None, None]
        table = jnp.where(is_reversed, jnp.swapaxes(table, -1, -2), table)
        owner = np.repeat(np.arange(len(names)), [len(u) for u, _ in units.values()])[
            edges
        ]
        numbers = np.concatenate([u for u, _ in units.values()])[edges]
        for i, j in np.unique(owner, axis=0):
            at = (owner == (i, j)).all(1)
            _, first = units[names[i]]
            _, last = units[names[j]]
            result[names[i], names[j]] = cls(numbers[at], table[..., at, :first, :last])
        return result


#: Marginals of pairs by the two blocks or sites of their units.
MarginalsByPair = dict[tuple[str, str], PairMarginals]


def log_sum(
    forest: Forest, unary: UnaryTable, pairwise: PairwiseTable
) -> Float[Array, "*batch"]:
    """Return the log of the sum of the weights of all states of the forest."""
    batch, *tables = _arrange(unary, pairwise)
    return _passes(forest).up(forest, *tables, logs.log_sum_exp)[1].reshape(batch)


def draw(
    forest: Forest,
    unary: UnaryTable,
    pairwise: PairwiseTable,
    uniforms: Float[Array, "*#batch units"],
) -> States:
    """Draw all units jointly, by one uniform each."""
    batch, *tables = _arrange(unary, pairwise, uniforms.shape[:-1])
    u = _rows_last(jnp.broadcast_to(uniforms, (*batch, forest.num_units)), 1)
    return _states(forest, tables, logs.log_sum_exp, logs.draw_states, u[None])[
        0
    ].reshape(*batch, -1)


def draw_pair(
    forest: Forest, unary: UnaryTable, pairwise: PairwiseTable, uniforms: Array
) -> States:
    """Draw two chains from tables of their own, each unit coupled maximally given the unit above it.

    The first axis of the tables, and of the states, is that of the two chains;
    ``uniforms`` lack it, and have three numbers per unit, ``(..., units, 3)``.
    """
    batch, *tables = _arrange(unary, pairwise, (1, *uniforms.shape[:-2]))
    u = _rows_last(jnp.broadcast_to(uniforms, (*batch[1:], forest.num_units, 3)), 2)
    drawn, _ = _states(
        forest, tables, logs.log_sum_exp, logs.couple_states, jnp.moveaxis(u, 1, 0)
    )
    return drawn.reshape(*batch, -1)


def marginals(
    forest: Forest, unary: UnaryTable, pairwise: PairwiseTable
) -> tuple[UnaryTable, PairwiseTable]:
    """Return the probabilities of the states of each unit and of the ends of each edge."""
    batch = jnp.broadcast_shapes(unary.shape[:-2], pairwise.shape[:-3])
    unary = jnp.broadcast_to(unary, batch + unary.shape[-2:])
    pairwise = jnp.broadcast_to(pairwise, batch + pairwise.shape[-3:])
    return jax.grad(lambda a, b: log_sum(forest, a, b).sum(), (0, 1))(unary, pairwise)


def most_probable(
    forest: Forest, unary: UnaryTable, pairwise: PairwiseTable
) -> tuple[States, Float[Array, "*batch"]]:
    """Return the state of the largest weight, and the log of that weight."""
    batch, *tables = _arrange(unary, pairwise)
    states, log_weight = _states(
        forest, tables, jnp.max, logs.best_states, jnp.zeros((1, forest.num_units, 1))
    )
    return states.reshape(*batch, -1), log_weight.reshape(batch)


def _states(
    forest: Forest, tables: list[Array], reduce: Reduce, pick: Pick, u: Array
) -> tuple[Array, Array]:
    """Return states ``(rows, units)`` and the log of the whole sum, ``(rows,)``."""
    sums, total = _passes(forest).up(forest, *tables, reduce)
    return _passes(forest).down(forest, sums, pick, u).T, total


def _passes(forest: Forest) -> Any:
    """Return the module of passes over forests of this shape."""
    return trees if forest.arms is None else paths


def _arrange(
    unary: Array, pairwise: Array, batch: BatchShape = ()
) -> tuple[BatchShape, Array, Array]:
    """Return the batch shape, and tables with rows last; pairwise ones have one row if all are equal."""
    batch = jnp.broadcast_shapes(batch, unary.shape[:-2], pairwise.shape[:-3])
    unary = _rows_last(jnp.broadcast_to(unary, (*batch, *unary.shape[-2:])), 2)
    if math.prod(pairwise.shape[:-3]) > 1:
        pairwise = jnp.broadcast_to(pairwise, (*batch, *pairwise.shape[-3:]))
    return batch, unary, _rows_last(pairwise, 3)


def _rows_last(values: Array, num_axes: int) -> Array:
    """Flatten the leading axes to one, and move it behind the last ``num_axes``."""
    leading = values.ndim - num_axes
    return jnp.moveaxis(
        values.reshape(math.prod(values.shape[:leading]), *values.shape[leading:]),
        0,
        -1,
    )
