# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Is a symmetric matrix positive definite? Answered from products with it, for matrices of any size."""

from collections.abc import Callable
import math

import numpy as np
from scipy.linalg import eigh_tridiagonal

_MOST_PRODUCTS = 4096  # decides condition numbers up to about 5e4
_DOUBT = 1e-12  # the probability, over the vector that is started from, of a bound that does not hold
_GROWTH = 1.5  # of the number of products between two looks


def least_eigenvalue(
    product: Callable[[np.ndarray], np.ndarray], size: int, rounding: float
) -> tuple[float, float]:
    """Bounds of the smallest eigenvalue by Lanczos, as tight as it takes to tell its sign.

    The upper bound is a value that the quadratic form takes; the lower one holds with probability 1 - 1e-12
    over the random vector that is started from. A sign that stays undecided has bounds on both sides of 0.

    :param product: of the matrix with a vector of length ``size``.
    :param rounding: of the products, relative to the largest eigenvalue.
    :return: a lower and an upper bound.

    **References**

    1. Kuczynski, Wozniakowski (1992), *Estimating the largest eigenvalue by the power and Lanczos algorithms
       with a random start*, theorem 4.2.
    """
    start = np.random.default_rng(0).normal(size=size)
    vector, before, beta = start / np.linalg.norm(start), np.zeros(size), 0.0
    diagonal, beside, look = [], [], 8
    for count in range(1, _MOST_PRODUCTS + 1):
        after = np.asarray(product(vector), float) - beta * before
        diagonal.append(float(vector @ after))
        after -= diagonal[-1] * vector
        beta = float(np.linalg.norm(after))
        # nothing new: these are all the eigenvalues that there are
        complete = count == size or beta <= rounding * np.abs(diagonal).max()
        if count >= look or complete or count == _MOST_PRODUCTS:
            ritz = eigh_tridiagonal(diagonal, beside, eigvals_only=True)
            low, high = float(ritz[0]), float(ritz[-1])
            missed = 0.0 if complete else _missed(count, size) * (high - low)
            lower = low - missed - rounding * max(high, -low)
            if low <= 0 or lower > 0 or complete:
                break
            look = math.ceil(_GROWTH * count)
        vector, before = after / beta, vector
        beside.append(beta)
    return lower, low


def _missed(count: int, size: int) -> float:
    """How much less the smallest eigenvalue can be than that of ``count`` steps, relative to their spread."""
    share = (math.log(1.648 * math.sqrt(size) / _DOUBT) / (2 * count - 1)) ** 2
    return share / (1 - 2 * share) if share < 0.25 else math.inf
