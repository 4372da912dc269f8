# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bounds on the distance to stationarity, against enumerated chains.

Tests diagnostics/meeting.py.
"""

import dataclasses
from functools import cache
from typing import Any

from mcmc_tools import TWO_MODES, fields, run_mcmc, samples
from metropolis_tools import Law
import numpy as np
import pytest
import xarray as xr
import zoo

import jax

import ebmpp
from ebmpp.diagnostics import tv_upper_bound, wasserstein_upper_bound
from ebmpp.diagnostics.meeting import survival

# chains start in the less likely one of two modes
START = {"v": np.zeros(4, np.float32), "h": np.zeros(3, np.float32)}
PAIRS, LAG, SWEEPS = zoo.NUM_PAIRS, 2, 200


@cache
def model() -> Law:
    return Law(zoo.graph("rbm"), TWO_MODES)


@cache
def transition() -> np.ndarray:
    """The matrix of one sweep: v given h, then h given v."""
    joint = model().target.reshape(16, 8)  # v varies slowest
    v_given_h, h_given_v = joint / joint.sum(0), joint / joint.sum(1, keepdims=True)
    row = (v_given_h.T[:, :, None] * h_given_v[None]).reshape(8, 128)
    return np.tile(row, (16, 1))


def distribution(t: int) -> np.ndarray:
    """Return the distribution of the chain from ``START`` after t sweeps."""
    return model().at(**START) @ np.linalg.matrix_power(transition(), t)


def sampling_error(lag: int) -> float:
    """The part of a bound that so many pairs may miss: a share 10 / PAIRS, with the
    chain's own tail."""
    second = np.sort(np.abs(np.linalg.eigvals(transition())))[-2]
    return 10 / PAIRS / (1 - second**lag)


def energy(x: dict) -> jax.Array:
    """At module level: the engine compiles once per function."""
    return zoo.graph("rbm").energy(TWO_MODES, x)


@pytest.fixture(scope="module")
def pairs():
    init = {b: np.broadcast_to(x, (PAIRS, *x.shape)) for b, x in START.items()}
    options = {
        "num_chains": PAIRS,
        "num_samples": SWEEPS,
        "extra_fields": ("y",),
        "init_params": init,
    }
    mcmc = run_mcmc(
        ebmpp.MaximalCoupling(zoo.graph("rbm"), lag=LAG), TWO_MODES, key=1, **options
    )
    assert mcmc.last_state.met.all()
    return mcmc


@pytest.fixture(scope="module")
def tree(pairs):
    return ebmpp.to_datatree(pairs)


@cache
def estimate(k: int = 1, m: int = 1, lag: int = 1, **options: Any) -> Any:
    # fmt: skip
    return ebmpp.unbiased_expectation(
        zoo.graph("rbm"),
        TWO_MODES,
        energy,
        k=k,
        m=m,
        lag=lag,
        init=START,
        num_pairs=PAIRS,
        rng_key=jax.random.key(2),
        **options,
    )


@cache
def censored_estimate() -> Any:
    """Estimate from pairs that were stopped after 4 sweeps."""
    with pytest.warns(UserWarning, match="biased"):
        return estimate(max_sweeps=4, unmet="drop")


def assert_above_total_variation(bound: xr.Dataset) -> None:
    exact = np.array(
        [0.5 * np.abs(distribution(int(t)) - model().target).sum() for t in bound.t]
    )
    assert exact[0] > 0.5  # the start is a poor one, so there is something to bound
    assert (bound.upper.values >= exact - sampling_error(bound.attrs["lag"])).all()
    assert ((bound.lower <= bound.bound) & (bound.bound <= bound.upper)).all()
    assert (np.diff(bound.bound) <= 0).all() and float(bound.bound[-1]) == 0


@pytest.mark.nightly
def test_total_variation_is_below_the_bound_of_a_run(tree):
    bound = tv_upper_bound(tree, num_bootstrap=100)
    assert bound.attrs == {"lag": LAG, "pairs": PAIRS, "unmet": 0}
    np.testing.assert_array_equal(
        bound.t, np.arange(int(tree["meeting"].meeting_time.max()) - LAG + 1)
    )
    assert_above_total_variation(bound)


