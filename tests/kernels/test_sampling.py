# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tests kernels/sampling.py: independent draws of a model by one call."""

import itertools

import networkx as nx
import numpy as np
import pytest
import zoo

import jax

import ebmpp
from ebmpp.errors import ArgumentError, StateError
from helpers import assert_rows_law, parameter_sets, random_params

V = np.array([[1, -1, 1], [-1, -1, 1]])


def draw(num_samples: int, **options) -> dict:
    return ebmpp.sample(
        zoo.graph("spin"),
        zoo.params("spin"),
        num_samples,
        rng_key=zoo.KEY,
        num_sweeps=options.pop("num_sweeps", 20),
        progress_bar=False,
        **options,
    )


def test_draws_have_the_moments_of_the_model() -> None:
    draws = draw(2000)
    exact = zoo.moments("spin")
    for block, values in draws.items():
        assert_rows_law(values, exact[block], comparisons=5)


def test_clamped_rows_have_draws_of_their_posteriors() -> None:
    latents = draw(1000, v=V)["h"]
    assert latents.shape == (1000, 2, 2)
    graph = zoo.graph("spin")
    exact = graph.conditional(zoo.params("spin"), {"v": V}, "h").mean
    assert_rows_law(latents, exact)


@pytest.mark.parametrize("clamped", [{}, {"v": V}])
def test_parameter_sets_have_the_draws_of_single_calls(clamped) -> None:
    graph = zoo.graph("spin")
    stacked, sets = parameter_sets(graph)
    options = {"num_sweeps": 6, "progress_bar": False, **clamped}
    draws = ebmpp.sample(graph, stacked, 4, rng_key=zoo.KEY, **options)
    for i, params in enumerate(sets):
        key = jax.random.fold_in(zoo.KEY, i)
        single = ebmpp.sample(graph, params, 4, rng_key=key, **options)
        for block, values in single.items():
            np.testing.assert_array_equal(draws[block][i], values)
    starts = {block: values[:, :, 0] for block, values in draws.items() if clamped}
    restarted = ebmpp.sample(graph, stacked, 4, rng_key=zoo.KEY, init=draws, **options)
    assert not starts or restarted["h"].shape == (3, 4, 2, 2)


EXCLUSION = [[0.0, 0.0], [0.0, -np.inf]]


def test_parameter_sets_start_at_possible_states() -> None:
    """The hard-core gas on a ring, at three activities, against enumeration."""
    ring = nx.cycle_graph(5)
    table = ebmpp.Table("x", units=ring, log_weights=EXCLUSION)
    gas = ebmpp.FactorGraph({"x": ebmpp.Bernoulli(5)}, factors=[ebmpp.Bias("x"), table])
    biases = np.log([0.5, 1.0, 4.0], dtype=np.float32)
    sets = gas.init(zoo.KEY) | {"x": np.repeat(biases[:, None], 5, 1)}
    options = {"rng_key": zoo.KEY, "num_sweeps": 40, "progress_bar": False}
    draws = np.asarray(ebmpp.sample(gas, sets, 2000, **options)["x"])
    states = np.array(list(itertools.product([0, 1], repeat=5)))
    possible = states[~(states & np.roll(states, 1, axis=1)).any(1)]
    numbers = possible.sum(1)
    for values, bias in zip(draws, biases):
        assert not (values * np.roll(values, 1, axis=1)).any()
        exact = np.average(numbers, weights=np.exp(bias * numbers))
        assert_rows_law(values.sum(1), exact, comparisons=3)
    modes = ebmpp.local_search(gas, sets, rng_key=zoo.KEY, num_rows=30).state["x"]
    np.testing.assert_array_equal(modes.sum(-1), np.repeat([[0], [2], [2]], 30, 1))
    starts = draws[:, :20].copy()
    starts[1, 3] = 1
    with pytest.raises(StateError, match="got 1 of 20 without"):
        ebmpp.sample(gas, sets, 20, init={"x": starts}, **options)


def test_a_second_call_with_other_params_compiles_nothing(caplog) -> None:
    graph = zoo.graph("spin")
    options = {"rng_key": zoo.KEY, "num_sweeps": 6, "progress_bar": False}
    for seed in range(2):
        params = random_params(graph, seed)
        with jax.log_compiles(bool(seed)):
            ebmpp.sample(graph, params, 4, **options)
    assert "Compiling" not in caplog.text


def test_observed_units_keep_their_values() -> None:
    observed = ebmpp.Observed(V, np.array([True, False, True]))
    draws = draw(30, v=observed)
    assert draws["v"].shape == (30, 2, 3)
    np.testing.assert_array_equal(
        draws["v"][..., [0, 2]], np.tile(V[:, [0, 2]], (30, 1, 1))
    )


def test_chains_that_still_move_are_reported() -> None:
    """From all units up, against strong fields, a few sweeps do not suffice."""
    graph = ebmpp.layered(v=ebmpp.Spin(30), h=ebmpp.Spin(30))
    params = jax.tree.map(np.zeros_like, graph.init(zoo.KEY)) | {
        "v": np.full(30, -0.1, np.float32),
        "v:h": np.full((30, 30), 0.033, np.float32),
    }
    up = {"v": np.ones((200, 30)), "h": np.ones((200, 30))}
    with pytest.warns(UserWarning, match="still changes after 1 sweeps"):
        ebmpp.sample(
            graph,
            params,
            200,
            rng_key=zoo.KEY,
            num_sweeps=2,
            init=up,
            progress_bar=False,
        )


def test_chains_that_stay_at_their_starts_are_reported() -> None:
    """A steep energy of independent fields, against quadrature of a single one."""

    def quartic(strength: jax.Array, phi: jax.Array) -> jax.Array:
        return strength * (phi**4).sum()

    factor = ebmpp.Factor("phi", energy=quartic, init=7.0, affine=False)
    graph = ebmpp.FactorGraph({"phi": ebmpp.Gaussian(144)}, factors=[factor])
    points = np.linspace(-3, 3, 6001)
    exact = np.average(points**2, weights=np.exp(-(points**2) / 2 - 7 * points**4))

    def squares(step_size: float | None = None) -> np.ndarray:
        moves = ebmpp.moves.informed_sweep(graph, step_size=step_size)
        options = {"rng_key": zoo.KEY, "num_sweeps": 100, "progress_bar": False}
        params = {"phi": np.float32(7)}
        draws = ebmpp.sample(graph, params, 100, moves=moves, **options)["phi"]
        return np.asarray(draws, float) ** 2

    with pytest.warns(UserWarning) as warned:
        stuck = squares()
    messages = [str(w.message) for w in warned]
    assert any("100 of 100 chains accept less than 5%" in m for m in messages)
    assert stuck.mean() > 5 * exact
    assert_rows_law(squares(0.05).mean(1), exact)


def test_an_odd_number_of_sweeps_is_refused() -> None:
    with pytest.raises(ArgumentError, match="must be even, got 5.*Give 6"):
        draw(3, num_sweeps=5)
