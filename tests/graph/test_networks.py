# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conversion from and to networkx graphs and dimod's binary quadratic models.

Tests graph/networks.py, graph/transforms/rewire.py.
"""

from functools import cache
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import networkx as nx
import numpy as np
import pytest
import zoo

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    FactorGraph,
    Pairwise,
    Spin,
    condition,
    layered,
)
from ebmpp.contrib.graphs import merge, rename, split
from ebmpp.errors import ArgumentError, DeclarationError
from helpers import often, random_params, random_state

WEIGHTED = nx.Graph()
for node, value in {"a": 0.5, "b": -1.0, "c": 0.0, "d": 2.0}.items():
    WEIGHTED.add_node(node, bias=value)
WEIGHTED.add_weighted_edges_from([("b", "a", 1.5), ("c", "d", 0.0), ("a", "d", -2.0)])


@pytest.mark.parametrize("family", [Spin, Bernoulli])
def test_network_round_trip(family: type[ebmpp.Family]) -> None:
    graph = FactorGraph.from_networkx(WEIGHTED, family)
    network = graph.to_networkx(graph.init(zoo.KEY))
    assert list(network) == list(WEIGHTED)
    assert dict(network.nodes(data="bias")) == dict(WEIGHTED.nodes(data="bias"))
    weights = lambda n: {frozenset((a, b)): w for a, b, w in n.edges(data="weight")}
    assert weights(network) == weights(WEIGHTED)
    params = FactorGraph.from_networkx(network, family).init(zoo.KEY)
    assert sorted(map(float, params["x:x"])) == [-2.0, 0.0, 1.5]


def convolutional() -> FactorGraph:
    factors = [Bias("v"), Bias("h"), ebmpp.Convolution("v", "h", window=(2, 2))]
    return FactorGraph({"v": Spin((1, 3, 3))}, {"h": Spin((2, 2, 2))}, factors)


def semi_restricted() -> FactorGraph:
    factors = [
        Bias("v"),
        Pairwise("v", [(2, 0), (1, 2)], shared=True),
        Bilinear("v", "h"),
    ]
    return FactorGraph({"v": Spin(3)}, {"h": Bernoulli(2)}, factors)


GRAPHS = {
    "shapes": lambda: layered(v=Bernoulli((2, 2)), h=Spin(3), g=Bernoulli(2)),
    "convolution": convolutional,
    "lateral": semi_restricted,
}


@pytest.mark.parametrize("name", often(GRAPHS, "convolution", "lateral"))
def test_network_has_the_energy_of_the_graph(name: str) -> None:
    graph = GRAPHS[name]()
    params = random_params(graph, 1)
    network = graph.to_networkx(params)
    x = {b: random_state(f, 1, (4,)) for b, f in graph.families.items()}
    energies = np.asarray(graph.energy(params, x))
    number = lambda index: index[0] if len(index) == 1 else index
    for row, energy in enumerate(energies):
        value = {
            (b, number(i)): v for b, a in x.items() for i, v in np.ndenumerate(a[row])
        }
        assert set(value) == set(network)
        total = sum(bias * value[n] for n, bias in network.nodes(data="bias"))
        total += sum(
            w * value[a] * value[b] for a, b, w in network.edges(data="weight")
        )
        np.testing.assert_allclose(energy, -total, atol=1e-4)
    assert {network.nodes[n]["block"] for n in network} == set(graph.families)


def test_biases_of_a_network() -> None:
    network = nx.path_graph(3)
    nx.set_node_attributes(
        network, {n: np.array([n, 1.0, -1.0]) for n in network}, "bias"
    )
    graph = FactorGraph.from_networkx(network, lambda n: Categorical(n, 3), shared=True)
    np.testing.assert_array_equal(
        graph.init(zoo.KEY)["x"], [[n, 1.0, -1.0] for n in network]
    )
    graph = FactorGraph(
        {"x": Bernoulli(2)}, factors=[Bias("x", init=np.array([1.0, -1.0]))]
    )
    # data do not override it
    assert graph.init(zoo.KEY, data=np.ones((5, 2)))["x"].tolist() == [
        1.0,
        -1.0,
    ]


@cache
def labelled() -> tuple[FactorGraph, dict[str, Any]]:
    graph = FactorGraph.from_networkx(WEIGHTED, Spin)
    return graph, graph.init(zoo.KEY)


def test_renamed_and_merged_graphs_keep_labels() -> None:
    graph, start = labelled()
    renamed, params = rename(graph, {"x": "y"}, params=start)
    assert dict(renamed.labels) == {"y": ("a", "b", "c", "d")}
    assert dict(renamed.to_networkx(params).nodes(data="bias")) == dict(
        WEIGHTED.nodes(data="bias")
    )
    assert rename(renamed, {"y": "x"}) == graph
    more = FactorGraph({"x": Spin(4)}, factors=[Bias("x", name="more")])
    assert dict(merge(more, graph, zoo.graph("rbm")).labels) == {
        "x": ("a", "b", "c", "d")
    }
    other = FactorGraph(
        {"x": Spin(4)}, factors=[Bias("x", name="more")], labels={"x": "abdc"}
    )
    with pytest.raises(DeclarationError, match="block 'x'.*labels"):
        merge(graph, other)


def test_remaining_units_keep_labels() -> None:
    known = np.array([False, True, False, True])
    rest = condition(
        labelled()[0], x=ebmpp.Observed(np.array([1.0, -1.0, 1.0, 1.0]), known)
    )
    assert dict(rest.labels) == {"x": ("a", "c")}
    factors, labels = [Bias("x"), Bilinear("x", "h")], {"x": "abcd", "h": "z"}
    graph = FactorGraph({"x": Spin(4)}, {"h": Spin(1)}, factors, labels=labels)
    assert dict(condition(graph, x=np.ones(4)).labels) == {"h": ("z",)}
    pieces = split(graph, "x", {"even": [2, 0], "odd": [1, 3]})
    assert dict(pieces.labels) == {"even": ("c", "a"), "odd": ("b", "d"), "h": ("z",)}


class StandIn:
    """The parts of dimod.BinaryQuadraticModel that are used, for machines without dimod."""

    def __init__(
        self, linear: dict, quadratic: dict, offset: float, vartype: str
    ) -> None:
        self.linear, self.quadratic, self.offset = linear, quadratic, offset
        self.vartype = SimpleNamespace(name=vartype)

    def energy(self, sample: dict) -> float:
        linear = sum(h * sample[v] for v, h in self.linear.items())
        return (
            self.offset
            + linear
            + sum(w * sample[a] * sample[b] for (a, b), w in self.quadratic.items())
        )


@pytest.fixture(params=["stand-in", "dimod"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of binary quadratic models that ``import dimod`` gives."""
    if request.param == "dimod":
        return pytest.importorskip("dimod").BinaryQuadraticModel
    module = ModuleType("dimod")
    module.__dict__["BinaryQuadraticModel"] = StandIn
    monkeypatch.setitem(sys.modules, "dimod", module)
    return StandIn


