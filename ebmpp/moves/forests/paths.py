# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Passes over paths: all arms, from ends to centres, in one scan over contiguous arrays.

Products of matrices by :func:`jax.lax.associative_scan` take nine times as long on a
CPU (10,000 units of 5 states), and compile in 11 s.
"""

from typing import cast

from jaxtyping import Integer
import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import sum_by_halves
from ebmpp.moves.forests.logs import Pick, Reduce, Sums, at_states, finite_max
from ebmpp.moves.forests.structure import Arms, Forest

_FEW_ARMS = 8  # that are sliced sequentially
# arms times rows that do not fill vectors: states come last then, and else first
_FEW_LANES = 8


def up(
    forest: Forest,
    unary: Array,
    pairwise: Array,
    reduce: Reduce,
) -> tuple[Sums, Array]:
    """Sum the units out; see :func:`~ebmpp.moves.forests.trees.up`."""
    units, edges, roots = cast(Arms, forest.arms)
    is_narrow = len(roots) * unary.shape[2] < _FEW_LANES
    axis = 2 if is_narrow else 0  # of the states, behind or in front of (arms, rows)

    def arrange(values):
        source, target = (-1, 2) if is_narrow else (1, -2)
        return jnp.moveaxis(values, source, target)

    # its messages are 0
    padding = jnp.where(jnp.arange(unary.shape[1]) == 0, 0.0, -jnp.inf)
    logs = arrange(_columns(unary, units, padding[:, None]))
    pairs = _columns(pairwise, edges, 0.0)
    is_reversed = jnp.asarray(np.append(forest.edges[:, 0], -1)[edges] != units)
    swapped = jnp.swapaxes(pairs, 2, 3)
    pairs = arrange(jnp.where(is_reversed[..., None, None, None], swapped, pairs))

    def step(message, inputs):
        log, pair = inputs
        below = message + log
        top = finite_max(below, axis)
        belief = below - top
        message = reduce(jnp.expand_dims(belief, axis + 1) + pair, axis)
        return message, (belief, top)

    start = jnp.zeros(logs.shape[1:], logs.dtype)
    message, (beliefs, tops) = lax.scan(step, start, (logs, pairs))
    message = message.swapaxes(1, 2) if is_narrow else message.swapaxes(0, 1)
    centres = unary[forest.roots].at[roots].add(message)
    shifts = sum_by_halves(tops.reshape(-1, unary.shape[2]))
    total = reduce(centres, 1).sum(0) + shifts
    return Sums(beliefs, pairs, centres, axis), total


def down(
    forest: Forest,
    sums: Sums,
    pick: Pick,
    u: Array,
) -> Array:
    """Return states ``(units, rows)``; see :func:`~ebmpp.moves.forests.trees.down`."""
    arms = cast(Arms, forest.arms)
    units = arms.units
    axis = sums.axis

    def step(above, inputs):
        belief, pair, u = inputs
        logs = belief + at_states(pair, jnp.expand_dims(above, axis), axis + 1)
        states = pick(logs, u, axis)
        return states, states

    at_roots = pick(sums.centres, u[:, forest.roots], 1)
    by_arm = _columns(u.swapaxes(0, 1), units, 0.0).swapaxes(1, 2)
    steps = (sums.beliefs, sums.pairs, by_arm)
    _, states = lax.scan(step, at_roots[arms.roots], steps, reverse=True)
    by_place = jnp.concatenate([states.reshape(-1, states.shape[2]), at_roots])
    is_unit = units >= 0
    place = np.empty(forest.num_units, np.int64)
    place[units[is_unit]] = np.flatnonzero(is_unit)
    place[forest.roots] = units.size + np.arange(len(forest.roots))
    return by_place[place]


def _columns(
    values: Array, index: Integer[np.ndarray, "steps arms"], padding: Array | float
) -> Array:
    """Return the values at ``index``, ``(steps, arms, ...)``, with padding where it is -1."""
    padding = jnp.asarray(padding, values.dtype)

    def missing(count):
        return jnp.broadcast_to(padding, (count, *values.shape[1:]))

    if index.shape[1] > _FEW_ARMS:
        return jnp.concatenate([values, missing(1)])[index]
    columns = []
    for column in index.T:
        real = column[column >= 0]
        is_rising = real[0] <= real[-1]
        ordered = real if is_rising else real[::-1]
        is_slice = (np.diff(ordered) == 1).all()
        part = values[ordered[0] : ordered[-1] + 1] if is_slice else values[ordered]
        part = part if is_rising else part[::-1]
        num_missing = len(column) - len(real)
        columns.append(
            jnp.concatenate([missing(num_missing), part]) if num_missing else part
        )
    return jnp.stack(columns, 1)
