# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Small exact patterns."""

import numpy as np

from ebmpp.core import checks

Array = np.ndarray
_LARGEST_SIDE = 20  # two million images of 400 pixels


def bars_and_stripes(n: int) -> Array:
    """
    All images of `n` by `n` pixels made of whole columns (bars) or of whole rows (stripes).

    The blank and the full image are both bars and stripes, and are kept twice, as in the
    literature: of the ``2 ** (n + 1)`` rows, two are duplicates.

    :param n: side of the image in pixels, at least 1.
    :return: float32 array of shape ``(2 ** (n + 1), n * n)`` with values in {0, 1}; the first half
        are the bars, the second half the stripes, each in binary order of its pattern.
    :raises ArgumentError: if `n` is no int from 1 to 20.

    **Example**

    >>> from ebmpp.data import bars_and_stripes
    >>> bars_and_stripes(2)
    array([[0., 0., 0., 0.],
           [0., 1., 0., 1.],
           [1., 0., 1., 0.],
           [1., 1., 1., 1.],
           [0., 0., 0., 0.],
           [0., 0., 1., 1.],
           [1., 1., 0., 0.],
           [1., 1., 1., 1.]], dtype=float32)
    """
    n = checks.count("bars_and_stripes: n, the side,", n, most=_LARGEST_SIDE)
    patterns = (np.arange(2**n)[:, None] >> np.arange(n)[::-1]) & 1
    shape = (2**n, n, n)
    bars = np.broadcast_to(patterns[:, None, :], shape)
    stripes = np.broadcast_to(patterns[:, :, None], shape)
    return np.concatenate([bars, stripes]).reshape(-1, n * n).astype(np.float32)


def shifting_bar(n: int, b: int) -> Array:
    """
    A bar of `b` ones on a ring of `n` pixels, at each of its `n` positions.

    :param n: number of pixels, at least 1.
    :param b: length of the bar, from 1 to `n`.
    :return: float32 array of shape ``(n, n)`` with values in {0, 1}; row i has its bar begin at
        pixel i and wrap around the end.
    :raises ArgumentError: if `b` is not between 1 and `n`.

    **Example**

    >>> from ebmpp.data import shifting_bar
    >>> shifting_bar(4, 2)
    array([[1., 1., 0., 0.],
           [0., 1., 1., 0.],
           [0., 0., 1., 1.],
           [1., 0., 0., 1.]], dtype=float32)
    """
    n = checks.count("shifting_bar: n, the pixels,", n)
    b = checks.count("shifting_bar: b, the bar's length,", b, most=n)
    first, pixel = np.arange(n)[:, None], np.arange(n)[None, :]
    return ((pixel - first) % n < b).astype(np.float32)
