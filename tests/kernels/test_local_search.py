# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""local_search ends at states whose density no layer can raise.

Tests kernels/modes.py, moves/search.py.
"""

from functools import cache

from mcmc_tools import TWO_MODES, strong_params
from metropolis_tools import Law
import numpy as np
import pytest
import zoo

import jax

import ebmpp
from ebmpp import Bernoulli, Gaussian, Spin
from ebmpp.errors import StateError
from helpers import assert_law, assert_rows_law, parameter_sets


@cache
def model() -> Law:
    return Law(zoo.graph("deep"), strong_params("deep", 2.0))


def assert_modes(state: dict, fixed: dict) -> np.ndarray:
    """Assert that no layer can raise the probability of a row.

    :param fixed: masks, which broadcast to ``state``, of units that the search must not
        change.
    :return: the probability of each row.
    """
    states = {b: np.array([x[b] for x in model().states]) for b in state}
    values = []
    for row in range(len(state["v"])):
        equal = {b: states[b] == np.asarray(v[row]) for b, v in state.items()}
        (value,) = model().target[np.all([e.all(1) for e in equal.values()], axis=0)]
        for layer in zoo.graph("deep").layers:
            reachable = np.ones(len(model().states), bool)
            for b, e in equal.items():
                mask = np.broadcast_to(fixed.get(b, False), np.shape(state[b]))[row]
                reachable &= (e | ~(mask | (b not in layer))).all(1)
            assert model().target[reachable].max() <= value * 1.0001
        values.append(value)
    return np.array(values)


def search(graph, params, **options):
    return ebmpp.local_search(graph, params, **{"rng_key": zoo.KEY} | options)


@pytest.mark.parametrize("num_rows", [None, 5])
def test_parameter_sets_have_the_results_of_single_calls(num_rows):
    graph = zoo.graph("rbm")
    stacked, sets = parameter_sets(graph)
    init = np.arange(3 * 5 * 4).reshape(3, 5, 4) % 2
    modes = search(graph, stacked, init={"v": init}, num_rows=num_rows)
    assert modes.steps.shape == (3, 5)
    for i, params in enumerate(sets):
        key = jax.random.fold_in(zoo.KEY, i)
        single = search(graph, params, init={"v": init[i]}, rng_key=key)
        for block, values in single.state.items():
            np.testing.assert_array_equal(modes.state[block][i], values)
    latents = search(graph, stacked, v=init[0]).state["h"]
    assert latents.shape == (3, 5, 3)
    with pytest.raises(StateError, match=r"must be \(3,\) first, of sets, got \(5,\)"):
        search(graph, stacked, init={"v": init[0]})


def test_no_layer_can_raise_the_density_of_a_result():
    mode = search(zoo.graph("deep"), strong_params("deep", 2.0), num_rows=200)
    values = assert_modes(mode.state, {})
    assert (mode.steps >= 0).all() and len(np.unique(mode.steps)) > 1
    # one of 200 is the global mode
    assert values.max() == pytest.approx(model().target.max(), rel=1e-4)


def test_blocks_without_a_start_follow_those_with_one():
    params = {name: 9 * value for name, value in TWO_MODES.items()}
    v = np.tile(np.arange(200)[:, None] % 2, 4)
    state = search(zoo.graph("rbm"), params, init={"v": v}).state
    np.testing.assert_array_equal(state["v"], v)
    np.testing.assert_array_equal(state["h"], v[:, :3])


@pytest.mark.nightly
def test_observed_units_stay_and_the_others_are_optimal():
    known = np.random.default_rng(1).random((25, 3)) < 0.4
    observed = ebmpp.Observed(np.where(known, [0.0, 1.0, 0.0], np.nan), known)
    h2 = ebmpp.Observed(np.array([1, 7]), np.array([True, False]))  # the 7 is ignored
    mode = search(zoo.graph("deep"), strong_params("deep", 2.0), v=observed, h2=h2)
    v = np.asarray(mode.state["v"])
    assert (v == [0, 1, 0])[known].all() and (mode.state["h2"][:, 0] == 1).all()
    assert_modes(mode.state, {"v": known, "h2": h2.known})


def test_wrong_calls_are_refused():
    everything = {"v": np.ones(3), "h1": np.ones(3), "h2": np.ones(2)}
    with pytest.raises(StateError, match="clamped"):
        search(zoo.graph("deep"), strong_params("deep"), **everything)
    with pytest.raises(StateError, match=r"num_rows.*3.*\(2,\)"):
        search(zoo.graph("deep"), strong_params("deep"), num_rows=3, v=np.ones((2, 3)))


@pytest.mark.nightly
def test_the_first_layer_is_random():
    # three units, each wants to be on and inhibits the others: the first one wins
    names, bonds = ("a", "b", "c"), (("a", "b"), ("b", "c"), ("a", "c"))
    factors = [*map(ebmpp.Bias, names), *(ebmpp.Bilinear(*bond) for bond in bonds)]
    graph = ebmpp.FactorGraph({b: Bernoulli(1) for b in names}, factors=factors)
    params = {b: np.ones(1) for b in names} | {
        ":".join(bond): np.full((1, 1), -3.0) for bond in bonds
    }
    state = search(graph, params, init={b: np.zeros((3000, 1)) for b in names}).state
    on = np.concatenate([state[b] for b in names], axis=1)
    assert (on.sum(1) == 1).all()
    assert_law(on.mean(0), 1 / 3, np.sqrt(2 / 9 / len(on)))


@pytest.mark.nightly
def test_gaussian_means():
    params = {"v": np.ones(3), "h": np.zeros(2), "v:h": 0.3 * np.ones((3, 2))}
    state = search(
        ebmpp.layered(v=Gaussian(3), h=Gaussian(2)), params, num_rows=3
    ).state
    precision = np.block(
        [[np.eye(3), -0.3 * np.ones((3, 2))], [-0.3 * np.ones((2, 3)), np.eye(2)]]
    )
    exact = np.linalg.solve(precision, np.array([1.0, 1, 1, 0, 0]))
    np.testing.assert_allclose(
        state["v"], np.broadcast_to(exact[:3], (3, 3)), atol=2e-3
    )


@pytest.mark.nightly
def test_a_gain_below_the_last_bit_of_the_energy_is_accepted():
    params = {"v": np.array([1e9, 1.0]), "h": np.array([-1.0]), "v:h": np.zeros((2, 1))}
    init = {"v": np.array([[1.0, 0.0]] * 4), "h": np.zeros((4, 1))}
    mode = search(ebmpp.layered(v=Bernoulli(2), h=Bernoulli(1)), params, init=init)
    assert (mode.state["v"] == 1).all() and (mode.steps == 1).all()


class Contrary(Bernoulli):
    """A family whose mode is wrong, as rounding near a tie may make it."""

    def mode(self, eta: jax.Array) -> jax.Array:
        return 1 - super().mode(eta)


@pytest.mark.nightly
def test_a_cyclic_search_and_one_among_equals_end():
    params = {"v": np.array([-1.0]), "h": np.array([-1.0]), "v:h": np.full((1, 1), 2.0)}
    mode = search(ebmpp.layered(v=Contrary(1), h=Bernoulli(1)), params, num_rows=8)
    assert (mode.steps < 10).all()
    flat = jax.tree.map(np.zeros_like, params)  # ties are broken upwards
    mode = search(ebmpp.layered(v=Spin(1), h=Bernoulli(1)), flat, num_rows=8)
    assert all((v == 1).all() for v in mode.state.values())


@pytest.mark.nightly
def test_other_kernels_start_one_sweep_from_a_mode():
    graph, params, rows = zoo.graph("deep"), strong_params("deep", 2.0), 4000
    kernel = ebmpp.MaximalCoupling(graph, lag=2, init="local_mode")
    keys = jax.random.split(jax.random.key(3), rows)
    pairs = jax.jit(lambda keys: kernel.init(keys, 0, None, (params,), {}))(keys)
    first = {b: np.asarray(v) for b, v in pairs.y.items()}
    mode = search(graph, params, rng_key=jax.random.key(9), num_rows=rows).state
    # the first layer is drawn given the mode, the second given the first
    assert graph.layers == (("v", "h2"), ("h1",))
    given_mode = np.asarray(graph.mean(params, mode, "v"))
    error = np.sqrt((first["v"].var(0) + given_mode.var(0)) / rows)
    assert_law(first["v"].mean(0), given_mode.mean(0), error)
    assert_rows_law(
        first["h1"] - np.asarray(graph.mean(params, first, "h1")), np.zeros(3)
    )
