# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Standard errors and unbiased squared norms of sample means."""

import itertools
import math

from jaxtyping import Float
import numpy as np

from ebmpp.core.display import Measured


def standard_error(values: Float[np.ndarray, "*means values"]) -> Float[np.ndarray, "*means"]:
    """Return the standard errors of means over the last axis, nan for a single value."""
    count = values.shape[-1]
    if count < 2:
        return np.full(values.shape[:-1], np.nan)
    return np.asarray(values.std(-1, ddof=1) / math.sqrt(count))


def squared_norm(gram: Float[np.ndarray, "n n"]) -> Measured:
    """Return an unbiased estimate of |E a|^2 from inner products of at least 3 independent draws of a."""
    return _squared(gram, (len(gram),))


def squared_distance(gram: Float[np.ndarray, "n n"], first: int) -> Measured:
    """Return an unbiased estimate of |E a - E b|^2 from independent draws of two vectors.

    No draw is multiplied by itself, so noise adds nothing on average, and the value is negative about half of
    the time if the means agree. The variance is that of the reference, with traces estimated as for normal
    draws. Its part that grows with the distance is estimated as 0 if it is negative, so it is slightly too
    large on average if the means nearly agree.

    :param gram: inner products of all draws: ``first`` draws of a, then draws of b, at least 3 of each.

    **References**

    1. Chen, Qin (2010), *A two-sample test for high-dimensional data with applications to gene-set testing*,
       section 2 and eq. 2.1.
    2. Bai, Saranadasa (1996), *Effect of high dimension: by an example of a two sample problem*, section 3:
       the trace of a squared covariance.
    """
    return _squared(gram, (first, len(gram) - first))


def _squared(gram: Float[np.ndarray, "n n"], sizes: tuple[int, ...]) -> Measured:
    """Estimate |E a|^2, or |E a - E b|^2 for two groups of draws."""
    groups = [slice(low, high) for low, high in itertools.pairwise(np.cumsum((0, *sizes)))]
    center, weights = np.eye(len(gram)), np.zeros(len(gram))
    for sign, group, n in zip((1, -1), groups, sizes, strict=False):
        center[group, group] -= 1 / n
        weights[group] = sign / n
    centered, along = center @ gram @ center, center @ gram @ weights
    noise = [np.trace(centered[g, g]) / (n - 1) for g, n in zip(groups, sizes, strict=True)]
    value = weights @ gram @ weights - sum(t / n for t, n in zip(noise, sizes, strict=True))
    traces = _traces(centered, groups, sizes)  # of the products of covariances
    n = np.array(sizes)
    variance = 2 * ((traces / np.outer(n, n)).sum() + (np.diagonal(traces) / n**2 / (n - 1)).sum())
    for i, group in enumerate(groups):
        linear = (along[group] ** 2).sum() / (n[i] - 1) - (traces[i] / n).sum()
        variance += 4 * max(0.0, linear) / n[i]
    return Measured(float(value), math.sqrt(variance))


def _traces(
    centered: Float[np.ndarray, "n n"], groups: list[slice], sizes: tuple[int, ...]
) -> Float[np.ndarray, "groups groups"]:
    """Estimate the traces of products of the groups' covariances."""
    traces = np.array([[(centered[g, h] ** 2).sum() for h in groups] for g in groups])
    for i, (group, n) in enumerate(zip(groups, sizes, strict=True)):
        corrected = traces[i, i] - np.trace(centered[group, group]) ** 2 / (n - 1)
        traces[i, i] = corrected * (n - 1) ** 2 / ((n - 2) * (n + 1))
    degrees = np.array(sizes) - 1
    return traces / np.outer(degrees, degrees)
