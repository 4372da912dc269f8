# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What to watch while a model is trained: functions that make monitors for :func:`ebmpp.fit`.

A monitor is a function of the params, and can be called as one. Data are arguments of the compiled
program, not constants in it.
"""

from collections.abc import Callable
import dataclasses
from functools import partial
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import optax

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Keys, Params, Rows, Scalar, State
from ebmpp.errors import IntractableError, clash
from ebmpp.estimators.base import Batch, Estimator, check_estimator
from ebmpp.estimators.phases import sample_latents, tractable_posterior
from ebmpp.evaluate import annealed, exact, pseudo
from ebmpp.graph import FactorGraph, energy, tables
from ebmpp.training.optimizers import shapes

#: A function of the params to a scalar.
Watch = Callable[..., Array | float]


@dataclasses.dataclass(frozen=True, eq=False)  # known by itself: arrays have no hash
class Monitor:
    """A function of the params that is compiled, with arrays that it reads.

    A plain function of the params is a monitor too; this adds the arrays, and the estimator's state, or takes
    a function as it is: ``Monitor(fn, compiled=False)``.

    :param fn: called with the params, then the estimator's state if it ``takes_state``, then the arguments.
        Hashable: one that compares equal to another is not compiled again.
    :param arguments: arrays, or pytrees of them.
    :param takes_state: whether it takes what the estimator of the run carries (persistent chains, say).
    :param compiled: False for one that works on the host and cannot be traced.

    **Example**

    >>> import jax.numpy as jnp
    >>> distance = Monitor(lambda params, truth: abs(params["v"] - truth).max(), (jnp.ones(2),))
    >>> float(distance({"v": jnp.array([1.0, 3.0])}))
    2.0
    """

    fn: Watch
    arguments: tuple[Any, ...] = ()
    takes_state: bool = False
    compiled: bool = True

    def __call__(self, params: Params, estimator_state: Any = None) -> Array | float:
        """The value."""
        state = (estimator_state,) if self.takes_state else ()
        given = (params, *state, *self.arguments)
        return _evaluate(self.fn, *given) if self.compiled else self.fn(*given)


@partial(jax.jit, static_argnums=0)
def _evaluate(fn: Watch, *given: Any) -> Array | float:
    return fn(*given)


@dataclasses.dataclass(frozen=True)
class _Of:
    """A function with values that do not change, known by both."""

    fn: Watch
    fixed: tuple[Any, ...]

    def __call__(self, *given: Any) -> Array | float:
        return self.fn(*self.fixed, *given)


def _rows(graph: FactorGraph, data: Any, missing: str | None = "this monitor") -> Rows:
    return tables.check_rows(graph, data, missing)[0]


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
    rows = _rows(graph, data, missing=None)
    monitor = Monitor(_Of(_log_likelihood, (graph,)), (rows,))
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
    rows = _rows(graph, data)
    _check_free_energy(graph, "estimated_log_likelihood")
    rng_key = checks.key("estimated_log_likelihood: rng_key", rng_key)
    num_particles = checks.count("estimated_log_likelihood: num_particles", num_particles, least=2)
    start = rows if base is None else _rows(graph, base)
    run = partial(annealed.ais, rng_key=rng_key, data=start, num_particles=num_particles, ladder=ladder)

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
    return Monitor(_Of(_free_energy_gap, (graph,)), (_rows(graph, train), _rows(graph, held_out)))


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
    keys = pseudo.check_units(graph, num_units, rng_key, _rows(graph, data))
    return Monitor(_Of(_pseudo_log_likelihood, (graph, num_units)), (_rows(graph, data), keys))


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
    return Monitor(_Of(_reconstruction, (graph,)), (_rows(graph, data), random.key_pair(rng_key)))


def _reconstruction(graph: FactorGraph, params: Params, rows: Rows, key: Key) -> Array:
    statistics = graph.statistics(sample_latents(graph, params, Batch.of(rows), key))
    total, count = jnp.zeros(()), 0
    for b in graph.visible:
        mean = lambda t, b=b: graph.families[b].mean(energy.natural(graph, params, t, [b])[b])
        error = statistics[b] - jax.vmap(mean)(statistics)
        total, count = total + (error**2).sum(), count + error.size
    return total / count


# -- variance ------------------------------------------------------------------------------------


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
    check_estimator("gradient_variance: estimator", estimator, "an estimator such as CD(k=1)")
    num_repeats = checks.count("gradient_variance: num_repeats", num_repeats, least=2)
    rng_key = checks.key("gradient_variance: rng_key", rng_key)
    rows, key = _rows(graph, data), random.key_pair(rng_key)
    size = len(next(iter(rows.values())))
    start = lambda p: estimator.init(graph, p, rows, size, key)
    carries = bool(jax.tree.leaves(jax.eval_shape(start, graph.param_shapes)))
    return Monitor(_Of(_gradient_variance, (graph, estimator, num_repeats)), (rows, key), takes_state=carries)


def _gradient_variance(
    graph: FactorGraph, estimator: Estimator, num_repeats: int, params: Params, *given: Any
) -> Array:
    """:param given: what the estimator carries, where it does; rows; and a key."""
    *carried, rows, key = given
    batch = Batch.of(rows)
    start = lambda p: estimator.init(graph, p, rows, len(batch.weights), key)
    state = carried[0] if carried else start(params)  # which has no arrays
    if shapes(jax.eval_shape(start, params)) != shapes(state):
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
