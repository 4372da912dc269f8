# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of units of one block: declaration, layers, natural parameters and exact sums.

Tests graph/factors/pairwise.py.
"""

import itertools
import pickle

from lateral_graphs import TRIPLES, enumerated, lateral, triples, two_blocks
import networkx as nx
import numpy as np
from oracle import numpy_energy
import pytest
import zoo

import jax

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Factor,
    FactorGraph,
    Gaussian,
    Pairwise,
    Spin,
    exact,
)
from ebmpp.contrib.graphs import rename
from ebmpp.errors import NotMultiAffineError
from ebmpp.graph.energy import natural_rows
from ebmpp.moves.gibbs import Natural, visit
from ebmpp.moves.target import Target
from helpers import often, random_params, random_state


def single(family: ebmpp.Family, edges: object, **options: object) -> FactorGraph:
    """One block whose units interact."""
    return FactorGraph(
        {"x": family}, factors=[Bias("x"), Pairwise("x", edges, **options)]
    )


def test_renamed_blocks_keep_their_pairs() -> None:
    lattice = nx.grid_2d_graph(3, 3)
    renamed = rename(zoo.graph("lattice"), {"x": "y"}, factors={"x:x": "y:y"})
    named = FactorGraph.from_networkx(lattice, Spin, block="y")
    assert renamed == named
    assert (
        named.labels == {"y": tuple(lattice.nodes)}
        and pickle.loads(pickle.dumps(named)) == named
    )


def test_parts_are_layers_between_those_of_other_blocks() -> None:
    assert zoo.graph("lattice").layers == (("x[0]",), ("x[1]",))
    assert len(single(Spin(3), nx.complete_graph(3)).layers) == 3
    factors = [
        Bias("v"),
        Bilinear("v", "h"),
        Bilinear("v", "g"),
        Pairwise("v", [(0, 1), (2, 3)]),
    ]
    graph = FactorGraph(
        {"v": Bernoulli(4)}, {"h": Bernoulli(2), "g": Bernoulli(2)}, factors
    )
    assert graph.layers == (("v[0]",), ("v[1]",), ("h", "g"))
    assert graph.block_layers == (("v",), ("h", "g"))
    first, second = map(set, graph.splits["v"].units)
    assert first | second == {0, 1, 2, 3} and all(
        len(first & pair) == 1 for pair in ({0, 1}, {2, 3})
    )


@pytest.mark.parametrize(
    "edges",
    [[], np.zeros((0, 2), int), nx.empty_graph(4)],
    ids=["list", "array", "graph"],
)
def test_no_pairs(edges: object) -> None:
    graph = single(Spin(4), edges)
    assert graph.param_shapes["x:x"].shape == (0,) and graph.layers == (("x",),)
    field = np.float32([0.5, -1.0, 0.0, 2.0])
    mean = graph.mean({"x": field, "x:x": np.zeros(0, np.float32)}, {}, "x")
    np.testing.assert_allclose(mean, np.tanh(field), rtol=1e-5)


def test_params_start_at_the_weights_of_a_network() -> None:
    network = nx.Graph()
    network.add_weighted_edges_from([("b", "a", 2.0), ("a", "c", -1.0)])
    graph = FactorGraph.from_networkx(network, Spin)  # b is unit 0, a unit 1, c unit 2
    params = graph.init(zoo.KEY)
    assert params["x:x"].tolist() == [2.0, -1.0]
    assert float(graph.energy(params, {"x": np.float32([1, 1, -1])})) == -3.0
    numbered = nx.relabel_nodes(network, {"b": 0, "a": 1, "c": 2})
    assert single(Spin(3), numbered).init(zoo.KEY)["x:x"].tolist() == [2.0, -1.0]
    assert single(Spin(3), numbered, init=np.array([3.0, 4.0])).init(zoo.KEY)[
        "x:x"
    ].tolist() == [3.0, 4.0]


def test_energies_with_undeclared_pairs_are_refused() -> None:
    incomplete = Factor(
        "x", energy=triples, init=np.zeros(2), lateral={"x": [(0, 1), (1, 2), (1, 3)]}
    )
    with pytest.raises(NotMultiAffineError, match="block 'x'"):
        FactorGraph({"x": Bernoulli(4)}, factors=[incomplete])


FAMILIES = {
    "spin": Spin,
    "categorical": lambda n: ebmpp.Categorical(n, 3),
    "gaussian": Gaussian,
    "learned": lambda n: Gaussian(n, variance="learned"),
}
NETWORKS = {
    "path": nx.path_graph(5),
    "many parts": nx.complete_graph(6),
    "hub": nx.star_graph(14),  # more neighbours than slots of the table
    "two hubs": nx.disjoint_union(nx.star_graph(14), nx.wheel_graph(6)),
}
CASES = {f"{a}, {b}": (a, b) for a, b in itertools.product(FAMILIES, NETWORKS)}


@pytest.mark.parametrize("case", often(CASES, "spin, hub", "learned, many parts"))
def test_natural_parameters_of_parts_are_gradients_of_the_energy(case: str) -> None:
    kind, name = CASES[case]
    family = FAMILIES[kind](len(NETWORKS[name]))
    graph = two_blocks(family, Bernoulli(2), Pairwise("v", NETWORKS[name]))
    params = random_params(graph, seed=3)
    x = {"v": random_state(family, 1, (3,)), "h": random_state(Bernoulli(2), 2, (3,))}
    widths = []
    scalar = lambda eta: eta if family.stat_shape == () else eta[..., 0]

    @jax.jit
    def derive(params: dict, x: dict) -> tuple:
        def new(natural: Natural, view: object, part: object) -> dict:
            eta = natural()
            widths.append(eta["v"].shape[1])
            return {"v": scalar(eta["v"])}

        moved = visit(Target(graph, params), x, ("v",), new)["v"]
        return (
            moved,
            scalar(natural_rows(graph, params, x, ("v",))["v"]),
            graph.energy(params, x),
        )

    moved, eta, energy = jax.device_get(derive(params, x))
    assert max(widths) == max(len(units) for units in graph.splits["v"].units)
    # units of the first part saw the state as it was
    first = graph.splits["v"].units[0]
    np.testing.assert_allclose(
        moved[:, first], eta[:, first].astype(moved.dtype), rtol=1e-5, atol=1e-5
    )
    energies = [
        numpy_energy(graph, params, {b: v[i] for b, v in x.items()}) for i in range(3)
    ]
    np.testing.assert_allclose(energy, energies, rtol=1e-5, atol=1e-4)


def test_conditional_of_a_part_matches_enumeration() -> None:
    graph, params = lateral("triples")
    states, probs = enumerated("triples")
    units = graph.splits["x"].units[1]
    at = np.float32([1, 0, 1, 1])
    agree = (np.delete(states["x"], units, 1) == np.delete(at, units)).all(1)
    expected = np.average(states["x"][agree][:, units], axis=0, weights=probs[agree])
    conditional = graph.conditional(params, {"x": at}, "x[1]")
    np.testing.assert_allclose(conditional.base_dist.probs, expected, rtol=1e-5)
    assert graph.factors[-1] == TRIPLES


def test_gaussian_fields_are_integrated_exactly() -> None:
    graph = single(Gaussian(4), nx.cycle_graph(4))
    params = {
        "x": np.float32([0.5, -1.0, 0.2, 0.0]),
        "x:x": np.float32([0.3, -0.2, 0.1, 0.4]),
    }
    precision = np.eye(4)
    for w, (i, j) in zip(params["x:x"], nx.cycle_graph(4).edges, strict=True):
        precision[i, j] = precision[j, i] = -w
    mean = np.linalg.solve(precision, params["x"])
    log_z = 0.5 * params["x"] @ mean - 0.5 * np.linalg.slogdet(precision)[1]
    value, gradient = jax.jit(
        jax.value_and_grad(lambda p: exact.log_partition(graph, p))
    )(params)
    assert float(value) == pytest.approx(log_z, abs=1e-5)
    np.testing.assert_allclose(gradient["x"], mean, atol=1e-5)


def test_gradient_of_a_shared_weight_sums_over_pairs() -> None:
    edges = [(0, 1), (1, 2), (2, 3)]
    graph, data = single(Spin(4), edges, shared=True), random_state(Spin(4), 3, (10,))
    params = {"x": np.float32([0.3, -0.7, 0.5, 0.1]), "x:x": np.float32(0.6)}
    states = np.array(list(itertools.product([-1, 1], repeat=4)))
    products = lambda x: sum(x[:, i] * x[:, j] for i, j in edges)
    weights = np.exp(states @ params["x"] + params["x:x"] * products(states))
    expected = products(data).mean() - np.average(products(states), weights=weights)
    gradient = exact.grad_log_likelihood(graph, params, data)["x:x"]
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_gradients_do_not_check_bounds_of_indices() -> None:
    """With many pairs XLA would fold those checks at compile time, for seconds."""
    graph = single(Spin(12), np.stack(np.triu_indices(12, 1), -1))
    params, x = graph.init(zoo.KEY), {"x": np.ones(12, np.float32)}
    text = jax.jit(jax.grad(lambda p: graph.energy(p, x))).lower(params).as_text()
    assert "stablehlo.gather" in text and "stablehlo.compare" not in text
