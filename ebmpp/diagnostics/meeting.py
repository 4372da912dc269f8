# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Meeting times of coupled chains, and bounds that follow from them."""

from collections.abc import Callable
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
PairPaths = Float[np.ndarray, "pairs sweeps"]
#: Numbers of sweeps, and a value at each.
Sweeps = Real[np.ndarray, "t"]
Curve = Float[np.ndarray, "t"]

_BAND = (0.025, 0.975)  # quantiles
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
) -> xr.Dataset:
    r"""Return upper bounds on the total variation distance to stationarity after t sweeps.

    .. math:: d_{TV}(t) \le \min\bigl(1, E[\max(0, \lceil (\tau - L - t) / L \rceil)]\bigr)

    for meeting times :math:`\tau` at lag :math:`L`. A larger lag gives a sharper bound.
    Unmet pairs are right-censored; where the tail is unknown the bound is 1, which is
    always valid.

    :param source: a tree with a group ``meeting``, or an estimate.
    :param t: sweeps to evaluate at; by default every sweep until the bound is 0.
    :param num_bootstrap: bootstrap resamples of the pairs, for a pointwise band of 95 %.
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

    return _with_band(bound, data, t, num_bootstrap)


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
) -> xr.Dataset:
    """Return the bound of all pairs, with a band from bootstrap resamples of them."""
    pairs = len(data.times)
    generator = np.random.default_rng(0)
    num_bootstrap = checks.count("num_bootstrap", num_bootstrap)
    samples = [
        bound(generator.integers(pairs, size=pairs)) for _ in range(num_bootstrap)
    ]
    lower, upper = np.quantile(np.array(samples), _BAND, axis=0, method="nearest")
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
    sweeps, distance = _distances(source)
    first = sweeps[0]
    last = sweeps[-1]
    if t is None:
        t = np.arange(first - lag, max(first, int(data.times.max())) - lag + 1)
    t = _sweeps(t, first - lag)
    total = _lagged_sums(distance, lag)
    sweep = np.minimum(t + lag, last)
    sums = np.where(t + lag <= last, total[:, sweep - first], 0.0)
    sums[~data.met] = np.inf

    return _with_band(lambda index: sums[index].mean(0), data, t, num_bootstrap)


def _distances(source: MeetingSource) -> tuple[Sweeps, PairPaths]:
    """Return the sweeps of a run, and the distance of each pair's chains at these."""
    group = source["meeting"] if isinstance(source, xr.DataTree) else xr.DataTree()
    has_paths = "distance" in group.data_vars
    sweeps = np.asarray(group["sweep"]) if has_paths else np.zeros(0)
    if not has_paths or not (np.diff(sweeps) == 1).all():
        raise checks.error(
            "source",
            "a tree with pairs at every sweep",
            source,
            hint="Pass to_datatree of an MCMC with a coupled kernel that is not "
            "thinned; an estimate has no paths.",
        )
    values = np.asarray(group["distance"].transpose("chain", ..., "sweep"), float)
    return sweeps, values.reshape(-1, len(sweeps))
