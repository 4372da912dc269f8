# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import itertools
import math

import numpy as np
import pytest
from scipy import integrate

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    Poisson,
    Spin,
    exact,
    layered,
)
from ebmpp.errors import DomainError, IntractableError, ParameterError, StateError
from ebmpp.graph import normalization
from ebmpp.sampling import enumeration
from helpers import (
    FAMILIES,
    FINITE,
    alone,
    enumerate_numpy,
    gated,
    numpy_log_weight,
    numpy_states,
    numpy_statistics,
    pair,
    random_params,
    random_state,
)


def expected_statistics(graph: FactorGraph, states: list, probs: np.ndarray) -> dict[str, np.ndarray]:
    """E[t_b] from the oracle's table."""
    means = {}
    for b, family in graph.families.items():
        means[b] = np.tensordot(probs, [numpy_statistics(family, x[b]) for x in states], 1)
    return means


# -- log Z, moments and tables -------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations_with_replacement(FINITE, 2)))
def test_log_partition_of_finite_pairs(first: str, second: str) -> None:
    graph = pair(FAMILIES[first], FAMILIES[second])
    params = random_params(graph, seed=1, scale=1.0)
    _, _, log_z = enumerate_numpy(graph, params)
    np.testing.assert_allclose(exact.log_partition(graph, params), log_z, rtol=2e-6)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_one_block_is_its_log_normalizer(name: str) -> None:
    graph = alone(FAMILIES[name])
    params = random_params(graph)
    expected = FAMILIES[name].log_normalizer(params["a"]).sum()
    np.testing.assert_allclose(exact.log_partition(graph, params), expected, rtol=1e-5)


@pytest.fixture(scope="module")
def dbm() -> tuple[FactorGraph, dict]:
    graph = layered(v=Bernoulli(3), h1=Spin(2), h2=Categorical(1, num_categories=3), h3=Bernoulli(2))
    return graph, random_params(graph, seed=5, scale=1.0)


def test_moments(dbm: tuple[FactorGraph, dict]) -> None:
    graph, params = dbm
    states, probs, _ = enumerate_numpy(graph, params)
    means = exact.moments(graph, params)
    assert list(means) == list(graph.families)
    for b, mean in expected_statistics(graph, states, probs).items():
        np.testing.assert_allclose(means[b], mean, atol=2e-6)
    inside = jax.jit(lambda p: exact.moments(graph, p)["h2"])(params)
    np.testing.assert_allclose(inside, means["h2"], atol=1e-6)


def test_probabilities(dbm: tuple[FactorGraph, dict]) -> None:
    graph, params = dbm
    states, probs, _ = enumerate_numpy(graph, params)
    table, values = exact.probabilities(graph, params)
    assert list(table) == list(graph.families)
    for b in graph.families:
        np.testing.assert_array_equal(table[b], [x[b] for x in states])
    np.testing.assert_allclose(values, probs, rtol=1e-4, atol=1e-7)


def test_many_chunks_and_a_remainder(monkeypatch: pytest.MonkeyPatch) -> None:
    # 3**4 states in chunks of 16 leave one: a state counted twice or never would show
    monkeypatch.setattr(enumeration, "CHUNK", 16)
    graph = layered(v=Categorical(4, num_categories=3), h=Categorical(5, num_categories=3))
    params = random_params(graph, seed=6, scale=1.0)
    assert enumeration.make_plan(graph).enumerated == ("v",), "the smaller side is enumerated"
    weights = []
    for v in numpy_states(graph.families["v"]):  # h in closed form, in float64
        t = numpy_statistics(graph.families["v"], v)
        eta = np.asarray(params["h"], float) + np.tensordot(t, np.asarray(params["v:h"], float), 2)
        weights.append((np.asarray(params["v"], float) * t).sum() + np.logaddexp.reduce(eta, axis=-1).sum())
    log_z = np.logaddexp.reduce(weights)
    np.testing.assert_allclose(exact.log_partition(graph, params), log_z, rtol=2e-6)
    t = [numpy_statistics(graph.families["v"], v) for v in numpy_states(graph.families["v"])]
    mean = np.tensordot(np.exp(weights - log_z), t, 1)
    gradient = jax.grad(lambda p: exact.log_partition(graph, p))(params)["v"]
    np.testing.assert_allclose(gradient, mean, atol=1e-5)


