# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Passes over a forest of any shape, one step of its edges after another.

Arrays have units first and rows last, so that gathers are contiguous.
"""

import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import sum_by_halves
from ebmpp.moves.forests.logs import Pick, Reduce, Sums, at_states, finite_max
from ebmpp.moves.forests.structure import Forest


def up(
    forest: Forest,
    unary: Array,
    pairwise: Array,
    reduce: Reduce,
) -> tuple[Sums, Array]:
    """Sum the units out, from the leaves to the roots.

    :param unary: ``(units, states, rows)``.
    :param pairwise: ``(edges, states, states, rows or 1)``.
    :return: beliefs by unit and pairs by step,
        ``(steps, width, states below, states above, rows or 1)``; and the log of the
        whole sum.
    """
    sums, shifts = _up(forest, unary, pairwise, reduce)
    return sums, reduce(sums.centres, 1).sum(0) + sum_by_halves(shifts)


def by_tree(forest: Forest, unary: Array, pairwise: Array, reduce: Reduce) -> Array:
    """Return the log of the sum over the states of each tree, ``(trees, rows)``."""
    sums, shifts = _up(forest, unary, pairwise, reduce)
    child, *_ = forest.steps
    trees = np.take(forest.trees, child.ravel(), mode="clip")
    return reduce(sums.centres, 1).at[trees].add(shifts)


def _up(
    forest: Forest, unary: Array, pairwise: Array, reduce: Reduce
) -> tuple[Sums, Array]:
    """Return the sums of :func:`up`, and the shift of each message, 0 for padding."""
    child, parent, edge = forest.steps
    if len(forest.edges):
        pairs = jnp.take(pairwise, edge, axis=0, mode="clip")
        first = np.take(forest.edges[:, 0], edge, mode="clip")
        is_reversed = jnp.asarray(first != child)[..., None, None, None]
        pairs = jnp.where(is_reversed, jnp.swapaxes(pairs, 2, 3), pairs)
    else:
        pairs = jnp.zeros((*edge.shape, *pairwise.shape[1:3], 1), pairwise.dtype)

    def step(beliefs, inputs):
        child, parent, pair = inputs
        below = beliefs.at[child].get(mode="clip")
        message = reduce(below[:, :, None] + pair, 1)
        top = finite_max(message, 1)
        return beliefs.at[parent].add(message - top, mode="drop"), top[:, 0]

    steps = (jnp.asarray(child), jnp.asarray(parent), pairs)
    beliefs, tops = lax.scan(step, unary, steps)
    is_edge = (child < forest.num_units)[..., None]
    shifts = jnp.where(is_edge, tops, 0.0).reshape(-1, unary.shape[2])
    return Sums(beliefs, pairs, beliefs[forest.roots]), shifts


def down(
    forest: Forest,
    sums: Sums,
    pick: Pick,
    u: Array,
) -> Array:
    """Return states ``(units, rows)``: of the roots, and of each unit given the unit above it.

    :param u: the units' uniforms, ``(draws, units, rows)``.
    """
    beliefs = sums.beliefs
    roots = forest.roots
    child, parent, _ = forest.steps
    states = jnp.zeros((forest.num_units, beliefs.shape[2]), jnp.int32)
    states = states.at[roots].set(pick(sums.centres, u[:, roots], 1))

    def step(states, inputs):
        child, parent, pair = inputs
        above = states.at[parent].get(mode="clip")[:, None]
        logs = beliefs.at[child].get(mode="clip") + at_states(pair, above, 2)
        drawn = pick(logs, u.at[:, child].get(mode="clip"), 1)
        return states.at[child].set(drawn, mode="drop"), None

    steps = (jnp.asarray(child), jnp.asarray(parent), sums.pairs)
    return lax.scan(step, states, steps, reverse=True)[0]
