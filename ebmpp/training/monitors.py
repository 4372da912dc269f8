# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What to watch while a model is trained: functions that make monitors for :func:`ebmpp.fit`.

A monitor is a function of the params, and can be called as one. Data are arguments of the compiled
program, not constants in it.
"""

from functools import partial
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import exact
from ebmpp.annealing import ais
from ebmpp.core import checks, random
from ebmpp.core.types import Key, Keys, Params, Rows, Scalar, State
from ebmpp.errors import IntractableError, clash
from ebmpp.estimators.base import Batch
from ebmpp.estimators.phases import sample_latents, tractable_posterior
from ebmpp.evaluate import pseudo
from ebmpp.graph import FactorGraph, energy
from ebmpp.training.gradient_monitors import gradient_bias, gradient_variance
from ebmpp.training.watching import Monitor, Of, Watch, rows_of

__all__ = [
    "Monitor",
    "Watch",
    "estimated_log_likelihood",
    "free_energy_gap",
    "gradient_bias",
    "gradient_variance",
    "log_likelihood",
    "pseudo_log_likelihood",
    "reconstruction",
]


def _check_free_energy(graph: FactorGraph, name: str) -> None:
    """:raises IntractableError: where the latents cannot be summed out."""
    if not tractable_posterior(graph):
        a, b = graph.interacting(graph.latent)[0]
        raise IntractableError(
            f"{name}: latent {clash(a, b)} given the visible ones, so the free energy of a row has no closed "
            "form; monitors.reconstruction needs none"
        )


# -- likelihood ----------------------------------------------------------------------------------


def log_likelihood(graph: FactorGraph, data: Any) -> Monitor:
    """The exact mean of log p(v) over rows.

    :param graph: the model.
    :param data: rows of the visible blocks.
    :raises IntractableError: at once, where there is too much to sum.
    :raises StateError: for data of a wrong name, shape or value.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> monitor = ebmpp.monitors.log_likelihood(rbm, ebmpp.data.bars_and_stripes(3))
    >>> print(f"{monitor(jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))):.4f}")  # -9 log 2
    -6.2383
    """
    rows = rows_of(graph, data, missing=None)
    monitor = Monitor(Of(_log_likelihood, (graph,)), (rows,))
    try:
        jax.eval_shape(monitor, graph.param_shapes)  # plans the sum, and sums nothing
    except IntractableError as error:
        raise IntractableError(
            f"{error}. To watch training, monitors.estimated_log_likelihood anneals, and "
            "monitors.free_energy_gap or monitors.reconstruction need no sum"
        ) from None
    return monitor


def _log_likelihood(graph: FactorGraph, params: Params, rows: Rows) -> Array:
    return exact.log_likelihood(graph, params, rows).mean()


def estimated_log_likelihood(
    graph: FactorGraph,
    data: Any,
    *,
    rng_key: Array,
    base: Any = None,
    num_particles: int = 100,
    num_temperatures: int = 1000,
    ladder: str | Any = "adaptive",
) -> Monitor:
    """The mean of log p(v) over rows by annealed importance sampling, for models too large to sum.

    **Too large on average**, as log Z is estimated from below; how much so, the effective sample size tells,
    of which :func:`ebmpp.ais` warns where it is small. The same key gives the same noise at each call.

    :param graph: a model whose latents given the visibles are one layer.
    :param data: rows of the visible blocks.
    :param rng_key: a jax key.
    :param base: rows whose base rates annealing starts from; ``data`` by default.
    :param num_particles: see :func:`ebmpp.ais`, as the two that follow.
    :return: a monitor, which is not compiled as a whole.
    :raises IntractableError: at once, where the latents cannot be summed out in closed form.
    :raises StateError: for data of a wrong name, shape or value.

    **References**

    1. Salakhutdinov, Murray (2008), *On the quantitative analysis of deep belief networks*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data, key = ebmpp.data.bars_and_stripes(3), jax.random.key(0)
    >>> estimate = ebmpp.monitors.estimated_log_likelihood(rbm, data, rng_key=key, num_temperatures=100)
    >>> params = rbm.init(key, data)
    >>> abs(estimate(params) - ebmpp.monitors.log_likelihood(rbm, data)(params)).item() < 0.01
    True
    """
    rows = rows_of(graph, data)
    _check_free_energy(graph, "estimated_log_likelihood")
    rng_key = checks.key("estimated_log_likelihood: rng_key", rng_key)
    num_particles = checks.count("estimated_log_likelihood: num_particles", num_particles, least=2)
    start = rows if base is None else rows_of(graph, base)
    run = partial(ais, rng_key=rng_key, data=start, num_particles=num_particles, ladder=ladder)

    def estimate(params: Params) -> float:
        return run(graph, params, num_temperatures=num_temperatures).average_log_likelihood(rows).value

    return Monitor(estimate, compiled=False)


def free_energy_gap(graph: FactorGraph, train: Any, held_out: Any) -> Monitor:
    """Mean free energy of held-out rows minus that of training rows: it grows when a model overfits.

    log Z cancels, so no sum over states is needed.

    :param graph: a model whose latents given the visibles are one layer.
    :param train: rows of the visible blocks; some of the training data, as many as are held out, will do.
    :param held_out: rows of the visible blocks.
    :raises IntractableError: at once, where the latents cannot be summed out in closed form.
    :raises StateError: for data of a wrong name, shape or value.

    **References**

    1. Hinton (2012), *A practical guide to training restricted Boltzmann machines*, section 6.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data = ebmpp.data.bars_and_stripes(3)
    >>> gap = ebmpp.monitors.free_energy_gap(rbm, data[::2], data[1::2])
    >>> gap(rbm.init(jax.random.key(0))).shape
    ()
    """
    _check_free_energy(graph, "free_energy_gap")
    return Monitor(Of(_free_energy_gap, (graph,)), (rows_of(graph, train), rows_of(graph, held_out)))


def _free_energy_gap(graph: FactorGraph, params: Params, train: Rows, held_out: State) -> Scalar:
    return graph.free_energy(params, held_out).mean() - graph.free_energy(params, train).mean()


def pseudo_log_likelihood(
    graph: FactorGraph, data: Any, num_units: int | None = None, rng_key: Array | None = None
) -> Monitor:
    """The mean over rows of :func:`ebmpp.evaluate.pseudo_log_likelihood`, with its caveats.

    :param graph: the model.
    :param data: rows of the visible blocks.
    :param num_units: so many units of each row, drawn at random, scaled to all; None for all.
    :param rng_key: a jax key, needed with ``num_units``; the same draws at each call.
    :raises IntractableError: at once, where a unit's conditional is not available.
    :raises StateError: for data of a wrong name, shape or value.
    :raises ArgumentError: for ``num_units`` that is not a positive int, or without a key.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> monitor = ebmpp.monitors.pseudo_log_likelihood(rbm, ebmpp.data.bars_and_stripes(3))
    >>> print(f"{monitor(jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))):.4f}")  # -9 log 2
    -6.2383
    """
    keys = pseudo.check_units(graph, num_units, rng_key, rows_of(graph, data))
    return Monitor(Of(_pseudo_log_likelihood, (graph, num_units)), (rows_of(graph, data), keys))


def _pseudo_log_likelihood(
    graph: FactorGraph, num_units: int | None, params: Params, rows: Rows, keys: Keys
) -> Array:
    return pseudo.by_row(graph, num_units, params, rows, keys).mean()


# -- reconstruction ------------------------------------------------------------------------------


def reconstruction(graph: FactorGraph, data: Any, rng_key: Array) -> Monitor:
    """Mean squared error of the visible blocks' means given latents that were drawn given the data.

    Per unit: t(v) - E[t(v) | the rest], squared, averaged over rows and statistics, where the latents are
    a draw given v (exact where they are one layer; else one sweep from initial draws). Easy to watch, and
    **not what is maximised**: a chain that does not mix makes it small too.

    :param graph: the model.
    :param data: rows of the visible blocks.
    :param rng_key: a jax key; the same draws at each call, so that the curve is smooth.
    :raises StateError: for data of a wrong name, shape or value.

    **References**

    1. Hinton (2012), section 5: how far to trust it.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> error = ebmpp.monitors.reconstruction(rbm, ebmpp.data.bars_and_stripes(3), jax.random.key(0))
    >>> float(error(jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))))  # a mean of 1/2 everywhere
    0.25
    """
    rng_key = checks.key("reconstruction: rng_key", rng_key)
    return Monitor(Of(_reconstruction, (graph,)), (rows_of(graph, data), random.key_pair(rng_key)))


def _reconstruction(graph: FactorGraph, params: Params, rows: Rows, key: Key) -> Array:
    statistics = graph.statistics(sample_latents(graph, params, Batch.of(rows), key))
    total, count = jnp.zeros(()), 0
    for b in graph.visible:
        mean = lambda t, b=b: graph.families[b].mean(energy.natural(graph, params, t, [b])[b])
        error = statistics[b] - jax.vmap(mean)(statistics)
        total, count = total + (error**2).sum(), count + error.size
    return total / count
