# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Cost times variance: measured from paths, against slow loops; modelled from meeting times."""

from typing import Any, NamedTuple

import numpy as np
from numpyro.infer import MCMC
import pytest
import xarray as xr

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.sampling.expectation import UnbiasedEstimate
from helpers import assert_rows_law, enumerate_numpy, numpy_energy

GRAPH = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
# all units off, or all of them on: the chains start in the less likely one of two modes
PARAMS = {"v": jnp.full(4, -2.0), "h": jnp.full(3, -3.0), "v:h": jnp.full((4, 3), 1.6)}
START = {"v": np.zeros(4, np.float32), "h": np.zeros(3, np.float32)}
PAIRS, LAG, SWEEPS = 1000, 2, 200


class Paths(NamedTuple):
    """Energies of draws, computed anew from the draws themselves."""

    leading: np.ndarray
    """Of X_t for t = LAG + 1, LAG + 2, ..., a row a pair."""
    following: np.ndarray
    """Of Y_{t - LAG}."""
    time: np.ndarray

    def x(self, pair: int, t: int) -> float:
        return self.leading[pair, t - LAG - 1]

    def y(self, pair: int, t: int) -> float:
        return self.following[pair, t - 1]


@pytest.fixture(scope="module")
def pairs() -> MCMC:
    mcmc = MCMC(
        ebmpp.MaximalCoupling(GRAPH, lag=LAG),
        num_warmup=0,
        num_samples=SWEEPS,
        num_chains=PAIRS,
        chain_method="vectorized",
        progress_bar=False,
    )
    init = {b: np.broadcast_to(x, (PAIRS, *x.shape)) for b, x in START.items()}
    mcmc.run(jax.random.key(1), PARAMS, init_params=init, extra_fields=("y",))
    return mcmc


@pytest.fixture(scope="module")
def tree(pairs: MCMC) -> xr.DataTree:
    return ebmpp.to_datatree(pairs)


@pytest.fixture(scope="module")
def paths(pairs: MCMC) -> Paths:
    weights = {b: np.asarray(w, float) for b, w in PARAMS.items()}

    def energy(x: dict) -> np.ndarray:
        v, h = (np.asarray(x[b], float) for b in ("v", "h"))
        return -(v @ weights["v"] + h @ weights["h"] + np.einsum("...i,ij,...j", v, weights["v:h"], h))

    x, y = pairs.get_samples(group_by_chain=True), pairs.get_extra_fields(group_by_chain=True)["y"]
    return Paths(energy(x), energy(y), np.asarray(pairs.last_state.meeting_time))


def average(paths: Paths, pair: int, k: int, m: int) -> float:
    """H_{k:m} of one pair: the mean over s = k, ..., m of f(X_s) and its corrections."""
    total = 0.0
    for s in range(k, m + 1):
        total += paths.x(pair, s)
        t = s + LAG
        while t < paths.time[pair]:
            total += paths.x(pair, t) - paths.y(pair, t - LAG)
            t += LAG
    return total / (m - k + 1)


def energy(x: dict) -> jax.Array:
    """At module level: the engine compiles for each function anew."""
    return GRAPH.energy(PARAMS, x)


def estimate(k: int = 1, m: int = 1, lag: int = 1, **options: Any) -> UnbiasedEstimate:
    given = {"num_pairs": 4000, "num_slots": 8, "rng_key": jax.random.key(2)} | options
    init = {b: jnp.asarray(x) for b, x in START.items()}
    return ebmpp.unbiased_expectation(GRAPH, PARAMS, energy, k=k, m=m, lag=lag, init=init, **given)


def product(est: UnbiasedEstimate) -> float:
    """Cost times variance of one pair, as they came out."""
    return float(est.cost.mean() * est.standard_error**2 * len(est.met))


# -- measured --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_variance_and_cost_are_those_of_the_estimator(tree: xr.DataTree, paths: Paths) -> None:
    table = ebmpp.diagnostics.cost_times_variance(tree)
    assert table.attrs == {"lag": LAG, "variance": "measured"}
    assert table.k.values.min() == LAG + 1  # the draws begin there
    assert len(table.k) > 3 and table.extra.values[0] == 0
    some = slice(0, None, 4)
    for k in table.k.values[::2]:
        for extra in table.extra.values[some]:
            cell, m = table.sel(k=k, extra=extra), k + extra
            cost = np.mean([max(m, t) + t - LAG for t in paths.time])
            assert cell.cost.item() == pytest.approx(cost)
            if m > LAG + SWEEPS:
                assert np.isinf(cell.variance)
                continue
            h = [average(paths, pair, k, m) for pair in range(PAIRS)]
            assert cell.variance.item() == pytest.approx(np.var(h, ddof=1), rel=1e-4)
    np.testing.assert_allclose(table.inefficiency, table.cost * table.variance)


@pytest.mark.parametrize(("k", "m"), [(3, 3), (3, 5), (4, 30)])
def test_averages_of_the_paths_are_unbiased(paths: Paths, k: int, m: int) -> None:
    states, weights, _ = enumerate_numpy(GRAPH, PARAMS)
    exact = sum(w * numpy_energy(GRAPH, PARAMS, x) for x, w in zip(states, weights, strict=True))
    assert_rows_law([average(paths, pair, k, m) for pair in range(PAIRS)], exact)
    with pytest.raises(AssertionError, match="standard error"):  # the corrections are needed
        assert_rows_law([np.mean([paths.x(p, t) for t in range(k, m + 1)]) for p in range(PAIRS)], exact)


