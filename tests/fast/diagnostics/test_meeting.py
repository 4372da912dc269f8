# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bounds of the distance to stationarity against enumeration, and the paths that they are made of."""

from typing import Any

import numpy as np
from numpyro.infer import MCMC
import pytest
from scipy.optimize import linprog
import xarray as xr

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.diagnostics.meeting import survival
from ebmpp.kernels import MetropolisCoupling
from helpers import enumerate_numpy, random_params, slow

GRAPH = ebmpp.layered(v=ebmpp.Spin(3), h=ebmpp.Categorical(2, 3))
PARAMS = random_params(GRAPH, seed=0, scale=1.0)
STATES, MODEL, _ = enumerate_numpy(GRAPH, PARAMS)  # v varies slowest
START = {"v": np.ones(3, np.float32), "h": np.zeros(2, np.int32)}
PAIRS = 2000


def gibbs() -> np.ndarray:
    """One sweep as a matrix: v given h, then h given v."""
    joint = MODEL.reshape(8, 9)
    v_given_h, h_given_v = joint / joint.sum(0), joint / joint.sum(1, keepdims=True)
    row = (v_given_h.T[:, :, None] * h_given_v[None]).reshape(9, 72)
    return np.tile(row, (8, 1))


def metropolis() -> np.ndarray:
    """One step as a matrix: every state proposed alike."""
    step = np.minimum(1, MODEL[None, :] / MODEL[:, None]) / len(MODEL)
    np.fill_diagonal(step, 0)
    return step + np.diag(1 - step.sum(1))


CHAINS = {"gibbs": gibbs(), "metropolis": metropolis()}


def unseen(chain: str, lag: int) -> float:
    """How much of a bound so many pairs may miss: those of a share 10 / PAIRS, with the chain's own tail."""
    slow = np.sort(np.abs(np.linalg.eigvals(CHAINS[chain])))[-2]
    return 10 / PAIRS / (1 - slow**lag)


def law(chain: str, t: int) -> np.ndarray:
    """Of the chain from ``START`` after t sweeps."""
    at = [all(np.array_equal(x[b], START[b]) for b in START) for x in STATES]
    return np.linalg.matrix_power(CHAINS[chain], t)[at.index(True)]


def test_the_enumerated_chains_leave_the_model_alone() -> None:
    for step in CHAINS.values():
        np.testing.assert_allclose(MODEL @ step, MODEL, atol=1e-12)
        np.testing.assert_allclose(step.sum(1), 1)


# -- runs ------------------------------------------------------------------------------------------

SWEEPS = {"gibbs": 50, "metropolis": 120}


def run(chain: str, lag: int, **options: Any) -> MCMC:
    kernel = {"gibbs": ebmpp.MaximalCoupling, "metropolis": MetropolisCoupling}[chain](GRAPH, lag=lag)
    settings = {"num_warmup": 0, "num_samples": SWEEPS[chain], "num_chains": PAIRS} | options
    return MCMC(kernel, chain_method="vectorized", progress_bar=False, **settings)


def starts(chains: int) -> dict[str, np.ndarray]:
    return {b: np.broadcast_to(x, (chains, *x.shape)) for b, x in START.items()}


RUNS = [("gibbs", 5), slow(("metropolis", 1)), ("metropolis", 5)]


@pytest.fixture(scope="module", params=RUNS, ids=str)
def sampled(request: pytest.FixtureRequest) -> tuple[str, int, MCMC]:
    """Pairs of either kind; those of Gibbs with a lag of 1 are the estimate's."""
    mcmc = run(*request.param)
    mcmc.run(jax.random.key(1), PARAMS, init_params=starts(PAIRS), extra_fields=("y",))
    assert mcmc.last_state.met.all()
    return *request.param, mcmc


def spins(x: dict) -> jax.Array:
    return x["v"].sum()


