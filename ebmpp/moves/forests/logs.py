# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sums, maxima and draws of states along one axis of log weights."""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core.random import inverse_cdf

#: Sums or maximises one axis of log weights.
Reduce = Callable[[Array, int], Array]
#: From log weights, uniforms with an axis in front, and the axis of the states, which
#: is not in the result.
Pick = Callable[[Array, Array, int], Array]


class Sums(NamedTuple):
    """Log weights with all units below each one summed out, up to constants."""

    beliefs: Array
    """Of the units, by unit or by step."""
    pairs: Array
    """Of the ends of edges, by step."""
    centres: Array
    """Of the roots, ``(trees, states, rows)``."""
    axis: int = 1
    """Axis of the states in ``beliefs``."""


_MOST_UNROLLED = 16  # states; XLA's cumulative sums are slow along any axis


def log_sum_exp(logs: Array, axis: int) -> Array:
    """As jax.nn.logsumexp, with a gradient of 0 where all are -inf."""
    top = finite_max(logs, axis)
    total = jnp.exp(logs - top).sum(axis)
    is_possible = total > 0
    log_total = jnp.log(jnp.where(is_possible, total, 1.0)) + jnp.squeeze(top, axis)
    return jnp.where(is_possible, log_total, -jnp.inf)


def finite_max(logs: Array, axis: int) -> Array:
    """Return the maxima, which keep the axis, and 0 for infinite ones."""
    top = lax.stop_gradient(logs.max(axis, keepdims=True))
    return jnp.where(jnp.isfinite(top), top, 0.0)


def draw_states(logs: Array, u: Array, axis: int) -> Array:
    """Draw states by their weights."""
    return _invert(u[0], _weights(logs, axis), axis)


def best_states(logs: Array, u: Array, axis: int) -> Array:
    """Return the states of the largest weights."""
    return logs.argmax(axis).astype(jnp.int32)


def couple_states(logs: Array, u: Array, axis: int) -> Array:
    """Draw the states of two chains, the halves of the rows, coupled maximally."""
    weights = _weights(logs, axis)
    total = weights.sum(axis, keepdims=True).clip(jnp.finfo(weights.dtype).tiny)
    last = logs.ndim - 1
    rows = last - 1 if axis == last else last
    p, q = jnp.split(weights / total, 2, axis=rows)
    x = _invert(u[0], p, axis)
    is_same = u[1] * at_states(p, x, axis, 0.0) < at_states(q, x, axis, 0.0)
    residual = jnp.maximum(q - p, 0.0)
    is_lost = ~residual.any(axis, keepdims=True)  # to rounding
    residual = jnp.where(is_lost, q, residual)
    y = jnp.where(is_same, x, _invert(u[2], residual, axis))
    return jnp.concatenate([x, y], rows - (axis < rows))


def at_states(
    values: Array,
    states: Array,
    axis: int,
    least: float = -jnp.inf,
) -> Array:
    """Return the values of states, which lack the axis; a maximum, as gathers of rows are slow."""
    numbers = lax.broadcasted_iota(jnp.int32, values.shape, axis)
    return jnp.where(numbers == jnp.expand_dims(states, axis), values, least).max(axis)


def _weights(logs: Array, axis: int) -> Array:
    return jnp.exp(logs - finite_max(logs, axis))


def _invert(u: Array, weights: Array, axis: int) -> Array:
    """As :func:`~ebmpp.core.random.inverse_cdf`, along any axis."""
    size = weights.shape[axis]
    if size > _MOST_UNROLLED:
        return inverse_cdf(u, jnp.moveaxis(weights, axis, -1))
    below = jnp.tril(jnp.ones((size, size), weights.dtype))
    below = below.reshape(size, size, *(1,) * (weights.ndim - 1 - axis))
    cumulated = (jnp.expand_dims(weights, axis) * below).sum(axis + 1)
    total = lax.slice_in_dim(cumulated, size - 1, size, axis=axis)
    threshold = jnp.expand_dims(u, axis) * total
    state = (cumulated <= threshold).sum(axis)
    return state.clip(0, size - 1).astype(jnp.int32)
