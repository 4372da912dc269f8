# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Energies, conditionals and free energies against enumeration; batch axes; layers;
equality of graphs.

Tests graph/energy.py, graph/graph.py.
"""

import itertools
import pickle
from typing import Any

import numpy as np
from oracle import Oracle, check_natural_parameters, log_weight, statistics_of
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, Exponential, Factor, FactorGraph, Spin
from helpers import gated, often, pair, random_params, random_state

CASES = [*zoo.NAMES, "exponential"]


def derive(graph: FactorGraph, params: dict, x: dict) -> dict[str, Any]:
    """Everything that the graph computes from its energy."""
    result: dict[str, Any] = {"log_density": graph.log_density(params, x)}
    result["eta"] = {b: graph.natural_parameters(params, x, b) for b in graph.families}
    blocks = [b for b in graph.families if b not in graph.splits]
    others = {b: {c: v for c, v in x.items() if c != b} for b in blocks}
    result["marginal"] = {b: graph.log_marginal(params, others[b], b) for b in blocks}
    result["mean"] = {b: graph.mean(params, x, b) for b in blocks}
    result["mode"] = {b: graph.mode(params, x, b) for b in blocks}
    result["log_prob"] = {
        b: graph.conditional(params, x, b).log_prob(x[b]) for b in blocks
    }
    if not graph.interacting(graph.latent):
        result["free_energy"] = graph.free_energy(
            params, {b: x[b] for b in graph.visible}
        )
    return result


@pytest.mark.parametrize(
    "name", often(CASES, *(set(CASES) - {"spin", "binomial", "deep", "gaussian"}))
)
def test_derived_quantities_match_enumeration(name: str) -> None:
    graph = (
        pair(Exponential(2), Bernoulli(3)) if name == "exponential" else zoo.graph(name)
    )
    params = random_params(graph, 1) if name == "exponential" else zoo.params(name)
    joint, generator = Oracle(graph, params, {}), np.random.default_rng(0)
    x = joint.draw(generator, 3)
    result = jax.device_get(jax.jit(lambda *args: derive(graph, *args))(params, x))
    wide = {b: np.asarray(v, float) for b, v in x.items()}
    log_weights = log_weight(graph, joint.params, wide)
    close = lambda actual, expected: np.testing.assert_allclose(
        actual, expected, rtol=2e-4, atol=3e-4
    )

    close(result["log_density"], log_weights)
    check_natural_parameters(graph, joint, wide, result["eta"], generator, close)
    for b, i in itertools.product(result["mean"], range(3)):
        block = Oracle(graph, params, {c: v[i] for c, v in wide.items() if c != b})
        close(result["marginal"][b][i], block.log_z)
        close(result["log_prob"][b][i], log_weights[i] - block.log_z)
        if b not in block.reals:
            probs = np.exp(block.log_weights - block.log_z)
            mean = probs @ statistics_of(graph.families[b], block.x[b])
            close(result["mean"][b][i].ravel(), mean)
            np.testing.assert_array_equal(
                result["mode"][b][i], block.x[b][probs.argmax()]
            )
    if "free_energy" in result:
        rows = [{b: wide[b][i] for b in graph.visible} for i in range(3)]
        close(
            -result["free_energy"], [Oracle(graph, params, row).log_z for row in rows]
        )


def test_units_of_all_blocks_are_counted() -> None:
    assert pair(Bernoulli((2, 3)), Spin(4)).num_units == 10


def test_leading_axes_broadcast() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    v, h = (
        random_state(f, seed=i, rows=(2, 5))
        for i, f in enumerate(rbm.families.values())
    )
    value = np.asarray(rbm.energy(params, {"v": v, "h": h}))
    np.testing.assert_allclose(
        value[1, 3], rbm.energy(params, {"v": v[1, 3], "h": h[1, 3]}), rtol=1e-5
    )
    broadcast = np.asarray(rbm.energy(params, {"v": v[:, :1], "h": h[0]}))
    np.testing.assert_allclose(
        broadcast[1, 3], rbm.energy(params, {"v": v[1, 0], "h": h[0, 3]}), rtol=1e-5
    )
    assert (
        rbm.free_energy(params, {"v": v}).shape
        == value.shape
        == broadcast.shape
        == (2, 5)
    )
    assert rbm.conditional(params, {"v": v}, "h").batch_shape == (2, 5)


def test_free_energy_under_vmap_and_grad() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    v = random_state(Bernoulli(4), seed=0, rows=(5,))
    free_energy = lambda p, row: rbm.free_energy(p, {"v": row})
    mapped = jax.jit(jax.vmap(free_energy, (None, 0)))(params, v)
    np.testing.assert_allclose(mapped, rbm.free_energy(params, {"v": v}), rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: free_energy(p, v).sum()))(params)
    mean = 1 / (1 + np.exp(-(np.asarray(params["h"]) + v @ np.asarray(params["v:h"]))))
    np.testing.assert_allclose(
        gradient["v:h"], -np.einsum("ni,nj->ij", v, mean), rtol=1e-4
    )
    np.testing.assert_allclose(gradient["v"], -v.sum(0), rtol=1e-5)


def test_repeated_calls_do_not_trace_again() -> None:
    traces = []

    def energy(w: jax.Array, v: jax.Array) -> jax.Array:
        traces.append(w)
        return -w @ v

    factor = Factor("v", energy=energy, init=np.ones(4, np.float32))
    declare = lambda: FactorGraph({"v": Bernoulli(4)}, {}, [factor])
    graph = declare()
    params, rows = graph.init(zoo.KEY), np.zeros((3, 4), np.float32)
    methods = (graph.energy, graph.free_energy, lambda p, v: graph.mean(p, {}, "v"))
    first = [method(params, rows) for method in methods]
    count = len(traces)
    second = [method(params, rows + 1) for method in methods]
    declare()  # the probe of an equal factor is remembered
    assert len(traces) == count
    assert not np.array_equal(first[0], second[0])


def test_order_of_dicts_does_not_matter() -> None:
    # neither sorted nor of different shapes
    blocks = {
        "z": Bernoulli(2),
        "a": Bernoulli(2),
    }
    factors = [*map(Bias, "zam"), Bilinear("z", "m"), Bilinear("m", "a")]
    graph = FactorGraph(blocks, {"m": Bernoulli(2)}, factors)
    params = random_params(graph, seed=4, scale=1.0)
    x = {"z": np.float32([[0, 1], [1, 1]]), "a": np.float32([[1, 0], [0, 0]])}
    value = jax.jit(jax.value_and_grad(lambda p, x: graph.free_energy(p, x).sum()))
    expected = -sum(
        Oracle(graph, params, {b: v[i] for b, v in x.items()}).log_z for i in range(2)
    )
    for reordered in (x, dict(reversed(x.items()))):
        energy, gradient = value(dict(reversed(params.items())), reordered)
        np.testing.assert_allclose(energy, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient["z"], -x["z"].sum(0), rtol=1e-5)


def test_block_graph_of_a_declaration() -> None:
    edges = {("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")}
    blocks = {b: Bernoulli(1) for b in "abcd"}
    graph = FactorGraph(
        blocks, factors=[*map(Bias, blocks), *(Bilinear(*e) for e in sorted(edges))]
    )
    assert graph.edges == edges
    assert (
        sorted(itertools.chain(*graph.layers)) == list("abcd")
        and len(graph.layers) == 3
    )
    assert not any(graph.interacting(layer) for layer in graph.layers)
    assert set(graph.neighbours("c")) == {"a", "b", "d"}
    network = graph.to_networkx()
    assert {tuple(sorted(e)) for e in network.edges} == edges
    assert network.edges["a", "b"]["factors"] == ["a:b"]


def other_energy(
    weight: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    return jnp.einsum("ijk,i,j,k", weight, a, b, c)


def test_equal_declarations_are_equal_and_pickle() -> None:
    graph = zoo.graph("gated")
    for equal in (gated(), pickle.loads(pickle.dumps(graph))):
        assert equal == graph and hash(equal) == hash(graph)
        assert (equal.layers, equal.edges, repr(equal)) == (
            graph.layers,
            graph.edges,
            repr(graph),
        )


def test_different_declarations_differ() -> None:
    blocks = {b: Bernoulli(2) for b in "abc"}
    biases = [*map(Bias, "abc")]
    init = np.zeros((2, 2, 2))
    graphs = [
        gated(),
        gated((2, 2, 3)),
        FactorGraph(blocks, factors=biases),
        FactorGraph(
            {"a": Bernoulli(2)}, {"b": Bernoulli(2), "c": Bernoulli(2)}, biases
        ),
        FactorGraph({"a": Bernoulli(2)}, {"b": Bernoulli(2), "c": Spin(2)}, biases),
        FactorGraph(
            blocks,
            factors=[*biases, Factor("a", "b", "c", energy=other_energy, init=init)],
        ),
        FactorGraph(
            blocks,
            factors=[
                *biases,
                Factor("a", "b", "c", energy=other_energy, init=init + 1),
            ],
        ),
    ]
    assert len(set(graphs)) == len(graphs)
    assert not any(
        first == second for first, second in itertools.combinations(graphs, 2)
    )


def test_graphs_are_immutable_and_print_themselves() -> None:
    rbm = zoo.graph("rbm")
    with pytest.raises(AttributeError, match="immutable"):
        rbm.layers = ()
    with pytest.raises(TypeError):
        rbm.visible["w"] = Bernoulli(1)
    assert repr(rbm) == (
        "FactorGraph(visible={'v': Bernoulli(4)}, latent={'h': Bernoulli(3)}, "
        "factors=[Bias('v'), Bias('h'), Bilinear('v', 'h')])"
    )