def test_the_suggestion_is_the_cheapest_of_the_good_ones(tree: xr.DataTree) -> None:
    table = ebmpp.diagnostics.cost_times_variance(tree)
    k, m = suggested = ebmpp.diagnostics.suggest_k_m(tree)
    assert suggested == (suggested.k, suggested.m)
    assert LAG < k <= m <= LAG + SWEEPS
    chosen = table.sel(k=k, extra=m - k)
    best = float(table.inefficiency.min())
    assert float(chosen.inefficiency) <= 1.1 * best
    assert (table.inefficiency.where(table.cost < float(chosen.cost)).fillna(np.inf) > 1.1 * best).all()


@pytest.mark.slow
def test_the_suggestion_pays(tree: xr.DataTree) -> None:
    """In the engine, with other pairs than those that suggested it."""
    plain = product(estimate())
    k, m = ebmpp.diagnostics.suggest_k_m(tree)
    assert product(estimate(k, m, LAG)) < plain / 3
    modelled = estimate()
    assert product(estimate(*ebmpp.diagnostics.suggest_k_m(modelled))) < plain / 3


def test_clamped_rows_are_pairs_too(tree: xr.DataTree) -> None:
    """Pairs in rows of half as many chains are the same pairs."""
    flat = tree["meeting"].to_dataset()
    columns = {}
    for name, column in flat.data_vars.items():
        values = column.values
        if column.dims == ("chain", "sweep"):
            folded = values.reshape(PAIRS // 2, 2, -1).swapaxes(1, 2)
            columns[name] = ["chain", "sweep", "row"], folded
        elif column.dims == ("chain",):
            columns[name] = ["chain", "row"], values.reshape(-1, 2)
        else:
            columns[name] = values
    rows = xr.Dataset(columns, {"sweep": flat.sweep.values})
    made = ebmpp.diagnostics.cost_times_variance(xr.DataTree.from_dict({"meeting": rows}))
    xr.testing.assert_allclose(made, ebmpp.diagnostics.cost_times_variance(tree))


# -- modelled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, 5])
def test_an_estimate_has_a_modelled_variance(lag: int) -> None:
    est = estimate(lag=lag)
    for source in (est, ebmpp.to_datatree(est)):
        table = ebmpp.diagnostics.cost_times_variance(source)
        assert table.attrs == {"lag": lag, "variance": "modelled"}
        assert np.isfinite(table.variance).all() and (table.variance > 0).all()
        assert (table.variance.diff("extra") < 1e-12).all()
        assert (table.variance.diff("k").sel(extra=0) < 1e-12).all()
        assert (table.cost.diff("extra") >= 0).all() and (table.cost.diff("k") >= 0).all()
        # far out nothing is left but the two chains' sweeps
        far = table.isel(k=-1, extra=-1)
        assert far.cost.item() == pytest.approx(int(far.k + far.extra) + est.meeting_time.mean() - lag)
        k, m = ebmpp.diagnostics.suggest_k_m(source)
        assert 0 < k <= m
        chosen = table.inefficiency.sel(k=k, extra=m - k)
        assert chosen < table.inefficiency.sel(extra=0).min()


def test_pairs_that_meet_at_once_need_no_burn_in() -> None:
    group = xr.Dataset({"meeting_time": ("chain", [1, 1, 1]), "met": ("chain", [True] * 3), "lag": 1})
    assert ebmpp.diagnostics.suggest_k_m(xr.DataTree.from_dict({"meeting": group})) == (1, 1)


# -- refused ---------------------------------------------------------------------------------------


def test_unmet_pairs_are_refused(tree: xr.DataTree) -> None:
    with pytest.warns(UserWarning, match="biased"):
        cut = estimate(max_sweeps=4, unmet="drop")
    group = tree["meeting"].to_dataset()
    group["met"] = group["met"].copy(data=np.arange(PAIRS) > 2)
    message = f"{cut.num_unmet} of 4000 pairs are unmet"
    for source, told in (
        (cut, message),
        (ebmpp.to_datatree(cut), message),
        (xr.DataTree.from_dict({"meeting": group}), f"3 of {PAIRS} pairs are unmet"),
    ):
        for refuses in (ebmpp.diagnostics.cost_times_variance, ebmpp.diagnostics.suggest_k_m):
            with pytest.raises(ValueError, match=told):
                refuses(source)


def test_thinned_runs_and_trees_without_pairs_are_refused(tree: xr.DataTree) -> None:
    group = tree["meeting"].to_dataset().isel(sweep=slice(0, None, 2))
    with pytest.raises(ValueError, match="the run was thinned"):
        ebmpp.diagnostics.suggest_k_m(xr.DataTree.from_dict({"meeting": group}))
    with pytest.raises(ValueError, match="no 'meeting': run a coupled kernel"):
        ebmpp.diagnostics.suggest_k_m(xr.DataTree())
    none = xr.Dataset({"meeting_time": ("chain", np.zeros(0)), "met": ("chain", np.zeros(0, bool)), "lag": 1})
    with pytest.raises(ValueError, match="0 of 0 pairs"):
        ebmpp.diagnostics.suggest_k_m(xr.DataTree.from_dict({"meeting": none}))
