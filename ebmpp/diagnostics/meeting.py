# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What meeting times say: how far a chain is from stationarity after t sweeps, and how long to run a pair."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Integer, Real
import numpy as np
from scipy.stats import CensoredData, ecdf
import xarray as xr

from ebmpp.core import checks
from ebmpp.coupling.expectation import UnbiasedEstimate
from ebmpp.errors import ArgumentError


class Meetings(NamedTuple):
    """When pairs met."""

    times: Float[np.ndarray, "pairs"]
    """The last time seen where unmet."""
    met: Bool[np.ndarray, "pairs"]
    lag: int


class Band(NamedTuple):
    """How far a bound may be off: by resamples of the pairs."""

    num_bootstrap: int
    probability: float
    seed: int


def meeting_data(source: xr.DataTree | UnbiasedEstimate) -> Meetings:
    """Meeting times, whether met, and the lag.

    :param source: a tree with a group ``meeting``, or an :class:`~ebmpp.coupling.UnbiasedEstimate`.
    :raises ArgumentError: for a tree without such a group.
    """
    if isinstance(source, xr.DataTree):
        if "meeting" not in source.children:
            raise ArgumentError(
                f"the tree has groups {sorted(source.children)} and no 'meeting': run a coupled kernel "
                "such as MaximalCoupling, and pass its MCMC to to_datatree"
            )
        group = source["meeting"]
        times = np.asarray(group["meeting_time"], float).ravel()
        return Meetings(times, np.asarray(group["met"], bool).ravel(), int(np.asarray(group["lag"])))
    if not isinstance(source, UnbiasedEstimate):
        raise ArgumentError(
            "meeting times are in the tree that to_datatree makes of a coupled kernel's run, and in an "
            f"estimate; got {checks.tell(source)}"
        )
    met = np.asarray(source.met, bool)
    times = np.where(met, source.meeting_time, source.max_sweeps or 0).astype(float)
    return Meetings(times, met, source.lag)


def survival(
    times: Real[np.ndarray, "pairs"], met: Bool[np.ndarray, "pairs"], at: Real[np.ndarray, "at"]
) -> Float[np.ndarray, "at"]:
    """Kaplan-Meier estimate of P(tau > t) with unmet pairs as right-censored.

    :param at: times to evaluate at.
    :return: nan beyond the last observation where that was censored: nothing is known there.
    """
    times = np.asarray(times, float)
    data = CensoredData(uncensored=times[met], right=times[~met])
    curve = ecdf(data).sf
    value = curve.evaluate(at)
    last = times[~met].max(initial=-np.inf)
    unknown = (at > last) & (last >= times[met].max(initial=-np.inf))
    return np.where(unknown, np.nan, value)


def tv_upper_bound(
    source: xr.DataTree | UnbiasedEstimate,
    t: Any = None,
    *,
    num_bootstrap: int = 500,
    probability: float = 0.95,
    seed: int = 0,
) -> xr.Dataset:
    """Upper bounds of the total variation distance to stationarity after t sweeps.

    ``E[max(0, ceil((tau - lag - t) / lag))]``, and at most 1. A larger lag gives a sharper bound. Unmet
    pairs are right-censored; where the tail cannot be known the bound is 1, which is always true.

    :param source: a tree with a group ``meeting``, or an estimate.
    :param t: sweeps to evaluate at; default every sweep up to where the bound is 0.
    :param num_bootstrap: resamples of the pairs for the band.
    :param probability: of the band, pointwise.
    :param seed: of the resampling.
    :return: a Dataset over ``t`` with ``bound``, ``lower`` and ``upper``.
    :raises ArgumentError: without meeting times.

    **References**

    1. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with L-lag couplings*,
       Theorem 2.5.
    """
    data = meeting_data(source)
    times, met, lag = data
    if not times.size:
        raise ArgumentError("there are no pairs, so no meeting times to bound anything with")
    t = np.arange(int(times.max()) - lag + 1) if t is None else np.atleast_1d(np.asarray(t))
    bound = lambda index: _bound(times[index], met[index], lag, t)
    return _with_band(bound, data, t, Band(num_bootstrap, probability, seed))


def _with_band(
    bound: Callable[[np.ndarray], np.ndarray], data: Meetings, t: np.ndarray, band: Band
) -> xr.Dataset:
    """A bound of all pairs, and its band from resamples of them."""
    pairs, generator = len(data.times), np.random.default_rng(checks.count("seed", band.seed, least=0))
    num_bootstrap = checks.count("num_bootstrap", band.num_bootstrap)
    draws = [bound(generator.integers(pairs, size=pairs)) for _ in range(num_bootstrap)]
    tail = (1 - checks.number("probability", band.probability, above=0, below=1)) / 2
    lower, upper = np.quantile(np.array(draws), [tail, 1 - tail], axis=0, method="nearest")
    attrs = {"lag": data.lag, "pairs": pairs, "unmet": int((~data.met).sum())}
    columns = {"bound": bound(np.arange(pairs)), "lower": lower, "upper": upper}
    return xr.Dataset({name: ("t", v) for name, v in columns.items()}, coords={"t": t}, attrs=attrs)


