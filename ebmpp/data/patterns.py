# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Small exact patterns."""

import numpy as np

from ebmpp.core import checks

_MAX_SIDE = 20  # two million images of 400 pixels


def bars_and_stripes(n: int) -> np.ndarray:
    """Return all ``n`` by ``n`` images of whole columns (bars) or whole rows (stripes).

    The blank and the full image are both bars and stripes, and are kept twice, as in
    the literature.

    :param n: side of the image in pixels, from 1 to 20.
    :return: float32 array of shape ``(2 ** (n + 1), n * n)`` with values in {0, 1}:
        bars, then stripes, each in binary order of the pattern.
    :raises ArgumentError: for another ``n``.

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
    n = checks.count("bars_and_stripes: n", n, most=_MAX_SIDE)
    patterns = (np.arange(2**n)[:, None] >> np.arange(n)[::-1]) & 1
    bars = np.tile(patterns, n)
    stripes = np.repeat(patterns, n, axis=1)
    return np.concatenate([bars, stripes]).astype(np.float32)


def shifting_bar(n: int, b: int) -> np.ndarray:
    """Return a bar of ``b`` ones on a ring of ``n`` pixels, at each of its ``n`` positions.

    :param n: number of pixels, at least 1.
    :param b: length of the bar, from 1 to ``n``.
    :return: float32 array of shape ``(n, n)`` with values in {0, 1}; the bar of row i
        starts at pixel i.
    :raises ArgumentError: if ``b`` is not between 1 and ``n``.

    **Example**

    >>> from ebmpp.data import shifting_bar
    >>> shifting_bar(4, 2)
    array([[1., 1., 0., 0.],
           [0., 1., 1., 0.],
           [0., 0., 1., 1.],
           [1., 0., 0., 1.]], dtype=float32)
    """
    n = checks.count("shifting_bar: n", n)
    b = checks.count("shifting_bar: b", b, most=n)
    first = np.arange(n)[:, None]
    pixel = np.arange(n)[None, :]
    return ((pixel - first) % n < b).astype(np.float32)
