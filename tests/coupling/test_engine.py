# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The engine of coupled pairs: unbiased totals, exact meeting times, and what a pair may depend on.

Tests coupling/engine.py, coupling/slots.py.
"""

import itertools
from typing import Any

import numpy as np
from pair_tools import (
    JOBS,
    RUNS,
    assert_unbiased,
    graph_of,
    in_time,
    meeting_tail,
    params_of,
    run,
    starts_of,
)
import pytest
from ucd_tools import flat, key

import jax
import jax.numpy as jnp

from ebmpp import exact
from ebmpp.core import backend
from ebmpp.coupling import engine, slots
from ebmpp.coupling.accumulators import EnergyGradient, Function
from ebmpp.coupling.engine import Window, run_pairs
from ebmpp.moves.couplings import resolve
from ebmpp.moves.sweeps import mixture_pool, resolve_moves
from ebmpp.moves.target import Target
from helpers import assert_law, often

WINDOWS = [(1, 1, 1), (2, 5, 1), (2, 6, 3), (5, 5, 2)]
COUPLINGS = (None, "maximal_independent", "common")


@pytest.mark.parametrize("coupling", often(COUPLINGS, None))
def test_total_is_unbiased_for_every_window(coupling: str | None) -> None:
    assert_unbiased("tiny", coupling, WINDOWS)


GRAPHS = (
    "spin",
    "categorical",
    "binomial",
    "gaussian",
    "learned",
    "poisson",
    "deep",
    "gated",
)


@pytest.mark.nightly
@pytest.mark.parametrize("name", often(GRAPHS, "gated"))
def test_total_is_unbiased_for_every_family_and_graph(name: str) -> None:
    assert len(graph_of(name).layers) == 2 + (name == "gated")
    assert_unbiased(name, None, [(1, 1, 1), (2, 6, 3)])


@pytest.mark.parametrize("coupling", often(COUPLINGS, None, "common"))
def test_meeting_times_have_the_exact_distribution(coupling: str | None) -> None:
    exact = meeting_tail(resolve(coupling, graph_of("tiny").layers), 8)
    tau = np.concatenate(
        [run(seed=seed, coupling=coupling).meeting_time for seed in range(RUNS)]
    )
    tail = (tau[:, None] > np.arange(1, 9)).mean(0)
    assert exact[0] > 0.5 and exact[3] > 1e-3
    assert_law(tail, exact, np.sqrt(exact * (1 - exact) / len(tau)), 4 * len(exact))


@pytest.mark.nightly
def test_acceptance_is_that_of_a_fixed_number_of_sweeps() -> None:
    """Pairs that meet stop proposing; the share of all their proposals was 0.34 in
    place of 0.23."""
    graph, count = graph_of("tiny"), 4000
    params = {name: 2 * value for name, value in params_of("tiny").items()}
    states, probs = jax.device_get(exact.probabilities(graph, params))
    index = np.random.default_rng(0).choice(
        len(probs), count, p=probs.astype(float) / probs.sum(dtype=float)
    )
    starts = {b: jnp.asarray(v[index]) for b, v in states.items()}
    rows = {b: np.ones((1, 2), np.float32) for b in states}
    pool = mixture_pool(graph, params, rows, rng_key=jax.random.key(0))
    moves = resolve_moves(graph, "mixture")
    (block,) = pool.eta
    prob = 1 / (1 + np.exp(-np.asarray(pool.eta[block][0], float)))
    values = np.array(list(itertools.product([0, 1], repeat=2)))
    proposal = np.where(values == 1, prob, 1 - prob).prod(1)
    marginal = np.array(
        [probs[(states[block] == v).all(1)].sum(dtype=float) for v in values]
    )
    weight = marginal / proposal
    truth = marginal @ np.minimum(1, weight / weight[:, None]) @ proposal
    window = Window(*(np.int32(n) for n in (1, 1, 1, 0)))
    target = Target(graph, params, pool=pool)
    result = run_pairs(
        target, moves, EnergyGradient(), 16, starts, starts, key(0), window
    )
    assert 0.2 < truth < 0.8
    assert_law(result.acceptance, truth, np.sqrt(truth * (1 - truth) / count), 1)


def assert_same(first: Any, second: Any) -> None:
    """Meeting times and totals are equal; totals are whole numbers."""
    np.testing.assert_array_equal(first.meeting_time, second.meeting_time)
    np.testing.assert_array_equal(flat(first.total), flat(second.total))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "name", "value", "num_slots"),
    [
        (slots, "_CHUNK", slots._CHUNK, 5),
        (slots, "_CHUNK", 2, 17),
        (engine, "_READY", 32, 18),
        (backend, "accelerated", lambda: True, 19),
    ],
)
def test_results_do_not_depend_on_slots_and_their_stages(
    module: Any, name: str, value: Any, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = run(seed=5, window=(2, 6, 3))
    # no program of so many slots has been traced before
    monkeypatch.setattr(module, name, value)
    assert_same(usual, run(seed=5, window=(2, 6, 3), num_slots=num_slots))


@pytest.mark.parametrize("size", [1, 3, 8, 9, 64, 100])
def test_stages_end_with_every_pair(size: int) -> None:
    sizes = slots.slot_loops(size)
    assert sizes[0].size == size and sizes[-1].until == 0
    for before, after in itertools.pairwise(sizes):
        assert before.until <= after.size and after.size % after.chunk == 0


def statistics(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Minus dE/dparams of one state of the tiny graph, and a constant."""
    return {
        "a": x["a"],
        "b": x["b"],
        "a:b": jnp.outer(x["a"], x["b"]),
        "one": jnp.ones(()),
    }


