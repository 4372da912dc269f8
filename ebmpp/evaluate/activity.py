# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What latent units do over data: which are dead, saturated or constant."""

from collections.abc import Iterable
import math
from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Shaped
import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.core import Params, checks, random
from ebmpp.errors import StateError
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, states, tables
from ebmpp.moves import Target
from ebmpp.sampling.completion import Runs

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

    Exact where the latents given the visibles are one layer, but for ``varies`` of statistics of more than
    two values, whose variance is that of a draw a row; else the means are of Gibbs chains
    (:func:`ebmpp.complete`), and their noise is taken off ``varies``.

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
    closed = not graph.interacting(graph.latent)
    graph.check(params)
    chains, warmup, kept = (1, 0, 1) if closed else (max(2, num_chains), num_sweeps, num_sweeps)
    target = Target(graph, params, states.as_given(graph.families, rows))
    run = Runs(target, chains, random.key_pair(rng_key))
    # chains that have not mixed add to the error, which is taken off below
    made = run.posterior(warmup, kept, climb=False)
    noise = {} if closed or made.standard_error is None else made.standard_error
    each = [_of_block(b, graph.families[b], made.mean[b], noise.get(b), made.draws[b], edge) for b in blocks]
    import pandas as pd  # most of a second that other users need not spend

    return pd.concat(each, ignore_index=True)


def _of_block(
    block: str,
    family: Family,
    mean: Shaped[np.ndarray, "rows *statistics"],
    noise: Shaped[np.ndarray, "rows *statistics"] | None,
    draws: Shaped[np.ndarray, "chains rows ..."],
    edge: float,
) -> "pd.DataFrame":
    """The table of a block.

    :param mean: posterior means; ``noise`` their standard errors.
    """
    import pandas as pd  # as above

    mean = mean.reshape(len(mean), -1).astype(float)
    spread = mean.var(0)
    if noise is not None:
        spread = np.maximum(0, spread - (noise.reshape(mean.shape) ** 2).mean(0))
    varies = spread / np.maximum(_variance(family, mean, draws), 1e-30)
    each = math.prod(family.stat_shape)
    unit, statistic = np.divmod(np.arange(mean.shape[1]), each)
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
