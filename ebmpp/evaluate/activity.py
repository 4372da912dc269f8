# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Activity of latent units over data: active, constant, off or on."""

from functools import partial
import math
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float, Shaped
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Params, Rows, StateLike, checks, random
from ebmpp.evaluate.completion import Runs
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, energy, states, tables
from ebmpp.moves import Target

if TYPE_CHECKING:
    import pandas as pd

_EDGE = 0.02  # share of a range within which a unit is off or on
_MIN_EXPLAINED = 1e-3  # of a unit's variance; a unit below is constant


def unit_activity(
    graph: FactorGraph,
    params: Params,
    rows: StateLike,
    *,
    rng_key: Array,
    num_chains: int = 4,
    num_sweeps: int = 50,
) -> "pd.DataFrame":
    """Return the activity of each latent unit over rows, by its posterior means.

    A unit is **off** or **on** if its mean over the rows is within 2 % of the range of
    its statistic from the lower or upper end, **constant** if its posterior means
    differ between rows by less than a thousandth of its variance, and otherwise
    **active**. It is **unknown** with a single row, where ``varies`` is nan. A unit
    with several statistics (the categories of a :class:`~ebmpp.Categorical`, x and x^2
    of a Gaussian) has one row per statistic.

    The means are exact if the latents given the visibles form one layer. Otherwise they
    are averages of Gibbs chains (:func:`ebmpp.complete`), whose noise is subtracted
    from ``varies``.

    :param graph: a model with latent units.
    :param rows: values of the visible blocks.
    :param num_chains: chains per row, at least 2, if the posterior has no closed form.
    :param num_sweeps: sweeps of each chain, after as many warm-up sweeps.
    :return: one row per statistic of a unit: ``block``, ``unit``, ``statistic``;
        ``mean``, and the smallest and largest posterior mean of a row, ``low`` and
        ``high``; ``varies``, the share of its variance that the rows explain; and
        ``status``.
    :raises StateError: rows of a wrong name, shape or value, without rows, or a model
        without latent units.
    :raises ArgumentError: a call under ``jit``.

    **References**

    1. Hinton (2012), *A practical guide to training restricted Boltzmann machines*,
       section 15.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(3))
    >>> rows = ebmpp.data.bars_and_stripes(3)
    >>> params = rbm.init(jax.random.key(0)) | {"h": jax.numpy.array([-9.0, 0.0, 9.0])}
    >>> params["v:h"] = params["v:h"].at[:, 1].set(1.0)
    >>> unit_activity(rbm, params, rows, rng_key=jax.random.key(1))["status"].tolist()
    ['off', 'active', 'on']
    """
    rng_key = checks.key("unit_activity: rng_key", rng_key)
    checks.on_host("unit_activity", rng_key, params, rows)
    num_chains = checks.count("unit_activity: num_chains", num_chains, least=2)
    num_sweeps = checks.count("unit_activity: num_sweeps", num_sweeps)
    if not graph.latent:
        raise checks.state_error("unit_activity: graph", "with latent units", graph)
    rows, _, _ = tables.as_data(graph, rows, "unit_activity")
    graph.check(params)
    clamped = states.as_clamped(graph.families, rows)
    if graph.interacting(graph.latent):
        target = Target(graph, params, clamped)
        posterior = _by_chains(target, num_chains, num_sweeps, random.key_pair(rng_key))
    else:
        posterior = exact_moments(graph, tuple(graph.latent), params, clamped.full)
    import pandas as pd  # takes most of a second

    parts = [
        pd.DataFrame({"block": b, **_columns(family, posterior[b])})
        for b, family in graph.latent.items()
    ]
    return pd.concat(parts, ignore_index=True)


class Moments(NamedTuple):
    """Posterior moments of the statistics of a block, each unit's flattened."""

    mean: Float[np.ndarray, "rows statistics"]
    """Posterior means of each row."""
    explained: Float[np.ndarray, "statistics"]
    """Variance of these means over rows."""
    variance: Float[np.ndarray, "statistics"]
    """Variance over rows and posterior."""


