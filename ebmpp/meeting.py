# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What meeting times say: how far a chain is from stationarity after t sweeps."""

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import CensoredData, ecdf
import xarray as xr

if TYPE_CHECKING:
    from ebmpp.unbiased import Estimate


def meeting_data(source: "xr.DataTree | Estimate") -> tuple[np.ndarray, np.ndarray, int]:
    """Meeting times (the last time seen where unmet), whether met, and the lag.

    :param source: a tree with a group ``meeting``, or an :class:`~ebmpp.unbiased.Estimate`.
    :raises ValueError: for a tree without such a group.
    """
    if isinstance(source, xr.DataTree):
        if "meeting" not in source.children:
            raise ValueError(
                f"the tree has groups {sorted(source.children)} and no 'meeting': run a coupled kernel "
                "such as MaximalCoupling, and pass its MCMC to to_datatree"
            )
        group = source["meeting"]
        times = np.asarray(group["meeting_time"], float).ravel()
        return times, np.asarray(group["met"], bool).ravel(), int(group["lag"])
    return np.asarray(source.meeting_time, float), np.asarray(source.met, bool), source.lag


def survival(times: np.ndarray, met: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Kaplan-Meier estimate of P(tau > t) with unmet pairs as right-censored.

    :param at: times to evaluate at.
    :return: nan beyond the last observation where that was censored: nothing is known there.
    """
    data = CensoredData(uncensored=times[met], right=times[~met])
    curve = ecdf(data).sf
    value = curve.evaluate(at)
    last = times[~met].max(initial=-np.inf)
    unknown = (at > last) & (last >= times[met].max(initial=-np.inf))
    return np.where(unknown, np.nan, value)


def tv_upper_bound(
    source: "xr.DataTree | Estimate",
    t: Any = None,  # noqa: ANN401
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
    :raises ValueError: without meeting times.

    **References**

    1. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with L-lag couplings*,
       Theorem 2.5.
    """
    times, met, lag = meeting_data(source)
    if not times.size:
        raise ValueError("there are no pairs, so no meeting times to bound anything with")
    t = np.arange(int(times.max()) - lag + 1) if t is None else np.atleast_1d(np.asarray(t))
    generator = np.random.default_rng(seed)
    draws = []
    for _ in range(num_bootstrap):
        index = generator.integers(len(times), size=len(times))
        draws.append(_bound(times[index], met[index], lag, t))
    tail = (1 - probability) / 2
    lower, upper = np.quantile(np.array(draws), [tail, 1 - tail], axis=0)
    columns = {"bound": _bound(times, met, lag, t), "lower": lower, "upper": upper}
    attrs = {"lag": lag, "pairs": len(times), "unmet": int((~met).sum())}
    return xr.Dataset({name: ("t", v) for name, v in columns.items()}, coords={"t": t}, attrs=attrs)


def _bound(times: np.ndarray, met: np.ndarray, lag: int, t: np.ndarray) -> np.ndarray:
    """The sum over j >= 0 of P(tau > lag + t + j lag), at most 1."""
    if met.all():  # the mean itself, without a survival curve
        gap = np.ceil((times[None, :] - lag - t[:, None]) / lag)
        return np.minimum(1.0, np.maximum(gap, 0).mean(1))
    steps = int(np.ceil(times.max() / lag)) + 1
    points = lag + t[:, None] + lag * np.arange(steps)[None, :]
    alive = survival(times, met, points.ravel()).reshape(points.shape)
    return np.minimum(1.0, np.where(np.isnan(alive), np.inf, alive).sum(1))
