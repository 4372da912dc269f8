# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Meeting times of coupled chains, and bounds and choices that follow from them."""

from collections.abc import Callable, Collection
from typing import NamedTuple
import warnings

from jaxtyping import Bool, Float, Real
import numpy as np
from scipy.stats import CensoredData, ecdf
import xarray as xr

from jax.typing import ArrayLike

from ebmpp.core import checks
from ebmpp.coupling.expectation import UnbiasedEstimate
from ebmpp.coupling.overlap import THRESHOLD, overlap, warning_of
from ebmpp.errors import ArgumentError

MeetingSource = xr.DataTree | UnbiasedEstimate
PairTimes = Real[np.ndarray, "pairs"]
Met = Bool[np.ndarray, "pairs"]
PairPaths = list[Float[np.ndarray, "pairs sweeps"]]
#: Numbers of sweeps, and a value at each.
Sweeps = Real[np.ndarray, "t"]
Curve = Float[np.ndarray, "t"]

# quantiles of the meeting times at which k is tried
_QUANTILES = (0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_MAX_COMPARED = 1000  # chains whose first and last draws are compared


class Meetings(NamedTuple):
    """Meeting times of pairs.

    :param times: meeting time, or the last sweep of an unmet pair.
    """

    times: PairTimes
    met: Met
    lag: int


def meeting_data(source: MeetingSource) -> Meetings:
    """Return the meeting times in the group ``meeting`` of a DataTree, or in an estimate."""
    if isinstance(source, UnbiasedEstimate):
        met = np.asarray(source.met, bool)
        times = np.where(met, source.meeting_time, source.max_sweeps or 0).astype(float)
        return Meetings(times, met, source.lag)
    group = None
    text = checks.tell(source)
    if isinstance(source, xr.DataTree):
        group = source.children.get("meeting")
        text = f"a DataTree with {sorted(source.children)}"
    if group is None or not group["met"].size:
        raise ArgumentError(
            "source must be an estimate, or a DataTree of a coupled kernel's run with "
            f"pairs in the group 'meeting', got {text}."
        )
    return Meetings(
        np.asarray(group["meeting_time"], float).ravel(),
        np.asarray(group["met"], bool).ravel(),
        group["lag"].astype(int).item(),
    )


def survival(times: PairTimes, met: Met, at: Sweeps) -> Curve:
    """Return the Kaplan-Meier estimate of P(tau > t); nan after a censored last time."""
    data = CensoredData(uncensored=times[met], right=times[~met])
    value = ecdf(data).sf.evaluate(at)
    last = times[~met].max(initial=-np.inf)
    last_met = times[met].max(initial=-np.inf)
    is_unknown = (at > last) & (last >= last_met)
    return np.where(is_unknown, np.nan, value)


def _warn_of_overlap(who: str, source: MeetingSource, data: Meetings) -> None:
    """Warn if chains still resemble their starts after pairs have met."""
    score = np.nan
    if isinstance(source, UnbiasedEstimate):
        score = source.overlap
    elif "overlap" in source["meeting"].data_vars:
        score = source["meeting"]["overlap"].item()
    elif "posterior" in source.children and data.met.all():
        draws = source["posterior"].to_dataset()
        is_long = draws.sizes["draw"] > 2 * data.times.max()
        if is_long and draws.sizes["chain"] == len(data.met):
            score = overlap(_state_at(draws, 0), _state_at(draws, -1))
    if score > THRESHOLD:
        warnings.warn(warning_of(who, score), stacklevel=3)


def _state_at(draws: xr.Dataset, index: int) -> dict[str, np.ndarray]:
    """Return one draw of the first chains, by block."""
    state = draws.isel(draw=index, chain=slice(_MAX_COMPARED))
    return {str(b): np.asarray(v) for b, v in state.data_vars.items()}


def tv_upper_bound(
    source: MeetingSource,
    t: ArrayLike | None = None,
    *,
    num_bootstrap: int = 500,
    level: float = 0.95,
    seed: int = 0,
) -> xr.Dataset:
    r"""Return upper bounds on the total variation distance to stationarity after t sweeps.

    .. math:: d_{TV}(t) \le \min\bigl(1, E[\max(0, \lceil (\tau - L - t) / L \rceil)]\bigr)

    for meeting times :math:`\tau` at lag :math:`L`. A larger lag gives a sharper bound.
    Unmet pairs are right-censored; where the tail is unknown the bound is 1, which is
    always valid.

    :param source: a tree with a group ``meeting``, or an estimate.
    :param t: sweeps to evaluate at; by default every sweep until the bound is 0.
    :param num_bootstrap: bootstrap resamples of the pairs, from ``seed``, for the band.
    :param level: pointwise coverage of the band.
    :return: a Dataset over ``t`` with ``bound``, ``lower`` and ``upper``.
    :raises ArgumentError: a source without meeting times, or a negative t.
    :warns UserWarning: if chains still resemble their starts after twice the longest
        meeting time, which the bound then does not see: see ``independent_starts`` of
        :func:`~ebmpp.unbiased_expectation`.

    **References**

    1. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with
       L-lag couplings*, Theorem 2.5.
    """
    data = meeting_data(source)
    _warn_of_overlap("tv_upper_bound", source, data)
    if t is None:
        t = np.arange(int(data.times.max()) - data.lag + 1)
    t = _sweeps(t, 0)

    def bound(index):
        """Return the sum over j >= 0 of P(tau > lag + t + j lag), at most 1."""
        times = data.times[index]
        end = int(times.max()) + 1
        alive = survival(times, data.met[index], np.arange(end + data.lag))
        alive[np.isnan(alive)] = np.inf
        (total,) = _lagged_sums(alive[None], data.lag)
        return np.minimum(1.0, total[np.minimum(t + data.lag, end)])

    return _with_band(bound, data, t, num_bootstrap, level, seed)


def _sweeps(t: ArrayLike, least: int) -> Sweeps:
    """Return numbers of sweeps; raise ArgumentError for fractions and smaller numbers."""
    sweeps = np.atleast_1d(checks.numbers("t", t))
    if sweeps.ndim > 1 or not ((sweeps >= least) & (sweeps % 1 == 0)).all():
        raise checks.error("t", f"at least {least}, in whole sweeps", sweeps.tolist())
    return sweeps.astype(int)


def _with_band(
    bound: Callable[[np.ndarray], np.ndarray],
    data: Meetings,
    t: np.ndarray,
    num_bootstrap: int,
    level: float,
    seed: int,
) -> xr.Dataset:
    """Return the bound of all pairs, with a band from bootstrap resamples of them."""
    pairs = len(data.times)
    generator = np.random.default_rng(checks.count("seed", seed, least=0))
    num_bootstrap = checks.count("num_bootstrap", num_bootstrap)
    tail = (1 - checks.number("level", level, above=0, below=1)) / 2
    samples = [
        bound(generator.integers(pairs, size=pairs)) for _ in range(num_bootstrap)
    ]
    ends = [tail, 1 - tail]
    lower, upper = np.quantile(np.array(samples), ends, axis=0, method="nearest")
    columns = {
        "bound": ("t", bound(np.arange(pairs))),
        "lower": ("t", lower),
        "upper": ("t", upper),
    }
    attrs = {"lag": data.lag, "pairs": pairs, "unmet": int((~data.met).sum())}
    return xr.Dataset(columns, {"t": t}, attrs)


def _lagged_sums(values: Float[np.ndarray, "rows sweeps"], lag: int) -> np.ndarray:
    """Return the sums of the values at s, s + lag, s + 2 lag, ..., for every sweep s."""
    rows, length = values.shape
    padded = np.pad(values, ((0, 0), (0, -length % lag)))
    backwards = padded.reshape(rows, -1, lag)[:, ::-1]
    return backwards.cumsum(1)[:, ::-1].reshape(rows, -1)


def wasserstein_upper_bound(
    source: xr.DataTree,
    t: ArrayLike | None = None,
    *,
    num_bootstrap: int = 500,
    level: float = 0.95,
    seed: int = 0,
) -> xr.Dataset:
    r"""Return upper bounds on the 1-Wasserstein distance to stationarity after t sweeps.

    .. math:: W_1(t) \le E\Bigl[\sum_{j \ge 1} d(X_{t + jL}, Y_{t + (j - 1)L})\Bigr]

    with lag :math:`L` and the L1 distance over all free units (for categories, the
    number that differ). Unlike the total variation bound, it measures how far the units
    still move. One unmet pair makes it infinite, as the rest of the pair's path is
    unknown. The other arguments and the result are as in :func:`tv_upper_bound`.

    :param source: :func:`~ebmpp.to_datatree` of a coupled kernel's run.
    :param t: sweeps to evaluate at, at least ``sweep[0] - lag`` (1 without warm-up); by
        default every sweep from there until the bound is 0.
    :raises ArgumentError: a source without paths, or a t before the first recorded
        sweep.

    **References**

    1. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with
       L-lag couplings*, section 2.3.
    """
    data = meeting_data(source)
    _warn_of_overlap("wasserstein_upper_bound", source, data)
    lag = data.lag
    sweeps, (distance,) = _paths(source, ["distance"])
    first = sweeps[0]
    last = sweeps[-1]
    if t is None:
        t = np.arange(first - lag, max(first, int(data.times.max())) - lag + 1)
    t = _sweeps(t, first - lag)
    total = _lagged_sums(distance, lag)
    sweep = np.minimum(t + lag, last)
    sums = np.where(t + lag <= last, total[:, sweep - first], 0.0)
    sums[~data.met] = np.inf

    return _with_band(
        lambda index: sums[index].mean(0), data, t, num_bootstrap, level, seed
    )


def _paths(source: MeetingSource, names: Collection[str]) -> tuple[Sweeps, PairPaths]:
    """Return the sweeps of a run's pairs, and variables of the group ``meeting`` over them."""
    group = source["meeting"] if isinstance(source, xr.DataTree) else xr.DataTree()
    has_paths = set(names) <= set(group.data_vars)
    sweeps = np.asarray(group["sweep"]) if has_paths else np.zeros(0)
    if not has_paths or not (np.diff(sweeps) == 1).all():
        raise checks.error(
            "source",
            "a tree with pairs at every sweep",
            source,
            hint="Pass to_datatree of an MCMC with a coupled kernel that is not "
            "thinned; an estimate has no paths.",
        )
    paths = []
    for name in names:
        values = np.asarray(group[name].transpose("chain", ..., "sweep"), float)
        paths.append(values.reshape(-1, len(sweeps)))
    return sweeps, paths


class Suggestion(NamedTuple):
    """First and last sweep of an average; see :func:`suggest_k_m`."""

    k: int
    m: int


def suggest_k_m(source: MeetingSource) -> Suggestion:
    """Return cheap k and m with nearly minimal cost times variance.

    They are arguments of :func:`~ebmpp.unbiased_expectation`. Cost times variance is
    the number of sweeps for a given standard error. The result is the cheapest window
    within 10 % of the minimum; :func:`inefficiency` returns the table.

    :param source: :func:`~ebmpp.to_datatree` of a coupled kernel's run, or an estimate.
    :raises ArgumentError: a source with unmet pairs, or without pairs.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with
       couplings*, section 3.1.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> est = ebmpp.unbiased_expectation(rbm, rbm.init(jax.random.key(0)), lambda x: x["v"],
    ...                                  rng_key=jax.random.key(1), num_pairs=50)
    >>> k, m = ebmpp.diagnostics.suggest_k_m(est)
    >>> 0 <= k <= m
    True
    """
    table = inefficiency(source)
    good = table["inefficiency"] <= 1.1 * table["inefficiency"].min()
    cost = table["cost"].where(good, np.inf)
    cheapest = cost.stack(window=["k", "extra"]).idxmin()
    k, extra = map(int, cheapest.item())
    return Suggestion(k, k + extra)


def inefficiency(source: MeetingSource) -> xr.Dataset:
    r"""Return cost and variance of the estimate :math:`H_{k:m}` over a grid of k and m - k.

    For a coupled kernel's run the variance is measured on the energy, usually among the
    slowest functions of a model, for k above the lag and m up to the length of the run.
    An estimate has no paths: its variance is modelled for a function of variance 1 with
    the autocorrelation of the meeting times' tail, and chains that are independent
    until they meet. Rows of clamped values count as pairs.

    :param source: as for :func:`suggest_k_m`.
    :return: a Dataset over ``k`` and ``extra`` (m - k) with ``cost`` (sweeps per pair),
        ``variance`` (of one pair) and their product ``inefficiency``; inf where the run
        is too short. The attribute ``variance`` is "measured" or "modelled".
    :raises ArgumentError: as for :func:`suggest_k_m`.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with
       couplings*, section 3.1.
    """
    times, met, lag = meeting_data(source)
    if not met.all():
        raise checks.error(
            "pairs of source",
            "met in all",
            f"{int((~met).sum())} of {len(met)} unmet",
            hint="Run more sweeps.",
        )
    times = times.astype(int)
    is_tree = isinstance(source, xr.DataTree)
    is_measured = is_tree and "energy" in source["meeting"].data_vars
    ks = np.unique(np.quantile(times, _QUANTILES).astype(int))
    lengths = np.geomspace(1, 20 * max(2, times.max()), 25)
    extras = np.unique(np.round(lengths).astype(int)) - 1
    if is_measured:
        sweeps, paths = _paths(source, ["energy", "energy_following"])
        ks = np.unique(np.maximum(ks, sweeps[0]))
    variance = np.full((len(ks), len(extras)), np.inf)
    cost = np.empty_like(variance)
    for i, k in enumerate(ks):
        for j, m in enumerate(k + extras):
            cost[i, j] = (np.maximum(m, times) + times - lag).mean()
            if not is_measured:
                variance[i, j] = _modelled_variance(times, lag, k, m)
            elif max(m, times.max() - 1) <= sweeps[-1]:
                estimates = _estimates(paths, times, lag, (k, m), sweeps[0])
                variance[i, j] = estimates.var(ddof=1)
    dims = ("k", "extra")
    columns = {
        "cost": (dims, cost),
        "variance": (dims, variance),
        "inefficiency": (dims, cost * variance),
    }
    attrs = {"lag": lag, "variance": "measured" if is_measured else "modelled"}
    return xr.Dataset(columns, {"k": ks, "extra": extras}, attrs)


def _weights(t: Sweeps, lag: int, k: int, m: int) -> Sweeps:
    """Return how often f(X_t) - f(Y_{t - lag}) occurs in H_{k:m} of an unmet pair."""
    last = (t - k) // lag
    first = -(-np.maximum(lag, t - m) // lag)
    return np.where(t >= k + lag, last - first + 1, 0)


def _estimates(
    paths: PairPaths, times: PairTimes, lag: int, window: tuple[int, int], first: int
) -> Float[np.ndarray, "pairs"]:
    """Return H_{k:m} of each pair from paths that begin at sweep ``first``."""
    k, m = window
    leading, following = paths
    t = first + np.arange(leading.shape[1])
    unmet = t < times[:, None]
    terms = _weights(t, lag, k, m) * (leading - following)
    correction = np.where(unmet, terms, 0).sum(1)
    in_window = (t >= k) & (t <= m)
    average = leading[:, in_window].sum(1)
    return (average + correction) / (m - k + 1)


def _modelled_variance(times: PairTimes, lag: int, k: int, m: int) -> float:
    n = m - k + 1
    rho = np.exp(-1 / max((times - lag).mean(), 1e-3))
    # n times the variance of the mean of n values of an autoregression of variance 1
    rest = 1 - rho
    stationary = (1 + rho) / rest
    start = 2 * rho * (1 - rho**n) / (n * rest**2)
    sweeps = np.arange(times.max())
    totals = np.cumsum(_weights(sweeps, lag, k, m))
    # of the sweeps before a pair meets
    weights = np.r_[0, totals][times]
    corrections = 2 * np.mean((weights / n) ** 2)
    return (stationary - start) / n + corrections
