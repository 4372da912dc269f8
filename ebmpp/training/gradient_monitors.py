# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Monitors of the gradient's estimator: how much it varies, and how far its mean is off."""

from functools import partial
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import optax

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Params, Rows
from ebmpp.estimators import ParticleUCD, certificate
from ebmpp.estimators.base import Batch, Estimator
from ebmpp.graph import FactorGraph
from ebmpp.training.optimizers import shapes
from ebmpp.training.watching import Monitor, Of, rows_of


def gradient_variance(
    graph: FactorGraph, data: Any, estimator: Estimator, num_repeats: int, rng_key: Array
) -> Monitor:
    """The total variance of an estimator's gradient: the sum over all params, estimated by repeats.

    The rows are the same in each repeat, so it is the variance of the estimator's own draws. One that carries
    a state (persistent chains, an adaptive lag) starts each repeat from the state that the run is in, so the
    variance is conditional on it; where the run carries a state of another make (in another stage of a
    schedule, trained by another estimator, or with a chain a row where batches have not as many rows as
    ``data``) the value is nan. Called by hand, such a monitor takes the state as its second argument.

    :param graph: the model.
    :param data: rows of the visible blocks: the batch of each repeat.
    :param estimator: whose gradient; of the run, or one that carries nothing.
    :param num_repeats: at least 2.
    :param rng_key: a jax key; the same draws at each call.
    :return: a monitor.
    :raises ArgumentError: for fewer repeats.
    :raises StateError: for data of a wrong name, shape or value.

    **References**

    1. Qiu, Zhang, Wang (2020), section 5, where the variance along training is compared.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data, key = ebmpp.data.bars_and_stripes(3), jax.random.key(0)
    >>> variance = ebmpp.monitors.gradient_variance(rbm, data, ebmpp.CD(k=1), 20, key)
    >>> bool(variance(rbm.init(key)) > 0)
    True
    """
    checks.instance("gradient_variance: estimator", estimator, Estimator, "an estimator such as CD(k=1)")
    num_repeats = checks.count("gradient_variance: num_repeats", num_repeats, least=2)
    rng_key = checks.key("gradient_variance: rng_key", rng_key)
    rows, key = rows_of(graph, data), random.key_pair(rng_key)
    size = len(next(iter(rows.values())))
    start = lambda p: estimator.init(graph, p, rows, size, key)
    carries = bool(jax.tree.leaves(jax.eval_shape(start, graph.param_shapes)))
    fn = _gradient_variance if carries else _gradient_variance_without
    return Monitor(Of(fn, (graph, estimator, num_repeats)), (rows, key), takes_state=carries)


def _gradient_variance_without(
    graph: FactorGraph, estimator: Estimator, num_repeats: int, params: Params, rows: Rows, key: Key
) -> Array:
    state = estimator.init(graph, params, rows, len(next(iter(rows.values()))), key)  # no arrays
    return _gradient_variance(graph, estimator, num_repeats, params, state, rows, key)


def _gradient_variance(
    graph: FactorGraph,
    estimator: Estimator,
    num_repeats: int,
    params: Params,
    state: Any,
    rows: Rows,
    key: Key,
) -> Array:
    batch = Batch.of(rows)
    fresh = jax.eval_shape(lambda p: estimator.init(graph, p, rows, len(batch.weights), key), params)
    if shapes(fresh) != shapes(state):
        return jnp.full((), jnp.nan)

    def one(carry: tuple[Params, Array], repeat: Array) -> tuple[tuple[Params, Array], None]:
        """Welford's update: no difference of large sums, and no more than two gradients in memory."""
        mean, total = carry
        made = estimator.estimate(graph, params, state, batch, random.fold_in(key, repeat)).gradient
        off = jax.tree.map(jnp.subtract, made, mean)
        mean = jax.tree.map(lambda m, d: m + d / (repeat + 1), mean, off)
        return (mean, total + optax.tree.vdot(off, jax.tree.map(jnp.subtract, made, mean))), None

    none = (jax.tree.map(jnp.zeros_like, params), jnp.zeros(()))
    (_, total), _ = jax.lax.scan(one, none, jnp.arange(num_repeats))
    return total / (num_repeats - 1)


def gradient_bias(
    graph: FactorGraph,
    data: Any,
    estimator: Estimator,
    *,
    rng_key: Array,
    num_repeats: int = 20,
    reference: Estimator = ParticleUCD(),
    num_references: int = 20,
) -> Monitor:
    """The total ``squared_bias`` of :func:`ebmpp.estimators.gradient_bias`, which tells what it means.

    It may be below 0, and costs ``num_references`` steps of the reference at each call.

    :param graph: the model.
    :param data: rows of the visible blocks: the batch of each repeat.
    :param estimator: that of the run, from whose state the repeats begin; nan where the run carries another
        make of state. Called by hand, such a monitor takes the state as its second argument.
    :param rng_key: a jax key; the same draws at each call.
    :param num_repeats: as there, and what follows.
    :return: a monitor, which is not compiled as a whole.
    :raises ArgumentError: for numbers out of range.
    :raises StateError: for data of a wrong name, shape or value.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data, key = ebmpp.data.bars_and_stripes(3), jax.random.key(0)
    >>> bias = ebmpp.monitors.gradient_bias(
    ...     rbm, data, ebmpp.CD(k=1), rng_key=key, reference=ebmpp.ParticleUCD(num_particles=50))
    >>> isinstance(bias(rbm.init(key)), float)
    True
    """
    rows = rows_of(graph, data, "gradient_bias")
    num_repeats = checks.count("gradient_bias: num_repeats", num_repeats, least=3)
    num_references = checks.count("gradient_bias: num_references", num_references, least=3)
    rng_key = checks.key("gradient_bias: rng_key", rng_key)
    for each in (estimator, reference):
        checks.instance("gradient_bias: estimator", each, Estimator, "an estimator such as CD(k=1)")
    run = partial(
        certificate.gradient_bias,
        rng_key=rng_key,
        num_repeats=num_repeats,
        reference=reference,
        num_references=num_references,
    )

    def measure(params: Params, state: Any) -> float:
        if state is not None and not certificate.is_state_of(graph, params, rows, estimator, state):
            return math.nan
        return run(graph, params, rows, estimator, state).total.squared_bias

    return Monitor(measure, takes_state=True, compiled=False)
