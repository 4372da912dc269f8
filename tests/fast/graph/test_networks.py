# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units and weights out and in again: networkx, and dimod's binary quadratic models."""

import sys
from types import ModuleType, SimpleNamespace

import networkx as nx
import numpy as np
import pytest

import jax

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Convolution,
    Factor,
    FactorGraph,
    Observed,
    Pairwise,
    Spin,
    condition,
    exact,
    layered,
)
from ebmpp.errors import ArgumentError, DeclarationError, IntractableError
from ebmpp.graph import marginalize, merge, rename, split
from helpers import random_params, random_state, three_way_energy

WEIGHTED = nx.Graph()
WEIGHTED.add_nodes_from(
    [("a", {"bias": 0.5}), ("b", {"bias": -1.0}), ("c", {"bias": 0.0}), ("d", {"bias": 2.0})]
)
WEIGHTED.add_weighted_edges_from([("b", "a", 1.5), ("c", "d", 0.0), ("a", "d", -2.0)])


def total(network: nx.Graph, value: dict) -> float:
    """Minus the energy, node by node and edge by edge."""
    alone = sum(bias * value[node] for node, bias in network.nodes(data="bias"))
    return alone + sum(w * value[a] * value[b] for a, b, w in network.edges(data="weight"))


# -- networkx --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [Spin, Bernoulli])
def test_a_network_comes_back(family) -> None:
    graph = FactorGraph.from_networkx(WEIGHTED, family)
    made = graph.to_networkx(graph.init(jax.random.key(0)))
    assert list(made) == list(WEIGHTED)  # and in their order
    assert set(map(frozenset, made.edges)) == set(map(frozenset, WEIGHTED.edges))
    for a, b, weight in WEIGHTED.edges(data="weight"):
        assert made.edges[a, b]["weight"] == weight
    assert {n: made.nodes[n]["bias"] for n in made} == dict(WEIGHTED.nodes(data="bias"))
    again = FactorGraph.from_networkx(made, family)
    x = random_state(again.families["x"], 0, (5,))
    energies = [g.energy(g.init(jax.random.key(1)), {"x": x}) for g in (graph, again)]
    np.testing.assert_allclose(*energies, rtol=1e-5)


@pytest.mark.parametrize(
    "graph",
    [
        layered(v=Bernoulli((2, 2)), h=Spin(3), g=Bernoulli(2)),
        FactorGraph(
            {"v": Spin((1, 4, 4))},
            {"h": Spin((2, 3, 3))},
            [Bias("v"), Bias("h"), Convolution("v", "h", window=(2, 2))],
        ),
        FactorGraph(
            {"v": Spin(3)},
            {"h": Bernoulli(2)},
            [Bias("v"), Pairwise("v", [(2, 0), (1, 2)], shared=True), Bilinear("v", "h")],
        ),
    ],
)
def test_the_network_has_the_energy(graph) -> None:
    params = random_params(graph, 1)
    network = graph.to_networkx(params)
    for seed in range(4):
        x = {b: random_state(f, seed) for b, f in graph.families.items()}
        number = lambda f, i: i[0] if len(f.shape) == 1 else i
        value = {(b, number(graph.families[b], i)): v for b, a in x.items() for i, v in np.ndenumerate(a)}
        assert set(value) == set(network)
        at_zero = float(graph.energy(params, x)) + total(network, value)
        np.testing.assert_allclose(at_zero, 0, atol=1e-4)
    assert {network.nodes[n]["block"] for n in network} == set(graph.families)


def test_without_params_it_is_the_graph_of_the_blocks() -> None:
    assert set(layered(v=Bernoulli(2), h=Bernoulli(3)).to_networkx()) == {"v", "h"}


def test_rows_of_many_units_are_found_piece_by_piece(monkeypatch) -> None:
    lattice = FactorGraph.from_networkx(nx.grid_2d_graph(4, 5), Spin)
    params = random_params(lattice, 2)
    whole = lattice.to_networkx(params)
    monkeypatch.setattr("ebmpp.graph.networks._ENTRIES", 60)  # three units at a time, the last two
    assert nx.utils.graphs_equal(lattice.to_networkx(params), whole)
    assert whole.number_of_edges() == nx.grid_2d_graph(4, 5).number_of_edges()


def test_networks_that_cannot_be_made() -> None:
    blocks = {"x": Bernoulli(2), "y": Bernoulli(2)}
    gate = Factor("x", "y", "h", energy=three_way_energy, init=np.ones((2, 2, 2)))
    graph = FactorGraph(blocks, {"h": Bernoulli(2)}, [gate])
    for out in (graph.to_networkx, graph.to_bqm):
        with pytest.raises(IntractableError, match="three units or more interact"):
            out(graph.init(jax.random.key(0)))
    colours = layered(v=Categorical(2, 3), h=Bernoulli(2))
    with pytest.raises(ArgumentError, match=r"block 'v' \(Categorical\(2, num_categories=3\)\) have several"):
        colours.to_networkx(random_params(colours))
    some = nx.path_graph(3)
    some.nodes[0]["bias"] = 1.0
    with pytest.raises(DeclarationError, match="1 of 3 nodes have a bias"):
        FactorGraph.from_networkx(some, Spin)
    with pytest.raises(DeclarationError, match=r"init has shape \(3,\), expected \(2,\)"):
        FactorGraph({"x": Spin(2)}, factors=[Bias("x", init=np.zeros(3))])