def estimate(lag: int, **options: Any) -> ebmpp.sampling.expectation.UnbiasedEstimate:
    """Gibbs pairs that all met."""
    given = {"num_pairs": PAIRS, "rng_key": jax.random.key(2), "num_slots": 8} | options
    init = {b: jnp.asarray(x) for b, x in START.items()}
    return ebmpp.unbiased_expectation(GRAPH, PARAMS, spins, lag=lag, init=init, **given)


# -- total variation -------------------------------------------------------------------------------


def assert_above_total_variation(bound: xr.Dataset, chain: str) -> None:
    truth = np.array([0.5 * np.abs(law(chain, int(t)) - MODEL).sum() for t in bound.t])
    assert truth[0] > 0.5  # the start is a poor one, so there is something to bound
    assert (bound.upper.values >= truth - unseen(chain, bound.attrs["lag"])).all()
    assert ((bound.lower <= bound.bound) & (bound.bound <= bound.upper)).all()
    assert (np.diff(bound.bound) <= 0).all() and float(bound.bound[-1]) == 0


def test_total_variation_is_below_the_bound_of_a_run(sampled: tuple[str, int, MCMC]) -> None:
    chain, lag, mcmc = sampled
    tree = ebmpp.to_datatree(mcmc)
    bound = ebmpp.tv_upper_bound(tree, num_bootstrap=100)
    assert bound.attrs == {"lag": lag, "pairs": PAIRS, "unmet": 0}
    np.testing.assert_array_equal(bound.t, np.arange(int(tree["meeting"].meeting_time.max()) - lag + 1))
    assert_above_total_variation(bound, chain)


def test_total_variation_is_below_the_bound_of_an_estimate() -> None:
    bounds = {}
    for lag in (1, 5):
        est = estimate(lag)
        bounds[lag] = ebmpp.tv_upper_bound(est, num_bootstrap=100)
        assert_above_total_variation(bounds[lag], "gibbs")
        again = ebmpp.tv_upper_bound(ebmpp.to_datatree(est), num_bootstrap=100)
        xr.testing.assert_identical(bounds[lag], again)
    t = np.intersect1d(bounds[1].t, bounds[5].t)
    assert bounds[5].bound.sel(t=t).sum() < bounds[1].bound.sel(t=t).sum()  # a larger lag is sharper


def group(times: Any, met: Any, lag: int = 1, **more: Any) -> xr.DataTree:
    """A tree with a group "meeting" of our own."""
    made = xr.Dataset({"meeting_time": ("chain", times), "met": ("chain", met), "lag": lag, **more})
    return xr.DataTree.from_dict({"meeting": made})


def test_the_bound_by_hand() -> None:
    bound = ebmpp.tv_upper_bound(group([3, 3, 4, 9], [True] * 4, lag=3), num_bootstrap=1)
    # mean of max(0, ceil((tau - 3 - t) / 3)): at 0 of 0, 0, 1, 2; at 1 and 2 of 0, 0, 0, 2; then of 1
    np.testing.assert_allclose(bound.bound, [3 / 4, 2 / 4, 2 / 4, 1 / 4, 1 / 4, 1 / 4, 0])
    assert ebmpp.tv_upper_bound(group([90], [True]), t=0, num_bootstrap=1).bound.item() == 1
    with pytest.raises(ValueError, match="there are no pairs"):
        ebmpp.tv_upper_bound(group(np.zeros(0), np.zeros(0, bool)))
    with pytest.raises(ValueError, match="no 'meeting': run a coupled kernel"):
        ebmpp.tv_upper_bound(xr.DataTree())


