# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units of one block that interact: declaration, colouring and natural parameters."""

import pickle

from hypothesis import given, settings, strategies as st
import networkx as nx
import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Exponential,
    Factor,
    FactorGraph,
    Gaussian,
    Observed,
    Pairwise,
    Poisson,
    Spin,
    exact,
)
from ebmpp.errors import ArgumentError, DeclarationError, DomainError, IntractableError, NotMultiAffineError
from ebmpp.graph import rename
from ebmpp.graph.energy import natural_rows
from ebmpp.moves.gibbs import visit
from ebmpp.moves.target import Target
from helpers import enumerate_numpy, numpy_energy, random_params, random_state


def alone(family, edges, **options):
    return FactorGraph({"x": family}, factors=[Bias("x"), Pairwise("x", edges, **options)])


def triples(w, t):
    return -w[0] * t[0] * t[1] * t[2] - w[1] * t[1] * t[3]


TRIPLES = Factor(
    "x", energy=triples, init=np.zeros(2), name="w", lateral={"x": [(0, 1), (1, 2), (0, 2), (1, 3)]}
)

# -- declaration ---------------------------------------------------------------------------------


def test_a_renamed_block_keeps_its_pairs() -> None:
    lattice = nx.grid_2d_graph(2, 3)
    made = rename(FactorGraph.from_networkx(lattice, Spin), {"x": "y"}, factors={"x:x": "y:y"})
    named = FactorGraph.from_networkx(lattice, Spin, block="y")
    assert made == named
    assert named.labels == {"y": tuple(lattice.nodes)} and pickle.loads(pickle.dumps(named)) == named


def test_a_lattice_has_two_layers_and_a_triangle_three() -> None:
    assert FactorGraph.from_networkx(nx.grid_2d_graph(6, 4), family=Spin).layers == (("x[0]",), ("x[1]",))
    assert len(alone(Spin(3), nx.complete_graph(3)).layers) == 3


def test_parts_stand_between_the_layers_of_other_blocks() -> None:
    graph = FactorGraph(
        {"v": Bernoulli(4)},
        {"h": Bernoulli(2), "g": Bernoulli(2)},
        [Bias("v"), Bilinear("v", "h"), Bilinear("v", "g"), Pairwise("v", [(0, 1), (2, 3)])],
    )
    assert graph.layers == (("v[0]",), ("v[1]",), ("h", "g"))
    assert graph.block_layers == (("v",), ("h", "g"))
    units = graph.splits["v"].units
    assert sorted(np.concatenate(units).tolist()) == [0, 1, 2, 3]
    assert all(len({0, 1} & set(u.tolist())) == len({2, 3} & set(u.tolist())) == 1 for u in units)


def test_units_by_index_are_units_by_number() -> None:
    lattice = nx.grid_2d_graph(3, 4)
    by_number = [(4 * a + b, 4 * c + d) for (a, b), (c, d) in lattice.edges]
    x = random_state(Spin((3, 4)), 0)
    graphs = [alone(Spin((3, 4)), edges) for edges in (lattice, by_number)]
    params = random_params(graphs[0])
    assert graphs[0].energy(params, {"x": x}) == graphs[1].energy(params, {"x": x})


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 9)], r"pair \[0, 9\] names a unit that block 'x' \(Spin\(4\)\) does not have"),
        ([(2, 2)], "unit 2 of block 'x' is joined to itself.*Bias"),
        ([(0, 1), (2, 3), (1, 0)], "units 0 and 1 of block 'x' are joined twice"),
        ([((0, 0), (0, 1))], "units are given by 2 indices, and block 'x' has shape"),
        ([(0.5, 1.0)], "pairs of units.*got an array of shape"),
        (nx.Graph([("a", "b")]), "pairs of units"),
    ],
)
def test_wrong_pairs_are_refused(edges, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        alone(Spin(4), edges)


@pytest.mark.parametrize("none", [[], (), np.array([]), np.zeros((0, 2), int), nx.empty_graph(4)])
def test_an_empty_list_is_no_pairs(none) -> None:
    graph = FactorGraph({"x": Spin(4)}, factors=[Bias("x"), Pairwise("x", none)])
    assert graph.param_shapes["x:x"].shape == (0,) and graph.layers == (("x",),)
    field = np.array([0.5, -1.0, 0.0, 2.0], np.float32)
    made = exact.moments(graph, {"x": field, "x:x": np.zeros(0, np.float32)})
    np.testing.assert_allclose(made["x"], np.tanh(field), rtol=1e-5)


def test_wrong_networks_are_refused() -> None:
    with pytest.raises(DeclarationError, match="from_networkx: the graph has no node"):
        FactorGraph.from_networkx(nx.Graph(), Spin)
    with pytest.raises(ArgumentError, match="from_networkx: graph is a networkx graph .*, not 3"):
        FactorGraph.from_networkx(3, Spin)
    with pytest.raises(DeclarationError, match=r"4 nodes, and Spin\(3\) 3 units"):
        FactorGraph.from_networkx(nx.path_graph(4), Spin(3))
    partly = nx.Graph([(0, 1, {"weight": 2.0}), (1, 2)])
    with pytest.raises(DeclarationError, match="1 of 2 edges have a weight"):
        FactorGraph.from_networkx(partly, Spin)
    with pytest.raises(DeclarationError, match=r"Pairwise\('x'\): 1 of 2 edges have a weight"):
        Pairwise("x", partly)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nx.DiGraph([(0, 1), (2, 3)]), r": DiGraph with .* is directed, .*; give graph.to_undirected\(\)"),
        (
            nx.MultiDiGraph([(0, 1), (2, 3)]),
            r": MultiDiGraph .* is directed, .*; give graph.to_undirected\(\)",
        ),
        (nx.MultiGraph([(0, 1), (2, 3)]), r": MultiGraph .* parallel edges; give networkx.Graph\(graph\)"),
    ],
)
def test_networks_with_directions_or_parallel_edges_are_refused(network: nx.Graph, message: str) -> None:
    with pytest.raises(DeclarationError, match="the lateral pairs of block 'x'" + message):
        alone(Spin(4), network)
    with pytest.raises(DeclarationError, match="from_networkx" + message):
        FactorGraph.from_networkx(network, Spin)