def test_total_variation_is_below_the_bound_of_an_estimate():
    bounds = {
        lag: tv_upper_bound(estimate(lag=lag), num_bootstrap=100) for lag in (1, 5)
    }
    for bound in bounds.values():
        assert_above_total_variation(bound)
    converted = tv_upper_bound(ebmpp.to_datatree(estimate(lag=5)), num_bootstrap=100)
    xr.testing.assert_identical(bounds[5], converted)
    censored = tv_upper_bound(censored_estimate(), t=bounds[1].t, num_bootstrap=5)
    assert censored.attrs["unmet"] == censored_estimate().num_unmet > 0
    assert (censored.bound >= bounds[1].bound).all()


def meeting_tree(times: Any, met: Any, lag: int = 1, **columns: Any) -> xr.DataTree:
    group = xr.Dataset(
        {"meeting_time": ("chain", times), "met": ("chain", met), "lag": lag, **columns}
    )
    return xr.DataTree.from_dict({"meeting": group})


def test_bound_of_four_meeting_times():
    bound = tv_upper_bound(
        meeting_tree([3, 3, 4, 9], [True] * 4, lag=3), num_bootstrap=1
    )
    # mean of max(0, ceil((tau - 3 - t) / 3)): at 0 of 0, 0, 1, 2; at 1 and 2 of 0, 0,
    # 0, 2; then of 1
    np.testing.assert_allclose(
        bound.bound, [3 / 4, 2 / 4, 2 / 4, 1 / 4, 1 / 4, 1 / 4, 0]
    )
    with pytest.raises(ValueError, match="source"):
        tv_upper_bound(meeting_tree(np.zeros(0), np.zeros(0, bool)))
    with pytest.raises(ValueError, match="'meeting'"):
        tv_upper_bound(xr.DataTree())


def test_bounds_of_chains_that_keep_to_their_starts_are_reported():
    stuck = dataclasses.replace(estimate(), overlap=9.0)
    moves = np.random.default_rng(0).integers(0, 2, (50, 20, 6))
    frozen = np.broadcast_to(moves[:, :1], moves.shape)
    meeting = meeting_tree([2] * 50, [True] * 50)["meeting"].to_dataset()
    posterior = lambda draws: xr.Dataset({"x": (("chain", "draw", "unit"), draws)})
    run = lambda draws: xr.DataTree.from_dict(
        {"meeting": meeting, "posterior": posterior(draws)}
    )
    for source in (stuck, ebmpp.to_datatree(stuck), run(frozen)):
        with pytest.warns(UserWarning, match="overlap z"):
            tv_upper_bound(source, num_bootstrap=2)
    # the second run is too short to show it
    for source in (
        run(moves),
        run(frozen[:, :3]),
    ):
        tv_upper_bound(source, num_bootstrap=2)


def test_censored_pairs_do_not_lower_the_bound():
    """Half of the pairs are observed for 8 sweeps only, the others until they meet:
    geometric times."""
    lag, num_pairs, stay = 4, 20_000, 0.8
    times = lag - 1 + np.random.default_rng(0).geometric(1 - stay, size=num_pairs)
    observed = np.where(np.arange(num_pairs) % 2, lag + 8, 1000)
    t = np.arange(20)
    tree = meeting_tree(np.minimum(times, observed), times <= observed, lag)
    bound = tv_upper_bound(tree, t=t, num_bootstrap=50)
    # P(tau > s) is stay ** (s - lag + 1)
    exact = np.minimum(1, stay ** (t + 1) / (1 - stay**lag))
    spread = (bound.upper - bound.lower).values / (2 * 1.96)
    assert (np.abs(bound.bound.values - exact) <= 5 * spread + 1e-12).all()