@pytest.mark.parametrize("kind", ["SPIN", "BINARY"])
def test_bqm_round_trip_keeps_the_energy(model: type, kind: str) -> None:
    linear = {"a": 0.5, ("b", 1): -1.0, 7: 0.25}
    bqm = model(linear, {("a", ("b", 1)): -0.5, (7, "a"): 2.0}, 3.0, kind)
    graph = FactorGraph.from_bqm(bqm, block="s")
    assert graph.families["s"] == {"SPIN": Spin, "BINARY": Bernoulli}[kind](3)
    assert set(graph.labels["s"]) == set(linear)
    params, x = graph.init(zoo.KEY), random_state(graph.families["s"], 0, (6,))
    samples = [dict(zip(graph.labels["s"], row.tolist(), strict=True)) for row in x]
    expected = [bqm.energy(sample) - 3.0 for sample in samples]
    np.testing.assert_allclose(graph.energy(params, {"s": x}), expected, rtol=1e-5)
    result = graph.to_bqm(params)
    assert result.vartype.name == kind
    np.testing.assert_allclose(
        [result.energy(sample) for sample in samples], expected, rtol=1e-5
    )


def test_dicts_of_an_ising_model() -> None:
    graph = FactorGraph.from_bqm(({"a": 0.5}, {("b", "a"): -1.0}))
    assert graph.labels["x"] == ("a", "b")
    params = graph.init(zoo.KEY)
    assert params["x"].tolist() == [-0.5, 0.0] and params["x:x"].tolist() == [1.0]
    assert list(FactorGraph.from_bqm(({"a": 0.5}, {})).init(zoo.KEY)) == ["x"]


def test_terms_of_one_pair_add_up_as_in_dimod() -> None:
    graph = FactorGraph.from_bqm(
        ({"c": 0.5}, {("a", "b"): -1, ("b", "a"): -0.5, ("c", "c"): 3.0})
    )
    params = graph.init(zoo.KEY)
    assert (graph.labels["x"], params["x"].tolist()) == (
        ("c", "a", "b"),
        [-0.5, 0.0, 0.0],
    )
    assert params["x:x"].tolist() == [1.5]
    bits = FactorGraph.from_bqm(
        StandIn({"a": 0.5}, {("a", "a"): 3.0, ("b", "b"): 1.0}, 0.0, "BINARY")
    )
    assert bits.init(zoo.KEY)["x"].tolist() == [-3.5, -1.0]


