# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Hyperedges and Coupling, against enumeration in numpy.

Tests graph/gauge.py.
"""

from functools import cache
import itertools
from pathlib import Path

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
    Coupling,
    Factor,
    FactorGraph,
    Hyperedges,
    Pairwise,
    Spin,
    Table,
    exact,
)
from ebmpp.errors import IntractableError
from ebmpp.graph import energy, zero_sum_gauge
from helpers import assert_law, assert_rows_law, often, random_params

KEY = jax.random.key(0)
#: of different places, and one twice
TUPLES = np.array([(0, 1, 2), (1, 3, 4), (2, 0, 5), (5, 4, 1), (2, 1, 0)])
#: a block of three parts, which are unrolled, and one of six
FEW = TUPLES[:2]
FAMILIES = {"bits": Bernoulli(6), "spins": Spin(6), "categories": Categorical(6, 3)}
FULL = list(itertools.combinations(range(5), 2))
SPARSE = [(4, 0)]  # a product per pair, not a matrix product


def statistics(family: ebmpp.Family, x: np.ndarray) -> np.ndarray:
    """Return statistics ``(..., entries)`` of values ``(...)``."""
    if family.stat_shape:
        return np.eye(family.stat_shape[0])[x.astype(int)]
    return x.astype(float)[..., None]


def all_states(family: ebmpp.Family) -> np.ndarray:
    values = np.asarray(family.states())
    return np.array(list(itertools.product(values, repeat=family.size)))


def check(graph: FactorGraph, params: dict, log_weights: np.ndarray) -> None:
    """Check the density and the conditionals of all parts, given log weights of all states."""
    family = graph.families["x"]
    x = all_states(family)
    np.testing.assert_allclose(
        graph.log_density(params, {"x": x}), log_weights, atol=1e-4
    )
    log_z = np.logaddexp.reduce(log_weights)
    assert float(exact.log_partition(graph, params)) == pytest.approx(log_z, abs=1e-4)
    # log odds of the values of each unit, the others given
    state = {"x": x[np.random.default_rng(0).permutation(len(x))[:20]]}
    units = energy.to_units(jnp.asarray(state["x"]), family)
    context = energy.part_context(graph, params, state, "x")
    place = {tuple(state): i for i, state in enumerate(x.tolist())}
    values = np.asarray(family.states())
    table = statistics(family, values)
    for part, held in enumerate(graph.splits["x"].units):
        eta, _ = energy.natural_part(graph, params, state, units, "x", context, part)
        eta = np.asarray(eta).reshape(20, -1, table.shape[1])
        for column, unit in enumerate(held):
            for row, natural in zip(state["x"], eta[:, column]):
                states = np.tile(row, (len(values), 1))
                states[:, unit] = values
                expected = log_weights[[place[tuple(s)] for s in states.tolist()]]
                difference = table @ natural - expected
                np.testing.assert_allclose(difference, difference[0], atol=1e-4)


def gradients(graph: FactorGraph, params: dict) -> dict:
    return jax.grad(lambda p: exact.log_partition(graph, p))(params)


@cache
def products(name: str, is_short: bool, shared: bool) -> tuple:
    """Return a graph, its params, the products ``(rows, tuples)`` and the log weights."""
    family = FAMILIES[name]
    tuples = FEW if is_short else TUPLES
    graph = FactorGraph(
        {"x": family}, factors=[Bias("x"), Hyperedges("x", tuples, shared=shared)]
    )
    params = random_params(graph, scale=1.0)
    t = statistics(family, all_states(family))
    terms = t[:, tuples].prod(2).sum(-1)
    log_weights = terms @ np.broadcast_to(np.asarray(params["x:x:x"]), len(tuples))
    log_weights += (t * np.asarray(params["x"]).reshape(6, -1)).sum((1, 2))
    return graph, params, terms, log_weights


CASES = list(itertools.product(FAMILIES, (False, True), (False, True)))


@pytest.mark.parametrize(
    "case", often(CASES, ("bits", True, True), ("categories", False, False))
)
def test_products_have_the_probabilities_of_enumeration(case: tuple) -> None:
    graph, params, terms, log_weights = products(*case)
    check(graph, params, log_weights)
    probs = np.exp(log_weights - np.logaddexp.reduce(log_weights))
    mean = probs @ terms
    expected = mean.sum() if case[2] else mean
    np.testing.assert_allclose(gradients(graph, params)["x:x:x"], expected, atol=1e-5)


@pytest.mark.parametrize("case", often(CASES, ("spins", False, False)))
def test_coupled_pairs_have_the_exact_moments(case: tuple) -> None:
    graph, params, terms, log_weights = products(*case)
    family = graph.families["x"]
    estimate = ebmpp.unbiased_expectation(
        graph, params, lambda s: family.statistics(s["x"]), rng_key=KEY, num_pairs=500
    )
    assert estimate.met.all()
    mean = exact.moments(graph, params)["x"]
    assert_law(estimate.value, mean, estimate.standard_error)


def triangles(nodes: int) -> tuple[int, list]:
    """Return the number of dyads of some nodes, and their triangles."""
    number = {p: i for i, p in enumerate(itertools.combinations(range(nodes), 2))}
    return len(number), [
        [number[p] for p in itertools.combinations(corners, 2)]
        for corners in itertools.combinations(range(nodes), 3)
    ]


def by_hand(weights: jax.Array, x: jax.Array) -> jax.Array:
    return -(weights * x[np.array(triangles(5)[1])].prod(-1)).sum()


def test_triangles_are_those_of_a_factor_by_hand() -> None:
    size, tuples = triangles(5)
    factor = Hyperedges("x", tuples)
    pairs = factor.edges({"x": Bernoulli(size)})["x"]
    hand = Factor(
        "x", energy=by_hand, init=np.zeros(10), lateral={"x": pairs}, name="x:x:x"
    )
    blocks = {"x": Bernoulli(size)}
    ours = FactorGraph(blocks, factors=[Bias("x"), factor])
    other = FactorGraph(blocks, factors=[Bias("x"), hand])
    assert ours.layers == other.layers
    weights = np.random.default_rng(0).normal(size=10).astype(np.float32)
    field = np.linspace(-1, 1, size, dtype=np.float32)
    x = np.random.default_rng(1).integers(0, 2, (6, size))
    params = {"x": field, "x:x:x": weights}
    np.testing.assert_allclose(
        ours.energy(params, x), other.energy(params, x), rtol=1e-5
    )
    options = {"rng_key": KEY, "num_sweeps": 6, "progress_bar": False}
    drawn = [ebmpp.sample(graph, params, 8, **options)["x"] for graph in (ours, other)]
    np.testing.assert_array_equal(*drawn)


def test_positive_products_of_bits_are_drawn_perfectly() -> None:
    size, tuples = triangles(4)
    factors = [Bias("x"), Pairwise("x", [(0, 5)]), Hyperedges("x", tuples, shared=True)]
    graph = FactorGraph({"x": Bernoulli(size)}, factors=factors)
    params = {
        "x": np.linspace(-1.5, 0.5, size, dtype=np.float32),
        "x:x": np.float32([0.7]),
        "x:x:x": np.float32(1.2),
    }
    options = {"rng_key": KEY, "method": "coupling_from_the_past"}
    x = np.asarray(ebmpp.perfect_sample(graph, params, 2000, **options)["x"])
    t = np.concatenate([x, x[:, np.array(tuples)].prod(-1)], 1)
    states, probs = exact.probabilities(graph, params)
    s = np.asarray(states["x"])
    mean = np.asarray(probs) @ np.concatenate([s, s[:, np.array(tuples)].prod(-1)], 1)
    assert_rows_law(t, mean)
    for wrong in ({"x:x:x": np.float32(-0.1)}, {"x:x": np.float32([-0.7])}):
        with pytest.raises(IntractableError, match="not attractive"):
            ebmpp.perfect_sample(graph, params | wrong, 2, **options)
    spins = FactorGraph({"x": Spin(size)}, factors=factors)
    with pytest.raises(IntractableError, match="units that are not negative"):
        ebmpp.perfect_sample(spins, params, 2, **options)


def test_tuples_by_index_and_pairs() -> None:
    number = [(0, 1, 3), (1, 2, 5)]
    index = np.stack(np.unravel_index(number, (2, 3)), -1)
    block = {"x": Bernoulli((2, 3))}
    by_number = FactorGraph(block, factors=[Hyperedges("x", number)])
    by_index = FactorGraph(block, factors=[Hyperedges("x", index)])
    assert by_number.layers == by_index.layers and len(by_number.layers) == 3
    x = np.random.default_rng(0).integers(0, 2, (5, 2, 3))
    params = {"x:x:x": np.float32([1.0, -2.0])}
    flat = x.reshape(5, 6)
    expected = -flat[:, number[0]].prod(1) + 2 * flat[:, number[1]].prod(1)
    for graph in (by_number, by_index):
        np.testing.assert_allclose(graph.energy(params, x), expected, atol=1e-6)
    # tables too
    table = Table("x", units=number, log_weights=np.zeros((2, 2, 2)))
    assert FactorGraph(block, factors=[table]).layers == by_number.layers
    # tuples of two units are the edges of a network
    pairs = FactorGraph({"x": Spin(3)}, factors=[Hyperedges("x", [(0, 1), (1, 2)])])
    network = pairs.to_networkx({"x:x": np.float32([0.5, -1.0])})
    assert [w for *_, w in network.edges(data="weight")] == [0.5, -1.0]
    with pytest.raises(IntractableError, match="three units or more"):
        by_number.to_networkx(params)


@cache
def potts(name: str) -> tuple:
    """Return a graph, its params, and the log weights of all states."""
    edges = FULL if name == "full" else SPARSE
    init = np.zeros((3, 3)) if name == "shared" else None
    graph = FactorGraph(
        {"x": Categorical(5, 3)}, factors=[Bias("x"), Coupling("x", edges, init=init)]
    )
    params = random_params(graph, scale=1.0)
    t = statistics(graph.families["x"], all_states(graph.families["x"]))
    tables = np.broadcast_to(params["x:x"], (len(edges), 3, 3))
    first, second = np.transpose(edges)
    log_weights = np.einsum("eab,rea,reb->r", tables, t[:, first], t[:, second])
    log_weights += (t * np.asarray(params["x"])).sum((1, 2))
    return graph, params, log_weights


@pytest.mark.parametrize("name", often(["full", "sparse", "shared"], "full", "sparse"))
def test_matrices_have_the_probabilities_of_enumeration(name: str) -> None:
    graph, params, log_weights = potts(name)
    check(graph, params, log_weights)
    probs = np.exp(log_weights - np.logaddexp.reduce(log_weights))
    x = all_states(graph.families["x"]).astype(int)
    edges = FULL if name == "full" else SPARSE
    expected = np.zeros((len(edges), 3, 3))
    for frequencies, (i, j) in zip(expected, edges):
        np.add.at(frequencies, (x[:, i], x[:, j]), probs)
    if name == "shared":
        expected = expected.sum(0)
    np.testing.assert_allclose(gradients(graph, params)["x:x"], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["full", "sparse", "shared"])
def test_the_zero_sum_gauge_keeps_the_distribution(name: str) -> None:
    graph, params, log_weights = potts(name)
    fixed = zero_sum_gauge(graph, params)
    for axis in (-1, -2):
        np.testing.assert_allclose(fixed["x:x"].sum(axis), 0, atol=1e-6)
    np.testing.assert_allclose(fixed["x"].sum(-1), 0, atol=1e-6)
    x = all_states(graph.families["x"])
    shift = np.asarray(graph.log_density(fixed, {"x": x})) - log_weights
    assert shift.std() < 1e-5 < abs(shift[0])
    # the smallest norm: a gauge-fixed matrix is a projection
    for axis in (1, 2):
        moved = params["x:x"] + np.random.default_rng(axis).normal(size=3)
        moved_back = zero_sum_gauge(graph, params | {"x:x": jnp.asarray(moved, float)})
        np.testing.assert_allclose(moved_back["x:x"], fixed["x:x"], atol=1e-6)


@pytest.mark.parametrize("kind", often([Coupling, Table], Coupling))
def test_forests_of_matrices_have_the_exact_moments(kind: type) -> None:
    path = nx.path_graph(4)
    factor = Table("x", units=path, name="x:x") if kind is Table else kind("x", path)
    chain = FactorGraph({"x": Categorical(4, 3)}, factors=[Bias("x"), factor])
    params = random_params(chain, scale=1.0)
    x = ebmpp.sample(
        chain,
        params,
        2000,
        rng_key=KEY,
        num_sweeps=2,
        moves=ebmpp.moves.forest_sweep(chain),
        progress_bar=False,
    )["x"]
    mean = exact.moments(chain, params)["x"]
    assert_rows_law(statistics(chain.families["x"], np.asarray(x)), mean)


def test_files_hold_tuples_and_matrices(tmp_path: Path) -> None:
    blocks = {"x": Bernoulli((2, 3)), "s": Categorical(5, 3)}
    init = np.linspace(0, 1, 9).reshape(1, 3, 3)
    factors = [
        Hyperedges("x", [(0, 1, 3), (1, 2, 5)], shared=True, name="w"),
        Coupling("s", SPARSE, init=init),
        Bias("s"),
    ]
    graph = FactorGraph(blocks, factors=factors)
    params = random_params(graph)
    ebmpp.save(tmp_path / "model", graph, params)
    loaded, values = ebmpp.load(tmp_path / "model")
    assert loaded == graph and hash(loaded) == hash(graph)
    assert repr(loaded.factors) == repr(graph.factors)
    jax.tree.map(np.testing.assert_array_equal, values, params)
