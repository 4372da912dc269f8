# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Sums, draws, marginals and modes of a forest of finite units, from tables of log weights.

.. math:: \log p(s) = \sum_u a_u(s_u) + \sum_e b_e(s_{e_0}, s_{e_1}) - \log Z

Tables are a, ``(..., units, states)``, padded with -inf for units of fewer states, and b,
``(..., edges, states, states)``, with the states of ``edges[e, 0]`` first. Leading axes broadcast. A log
weight of -inf is impossible, and no result or gradient becomes nan. Where all states are impossible, the log
of the sum is -inf, marginals are 0 and draws arbitrary.

Inside, units come first and rows last, so that gathers are contiguous. Sums are shifted by their maxima: the
logs of a long chain would lose the digits of the differences between states.

Source: Pearl (1988), *Probabilistic reasoning in intelligent systems*, chapter 4.
"""

from collections.abc import Callable
import math

from jaxtyping import Float, Int32

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core.random import inverse_cdf
from ebmpp.moves.forests.structure import Forest

Unary = Float[Array, "*#batch units states"]
Pairwise = Float[Array, "*#batch edges states states"]
States = Int32[Array, "*batch units"]


def log_sum(forest: Forest, unary: Unary, pairwise: Pairwise) -> Float[Array, "*batch"]:
    """Return the log of the sum of the weights of all states of the forest."""
    batch, unary, pairs = _arrange(forest, unary, pairwise)
    return _up(forest, unary, pairs, _log_sum_exp)[1].reshape(batch)


def draw(forest: Forest, unary: Unary, pairwise: Pairwise, uniforms: Float[Array, "*#batch units"]) -> States:
    """Draw all units jointly, by one uniform each."""
    batch, unary, pairs = _arrange(forest, unary, pairwise, uniforms.shape[:-1])
    beliefs = _up(forest, unary, pairs, _log_sum_exp)[0]
    u = _rows_last(jnp.broadcast_to(uniforms, (*batch, forest.num_units)), 1)
    pick = lambda logs, u: inverse_cdf(u, _weights(jnp.moveaxis(logs, 1, -1)))
    return _down(forest, beliefs, pairs, pick, u).T.reshape(*batch, -1)


def draw_pair(
    forest: Forest,
    unary: Float[Array, "2 *#batch units states"],
    pairwise: Float[Array, "#2 *#batch edges states states"],
    uniforms: Float[Array, "*#batch units 3"],
) -> Int32[Array, "2 *batch units"]:
    """Draw two chains from tables of their own, each unit coupled maximally given the unit above it."""
    batch, unary, pairs = _arrange(forest, unary, pairwise, (1, *uniforms.shape[:-2]))
    beliefs = _up(forest, unary, pairs, _log_sum_exp)[0]
    u = _rows_last(jnp.broadcast_to(uniforms, (*batch[1:], forest.num_units, 3)), 2)
    return _down(forest, beliefs, pairs, _couple, u).T.reshape(*batch, -1)


def marginals(forest: Forest, unary: Unary, pairwise: Pairwise) -> tuple[Unary, Pairwise]:
    """Return the probabilities of the states of each unit and of the ends of each edge."""
    batch = jnp.broadcast_shapes(unary.shape[:-2], pairwise.shape[:-3])
    unary = jnp.broadcast_to(unary, batch + unary.shape[-2:])
    pairwise = jnp.broadcast_to(pairwise, batch + pairwise.shape[-3:])
    return jax.grad(lambda a, b: log_sum(forest, a, b).sum(), (0, 1))(unary, pairwise)


def most_probable(forest: Forest, unary: Unary, pairwise: Pairwise) -> tuple[States, Float[Array, "*batch"]]:
    """Return the state of the largest weight, and the log of that weight."""
    batch, unary, pairs = _arrange(forest, unary, pairwise)
    beliefs, log_weight = _up(forest, unary, pairs, jnp.max)
    pick = lambda logs, _: logs.argmax(1).astype(jnp.int32)
    states = _down(forest, beliefs, pairs, pick, jnp.zeros((forest.num_units, 1)))
    return states.T.reshape(*batch, -1), log_weight.reshape(batch)


# -- passes ----------------------------------------------------------------------------------------


def _up(forest: Forest, unary: Array, pairs: Array, reduce: Callable) -> tuple[Array, Array]:
    """Return each unit's log weights with all units below it summed out, and the log of the whole sum.

    :param reduce: sums or maximises one axis of log weights.
    :return: ``(units, states, rows)``, up to a constant per unit and row, and ``(rows,)``.
    """
    child, parent, _ = forest.steps

    def step(beliefs: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        child, parent, pair = inputs
        below = beliefs.at[child].get(mode="clip")
        message = reduce(below[:, :, None] + pair, 1)
        top = _finite_max(message, 1)
        return beliefs.at[parent].add(message - top, mode="drop"), top[:, 0]

    beliefs, tops = lax.scan(step, unary, (jnp.asarray(child), jnp.asarray(parent), pairs))
    shifts = jnp.where((child < forest.num_units)[..., None], tops, 0.0).sum(1)
    total = reduce(beliefs[forest.roots], 1).sum(0)
    return beliefs, total + shifts.sum(0)


def _down(forest: Forest, beliefs: Array, pairs: Array, pick: Callable, u: Array) -> Array:
    """Return states ``(units, rows)``: of the roots, and of each unit given the unit above it.

    :param pick: from log weights ``(units, states, rows)`` and the units' uniforms to states.
    """
    roots, (child, parent, _) = forest.roots, forest.steps
    states = jnp.zeros((forest.num_units, beliefs.shape[2]), jnp.int32)
    states = states.at[roots].set(pick(beliefs[roots], u[roots]))

    def step(states: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        child, parent, pair = inputs
        above = states.at[parent].get(mode="clip")[:, None, None]
        logs = beliefs.at[child].get(mode="clip") + jnp.take_along_axis(pair, above, axis=2)[:, :, 0]
        return states.at[child].set(pick(logs, u.at[child].get(mode="clip")), mode="drop"), None

    return lax.scan(step, states, (jnp.asarray(child), jnp.asarray(parent), pairs), reverse=True)[0]


def _log_sum_exp(logs: Array, axis: int) -> Array:
    """As jax.nn.logsumexp, with a gradient of 0 where all are -inf."""
    top = _finite_max(logs, axis)
    total = jnp.exp(logs - top).sum(axis)
    top, possible = jnp.squeeze(top, axis), total > 0
    return jnp.where(possible, jnp.log(jnp.where(possible, total, 1.0)) + top, -jnp.inf)


def _finite_max(logs: Array, axis: int) -> Array:
    top = lax.stop_gradient(logs.max(axis, keepdims=True))
    return jnp.where(jnp.isfinite(top), top, 0.0)


def _weights(logs: Array) -> Array:
    return jnp.exp(logs - _finite_max(logs, -1))


def _couple(logs: Array, u: Array) -> Array:
    """Couple two categories maximally, of the first and the second half of the rows."""
    weights = _weights(jnp.moveaxis(logs, 1, -1))
    p, q = jnp.split(weights / weights.sum(-1, keepdims=True).clip(jnp.finfo(weights.dtype).tiny), 2, axis=1)
    x = inverse_cdf(u[:, 0], p)
    at_x = lambda prob: jnp.take_along_axis(prob, x[..., None], -1)[..., 0]
    is_same = u[:, 1] * at_x(p) < at_x(q)
    residual = jnp.maximum(q - p, 0.0)
    residual = jnp.where(residual.any(-1, keepdims=True), residual, q)  # lost to rounding
    residual = inverse_cdf(u[:, 2], residual)
    return jnp.concatenate([x, jnp.where(is_same, x, residual)], 1)


def _arrange(
    forest: Forest, unary: Array, pairwise: Array, batch: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], Array, Array]:
    """Return the batch shape, unary ``(units, states, rows)``, and pairwise in the order of the steps.

    Pairwise is ``(steps, width, states below, states above, rows or 1)``.
    """
    batch = jnp.broadcast_shapes(batch, unary.shape[:-2], pairwise.shape[:-3])
    unary = _rows_last(jnp.broadcast_to(unary, (*batch, *unary.shape[-2:])), 2)
    child, _, edge = forest.steps
    if not len(forest.edges):
        return batch, unary, jnp.zeros((*edge.shape, *pairwise.shape[-2:], 1), pairwise.dtype)
    if math.prod(pairwise.shape[:-3]) > 1:
        pairwise = jnp.broadcast_to(pairwise, (*batch, *pairwise.shape[-3:]))
    pairs = jnp.take(_rows_last(pairwise, 3), edge, axis=0, mode="clip")
    first = forest.edges[edge.clip(max=len(forest.edges) - 1), 0]
    reverse = jnp.asarray(first != child)[..., None, None, None]
    return batch, unary, jnp.where(reverse, jnp.swapaxes(pairs, 2, 3), pairs)


def _rows_last(values: Array, num_axes: int) -> Array:
    """Flatten the leading axes to one, and move it behind the last ``num_axes``."""
    leading = values.ndim - num_axes
    return jnp.moveaxis(values.reshape(math.prod(values.shape[:leading]), *values.shape[leading:]), 0, -1)
