# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How long to run a pair: cost times variance of H_{k:m}."""

from typing import NamedTuple

from jaxtyping import Float, Integer
import numpy as np
import xarray as xr

from ebmpp.diagnostics.meeting import meeting_data, path_data
from ebmpp.errors import ArgumentError
from ebmpp.sampling.expectation import Estimate


class Suggestion(NamedTuple):
    """What :func:`suggest_k_m` returns."""

    k: int
    """First sweep that counts."""
    m: int
    """Last sweep that counts."""


def suggest_k_m(source: xr.DataTree | Estimate) -> Suggestion:
    """The cheapest k and m of :func:`~ebmpp.unbiased_expectation` with nearly the least cost times variance.

    That product is the number of sweeps for a given standard error. It goes on falling a little as m
    grows, so the suggestion is the least cost a pair among those within 10 % of the least product;
    :func:`cost_times_variance` has the table.

    :param source: what :func:`~ebmpp.to_datatree` makes of a coupled kernel's run, or an estimate.
    :raises ArgumentError: where pairs are unmet, or none is there.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*, section 3.1.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> est = ebmpp.unbiased_expectation(rbm, rbm.init(jax.random.key(0)), lambda x: x["v"],
    ...                                  rng_key=jax.random.key(1), num_pairs=50)
    >>> k, m = ebmpp.diagnostics.suggest_k_m(est)
    >>> 0 <= k <= m
    True
    """
    table = cost_times_variance(source)
    good = table["inefficiency"] <= 1.1 * table["inefficiency"].min()
    best = table["cost"].where(good, np.inf).argmin(dim=["k", "extra"])
    k, extra = int(table["k"][best["k"]]), int(table["extra"][best["extra"]])
    return Suggestion(k, k + extra)


def cost_times_variance(source: xr.DataTree | Estimate) -> xr.Dataset:
    """Cost and variance of H_{k:m} over a grid of k and m - k.

    From a coupled kernel's run the variance is measured, on the energy (usually among the slowest of a
    model's functions), for k above the lag and m up to the sweeps that were run. An estimate keeps no
    paths: its variance is modelled for a function of variance 1 whose autocorrelation falls as the tail
    of the meeting times does, and whose two chains are independent until they meet. Rows of clamped values
    are pairs like others: what is measured then has the spread between their posteriors in it.

    :param source: as for :func:`suggest_k_m`.
    :return: a Dataset over ``k`` and ``extra`` (m - k) with ``cost`` (sweeps a pair), ``variance`` (of one
        pair) and their product ``inefficiency``; inf where a run was too short to tell. The attribute
        ``variance`` says "measured" or "modelled".
    :raises ArgumentError: as for :func:`suggest_k_m`.
    """
    times, met, lag = meeting_data(source)
    if not times.size or not met.all():
        raise ArgumentError(
            f"{int((~met).sum())} of {len(met)} pairs are unmet, and the rest of their cost is unknown: run "
            "more sweeps"
        )
    times = times.astype(int)
    measured = isinstance(source, xr.DataTree) and "energy" in source["meeting"].data_vars
    ks = np.unique(np.quantile(times, [0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0]).astype(int))
    extras = np.unique(np.round(np.geomspace(1, 20 * max(2, times.max()), 25)).astype(int)) - 1
    if measured:
        sweeps, paths = path_data(source, ["energy", "energy_following"])
        ks = np.unique(np.maximum(ks, sweeps[0]))
    variance = np.full((len(ks), len(extras)), np.inf)
    cost = np.empty_like(variance)
    for i, k in enumerate(ks):
        for j, extra in enumerate(extras):
            cost[i, j] = (np.maximum(k + extra, times) + times - lag).mean()
            if not measured:
                variance[i, j] = _modelled(times, lag, k, k + extra)
            elif max(k + extra, times.max() - 1) <= sweeps[-1]:
                variance[i, j] = _averages(paths, times, lag, (k, k + extra), sweeps[0]).var(ddof=1)
    columns = {"cost": cost, "variance": variance, "inefficiency": cost * variance}
    return xr.Dataset(
        {name: (["k", "extra"], v) for name, v in columns.items()},
        coords={"k": ks, "extra": extras},
        attrs={"lag": lag, "variance": "measured" if measured else "modelled"},
    )


def _weights(t: Integer[np.ndarray, "t"], lag: int, k: int, m: int) -> Integer[np.ndarray, "t"]:
    """How often f(X_t) - f(Y_{t - lag}) counts in H_{k:m}, of an unmet pair."""
    count = (t - k) // lag - -(-np.maximum(lag, t - m) // lag) + 1
    return np.where(t >= k + lag, count, 0)


def _averages(
    paths: list[Float[np.ndarray, "pairs sweeps"]],
    times: Integer[np.ndarray, "pairs"],
    lag: int,
    window: tuple[int, int],
    first: int,
) -> Float[np.ndarray, "pairs"]:
    """H_{k:m} of each pair, of what the paths hold from sweep ``first`` on."""
    k, m = window
    leading, following = paths
    t = first + np.arange(leading.shape[1])
    unmet = t[None, :] < times[:, None]
    correction = np.where(unmet, _weights(t, lag, k, m) * (leading - following), 0).sum(1)
    return (leading[:, (t >= k) & (t <= m)].sum(1) + correction) / (m - k + 1)


def _modelled(times: Integer[np.ndarray, "pairs"], lag: int, k: int, m: int) -> float:
    n = m - k + 1
    rho = np.exp(-1 / max((times - lag).mean(), 1e-3))
    # variance of the mean of n values of an autoregression of variance 1
    average = (1 + rho) / (1 - rho) - 2 * rho * (1 - rho**n) / (n * (1 - rho) ** 2)
    t = np.arange(times.max())
    weights = np.r_[0, np.cumsum(_weights(t, lag, k, m))][times]  # of the corrections before tau
    return average / n + 2 * float(((weights / n) ** 2).mean())
