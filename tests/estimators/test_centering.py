# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Centered gradients: directions by Jacobians, the published algorithm, and offsets.

Tests estimators/centering.py.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from ucd_tools import (
    STATES,
    difference,
    estimate,
    flat,
    key,
    phase,
    problem,
    sigmoid,
    visible_transition,
)
import zoo

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp import (
    CD,
    UCD,
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    Pairwise,
    Poisson,
    Spin,
)
from ebmpp.contrib import CSDCP
from ebmpp.errors import ArgumentError, DeclarationError
from ebmpp.estimators import Centered
from ebmpp.estimators.base import Batch, Estimate, Estimator
from ebmpp.estimators.centering import CenteredState, centered_direction, natural_params
from ebmpp.graph import energy
from helpers import assert_law, gated, often, random_params

ROWS = {"v": np.float32([[1, 0, 0, 1], [1, 1, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1]])}
direction = jax.jit(centered_direction, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class Constant(Estimator):
    """A custom estimator whose state is the gradient."""

    keeps: bool = False

    def init_state(
        self, graph: Any, params: Any, data: Any, batch: int, pair: Any
    ) -> Any:
        return {name: np.ones_like(a) for name, a in params.items()}

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Batch, pair: Any
    ) -> Estimate:
        return Estimate(state, state, {"seen": batch.weights.sum()})

    def adopt(self, before: Any, fresh: Any) -> Any:
        return before if self.keeps else fresh


def curved_energy(p: Any, a: Any, b: Any) -> Any:
    """Not linear in its params, and with terms of one block."""
    return -jnp.tanh(p).sum() * a.sum() * b[0] - jnp.exp(p[0]) * a.sum() + 0.3 * b.sum()


def graph_of(name: str) -> FactorGraph:
    if name == "curved":
        factor = Factor("a", "b", energy=curved_energy, init=np.ones(2))
        return FactorGraph(
            {"a": Bernoulli(3)},
            {"b": Bernoulli(2)},
            [Bias("a"), Bias("b", name="own"), factor],
        )
    if name == "triangle":
        edges = [Bilinear("a", "b"), Bilinear("b", "c"), Bilinear("a", "c")]
        return FactorGraph(
            {"a": Bernoulli(2), "b": Spin(2)},
            {"c": Poisson(2)},
            [*map(Bias, "abc"), *edges],
        )
    if name == "lateral":  # of categories, of both blocks, and with one weight for all
        ring = [[0, 1], [1, 2], [2, 3], [0, 3]]
        units = [Pairwise("a", ring), Pairwise("b", [[0, 1]], shared=True)]
        return FactorGraph(
            {"a": Categorical(4, 3)},
            {"b": Gaussian(2, "learned")},
            [*map(Bias, "ab"), Bilinear("a", "b"), *units],
        )
    return zoo.graph(name)


NAMES = ("deep", "curved", "mixed", "learned", "triangle", "lattice", "lateral")


@pytest.mark.nightly
@pytest.mark.parametrize("name", often(NAMES, "curved", "triangle"))
def test_direction_is_the_jacobian_times_its_transpose(name: str) -> None:
    graph, generator = graph_of(name), np.random.default_rng(0)
    params, g = (random_params(graph, seed=seed, scale=1.0) for seed in (3, 4))
    offsets = {
        b: jnp.asarray(generator.uniform(0.2, 0.8, f.statistic_shape), jnp.float32)
        for b, f in graph.families.items()
    }
    vector, unravel = ravel_pytree(params)
    natural = lambda p: ravel_pytree(natural_params(graph, unravel(p), offsets))[0]
    jacobian = np.asarray(jax.jit(jax.jacfwd(natural))(vector), float)
    # the first keeps its rate of 1
    rates = {f.name: 0.2 + i for i, f in enumerate(graph.factors[1:])}
    scale = flat({n: np.full(a.shape, rates.get(n, 1.0)) for n, a in params.items()})
    plain, scaled = (
        jacobian @ jacobian.T @ flat(g),
        jacobian @ (scale * (jacobian.T @ flat(g))),
    )
    np.testing.assert_allclose(
        flat(direction(graph, params, offsets, g, {})), plain, atol=2e-4, rtol=1e-4
    )
    np.testing.assert_allclose(
        flat(direction(graph, params, offsets, g, rates)), scaled, atol=2e-4, rtol=1e-4
    )
    assert min(np.abs(plain - scaled).max(), np.abs(plain - flat(g)).max()) > 0.1


@pytest.mark.parametrize("name", often(NAMES, "curved", "triangle", "lateral"))
def test_own_params_have_the_centered_energy_up_to_a_constant(name: str) -> None:
    graph, generator = graph_of(name), np.random.default_rng(0)
    draw = lambda *rows: {
        b: generator.normal(size=(*rows, *f.statistic_shape)).astype(np.float32)
        for b, f in graph.families.items()
    }
    centered, offsets, points = random_params(graph, seed=3, scale=1.0), draw(), draw(5)

    def gap(t: Any) -> Any:
        natural = natural_params(graph, centered, offsets)
        moved = jax.tree.map(jnp.subtract, t, offsets)
        return energy.energy(graph, natural, t) - energy.energy(graph, centered, moved)

    assert np.ptp(jax.jit(jax.vmap(gap))(points)) < 2e-4


