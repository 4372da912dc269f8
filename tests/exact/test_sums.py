# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exact sums against enumeration and integration in NumPy.

Tests exact/enumeration.py, exact/shifted.py, exact/sums.py.
"""

import networkx as nx
import numpy as np
from oracle import numpy_statistics
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    exact,
    layered,
)
from ebmpp.errors import DomainError
from ebmpp.exact import enumeration
from ebmpp.graph import normalization
from helpers import often, pair, random_params


@pytest.mark.parametrize("name", often(zoo.NAMES, "rbm", "gated", "mixed"))
def test_log_partition_and_moments(name: str) -> None:
    graph, params = zoo.graph(name), zoo.params(name)
    np.testing.assert_allclose(
        exact.log_partition(graph, params), zoo.oracle(name).log_z, rtol=5e-6
    )
    moments = exact.moments(graph, params)
    assert list(moments) == list(graph.families)
    for b, mean in zoo.moments(name).items():
        np.testing.assert_allclose(moments[b], mean, atol=1e-5)


def numpy_gradient(name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Mean statistics of each factor under clamped rows, minus the mean under the model."""
    graph, oracle = zoo.graph(name), zoo.oracle(name)
    probs, block = np.exp(oracle.log_weights - oracle.log_z), next(iter(graph.visible))
    weights = -probs
    for row in rows:
        clamped = probs * (oracle.x[block] == row).reshape(len(probs), -1).all(1)
        weights = weights + clamped / clamped.sum() / len(rows)
    t = {b: numpy_statistics(f, oracle.x[b]) for b, f in graph.families.items()}
    gradient = {}
    for factor in graph.factors:
        term = weights
        for b in factor.blocks:
            left = term.reshape(*term.shape, *(1,) * (t[b].ndim - 1))
            term = left * t[b].reshape(
                len(probs), *(1,) * (term.ndim - 1), *t[b].shape[1:]
            )
        gradient[factor.name] = term.sum(0)
    return gradient


