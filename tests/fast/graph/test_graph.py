# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import itertools
import pickle

from hypothesis import given, settings, strategies as st
import networkx as nx
import numpy as np
import pytest

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, Categorical, Factor, FactorGraph, Gaussian, Spin, exact, layered
from ebmpp.errors import DeclarationError, IntractableError, StateError
from ebmpp.graph import coloring
from helpers import (
    FAMILIES,
    alone,
    enumerate_numpy,
    gated,
    numpy_energy,
    numpy_log_base,
    numpy_log_weight,
    numpy_states,
    numpy_statistics,
    pair,
    random_params,
    random_state,
)

PAIRS = {
    **{f"{name}-bernoulli": (family, Bernoulli(3)) for name, family in FAMILIES.items()},
    "bernoulli-spin": (Bernoulli(2), Spin((1, 2))),
    "spin-spin": (Spin((2, 1)), Spin(2)),
    "categorical-categorical": (Categorical(2, num_categories=3), Categorical(1, num_categories=4)),
    "gaussian-categorical": (Gaussian(2, "learned"), Categorical(2, num_categories=3)),
    "binomial-spin": (FAMILIES["binomial"], Spin(2)),
}


@pytest.fixture(scope="module", params=sorted(PAIRS))
def case(request: pytest.FixtureRequest) -> dict:
    """A pair of blocks, params, three rows, and all that the graph derives of them, compiled once."""
    graph = pair(*PAIRS[request.param])
    params = random_params(graph, seed=1)
    x = {b: random_state(f, seed=i, rows=(3,)) for i, (b, f) in enumerate(graph.families.items())}

    @jax.jit
    def derive(params: dict, x: dict) -> dict:
        made = {"energy": graph.energy(params, x), "log_density": graph.log_density(params, x)}
        made["marginal"] = {b: graph.marginal(params, {b: x[b]}, {"a": "b", "b": "a"}[b]) for b in "ab"}
        made["free_energy"] = graph.free_energy(params, {"a": x["a"]})
        made["eta"] = {b: graph.natural_parameters(params, x, b) for b in "ab"}
        made["mean"] = {b: graph.mean(params, x, b) for b in "ab"}
        made["mode"] = {b: graph.mode(params, x, b) for b in "ab"}
        made["log_prob"] = {b: graph.conditional(params, x, b).log_prob(x[b]) for b in "ab"}
        return made

    return {"graph": graph, "params": params, "x": x, **derive(params, x)}


def row(x: dict, i: int) -> dict:
    return {b: np.asarray(value)[i] for b, value in x.items()}


def test_energy_against_loops(case: dict) -> None:
    args = case["graph"], case["params"]
    energies = [numpy_energy(*args, row(case["x"], i)) for i in range(3)]
    np.testing.assert_allclose(case["energy"], energies, rtol=1e-5, atol=1e-5)
    weights = [numpy_log_weight(*args, row(case["x"], i)) for i in range(3)]
    np.testing.assert_allclose(case["log_density"], weights, rtol=1e-5, atol=1e-5)