@pytest.mark.nightly
def test_direction_of_a_visible_lattice_is_unbiased() -> None:
    """The formula for a Boltzmann machine, at the exact gradient."""
    graph, params, rows = (f("lattice") for f in (zoo.graph, zoo.params, zoo.rows))
    rows = {"x": np.where(rows["x"][:, :1] > 0, 1.0, rows["x"])}  # mostly up
    estimator = Centered(UCD(num_pairs=200))
    state = estimator.init_state(graph, params, rows, zoo.BATCH, key(0))
    estimates = [
        estimate(estimator, graph, params, state, rows, key(seed)) for seed in range(20)
    ]
    (bias,) = (f.name for f in graph.factors if isinstance(f, Bias))
    (pair,) = (f for f in graph.factors if isinstance(f, Pairwise))
    i, j = pair.edges(graph.families)["x"].T
    oracle = zoo.oracle("lattice")
    share = np.exp(oracle.log_weights - oracle.log_z)
    model, data = (np.reshape(x, (len(x), -1)) for x in (oracle.x["x"], rows["x"]))
    b = share @ model - data.mean(0)
    g = share @ (model[:, i] * model[:, j]) - (data[:, i] * data[:, j]).mean(0)
    # the first step moves the offsets
    mu = np.asarray(estimates[0].state.offsets["x"], float).ravel()
    w = g - mu[i] * b[j] - mu[j] * b[i]
    drift = np.zeros(mu.size)
    np.add.at(drift, i, w * mu[j])
    np.add.at(drift, j, w * mu[i])
    exact = flat({bias: b - drift, pair.name: w})
    draws = np.array(
        [
            flat({name: e.gradient[name] for name in (bias, pair.name)})
            for e in estimates
        ]
    )
    assert_law(draws.mean(0), exact, draws.std(0, ddof=1) / np.sqrt(20))
    assert np.abs(exact - flat({bias: b, pair.name: g})).max() > 0.1


@pytest.mark.nightly
def test_run_follows_algorithm_4() -> None:
    """In the centered params of the paper, with both phases at the step's offsets."""
    d, rate, nu = 3, 0.4, 0.2
    graph, params, _ = problem("rbm")
    estimator = CSDCP(d=d, k=2, sliding=nu)
    state = estimator.init_state(graph, params, ROWS, 2, key(0))
    mu, lam = ROWS["v"].astype(float).mean(0), np.full(3, 0.5)
    np.testing.assert_allclose(state.offsets["v"], mu)
    np.testing.assert_allclose(state.offsets["h"], lam)
    w, b, c = (np.asarray(params[n], float) for n in ("v:h", "v", "h"))
    b, c = b + w @ lam, c + w.T @ mu  # p(h | v) = sigmoid((v - mu) w + c)
    for number in range(2 * d):
        rows = ROWS["v"][:2] if number < d else ROWS["v"][1:3]
        if number % d == 0:
            data_hidden = sigmoid((rows - mu) @ w + c)
        result = jax.device_get(
            estimate(estimator, graph, params, state, {"v": rows}, key(number + 1))
        )
        params = {
            n: np.asarray(p) - np.float32(rate) * result.gradient[n]
            for n, p in params.items()
        }
        state = result.state
        model = state.inner.chains["v"].astype(float)
        model_hidden = sigmoid((model - mu) @ w + c)
        b = b + nu * w @ (data_hidden.mean(0) - lam)
        c = c + nu * w.T @ (rows.mean(0) - mu)
        mu = (1 - nu) * mu + nu * rows.mean(0)
        lam = (1 - nu) * lam + nu * data_hidden.mean(0)
        moment = lambda v, h, mu=mu, lam=lam: (v - mu).T @ (h - lam) / 2
        w = w + rate * (moment(rows, data_hidden) - moment(model, model_hidden))
        b = b + rate * (rows.mean(0) - model.mean(0))
        c = c + rate * (data_hidden.mean(0) - model_hidden.mean(0))
        for name, value in {"v:h": w, "v": b - w @ lam, "h": c - w.T @ mu}.items():
            np.testing.assert_allclose(params[name], value, atol=2e-5)
        np.testing.assert_allclose(state.offsets["v"], mu, atol=1e-6)
        np.testing.assert_allclose(state.offsets["h"], lam, atol=1e-6)


