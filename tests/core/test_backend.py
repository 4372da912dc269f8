# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products that follow from an energy run in full float32; read off the traced programs.

Tests core/backend.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zoo

import jax
from jax.extend import core
import jax.numpy as jnp

import ebmpp
from ebmpp.core import backend
from ebmpp.estimators.base import Batch
from ebmpp.evaluate import mean_field_bound, pseudo_log_likelihood
from ebmpp.graph import energy
from ebmpp.sklearn import harmonium
from helpers import nightly

PRODUCTS = ("dot_general", "conv_general_dilated")
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations of a program and of the programs that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def precisions(fn: Callable[..., Any], *args: Any) -> set:
    """Precisions of the products in a program."""
    traced = equations(jax.make_jaxpr(fn)(*args).jaxpr)
    products = [e for e in traced if e.primitive.name in PRODUCTS]
    assert products, "the program has no product"
    return {e.params["precision"] for e in products}


def rows(graph: ebmpp.FactorGraph) -> dict[str, Any]:
    return {
        b: np.zeros((zoo.BATCH, *f.shape), f.dtype) for b, f in graph.families.items()
    }


@pytest.mark.parametrize("name", ["rbm", nightly("mixed"), nightly("lattice")])
def test_sweeps(name: str) -> None:
    graph = zoo.graph(name)
    kernel, params = ebmpp.BlockedGibbs(graph), graph.init(zoo.KEY)
    state = kernel.init(zoo.KEY, 0, None, model_args=(params,), model_kwargs={})
    sample = lambda state, params: kernel.sample(state, (params,), {})
    assert precisions(sample, state, params) == {HIGHEST}


ESTIMATORS = {
    "ucd": lambda: ebmpp.UCD(),
    "cd": lambda: ebmpp.CD(),
    "pcd": lambda: ebmpp.PCD(num_chains=8),
    "summed": lambda: ebmpp.UCD(marginalize="layers"),
    "mixture": lambda: ebmpp.UCD(method="mixture", pool_size=4),
    "weighted": lambda: ebmpp.WeightedPCD(num_chains=20, num_watchers=20),
    "particles": lambda: ebmpp.ParticleUCD(num_particles=10, max_rungs=8),
    "centered": lambda: ebmpp.Centered(ebmpp.CD()),
}


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("rbm", "ucd"),
        *(nightly("rbm", e) for e in ESTIMATORS if e != "ucd"),
        nightly("mixed", "ucd"),
    ],
)
def test_gradients(name: str, estimator: str) -> None:
    graph, key = zoo.graph(name), np.zeros(2, np.uint32)
    estimator, params = ESTIMATORS[estimator](), graph.init(zoo.KEY)
    data = {b: v for b, v in rows(graph).items() if b in graph.visible}
    state = estimator.init_state(graph, params, data, zoo.BATCH, key)
    step = lambda params, state, batch, key: estimator.estimate(
        graph, params, state, batch, key
    )
    assert precisions(step, params, state, Batch.uniform(data), key) == {HIGHEST}


EVALUATIONS = {
    "log Z": lambda graph, p, x: ebmpp.exact.log_partition(graph, p),
    "free energy": lambda graph, p, x: graph.free_energy(p, {"v": x["v"]}),
    "energy": lambda graph, p, x: graph.energy(p, x),
    "conditional": lambda graph, p, x: graph.conditional(p, x, "h").mean,
    "pseudo-likelihood": lambda graph, p, x: pseudo_log_likelihood(graph, p, x["v"]),
    "bound": lambda graph, p, x: mean_field_bound(graph, p, x["v"]),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations_and_their_gradients(name: str) -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    value = lambda p: EVALUATIONS[name](graph, p, rows(graph))
    assert precisions(value, params) == {HIGHEST}
    assert precisions(jax.grad(lambda p: value(p).sum()), params) == {HIGHEST}


def test_a_lower_precision_of_the_user_is_respected() -> None:
    graph = zoo.graph("rbm")
    with jax.default_matmul_precision("tensorfloat32"):
        assert HIGHEST not in precisions(
            lambda p: graph.free_energy(p, rows(graph)["v"]), zoo.params("rbm")
        )


@pytest.mark.parametrize("decades", [0, 3])
def test_products_of_exact_states_are_at_least_as_exact_as_float32(decades) -> None:
    generator = np.random.default_rng(0)
    states = generator.integers(-4, 5, (200, 784)).astype(np.float32)
    scale = 10 ** generator.uniform(-decades, decades, (784, 50))
    weights = (scale * generator.normal(size=(784, 50))).astype(np.float32)
    exact = states.astype(float) @ weights.astype(float)
    product = jax.vmap(backend.product, (0, None))

    def error(states):
        return np.sqrt(np.mean((np.asarray(product(states, weights)) - exact) ** 2))

    assert error(jnp.asarray(states, jnp.bfloat16)) < error(jnp.asarray(states))


def is_split(fn: Callable[..., Any], *args: Any) -> bool:
    """Return True if a program has a product of numbers in bfloat16."""
    traced = equations(jax.make_jaxpr(fn)(*args).jaxpr)
    products = [e for e in traced if e.primitive.name in PRODUCTS]
    return any(e.invars[0].aval.dtype == jnp.bfloat16 for e in products)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "accelerated", lambda: True)