def exact_moments(
    graph: FactorGraph, blocks: tuple[str, ...], params: Params, rows: Rows
) -> dict[str, Moments]:
    """Return the moments of latents that do not interact."""
    result = {}
    for b, moments in conditional_moments(graph, blocks, params, rows).items():
        mean, conditional = (np.asarray(a, float).reshape(len(a), -1) for a in moments)
        explained = mean.var(0)
        result[b] = Moments(mean, explained, explained + conditional.mean(0))
    return result


@partial(jax.jit, static_argnums=(0, 1))
def conditional_moments(
    graph: FactorGraph, blocks: tuple[str, ...], params: Params, rows: Rows
) -> dict[str, tuple[Array, Array]]:
    """Return each row's means and variances of the statistics of independent blocks.

    They are conditional on the other blocks. A variance is the derivative of the mean
    in its natural parameter.
    """
    result = {}
    for b, eta in energy.natural_rows(graph, params, rows, blocks).items():
        family = graph.families[b]
        shape = family.stat_shape
        one_hot = jnp.eye(math.prod(shape), dtype=eta.dtype).reshape(-1, *shape)
        # of all statistics, even if a subclass overrides it
        mean = partial(Family.mean, family)

        def total(e, select, mean=mean):
            return (mean(e) * select).sum()

        def variance(select, eta=eta, total=total):
            return select * jax.grad(total)(eta, select)

        result[b] = mean(eta), jax.vmap(variance)(one_hot).sum(0)
    return result


def _by_chains(
    target: Target, num_chains: int, num_sweeps: int, key: Array
) -> dict[str, Moments]:
    """Return the moments of latents that interact, from Gibbs chains given each row."""
    # chains that have not mixed increase the standard error, which is subtracted
    runs = Runs(target, num_chains, key)
    posterior = runs.posterior(num_sweeps, num_sweeps, find_modes=False)
    result = {}
    for b in target.free:
        mean = posterior.mean[b].reshape(len(posterior.mean[b]), -1).astype(float)
        explained = mean.var(0)
        if posterior.standard_error is not None:
            noise = posterior.standard_error[b].reshape(mean.shape)
            explained = np.maximum(0, explained - (noise**2).mean(0))
        family = target.graph.families[b]
        variance = _variance(family, mean, posterior.draws[b])
        result[b] = Moments(mean, explained, variance)
    return result


def _columns(family: Family, moments: Moments) -> dict[str, np.ndarray]:
    """Return the columns of a block's table, with one value per statistic of a unit."""
    mean, explained, variance = moments
    low, high = _bounds(family)
    average = mean.mean(0)
    varies = np.minimum(1.0, explained / np.maximum(variance, 1e-30))
    status = np.where(varies < _MIN_EXPLAINED, "constant", "active").astype(object)
    if len(mean) == 1:  # nothing can vary
        varies[:] = math.nan
        status[:] = "unknown"
    with np.errstate(invalid="ignore"):  # of an unbounded range
        reach = np.where(np.isfinite(high - low), high - low, math.nan)
        status[(average - low) / reach < _EDGE] = "off"
        status[(high - average) / reach < _EDGE] = "on"
    unit, statistic = np.divmod(np.arange(mean.shape[1]), math.prod(family.stat_shape))
    return {
        "unit": unit,
        "statistic": statistic,
        "mean": average,
        "low": mean.min(0),
        "high": mean.max(0),
        "varies": varies,
        "status": status,
    }


def _variance(
    family: Family,
    mean: Float[np.ndarray, "rows statistics"],
    draws: Shaped[np.ndarray, "chains rows ..."],
) -> Float[np.ndarray, "statistics"]:
    """Return variances over rows and posterior, exact for statistics of two values."""
    stats = np.asarray(family.statistics(jnp.asarray(draws)), float)
    sampled = stats.reshape(-1, mean.shape[1]).var(0)
    values = family.states()
    if values is None:
        return sampled
    table = np.asarray(family.statistics(values)).reshape(len(values), -1)
    has_two_values = [len(np.unique(column)) == 2 for column in table.T]
    is_binary = np.tile(has_two_values, family.size)
    low, high = _bounds(family)
    average = mean.mean(0)
    return np.where(is_binary, (high - average) * (average - low), sampled)


def _bounds(family: Family) -> Float[np.ndarray, "2 statistics"]:
    """Return the range of each statistic of each unit."""
    bounds = map(np.ravel, family.statistic_bounds)
    return np.stack([np.tile(bound, family.size) for bound in bounds]).astype(float)