@pytest.mark.parametrize("lag", [1, 4])
def test_pairs_watched_for_a_shorter_time_do_not_lower_the_bound(lag: int) -> None:
    """Half of the pairs are watched for 8 sweeps only, the others until they meet: geometric times."""
    pairs, stay = 20_000, 0.8
    times = lag - 1 + np.random.default_rng(0).geometric(1 - stay, size=pairs)
    watched = np.where(np.arange(pairs) % 2, lag + 8, 1000)
    censored = group(np.minimum(times, watched), times <= watched, lag)
    t = np.arange(20)
    bound = ebmpp.tv_upper_bound(censored, t=t, num_bootstrap=50)
    # P(tau > s) is stay ** (s - lag + 1)
    exact = np.minimum(1, stay ** (t + 1) / (1 - stay**lag))
    spread = (bound.upper - bound.lower).values / (2 * 1.96)
    assert (np.abs(bound.bound.values - exact) <= 5 * spread + 1e-12).all()
    ignoring = ebmpp.tv_upper_bound(group(np.minimum(times, watched), [True] * pairs, lag), t=t)
    assert (ignoring.upper.values < exact)[exact < 1].all()  # what taking them as met would say


def test_where_the_tail_is_unknown_the_bound_is_one() -> None:
    times, met = np.array([2.0, 3, 3, 6]), np.array([True, True, False, False])
    at = np.array([0.0, 2, 3, 6, 7])
    np.testing.assert_array_equal(survival(times, met, at), [1, 3 / 4, 1 / 2, 1 / 2, np.nan])
    assert (ebmpp.tv_upper_bound(group(times, met), num_bootstrap=20).bound == 1).all()
    assert (ebmpp.tv_upper_bound(group([4, 4], [False, False]), num_bootstrap=5).lower == 1).all()
    # an unmet pair that was watched for a shorter time than others leaves the tail known
    known = ebmpp.tv_upper_bound(group([5, 3, 2], [True, True, False]), num_bootstrap=20)
    np.testing.assert_allclose(known.bound, [1, 1, 1, 0.5, 0])
    assert known.attrs["unmet"] == 1


@pytest.fixture
def cut() -> ebmpp.sampling.expectation.UnbiasedEstimate:
    """Pairs that were stopped after 4 sweeps."""
    with pytest.warns(UserWarning, match="biased"):
        return estimate(1, max_sweeps=4, unmet="drop")


def test_pairs_cut_at_a_limit_never_lower_the_bound(cut: ebmpp.sampling.expectation.UnbiasedEstimate) -> None:
    _assert_not_lower(ebmpp.to_datatree(cut), cut.num_unmet)


def test_an_estimate_with_unmet_pairs_has_a_bound(cut: ebmpp.sampling.expectation.UnbiasedEstimate) -> None:
    _assert_not_lower(cut, cut.num_unmet)


def _assert_not_lower(source: Any, unmet: int) -> None:
    free = ebmpp.tv_upper_bound(estimate(1), num_bootstrap=5)
    bound = ebmpp.tv_upper_bound(source, t=free.t, num_bootstrap=5)
    assert bound.attrs["unmet"] == unmet > 0
    assert (bound.bound >= free.bound).all()


# -- Wasserstein -----------------------------------------------------------------------------------


def ground() -> np.ndarray:
    """Distances of all states: L1 of the spins, and how many categories differ."""
    v, h = (np.array([x[b] for x in STATES]) for b in ("v", "h"))
    return np.abs(v[:, None] - v[None]).sum(-1) + (h[:, None] != h[None]).sum(-1)


def wasserstein(p: np.ndarray, q: np.ndarray, cost: np.ndarray) -> float:
    """The cheapest transport, a linear program."""
    size = len(p)
    out, into = np.kron(np.eye(size), np.ones(size)), np.kron(np.ones(size), np.eye(size))
    solved = linprog(cost.ravel(), A_eq=np.vstack([out, into])[:-1], b_eq=np.r_[p, q][:-1], method="highs")
    assert solved.status == 0
    return solved.fun


