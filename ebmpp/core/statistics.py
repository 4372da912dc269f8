# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a mean of independent values tells of the mean that they are drawn from."""

import math
from typing import NamedTuple

from jaxtyping import Float
import numpy as np


def standard_error(values: Float[np.ndarray, "*means values"]) -> Float[np.ndarray, "*means"]:
    """Of means over the last axis; nan of one value alone.

    **Example**

    >>> float(standard_error(np.array([1.0, 3.0])))
    1.0
    """
    count = values.shape[-1]
    if count < 2:
        return np.full(values.shape[:-1], np.nan)
    return np.asarray(values.std(-1, ddof=1) / math.sqrt(count))


class Estimated(NamedTuple):
    """A number that is not known, and its standard error."""

    value: float
    standard_error: float


def squared_norm(gram: Float[np.ndarray, "n n"]) -> Estimated:
    """|E a|^2 without bias, by the products of different draws; see :func:`squared_distance`.

    :param gram: the products of independent draws of one vector with one another, at least 3.
    """
    value, without = _products(gram)
    return Estimated(value, math.sqrt(_jackknifed(without)))


def squared_distance(gram: Float[np.ndarray, "n n"], first: int) -> Estimated:
    """|E a - E b|^2 without bias, from independent draws of two vectors.

    No draw is multiplied with itself, so that noise adds nothing on average; the value is below 0 about as
    often as above where the means agree. The error is the jackknife's, which is too large on average rather
    than too small, by up to a factor of sqrt(2) where the means agree.

    :param gram: the products of all draws with one another: ``first`` draws of a, then draws of b, at least 3
        of each.
    :param first: how many are of a.

    **References**

    1. Chen, Qin (2010), *A two-sample test for high-dimensional data with applications to gene-set testing*,
       section 2.
    2. Efron, Stein (1981), *The jackknife estimate of variance*.

    **Example**

    >>> a, b = np.array([[1.0], [2.0], [3.0]]), np.array([[4.0], [5.0], [6.0]])
    >>> both = np.concatenate([a, b])
    >>> print(f"{squared_distance(both @ both.T, 3).value:.3f}")  # 3 * 3 less the noise of both means
    8.333
    """
    of_a, without_a = _products(gram[:first, :first])
    of_b, without_b = _products(gram[first:, first:])
    cross = gram[:first, first:]
    left_out = lambda axis: (cross.sum() - cross.sum(1 - axis)) / (cross.size - cross.shape[1 - axis])
    error = _jackknifed(without_a - 2 * left_out(0)) + _jackknifed(without_b - 2 * left_out(1))
    return Estimated(of_a + of_b - 2 * float(cross.mean()), math.sqrt(error))


def _products(gram: Float[np.ndarray, "n n"]) -> tuple[float, Float[np.ndarray, "n"]]:
    """The mean product of two different draws, and what it is with each draw left out."""
    count = len(gram)
    each = gram.sum(1) - np.diagonal(gram)
    total = float(each.sum())
    return total / (count * (count - 1)), (total - 2 * each) / ((count - 1) * (count - 2))


def _jackknifed(without: Float[np.ndarray, "n"]) -> float:
    """The variance of an estimate, from what it is with each draw left out."""
    return float((len(without) - 1) * without.var())
