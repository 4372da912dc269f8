# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Monitors for :func:`ebmpp.fit`: functions of the params that are evaluated during training.

A monitor can be called like a function. Data are arguments of the compiled program, not
constants in it. They are checked when a monitor is made, which raises StateError for a
wrong name, shape or value.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import cast

from jaxtyping import PyTree

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import exact
from ebmpp.annealing import LogPartition, ais
from ebmpp.core import (
    Key,
    Params,
    Rows,
    Scalar,
    State,
    StateLike,
    checks,
    random,
    select,
)
from ebmpp.errors import IntractableError
from ebmpp.estimators import ParticleUCD, certificate, phases
from ebmpp.estimators.base import Batch, Estimator, shapes
from ebmpp.evaluate import scores
from ebmpp.graph import FactorGraph, energy, states, tables
from ebmpp.training.history import Monitor, MonitorFn

__all__ = [
    "Monitor",
    "MonitorFn",
    "estimated_log_likelihood",
    "free_energy_gap",
    "gradient_bias",
    "log_likelihood",
    "pseudo_log_likelihood",
    "reconstruction",
]


@dataclasses.dataclass(frozen=True)
class Partial:
    """Function with its first arguments bound, compared by value."""

    fn: MonitorFn
    first: tuple[object, ...]

    def __call__(self, *args: PyTree) -> Array | float:
        return self.fn(*self.first, *args)


def _rows(
    graph: FactorGraph, rows: StateLike, missing: str | None = "this monitor"
) -> Rows:
    return tables.check_rows(graph, rows, missing)[0]


def log_likelihood(graph: FactorGraph, rows: StateLike) -> Monitor:
    """Return a monitor of the exact mean of log p(v) over rows.

    :param rows: values of the visible blocks to evaluate.
    :raises IntractableError: at once, for too many states to sum.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> monitor = ebmpp.monitors.log_likelihood(rbm, ebmpp.data.bars_and_stripes(3))
    >>> zeros = jax.tree.map(jax.numpy.zeros_like, rbm.init(jax.random.key(0)))
    >>> print(f"{monitor(zeros):.4f}")  # -9 log 2
    -6.2383
    """
    rows = _rows(graph, rows, missing=None)
    monitor = Monitor(
        Partial(_mean, (exact.log_likelihood, graph)), (rows,), log_likelihood=True
    )
    try:
        # plans the sum without computing it
        jax.eval_shape(monitor, graph.param_shapes)
    except IntractableError as error:
        hint = (
            "Use estimated_log_likelihood, which anneals, or free_energy_gap or "
            "reconstruction of monitors"
        )
        raise IntractableError(f"{error}. {hint}, which need no sum.") from None
    return monitor


def _mean(fn: MonitorFn, *args: PyTree) -> Array:
    return jnp.mean(fn(*args))


def estimated_log_likelihood(
    graph: FactorGraph,
    rows: StateLike,
    *,
    rng_key: Array,
    data: StateLike | None = None,
    num_particles: int = 100,
    num_temperatures: int = 1000,
    ladder: str | Sequence[float] = "adaptive",
) -> Monitor:
    """Return a monitor of the mean of log p(v) by annealed importance sampling, for large models.

    **Too large on average**, as log Z is estimated from below; :func:`ebmpp.ais` warns
    of a small effective sample size. The same key gives the same noise at each call.

    :param graph: a model whose latents given the visibles are one layer.
    :param rows: values of the visible blocks to evaluate.
    :param rng_key: a jax key.
    :param data: training rows, from whose base rates annealing starts; default:
        ``rows``.
    :param num_particles: see :func:`ebmpp.ais`, as for ``num_temperatures`` and
        ``ladder``.
    :raises IntractableError: at once, where the latents cannot be summed out in closed
        form.

    **References**

    1. Salakhutdinov, Murray (2008), *On the quantitative analysis of deep belief
       networks*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data, key = ebmpp.data.bars_and_stripes(3), jax.random.key(0)
    >>> estimate = ebmpp.monitors.estimated_log_likelihood(
    ...     rbm, data, rng_key=key, num_temperatures=100)
    >>> params = rbm.init(key, data)
    >>> abs(estimate(params) - ebmpp.monitors.log_likelihood(rbm, data)(params)).item() < 0.01
    True
    """
    rows = _rows(graph, rows)
    states.check_summable(graph, graph.latent)
    rng_key = checks.key("estimated_log_likelihood: rng_key", rng_key)
    num_particles = checks.count(
        "estimated_log_likelihood: num_particles", num_particles, least=2
    )
    data = rows if data is None else _rows(graph, data)

    def estimate(params):
        result = ais(
            graph,
            params,
            rng_key=rng_key,
            data=data,
            num_particles=num_particles,
            num_temperatures=num_temperatures,
            ladder=ladder,
        )
        return cast(LogPartition, result).average_log_likelihood(rows).value

    return Monitor(estimate, compiled=False, log_likelihood=True)