STATES = {"v": np.resize([0.0, 1, 1], (768, 5)).astype(np.float32)}


def test_many_exact_states_are_multiplied_in_bfloat16(on_gpu: None) -> None:
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(5), h=ebmpp.Spin(4))
    params = jax.tree.map(lambda a: a + 0.3, rbm.init(zoo.KEY))
    natural = lambda p, x, b="h": energy.natural_rows(rbm, p, x, [b])[b]
    exact = STATES["v"].astype(float) @ np.asarray(params["v:h"], float) + 0.3
    assert is_split(natural, params, STATES)
    np.testing.assert_allclose(natural(params, STATES), exact, rtol=2e-7)
    fewer_rows = {"v": STATES["v"][:767]}
    assert not is_split(natural, params, fewer_rows)
    with jax.default_matmul_precision("float32"):
        assert not is_split(natural, params, STATES)
    spins = {"h": np.resize([-1.0, 1, 1], (768, 4)).astype(np.float32)}
    assert is_split(lambda p, x: natural(p, x, "v"), params, spins)


def test_gradients_through_exact_products_are_those_in_float32(on_gpu: None) -> None:
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(5), h=ebmpp.Spin(4))
    params = rbm.init(zoo.KEY)
    loss = lambda p: energy.summed_out(rbm, p, STATES, ("h",)).sum()
    assert is_split(jax.grad(loss), params)
    split = jax.grad(loss)(params)
    hessian = jax.jvp(jax.grad(loss), (params,), (params,))[1]
    with jax.default_matmul_precision("float32"):
        plain = jax.grad(loss)(params)
        plain_hessian = jax.jvp(jax.grad(loss), (params,), (params,))[1]
    for got, want in ((split, plain), (hessian, plain_hessian)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-6), got, want)


def test_only_finite_states_of_eight_bits_are_exact_in_bfloat16() -> None:
    exact = (
        ebmpp.Bernoulli(1),
        ebmpp.Spin(1),
        ebmpp.Categorical(1, 5),
        ebmpp.Binomial(1, 256),
    )
    others = (ebmpp.Binomial(1, 257), ebmpp.Poisson(1), ebmpp.Gaussian(1))
    assert all(family.is_exact_in_bfloat16 for family in exact)
    assert not any(family.is_exact_in_bfloat16 for family in others)


def test_energies_other_than_bilinear_ones_get_float32(on_gpu: None) -> None:
    def squares(w, v, h):
        assert v.dtype == h.dtype == jnp.float32
        return -v @ w @ h

    factor = ebmpp.Factor("v", "h", energy=squares, init=np.ones((5, 4)))
    blocks = {"v": ebmpp.Bernoulli(5)}, {"h": ebmpp.Bernoulli(4)}
    graph = ebmpp.FactorGraph(*blocks, factors=[factor])
    energy.natural_rows(graph, graph.init(zoo.KEY), STATES, ["h"])


def test_rows_of_means_are_multiplied_in_float32(on_gpu: None) -> None:
    model = ebmpp.sklearn.HarmoniumTransformer()
    model.graph_ = ebmpp.layered(v=ebmpp.Bernoulli(5), h=ebmpp.Bernoulli(4))
    model.params_ = jax.tree.map(lambda a: a + 0.3, model.graph_.init(zoo.KEY))
    rows = np.random.default_rng(0).random((768, 5)).astype(np.float32)
    eta = rows.astype(float) @ np.asarray(model.params_["v:h"], float) + 0.3
    means = model._by_chunks(harmonium.latent_means, rows)
    np.testing.assert_allclose(means, 1 / (1 + np.exp(-eta)), rtol=1e-6)
