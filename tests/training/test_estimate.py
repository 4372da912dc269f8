# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Estimates at exact maxima, their errors, and models without a maximum of use.

Tests training/estimation.py, training/estimates.py.
"""

from functools import cache, partial
import itertools
from typing import Any

import networkx as nx
import numpy as np
import pytest

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    FactorGraph,
    Hyperedges,
    Spin,
    layered,
)
from ebmpp.errors import UnmetError
from ebmpp.training import estimation
from helpers import assert_law, nightly, random_params

KEY = jax.random.key(0)


@cache
def ising(size: int) -> FactorGraph:
    return FactorGraph.from_networkx(nx.complete_graph(size), Spin)


def network(size: int) -> FactorGraph:
    """Edges and triangles of a network, whose units are pairs of nodes."""
    pairs = list(itertools.combinations(range(size), 2))
    triangles = [
        [pairs.index(pair) for pair in itertools.combinations(nodes, 2)]
        for nodes in itertools.combinations(range(size), 3)
    ]
    factors = [
        Bias("x", shared=(0,), name="edges"),
        Hyperedges("x", triangles, shared=True, name="triangles"),
    ]
    return FactorGraph({"x": Bernoulli(len(pairs))}, factors=factors)


def dyads(graph: nx.Graph) -> np.ndarray:
    pairs = itertools.combinations(sorted(graph), 2)
    return np.array([graph.has_edge(*pair) for pair in pairs], np.float32)


def vector(tree: Any) -> np.ndarray:
    return np.asarray(ravel_pytree(tree)[0], float)


def log_prior(params: Any) -> jax.Array:
    return -2 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def exact_maximum(statistics: np.ndarray, mean: np.ndarray, rows: int, scale: float):
    """The maximum of the likelihood of an exponential family, and its covariance."""
    theta = np.zeros(len(mean))
    information = np.eye(len(mean))
    for _ in range(100):
        weight = np.exp(statistics @ theta)
        weight /= weight.sum()
        expected = weight @ statistics
        second = (statistics * weight[:, None]).T @ statistics
        penalty = scale * np.eye(len(mean))
        information = rows * (second - np.outer(expected, expected)) + penalty
        gradient = rows * (mean - expected) - scale * theta
        theta = theta + 0.5 * np.linalg.solve(information, gradient)
    return theta, np.linalg.inv(information)


@pytest.mark.parametrize(
    ("size", "prior", "scale"),
    [(4, None, 0.0), (4, log_prior, 4.0), nightly(15, None, 0.0)],
)
def test_inverse_ising_is_at_the_exact_maximum(
    size: int, prior: Any, scale: float
) -> None:
    states = np.array(list(itertools.product([-1.0, 1.0], repeat=size)))
    first, second = np.triu_indices(size, 1)
    products = states[:, first] * states[:, second]
    statistics = np.concatenate([states, products], 1)
    generator = np.random.default_rng(1)
    truth = generator.normal(size=statistics.shape[1]) * 0.2
    density = np.exp(statistics @ truth)
    index = generator.choice(len(states), 500, p=density / density.sum())
    theta, covariance = exact_maximum(statistics, statistics[index].mean(0), 500, scale)

    data = states[index].astype(np.float32)
    options = {"rng_key": KEY, "prior": prior, "coupling": "common"}
    result = ebmpp.estimate(ising(size), data, **options)
    assert result.verdict == "converged"
    assert result.names[:2] == ["x[0]", "x[1]"]
    noise = vector(result.monte_carlo_error)
    assert_law(vector(result.params), theta, noise)
    # the error is neither too small nor too large
    scores = (vector(result.params) - theta) / noise
    assert 0.4 < np.sqrt((scores**2).mean()) < 1.6
    error = vector(result.standard_error)
    np.testing.assert_allclose(error, np.sqrt(covariance.diagonal()), rtol=0.03)
    np.testing.assert_allclose(np.sqrt(result.covariance.diagonal()), error, rtol=1e-5)
    assert "std error" in repr(result).splitlines()[2]


def weights(rows: Any) -> jax.Array:
    return 2.5 * jnp.asarray(rows, jnp.float32)


def machine(*, deep: bool) -> tuple[FactorGraph, Any]:
    """Six visible and three latent units, with a unit above these if ``deep``."""
    w = weights(
        [[1, 0, 0], [1, 0, -0.6], [0, 1, 0], [-0.6, 1, 0], [0, 0, 1], [0, -0.6, 1]]
    )
    params = {"v": -w.sum(1) / 2, "h": -w.sum(0) / 2, "v:h": w}
    if not deep:
        return layered(v=Bernoulli(6), h=Bernoulli(3)), params
    above = weights([[1], [-1], [1]])
    params |= {"h": params["h"] - above[:, 0] / 2, "k": jnp.zeros(1), "h:k": above}
    return layered(v=Bernoulli(6), h=Bernoulli(3), k=Bernoulli(1)), params


def one_latent() -> tuple[FactorGraph, Any]:
    graph = layered(v=Bernoulli(4), h=Bernoulli(1))
    truth = random_params(graph, seed=2)
    return graph, truth | {"v:h": jnp.float32([[2.0], [-2.0], [1.5], [2.0]])}


@pytest.mark.parametrize(
    ("model", "coupling", "rtol"),
    [
        (partial(machine, deep=False), None, 0.03),
        # eigenvalues of the information differ by 3e5, and it is summed in float32
        nightly(partial(machine, deep=True), None, 0.15),
        nightly(one_latent, "maximal", 0.2),
        nightly(partial(machine, deep=False), "maximal", 0.3),
    ],
)
def test_latents_have_the_exact_information(
    model: Any, coupling: str | None, rtol: float
) -> None:
    graph, truth = model()
    size = graph.families["v"].size
    rows = np.array(list(itertools.product([0.0, 1.0], repeat=size)), np.float32)
    log_density = ebmpp.exact.log_likelihood(graph, truth, rows)
    # the data are the distribution itself, so the maximum is the truth
    weights = 20_000 * np.exp(np.asarray(log_density, float))
    flat, unravel = ravel_pytree(truth)
    noise = np.random.default_rng(0).normal(size=flat.shape) * 0.02
    result = ebmpp.estimate(
        graph,
        rows,
        rng_key=KEY,
        weights=weights,
        params=unravel(flat + jnp.float32(noise)),
        num_pairs=2000,
        coupling=coupling,
    )

    def loss(theta):
        values = ebmpp.exact.log_likelihood(graph, unravel(theta), rows)
        return -(jnp.asarray(weights, jnp.float32) @ values)

    estimates, _ = ravel_pytree(result.params)
    covariance = np.linalg.inv(np.asarray(jax.hessian(loss)(estimates), float))
    exact = np.sqrt(covariance.diagonal())
    assert result.verdict == "converged"
    errors = vector(result.monte_carlo_error)
    # sums round in float32
    assert_law(vector(result.params), flat, np.hypot(errors, 0.01 * exact))
    np.testing.assert_allclose(vector(result.standard_error), exact, rtol=rtol)
    assert (errors == 0).all() == (coupling is None)


def test_separate_classes_are_found_from_a_random_start() -> None:
    graph = FactorGraph(
        {"v": Bernoulli(8)},
        {"c": Categorical(1, 3)},
        [Bias("v"), Bias("c"), Bilinear("v", "c")],
    )
    # chances of 0.08 and 0.92
    pattern = 2.5 * np.float32([[1] * 8, [1] * 4 + [-1] * 4, [-1] * 8])
    generator = np.random.default_rng(0)
    classes = generator.choice(3, 2000, p=[0.3, 0.3, 0.4])
    chances = 1 / (1 + np.exp(-pattern[classes]))
    rows = (generator.random(chances.shape) < chances).astype(np.float32)
    result = ebmpp.estimate(graph, rows, rng_key=KEY)
    assert result.verdict == "converged"
    logits = result.params["v"][:, None] + result.params["v:c"][:, 0]
    order = np.argsort(-logits.sum(0))
    assert np.abs(logits[:, order].T - pattern).max() < 0.5
    gradient = ebmpp.exact.grad_log_likelihood(graph, result.params, rows)
    assert max(jnp.abs(g).max() for g in jax.tree.leaves(gradient)) < 1e-5


@pytest.mark.nightly
def test_separate_classes_meet_without_exact_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two latents switch six units each, which Gibbs chains flip rarely."""
    graph = layered(v=Bernoulli(12), h=Bernoulli(2))
    w = 4.0 * np.kron(np.eye(2), [[1], [-1], [1], [-1], [1], [1]]).astype(np.float32)
    params = {"v": -w.sum(1) / 2, "h": -w.sum(0) / 2, "v:h": w}
    rows = ebmpp.perfect_sample(graph, params, 500, rng_key=KEY)["v"]
    options = {"rng_key": KEY, "params": params, "num_pairs": 300, "max_sweeps": 100}
    exact = ebmpp.estimate(graph, rows, **options)
    monkeypatch.setattr(estimation, "_MOST_STATES", 0)
    result = ebmpp.estimate(graph, rows, **options)
    assert exact.verdict == result.verdict == "converged"
    noise = vector(result.monte_carlo_error)
    assert (noise > 0).all()
    assert_law(vector(result.params), vector(exact.params), noise)
    errors = vector(result.standard_error), vector(exact.standard_error)
    np.testing.assert_allclose(*errors, rtol=0.1)
    with pytest.raises(UnmetError, match="did not meet"):
        ebmpp.estimate(graph, rows, coupling="maximal", **options)


