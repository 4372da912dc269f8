# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What latent units do over data: which are dead, saturated or constant."""

from collections.abc import Iterable
from functools import partial
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Float, Shaped
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Params, Rows, checks, random
from ebmpp.errors import StateError
from ebmpp.evaluate.completion import Runs
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, energy, states, tables
from ebmpp.moves import Target

if TYPE_CHECKING:
    import pandas as pd

_SHARE = 1e-3  # of a unit's variance


def unit_activity(
    graph: FactorGraph,
    params: Params,
    data: Any,
    *,
    rng_key: Array,
    blocks: Iterable[str] | None = None,
    edge: float = 0.02,
    num_chains: int = 4,
    num_sweeps: int = 50,
) -> "pd.DataFrame":
    """What each latent unit does over rows of data, by its posterior means E[t(h) | v].

    A unit that has the same value whatever is seen tells nothing of the data: it is **off** or **on** where
    its mean over the rows is within ``edge`` of the lower or upper end of its statistic's range, **constant**
    where its posterior means hardly differ between rows (less than a thousandth of its variance, the rest
    being its own noise), else **active**. Of units with several statistics (the categories of a
    :class:`~ebmpp.Categorical`, x and x**2 of a Gaussian) each is a row of the table: a category that is
    never taken is off.

    Exact where the latents given the visibles are one layer. Otherwise the means are those of Gibbs chains
    (:func:`ebmpp.complete`), and their noise is subtracted from ``varies``.

    :param graph: a model with latent units.
    :param params: a dict keyed by factor name.
    :param data: rows of the visible blocks.
    :param rng_key: a jax key.
    :param blocks: latent blocks; all of them by default.
    :param edge: of a statistic's range, as a share of it: a mean nearer than this to an end is at it.
    :param num_chains: at least 2, where the posterior has no closed form.
    :param num_sweeps: of each, after as many that are left out.
    :return: a row a statistic of a unit: ``block``, ``unit``, ``statistic``; ``mean`` and ``low`` to ``high``
        (the smallest and largest posterior mean of a row); ``varies``, the share of its variance that the
        rows explain; and ``status``.
    :raises StateError: for data of a wrong name, shape or value, without rows, or a block that is not latent.
    :raises ArgumentError: for an ``edge`` that is not in (0, 0.5), or under ``jit``.

    **References**

    1. Hinton (2012), *A practical guide to training restricted Boltzmann machines*, section 15: what to look
       at.

    **Example**

    >>> import jax, ebmpp
    >>> rbm, data = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(3)), ebmpp.data.bars_and_stripes(3)
    >>> params = rbm.init(jax.random.key(0)) | {"h": jax.numpy.array([-9.0, 0.0, 9.0])}
    >>> params["v:h"] = params["v:h"].at[:, 1].set(1.0)
    >>> unit_activity(rbm, params, data, rng_key=jax.random.key(1))["status"].tolist()
    ['off', 'active', 'on']
    """
    rng_key = checks.key("unit_activity: rng_key", rng_key)
    checks.on_host("unit_activity", rng_key, params, data)
    num_chains = checks.count("unit_activity: num_chains", num_chains, least=2)
    num_sweeps = checks.count("unit_activity: num_sweeps", num_sweeps)
    checks.number("unit_activity: edge, a share of the range,", edge, above=0, below=0.5)
    blocks = tuple(graph.latent) if blocks is None else tuple(blocks)
    wrong = [b for b in blocks if b not in graph.latent]
    if wrong or not blocks:
        named = repr(wrong[0]) if wrong else "none"
        raise StateError(
            f"unit_activity: expected latent blocks, got {named}; there are {list(graph.latent)}"
        )
    rows, _, _ = tables.as_data(graph, data, "unit_activity")
    graph.check(params)
    given = states.as_clamped(graph.families, rows)
    if graph.interacting(graph.latent):
        target = Target(graph, params, given)
        posterior = _by_chains(target, num_chains, num_sweeps, random.key_pair(rng_key))
    else:
        posterior = _one_layer(graph, blocks, params, given.full)
    import pandas as pd  # most of a second that other users need not spend

    return pd.concat([_table(b, graph.families[b], posterior[b], edge) for b in blocks], ignore_index=True)


class _Posterior(NamedTuple):
    """Moments of a block's statistics over rows and posterior."""

    mean: Float[np.ndarray, "rows statistics"]
    explained: Float[np.ndarray, "statistics"]
    """Variance of the posterior means over rows."""
    variance: Float[np.ndarray, "statistics"]