def free_energy_gap(
    graph: FactorGraph, train: StateLike, held_out: StateLike
) -> Monitor:
    """Return a monitor of the mean free energy of held-out rows minus that of training rows.

    It grows when a model overfits. log Z cancels, so no sum over states is needed.

    :param graph: a model whose latents given the visibles are one layer; else use
        :func:`reconstruction`.
    :param train: rows of the visible blocks, such as a part of the training data of the
        size of ``held_out``.
    :param held_out: rows of the visible blocks.
    :raises IntractableError: at once, where the latents cannot be summed out in closed
        form.

    **References**

    1. Hinton (2012), *A practical guide to training restricted Boltzmann machines*,
       section 6.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data = ebmpp.data.bars_and_stripes(3)
    >>> gap = ebmpp.monitors.free_energy_gap(rbm, data[::2], data[1::2])
    >>> gap(rbm.init(jax.random.key(0))).shape
    ()
    """
    states.check_summable(graph, graph.latent)
    return Monitor(
        Partial(_free_energy_gap, (graph,)),
        (_rows(graph, train), _rows(graph, held_out)),
    )


def _free_energy_gap(
    graph: FactorGraph, params: Params, train: State, held_out: State
) -> Scalar:
    return (
        graph.free_energy(params, held_out).mean()
        - graph.free_energy(params, train).mean()
    )


def pseudo_log_likelihood(
    graph: FactorGraph,
    rows: StateLike,
) -> Monitor:
    """Return a monitor of the mean over rows of :func:`ebmpp.evaluate.pseudo_log_likelihood`.

    :param rows: values of the visible blocks to evaluate.
    :raises IntractableError: at once, where a unit's conditional is not available.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> monitor = ebmpp.monitors.pseudo_log_likelihood(rbm, ebmpp.data.bars_and_stripes(3))
    >>> zeros = jax.tree.map(jax.numpy.zeros_like, rbm.init(jax.random.key(0)))
    >>> print(f"{monitor(zeros):.4f}")  # -9 log 2
    -6.2383
    """
    rows = _rows(graph, rows)
    scores.check_conditionals(graph)
    return Monitor(
        Partial(_mean, (scores.pseudo_rows, graph)), (rows,), log_likelihood=True
    )


def reconstruction(graph: FactorGraph, rows: StateLike, *, rng_key: Array) -> Monitor:
    """Return a monitor of the mean squared reconstruction error of the visible blocks.

    Per unit: t(v) - E[t(v) | latents], squared, averaged over rows and statistics,
    where the latents are a draw given v (exact where they are one layer; else one sweep
    from initial draws). Simple, but **not the objective**: a chain that does not mix
    has a small error too.

    :param rows: values of the visible blocks to evaluate.
    :param rng_key: a jax key; the same draws at each call, so that the curve is smooth.

    **References**

    1. Hinton (2012), section 5: how far to trust it.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data, key = ebmpp.data.bars_and_stripes(3), jax.random.key(0)
    >>> error = ebmpp.monitors.reconstruction(rbm, data, rng_key=key)
    >>> float(error(jax.tree.map(jax.numpy.zeros_like, rbm.init(key))))  # means of 1/2
    0.25
    """
    rng_key = checks.key("reconstruction: rng_key", rng_key)
    return Monitor(
        Partial(_reconstruction, (graph,)),
        (_rows(graph, rows), random.key_pair(rng_key)),
    )


def _reconstruction(graph: FactorGraph, params: Params, rows: Rows, key: Key) -> Array:
    x = phases.sample_latents(graph, params, Batch.uniform(rows), key)

    visible = select(x, graph.visible)
    errors = []
    for b, t in graph.statistics(visible).items():
        eta = energy.natural_rows(graph, params, x, [b])[b]
        errors.append(jnp.ravel(t - graph.families[b].mean(eta)))
    return (jnp.concatenate(errors) ** 2).mean()


def gradient_bias(
    graph: FactorGraph,
    data: StateLike,
    estimator: Estimator,
    *,
    rng_key: Array,
    num_repeats: int = 20,
    reference: Estimator = ParticleUCD(),
    num_references: int = 20,
) -> Monitor:
    """Return a monitor of the total ``squared_bias`` of :func:`ebmpp.estimators.gradient_bias`.

    It may be below 0, and costs ``num_references`` steps of the reference at each call.

    :param data: rows of the visible blocks: the batch of each repeat.
    :param estimator: the run's estimator, from whose state the repeats start; nan for a
        state of another structure. When called directly, the monitor takes the state as
        its second argument.
    :param rng_key: a jax key; the same draws at each call.
    :param num_repeats: see there, as for ``reference`` and ``num_references``.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data, key = ebmpp.data.bars_and_stripes(3), jax.random.key(0)
    >>> bias = ebmpp.monitors.gradient_bias(
    ...     rbm, data, ebmpp.CD(k=1), rng_key=key, reference=ebmpp.ParticleUCD(num_particles=50))
    >>> isinstance(bias(rbm.init(key)), float)
    True
    """
    rows = _rows(graph, data, "gradient_bias")
    rng_key = checks.key("gradient_bias: rng_key", rng_key)
    certificate.check_repeats(estimator, num_repeats, reference, num_references)

    def measure(params, state):
        fresh = certificate.state_shapes(graph, params, rows, estimator)
        if state is not None and shapes(state) != shapes(fresh):
            return math.nan
        return certificate.gradient_bias(
            graph,
            params,
            rows,
            estimator,
            state,
            rng_key=rng_key,
            num_repeats=num_repeats,
            reference=reference,
            num_references=num_references,
        ).total.squared_bias

    return Monitor(measure, takes_state=True, compiled=False)
