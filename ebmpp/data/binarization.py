# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Grey levels as data of binary units: drawn, cut at a threshold, or encoded as binary digits."""

import numpy as np
from numpy.typing import ArrayLike

import jax

from ebmpp.core import checks
from ebmpp.errors import ArgumentError

Array = np.ndarray

_MOST_BITS = 16


def binarize(
    x: ArrayLike, method: str = "threshold", threshold: float = 0.5, rng_key: jax.Array | None = None
) -> Array:
    """
    Turn intensities into {0, 1}.

    :param x: finite numbers of any shape; for "bernoulli" probabilities in [0, 1].
    :param method: "threshold", 1 where `x` exceeds `threshold`; or "bernoulli", 1 with
        probability `x`, each entry on its own.
    :param threshold: used by "threshold" only, on the scale of `x`.
    :param rng_key: a jax random key, needed and used by "bernoulli" only.
    :return: float32 array of the shape of `x`.
    :raises ArgumentError: if the method is unknown, its key is missing, or a number is not finite or
        not a probability; the text names the first such entry.

    **Example**

    >>> import jax, ebmpp
    >>> ebmpp.data.binarize([0.2, 0.5, 0.9])
    array([0., 0., 1.], dtype=float32)
    >>> ebmpp.data.binarize([0.0, 1.0], method="bernoulli", rng_key=jax.random.key(0))
    array([0., 1.], dtype=float32)
    """
    x = np.asarray(checks.numbers("binarize: x", x))
    if checks.choice("binarize: method", method, ("threshold", "bernoulli")) == "threshold":
        threshold = checks.number("binarize: threshold", threshold)
        _refuse("binarize", x, ~np.isfinite(x), "a finite number", "Remove or fill such entries first.")
        return (x > threshold).astype(np.float32)
    rng_key = checks.key("binarize: rng_key, which method 'bernoulli' draws with,", rng_key)
    # ~(inside) rather than (outside): NaN is neither below 0 nor above 1.
    _refuse("binarize", x, ~((x >= 0) & (x <= 1)), "a probability in [0, 1]", "Scale the data first.")
    return np.asarray(jax.random.bernoulli(rng_key, x.astype(np.float32)), np.float32)


def encode_bits(x: ArrayLike, num_bits: int = 8, spin: bool = False) -> Array:
    """Intensities in [0, 1] as the binary digits of ``round((2^num_bits - 1) x)``, the highest first.

    With 8 bits, grey images of one byte a pixel are encoded without loss (Taniguchi et al. 2023, section
    3.4).

    :param x: intensities of any shape, each in [0, 1]; a byte image is divided by 255 first.
    :param num_bits: from 1 to 16.
    :param spin: digits as -1 and 1 instead of 0 and 1.
    :return: float32 of shape ``(*x.shape, num_bits)``.
    :raises ArgumentError: for another number of bits, or a number outside [0, 1], with the first place.

    **Example**

    >>> encode_bits([0.0, 5 / 255]).astype(int)
    array([[0, 0, 0, 0, 0, 0, 0, 0],
           [0, 0, 0, 0, 0, 1, 0, 1]])
    """
    num_bits = checks.count("encode_bits: num_bits", num_bits, most=_MOST_BITS)
    x = np.asarray(checks.numbers("encode_bits: x", x), float)
    wanted, mend = "an intensity in [0, 1]", "Scale the data first, bytes by 1/255."
    _refuse("encode_bits", x, ~((x >= 0) & (x <= 1)), wanted, mend)
    levels = np.rint(x * (2**num_bits - 1)).astype(np.int64)
    digits = levels[..., None] >> np.arange(num_bits - 1, -1, -1) & 1
    return (2 * digits - 1 if spin else digits).astype(np.float32)


def decode_bits(bits: ArrayLike, spin: bool = False) -> Array:
    """Intensities from what :func:`encode_bits` made.

    :param bits: shape ``(..., num_bits)``. Means of digits do as well, and give the mean intensity.
    :param spin: digits are -1 and 1 instead of 0 and 1.
    :return: float32 of shape ``(...)``, in [0, 1].
    :raises ArgumentError: for digits out of range, or too many of them.

    **Example**

    >>> decode_bits(encode_bits([0.0, 0.2, 1.0]))
    array([0. , 0.2, 1. ], dtype=float32)
    """
    bits = np.asarray(checks.numbers("decode_bits: bits", bits), float)
    if not bits.ndim:
        raise ArgumentError("decode_bits: bits need a last axis of digits; got one number")
    checks.count("decode_bits: the length of the last axis", bits.shape[-1], most=_MOST_BITS)
    low = -1 if spin else 0
    wrong = ~((bits >= low) & (bits <= 1))
    if wrong.any():
        raise ArgumentError(f"decode_bits: digits are from {low} to 1 with spin={spin}; got {bits[wrong][0]}")
    places = 2.0 ** np.arange(bits.shape[-1] - 1, -1, -1)
    return ((bits - low) / (1 - low) @ places / places.sum()).astype(np.float32)


def _refuse(who: str, x: Array, bad: Array, expected: str, mend: str) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.unravel_index(np.argmax(bad), x.shape))
        raise ArgumentError(
            f"{who}: x at index {where} is {x[where]}, where {expected} is expected "
            f"({bad.sum()} such of {x.size}). {mend}"
        )
