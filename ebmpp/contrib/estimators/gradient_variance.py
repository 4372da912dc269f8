# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Monitor of the variance of an estimator's gradient along a run."""

from typing import NamedTuple

from jaxtyping import PyTree

import jax
from jax import Array
import jax.numpy as jnp
import optax

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Params, Rows, StateLike
from ebmpp.estimators import Batch, Estimator
from ebmpp.estimators.base import shapes
from ebmpp.estimators.certificate import state_shapes
from ebmpp.graph import FactorGraph, tables
from ebmpp.training.monitors import Monitor, Partial


class _Welford(NamedTuple):
    """Mean gradient, and sum of squared deviations.

    Welford's update has no difference of large sums, and keeps two gradients in memory.
    """

    mean: Params
    total: Array


def gradient_variance(
    graph: FactorGraph,
    data: StateLike,
    estimator: Estimator,
    num_repeats: int,
    rng_key: Array,
) -> Monitor:
    """Return a monitor of the variance of an estimator's gradient, summed over all params.

    The rows are the same in each repeat, so it is the variance of the estimator's
    draws. An estimator with a state (persistent chains, an adaptive lag) starts each
    repeat from the state of the run, so the variance is conditional on it. If the run's
    state has another structure (of another estimator, or with one chain per row of
    another batch size) the value is nan. When called directly, the monitor takes the
    state as its second argument.

    :param data: rows of the visible blocks: the batch of each repeat.
    :param estimator: the run's estimator, or one without a state.
    :param num_repeats: at least 2.
    :param rng_key: a jax key; the same draws at each call.
    :raises ArgumentError: for invalid arguments.

    **References**

    1. Qiu, Zhang, Wang (2020), section 5, where the variance along training is
       compared.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import gradient_variance
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data, key = ebmpp.data.bars_and_stripes(3), jax.random.key(0)
    >>> variance = gradient_variance(rbm, data, ebmpp.CD(k=1), 20, key)
    >>> bool(variance(rbm.init(key)) > 0)
    True
    """
    checks.instance(
        "gradient_variance: estimator",
        estimator,
        Estimator,
        "an estimator such as CD(k=1)",
    )
    num_repeats = checks.count("gradient_variance: num_repeats", num_repeats, least=2)
    rows, _ = tables.check_rows(graph, data, "gradient_variance")
    key = random.key_pair(checks.key("gradient_variance: rng_key", rng_key))
    return Monitor(
        Partial(_gradient_variance, (graph, estimator, num_repeats)),
        (rows, key),
        takes_state=True,
    )


def _gradient_variance(
    graph: FactorGraph,
    estimator: Estimator,
    num_repeats: int,
    params: Params,
    state: PyTree,
    rows: Rows,
    key: Key,
) -> Array:
    fresh = state_shapes(graph, params, rows, estimator)
    if not jax.tree.leaves(fresh):
        state = fresh
    elif shapes(state) != shapes(fresh):
        return jnp.full((), jnp.nan)
    batch = Batch.uniform(rows)

    def update(carry: _Welford, i: Array) -> tuple[_Welford, None]:
        step_key = random.fold_in(key, i)
        gradient = estimator.estimate(graph, params, state, batch, step_key).gradient
        before = jax.tree.map(jnp.subtract, gradient, carry.mean)
        mean = jax.tree.map(lambda m, d: m + d / (i + 1), carry.mean, before)
        after = jax.tree.map(jnp.subtract, gradient, mean)
        total = carry.total + optax.tree.vdot(before, after)
        return _Welford(mean, total), None

    start = _Welford(jax.tree.map(jnp.zeros_like, params), jnp.zeros(()))
    (_, total), _ = jax.lax.scan(update, start, jnp.arange(num_repeats))
    return total / (num_repeats - 1)