@pytest.mark.parametrize(
    "name", often(("rbm", "deep", "gated", "categorical", "binomial"), "deep")
)
def test_log_likelihood_and_its_gradient(name: str) -> None:
    """In the deep graph the latents interact given a row, so that they are enumerated as well."""
    graph, params = zoo.graph(name), zoo.params(name)
    oracle, block = zoo.oracle(name), next(iter(graph.visible))
    rows = np.unique(oracle.x[block], axis=0).astype(np.float32)[:8]
    probs = np.exp(oracle.log_weights - oracle.log_z)
    p = [
        probs[(oracle.x[block] == row).reshape(len(probs), -1).all(1)].sum()
        for row in rows
    ]
    batch = rows.reshape(2, len(rows) // 2, *rows.shape[1:])
    result = exact.log_likelihood(graph, params, batch)
    assert result.shape == batch.shape[:2]
    np.testing.assert_allclose(np.asarray(result).ravel(), np.log(p), rtol=1e-5)
    gradient = exact.grad_log_likelihood(graph, params, rows)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    for factor, expected in numpy_gradient(name, rows).items():
        np.testing.assert_allclose(gradient[factor], expected, atol=1e-5)


def test_probabilities_list_every_state() -> None:
    graph, oracle = zoo.graph("rbm"), zoo.oracle("rbm")
    states, probs = exact.probabilities(graph, zoo.params("rbm"))
    for b in graph.families:
        np.testing.assert_array_equal(states[b], oracle.x[b])
    np.testing.assert_allclose(
        probs, np.exp(oracle.log_weights - oracle.log_z), rtol=1e-4, atol=1e-7
    )


def test_states_are_summed_in_chunks_with_a_remainder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3**4 states in chunks of 16 leave one, so a state that is missing or counted twice shows."""
    monkeypatch.setattr(enumeration, "CHUNK", 16)
    graph = layered(
        v=Categorical(4, num_categories=3), h=Categorical(5, num_categories=3)
    )
    params = random_params(graph, seed=6, scale=1.0)
    assert enumeration.make_plan(graph).enumerated == ("v",), (
        "the smaller side is enumerated"
    )
    p = {name: np.asarray(value, float) for name, value in params.items()}
    t = numpy_statistics(graph.families["v"], np.array(list(np.ndindex(3, 3, 3, 3))))
    eta = p["h"] + np.tensordot(t, p["v:h"], 2)
    weights = (p["v"] * t).sum((1, 2)) + np.logaddexp.reduce(eta, axis=-1).sum(-1)
    np.testing.assert_allclose(
        exact.log_partition(graph, params), np.logaddexp.reduce(weights), rtol=2e-6
    )


def test_plans_sum_out_both_ends_of_a_chain() -> None:
    graph = layered(v=Bernoulli(9), h=Bernoulli(10), g=Bernoulli(8))
    assert enumeration.make_plan(graph)[:3] == (("h",), ("v", "g"), ())
    assert enumeration.make_plan(graph, ("v",))[:3] == (("g",), ("h",), ())
    assert enumeration.make_plan(graph, ("v", "h"))[:3] == ((), ("g",), ())
    assert enumeration.count_text(2**784) == "2**784"


@pytest.mark.nightly
def test_models_that_do_not_normalise_in_one_state_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Factor(
        "a",
        "b",
        "h",
        energy=lambda w, a, b, h: -w * (a @ b) * h.sum(),
        init=jnp.zeros(()),
    )
    graph = FactorGraph(
        {"a": Gaussian(1)},
        {"b": Gaussian(1), "h": Bernoulli(1)},
        [gate, *map(Bias, "abh")],
    )
    params = random_params(graph) | {"a:b:h": jnp.float32(0.8)}
    divergent = params | {"a:b:h": jnp.float32(1.2)}
    assert np.isfinite(exact.log_partition(graph, params))
    with pytest.raises(DomainError, match=r"-0.2.*'h'"):
        exact.log_partition(graph, divergent)
    # the sum shows it, too
    monkeypatch.setattr(normalization, "_check_precision", lambda *_: None)
    with pytest.raises(DomainError, match="'a', 'b'"):
        exact.log_partition(graph, divergent)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["rbm", "lattice"])
def test_variances(name: str) -> None:
    graph, oracle = zoo.graph(name), zoo.oracle(name)
    probs = np.exp(oracle.log_weights - oracle.log_z)
    for b, variance in exact.variances(graph, zoo.params(name)).items():
        mean, square = (np.tensordot(probs, oracle.x[b] ** k, 1) for k in (1, 2))
        np.testing.assert_allclose(variance, square - mean**2, atol=1e-5)


@pytest.mark.nightly
def test_interacting_gaussian_blocks() -> None:
    graph = FactorGraph.from_networkx(
        nx.cycle_graph(3), lambda n: Gaussian(n, "learned")
    )
    params = random_params(graph, seed=7, scale=0.2)
    oracle = zoo.Oracle(graph, params, {})
    np.testing.assert_allclose(
        exact.log_partition(graph, params), oracle.log_z, rtol=1e-5
    )
    np.testing.assert_allclose(
        exact.moments(graph, params)["x"][:, 0], oracle.mean[0], atol=1e-5
    )
    both = pair(Gaussian(2), Gaussian(1, "learned"))
    params = random_params(both, seed=7)
    np.testing.assert_allclose(
        exact.log_partition(both, params), zoo.Oracle(both, params, {}).log_z, rtol=1e-5
    )
    side = np.linspace(-8, 8, 81, dtype=np.float32)
    rows = np.stack(np.meshgrid(side, side), -1)
    density = np.exp(np.asarray(exact.log_likelihood(both, params, rows), float))
    assert density.shape == (81, 81) and density.sum() * 0.2**2 == pytest.approx(
        1, rel=1e-4
    )


@pytest.mark.parametrize("weight", [1e38, -1e38])
def test_params_that_overflow_are_refused_or_summed_right(weight: float) -> None:
    graph = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    zero = {"v": np.zeros(4, np.float32), "h": np.zeros(3, np.float32)}
    params = {**zero, "v:h": np.full((4, 3), weight, np.float32)}
    rows = np.ones((2, 4))
    calls = {
        "log_partition": lambda: exact.log_partition(graph, params),
        "moments": lambda: exact.moments(graph, params),
        "probabilities": lambda: exact.probabilities(graph, params)[1],
        "log_likelihood": lambda: exact.log_likelihood(graph, params, rows),
        "gradient": lambda: exact.grad_log_likelihood(graph, params, rows),
    }
    if weight > 0:  # the energy of the last state is below every float
        for call in calls.values():
            with pytest.raises(ebmpp.errors.DomainError, match="'v:h'"):
                call()
        with pytest.raises(ebmpp.errors.IntractableError):
            ebmpp.perfect_sample(
                graph, params, 3, rng_key=jax.random.key(0), method="enumerate"
            )
        return
    expected = np.log(2**4 + 2**3 - 1)  # states in which a block is all zero
    np.testing.assert_allclose(calls["log_partition"](), expected, 1e-6)
    np.testing.assert_allclose(calls["log_likelihood"](), -expected, 1e-6)
    for call in calls.values():
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(call()))