def test_the_plan_sums_out_both_ends_of_a_chain() -> None:
    graph = layered(v=Bernoulli(9), h=Bernoulli(10), g=Bernoulli(8))
    assert enumeration.make_plan(graph)[:3] == (("h",), ("v", "g"), ())
    assert enumeration.make_plan(graph, ("v",))[:3] == (("g",), ("h",), ())
    assert enumeration.make_plan(graph, ("v", "h"))[:3] == ((), ("g",), ())


def test_a_large_log_partition() -> None:
    # 16 spins that all agree with a strong field: the largest term is exp(1600)
    graph = pair(Spin(16), Spin(1))
    params = {"a": jnp.full(16, 60.0), "b": jnp.array([0.5]), "a:b": jnp.full((16, 1), 40.0)}
    np.testing.assert_allclose(exact.log_partition(graph, params), 16 * 100 + 0.5, rtol=1e-6)


def test_a_three_way_factor() -> None:
    graph = gated((2, 2, 2))
    params = random_params(graph, seed=2, scale=1.0)
    gate = np.asarray(params["a:b:c"], float)
    values = [np.array(x, float) for x in itertools.product([0, 1], repeat=2)]
    weights = [
        sum(np.dot(np.asarray(params[n], float), x) for n, x in zip("abc", xs, strict=True))
        + np.einsum("ijk,i,j,k", gate, *xs)
        for xs in itertools.product(values, repeat=3)
    ]
    np.testing.assert_allclose(exact.log_partition(graph, params), np.logaddexp.reduce(weights), rtol=1e-6)


# -- infinitely many values ----------------------------------------------------------------------


@pytest.mark.parametrize("variance", ["unit", "learned"])
def test_a_gaussian_and_bernoullis_by_quadrature(variance: str) -> None:
    graph = pair(Gaussian(1, variance), Bernoulli(2))
    params = random_params(graph, seed=3)
    hidden = numpy_states(Bernoulli(2))
    density = lambda x: sum(
        math.exp(numpy_log_weight(graph, params, {"a": np.array([x]), "b": h})) for h in hidden
    )
    total, _ = integrate.quad(density, -12, 12)
    np.testing.assert_allclose(exact.log_partition(graph, params), math.log(total), rtol=1e-5)
    mean, _ = integrate.quad(lambda x: x * density(x) / total, -12, 12)
    np.testing.assert_allclose(exact.moments(graph, params)["a"].ravel()[0], mean, atol=1e-5)


def test_counts_by_long_sums() -> None:
    graph = pair(Poisson(1), Bernoulli(2))
    params = random_params(graph, seed=4)
    states, probs, log_z = enumerate_numpy(graph, params, most=60)
    np.testing.assert_allclose(exact.log_partition(graph, params), log_z, rtol=1e-6)
    means = expected_statistics(graph, states, probs)
    made = exact.moments(graph, params)
    np.testing.assert_allclose(made["a"], means["a"], rtol=1e-5)
    np.testing.assert_allclose(made["b"], means["b"], rtol=1e-5)


@pytest.fixture(scope="module")
def gaussians() -> tuple[FactorGraph, dict]:
    """Two interacting Gaussian blocks and a Bernoulli that moves both."""
    graph = FactorGraph(
        {"a": Gaussian(2)},
        {"b": Gaussian(1, "learned"), "h": Bernoulli(2)},
        [*map(Bias, "abh"), Bilinear("a", "b"), Bilinear("a", "h"), Bilinear("b", "h")],
    )
    return graph, random_params(graph, seed=7)


def gaussian_oracle(params: dict) -> tuple[float, np.ndarray]:
    """log Z, and E[(a, b)], from the joint precision by hand, in float64."""
    p = {name: np.asarray(value, float) for name, value in params.items()}
    precision = np.eye(3)
    precision[2, 2] = -2 * p["b"][0, 1]
    precision[:2, 2] = precision[2, :2] = -p["a:b"][:, 0]
    weights, means = [], []
    for h in numpy_states(Bernoulli(2)):
        linear = np.append(p["a"] + p["a:h"] @ h, p["b"][0, 0] + p["b:h"][0] @ h)
        means.append(np.linalg.solve(precision, linear))
        log_root = 0.5 * np.linalg.slogdet(precision)[1]
        weights.append(p["h"] @ h + 0.5 * linear @ means[-1] - log_root)  # r holds every 1 / sqrt(2 pi)
    log_z = np.logaddexp.reduce(weights)
    return float(log_z), np.exp(weights - log_z) @ means


def test_interacting_gaussians(gaussians: tuple[FactorGraph, dict]) -> None:
    graph, params = gaussians
    assert enumeration.make_plan(graph)[:3] == (("h",), (), ("a", "b"))
    log_z, means = gaussian_oracle(params)
    np.testing.assert_allclose(exact.log_partition(graph, params), log_z, rtol=1e-5)
    made = exact.moments(graph, params)
    np.testing.assert_allclose(np.append(made["a"], made["b"][0, 0]), means, atol=1e-5)


