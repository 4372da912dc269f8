# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The start-end test of pairs, the pilot that chooses windows, and starts given a part of a state.

Tests coupling/overlap.py.
"""

from typing import Any

import networkx as nx
import numpy as np
import pytest
from ucd_tools import SCALES, exact_means, flat, problem
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, FactorGraph, Spin, layered
from ebmpp.coupling.expectation import UnbiasedEstimate
from ebmpp.coupling.overlap import THRESHOLD, overlap
from ebmpp.coupling.slots import check_window
from ebmpp.errors import UnmetError
from helpers import assert_rows_law, nightly, random_params

FIELDS = np.array([-1, -0.5, 0, 0.5, 1, 1.5], np.float32)
K6 = FactorGraph.from_networkx(nx.complete_graph(6), Bernoulli, shared=True)
#: energy 50 (sum - 3)^2: chains stay in one of 20 states
CONSERVED = {"x": FIELDS + 250, "x:x": jnp.float32(-100.0)}


def bits(x: dict[str, jax.Array]) -> jax.Array:
    return x["x"]


def conserved(**options: Any) -> UnbiasedEstimate:
    options = {"rng_key": zoo.KEY, "num_pairs": 100, "k": 100, "m": 200, **options}
    return ebmpp.unbiased_expectation(K6, CONSERVED, bits, **options)


def test_pairs_that_meet_in_one_of_many_modes_are_reported() -> None:
    with pytest.warns(UserWarning, match="overlap z"):
        result = conserved()
    assert (
        result.met.all()
        and result.meeting_time.max() <= 3
        and result.overlap > 2 * THRESHOLD
    )
    assert (
        f"overlap z {result.overlap:.1f}" in repr(result)
        and "overlap" in result._repr_html_()
    )
    with pytest.raises(UnmetError):
        conserved(independent_starts=True, max_sweeps=300)
    loose = {"x": FIELDS - 1, "x:x": jnp.float32(0.3)}
    result = ebmpp.unbiased_expectation(
        K6, loose, bits, rng_key=zoo.KEY, num_pairs=100, k=100, m=200
    )
    assert abs(result.overlap) < THRESHOLD  # a warning would be an error


@pytest.mark.parametrize(
    "options",
    [{}, nightly({"independent_starts": True}), nightly({"num_pairs": 4})],
)
def test_chains_frozen_at_one_start_are_reported(options: dict[str, Any]) -> None:
    start = jnp.array([0, 0, 0, 1, 1, 1])
    with pytest.warns(UserWarning, match="where it started in all chains"):
        result = conserved(init={"x": start}, **options)
    assert np.isinf(result.overlap) and np.isnan(result.standard_error).all()
    np.testing.assert_array_equal(result.value, start)
    assert "not known" in repr(result)
    with pytest.warns(UserWarning, match="where it started in all chains"):
        ebmpp.tv_upper_bound(result, num_bootstrap=5)


@pytest.mark.nightly
def test_a_window_that_was_cut_is_named() -> None:
    graph = FactorGraph.from_networkx(nx.grid_2d_graph(6, 6), Spin, shared=True)
    params = {"x": jnp.zeros(36), "x:x": jnp.float32(0.3)}
    run = lambda limit: ebmpp.unbiased_expectation(
        graph,
        params,
        lambda x: x["x"].mean(),
        rng_key=zoo.KEY,
        num_pairs=100,
        max_sweeps=limit,
        unmet="drop",
        independent_starts=True,
    )
    with pytest.warns(UserWarning) as caught:
        result = run(25)
    text = " ".join(str(w.message) for w in caught)
    assert f"k={result.k}, m={result.m}, lag={result.lag}, where" in text
    assert abs(result.value) < 5 * result.standard_error < 1


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(SCALES))
def test_two_hundred_sound_runs_are_not_reported(name: str) -> None:
    graph, scale = problem(name)[0], SCALES[name]
    scores = []
    for seed in range(67):
        params, options = (
            random_params(graph, seed, scale=scale),
            {"num_pairs": 100, "max_sweeps": 10_000},
        )
        result = ebmpp.unbiased_expectation(
            graph, params, statistic, rng_key=jax.random.key(seed), **options
        )
        scores.append(result.overlap)
    assert np.nanmax(np.abs(scores)) < 4.5 and abs(np.nanmean(scores)) < 0.5


def statistic(x: dict[str, jax.Array]) -> jax.Array:
    return x["v"].astype(float).mean()


def zoo_means(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"v": x["v"], "h": x["h"]}


def test_scores_of_arrays() -> None:
    rng = np.random.default_rng(0)
    first = {"a": rng.integers(0, 2, (50, 3)), "b": rng.normal(size=(50, 2))}
    moved = {"a": rng.integers(0, 2, (50, 3)), "b": rng.normal(size=(50, 2))}
    assert overlap(first, first) > 2 * THRESHOLD and abs(overlap(first, moved)) < 3
    order = [
        overlap(first, {b: v[rng.permutation(50)] for b, v in moved.items()})
        for _ in range(300)
    ]
    assert abs(np.mean(order)) < 0.2 and 0.85 < np.std(order) < 1.15
    assert np.isnan(overlap(first, {b: np.zeros_like(v) for b, v in first.items()}))


@pytest.mark.nightly
def test_untested_pairs_have_no_score() -> None:
    graph, params, _ = problem("rbm")
    run = lambda **options: ebmpp.unbiased_expectation(
        graph, params, zoo_means, rng_key=zoo.KEY, **options
    )
    result = run(num_pairs=200, k=1, v=np.ones(4, np.float32))
    assert np.isnan(result.overlap)  # one layer: independent draws
    frozen = jax.tree.map(lambda a: a + 90, params)
    certain = ebmpp.unbiased_expectation(
        graph, frozen, zoo_means, rng_key=zoo.KEY, num_pairs=200, k=1
    )
    assert np.isnan(flat(certain.standard_error)).all()
    assert (flat(certain.value) == 1).all()
    assert "not known" in repr(certain)


def test_a_pilot_chooses_the_window_and_sound_runs_are_not_reported() -> None:
    graph, params, _ = problem("rbm")
    run = lambda key=zoo.KEY, **options: ebmpp.unbiased_expectation(
        graph, params, zoo_means, rng_key=key, num_pairs=200, **options
    )
    results = [run(jax.random.key(seed)) for seed in range(20)]
    scores = [r.overlap for r in results]  # a sound run that warns would be an error
    assert -3.5 < min(scores) < max(scores) < 3.5 and 0.5 < np.std(scores) < 1.6
    assert all(r.k == r.lag > 1 and r.m == 2 * r.lag for r in results)
    assert 0.9 < np.mean([(r.meeting_time <= 2 * r.lag).mean() for r in results]) < 1
    assert_rows_law(
        [flat(r.value) for r in results], flat(exact_means(graph, params)), 7
    )
    fixed = run(k=1)
    assert (fixed.k, fixed.m, fixed.lag) == (1, 1, 1) and results[0].standard_error[
        "v"
    ].max() < 0.03
    assert (run(lag=3).k, run(lag=3).m) == (1, 1) and run(m=4).lag == 1
    assert run(max_sweeps=400).lag == results[0].lag


@pytest.mark.parametrize(
    ("times", "limit", "lag"),
    [
        ([1] * 20, None, 1),
        ([3, 5, 8], None, 7),
        ([1] * 9 + [21], 30, 9),
        ([3, 5, -1], 9, 4),
        ([3] * 30 + [-1], 200, 2),
        ([-1, -1], 200, 100),
        ([-1], None, 1),
    ],
)
def test_windows_of_pilots(times: list[int], limit: int | None, lag: int) -> None:
    window, _ = check_window("test", None, None, None, limit).after(np.array(times))
    assert window[:3] == (lag, 2 * lag, lag)


@pytest.mark.nightly
def test_blocks_without_a_start_are_drawn_given_the_others() -> None:
    graph, params, _ = problem("rbm")
    rows = np.tile(np.float32([1, 0, 1, 1]), (2000, 1))
    keys = jax.random.split(zoo.KEY, len(rows))
    exact = graph.conditional(
        params, {"v": rows[0], "h": np.zeros(3, np.float32)}, "h"
    ).mean
    start = ebmpp.BlockedGibbs(graph).init(keys, 0, {"v": rows}, (params,), {}).z
    assert (np.asarray(start["v"]) == rows).all()
    assert_rows_law(start["h"], exact)
    init = lambda value: {"v": np.full((200, 4), value, np.float32)}
    run = lambda value: ebmpp.unbiased_expectation(
        graph, params, zoo_means, rng_key=zoo.KEY, num_pairs=200, k=1, init=init(value)
    )
    assert (run(0).meeting_time != run(1).meeting_time).any()


@pytest.mark.nightly
def test_deep_starts_follow_the_given_block() -> None:
    deep = layered(v=Spin(2), h1=Spin(2), h2=Spin(2), h3=Spin(2))
    params = jax.tree.map(jnp.zeros_like, deep.init(zoo.KEY))
    for factor, weight in (("v:h1", 80.0), ("h1:h2", 40.0), ("h2:h3", 20.0)):
        params[factor] = jnp.full((2, 2), weight)
    for sign in (-1, 1):
        state = ebmpp.BlockedGibbs(deep).init(
            zoo.KEY, 0, {"v": sign * jnp.ones(2)}, (params,), {}
        )
        assert all((np.asarray(x) == sign).all() for x in state.z.values())
