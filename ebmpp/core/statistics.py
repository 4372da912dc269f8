# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Standard errors and unbiased squared norms of sample means."""

import math

from jaxtyping import Float
import numpy as np

from ebmpp.core.display import Measured


def standard_error(
    values: Float[np.ndarray, "*means values"],
) -> Float[np.ndarray, "*means"]:
    """Return the standard errors of means over the last axis, nan for a single value."""
    count = values.shape[-1]
    if count < 2:
        return np.full(values.shape[:-1], np.nan)
    return np.asarray(values.std(-1, ddof=1) / math.sqrt(count))


def squared_norm(gram: Float[np.ndarray, "n n"]) -> Measured:
    """Return an unbiased estimate of |E a|^2 from inner products of 3 or more draws of a."""
    return _squared(gram, (len(gram),))


def squared_distance(gram: Float[np.ndarray, "n n"], first: int) -> Measured:
    """Return an unbiased estimate of |E a - E b|^2 from independent draws of two vectors.

    No draw is multiplied by itself, so noise adds nothing on average, and the value is
    negative about half of the time if the means agree. The variance is that of the
    reference, with traces estimated as for normal draws. Its part that grows with the
    distance is estimated as 0 if it is negative, so it is slightly too large on average
    if the means nearly agree.

    :param gram: inner products of all draws: ``first`` draws of a, then draws of b, at
        least 3 of each.

    **References**

    1. Chen, Qin (2010), *A two-sample test for high-dimensional data with applications
       to gene-set testing*, section 2 and eq. 2.1.
    2. Bai, Saranadasa (1996), *Effect of high dimension: by an example of a two sample
       problem*, section 3: the trace of a squared covariance.
    """
    return _squared(gram, (first, len(gram) - first))


def _squared(gram: Float[np.ndarray, "n n"], sizes: tuple[int, ...]) -> Measured:
    """Estimate |E a|^2, or |E a - E b|^2 for two groups of draws."""
    ends = np.cumsum(sizes)
    groups = list(map(slice, ends - sizes, ends))
    n = np.array(sizes)
    center = np.eye(len(gram))
    weights = np.zeros(len(gram))
    for sign, group, size in zip((1, -1), groups, sizes):
        center[group, group] -= 1 / size
        weights[group] = sign / size
    centered = center @ gram @ center
    along = center @ gram @ weights
    spread = np.array([np.trace(centered[g, g]) for g in groups])
    value = weights @ gram @ weights - (spread / (n - 1) / n).sum()
    # traces of the products of the groups' covariances
    traces = np.array([[(centered[g, h] ** 2).sum() for h in groups] for g in groups])
    corrected = traces.diagonal() - spread**2 / (n - 1)
    np.fill_diagonal(traces, corrected * (n - 1) ** 2 / ((n - 2) * (n + 1)))
    traces /= np.outer(n - 1, n - 1)
    within = (traces.diagonal() / n**2 / (n - 1)).sum()
    variance = 2 * ((traces / np.outer(n, n)).sum() + within)
    for i, group in enumerate(groups):
        linear = (along[group] ** 2).sum() / (n[i] - 1) - (traces[i] / n).sum()
        variance += 4 * max(0.0, linear) / n[i]
    return Measured(float(value), math.sqrt(variance))