@pytest.mark.nightly
def test_sums_of_a_function_match_the_energy_gradient() -> None:
    graph = graph_of("tiny")
    state = tuple((b, f.shape, str(f.dtype)) for b, f in graph.families.items())
    function = Function(statistics, state)
    for window in WINDOWS[::2]:
        separate, total = (
            run(seed=2, window=window, accumulator=function),
            run(seed=2, window=window),
        )
        np.testing.assert_array_equal(separate.meeting_time, total.meeting_time)
        for name, value in total.total.items():
            assert separate.total[name].shape[0] == JOBS
            np.testing.assert_array_equal(-separate.total[name].sum(0), value)
        # the weights of a pair sum to m - k + 1
        np.testing.assert_array_equal(
            separate.total["one"], window[1] - window[0] + 1.0
        )


@pytest.mark.nightly
def test_pairs_depend_on_their_number_alone_and_weights_scale_them() -> None:
    graph, jobs = graph_of("tiny"), 50
    state = tuple((b, f.shape, str(f.dtype)) for b, f in graph.families.items())
    window = Window(*(np.int32(n) for n in (2, 6, 3, 0)))
    weights = np.linspace(0, 2, jobs, dtype=np.float32)
    statics = resolve_moves(graph, None), Function(statistics, state), 16
    x = starts_of("tiny", jobs)
    result = run_pairs(
        Target(graph, params_of("tiny")), *statics, x, None, key(2), window, weights
    )
    plain = run(seed=2, window=(2, 6, 3), accumulator=Function(statistics, state))
    np.testing.assert_array_equal(result.meeting_time, plain.meeting_time[:jobs])
    for name, total in result.total.items():
        expected = (plain.total[name][:jobs].T * weights).T
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)


def test_first_two_windows_have_equal_totals_from_equal_starts() -> None:
    zero, first, second = (run(seed=3, window=(k, k, 1)) for k in (0, 1, 2))
    assert_same(zero, first)
    assert (flat(second.total) != flat(first.total)).any()
    np.testing.assert_array_equal(zero.meeting_time, second.meeting_time)


def test_a_limit_flags_unmet_pairs_and_leaves_the_others_unchanged() -> None:
    free = run(seed=4).meeting_time
    limited = run(seed=4, max_sweeps=3).meeting_time
    assert (free > 3).any() and (free <= 3).any()
    np.testing.assert_array_equal(limited, np.where(free > 3, -1, free))
    # pairs that have met continue to the end of the window, however far it is
    last, window = int(free.max()), (1, int(free.max()) + 9, 1)
    assert_same(run(seed=4, window=window), run(seed=4, window=window, max_sweeps=last))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["a", "b", "a:b"])
def test_params_that_are_not_finite_leave_every_pair_unmet(
    name: str, value: float
) -> None:
    array = np.array(params_of("tiny")[name])
    array[(0,) * array.ndim] = value
    params = {**params_of("tiny"), name: jnp.asarray(array)}
    zeros = {b: jnp.zeros((JOBS, 2)) for b in ("a", "b")}
    for starts in (starts_of("tiny"), zeros):
        result = in_time(lambda starts=starts: run(params=params, starts=starts))
        np.testing.assert_array_equal(result.meeting_time, -1)