def conditional_table(case: dict, block: str, i: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Every value of a block given the other's row ``i``, and log weights with the base measures."""
    graph = case["graph"]
    values = numpy_states(graph.families[block], most=25)
    others = row(case["x"], i)
    weights = [numpy_log_weight(graph, case["params"], others | {block: v}) for v in values]
    return values, np.array(weights)


def test_conditionals_against_loops(case: dict) -> None:
    graph = case["graph"]
    for block in "ab":
        family = graph.families[block]
        if family.states() is None and "Poisson" not in repr(family):
            continue  # continuous: the natural parameters below decide
        values, weights = conditional_table(case, block, 1)
        probs = np.exp(weights - np.logaddexp.reduce(weights))
        at = next(p for v, p in zip(values, probs, strict=True) if (v == row(case["x"], 1)[block]).all())
        np.testing.assert_allclose(case["log_prob"][block][1], np.log(at), rtol=1e-4, atol=1e-4)
        mean = np.tensordot(probs, [numpy_statistics(family, v) for v in values], 1)
        np.testing.assert_allclose(case["mean"][block][1], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(case["mode"][block][1], values[probs.argmax()])


def test_natural_parameters_against_differences(case: dict) -> None:
    # <eta, t(x) - t(x')> = E(x') - E(x): holds for every family, and determines eta
    graph = case["graph"]
    for block in "ab":
        family = graph.families[block]
        for seed in range(4):
            before, after = row(case["x"], 2), row(case["x"], 2)
            after[block] = random_state(family, seed=50 + seed)
            change = numpy_statistics(family, after[block]) - numpy_statistics(family, before[block])
            inner = np.sum(np.asarray(case["eta"][block][2], float) * change)
            energies = [numpy_energy(graph, case["params"], x) for x in (before, after)]
            np.testing.assert_allclose(inner, energies[0] - energies[1], rtol=1e-4, atol=1e-4)


def test_marginals_by_bayes(case: dict) -> None:
    # log p(a) = log p(a, b) - log p(b | a) up to the same log Z, whatever b
    for block, other in ("ab", "ba"):
        expected = case["log_density"] - case["log_prob"][other]
        np.testing.assert_allclose(case["marginal"][block], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(case["free_energy"], -case["marginal"]["a"], rtol=1e-6)


@pytest.mark.parametrize("name", ["bernoulli-bernoulli", "spin-spin", "categorical-categorical"])
def test_free_energy_against_loops(name: str) -> None:
    graph = pair(*PAIRS[name])
    params = random_params(graph, seed=3)
    x = random_state(graph.families["a"], seed=0)
    sums = [numpy_log_weight(graph, params, {"a": x, "b": b}) for b in numpy_states(graph.families["b"])]
    np.testing.assert_allclose(graph.free_energy(params, {"a": x}), -np.logaddexp.reduce(sums), rtol=1e-5)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_block_alone(name: str) -> None:
    graph, family = alone(FAMILIES[name]), FAMILIES[name]
    assert graph.layers == (("a",),)
    params = random_params(graph)
    x = random_state(family, seed=1)
    inner = np.sum(np.asarray(params["a"], float) * numpy_statistics(family, x))
    np.testing.assert_allclose(graph.energy(params, {"a": x}), -inner, rtol=1e-5, atol=1e-6)
    base = numpy_log_base(family, x)
    np.testing.assert_allclose(graph.log_density(params, {"a": x}), inner + base, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(graph.natural_parameters(params, {}, "a"), params["a"], rtol=1e-6)
    np.testing.assert_allclose(
        graph.free_energy(params, {}), -family.log_normalizer(params["a"]).sum(), rtol=1e-6
    )


def test_a_three_way_factor() -> None:
    graph = gated((2, 1, 2))
    assert graph.layers == (("a",), ("b",), ("c",))
    params = random_params(graph, scale=1.0)
    x = {b: random_state(f, seed=i) for i, (b, f) in enumerate(graph.families.items())}
    x["a"], x["b"] = np.float32([1, 0]), np.float32([1])
    gate = np.asarray(params["a:b:c"], float)
    expected = -sum(np.dot(params[b], x[b]) for b in "abc") - np.einsum(
        "ijk,i,j,k", gate, x["a"], x["b"], x["c"]
    )
    np.testing.assert_allclose(graph.energy(params, x), expected, rtol=1e-5)
    np.testing.assert_allclose(
        graph.natural_parameters(params, {b: x[b] for b in "ab"}, "c"), params["c"] + gate[0, 0], rtol=1e-5
    )
    with pytest.raises(
        IntractableError, match=r"blocks 'b' and 'c' interact, .*give a value for one of them"
    ):
        graph.free_energy(params, {"a": x["a"]})
    with pytest.raises(StateError, match="block 'b' is missing"):
        graph.natural_parameters(params, {"a": x["a"]}, "c")


# -- axes and transformations --------------------------------------------------------------------


@pytest.fixture(scope="module")
def rbm() -> FactorGraph:
    return layered(v=Bernoulli(4), h=Bernoulli(3))


@pytest.fixture(scope="module")
def params(rbm: FactorGraph) -> dict:
    return random_params(rbm, seed=2)


def test_batch_axes(rbm: FactorGraph, params: dict) -> None:
    v, h = (random_state(f, seed=i, rows=(2, 5)) for i, f in enumerate(rbm.families.values()))
    value = rbm.energy(params, {"v": v, "h": h})
    assert value.shape == (2, 5)
    np.testing.assert_allclose(value[1, 3], rbm.energy(params, {"v": v[1, 3], "h": h[1, 3]}), rtol=1e-5)
    broadcast = rbm.energy(params, {"v": v[:, :1], "h": h[0]})
    assert broadcast.shape == (2, 5)
    np.testing.assert_allclose(broadcast[1, 3], rbm.energy(params, {"v": v[1, 0], "h": h[0, 3]}), rtol=1e-5)
    assert rbm.free_energy(params, {"v": v}).shape == (2, 5)
    assert rbm.natural_parameters(params, {"v": v}, "h").shape == (2, 5, 3)
    assert rbm.conditional(params, {"v": v}, "h").batch_shape == (2, 5)


def test_vmap_and_grad(rbm: FactorGraph, params: dict) -> None:
    v = random_state(Bernoulli(4), seed=0, rows=(5,))
    mapped = jax.vmap(lambda row: rbm.free_energy(params, {"v": row}))(v)
    np.testing.assert_allclose(mapped, rbm.free_energy(params, {"v": v}), rtol=1e-5)
    gradient = jax.grad(lambda p: rbm.free_energy(p, {"v": v}).sum())(params)
    mean = 1 / (1 + np.exp(-(np.asarray(params["h"]) + v @ np.asarray(params["v:h"]))))
    np.testing.assert_allclose(gradient["v:h"], -np.einsum("ni,nj->ij", v, mean), rtol=1e-4)
    np.testing.assert_allclose(gradient["v"], -v.sum(0), rtol=1e-5)


def test_an_equal_graph_does_not_retrace(params: dict) -> None:
    traces = []

    def traced(graph: FactorGraph, params: dict, v: Array) -> Array:
        traces.append(graph)
        return graph.free_energy(params, {"v": v})

    compiled = jax.jit(traced, static_argnums=0)
    for _ in range(2):
        compiled(layered(v=Bernoulli(4), h=Bernoulli(3)), params, jnp.zeros(4))
    assert len(traces) == 1


def test_what_is_asked_again_is_not_traced_again() -> None:
    traces = []

    def energy(w: Array, v: Array) -> Array:
        traces.append(w)
        return -w @ v

    factor = Factor("v", energy=energy, init=jnp.ones(4))
    declare = lambda: FactorGraph({"v": Bernoulli(4)}, {}, [factor])
    graph = declare()
    params, rows = graph.init(jax.random.key(0)), np.zeros((3, 4), np.float32)
    asked = (graph.energy, graph.log_density, graph.free_energy, lambda p, v: graph.mean(p, {}, "v"))
    first = [ask(params, rows) for ask in asked]
    seen = len(traces)
    assert seen > 4  # it was probed, and then traced once a question
    again = [ask(params, rows + 1) for ask in asked]
    declare()  # with a factor that was found to be affine before
    assert len(traces) == seen
    assert not np.array_equal(first[0], again[0])


def test_a_probe_holds_for_its_blocks_alone() -> None:
    factor = Factor("a", "b", energy=lambda w, a, b: -a @ w @ b.reshape(2, -1)[:, 0], init=jnp.ones((2, 2)))
    blocks = {"a": Bernoulli(2), "b": Bernoulli(2)}
    FactorGraph(blocks, {}, [factor])
    with pytest.raises(DeclarationError):
        FactorGraph({**blocks, "b": Bernoulli(3)}, {}, [factor])


def test_the_order_of_a_dict_does_not_matter() -> None:
    blocks = {"z": Bernoulli(2), "a": Bernoulli(2)}  # neither sorted nor of different shapes
    graph = FactorGraph(
        blocks, {"m": Bernoulli(2)}, [*map(Bias, "zam"), Bilinear("z", "m"), Bilinear("m", "a")]
    )
    made = random_params(graph, seed=4, scale=1.0)
    z, a = np.float32([[0, 1], [1, 1]]), np.float32([[1, 0], [0, 0]])
    one, two = {"z": z, "a": a}, {"a": a, "z": z}
    np.testing.assert_array_equal(graph.free_energy(made, one), graph.free_energy(made, two))
    np.testing.assert_array_equal(
        exact.log_likelihood(graph, made, one), exact.log_likelihood(graph, made, two)
    )
    gradients = [exact.grad_log_likelihood(graph, made, data) for data in (one, two)]
    jax.tree.map(np.testing.assert_array_equal, *gradients)
    shuffled = dict(reversed(made.items()))
    jax.tree.map(np.testing.assert_array_equal, gradients[0], exact.grad_log_likelihood(graph, shuffled, two))
    # and they are right: d/d bias_z = mean of z in the data minus E[z]
    states, probs, _ = enumerate_numpy(graph, made)
    expected = z.mean(0) - np.tensordot(probs, [s["z"] for s in states], 1)
    np.testing.assert_allclose(gradients[1]["z"], expected, atol=1e-5)


# -- the block graph -----------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 9), st.randoms(use_true_random=False), st.floats(0, 1))
def test_colours_separate_neighbours(size: int, random: object, density: float) -> None:
    graph = nx.Graph()
    graph.add_nodes_from(f"b{i}" for i in range(size))
    graph.add_edges_from(e for e in itertools.combinations(graph.nodes, 2) if random.random() < density)
    layers = coloring.color(graph)
    assert sorted(itertools.chain(*layers)) == sorted(graph.nodes)
    for layer in layers:
        assert not graph.subgraph(layer).edges
    assert layers[0][0] == "b0"
    if nx.is_bipartite(graph):
        assert len(layers) == (2 if graph.edges else 1)


@settings(max_examples=8)
@given(st.sets(st.sampled_from(list(itertools.combinations("abcd", 2))), max_size=6))
def test_layers_of_a_declaration(edges: set[tuple[str, str]]) -> None:
    blocks = {b: Bernoulli(1) for b in "abcd"}
    graph = FactorGraph(blocks, factors=[*map(Bias, blocks), *(Bilinear(*e) for e in sorted(edges))])
    assert graph.edges == edges
    assert sorted(itertools.chain(*graph.layers)) == list("abcd")
    assert not any(graph.interacting(layer) for layer in graph.layers)
    assert set(graph.neighbours("a")) == {b for e in edges if "a" in e for b in e} - {"a"}
    made = graph.to_networkx()
    assert {tuple(sorted(e)) for e in made.edges} == edges
    assert all(made.edges[e]["factors"] == [":".join(e)] for e in edges)


# -- a value -------------------------------------------------------------------------------------


def other_energy(weight: Array, a: Array, b: Array, c: Array) -> Array:
    return jnp.einsum("ijk,i,j,k", weight, a, b, c)


def test_equal_declarations_are_equal_and_pickle() -> None:
    graph, again = gated(), gated()
    assert graph == again
    assert hash(graph) == hash(again)
    loaded = pickle.loads(pickle.dumps(graph))
    assert loaded == graph
    assert hash(loaded) == hash(graph)
    assert (loaded.layers, loaded.edges, repr(loaded)) == (graph.layers, graph.edges, repr(graph))


def test_different_declarations_differ() -> None:
    blocks = {b: Bernoulli(2) for b in "abc"}
    biases = [*map(Bias, "abc")]
    init = np.zeros((2, 2, 2))
    declared = [
        gated(),
        gated((2, 2, 3)),
        FactorGraph(blocks, factors=biases),
        FactorGraph({"a": Bernoulli(2)}, {b: Bernoulli(2) for b in "bc"}, biases),
        FactorGraph({"a": Bernoulli(2)}, {"b": Bernoulli(2), "c": Spin(2)}, biases),
        FactorGraph(blocks, factors=[*biases, Factor("a", "b", "c", energy=other_energy, init=init)]),
        FactorGraph(blocks, factors=[*biases, Factor("a", "b", "c", energy=other_energy, init=init + 1)]),
    ]
    assert len(set(declared)) == len(declared)
    for one, two in itertools.permutations(declared, 2):
        assert one != two
        assert pickle.loads(pickle.dumps(one)) != two


def test_immutable(rbm: FactorGraph) -> None:
    with pytest.raises(AttributeError, match="immutable; declare a new one to change 'layers'"):
        rbm.layers = ()
    with pytest.raises(AttributeError, match="immutable"):
        del rbm.layers
    with pytest.raises(TypeError):
        rbm.visible["w"] = Bernoulli(1)


def test_how_it_prints(rbm: FactorGraph) -> None:
    assert repr(rbm) == (
        "FactorGraph(visible={'v': Bernoulli(4)}, latent={'h': Bernoulli(3)}, "
        "factors=[Bias('v'), Bias('h'), Bilinear('v', 'h')])"
    )