@pytest.mark.parametrize(("error", "numbers"), [(0.02, []), (0.08, [1])])
def test_information_is_compared_with_its_monte_carlo_error(
    error: float, numbers: list[int]
) -> None:
    """The second param has an eigenvalue of 0.1, the third one of 0.5."""
    runs = np.tile(np.diag([1.0, 0.1, 0.5, 0.0]), (5, 1, 1))
    runs[:, 1, 1] += error * np.sqrt(2) * np.array([-1, 1, 0, 1, -1])
    scoring = np.diag([1.0, 1.0, 1.0, 0.0])  # no score of the fourth param varies
    samples = np.zeros((1, 4))
    tau = np.ones(1, int)
    point = estimation._Point(
        np.zeros(4), scoring, runs, scoring, 0 * scoring, samples, samples, tau
    )
    _, shares, floor = point.axes()
    np.testing.assert_allclose(shares, [0.1, 0.5, 1.0])
    np.testing.assert_allclose(floor, [2 * error * np.sqrt(0.4), 1e-8, 1e-8])
    assert point.undetermined().tolist() == numbers


@pytest.mark.nightly
def test_few_rows_do_not_determine_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimation, "_MOST_STATES", 0)
    graph = layered(v=Bernoulli(6), h=Bernoulli(2))
    w = 4.0 * np.kron(np.eye(2), [[1], [-1], [1]]).astype(np.float32)
    params = {"v": -w.sum(1) / 2, "h": -w.sum(0) / 2, "v:h": w}
    rows = ebmpp.perfect_sample(graph, params, 500, rng_key=KEY)["v"]
    fit = partial(ebmpp.estimate, graph, rows, rng_key=KEY, params=params, num_pairs=50)
    with pytest.warns(UserWarning, match="undetermined: .* Pass more rows"):
        result = fit(weights=np.arange(500) < 20, coupling="mixture")
    assert result.verdict == "undetermined"
    errors = vector(result.standard_error)
    is_unknown = np.isinf(errors)
    assert is_unknown.any() and not is_unknown.all()
    assert all(
        (name in result.message) == unknown
        for name, unknown in zip(result.names, is_unknown)
    )
    np.testing.assert_array_equal(
        np.isinf(vector(result.monte_carlo_error)), is_unknown
    )
    result = fit(weights=np.arange(500) < 200, coupling="mixture")
    assert result.verdict == "converged"
    assert np.isfinite(vector(result.standard_error)).all()