def test_wasserstein_is_below_its_bound(sampled: tuple[str, int, MCMC]) -> None:
    chain, lag, mcmc = sampled
    t = [1, 2, 3, 5, 8, 13]
    bound = ebmpp.diagnostics.wasserstein_upper_bound(ebmpp.to_datatree(mcmc), t=t, num_bootstrap=100)
    cost = ground()
    truth = np.array([wasserstein(law(chain, s), MODEL, cost) for s in t])
    assert truth[0] > 0.3
    assert (bound.upper.values >= truth - cost.max() * unseen(chain, lag)).all()
    assert ((bound.lower <= bound.bound) & (bound.bound <= bound.upper)).all()


def test_the_bound_is_what_its_definition_says(sampled: tuple[str, int, MCMC]) -> None:
    _, lag, mcmc = sampled
    x = {b: np.asarray(v[:50]) for b, v in mcmc.get_samples(group_by_chain=True).items()}
    y = {b: np.asarray(v[:50]) for b, v in mcmc.get_extra_fields(group_by_chain=True)["y"].items()}
    tree = ebmpp.to_datatree(mcmc)
    tree["meeting"] = xr.DataTree(tree["meeting"].to_dataset().isel(chain=slice(50)))
    bound = ebmpp.diagnostics.wasserstein_upper_bound(tree, num_bootstrap=2)
    assert int(bound.t[0]) == 1
    wanted = []
    for t in bound.t.values:
        total = 0.0
        # draw i is X_{lag + 1 + i} and Y_{1 + i}, so j = 1, 2, ... stands at i = t - 1, t - 1 + lag, ...
        for i in range(t - 1, x["v"].shape[1], lag):
            total += np.abs(x["v"][:, i] - y["v"][:, i]).sum() + (x["h"][:, i] != y["h"][:, i]).sum()
        wanted.append(total / 50)
    np.testing.assert_allclose(bound.bound, wanted, rtol=1e-6)
    assert float(bound.bound[-1]) == 0


def paths(distance: Any, times: Any, met: Any, lag: int = 1, step: int = 1) -> xr.DataTree:
    distance = np.asarray(distance, float)
    sweep = lag + 1 + step * np.arange(distance.shape[1])
    return group(times, met, lag, distance=(["chain", "sweep"], distance), sweep=sweep)


def test_a_wasserstein_bound_by_hand() -> None:
    tree = paths([[3, 2, 1, 0, 0], [5, 0, 0, 0, 0]], [6, 4], [True, True], lag=2)
    bound = ebmpp.diagnostics.wasserstein_upper_bound(tree, num_bootstrap=2)
    np.testing.assert_array_equal(bound.t, [1, 2, 3, 4])
    np.testing.assert_allclose(bound.bound, [(3 + 1 + 5) / 2, 2 / 2, 1 / 2, 0])
    beyond = ebmpp.diagnostics.wasserstein_upper_bound(tree, t=[100], num_bootstrap=2)
    assert beyond.bound.item() == 0  # both pairs stay together


def test_an_unmet_pair_makes_the_wasserstein_bound_infinite() -> None:
    tree = paths([[3, 2, 1], [5, 0, 0]], [4, 3], [False, True])
    bound = ebmpp.diagnostics.wasserstein_upper_bound(tree, num_bootstrap=20)
    assert np.isinf(bound.bound).all() and np.isinf(bound.upper).all()
    assert not np.isnan(bound.lower).any()
    assert bound.attrs["unmet"] == 1


def test_wasserstein_refuses_what_has_no_paths() -> None:
    est = estimate(1)
    for source in (est, ebmpp.to_datatree(est), group([2], [True])):
        with pytest.raises(ValueError, match="needs the pairs sweep by sweep"):
            ebmpp.diagnostics.wasserstein_upper_bound(source)
    tree = paths([[3, 2, 1, 0, 0]], [5], [True], lag=2)
    with pytest.raises(ValueError, match="seen from sweep 3 on, so t is at least 1"):
        ebmpp.diagnostics.wasserstein_upper_bound(tree, t=[0, 1])
    with pytest.raises(ValueError, match="the run was thinned"):
        ebmpp.diagnostics.wasserstein_upper_bound(paths([[3, 2, 0]], [5], [True], step=2))