def test_the_likelihood_of_gaussians_integrates_to_one(
    gaussians: tuple[FactorGraph, dict],
) -> None:
    graph, params = gaussians
    side = np.linspace(-8, 8, 81)
    mesh = np.stack(np.meshgrid(side, side), -1).astype(np.float32)
    log_p = exact.log_likelihood(graph, params, mesh)
    assert log_p.shape == (81, 81)
    np.testing.assert_allclose(np.exp(np.asarray(log_p, float)).sum() * 0.2**2, 1, rtol=1e-4)


# -- likelihood ----------------------------------------------------------------------------------


def test_log_likelihood_of_a_deep_machine(dbm: tuple[FactorGraph, dict]) -> None:
    graph, params = dbm  # given v the latents still interact, so a row's h2 is enumerated
    assert enumeration.make_plan(graph, ("v",)).enumerated == ("h2",)
    states, probs, _ = enumerate_numpy(graph, params)
    rows = np.array(numpy_states(Bernoulli(3)), np.float32)
    total = [sum(p for x, p in zip(states, probs, strict=True) if (x["v"] == v).all()) for v in rows]
    value = exact.log_likelihood(graph, params, rows.reshape(2, 4, 3))
    assert value.shape == (2, 4)
    np.testing.assert_allclose(value.ravel(), np.log(total), rtol=1e-5)
    np.testing.assert_allclose(
        exact.log_likelihood(graph, params, {"v": rows[3]}), np.log(total[3]), rtol=1e-5
    )


def test_gradient_of_the_log_likelihood(dbm: tuple[FactorGraph, dict]) -> None:
    # E[dlogp] = t(v) t(h) clamped minus free, from the oracle's table
    graph, params = dbm
    rows = np.float32([[0, 1, 1], [1, 1, 1], [0, 0, 1]])
    states, probs, _ = enumerate_numpy(graph, params)
    v = np.array([x["v"] for x in states])
    h = np.array([x["h1"] for x in states])
    clamped = np.zeros_like(probs)
    for one in rows:
        same = probs * (v == one).all(-1)
        clamped += same / same.sum() / len(rows)
    gradient = exact.grad_log_likelihood(graph, params, rows)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    np.testing.assert_allclose(gradient["v:h1"], np.einsum("s,si,sj->ij", clamped - probs, v, h), atol=3e-6)
    np.testing.assert_allclose(gradient["h1"], (clamped - probs) @ h, atol=3e-6)


def test_whole_numbers_have_the_gradient_of_the_same_reals() -> None:
    graph = layered(v=Bernoulli(2), h=Bernoulli(2))
    whole = {"v": np.array([1, -1]), "h": jnp.array([0, 2]), "v:h": np.array([[True, False], [False, True]])}
    real = jax.tree.map(lambda a: jnp.asarray(a, float), whole)
    rows = np.array([[1.0, 0.0], [1.0, 1.0]])
    made, wanted = (exact.grad_log_likelihood(graph, p, rows) for p in (whole, real))
    jax.tree.map(np.testing.assert_array_equal, made, wanted)
    states, probs, _ = enumerate_numpy(graph, whole)
    mean = probs @ np.array([x["v"] for x in states])
    np.testing.assert_allclose(made["v"], rows.mean(0) - mean, atol=1e-6)
    halves = exact.grad_log_likelihood(graph, jax.tree.map(lambda a: a.astype(jnp.bfloat16), real), rows)
    assert {a.dtype for a in jax.tree.leaves(halves)} == {jnp.dtype(jnp.bfloat16)}


def test_without_latents() -> None:
    graph = FactorGraph({"a": Bernoulli(2), "b": Spin(2)}, factors=[Bias("a"), Bilinear("a", "b")])
    params = random_params(graph, seed=8, scale=1.0)
    states, probs, _ = enumerate_numpy(graph, params)
    data = {b: np.array([x[b] for x in states], np.float32) for b in "ba"}
    np.testing.assert_allclose(exact.log_likelihood(graph, params, data), np.log(probs), rtol=1e-5)


# -- compilation and refusals --------------------------------------------------------------------