def test_weights_of_a_network_are_where_its_params_start() -> None:
    network = nx.Graph()
    network.add_weighted_edges_from([("b", "a", 2.0), ("a", "c", -1.0)])
    graph = FactorGraph.from_networkx(network, Spin)
    # nodes in their order: b is unit 0, a unit 1, c unit 2
    assert graph.init(jax.random.key(0))["x:x"].tolist() == [2.0, -1.0]
    assert float(graph.energy(graph.init(jax.random.key(0)), {"x": jnp.array([1.0, 1.0, -1.0])})) == -3.0
    numbered = nx.relabel_nodes(network, {"b": 0, "a": 1, "c": 2})
    assert alone(Spin(3), numbered).init(jax.random.key(0))["x:x"].tolist() == [2.0, -1.0]
    given = Pairwise("x", numbered, init=np.array([3.0, 4.0]))
    graph = FactorGraph({"x": Spin(3)}, factors=[Bias("x"), given])
    assert graph.init(jax.random.key(0))["x:x"].tolist() == [3.0, 4.0]


def test_graphs_compare_by_value_and_know_their_pairs() -> None:
    first, second = (alone(Spin(4), nx.cycle_graph(4)) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert first != alone(Spin(4), nx.path_graph(4)) and first != alone(
        Spin(4), nx.cycle_graph(4), shared=True
    )
    assert "Pairwise('x', <4 pairs>)" in repr(first)


def test_an_energy_that_joins_more_units_than_it_says_is_refused() -> None:
    less = Factor("x", energy=triples, init=np.zeros(2), name="w", lateral={"x": [(0, 1), (1, 2), (1, 3)]})
    with pytest.raises(NotMultiAffineError, match="units of block 'x'.*name every pair"):
        FactorGraph({"x": Bernoulli(4)}, factors=[less])
    square = Factor("x", energy=lambda w, t: -w * t[0] ** 2 * t[1], init=np.ones(()), lateral={"x": [(0, 1)]})
    with pytest.raises(NotMultiAffineError, match="units of block 'x'"):
        FactorGraph({"x": Bernoulli(2)}, factors=[square])
    with pytest.raises(DeclarationError, match="lateral names block 'y'"):
        Factor("x", energy=triples, lateral={"y": [(0, 1)]})


def test_what_needs_independent_units_is_refused() -> None:
    graph = alone(Spin(4), nx.cycle_graph(4))
    params, x = graph.init(jax.random.key(0)), {"x": jnp.ones(4)}
    with pytest.raises(IntractableError, match=r"units of block 'x' interact.*'x\[0\]'"):
        graph.conditional(params, x, "x")
    with pytest.raises(IntractableError, match="units of block 'x' interact, so they cannot be summed out"):
        graph.marginal(params, {}, "x")


def test_models_that_do_not_normalise_are_refused() -> None:
    field = alone(Gaussian(3), nx.path_graph(3))
    with pytest.raises(DomainError, match="precision"):
        field.check({"x": jnp.zeros(3), "x:x": jnp.array([0.9, 0.9])})
    field.check({"x": jnp.zeros(3), "x:x": jnp.array([0.6, 0.6])})
    counts = alone(Poisson(3), nx.path_graph(3))
    with pytest.raises(DomainError, match="units of block 'x'.*at most 0"):
        counts.check({"x": jnp.zeros(3), "x:x": jnp.array([0.1, -0.1])})
    counts.check({"x": jnp.zeros(3), "x:x": jnp.array([-0.2, -0.1])})
    times = alone(Exponential(2), [(0, 1)])
    with pytest.raises(DomainError):
        times.check({"x": -jnp.ones(2), "x:x": jnp.array([0.1])})


# -- surgery and files -----------------------------------------------------------------------------


def test_surgery_keeps_the_pairs() -> None:
    graph = FactorGraph(
        {"v": Bernoulli(4)},
        {"h": Bernoulli(2)},
        [Bias("v"), Bilinear("v", "h"), Pairwise("v", nx.cycle_graph(4))],
    )
    params = random_params(graph, seed=6, scale=1.0)
    renamed, same = ebmpp.graph.rename(graph, {"v": "w"}, params=params)
    assert [f.name for f in renamed.factors] == ["w", "w:h", "w:w"]
    assert float(exact.log_partition(renamed, same)) == pytest.approx(
        float(exact.log_partition(graph, params))
    )
    known = np.array([True, False, False, True])
    part = ebmpp.condition(graph, v=Observed(jnp.ones(4), known))
    states, probs, log_z = enumerate_numpy(graph, params)
    agree = [p for p, x in zip(probs, states, strict=True) if (x["v"][known] == 1).all()]
    assert part.splits["v"].num_parts == 2
    assert float(exact.log_partition(part, params)) == pytest.approx(log_z + np.log(sum(agree)), abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"init": np.linspace(-1, 1, 12)}])
