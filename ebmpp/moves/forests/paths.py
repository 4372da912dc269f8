# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Passes over paths: both arms of each, from its ends to its centre, in one scan over contiguous arrays.

Products of matrices by :func:`jax.lax.associative_scan` take nine times as long on a
CPU (10,000 units of 5 states), and compile in 11 s.
"""

from typing import cast

from jaxtyping import Integer
import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.moves.forests.logs import Pick, Reduce, at_states, finite_max
from ebmpp.moves.forests.structure import Forest

_FEW_ARMS = 8  # that are sliced sequentially
_FEW_LANES = (
    8  # arms times rows that do not fill vectors: states come last then, and else first
)


def up(
    forest: Forest, unary: Array, pairwise: Array, reduce: Reduce
) -> tuple[tuple, Array]:
    """Sum the units out; see :func:`~ebmpp.moves.forests.trees.up`."""
    units, edges, roots = cast(tuple, forest.arms)
    is_narrow = len(roots) * unary.shape[2] < _FEW_LANES
    axis = 2 if is_narrow else 0  # of the states, behind or in front of (arms, rows)

    def arrange(values):
        return jnp.moveaxis(values, *((-1, 2) if is_narrow else (1, -2)))

    # its messages are 0
    padding = jnp.where(jnp.arange(unary.shape[1]) == 0, 0.0, -jnp.inf)
    logs = arrange(_columns(unary, units, padding[:, None]))
    pairs = _columns(pairwise, edges, 0.0)
    reverse = jnp.asarray(np.append(forest.edges[:, 0], -1)[edges] != units)[
        ..., None, None, None
    ]
    pairs = arrange(jnp.where(reverse, jnp.swapaxes(pairs, 2, 3), pairs))

    def step(
        message: Array, inputs: tuple[Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        below = message + inputs[0]
        top = finite_max(below, axis)
        return reduce(jnp.expand_dims(below - top, axis + 1) + inputs[1], axis), (
            below - top,
            top,
        )

    message, (beliefs, tops) = lax.scan(
        step, jnp.zeros(logs.shape[1:], logs.dtype), (logs, pairs)
    )
    centres = (
        unary[forest.roots]
        .at[roots]
        .add(message.swapaxes(*((1, 2) if is_narrow else (0, 1))))
    )
    total = reduce(centres, 1).sum(0) + jnp.squeeze(tops, axis + 1).sum((0, 1))
    return (beliefs, pairs, centres, axis), total


def down(forest: Forest, sums: tuple, pick: Pick, u: Array) -> Array:
    """Return states ``(units, rows)``; see :func:`~ebmpp.moves.forests.trees.down`."""
    beliefs, pairs, centres, axis = sums
    units, _, roots = cast(tuple, forest.arms)

    def step(above: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        belief, pair, u = inputs
        states = pick(
            belief + at_states(pair, jnp.expand_dims(above, axis), axis + 1), u, axis
        )
        return states, states

    at_roots = pick(centres, u[:, forest.roots], 1)
    by_arm = _columns(u.swapaxes(0, 1), units, 0.0).swapaxes(1, 2)
    states = lax.scan(step, at_roots[roots], (beliefs, pairs, by_arm), reverse=True)[1]
    flat = jnp.concatenate([states.reshape(-1, states.shape[2]), at_roots])
    place = np.empty(forest.num_units, np.int64)
    is_unit = units.ravel() >= 0
    place[units[units >= 0]] = np.flatnonzero(is_unit)
    place[forest.roots] = units.size + np.arange(len(forest.roots))
    return flat[place]


def _columns(
    values: Array, index: Integer[np.ndarray, "steps arms"], padding: Array | float
) -> Array:
    """Return the values at ``index``, ``(steps, arms, ...)``, with padding where it is -1."""
    if index.shape[1] > _FEW_ARMS:
        return jnp.concatenate(
            [values, jnp.broadcast_to(padding, (1, *values.shape[1:]))]
        )[index]
    columns = []
    for column in index.T:
        real = column[column >= 0]
        ordered = real if real[0] <= real[-1] else real[::-1]
        is_slice = (np.diff(ordered) == 1).all()
        part = values[ordered[0] : ordered[-1] + 1] if is_slice else values[ordered]
        part = part if ordered is real else part[::-1]
        shape = len(column) - len(real), *values.shape[1:]
        missing = jnp.broadcast_to(jnp.asarray(padding, values.dtype), shape)
        columns.append(jnp.concatenate([missing, part]) if len(missing) else part)
    return jnp.stack(columns, 1)