def test_weights_are_numbers_of_networks() -> None:
    networks = np.stack(
        [
            dyads(g)
            for g in (
                nx.path_graph(4),
                nx.house_graph().subgraph(range(4)),
                nx.complete_graph(4),
            )
        ]
    )
    graph = network(4)
    weighted = ebmpp.estimate(graph, networks, rng_key=KEY, weights=[3, 2, 1])
    repeated = ebmpp.estimate(graph, networks[[0, 0, 0, 1, 1, 2]], rng_key=KEY)
    equal = ebmpp.estimate(graph, networks, rng_key=KEY)
    np.testing.assert_allclose(
        vector(weighted.params), vector(repeated.params), atol=1e-4
    )
    np.testing.assert_allclose(weighted.covariance, repeated.covariance, rtol=1e-3)
    assert np.abs(vector(equal.params) - vector(weighted.params)).max() > 0.1


def test_extremes_name_the_params_without_a_maximum() -> None:
    data = np.array([[1, -1, 1, 1], [1, 1, -1, 1], [1, -1, -1, -1]] * 4, np.float32)
    with pytest.warns(UserWarning, match="boundary"):
        result = ebmpp.estimate(ising(4), data, rng_key=KEY, max_sweeps=100)
    assert result.verdict == "boundary"
    assert "no finite maximum in" in result.message
    is_infinite = np.isinf(vector(result.standard_error))
    assert is_infinite.any() and not is_infinite.all()
    # a prior keeps them finite
    result = ebmpp.estimate(ising(4), data, rng_key=KEY, prior=log_prior)
    assert result.verdict == "converged"