def test_a_lattice_is_saved_and_read(options, tmp_path) -> None:
    graph = alone(Spin((3, 3)), nx.grid_2d_graph(3, 3), **options)
    params = random_params(graph)
    ebmpp.save(tmp_path / "lattice", graph, params)
    again, values = ebmpp.load(tmp_path / "lattice")
    assert again == graph and all((values[n] == params[n]).all() for n in params)


# -- energy and natural parameters ---------------------------------------------------------------

FAMILIES = {
    "spin": Spin,
    "categorical": lambda n: Categorical(n, 3),
    "gaussian": Gaussian,
    "learned": lambda n: Gaussian(n, variance="learned"),
}
NETWORKS = {
    "path": nx.path_graph(5),
    "many parts": nx.complete_graph(6),
    "a hub": nx.star_graph(14),  # more neighbours than slots of the table
    "two hubs and many parts": nx.disjoint_union(nx.star_graph(14), nx.wheel_graph(6)),
}


CASES = [("spin", "a hub"), ("categorical", "path"), ("learned", "many parts")]
ALL = [(family, network) for family in FAMILIES for network in NETWORKS]


@pytest.mark.parametrize(
    ("family", "network"), [pytest.param(*c, marks=[] if c in CASES else pytest.mark.slow) for c in ALL]
)
def test_parts_have_the_natural_parameters_of_the_energy(family: str, network: str) -> None:
    """Looked up unit by unit, they are minus the gradient of the energy, which an oracle agrees with."""
    made = FAMILIES[family](len(NETWORKS[network]))
    graph = FactorGraph(
        {"x": made}, {"h": Bernoulli(2)}, [Bias("x"), Bilinear("x", "h"), Pairwise("x", NETWORKS[network])]
    )
    params = random_params(graph, seed=3)
    x = {"x": random_state(made, 1, (3,)), "h": random_state(Bernoulli(2), 2, (3,))}
    rows = {b: jnp.asarray(v) for b, v in x.items()}
    seen = []

    def new(eta, view, part):
        seen.append(eta["x"].shape[1])
        return {"x": eta["x"] if made.stat_shape == () else eta["x"][..., 0]}

    moved = visit(Target(graph, params), rows, ("x",), new)["x"]
    assert max(seen) == max(len(u) for u in graph.splits["x"].units)
    # one part at a time: units of the first part saw the state as it was
    whole = natural_rows(graph, params, rows, ("x",))["x"]
    whole = whole if made.stat_shape == () else whole[..., 0]
    first = graph.splits["x"].units[0]
    np.testing.assert_allclose(moved[:, first], whole[:, first].astype(moved.dtype), rtol=1e-5, atol=1e-5)
    energies = [numpy_energy(graph, params, {b: v[i] for b, v in x.items()}) for i in range(3)]
    np.testing.assert_allclose(graph.energy(params, x), energies, rtol=1e-5, atol=1e-4)


