# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random words: Threefry-2x32 written so that XLA fuses it.

Why not :mod:`jax.random`: inside a coupled sweep its uniforms made the whole step 1.4
to 1.5 times slower, because the default generator hashes once a word and keeps half of
what it computes. The function below is the same hash (the tests compare its words with
jax's own) and keeps both halves.

A *key pair* is a ``uint32`` array whose last axis holds the two words of a Threefry
key; any leading axes are rows, and a row's words depend on its own key pair and on
nothing else. That is what makes results independent of batching, slots and devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import or_, rshift, xor
from typing import Any

from jaxtyping import Float, Int32, Integer, Key, UInt32
import numpy as np

import jax
from jax import Array, lax
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import backend
from ebmpp.core.types import Numbers

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA  # Salmon et al. (2011), the Skein key-schedule constant
_OURS = (0x65626D70, 0x70000000)
_TO_UNIT = 2.0**-24
_MAX_ON_HOST = 2**16  # numbers that are hashed on the host: a millisecond

KeyPair = UInt32[Array, "*rows 2"]
Word = UInt32[Array, "*words"]
Counter = Integer[ArrayLike, "*#rows"]


def threefry(
    key_pair: UInt32[Numbers, "*#words 2"],
    x0: UInt32[Array, "*#words"],
    x1: UInt32[Array, "*#words"],
) -> tuple[Word, Word]:
    """Hash the counter ``(x0, x1)`` with twenty rounds of Threefry-2x32.

    Salmon, Moraes, Dror, Shaw (2011), *Parallel random numbers: as easy as 1, 2, 3*.
    """
    first = key_pair[..., 0]
    second = key_pair[..., 1]
    schedule = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    # In lax's own operations, of one shape: jax.numpy's take 2.4 times as long to
    # trace, and there are 120.
    shape = jnp.broadcast_shapes(first.shape, jnp.shape(x0), jnp.shape(x1))
    x0, x1, *schedule = (jnp.broadcast_to(a, shape) for a in (x0, x1, *schedule))
    return _rounds(_TRACED, x0, x1, schedule)


# Operations and constants of the hash: traced, and on the host. There Python's integers
# take a tenth of the time of arrays for one key; arrays of 32 bits wrap by themselves.
_TRACED = (
    lax.add,
    lax.shift_left,
    lax.shift_right_logical,
    lax.bitwise_or,
    lax.bitwise_xor,
    np.uint32,
)
_ON_HOST = (
    (lambda x, y: x + y & 2**32 - 1),
    (lambda x, n: x << n & 2**32 - 1),
    rshift,
    or_,
    xor,
    int,
)


def _rounds(
    operations: Sequence[Callable],
    x0: Any,
    x1: Any,
    schedule: Sequence[Any],
) -> tuple[Any, Any]:
    add, shift_left, shift_right, either, differ, word = operations
    x0 = add(x0, schedule[0])
    x1 = add(x1, schedule[1])
    for group in range(5):
        for n in _ROTATIONS[group % 2]:
            x0 = add(x0, x1)
            rotated = either(shift_left(x1, word(n)), shift_right(x1, word(32 - n)))
            x1 = differ(rotated, x0)
        x0 = add(x0, schedule[(group + 1) % 3])
        x1 = add(add(x1, schedule[(group + 2) % 3]), word(group + 1))
    return x0, x1


def is_typed(key: Any) -> bool:
    """Return True for typed keys of jax, and False for legacy ones."""
    return jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key)


def key_pair(
    rng_key: Key[Array, "*rows"] | UInt32[Array, "*rows 2"], number: Counter = _OURS[0]
) -> KeyPair:
    """Return the key pair of a jax key, typed or legacy, of any implementation.

    :param number: another one gives another pair, by the same single hash.
    """
    if is_typed(rng_key):
        rng_key = jax.random.key_data(rng_key)
    key = rng_key[..., :2] if rng_key.shape[-1] > 2 else rng_key
    # longer keys (rbg has four words) are hashed
    for start in range(2, rng_key.shape[-1], 2):
        key = fold_in(key, rng_key[..., start], rng_key[..., start + 1])
    # jax.random.split never uses this counter, so keys that a caller splits from the
    # same key differ.
    return fold_in(key, number, _OURS[1])


def as_key(words: UInt32[Numbers, "*rows 2"]) -> Key[Array, "*rows"]:
    """Return two random words as a jax key, whatever jax's default generator is."""
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def fold_in(
    key: UInt32[Numbers, "*#rows 2"], first: Counter, second: Counter = 0
) -> KeyPair:
    """Return new key pairs for the counter ``(first, second)``, row by row.

    Few keys with known values are hashed on the host. Keys in a numpy array give a
    numpy array. Typed jax keys are converted by ``key_pair``.
    """
    if is_typed(key):
        key = key_pair(jnp.asarray(key))
    if all(map(_is_small, (key, first, second))):
        return _folded_on_host(key, first, second)
    return _folded(key, jnp.asarray(first, jnp.uint32), jnp.asarray(second, jnp.uint32))


def _is_small(a: Any) -> bool:
    is_concrete = not isinstance(a, Tracer) and (
        not isinstance(a, Array) or a.is_fully_addressable
    )
    return is_concrete and np.size(a) <= _MAX_ON_HOST


