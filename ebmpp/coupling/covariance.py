# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Unbiased covariances from independent unbiased estimates of means.

With :math:`H_i(f)` the estimate of E[f] by pair i of n,

.. math::

    \frac{1}{n} \sum_i H_i(f g) - \frac{1}{n (n - 1)} \sum_{i \ne j} H_i(f) H_j(g)

has the expectation E[fg] - E[f] E[g], since different pairs are independent. A pair's
factor is the mean of the other pairs, :func:`mean_of_others`.
"""

from jaxtyping import Float
import numpy as np

from jax import Array

#: Estimates of means by independent pairs.
PerPair = Float[Array, "pairs *means"] | Float[np.ndarray, "pairs *means"]


def mean_of_others(h: PerPair) -> PerPair:
    """Return for each of at least two pairs the mean over all other pairs."""
    return (h.sum(0) - h) / (len(h) - 1)
