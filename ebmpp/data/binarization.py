# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of grey levels to binary units: by a threshold, at random, or by binary digits."""

import numpy as np
from numpy.typing import ArrayLike

import jax

from ebmpp.core import checks
from ebmpp.errors import ArgumentError

_MAX_BITS = 16


def binarize(
    x: ArrayLike,
    method: str = "threshold",
    threshold: float = 0.5,
    *,
    rng_key: jax.Array | None = None,
) -> np.ndarray:
    """Turn intensities into {0, 1}.

    :param x: finite numbers of any shape; probabilities in [0, 1] for "bernoulli".
    :param method: "threshold", 1 where ``x`` exceeds ``threshold``; or "bernoulli", 1
        with probability ``x``, independently.
    :param threshold: for "threshold", on the scale of ``x``.
    :param rng_key: a jax key, for "bernoulli".
    :return: float32 array of the shape of ``x``.
    :raises ArgumentError: for an unknown method, a missing key, or an invalid number,
        with its first index.

    **Example**

    >>> import jax, ebmpp
    >>> ebmpp.data.binarize([0.2, 0.5, 0.9])
    array([0., 0., 1.], dtype=float32)
    >>> ebmpp.data.binarize([0.0, 1.0], method="bernoulli", rng_key=jax.random.key(0))
    array([0., 1.], dtype=float32)
    """
    checks.choice("binarize: method", method, ("threshold", "bernoulli"))
    if method == "threshold":
        x = np.asarray(checks.numbers("binarize: x", x))
        threshold = checks.number("binarize: threshold", threshold)
        _check_all("binarize: x", x, np.isfinite(x), "finite")
        return (x > threshold).astype(np.float32)
    rng_key = checks.key("binarize: rng_key of method 'bernoulli'", rng_key)
    probs = _fractions("binarize: x", x).astype(np.float32)
    return np.asarray(jax.random.bernoulli(rng_key, probs), np.float32)


def encode_bits(x: ArrayLike, num_bits: int = 8) -> np.ndarray:
    """Return the binary digits of ``round((2^num_bits - 1) x)``, the highest first.

    8 bits encode grey images of one byte per pixel without loss (Taniguchi et al. 2023,
    section 3.4).

    :param x: intensities of any shape in [0, 1]; divide byte images by 255.
    :param num_bits: from 1 to 16.
    :return: float32 of shape ``(*x.shape, num_bits)``.
    :raises ArgumentError: for another number of bits, or a number outside [0, 1], with
        its first index.

    **Example**

    >>> encode_bits([0.0, 5 / 255]).astype(int)
    array([[0, 0, 0, 0, 0, 0, 0, 0],
           [0, 0, 0, 0, 0, 1, 0, 1]])
    """
    num_bits = checks.count("encode_bits: num_bits", num_bits, most=_MAX_BITS)
    x = _fractions("encode_bits: x", x)
    levels = np.rint(x * (2**num_bits - 1)).astype(np.int64)
    places = np.arange(num_bits)[::-1]
    return ((levels[..., None] >> places) & 1).astype(np.float32)


def decode_bits(bits: ArrayLike) -> np.ndarray:
    """Invert :func:`encode_bits`.

    :param bits: shape ``(..., num_bits)``. Means of digits are accepted, and give the
        mean intensity.
    :return: float32 of shape ``(...)``, in [0, 1].
    :raises ArgumentError: for digits out of range, or too many of them.

    **Example**

    >>> decode_bits(encode_bits([0.0, 0.2, 1.0]))
    array([0. , 0.2, 1. ], dtype=float32)
    """
    bits = np.atleast_1d(_fractions("decode_bits: bits", bits))
    num_bits = bits.shape[-1]
    checks.count("decode_bits: last axis of bits", num_bits, most=_MAX_BITS)
    weights = 2.0 ** np.arange(num_bits)[::-1]
    return (bits @ weights / weights.sum()).astype(np.float32)


def _fractions(name: str, x: ArrayLike) -> np.ndarray:
    x = np.asarray(checks.numbers(name, x), float)
    _check_all(name, x, (x >= 0) & (x <= 1), "in [0, 1]")
    return x


def _check_all(name: str, x: np.ndarray, is_valid: np.ndarray, expected: str) -> None:
    if not is_valid.all():
        where = tuple(np.argwhere(~is_valid)[0].tolist())
        raise ArgumentError(
            f"{name} must be {expected}, got {x[where]} at index {where} and "
            f"{(~is_valid).sum()} such numbers"
        )