@pytest.mark.parametrize("kind", ["dict", "matrix"])
def test_qubo_has_the_distribution_of_its_quadratic_form(kind: str) -> None:
    matrix = np.random.default_rng(0).normal(size=(4, 4))
    matrix[1, 2] = matrix[2, 1] = 0.0
    terms = {
        (f"x{i}", f"x{j}"): value for (i, j), value in np.ndenumerate(matrix) if value
    }
    graph = FactorGraph.from_qubo(terms if kind == "dict" else matrix, block="q")
    names = ("x0", "x1", "x2", "x3") if kind == "dict" else (0, 1, 2, 3)
    assert (graph.families["q"], graph.labels["q"]) == (Bernoulli(4), names)
    states, probabilities = ebmpp.exact.probabilities(graph, graph.init(zoo.KEY))
    values = np.array([x @ matrix @ x for x in np.asarray(states["q"], float)])
    expected = np.exp(-values) / np.exp(-values).sum()
    np.testing.assert_allclose(probabilities, expected, 1e-5)
    np.testing.assert_array_equal(np.argmax(probabilities), np.argmin(values))


def test_qubo_of_unit_terms_has_no_pairs() -> None:
    graph = FactorGraph.from_qubo(np.diag([1.0, 0.0]))
    assert graph.init(zoo.KEY)["x"].tolist() == [-1.0, 0.0]
    assert len(graph.factors) == 1


def test_parallel_edges_add_their_weights() -> None:
    torus = nx.MultiGraph()
    for i, j in np.ndindex(2, 4):
        torus.add_edges_from(
            [((i, j), ((i + 1) % 2, j)), ((i, j), (i, (j + 1) % 4))], weight=0.3
        )
    expected = 6.719073  # by enumeration in float64
    weighted = FactorGraph.from_networkx(torus, Spin, bias=False)
    np.testing.assert_allclose(
        ebmpp.exact.log_partition(weighted, weighted.init(zoo.KEY)), expected, 1e-6
    )
    network = weighted.to_networkx(weighted.init(zoo.KEY))
    assert sorted(w for *_, w in network.edges(data="weight")) == pytest.approx(
        [0.3] * 8 + [0.6] * 4
    )
    numbered = nx.convert_node_labels_to_integers(torus)
    plain = nx.MultiGraph(list(numbered.edges()))
    pairs = [(int(a), int(b)) for a, b in numbered.edges()]
    for edges in (plain, pairs):
        graph = FactorGraph({"x": Spin(8)}, factors=[Pairwise("x", edges, shared=True)])
        params = {"x:x": np.float32(0.3)}
        np.testing.assert_allclose(
            ebmpp.exact.log_partition(graph, params), expected, 1e-6
        )
        natural = graph.natural_parameters(params, {"x": np.ones(8)}, "x")
        np.testing.assert_allclose(natural, 1.2, 1e-6)


def test_couplings_are_given_by_edge_in_any_order() -> None:
    rng = np.random.default_rng(0)
    listed = [("d", "a"), ("c", "b"), ("a", "c"), ("b", "d"), ("a", "b")]
    couplings = dict(zip(listed, rng.normal(size=5), strict=True))
    network = nx.Graph()
    network.add_nodes_from("abcd")
    network.add_edges_from(listed)
    assert list(network.edges) != listed  # so an array in this order is another glass
    nx.set_edge_attributes(network, couplings, "weight")
    glass = FactorGraph.from_networkx(network, Spin, bias=False)
    x = np.array(list(np.ndindex(2, 2, 2, 2))) * 2 - 1.0
    spins = dict(zip("abcd", x.T, strict=True))
    expected = -sum(w * spins[a] * spins[b] for (a, b), w in couplings.items())
    params = glass.init(zoo.KEY)
    np.testing.assert_allclose(glass.energy(params, {"x": x}), expected, atol=1e-5)
    in_order = [
        couplings.get(edge, couplings.get(edge[::-1])) for edge in network.edges
    ]
    np.testing.assert_allclose(params["x:x"], in_order)
    network_of_params = glass.to_networkx(params)
    for edge, weight in couplings.items():
        assert network_of_params.edges[edge]["weight"] == pytest.approx(weight)


def test_networks_of_thousands_of_units_take_no_second_derivatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They took 12 s of 5,000 variables."""
    monkeypatch.delattr("ebmpp.graph.networks._second_derivatives")
    graph = FactorGraph.from_networkx(nx.cycle_graph(5000), Spin, shared=True)
    network = graph.to_networkx(
        {"x": np.ones(5000), "x:x": np.full((), 0.5, np.float32)}
    )
    assert network.number_of_edges() == 5000 and network.edges[4999, 0]["weight"] == 0.5


def test_wrong_bqms(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="bqm"):
        FactorGraph.from_bqm(StandIn({"a": 1.0}, {}, 0.0, "INTEGER"))
    monkeypatch.setitem(sys.modules, "dimod", None)  # as if it were not installed
    with pytest.raises(ImportError, match="dimod"):
        zoo.graph("rbm").to_bqm(zoo.params("rbm"))