def _bound(
    times: Float[np.ndarray, "pairs"], met: Bool[np.ndarray, "pairs"], lag: int, t: Real[np.ndarray, "t"]
) -> Float[np.ndarray, "t"]:
    """The sum over j >= 0 of P(tau > lag + t + j lag), at most 1."""
    if met.all():  # the mean itself, without a survival curve
        gap = np.ceil((times[None, :] - lag - t[:, None]) / lag)
        return np.minimum(1.0, np.maximum(gap, 0).mean(1))
    steps = int(np.ceil(times.max() / lag)) + 1
    points = lag + t[:, None] + lag * np.arange(steps)[None, :]
    alive = survival(times, met, points.ravel()).reshape(points.shape)
    return np.minimum(1.0, np.where(np.isnan(alive), np.inf, alive).sum(1))


def path_data(
    source: xr.DataTree | UnbiasedEstimate, names: Iterable[str]
) -> tuple[Integer[np.ndarray, "sweeps"], list[Float[np.ndarray, "pairs sweeps"]]]:
    """What was seen of the pairs sweep by sweep.

    :param source: what :func:`~ebmpp.to_datatree` makes of a coupled kernel's run.
    :param names: variables of the group ``meeting``.
    :return: the sweeps, which follow one another, and an array a name.
    :raises ArgumentError: where paths were not kept, or only every so many sweeps of them.
    """
    group = source["meeting"] if isinstance(source, xr.DataTree) and "meeting" in source.children else None
    if group is None or not set(names) <= set(group.data_vars):
        raise ArgumentError(
            "this needs the pairs sweep by sweep: pass to_datatree of an MCMC with MaximalCoupling or "
            "MetropolisCoupling (an estimate keeps no paths)"
        )
    sweeps = np.asarray(group["sweep"])
    if len(sweeps) > 1 and (np.diff(sweeps) != 1).any():
        raise ArgumentError("the run was thinned, and this needs every sweep: run with thinning=1")
    paths = []
    for name in names:
        array = group[name].transpose("chain", ..., "sweep")
        paths.append(np.asarray(array, float).reshape(-1, len(sweeps)))
    return sweeps, paths


def wasserstein_upper_bound(
    source: xr.DataTree, t: Any = None, *, num_bootstrap: int = 500, probability: float = 0.95, seed: int = 0
) -> xr.Dataset:
    """Upper bounds of the 1-Wasserstein distance to stationarity after t sweeps.

    ``E[sum_{j >= 1} d(X_{t + j lag}, Y_{t + (j - 1) lag})]`` with the L1 distance of all free units (for
    categories, how many differ). It tells what the total variation does not: how much the units still
    move. Where a pair is unmet the rest of its path is unknown, and so is the bound: infinite.

    :param source: what :func:`~ebmpp.to_datatree` makes of a coupled kernel's run.
    :param t: sweeps to evaluate at, at least ``sweep[0] - lag`` (1 without warm-up); default every sweep
        from there up to where the bound is 0.
    :param num_bootstrap: resamples of the pairs for the band.
    :param probability: of the band, pointwise.
    :param seed: of the resampling.
    :return: a Dataset over ``t`` with ``bound``, ``lower`` and ``upper``.
    :raises ArgumentError: for a source without paths, or a t before what was seen.

    **References**

    1. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with L-lag couplings*,
       section 2.3.
    """
    data = meeting_data(source)
    times, met, lag = data
    sweeps, (distance,) = path_data(source, ["distance"])
    first, last = int(sweeps[0]), int(sweeps[-1])
    t = np.arange(first - lag, max(first, int(times.max())) - lag + 1) if t is None else np.atleast_1d(t)
    if (t < first - lag).any():
        raise ArgumentError(f"the pairs were seen from sweep {first} on, so t is at least {first - lag}")
    # the sum over j of the distances at t + lag, t + 2 lag, ..., from the end of the path back
    total = np.concatenate([distance, np.zeros((len(distance), lag))], axis=1)
    for s in range(distance.shape[1] - 1, -1, -1):
        total[:, s] += total[:, min(s + lag, distance.shape[1])]
    each = np.where(t + lag <= last, total[:, np.minimum(t + lag, last) - first], 0.0)
    each[~met] = np.inf
    return _with_band(lambda index: each[index].mean(0), data, t, Band(num_bootstrap, probability, seed))


# -- how long to run a pair: cost times variance of H_{k:m} ---------------------------------------------


class Suggestion(NamedTuple):
    """What :func:`suggest_k_m` returns."""

    k: int
    """First sweep that counts."""
    m: int
    """Last sweep that counts."""


def suggest_k_m(source: xr.DataTree | UnbiasedEstimate) -> Suggestion:
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


def cost_times_variance(source: xr.DataTree | UnbiasedEstimate) -> xr.Dataset:
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
    attrs = {"lag": lag, "variance": "measured" if measured else "modelled"}
    data = {name: (["k", "extra"], v) for name, v in columns.items()}
    return xr.Dataset(data, coords={"k": ks, "extra": extras}, attrs=attrs)


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
