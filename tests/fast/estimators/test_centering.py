# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp import CD, UCD, Bernoulli, Bias, Bilinear, Factor, FactorGraph, Gaussian, exact, layered
from ebmpp.core import random
from ebmpp.errors import DeclarationError
from ebmpp.estimators import CSDCP, SDCP, Centered
from ebmpp.estimators.base import Batch, Estimate, Estimator
from ebmpp.estimators.centering import CenteredState, _own_params, centered_direction
from ebmpp.graph import energy
from helpers import FAMILIES, assert_rows_law, enumerate_numpy, gated, pair, random_params

RBM = pair(Bernoulli(3), Bernoulli(2))
PARAMS = random_params(RBM, seed=1, scale=2.0)
DATA = {"a": jnp.array([[1.0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 1, 1]])}
DEEP = layered(v=Bernoulli(3), h1=Bernoulli(2), h2=Bernoulli(2))


def key(seed: int) -> jax.Array:
    return random.key_pair(jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=(0, 1))
def estimate(graph: Any, estimator: Any, params: Any, state: Any, batch: Batch, pair: Any) -> Estimate:
    return estimator.estimate(graph, params, state, batch, pair)


@dataclasses.dataclass(frozen=True)
class Given(Estimator):
    """A user's own estimator: its state is the gradient."""

    def init(self, graph: Any, params: Any, data: Any, batch: int, pair: Any) -> Any:
        return jax.tree.map(jnp.ones_like, params)

    def estimate(self, graph: Any, params: Any, state: Any, batch: Batch, pair: Any) -> Estimate:
        return Estimate(state, state, {"seen": batch.weights.sum()})


def on(eta: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-eta))


# -- the direction ---------------------------------------------------------------------------------


def test_direction_of_a_boltzmann_machine_is_the_one_by_hand():
    g, o = random_params(RBM, seed=2, scale=1.0), {"a": np.array([0.2, 0.9, 0.5]), "b": np.array([0.7, 0.1])}
    made = centered_direction(RBM, PARAMS, jax.tree.map(jnp.asarray, o), g)
    g = {n: np.asarray(v, float) for n, v in g.items()}
    w = g["a:b"] - np.outer(o["a"], g["b"]) - np.outer(g["a"], o["b"])
    wanted = {"a:b": w, "a": g["a"] - w @ o["b"], "b": g["b"] - w.T @ o["a"]}
    for name, value in wanted.items():
        np.testing.assert_allclose(made[name], value, atol=1e-5)


def curved(p: Any, a: Any, b: Any) -> Any:
    """Not linear in its params, and with terms of one block."""
    return -jnp.tanh(p).sum() * a.sum() * b[0] - jnp.exp(p[0]) * a.sum() + 0.3 * b.sum()


CURVED = FactorGraph(
    {"a": Bernoulli(3)},
    {"b": Bernoulli(2)},
    [Bias("a"), Bias("b", name="own"), Factor("a", "b", energy=curved, init=np.ones(2))],
)