def _one_layer(
    graph: FactorGraph, blocks: tuple[str, ...], params: Params, rows: Rows
) -> dict[str, _Posterior]:
    """By block, the moments of latents that do not interact."""
    result = {}
    for b, moments in conditional_moments(graph, blocks, params, rows).items():
        mean, inner = (np.asarray(a, float).reshape(len(a), -1) for a in moments)
        explained = mean.var(0)
        result[b] = _Posterior(mean, explained, explained + inner.mean(0))
    return result


@partial(jax.jit, static_argnums=(0, 1))
def conditional_moments(
    graph: FactorGraph, blocks: tuple[str, ...], params: Params, rows: Rows
) -> dict[str, tuple[Array, Array]]:
    """By block, row by row: means of the statistics given the rest, and their variances.

    A variance is the derivative of the mean in its natural parameter.

    :param blocks: blocks that do not interact.
    :param rows: of all their neighbours.
    """
    result = {}
    for b, eta in energy.natural_rows(graph, params, rows, blocks).items():
        family = graph.families[b]
        shape = family.stat_shape
        one_hot = jnp.eye(math.prod(shape), dtype=eta.dtype).reshape(-1, *shape)
        mean = partial(Family.mean, family)  # of all statistics, where a subclass has another mean
        total = lambda e, one, mean=mean: (mean(e) * one).sum()
        own = lambda one, eta=eta, total=total: one * jax.grad(total)(eta, one)
        result[b] = mean(eta), jax.vmap(own)(one_hot).sum(0)
    return result


def _by_chains(target: Target, num_chains: int, num_sweeps: int, key: Array) -> dict[str, _Posterior]:
    """By block, the moments of latents that interact, from Gibbs chains given each row."""
    # chains that have not mixed add to the error, which is subtracted
    made = Runs(target, num_chains, key).posterior(num_sweeps, num_sweeps, climb=False)
    result = {}
    for b in target.free:
        mean = made.mean[b].reshape(len(made.mean[b]), -1).astype(float)
        explained = mean.var(0)
        if made.standard_error is not None:
            noise = made.standard_error[b].reshape(mean.shape)
            explained = np.maximum(0, explained - (noise**2).mean(0))
        variance = _variance(target.graph.families[b], mean, made.draws[b])
        result[b] = _Posterior(mean, explained, variance)
    return result


def _table(block: str, family: Family, posterior: _Posterior, edge: float) -> "pd.DataFrame":
    import pandas as pd  # as above

    mean = posterior.mean
    varies = posterior.explained / np.maximum(posterior.variance, 1e-30)
    unit, statistic = np.divmod(np.arange(mean.shape[1]), math.prod(family.stat_shape))
    named = {"block": block, "unit": unit, "statistic": statistic}
    told = {"mean": mean.mean(0), "low": mean.min(0), "high": mean.max(0), "varies": np.minimum(1.0, varies)}
    made = pd.DataFrame(named | told)
    made["status"] = _status(family, made, edge)
    return made


def _variance(
    family: Family, mean: Float[np.ndarray, "rows statistics"], draws: Shaped[np.ndarray, "chains rows ..."]
) -> Float[np.ndarray, "statistics"]:
    """Of each statistic over rows and posterior: exact where it takes two values, else that of draws."""
    stats = np.asarray(family.statistics(jnp.asarray(draws)), float)
    drawn, values = stats.reshape(-1, mean.shape[1]).var(0), family.states()
    if values is None:
        return drawn
    table = np.asarray(family.statistics(values)).reshape(len(values), -1)
    two = np.tile([len(np.unique(column)) == 2 for column in table.T], family.size)
    (low, high), average = _ends(family), mean.mean(0)
    return np.where(two, (high - average) * (average - low), drawn)


def _ends(family: Family) -> Float[np.ndarray, "2 statistics"]:
    """Of the range of each statistic, unit by unit."""
    return np.stack([np.tile(np.ravel(bound), family.size) for bound in family.statistic_bounds]).astype(
        float
    )


def _status(family: Family, made: "pd.DataFrame", edge: float) -> Shaped[np.ndarray, "statistics"]:
    low, high = _ends(family)
    status = np.where(made["varies"] < _SHARE, "constant", "active").astype(object)
    with np.errstate(invalid="ignore"):  # of a range without end
        reach = np.where(np.isfinite(high - low), high - low, math.nan)
        status[(made["mean"] - low) / reach < edge] = "off"
        status[(high - made["mean"]) / reach < edge] = "on"
    return status