def test_categories_have_a_bias_a_statistic() -> None:
    network = nx.path_graph(3)
    nx.set_node_attributes(network, {n: np.array([n, 1.0, -1.0]) for n in network}, "bias")
    made = FactorGraph.from_networkx(network, lambda n: Categorical(n, 3), shared=True)
    start = made.init(jax.random.key(0))["x"]
    np.testing.assert_array_equal(start, [[n, 1.0, -1.0] for n in network])


def with_values(**attributes: object) -> nx.Graph:
    made = nx.path_graph(["a", "b", "c"])
    nx.set_node_attributes(made, {"a": 0.5, "b": 1.0, "c": attributes.get("bias", 0.0)}, "bias")
    nx.set_edge_attributes(made, {("a", "b"): 1.0, ("b", "c"): attributes.get("weight", 2.0)}, "weight")
    return made


@pytest.mark.parametrize("weight", ["heavy", [1.0, 2.0], {}])
def test_weights_that_are_no_numbers_are_told(weight) -> None:
    told = (
        r"edge \('b', 'c'\) has weight .*, expected one number; give each one that as its 'weight', or leave"
    )
    with pytest.raises(DeclarationError, match="from_networkx: " + told):
        FactorGraph.from_networkx(with_values(weight=weight), Spin)
    with pytest.raises(DeclarationError, match=r"Pairwise\('x'\): " + told):
        Pairwise("x", with_values(weight=weight))


@pytest.mark.parametrize("bias", ["high", [1.0, 2.0]])
def test_biases_that_are_no_numbers_are_told(bias) -> None:
    told = (
        r"node 'c' \(a unit of Spin\(3\)\) has bias .*, expected one number; give each one that as its 'bias'"
    )
    with pytest.raises(DeclarationError, match=told):
        FactorGraph.from_networkx(with_values(bias=bias), Spin)
    categories = lambda n: Categorical(n, 3)
    with pytest.raises(
        DeclarationError, match=r"node 'a' \(a unit of Categorical\(3, .* has bias 0.5, expected an "
    ):
        FactorGraph.from_networkx(with_values(), categories)


# -- labels in graphs made of a graph ----------------------------------------------------------------

LABELLED = FactorGraph.from_networkx(WEIGHTED, Spin)
START = LABELLED.init(jax.random.key(0))


def test_labels_go_with_names() -> None:
    made, params = rename(LABELLED, {"x": "y"}, params=START)
    assert dict(made.labels) == {"y": ("a", "b", "c", "d")}
    network, wanted = made.to_networkx(params), LABELLED.to_networkx(START)
    assert list(network) == list("abcd")
    assert dict(network.nodes(data="bias")) == dict(wanted.nodes(data="bias"))
    assert nx.utils.edges_equal(network.edges(data=True), wanted.edges(data=True))
    assert rename(made, {"y": "x"}) == LABELLED


def test_labels_are_merged() -> None:
    other = layered(v=Bernoulli(2), h=Bernoulli(1))
    more = FactorGraph({"x": Spin(4)}, factors=[Bias("x", name="more")])
    for graphs in ((LABELLED, other, more), (more, other, LABELLED)):
        assert dict(merge(*graphs).labels) == {"x": ("a", "b", "c", "d")}
    wrong = FactorGraph({"x": Spin(4)}, factors=[Bias("x", name="more")], labels={"x": "abdc"})
    with pytest.raises(
        DeclarationError, match="unit 2 of block 'x' is labelled 'c' in one graph and 'd' in "
    ):
        merge(LABELLED, wrong)


def test_units_that_stay_keep_their_labels() -> None:
    known = np.array([False, True, False, True])
    rest = condition(LABELLED, x=Observed(np.array([1.0, -1.0, 1.0, 1.0]), known))
    assert dict(rest.labels) == {"x": ("a", "c")}
    joined = FactorGraph(
        {"x": Spin(4)}, {"h": Spin(1)}, [Bias("x"), Bilinear("x", "h")], labels={"x": "abcd", "h": "z"}
    )
    assert dict(condition(joined, x=np.ones(4)).labels) == {"h": ("z",)}
    assert dict(condition(joined, h=np.ones(1)).labels) == {"x": tuple("abcd")}
    pieces = dict(split(joined, "x", {"even": [2, 0], "odd": [1, 3]}).labels)
    assert pieces == {"even": ("c", "a"), "odd": ("b", "d"), "h": ("z",)}


def test_a_network_with_biases_is_split() -> None:
    made, params = split(LABELLED, "x", {"even": [2, 0], "odd": [1, 3]}, params=START)
    assert made.init(jax.random.key(0))["even"].tolist() == params["even"].tolist() == [0.0, 0.5]
    np.testing.assert_allclose(
        exact.log_partition(made, params), exact.log_partition(LABELLED, START), rtol=1e-6
    )
    network = made.to_networkx(params)
    assert {n: b for (_, n), b in network.nodes(data="bias")} == dict(WEIGHTED.nodes(data="bias"))


