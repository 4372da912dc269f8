# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Kernels whose params change: rates-FPCD, rates-herding, sample penalisation.

Tests contrib/estimators/fpcd.py, contrib/mean_statistics.py, contrib/rates.py.
"""

from functools import cache
import pickle

from mcmc_tools import assert_same, run_mcmc, scan_kernel, strong_params
from metropolis_tools import Law
import numpy as np
import pytest
import zoo

import jax

import ebmpp
from ebmpp import BlockedGibbs, Observed, Spin
from ebmpp.contrib import RatesFPCD, RatesHerding, SamplePenalization, data_statistics
from ebmpp.errors import IntractableError, ParameterError, StateError

pytestmark = pytest.mark.nightly

DATA = np.array([[1, 0, 0, 1], [1, 1, 1, 0], [1, 1, 0, 0]], np.float32)


@cache
def rates():
    return jax.device_get(data_statistics(zoo.graph("rbm"), strong_params(), DATA))


def make(kernel, **options):
    return kernel(zoo.graph("rbm"), **options)


@pytest.mark.parametrize("k", [1, 3])
def test_rate_0_gives_blocked_gibbs_bit_by_bit(k):
    kernel = make(RatesFPCD, rate=0, decay=0.5, k=k)
    _, z, _ = scan_kernel(kernel, 40, strong_params(), rates(), num_chains=3)
    _, expected, _ = scan_kernel(
        make(BlockedGibbs), 40 * k, strong_params(), num_chains=3
    )
    assert_same(z, {b: x[k - 1 :: k] for b, x in expected.items()})


def test_fast_weights_follow_their_recursion():
    """fast <- decay fast + rate (rates - statistics), from the draws alone."""
    rate, decay = 0.2, 0.9
    state, z, _ = scan_kernel(
        make(RatesFPCD, rate=rate, decay=decay), 30, strong_params(), rates()
    )
    fast = {name: np.zeros(np.shape(r)) for name, r in rates().items()}
    for v, h in zip(z["v"], z["h"], strict=True):
        size = np.sqrt(sum((f**2).sum() for f in fast.values()))
        statistics = {"v": v, "h": h, "v:h": np.outer(v, h)}
        fast = {
            name: decay * f + rate * (rates()[name] - statistics[name])
            for name, f in fast.items()
        }
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.fast, fast
    )
    # sample penalisation is FPCD with rates of 0
    zeros = jax.tree.map(np.zeros_like, strong_params())
    penalised = scan_kernel(
        make(SamplePenalization, rate=rate, decay=decay), 30, strong_params()
    )[1]
    assert_same(
        penalised,
        scan_kernel(
            make(RatesFPCD, rate=rate, decay=decay), 30, strong_params(), zeros
        )[1],
    )
    norm = np.sqrt(sum((np.asarray(p) ** 2).sum() for p in strong_params().values()))
    np.testing.assert_allclose(state.drift, size / norm, rtol=1e-4)


def test_draws_leave_a_mode_in_which_gibbs_stays():
    graph = ebmpp.layered(v=Spin(6), h=Spin(4))
    params = {"v": np.zeros(6), "h": np.zeros(4), "v:h": np.full((6, 4), 1.5)}
    moments = data_statistics(graph, params, np.array([[1.0] * 6, [-1.0] * 6]))

    def num_changes(rate):
        _, z, _ = scan_kernel(RatesFPCD(graph, rate=rate), 400, params, moments)
        return (np.diff(np.sign(z["v"].sum(-1))) != 0).sum()

    assert num_changes(0.0) == 0 and num_changes(0.5) > 3


def test_errors_of_herding_decrease_as_one_over_t():
    """T times the error stays bounded: it is the fast weights over the rate."""
    rate, times = 0.2, (64, 256, 1024, 4096)
    state, z, _ = scan_kernel(
        make(RatesHerding, rate=rate), times[-1], strong_params(), rates()
    )
    errors = {
        n: s - rates()[n]
        for n, s in {**z, "v:h": np.einsum("ti,tj->tij", z["v"], z["h"])}.items()
    }
    scaled = [max(np.abs(e[:t].sum(0)).max() for e in errors.values()) for t in times]
    # a rate of 1/sqrt(T) would make them grow by a factor of 8
    assert max(scaled) < 2 * scaled[0]
    for name, error in errors.items():
        # sums in float32
        np.testing.assert_allclose(-rate * error.sum(0), state.fast[name], atol=0.02)
    assert len(np.unique(z["v"], axis=0)) > 3


def test_herding_is_deterministic_and_begins_at_a_mode():
    start = {"v": np.ones(4, np.float32), "h": np.zeros(3, np.float32)}
    first, second = (
        scan_kernel(
            make(RatesHerding),
            50,
            strong_params(),
            rates(),
            key=seed,
            init_params=start,
        )[1]
        for seed in (0, 1)
    )
    assert_same(first, second)
    # a draw of the model, as nothing has changed yet
    x = {b: v[0] for b, v in first.items()}
    for b in x:
        np.testing.assert_array_equal(
            zoo.graph("rbm").mode(strong_params(), x, b), x[b]
        )


def test_observed_units_stay_and_clamped_rows_have_their_own_fast_weights():
    with pytest.raises(StateError, match="clamped"):
        clamped = {"v": np.zeros(4), "h": np.zeros(3)}
        make(RatesFPCD).init(zoo.KEY, 0, None, (strong_params(), rates()), clamped)
    observed = Observed(
        np.array([1.0, 0.0, 0.0, 0.0]), np.array([True, True, False, False])
    )
    _, z, _ = scan_kernel(
        make(RatesHerding, rate=1.0),
        30,
        strong_params(),
        rates(),
        clamped={"v": observed},
    )
    assert (z["v"][:, :2] == [1, 0]).all() and len(np.unique(z["v"][:, 2:], axis=0)) > 1
    kernel, v = (
        make(RatesFPCD, rate=0.5, decay=0.9),
        np.array([[1, 0, 1, 0], [1, 1, 1, 1]], np.float32),
    )
    state, z, _ = scan_kernel(kernel, 20, strong_params(), rates(), clamped={"v": v})
    single, expected, _ = scan_kernel(
        kernel, 20, strong_params(), rates(), clamped={"v": v[0]}
    )
    np.testing.assert_array_equal(z["h"][:, 0], expected["h"])
    np.testing.assert_allclose(state.fast["v:h"][0], single.fast["v:h"], rtol=1e-5)
    assert state.fast["v:h"].shape == (2, 4, 3) and state.drift.shape == (2,)


def test_output_says_that_draws_are_not_of_the_model():
    for kernel in (make(RatesFPCD), make(RatesHerding), make(SamplePenalization)):
        assert "not of the model" in repr(kernel)
        assert pickle.loads(pickle.dumps(kernel)).rate == kernel.rate
    mcmc = run_mcmc(
        make(SamplePenalization, rate=0.1), strong_params(), extra_fields=("drift",)
    )
    tree = ebmpp.to_datatree(mcmc)
    assert "not of the model" in tree.attrs["inference_caveat"]
    assert tree["sample_stats"]["drift"].values[0, -1] > 0
    assert mcmc.sampler.get_diagnostics_str(mcmc.last_state).startswith(
        "8 steps, not of the model"
    )


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        (RatesFPCD, {"rate": -1.0}, "rate.*-1.0"),
        (RatesHerding, {"rate": np.inf}, "rate.*inf"),
        (RatesFPCD, {"decay": 1.5}, "1.5"),
        (RatesFPCD, {"k": 0}, "k .*0"),
        (SamplePenalization, {"decay": 1}, "below 1"),
    ],
)
def test_wrong_options_are_refused(kernel, options, message):
    with pytest.raises(ValueError, match=message):
        make(kernel, **options)


@pytest.mark.parametrize(
    ("kernel", "change", "message"),
    [
        (RatesFPCD, None, "got 1"),
        (SamplePenalization, {}, "got 2"),
        (RatesFPCD, {"h": None}, "'h'"),
        (RatesHerding, {"v": np.full(4, np.nan)}, "rates.*finite"),
        (RatesHerding, {"v": np.zeros(3)}, r"rates.*\(3,\)"),
    ],
)
def test_wrong_rates_are_refused(kernel, change, message):
    extra = (
        ()
        if change is None
        else ({n: r for n, r in (rates() | change).items() if r is not None},)
    )
    with pytest.raises(ParameterError, match=message):
        make(kernel).init(zoo.KEY, 0, None, (strong_params(), *extra), {})


def test_rates_are_weighted_posterior_means_over_rows(monkeypatch):
    graph, params = zoo.graph("categorical"), strong_params("categorical")
    rows, weights = np.array([[0, 1], [2, 2], [1, 0]]), np.array([1.0, 2.0, 3.0])
    model, exact = Law(graph, params), dict.fromkeys(params, 0.0)
    for row, weight in zip(rows, weights / weights.sum(), strict=True):
        p = model.target * [(x["v"] == row).all() for x in model.states]
        h = p / p.sum() @ np.array([x["h"] for x in model.states])
        v = (row[:, None] == np.arange(3)).astype(float)
        exact = {
            n: exact[n] + weight * t
            for n, t in (("v", v), ("h", h), ("v:h", np.einsum("ij,k", v, h)))
        }
    for chunk in (100, 2):
        monkeypatch.setattr("ebmpp.contrib.mean_statistics._CHUNK", chunk)
        result = data_statistics(graph, params, rows, weights=weights)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), result, exact
        )


def test_rates_of_a_deep_graph_need_a_posterior():
    deep, params, rows = zoo.graph("deep"), strong_params("deep"), np.ones((2, 3))
    with pytest.raises(IntractableError, match="MeanField"):
        data_statistics(deep, params, rows)
    field = ebmpp.MeanField(30)
    result = data_statistics(deep, params, rows, posterior=field)
    means = field.statistics(deep, params, {"v": np.ones((1, 3), np.float32)})
    np.testing.assert_allclose(
        result["h1:h2"], np.outer(means["h1"][0], means["h2"][0]), rtol=1e-4
    )
