# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Grey levels, and the binary or spin values that are drawn from them or cut at a threshold."""

import numpy as np
from numpy.typing import ArrayLike

import jax

from ebmpp.core import checks
from ebmpp.errors import ArgumentError

Array = np.ndarray


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

    >>> import jax
    >>> from ebmpp.data import binarize
    >>> binarize([0.2, 0.5, 0.9])
    array([0., 0., 1.], dtype=float32)
    >>> binarize([0.0, 1.0], method="bernoulli", rng_key=jax.random.key(0))
    array([0., 1.], dtype=float32)
    """
    x = np.asarray(checks.numbers("binarize: x", x))
    if checks.choice("binarize: method", method, ("threshold", "bernoulli")) == "threshold":
        threshold = checks.number("binarize: threshold", threshold)
        _refuse(x, ~np.isfinite(x), "a finite number", "Remove or fill such entries first.")
        return (x > threshold).astype(np.float32)
    rng_key = checks.key("binarize: rng_key, which method 'bernoulli' draws with,", rng_key)
    # ~(inside) rather than (outside): NaN is neither below 0 nor above 1.
    _refuse(x, ~((x >= 0) & (x <= 1)), "a probability in [0, 1]", "Scale the data first.")
    return np.asarray(jax.random.bernoulli(rng_key, x.astype(np.float32)), np.float32)


def _refuse(x: Array, bad: Array, expected: str, mend: str) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.unravel_index(np.argmax(bad), x.shape))
        raise ArgumentError(
            f"binarize: x at index {where} is {x[where]}, where {expected} is expected "
            f"({bad.sum()} such of {x.size}). {mend}"
        )