def test_summed_out_units_leave_the_others_their_labels() -> None:
    graph = FactorGraph(
        {"a": Spin(1)}, {"h": Bernoulli(3)}, [Bias("h"), Bilinear("a", "h")], labels={"a": [7], "h": "xyz"}
    )
    assert dict(marginalize(graph, "h").labels) == {"a": (7,)}


def test_given_biases_are_not_overridden_by_data() -> None:
    graph = FactorGraph({"x": Bernoulli(2)}, factors=[Bias("x", init=np.array([1.0, -1.0]))])
    assert graph.init(jax.random.key(0), data=np.ones((5, 2)))["x"].tolist() == [1.0, -1.0]


# -- dimod -----------------------------------------------------------------------------------------


class StandIn:
    """As much of dimod.BinaryQuadraticModel as is used, for machines that lack dimod."""

    def __init__(self, linear: dict, quadratic: dict, offset: float, vartype: str) -> None:
        self.linear, self.quadratic, self.offset = linear, quadratic, offset
        self.vartype = SimpleNamespace(name=vartype)

    def energy(self, sample: dict) -> float:
        alone = sum(h * sample[v] for v, h in self.linear.items())
        return self.offset + alone + sum(w * sample[a] * sample[b] for (a, b), w in self.quadratic.items())


@pytest.fixture(params=["stand-in", "dimod"])
def models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of binary quadratic models that ``import dimod`` gives."""
    if request.param == "dimod":
        return pytest.importorskip("dimod").BinaryQuadraticModel
    module = ModuleType("dimod")
    module.__dict__["BinaryQuadraticModel"] = StandIn
    monkeypatch.setitem(sys.modules, "dimod", module)
    return StandIn


@pytest.mark.parametrize("kind", ["SPIN", "BINARY"])
def test_a_bqm_in_and_out_has_its_energy(models: type, kind: str) -> None:
    linear = {"a": 0.5, ("b", 1): -1.0, 7: 0.25}
    quadratic = {("a", ("b", 1)): -0.5, (7, "a"): 2.0}
    bqm = models(linear, quadratic, 3.0, kind)
    graph = FactorGraph.from_bqm(bqm, block="s")
    assert graph.families["s"] == {"SPIN": Spin, "BINARY": Bernoulli}[kind](3)
    assert set(graph.labels["s"]) == set(linear)
    params = graph.init(jax.random.key(0))
    x = random_state(graph.families["s"], 0, (6,))
    samples = [dict(zip(graph.labels["s"], row.tolist(), strict=True)) for row in np.asarray(x)]
    wanted = [bqm.energy(s) - 3.0 for s in samples]
    np.testing.assert_allclose(graph.energy(params, {"s": x}), wanted, rtol=1e-5)
    out = graph.to_bqm(params)
    assert out.vartype.name == kind
    np.testing.assert_allclose([out.energy(s) for s in samples], wanted, rtol=1e-5)


def test_a_machine_of_two_blocks_as_a_bqm(models: type) -> None:
    rbm = layered(v=Bernoulli(3), h=Bernoulli(2))
    params = random_params(rbm, 3)
    bqm = rbm.to_bqm(params)
    x = {b: random_state(f, 1) for b, f in rbm.families.items()}
    sample = {(b, i): float(v) for b, a in x.items() for i, v in enumerate(a)}
    np.testing.assert_allclose(bqm.energy(sample), rbm.energy(params, x), rtol=1e-5)


def test_the_dicts_of_an_ising_model() -> None:
    graph = FactorGraph.from_bqm(({"a": 0.5}, {("b", "a"): -1.0}))
    assert graph.labels["x"] == ("a", "b")
    params = graph.init(jax.random.key(0))
    assert params["x"].tolist() == [-0.5, 0.0] and params["x:x"].tolist() == [1.0]
    alone = FactorGraph.from_bqm(({"a": 0.5}, {}))
    assert list(alone.init(jax.random.key(0))) == ["x"]


def test_bqms_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (3, ({}, 1), "x"):
        with pytest.raises(ArgumentError, match=r"a dimod.BinaryQuadraticModel, or two dicts \(h, J\)"):
            FactorGraph.from_bqm(wrong)
    with pytest.raises(ArgumentError, match="of type 'INTEGER'"):
        FactorGraph.from_bqm(StandIn({"a": 1.0}, {}, 0.0, "INTEGER"))
    with pytest.raises(ArgumentError, match="no variable"):
        FactorGraph.from_bqm(({}, {}))
    mixed = layered(v=Bernoulli(2), h=Spin(2))
    with pytest.raises(ArgumentError, match="all spins or all binary"):
        mixed.to_bqm(random_params(mixed))
    monkeypatch.setitem(sys.modules, "dimod", None)  # as if it were not installed
    spins = layered(v=Spin(2), h=Spin(2))
    with pytest.raises(ImportError, match=r"pip install dimod, or ebmpp\[dimod\]"):
        spins.to_bqm(random_params(spins))
