# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Mean statistics of the factors over data: the positive phase once, over all rows."""

from functools import partial
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core.types import Params, PerRow, Rows
from ebmpp.estimators.phases import Posterior, check_posterior, signed_gradient, tractable_posterior
from ebmpp.graph import FactorGraph
from ebmpp.graph.energy import gradient_at
from ebmpp.graph.tables import check_rows, check_weights

_CHUNK = 4096  # rows at once: the latents of 60,000 rows need not stand in memory together


def rates(
    graph: FactorGraph,
    params: Params,
    data: Any,
    *,
    weights: Any = None,
    posterior: Posterior | None = None,
) -> Params:
    """Mean statistics of every factor given data rows: of blocks and of pairs, where the energy is linear.

    Minus the gradient of the energy in the params, averaged over rows and over the model's posterior of the
    latents given each row: for biases the mean of the units, for a bilinear factor the mean of the products.
    What :class:`~ebmpp.kernels.RatesFPCD` and :class:`~ebmpp.kernels.RatesHerding` hold their draws to.

    :param graph: the model.
    :param params: a dict keyed by factor name.
    :param data: rows of the visible blocks; the full training data, in the paper.
    :param weights: one a row; equal ones by default.
    :param posterior: a stand-in for the exact posterior where that is not one layer:
        :class:`~ebmpp.estimators.MeanField`.
    :return: a pytree shaped like the params.
    :raises IntractableError: where the latents given the visibles are not one layer, without ``posterior``.
    :raises ParameterError: for params of a wrong name, shape or value.
    :raises StateError: for data or weights of a wrong name, shape or value.

    **References**

    1. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from an RBM-derived
       process*, section 4.

    **Example**

    >>> import jax, ebmpp
    >>> rbm, data = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4)), ebmpp.data.bars_and_stripes(3)
    >>> made = ebmpp.estimators.rates(rbm, jax.tree.map(lambda p: 0 * p, rbm.init(jax.random.key(0))), data)
    >>> made["v"][:3].tolist(), made["h"].tolist(), made["v:h"].shape
    ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], (9, 4))
    """
    graph.check(params)
    check_posterior(graph, "rates", posterior)
    rows, size = check_rows(graph, data, "rates")
    each = np.ones(size) if weights is None else check_weights(weights, size)
    each = each / size
    total = jax.tree.map(jnp.zeros_like, params)
    for first in range(0, size, _CHUNK):
        index = first + np.arange(min(_CHUNK, size))  # one shape, so one program; rows past the end weigh 0
        w = jnp.asarray(np.where(index < size, each[index % size], 0), jnp.result_type(float))
        part = {b: v[jnp.asarray(index % size)] for b, v in rows.items()}
        total = _subtract_gradient(graph, posterior, params, total, part, w)
    return total


@partial(jax.jit, static_argnums=(0, 1))
def _subtract_gradient(
    graph: FactorGraph, posterior: Posterior | None, params: Params, total: Params, rows: Rows, w: PerRow
) -> Params:
    if posterior is None or tractable_posterior(graph):
        gradient = signed_gradient(graph, params, rows, w)
    else:
        gradient = gradient_at(graph, params, posterior.statistics(graph, params, rows), w)
    return jax.tree.map(jnp.subtract, total, gradient)