GRAPHS = {
    "deep": DEEP,
    "curved": CURVED,
    "categorical": pair(FAMILIES["categorical"], FAMILIES["gaussian_learned"]),
    "triangle": FactorGraph(
        {"a": Bernoulli(2), "b": FAMILIES["spin"]},
        {"c": FAMILIES["poisson"]},
        [*map(Bias, "abc"), Bilinear("a", "b"), Bilinear("b", "c"), Bilinear("a", "c")],
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_own_params_have_the_energy_of_the_centered_ones_up_to_a_constant(name):
    graph = GRAPHS[name]
    generator = np.random.default_rng(0)
    draw = lambda: {
        b: jnp.asarray(generator.normal(size=f.statistic_shape), jnp.float32)
        for b, f in graph.families.items()
    }
    centered, offsets, t = random_params(graph, seed=3, scale=1.0), draw(), [draw() for _ in range(5)]

    @jax.jit
    def gap(t: Any) -> Any:
        moved = jax.tree.map(jnp.subtract, t, offsets)
        own = _own_params(graph, centered, offsets)
        return energy.energy(graph, own, t) - energy.energy(graph, centered, moved)

    assert np.ptp([gap(each) for each in t]) < 1e-4


@pytest.mark.parametrize("name", GRAPHS)
def test_direction_is_j_times_its_transpose(name):
    graph = GRAPHS[name]
    params, g = (random_params(graph, seed=seed, scale=1.0) for seed in (3, 4))
    offsets = {b: f.mean(f.default_eta()) + 0.3 for b, f in graph.families.items()}
    flat, back = ravel_pytree(params)
    own = lambda p: ravel_pytree(_own_params(graph, back(p), offsets))[0]
    jacobian = np.asarray(jax.jit(jax.jacfwd(own))(flat), float)
    rates = {f.name: 0.2 + i for i, f in enumerate(graph.factors[1:])}  # the first keeps its rate of 1
    each = jax.tree.map(jnp.ones_like, params)
    each |= {name: jax.tree.map(lambda a, r=r: r * a, each[name]) for name, r in rates.items()}
    scale, flat_g = (np.asarray(ravel_pytree(a)[0], float) for a in (each, g))
    direction = jax.jit(centered_direction, static_argnums=0)
    scaled = jacobian @ (scale * (jacobian.T @ flat_g))
    np.testing.assert_allclose(
        ravel_pytree(direction(graph, params, offsets, g, rates))[0], scaled, atol=1e-4, rtol=1e-4
    )
    wanted = jacobian @ jacobian.T @ flat_g
    made = ravel_pytree(direction(graph, params, offsets, g))[0]
    np.testing.assert_allclose(made, wanted, atol=1e-4)
    assert np.abs(wanted - scaled).max() > 0.1
    assert np.abs(wanted - np.asarray(ravel_pytree(g)[0])).max() > 0.1


@pytest.mark.slow  # compiles the engine
def test_mean_direction_of_an_unbiased_estimator_is_that_of_the_exact_gradient():
    data = {"a": jnp.tile(DATA["a"], (100, 1))}
    estimator = Centered(UCD(k=1, num_slots=8), sliding=0.0)
    state = estimator.init(RBM, PARAMS, data, 400, key(0))
    made = []
    for seed in range(40):
        out = estimate(RBM, estimator, PARAMS, state, Batch.of(data), key(seed + 1))
        assert "meeting_time_mean" in out.metrics
        made.append(out.gradient)
        state = out.state
    gradient = jax.tree.map(jnp.negative, exact.grad_log_likelihood(RBM, PARAMS, DATA))
    for name, value in centered_direction(RBM, PARAMS, state.offsets, gradient).items():
        assert_rows_law([np.asarray(g[name]) for g in made], value, 11)


# -- with no offsets, the estimator inside -----------------------------------------------------------


def test_zero_offsets_are_the_estimator_inside_bitwise():
    batch = Batch.of(DATA)
    plain = estimate(RBM, CD(k=2), PARAMS, (), batch, key(1))
    estimator = Centered(CD(k=2), sliding=0.0)
    state = estimator.init(RBM, PARAMS, DATA, 4, key(0))
    state = state._replace(offsets=jax.tree.map(jnp.zeros_like, state.offsets))
    out = estimate(RBM, estimator, PARAMS, state, batch, key(1))
    jax.tree.map(np.testing.assert_array_equal, out.gradient, plain.gradient)
    jax.tree.map(lambda o: np.testing.assert_array_equal(o, 0), out.state.offsets)


def test_csdcp_with_zero_offsets_is_sdcp_bitwise():
    ours, theirs = CSDCP(d=2, k=2, offsets="zero"), SDCP(d=2, k=2)
    assert ours.steps_per_batch == 2
    params = PARAMS
    mine, other = (e.init(RBM, params, DATA, 4, key(0)) for e in (ours, theirs))
    for step in range(4):
        made, plain = (
            estimate(RBM, e, params, s, Batch.of(DATA), key(step)) for e, s in ((ours, mine), (theirs, other))
        )
        jax.tree.map(np.testing.assert_array_equal, made.gradient, plain.gradient)
        mine, other = made.state, plain.state
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, plain.gradient)


# -- Algorithm 4 -------------------------------------------------------------------------------------


def test_a_run_is_algorithm_4():
    # in the centered params of the paper, reparametrised at each step; both phases at the step's offsets
    d, rate, nu = 3, 0.4, 0.2
    estimator = CSDCP(d=d, k=2, sliding=nu)
    batches = [DATA["a"][:2], DATA["a"][1:3]]
    params = PARAMS
    state = estimator.init(RBM, params, DATA, 2, key(0))
    mu, lam = np.asarray(DATA["a"], float).mean(0), np.full(2, 0.5)
    np.testing.assert_allclose(state.offsets["a"], mu)
    np.testing.assert_allclose(state.offsets["b"], lam)
    w, b, c = (np.asarray(PARAMS[n], float) for n in ("a:b", "a", "b"))
    b, c = b + w @ lam, c + w.T @ mu  # p(h | v) = sigmoid((v - mu) W + c)
    step = 0
    for batch in batches:
        v_t = np.asarray(batch, float)
        h_p = on((v_t - mu) @ w + c)
        for _ in range(d):
            out = estimate(RBM, estimator, params, state, Batch.of({"a": batch}), key(step + 1))
            params = jax.tree.map(lambda p, g: p - rate * g, params, out.gradient)
            state, step = out.state, step + 1
            v_n = np.asarray(state.inner.chains["a"], float)
            h_n = on((v_n - mu) @ w + c)
            b = b + nu * w @ (h_p.mean(0) - lam)
            c = c + nu * w.T @ (v_t.mean(0) - mu)
            mu, lam = (1 - nu) * mu + nu * v_t.mean(0), (1 - nu) * lam + nu * h_p.mean(0)
            moment = lambda v, h: (v - mu).T @ (h - lam) / 2
            w = w + rate * (moment(v_t, h_p) - moment(v_n, h_n))
            b = b + rate * (v_t.mean(0) - v_n.mean(0))
            c = c + rate * (h_p.mean(0) - h_n.mean(0))
            for name, value in {"a:b": w, "a": b - w @ lam, "b": c - w.T @ mu}.items():
                np.testing.assert_allclose(params[name], value, atol=1e-5)
            np.testing.assert_allclose(state.offsets["a"], mu, atol=1e-6)
            np.testing.assert_allclose(state.offsets["b"], lam, atol=1e-6)


# -- the offsets -------------------------------------------------------------------------------------


def test_offsets_follow_weighted_rows():
    estimator = Centered(Given(), sliding=0.25)
    state = estimator.init(RBM, PARAMS, DATA, 4, key(0))
    weights = np.array([0.5, 0.0, 1.5, 0.5])
    out = estimate(RBM, estimator, PARAMS, state, Batch(DATA, jnp.array(weights)), key(0))
    rows, share = np.asarray(DATA["a"]), weights / weights.sum()
    means = on(np.asarray(PARAMS["b"]) + rows @ np.asarray(PARAMS["a:b"]))
    np.testing.assert_allclose(out.state.offsets["a"], 0.75 * rows.mean(0) + 0.25 * share @ rows, atol=1e-6)
    np.testing.assert_allclose(out.state.offsets["b"], 0.75 * 0.5 + 0.25 * share @ means, atol=1e-6)
    np.testing.assert_allclose(out.metrics["seen"], 2.5)


@pytest.mark.parametrize(("offsets", "share"), [("model", 1.0), ("average", 0.5)])
def test_offsets_that_follow_the_model_reach_its_means(offsets, share):
    estimator = Centered(Given(), sliding=1.0, offsets=offsets)
    gradient = jax.tree.map(jnp.negative, exact.grad_log_likelihood(RBM, PARAMS, DATA))
    state = estimator.init(RBM, PARAMS, DATA, 4, key(0))._replace(inner=gradient)
    out = estimate(RBM, estimator, PARAMS, state, Batch.of(DATA), key(0))
    states, prob, _ = enumerate_numpy(RBM, PARAMS)
    rows = np.asarray(DATA["a"], float)
    data = {"a": rows.mean(0), "b": on(np.asarray(PARAMS["b"]) + rows @ np.asarray(PARAMS["a:b"])).mean(0)}
    for block in "ab":
        model = sum(p * x[block] for p, x in zip(prob, states, strict=True))
        wanted = share * model + (1 - share) * data[block]
        np.testing.assert_allclose(out.state.offsets[block], wanted, atol=1e-5)


def test_latents_of_several_layers_take_one_mean_field_pass():
    params = random_params(DEEP, seed=5, scale=1.5)
    rows = DATA["a"]
    estimator = Centered(Given(), sliding=1.0)
    state = estimator.init(DEEP, params, {"v": rows}, 4, key(0))
    out = estimate(DEEP, estimator, params, state, Batch.of({"v": rows}), key(0))
    p = {n: np.asarray(v, float) for n, v in params.items()}
    h2 = on(p["h2"] + np.full(2, 0.5) @ p["h1:h2"])
    h1 = on(p["h1"] + np.asarray(rows) @ p["v:h1"] + p["h1:h2"] @ h2).mean(0)
    np.testing.assert_allclose(out.state.offsets["h2"], h2, atol=1e-6)
    np.testing.assert_allclose(out.state.offsets["h1"], h1, atol=1e-6)


def test_offsets_begin_at_the_mean_of_each_familys_default_law():
    graph = pair(Gaussian(2), FAMILIES["categorical"])
    state = Centered(Given()).init(
        graph, random_params(graph), {"a": jnp.array([[1.0, 2], [3, 6]])}, 2, key(0)
    )
    np.testing.assert_allclose(state.offsets["a"], [2.0, 4.0])
    np.testing.assert_allclose(state.offsets["b"], np.full((2, 3), 1 / 3))


def test_adopted_offsets_and_chains_go_on():
    before = Centered(CD()).init(RBM, PARAMS, DATA, 4, key(0))
    before = before._replace(offsets={"a": jnp.full(3, 0.1), "b": jnp.full(2, 0.2)})
    estimator = Centered(UCD(k=1))
    fresh = estimator.init(RBM, PARAMS, DATA, 4, key(0))
    made = estimator.adopt(before, fresh)
    assert isinstance(made, CenteredState)
    jax.tree.map(np.testing.assert_array_equal, made.offsets, before.offsets)
    jax.tree.map(np.testing.assert_array_equal, made.inner, fresh.inner)
    zero = Centered(UCD(k=1), offsets="zero").adopt(before, fresh)
    jax.tree.map(np.testing.assert_array_equal, zero.offsets, fresh.offsets)


@dataclasses.dataclass(frozen=True)
class Adopting(Given):
    def adopt(self, before: Any, fresh: Any) -> Any:
        return before


def test_adopt_is_forwarded():
    estimator = Centered(Adopting())
    fresh = estimator.init(RBM, PARAMS, DATA, 4, key(0))
    chains = {"a": jnp.zeros((5, 3)), "b": jnp.zeros((5, 2))}
    assert estimator.adopt(chains, fresh).inner is chains
    assert estimator.adopt(fresh._replace(inner=chains), fresh).chains is chains


# -- what is refused ---------------------------------------------------------------------------------


def test_three_blocks_are_refused():
    graph = gated()
    with pytest.raises(DeclarationError, match=r"Centered: Factor\('a', 'b', 'c'\) is over 3 blocks"):
        Centered(Given()).init(graph, random_params(graph), {"a": jnp.zeros((1, 2))}, 1, key(0))


def test_a_block_without_bias_is_refused():
    graph = FactorGraph({"a": Bernoulli(2)}, {"b": Bernoulli(2)}, [Bias("a"), Bilinear("a", "b")])
    message = r"offsets in Bilinear\('a', 'b'\) move the natural parameter of block 'b'.*add Bias\('b'\)"
    with pytest.raises(DeclarationError, match=message):
        Centered(Given()).init(graph, random_params(graph), {"a": jnp.zeros((1, 2))}, 1, key(0))


def test_relative_rates_are_of_factors_that_there_are():
    estimator = Centered(Given(), rates={"a:b": 0.1})
    assert hash(estimator) == hash(Centered(Given(), rates=(("a:b", 0.1),)))
    estimator.init(RBM, PARAMS, DATA, 1, key(0))
    with pytest.raises(ValueError, match="Centered: rates is one of 'a', 'b', 'a:b', not 'a-b'"):
        Centered(Given(), rates={"a-b": 0.1}).init(RBM, PARAMS, DATA, 1, key(0))


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="is an estimator such as CD"):
        Centered(CD)
    with pytest.raises(TypeError, match="is centered already"):
        Centered(CSDCP())
    with pytest.raises(ValueError, match=r"sliding is a number in \[0, 1\], not 1.5"):
        Centered(CD(), sliding=1.5)
    with pytest.raises(ValueError, match="offsets is one of .* not 'batch'"):
        Centered(CD(), offsets="batch")
