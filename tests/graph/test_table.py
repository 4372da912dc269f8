# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tables of log weights, impossible values among them, against enumeration in numpy.

Tests graph/factors/table.py and graph/factors/zeros.py.
"""

from functools import cache
import itertools

import networkx as nx
import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Categorical,
    Factor,
    FactorGraph,
    Pairwise,
    Spin,
    Table,
    exact,
)
from ebmpp.core import random
from ebmpp.errors import DomainError, StateError, UnmetError
from ebmpp.graph import energy
from ebmpp.moves import Target, search

KEY = jax.random.key(0)
TUPLES = [(0, 1, 2), (1, 3, 4), (2, 0, 5), (5, 4, 1)]
FAMILIES = {"bits": Bernoulli(6), "spins": Spin(6), "categories": Categorical(6, 3)}
EXCLUSION = [[0.0, 0.0], [0.0, -np.inf]]
DIFFERENT = np.where(np.eye(3) > 0, -np.inf, 0.0)


@cache
def case(name: str) -> tuple[FactorGraph, dict, np.ndarray, np.ndarray]:
    """Return a graph, its params, the numbers of the values of all states, and their weights."""
    family = FAMILIES[name]
    count = len(family.states())
    generator = np.random.default_rng(0)
    joint = 1.2 * generator.normal(size=(4, *[count] * 3))
    joint[generator.random(joint.shape) < 0.15] = -np.inf
    alone = generator.normal(size=(6, count))
    alone[2, 0] = -np.inf
    factors = [
        Table("x", units=TUPLES, log_weights=joint),
        Table("x", log_weights=alone, name="alone"),
    ]
    graph = FactorGraph({"x": family}, factors=factors)
    numbers = np.array(list(itertools.product(range(count), repeat=6)))
    log_weights = alone[np.arange(6), numbers].sum(1)
    for table, units in zip(joint, TUPLES):
        log_weights = log_weights + table[tuple(numbers[:, list(units)].T)]
    return graph, graph.init(KEY), numbers, np.exp(log_weights)


def codes(x: np.ndarray, low: float, count: int) -> np.ndarray:
    """Return the numbers of joint states."""
    return ((x - low) @ count ** np.arange(x.shape[1])[::-1]).astype(int)


@pytest.mark.parametrize("name", FAMILIES)
def test_probabilities_and_conditionals_are_those_of_the_tables(name):
    graph, params, numbers, weights = case(name)
    states, probs = exact.probabilities(graph, params)
    np.testing.assert_allclose(probs, weights / weights.sum(), atol=1e-6)
    is_possible = weights > 0
    assert 0.05 < is_possible.mean() < 0.5
    assert weights.max() > 40 * weights[is_possible].min()
    log_z = np.log(weights.sum())
    assert float(exact.log_partition(graph, params)) == pytest.approx(log_z, abs=1e-5)
    log_density = np.asarray(graph.log_density(params, states))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(log_density, np.log(weights), atol=1e-4)
    # conditionals of all units: exact zeros, and nothing that is not finite
    family = graph.families["x"]
    count = len(family.states())
    rows = {"x": states["x"][is_possible]}
    units = energy.to_units(rows["x"], family)
    context = energy.part_context(graph, params, rows, "x")
    for part, held in enumerate(graph.splits["x"].units):
        eta, _ = energy.natural_part(graph, params, rows, units, "x", context, part)
        eta = energy.saturated(graph, {"x": eta})["x"]
        assert np.isfinite(eta).all()
        all_units = graph.natural_parameters(params, rows, "x")[:, held]
        np.testing.assert_allclose(eta, all_units, atol=1e-4)
        for place, unit in enumerate(held):
            powers = count ** (5 - unit)
            base = codes(numbers[is_possible], 0, count)
            base = base - numbers[is_possible][:, unit] * powers
            listed = weights[base[:, None] + powers * np.arange(count)]
            unit_family = graph.splits["x"].part_family(part)
            p = jnp.stack(
                [
                    unit_family.unit_log_prob(eta[:, place], jnp.full(len(base), v))
                    for v in family.states()
                ],
                1,
            )
            expected = listed / listed.sum(1, keepdims=True)
            np.testing.assert_allclose(np.exp(p), expected, atol=1e-5)
            assert (np.exp(p)[expected == 0] == 0).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_frequencies_of_joint_values(name):
    graph, params, numbers, weights = case(name)
    gradient = jax.grad(lambda p: exact.log_partition(graph, p))(params)["x:table"]
    probs = weights / weights.sum()
    frequencies = np.zeros(gradient.shape)
    for table, units in enumerate(TUPLES):
        index = tuple(numbers[:, list(units)].T)
        np.add.at(frequencies[table], index, probs)
    np.testing.assert_allclose(gradient, frequencies, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_draws_and_pairs_have_the_probabilities_of_the_tables(name):
    graph, params, numbers, weights = case(name)
    probs = weights / weights.sum()
    family = graph.families["x"]
    count = len(family.states())
    low = float(family.states()[0])
    step = float(family.states()[1]) - low
    options = {"rng_key": KEY, "num_sweeps": 200, "progress_bar": False}
    x = np.asarray(ebmpp.sample(graph, params, 2000, **options)["x"])
    shares = np.bincount(codes((x - low) / step, 0, count), minlength=len(probs)) / 2000
    assert not shares[probs == 0].any()
    likely = probs > 0.01
    error = np.sqrt(probs * (1 - probs) / 2000)
    assert abs((shares - probs) / np.maximum(error, 1e-9))[likely].max() < 4.5

    def values(state):
        return family.statistics(state["x"])

    mean = np.asarray(exact.moments(graph, params)["x"])
    estimate = ebmpp.unbiased_expectation(
        graph, params, values, rng_key=KEY, num_pairs=400
    )
    z = (np.asarray(estimate.value) - mean) / np.maximum(estimate.standard_error, 1e-9)
    free = np.asarray(estimate.standard_error) > 0
    assert abs(z[free]).max() < 4.5
    np.testing.assert_allclose(
        np.asarray(estimate.value)[~free], mean[~free], atol=0.01
    )


def test_blocks_are_joined_unit_by_unit() -> None:
    generator = np.random.default_rng(1)
    separate = generator.normal(size=(4, 3, 2))
    shared = generator.normal(size=(2, 2))
    blocks = {"c": Categorical(1, 3), "x": Bernoulli((2, 2)), "y": Spin((2, 2))}
    factors = [
        Table("c", "x", log_weights=separate),
        Table("x", "y", log_weights=shared),
        Table("x", "y", units=[[(0, 1), (1, 1)]], log_weights=shared, name="one"),
    ]
    graph = FactorGraph(blocks, factors=factors)
    params = graph.init(KEY)
    states = exact.probabilities(graph, params)[0]
    c, x, y = (np.asarray(states[b]).reshape(len(states[b]), -1) for b in blocks)
    x, y = x.astype(int), (y.astype(int) + 1) // 2
    expected = separate[np.arange(4), c, x].sum(1) + shared[x, y].sum(1)
    expected += shared[x[:, 1], y[:, 3]]
    np.testing.assert_allclose(graph.log_density(params, states), expected, atol=1e-5)
    # finite tables are summed out in closed form
    marginal = graph.log_marginal(params, {b: states[b][:5] for b in "xy"}, "c")
    first = [np.logaddexp.reduce(expected.reshape(3, -1)[:, i]) for i in range(5)]
    np.testing.assert_allclose(marginal, first, atol=1e-5)


def test_evidence_in_a_bayesian_network_gives_posterior_marginals() -> None:
    cloudy = np.array([0.5, 0.5])
    sprinkler = np.array([[0.5, 0.5], [0.9, 0.1]])
    rain = np.array([[0.8, 0.2], [0.2, 0.8]])
    wet = np.array([[[1.0, 0.0], [0.1, 0.9]], [[0.1, 0.9], [0.01, 0.99]]])
    with np.errstate(divide="ignore"):
        tables = [
            Table("cloudy", log_weights=np.log(cloudy)),
            Table("cloudy", "sprinkler", log_weights=np.log(sprinkler)),
            Table("cloudy", "rain", log_weights=np.log(rain)),
            Table("sprinkler", "rain", "wet", log_weights=np.log(wet)),
        ]
    blocks = {b: Bernoulli(1) for b in ("cloudy", "sprinkler", "rain", "wet")}
    network = FactorGraph(blocks, factors=tables)
    assert float(exact.log_partition(network, network.init(KEY))) == pytest.approx(
        0, abs=1e-6
    )
    evidence = Table("wet", log_weights=[-np.inf, 0.0], name="evidence")
    posterior = FactorGraph(blocks, factors=[*tables, evidence])
    joint = np.einsum("c,cs,cr,sr->csr", cloudy, sprinkler, rain, wet[:, :, 1])
    mean = exact.moments(posterior, posterior.init(KEY))
    expected = {"sprinkler": joint[:, 1].sum(), "rain": joint[:, :, 1].sum()}
    for block, value in expected.items():
        assert float(mean[block][0]) == pytest.approx(value / joint.sum(), abs=1e-6)
    assert float(mean["wet"][0]) == 1
    log_z = float(exact.log_partition(posterior, posterior.init(KEY)))
    assert log_z == pytest.approx(np.log(joint.sum()), abs=1e-6)


def test_colourings_are_counted() -> None:
    petersen = nx.petersen_graph()  # 120 colourings by three colours
    table = Table("x", units=petersen, log_weights=DIFFERENT)
    graph = FactorGraph({"x": Categorical(10, 3)}, factors=[table])
    log_z = float(exact.log_partition(graph, graph.init(KEY)))
    assert log_z == pytest.approx(np.log(120), abs=1e-5)


def test_starts_are_searched_for_by_the_keys_of_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "_MOST_PASSES", 160)  # from uniform values thousands
    lattice = nx.grid_2d_graph(24, 24)
    table = Table("x", units=lattice, log_weights=DIFFERENT)
    graph = FactorGraph({"x": Categorical((24, 24), 3)}, factors=[table])
    params = graph.init(KEY)
    keys = random.fold_in(random.key_pair(KEY), np.arange(8))
    x = search.compiled_initial_states(Target(graph, params), keys)
    assert np.isfinite(graph.log_density(params, x)).all()
    even = np.asarray(x["x"])[:, ::2, ::2].reshape(8, -1)
    shares = (even[..., None] == np.arange(3)).mean(1)
    assert shares.max() < 0.85  # of one colour; 1 where the search begins
    first = search.compiled_initial_states(Target(graph, params), keys[:3])
    np.testing.assert_array_equal(first["x"], x["x"][:3])
    with pytest.raises(StateError, match="got 1 of 8 without"):
        search.check_starts("chains", Target(graph, params), {"x": x["x"].at[2].set(0)})


def test_models_without_a_possible_state_are_refused() -> None:
    triangle = [(0, 1), (1, 2), (0, 2)]
    table = Table("x", units=triangle, log_weights=[[-np.inf, 0.0], [0.0, -np.inf]])
    graph = FactorGraph({"x": Bernoulli(3)}, factors=[table])
    params = graph.init(KEY)
    with pytest.raises(DomainError, match="must leave a state"):
        exact.log_partition(graph, params)
    with pytest.raises(StateError, match="got 2 of 2 without"):
        ebmpp.sample(graph, params, 2, rng_key=KEY, num_sweeps=2, progress_bar=False)


RING = [(i, (i + 1) % 6) for i in range(6)]


def test_rows_of_probability_zero_are_named() -> None:
    table = Table("x", units=RING, log_weights=EXCLUSION)
    graph = FactorGraph({"x": Bernoulli(6)}, factors=[Bias("x"), table])
    params = graph.init(KEY)
    rows = np.array([[1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]])
    value = np.asarray(exact.log_likelihood(graph, params, rows))
    np.testing.assert_allclose(value[[0, 2]], -np.log(18), atol=1e-5)  # Lucas number
    assert value[1] == -np.inf and graph.energy(params, rows)[1] == np.inf
    with pytest.raises(StateError, match=r"-inf at 1 of 3 rows \(1\)"):
        exact.grad_log_likelihood(graph, params, rows)
    options = {"rng_key": KEY, "num_steps": 2, "progress_bar": False}
    with pytest.raises(StateError, match=r"-inf at 1 of 3 rows \(1\)"):
        ebmpp.fit(graph, rows, **options)
    # what zeros hold is without effect
    held = params | {"x:table": jnp.array(EXCLUSION)}
    np.testing.assert_array_equal(exact.log_likelihood(graph, held, rows), value)
    gradient = exact.grad_log_likelihood(graph, params, rows[[0, 2]])
    assert np.isfinite(jax.tree.leaves(gradient)[1]).all()


def test_units_that_no_single_change_moves_are_reported() -> None:
    swap = [[-np.inf, 0.0], [0.0, -np.inf]]
    table = Table("x", units=[(0, 1)], log_weights=swap)
    graph = FactorGraph({"x": Bernoulli(4)}, factors=[Bias("x"), table])
    params = graph.init(KEY)
    options = {"rng_key": KEY, "num_sweeps": 2, "progress_bar": False}
    with pytest.warns(UserWarning, match="2 of block 'x', so they stay"):
        x = ebmpp.sample(graph, params, 30, **options)["x"]
    assert (x[:, 0] != x[:, 1]).all()
    with pytest.raises(UnmetError, match="would never meet"):
        ebmpp.unbiased_expectation(
            graph, params, lambda s: s["x"], rng_key=KEY, num_pairs=30
        )


def test_a_black_box_has_impossible_states_too() -> None:
    weights = np.random.default_rng(2).normal(size=6)

    def apply(params, x):
        return jnp.where(x[:-1] * x[1:] > 0, jnp.inf, 0).sum() - params @ x

    def by_logarithm(params, x):
        return -jnp.log(1 - x[:-1] * x[1:]).sum() - params @ x

    pairs = {"x": RING[:-1]}
    other_way = Factor(
        "x", energy=by_logarithm, init=weights, affine=False, lateral=pairs
    )
    assert FactorGraph({"x": Bernoulli(6)}, factors=[other_way]).has_zeros
    factor = Factor("x", energy=apply, init=weights, affine=False)
    table = Table("x", units=RING[:-1], log_weights=EXCLUSION, name="t")
    black_box = FactorGraph({"x": Bernoulli(6)}, factors=[factor])
    listed = FactorGraph({"x": Bernoulli(6)}, factors=[Bias("x", init=weights), table])
    assert black_box.has_zeros and len(black_box.layers) == 2
    params = {"x": jnp.asarray(weights, float)}
    states, probs = exact.probabilities(black_box, params)
    other = params | listed.init(KEY) | params
    _, expected = exact.probabilities(listed, other)
    np.testing.assert_allclose(probs, expected, atol=1e-6)
    rows = {"x": states["x"][expected > 0]}
    eta = black_box.natural_parameters(params, rows, "x")
    np.testing.assert_allclose(
        eta, listed.natural_parameters(other, rows, "x"), atol=1e-5
    )


@pytest.mark.nightly
def test_annealing_passes_through_soft_constraints() -> None:
    lattice = nx.grid_2d_graph(4, 4)
    table = Table("x", units=lattice, log_weights=EXCLUSION)
    graph = FactorGraph({"x": Bernoulli((4, 4))}, factors=[table])
    params = graph.init(KEY)
    log_z = float(exact.log_partition(graph, params))
    assert log_z == pytest.approx(np.log(1234))  # independent sets of the lattice
    options = {"rng_key": KEY, "num_temperatures": 300}
    sides = ebmpp.bracket(graph, params, **options)
    for side in (sides.lower, sides.upper):
        assert abs(side.log_partition - log_z) < 4.5 * side.standard_error
        assert side.effective_sample_size > 60
    system = ebmpp.smc(graph, params, rng_key=KEY)
    assert abs(system.log_partition - log_z) < 4.5 * system.standard_error


@pytest.mark.nightly
def test_a_population_count_potential_is_fitted_beside_pairs() -> None:
    generator = np.random.default_rng(3)
    size = 15
    pairs = list(itertools.combinations(range(size), 2))

    def potential(weights, x):
        return -weights[x.sum().astype(int)]

    factors = [
        Bias("x", init=generator.normal(size=size) - 1),
        Pairwise("x", pairs, init=0.3 * generator.normal(size=len(pairs))),
        Factor(
            "x",
            energy=potential,
            init=generator.normal(size=size + 1),
            affine=False,
            name="count",
        ),
    ]
    graph = FactorGraph({"x": Bernoulli(size)}, factors=factors)
    params = {f.name: f.init_params(KEY, graph.families) for f in factors}
    x = np.array(list(itertools.product((0.0, 1.0), repeat=size)))
    couplings = np.zeros((size, size))
    couplings[tuple(np.array(pairs).T)] = params["x:x"]
    count = x.sum(1).astype(int)
    log_weights = x @ np.asarray(params["x"], float) + ((x @ couplings) * x).sum(1)
    log_weights += np.asarray(params["count"], float)[count]
    log_z = np.logaddexp.reduce(log_weights)
    probs = np.exp(log_weights - log_z)
    assert float(exact.log_partition(graph, params)) == pytest.approx(log_z, abs=1e-4)
    data = x[generator.choice(len(x), 50, p=probs)]
    gradient = exact.grad_log_likelihood(graph, params, data)
    counts = [
        np.bincount(count, w, size + 1)
        for w in (probs, np.bincount(codes(data, 0, 2), minlength=len(x)) / 50)
    ]
    np.testing.assert_allclose(gradient["count"], counts[1] - counts[0], atol=1e-4)
    np.testing.assert_allclose(gradient["x"], data.mean(0) - probs @ x, atol=1e-4)
