# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random words: Threefry-2x32 written so that XLA fuses it.

Why not :mod:`jax.random`: inside a coupled sweep its uniforms made the whole step 1.4 to 1.5 times
slower, because the default generator hashes once a word and keeps half of what it computes. The
function below is the same hash (the tests compare its words with jax's own) and keeps both halves.

A *key pair* is a ``uint32`` array whose last axis holds the two words of a Threefry key; any leading
axes are rows, and a row's words depend on its own key pair and on nothing else. That is what makes
results independent of batching, slots and devices.
"""

import jax
from jax import Array, lax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA  # Salmon et al. (2011), the Skein key-schedule constant
_OURS = (0x65626D70, 0x70000000)
_TO_UNIT = 2.0**-24


def _rotate_left(x: Array, distance: int) -> Array:
    return (x << jnp.uint32(distance)) | (x >> jnp.uint32(32 - distance))


def threefry(key_pair: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Hash the counter ``(x0, x1)`` with twenty rounds of Threefry-2x32.

    :param key_pair: ``uint32``, shape ``(..., 2)``.
    :param x0: first counter word, ``uint32``, broadcast against ``key_pair[..., 0]``.
    :param x1: second counter word.
    :return: the two output words.

    **References**

    1. Salmon, Moraes, Dror, Shaw (2011), *Parallel random numbers: as easy as 1, 2, 3*.
    """
    rank = max(jnp.ndim(x0), jnp.ndim(x1), key_pair.ndim - 1)
    first, second, x0, x1 = (
        lax.broadcast_to_rank(jnp.asarray(a), rank) for a in (key_pair[..., 0], key_pair[..., 1], x0, x1)
    )
    schedule = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = _rotate_left(x1, distance) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def key_pair(rng_key: Array) -> Array:
    """The key pair of a jax key, whatever its implementation.

    :param rng_key: typed keys of shape ``(...,)`` or legacy ``uint32`` keys of shape ``(..., 2)``.
    :return: ``uint32`` of shape ``(..., 2)``.
    """
    if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        rng_key = jax.random.key_data(rng_key)
    pair = rng_key[..., :2]
    for start in range(2, rng_key.shape[-1], 2):  # longer keys (rbg has four words) are hashed down
        pair = fold_in(pair, rng_key[..., start], rng_key[..., start + 1])
    # A counter that jax.random.split never uses keeps our words apart from those of a caller who goes
    # on with keys split from the same one.
    return fold_in(pair, *_OURS)


def fold_in(pair: Array, first: Array | int, second: Array | int = 0) -> Array:
    """A new key pair for the counter ``(first, second)``, row by row.

    :param pair: ``uint32``, shape ``(..., 2)``.
    :param first: integer or array broadcast against the rows.
    :param second: likewise.
    :return: ``uint32``, shape ``(..., 2)``.
    """
    first, second = jnp.asarray(first, jnp.uint32), jnp.asarray(second, jnp.uint32)
    return jnp.stack(jnp.broadcast_arrays(*threefry(pair, first, second)), axis=-1)


def words(pair: Array, count: int) -> Array:
    """``count`` random words a row.

    :param pair: ``uint32``, shape ``(..., 2)``.
    :param count: how many words, at least 0.
    :return: ``uint32``, shape ``(..., count)``.
    """
    half = (count + 1) // 2
    counter = jnp.arange(half, dtype=jnp.uint32)
    both = threefry(pair[..., None, :], counter, counter + jnp.uint32(half))
    return jnp.concatenate(both, axis=-1)[..., :count]


def uniform(bits: Array) -> Array:
    """Uniforms on [0, 1) from random words, in steps of 2**-24 (jax's own take steps of 2**-23).

    :param bits: ``uint32``, any shape.
    :return: floats of the same shape.
    """
    # A signed 24-bit integer converts to float in one instruction; an unsigned word does not.
    return (bits >> jnp.uint32(8)).astype(jnp.int32).astype(jnp.result_type(float)) * _TO_UNIT


def open_uniform(bits: Array) -> Array:
    """Uniforms on the open interval (0, 1): the midpoints of steps of 2**-23.

    :param bits: ``uint32``, any shape.
    :return: floats of the same shape.
    """
    # One bit less than `uniform`: the midpoint of the last step of 2**-24 would round to 1, and a
    # Gaussian draw from it is infinite.
    odd = 2 * (bits >> jnp.uint32(9)).astype(jnp.int32) + 1
    return odd.astype(jnp.result_type(float)) * _TO_UNIT


def inverse_cdf(u: Array, weights: Array) -> Array:
    """A category drawn with the weights of the last axis: the first whose cumulated one exceeds u of all.

    :param u: uniforms, the shape of ``weights`` without its last axis.
    :param weights: not negative, of any sum.
    :return: int32, shaped like ``u``.
    """
    cumulated = jnp.cumsum(weights, axis=-1)
    # u < 1, so the threshold stays below the last sum and a category of weight 0 is never chosen
    threshold = u[..., None] * cumulated[..., -1:]
    return (cumulated <= threshold).sum(-1).clip(0, weights.shape[-1] - 1).astype(jnp.int32)
