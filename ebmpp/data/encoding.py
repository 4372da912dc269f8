# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Whole numbers as binary digits, so that grey images can be data of binary units."""

import numpy as np
from numpy.typing import ArrayLike

from ebmpp.core import checks
from ebmpp.errors import ArgumentError

Array = np.ndarray

_MOST = 16


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
    num_bits = checks.count("encode_bits: num_bits", num_bits, most=_MOST)
    x = np.asarray(checks.numbers("encode_bits: x", x), float)
    wrong = np.argwhere(~((x >= 0) & (x <= 1)))
    if len(wrong):
        index = tuple(int(i) for i in wrong[0])
        raise ArgumentError(
            f"encode_bits: x at index {index} is {x[index]}, where an intensity in [0, 1] is expected "
            f"({len(wrong)} such of {x.size}). Scale the data first, bytes by 1/255."
        )
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
    checks.count("decode_bits: the length of the last axis", bits.shape[-1], most=_MOST)
    low = -1 if spin else 0
    wrong = ~((bits >= low) & (bits <= 1))
    if wrong.any():
        raise ArgumentError(f"decode_bits: digits are from {low} to 1 with spin={spin}; got {bits[wrong][0]}")
    places = 2.0 ** np.arange(bits.shape[-1] - 1, -1, -1)
    return ((bits - low) / (1 - low) @ places / places.sum()).astype(np.float32)
