# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Mean statistics of the factors over a data set."""

from functools import partial
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core.types import Params
from ebmpp.estimators.base import Batch
from ebmpp.estimators.phases import (
    PosteriorApproximation,
    check_posterior,
    positive_gradient,
)
from ebmpp.graph import FactorGraph
from ebmpp.graph.tables import check_rows, check_weights

_CHUNK = 4096  # rows at once, so that the latents of 60,000 rows need not be in memory together


def data_statistics(
    graph: FactorGraph,
    params: Params,
    data: Any,
    *,
    weights: Any = None,
    posterior: PosteriorApproximation | None = None,
) -> Params:
    """Return the mean statistics of every factor given data rows.

    This is minus the gradient of the energy in the params, averaged over the rows and
    over the model's posterior of the latents given each row: for a bias the mean of the
    units, for a bilinear factor the mean of the products.
    :class:`~ebmpp.contrib.RatesFPCD` and :class:`~ebmpp.contrib.RatesHerding` take it.

    :param graph: the model.
    :param params: a dict keyed by factor name.
    :param data: rows of the visible blocks; the full training data, in the paper.
    :param weights: one per row; equal by default.
    :param posterior: an approximation such as :class:`~ebmpp.MeanField`,
        needed where the latents given the visibles are not one layer.
    :return: a pytree shaped like the params.
    :raises IntractableError: where the latents given the visibles are not one layer,
        without ``posterior``.
    :raises ParameterError: for params of a wrong name, shape or value.
    :raises StateError: for data or weights of a wrong name, shape or value.

    **References**

    1. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from
       an RBM-derived process*, section 4.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import data_statistics
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data = ebmpp.data.bars_and_stripes(3)
    >>> zero = jax.tree.map(lambda p: 0 * p, rbm.init(jax.random.key(0)))
    >>> means = data_statistics(rbm, zero, data)
    >>> means["v"][:3].tolist(), means["h"].tolist(), means["v:h"].shape
    ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], (9, 4))
    """
    graph.check(params)
    check_posterior(graph, "data_statistics", posterior)
    rows, size = check_rows(graph, data, "data_statistics")
    shares = (np.ones(size) if weights is None else check_weights(weights, size)) / size
    total = jax.tree.map(jnp.zeros_like, params)
    for first in range(0, size, _CHUNK):
        # padded to one shape; rows past the end have weight 0
        index = first + np.arange(min(_CHUNK, size))
        w = jnp.asarray(
            np.where(index < size, shares[index % size], 0), jnp.result_type(float)
        )
        batch = Batch({b: v[jnp.asarray(index % size)] for b, v in rows.items()}, w)
        total = _subtract_gradient(graph, posterior, params, total, batch)
    return total


@partial(jax.jit, static_argnums=(0, 1))
def _subtract_gradient(
    graph: FactorGraph,
    posterior: PosteriorApproximation | None,
    params: Params,
    total: Params,
    batch: Batch,
) -> Params:
    return jax.tree.map(
        jnp.subtract, total, positive_gradient(graph, params, batch, posterior)
    )