@settings(max_examples=6, deadline=None)
@given(st.integers(2, 7), st.floats(0.1, 1.0), st.integers(0, 1000))
def test_any_network_agrees_with_enumeration(size: int, density: float, seed: int) -> None:
    network = nx.gnp_random_graph(size, density, seed=seed)
    graph = FactorGraph.from_networkx(network, family=Spin)
    colors = {u: i for i, (name,) in enumerate(graph.layers) for u in _units(graph, name)}
    assert set(colors) == set(network.nodes) and all(colors[a] != colors[b] for a, b in network.edges)
    params = random_params(graph, seed=seed)
    _, _, log_z = enumerate_numpy(graph, params)
    assert float(exact.log_partition(graph, params)) == pytest.approx(log_z, abs=1e-4)


def _units(graph, name: str) -> list[int]:
    if not graph.splits:
        return list(range(graph.families["x"].size))
    return graph.splits["x"].units[int(name[2:-1])].tolist()


def test_a_part_s_conditional_is_that_of_enumeration() -> None:
    graph = FactorGraph({"x": Bernoulli(4)}, factors=[Bias("x"), TRIPLES])
    params = random_params(graph, seed=5, scale=1.0)
    states, probs, _ = _enumerate(graph, params)
    units = graph.splits["x"].units[1]
    at = np.array([1.0, 0.0, 1.0, 1.0])
    law = graph.conditional(params, {"x": at}, "x[1]")
    others = [i for i in range(4) if i not in units]
    agree = (states[:, others] == at[others]).all(1)
    wanted = (probs[agree, None] * states[agree][:, units]).sum(0) / probs[agree].sum()
    np.testing.assert_allclose(law.base_dist.probs, wanted, rtol=1e-5)


def _enumerate(graph, params):
    states = np.array(np.meshgrid(*[[0.0, 1.0]] * 4, indexing="ij")).reshape(4, -1).T
    weight = np.exp(
        [-float(triples(np.asarray(params["w"]), t)) + np.asarray(params["x"]) @ t for t in states]
    )
    return states, weight / weight.sum(), np.log(weight.sum())


def test_exact_sums_take_blocks_whose_units_interact() -> None:
    graph = FactorGraph(
        {"v": Bernoulli(3)}, {"h": Spin(2)}, [Bias("v"), Bilinear("v", "h"), Pairwise("v", [(0, 1), (1, 2)])]
    )
    params = random_params(graph, seed=1, scale=1.0)
    states, probs, log_z = enumerate_numpy(graph, params)
    assert float(exact.log_partition(graph, params)) == pytest.approx(log_z, abs=1e-5)
    mean = sum(p * x["v"] for p, x in zip(probs, states, strict=True))
    np.testing.assert_allclose(exact.moments(graph, params)["v"], mean, atol=1e-5)


def test_gaussian_fields_are_integrated_exactly() -> None:
    graph = alone(Gaussian(4), nx.cycle_graph(4))
    params = {"x": jnp.array([0.5, -1.0, 0.2, 0.0]), "x:x": jnp.array([0.3, -0.2, 0.1, 0.4])}
    precision = np.eye(4)
    for w, (i, j) in zip(params["x:x"], nx.cycle_graph(4).edges, strict=True):
        precision[i, j] = precision[j, i] = -float(w)
    mean = np.linalg.solve(precision, np.asarray(params["x"]))
    log_z = 0.5 * np.asarray(params["x"]) @ mean - 0.5 * np.linalg.slogdet(precision)[1]
    assert float(exact.log_partition(graph, params)) == pytest.approx(log_z, abs=1e-5)
    np.testing.assert_allclose(exact.moments(graph, params)["x"], mean, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_in_the_weights_is_that_of_the_likelihood(shared: bool) -> None:
    """By the moments of an enumeration: data minus model, pair by pair."""
    edges = [(0, 1), (1, 2), (2, 3)]
    graph = alone(Spin(4), edges, shared=shared)
    params = random_params(graph, seed=2, scale=0.8)
    data = random_state(Spin(4), 3, (10,))
    states, probs, _ = enumerate_numpy(graph, params)
    products = lambda x: np.array([x[i] * x[j] for i, j in edges])
    model = sum(p * products(x["x"]) for p, x in zip(probs, states, strict=True))
    wanted = np.mean([products(x) for x in data], axis=0) - model
    found = exact.grad_log_likelihood(graph, params, data)["x:x"]
    np.testing.assert_allclose(found, wanted.sum() if shared else wanted, atol=1e-5)


def test_no_gradient_asks_whether_the_numbers_of_pairs_are_inside():
    # of many pairs XLA asks while it compiles, for seconds
    graph = alone(Spin(12), np.stack(np.triu_indices(12, 1), -1))
    params, x = graph.init(jax.random.key(0)), {"x": jnp.ones(12)}
    text = jax.jit(jax.grad(lambda p: graph.energy(p, x))).lower(params).as_text()
    assert "stablehlo.gather" in text and "stablehlo.compare" not in text