def test_the_bound_is_one_where_the_tail_is_unknown():
    times, met = np.array([2.0, 3, 3, 6]), np.array([True, True, False, False])
    estimated = survival(times, met, np.array([0.0, 2, 3, 6, 7]))
    np.testing.assert_array_equal(estimated, [1, 3 / 4, 1 / 2, 1 / 2, np.nan])
    assert (tv_upper_bound(meeting_tree(times, met), num_bootstrap=20).bound == 1).all()
    # an unmet pair that was observed for a shorter time than others leaves the tail
    # known
    known = tv_upper_bound(
        meeting_tree([5, 3, 2], [True, True, False]), num_bootstrap=20
    )
    np.testing.assert_allclose(known.bound, [1, 1, 1, 0.5, 0])
    assert known.attrs["unmet"] == 1


@pytest.mark.nightly
def test_wasserstein_distance_is_below_its_bound(tree):
    """The distance of the number of units that are on, which is at most that of the states."""
    t = [1, 3, 8]
    bound = wasserstein_upper_bound(tree, t=t, num_bootstrap=100)
    count = np.array([x["v"].sum() + x["h"].sum() for x in model().states]).astype(int)
    cdf = lambda p: np.bincount(count, p).cumsum()
    exact = np.array(
        [np.abs(cdf(distribution(s)) - cdf(model().target)).sum() for s in t]
    )
    assert exact[0] > 0.3
    assert (bound.upper.values >= exact - 7 * sampling_error(LAG)).all()
    assert ((bound.lower <= bound.bound) & (bound.bound <= bound.upper)).all()


def test_wasserstein_bound_is_the_mean_sum_of_distances(pairs):
    tree = ebmpp.to_datatree(pairs)
    tree["meeting"] = xr.DataTree(tree["meeting"].to_dataset().isel(chain=slice(50)))
    bound = wasserstein_upper_bound(tree, num_bootstrap=2)
    z, y = samples(pairs), fields(pairs)["y"]
    distance = sum(np.abs(z[b][:50] - y[b][:50]).sum(-1) for b in z)
    # draw i is X_{lag + 1 + i} and Y_{1 + i}, so j = 1, 2, ... stands at i = t - 1, t -
    # 1 + lag, ...
    exact = [distance[:, t - 1 :: LAG].sum() / 50 for t in bound.t.values]
    assert int(bound.t[0]) == 1 and float(bound.bound[-1]) == 0
    np.testing.assert_allclose(bound.bound, exact, rtol=1e-6)


def test_an_unmet_pair_makes_the_wasserstein_bound_infinite():
    paths = lambda lag, *distances: {
        "distance": (["chain", "sweep"], np.array(distances, float)),
        "sweep": lag + 1 + np.arange(len(distances[0])),
    }
    unmet = meeting_tree([4, 3], [False, True], **paths(1, [3, 2, 1], [5, 0, 0]))
    bound = wasserstein_upper_bound(unmet, num_bootstrap=20)
    assert np.isinf(bound.bound).all() and bound.attrs["unmet"] == 1
    met = meeting_tree(
        [6, 4], [True, True], 2, **paths(2, [3, 2, 1, 0, 0], [5, 0, 0, 0, 0])
    )
    with pytest.raises(ValueError, match="t must be at least 1"):
        wasserstein_upper_bound(met, t=[0, 1])
    assert wasserstein_upper_bound(met, t=[100], num_bootstrap=2).bound.item() == 0
    with pytest.raises(ValueError, match="paths"):
        wasserstein_upper_bound(meeting_tree([2], [True]))


def test_thinned_and_missing_pairs_are_refused(tree):
    group = tree["meeting"].to_dataset()
    thinned = xr.DataTree.from_dict({"meeting": group.isel(sweep=slice(0, None, 2))})
    for source, message in (
        (thinned, "thinned"),
        (xr.DataTree(), "'meeting'"),
        (meeting_tree(np.zeros(0), np.zeros(0, bool)), "'meeting'"),
    ):
        with pytest.raises(ValueError, match=message):
            wasserstein_upper_bound(source)