def test_a_second_call_does_not_trace_again() -> None:
    traces = []

    def counted(weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        traces.append(None)
        return -weight * a.sum() * b.sum()

    factor = Factor("a", "b", energy=counted, init=jnp.ones(()))
    graph = FactorGraph({"a": Bernoulli(2)}, {"b": Bernoulli(2)}, [factor])
    calls = [
        lambda p: exact.log_partition(graph, p),
        lambda p: exact.log_likelihood(graph, p, np.zeros((3, 2))),
        lambda p: exact.grad_log_likelihood(graph, p, np.zeros((3, 2))),
        lambda p: exact.moments(graph, p),
        lambda p: exact.probabilities(graph, p),
    ]
    for call in calls:
        call({"a:b": jnp.ones(())})
        before = len(traces)
        call({"a:b": jnp.array(0.5, jnp.float32)})
        assert len(traces) == before


TOO_LARGE = [
    (layered(v=Bernoulli(60), h=Bernoulli(50)), r"blocks \['h'\] have 2\*\*50 joint states"),
    (layered(v=Bernoulli(40), h=Categorical(20, num_categories=3)), r"\['h'\] have 3.5e9 joint states"),
]


@pytest.mark.parametrize(("graph", "message"), TOO_LARGE)
def test_too_many_states(graph: FactorGraph, message: str) -> None:
    params = graph.init(jax.random.key(0))
    with pytest.raises(IntractableError, match=message) as error:
        exact.log_partition(graph, params)
    assert "even with ['v'] summed out in closed form, and the limit is 2**25" in str(error.value)
    assert "annealed importance sampling" in str(error.value)


def test_counts_beyond_floating_point() -> None:
    assert enumeration.count_text(2**784) == "2**784"
    assert enumeration.count_text(3**900) == "2.6e429"
    assert enumeration.count_text(3) == "3"
    assert enumeration.count_text(10**9 - 1) == "1.0e9"


def test_too_large_a_table() -> None:
    # log Z takes 2**20 states of h2, a table all 2**52
    graph = layered(v=Bernoulli(2), h1=Bernoulli(30), h2=Bernoulli(20))
    message = r"2\*\*52 joint states to enumerate, and the limit is 2\*\*20"
    with pytest.raises(IntractableError, match=message):
        exact.probabilities(graph, graph.init(jax.random.key(0)))
    counts = layered(v=Poisson(1), h=Bernoulli(1))
    with pytest.raises(IntractableError, match="'v' .* takes infinitely many values, so its states"):
        exact.probabilities(counts, counts.init(jax.random.key(0)))


def test_interacting_counts() -> None:
    graph = pair(Poisson(2), Poisson(1))
    params = random_params(graph) | {"a:b": -jnp.ones((2, 1))}
    message = r"blocks 'a' \(Poisson\(2\)\) and 'b' \(Poisson\(1\)\) interact and both take infinitely"
    with pytest.raises(IntractableError, match=message):
        exact.log_partition(graph, params)


def test_a_precision_that_depends_on_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """With h = 1 it is not positive definite: the sum finds it, too, where no state that was tried did."""
    gate = Factor("a", "b", "h", energy=lambda w, a, b, h: -w * (a @ b) * h.sum(), init=jnp.zeros(()))
    graph = FactorGraph({"a": Gaussian(1)}, {"b": Gaussian(1), "h": Bernoulli(1)}, [gate, *map(Bias, "abh")])
    params = random_params(graph) | {"a:b:h": jnp.float32(0.8)}
    wrong = params | {"a:b:h": jnp.float32(1.2)}
    assert np.isfinite(exact.log_partition(graph, params))
    with pytest.raises(DomainError, match=r"smallest eigenvalue -0.2 at a state of blocks \['h'\]"):
        exact.log_partition(graph, wrong)
    monkeypatch.setattr(normalization, "_check_precision", lambda *_: None)
    with pytest.raises(DomainError, match=r"Gaussian blocks \['a', 'b'\] is not positive definite"):
        exact.log_partition(graph, wrong)


def test_params_and_data_are_checked(dbm: tuple[FactorGraph, dict]) -> None:
    graph, params = dbm
    with pytest.raises(ParameterError, match="factor 'v': params have shape"):
        exact.log_partition(graph, params | {"v": jnp.zeros(4)})
    with pytest.raises(ParameterError, match="1 of 2 params are not finite"):
        exact.moments(graph, params | {"h1": jnp.array([0.0, jnp.nan])})
    with pytest.raises(StateError, match="block 'v' .* got 2.0"):
        exact.log_likelihood(graph, params, np.full((2, 3), 2.0))
    with pytest.raises(StateError, match="unknown visible block 'h1'"):
        exact.log_likelihood(graph, params, {"h1": random_state(Spin(2), 0)})