def test_offsets_follow_weighted_means_of_the_data() -> None:
    graph, params, _ = problem("rbm")
    weights = np.float32([0.5, 0.0, 1.5, 0.5])
    uniform = np.full(4, 0.25)
    model = np.linalg.matrix_power(visible_transition(params), 10_000)[0]
    mean = phase(params, ROWS["v"], weights / weights.sum())
    model_mean = phase(params, STATES, model)
    estimator = Centered(Constant(), sliding=0.25)
    state = estimator.init_state(graph, params, ROWS, 4, key(0))
    # the inner gradient: the model's means minus the means of the weighted rows
    total = float(weights.sum())
    scaled = {n: total * value for n, value in model_mean.items()}
    inner = difference(scaled, phase(params, ROWS["v"], weights))
    state = state._replace(inner={n: np.float32(g) for n, g in inner.items()})
    result = estimate(estimator, graph, params, state, ROWS, key(0), weights)
    first = {"v": phase(params, ROWS["v"], uniform)["v"], "h": np.full(3, 0.5)}
    for b in ("v", "h"):
        np.testing.assert_allclose(
            result.state.offsets[b], 0.75 * first[b] + 0.25 * mean[b], atol=1e-5
        )
    np.testing.assert_allclose(result.metrics["seen"], 2.5)


def test_offsets_of_several_layers_take_one_mean_field_pass() -> None:
    graph, rows = zoo.graph("deep"), {"v": ROWS["v"][:, :3]}
    params = random_params(graph, seed=5, scale=1.5)
    estimator = Centered(Constant(), sliding=1.0)
    state = estimator.init_state(graph, params, rows, 4, key(0))
    result = estimate(estimator, graph, params, state, rows, key(0))
    p = {n: np.asarray(v, float) for n, v in params.items()}
    h2 = sigmoid(p["h2"] + np.full(3, 0.5) @ p["h1:h2"])
    h1 = sigmoid(p["h1"] + rows["v"] @ p["v:h1"] + p["h1:h2"] @ h2).mean(0)
    np.testing.assert_allclose(result.state.offsets["h2"], h2, atol=1e-6)
    np.testing.assert_allclose(result.state.offsets["h1"], h1, atol=1e-6)


def test_offsets_and_chains_are_adopted() -> None:
    graph, params, _ = problem("rbm")
    start = lambda estimator: estimator.init_state(graph, params, ROWS, 4, key(0))
    before = start(Centered(CD()))._replace(
        offsets={"v": np.full(4, 0.1), "h": np.full(3, 0.2)}
    )
    fresh = start(Centered(UCD(k=1)))
    adopted = Centered(UCD(k=1)).adopt(before, fresh)
    assert isinstance(adopted, CenteredState)
    jax.tree.map(np.testing.assert_array_equal, adopted.offsets, before.offsets)
    jax.tree.map(np.testing.assert_array_equal, adopted.inner, fresh.inner)
    keeping = Centered(Constant(keeps=True))
    fresh, chains = start(keeping), {"v": np.zeros((5, 4)), "h": np.zeros((5, 3))}
    assert keeping.adopt(chains, fresh).inner is chains
    assert keeping.adopt(fresh._replace(inner=chains), fresh).model_chains is chains


def test_graphs_without_a_centered_form_are_refused() -> None:
    lacking = FactorGraph(
        {"a": Bernoulli(2)}, {"b": Bernoulli(2)}, [Bias("a"), Bilinear("a", "b")]
    )
    cube = Factor(
        "a",
        energy=lambda _, a: -a.prod(),
        lateral={"a": [[0, 1], [1, 2], [0, 2]]},
        name="cube",
    )
    cubic = FactorGraph({"a": Bernoulli(3)}, factors=[Bias("a"), cube])
    common = FactorGraph(
        {"a": Spin(2)}, factors=[Bias("a", shared=(0,)), Pairwise("a", [[0, 1]])]
    )
    for graph, message in (
        (gated(), "over one block, or two .* got Factor"),
        (lacking, r"without one: \['b'\]"),
        (cubic, "over one block, or two .* got Factor"),
        (common, r"got Pairwise.*without one: \['a'\]"),
    ):
        with pytest.raises(DeclarationError, match=message):
            rows = {"a": np.zeros((1, graph.families["a"].size))}
            Centered(Constant()).init_state(
                graph, random_params(graph), rows, 1, key(0)
            )


def test_invalid_arguments_raise() -> None:
    graph, params, _ = problem("rbm")
    assert hash(Centered(CD(), rates={"v:h": 0.1})) == hash(
        Centered(CD(), rates=(("v:h", 0.1),))
    )
    with pytest.raises(ArgumentError, match="rates .*'v-h'"):
        Centered(CD(), rates={"v-h": 0.1}).init_state(graph, params, ROWS, 1, key(0))
    for options, message in (
        ({"estimator": CD}, "estimator"),
        ({"estimator": CSDCP()}, "centered already"),
        ({"estimator": CD(), "sliding": 1.5}, "sliding .*1.5"),
    ):
        with pytest.raises((ArgumentError, TypeError), match=message):
            Centered(**options)