def _folded_on_host(key: Any, first: Any, second: Any) -> Any:
    words = np.asarray(key)
    key0 = words[..., 0]
    key1 = words[..., 1]
    x0 = np.asarray(first).astype(np.uint32)
    x1 = np.asarray(second).astype(np.uint32)
    if not any(map(np.ndim, (key0, x0, x1))):
        key0, key1, x0, x1 = map(int, (key0, key1, x0, x1))
    schedule = (key0, key1, key0 ^ key1 ^ _PARITY)
    pair = np.stack(_rounds(_ON_HOST, x0, x1, schedule), -1).astype(np.uint32)
    # which takes as long as the hash
    return pair if isinstance(key, np.ndarray) else jax.device_put(pair)


# One program for calls from the host, in place of a hundred small ones; inlined in
# other programs.
@partial(jax.jit, inline=True)
def _folded(key: Array, first: Array, second: Array) -> Array:
    x0, x1 = threefry(key, first, second)
    if backend.accelerated():
        return jnp.stack([x0, x1], -1)  # one launch less per key
    # A selection: with concatenation a chain of hashes took XLA's older emitters 20 s
    # to compile.
    return jnp.where(jnp.arange(2) == 0, x0[..., None], x1[..., None])


def split(rng_key: Numbers, num: int) -> list[Array]:
    """Return the keys of ``jax.random.split``, without a program where the key is known."""
    pair = jax.random.key_data(rng_key)  # traced inside a trace
    is_ours = jax.random.key_impl(rng_key) == "threefry2x32"
    is_partitionable = getattr(jax.config, "jax_threefry_partitionable", False)
    if not (_is_small(pair) and is_ours and is_partitionable):
        return list(jax.random.split(rng_key, num))
    pairs = _folded_on_host(np.asarray(pair)[None], 0, np.arange(num))
    return [as_key(row) if is_typed(rng_key) else jnp.asarray(row) for row in pairs]


def materialize(key: UInt32[Array, "*rows 2"]) -> KeyPair:
    """Return the key pair such that a CPU program hashes it once, which saves compilation.

    Otherwise each kernel that reads its words repeats the whole chain of hashes.
    """
    if backend.accelerated():
        return key
    # As in `uniform`: XLA does not repeat a division. It takes some nanoseconds per
    # row.
    divisor = lax.optimization_barrier(np.uint32(1))
    return lax.div(key, jnp.broadcast_to(divisor, key.shape))


@partial(jax.jit, static_argnums=1, inline=True)
def words(
    key: UInt32[Numbers, "*rows 2"], count: int
) -> UInt32[Array, "*rows {count}"]:
    """Return ``count`` random words per row."""
    half = jnp.uint32((count + 1) // 2)
    index = jnp.arange(count, dtype=jnp.uint32)
    second = index >= half
    counter = jnp.where(second, index - half, index)
    # Each word computes a hash and keeps one half: concatenating halves prevented XLA
    # on CPU from vectorising the loop (a sweep of 1000 chains took 520 us in place of
    # 92 at 16x16, 14.2 ms in place of 12.4 at 784x500).
    halves = threefry(key[..., None, :], counter, counter + half)
    return jnp.where(second, halves[1], halves[0])


def uniform(words: UInt32[Numbers, "*words"]) -> Float[Array, "*words"]:
    """Return uniforms on [0, 1) in steps of 2**-24 (``jax.random.uniform`` has steps of 2**-23)."""
    # A signed 24-bit integer converts to float in one instruction; an unsigned word
    # does not.
    signed = (jnp.asarray(words) >> jnp.uint32(8)).astype(jnp.int32)
    u = signed.astype(float) * _TO_UNIT
    # XLA copies cheap operations into every fusion that reads them, a hash included but
    # not a square root. On a CPU the root of a square is exact. Without it a coupled
    # layer hashed five times in place of three. The square is behind the barrier: with
    # a factor there, jaxlib 0.12 does not finish some compilations.
    return u if backend.accelerated() else lax.sqrt(lax.optimization_barrier(u * u))


def uniforms(
    key: UInt32[Numbers, "*rows 2"], count: int
) -> Float[Array, "*rows {count}"]:
    """Return ``count`` uniforms per row, of its random words."""
    return uniform(words(key, count))


def open_uniform(words: UInt32[Numbers, "*words"]) -> Float[Array, "*words"]:
    """Return uniforms on the open interval (0, 1): midpoints of steps of 2**-23."""
    # One bit less than `uniform`: the last midpoint of steps of 2**-24 would round to
    # 1, which maps to an infinite Gaussian draw.
    odd = 2 * (jnp.asarray(words) >> jnp.uint32(9)).astype(jnp.int32) + 1
    return odd.astype(float) * _TO_UNIT


def inverse_cdf(
    u: Float[Array, "*units"], weights: Float[Array, "*#units categories"]
) -> Int32[Array, "*units"]:
    """Draw categories by inversion at uniforms; weights need not sum to 1."""
    cumulated = jnp.cumsum(weights, axis=-1)
    # u < 1, so the threshold is below the total, and a category of weight 0 is never
    # drawn.
    threshold = u[..., None] * cumulated[..., -1:]
    category = (cumulated <= threshold).sum(-1)
    return category.clip(0, weights.shape[-1] - 1).astype(jnp.int32)