@pytest.mark.nightly
def test_florentine_marriages() -> None:
    marriages = nx.florentine_families_graph()
    marriages.add_node("Pucci")
    result = ebmpp.estimate(network(16), dyads(marriages), rng_key=KEY)
    assert result.verdict == "converged"
    noise = vector(result.monte_carlo_error)
    assert (noise < 0.02).all()
    # published with two digits or from another sampler's runs
    np.testing.assert_allclose(vector(result.params), [-1.675, 0.158], atol=0.015)
    np.testing.assert_allclose(vector(result.standard_error), [0.351, 0.589], rtol=0.02)


def two_stars(size: int) -> FactorGraph:
    """Edges and pairs of edges that share a node."""
    pairs = list(itertools.combinations(range(size), 2))
    stars = [
        [i, j]
        for i, j in itertools.combinations(range(len(pairs)), 2)
        if set(pairs[i]) & set(pairs[j])
    ]
    factors = [
        Bias("x", shared=(0,), name="edges"),
        Hyperedges("x", stars, shared=True, name="stars"),
    ]
    return FactorGraph({"x": Bernoulli(len(pairs))}, factors=factors)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "friends", "size"), [(network, 7, 10), (two_stars, 10, 16)]
)
def test_two_phases_are_degenerate(model: Any, friends: int, size: int) -> None:
    clique = nx.complete_graph(friends)
    clique.add_nodes_from(range(size))
    with pytest.warns(UserWarning, match="two phases"):
        result = ebmpp.estimate(
            model(size), dyads(clique), rng_key=KEY, num_pairs=200, max_sweeps=300
        )
    assert result.verdict == "degenerate"


@pytest.mark.nightly
def test_networks_without_triangles_are_on_the_boundary() -> None:
    with pytest.warns(UserWarning, match="no finite maximum in triangles$"):
        ring = dyads(nx.cycle_graph(8))
        result = ebmpp.estimate(network(8), ring, rng_key=KEY)
    assert np.isinf(result.standard_error["triangles"])
    assert np.isfinite(result.standard_error["edges"])
    with pytest.warns(UserWarning, match="no finite maximum in edges"):
        ebmpp.estimate(network(8), np.zeros(28, np.float32), rng_key=KEY)
