# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Passes over a forest of any shape, one step of its edges after another.

Arrays have units first and rows last, so that gathers are contiguous.
"""

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.moves.forests.logs import Pick, Reduce, at_states, finite_max
from ebmpp.moves.forests.structure import Forest


def up(
    forest: Forest, unary: Array, pairwise: Array, reduce: Reduce
) -> tuple[tuple[Array, Array], Array]:
    """Sum the units out, from the leaves to the roots.

    :param unary: ``(units, states, rows)``.
    :param pairwise: ``(edges, states, states, rows or 1)``.
    :return: log weights of each unit with all units below it summed out, up to a
        constant, and pairwise ones by step,
        ``(steps, width, states below, states above, rows or 1)``; and the log of the
        whole sum.
    """
    child, parent, edge = forest.steps
    pairs = jnp.zeros((*edge.shape, *pairwise.shape[1:3], 1), pairwise.dtype)
    if len(forest.edges):
        pairs = jnp.take(pairwise, edge, axis=0, mode="clip")
        first = forest.edges[edge.clip(max=len(forest.edges) - 1), 0]
        reverse = jnp.asarray(first != child)[..., None, None, None]
        pairs = jnp.where(reverse, jnp.swapaxes(pairs, 2, 3), pairs)

    def step(beliefs: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        child, parent, pair = inputs
        below = beliefs.at[child].get(mode="clip")
        message = reduce(below[:, :, None] + pair, 1)
        top = finite_max(message, 1)
        return beliefs.at[parent].add(message - top, mode="drop"), top[:, 0]

    beliefs, tops = lax.scan(
        step, unary, (jnp.asarray(child), jnp.asarray(parent), pairs)
    )
    shifts = jnp.where((child < forest.num_units)[..., None], tops, 0.0).sum(1)
    return (beliefs, pairs), reduce(beliefs[forest.roots], 1).sum(0) + shifts.sum(0)


def down(forest: Forest, sums: tuple[Array, Array], pick: Pick, u: Array) -> Array:
    """Return states ``(units, rows)``: of the roots, and of each unit given the unit above it.

    :param u: the units' uniforms, ``(draws, units, rows)``.
    """
    beliefs, pairs = sums
    roots = forest.roots
    child, parent, _ = forest.steps
    states = jnp.zeros((forest.num_units, beliefs.shape[2]), jnp.int32)
    states = states.at[roots].set(pick(beliefs[roots], u[:, roots], 1))

    def step(states: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        child, parent, pair = inputs
        above = states.at[parent].get(mode="clip")[:, None]
        logs = beliefs.at[child].get(mode="clip") + at_states(pair, above, 2)
        return states.at[child].set(
            pick(logs, u.at[:, child].get(mode="clip"), 1), mode="drop"
        ), None

    return lax.scan(
        step, states, (jnp.asarray(child), jnp.asarray(parent), pairs), reverse=True
    )[0]
