# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Expectations and their derivatives against enumeration, by row, and what is refused.

Tests evaluate/derivatives.py.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, Categorical, FactorGraph, Gaussian
from ebmpp.errors import ArgumentError
from helpers import assert_law, assert_rows_law, nightly, random_params

REPEATS = 500
WEIGHT = jnp.linspace(-1.0, 1.0, 4)


def mean(params: Any, weight: Any, index: Any, key: Any, **options: Any) -> Any:
    """A function with several leaves, that closes over traced values."""

    def observe(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            "tanh": jnp.tanh(x["v"] @ weight),
            "on": x["h"][index] > 0,
            "both": jnp.outer(x["v"], x["h"]),
        }

    options = {"num_pairs": 3, "rng_key": key, **options}
    return ebmpp.expectation(zoo.graph("rbm"), params, observe, **options)


def loss(*args: Any, **options: Any) -> Any:
    value = mean(*args, **options)
    return value["tanh"] + 0.5 * value["on"] + 0.2 * value["both"].sum()


def exact() -> tuple[Any, Any]:
    """Return the loss and its derivatives, by sums in float64."""
    joint = zoo.oracle("rbm")
    p = np.exp(joint.log_weights - joint.log_z)
    v, h = (joint.x[b].astype(float) for b in "vh")
    tanh = np.tanh(v @ np.asarray(WEIGHT, float))
    both = np.einsum("si,sj->sij", v, h)
    s = tanh + 0.5 * h[:, 1] + 0.2 * both.sum((1, 2))
    statistics = {"v": v, "h": h, "v:h": both}
    covariances = {
        name: np.tensordot(p * (s - p @ s), t, 1) for name, t in statistics.items()
    }
    return p @ s, (covariances, (p * (1 - tanh**2)) @ v)


def repeated(**options: Any) -> Any:
    """Return the loss and its derivatives by independent keys, with a leading axis."""
    both = jax.value_and_grad(
        lambda *args: loss(*args, **options), argnums=(0, 1), allow_int=True
    )
    args = zoo.params("rbm"), WEIGHT, jnp.int32(1)
    step = jax.jit(both)
    results = [step(*args, key) for key in jax.random.split(zoo.KEY, REPEATS)]
    return jax.tree.map(lambda *values: np.stack(values), *results)


@pytest.mark.parametrize("method", ["gibbs", nightly("mixture")])
def test_values_and_derivatives_are_unbiased(method: str) -> None:
    pool = {"v": np.eye(4, dtype=np.float32)} if method == "mixture" else None
    results = repeated(method=method, pool=pool)
    jax.tree.map(lambda r, e: assert_rows_law(r, e, comparisons=24), results, exact())


def two_modes() -> Any:
    """Params of two modes, all units on or off, between which Gibbs chains rarely move."""
    return {
        "v": jnp.float32([-5.5, -6.0, -6.0, -6.2]),
        "h": jnp.full(3, -8.0),
        "v:h": jnp.full((4, 3), 4.0),
    }


def test_particles_are_unbiased_where_gibbs_chains_do_not_meet() -> None:
    args = two_modes(), WEIGHT, jnp.int32(1)
    options = {"num_pairs": 8, "num_particles": 20, "max_sweeps": 1000}

    def both(*args: Any, **options: Any) -> Any:
        value = lambda *args: loss(*args, **options)
        return jax.value_and_grad(value, argnums=(0, 1))(*args)

    step = jax.jit(partial(both, method="particles", **options))
    results = [step(*args, key) for key in jax.random.split(zoo.KEY, 100)]
    results = jax.tree.map(lambda *values: np.stack(values), *results)
    truth = both(*args, zoo.KEY, method="exact")
    jax.tree.map(lambda r, e: assert_rows_law(r, e, comparisons=24), results, truth)
    gibbs, _ = jax.jit(partial(both, **options))(*args, zoo.KEY)
    assert np.isnan(gibbs)


@pytest.mark.parametrize("method", ["particles", nightly("gibbs")])
def test_a_constant_adds_no_noise_to_the_gradient(method: str) -> None:
    """Each pair's value is compared with the mean of the others, which has it too."""

    def value(params: Any, constant: Any) -> Any:
        return ebmpp.expectation(
            zoo.graph("rbm"),
            params,
            lambda x: x["v"] @ WEIGHT + constant,
            rng_key=zoo.KEY,
            num_pairs=4,
            num_particles=20,
            method=method,
        )

    step = jax.jit(jax.grad(value))
    first, second = (step(zoo.params("rbm"), jnp.float32(c)) for c in (0, 100))
    assert max(jnp.abs(g).max() for g in jax.tree.leaves(first)) > 0.01
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), first, second
    )


def test_exact_sums_have_derivatives_of_all_orders() -> None:
    args = zoo.params("rbm"), WEIGHT, jnp.int32(1), zoo.KEY
    both = jax.value_and_grad(lambda *a: loss(*a, method="exact"), argnums=(0, 1))
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, atol=1e-6), both(*args), exact()
    )
    third = jax.hessian(
        lambda p: mean(p, *args[1:], method="exact")["tanh"]
    )  # of log Z
    assert jnp.abs(third(args[0])["v"]["v"]).max() > 1e-3


def conditional() -> tuple[FactorGraph, Any, dict[str, np.ndarray]]:
    """A layer of interacting units given real inputs and a label, with rows of both."""
    graph = FactorGraph(
        {"x": Gaussian(2), "y": Categorical(1, 3)},
        {"z": Bernoulli(3), "h": Bernoulli(2)},
        [
            *map(Bias, "zh"),
            *(Bilinear("x", "z"), Bilinear("y", "z"), Bilinear("z", "h")),
        ],
    )
    rows = {
        "x": np.float32([[[0.5, -1.0], [2.0, 0.3]]] * 3).reshape(3, 2, 2),
        "y": np.int32([[[0], [1]], [[2], [2]], [[1], [0]]]),
    }
    rows["x"] *= np.float32([1, -1, 0.5])[:, None, None]
    return graph, random_params(graph, 2, scale=1.0), rows


@pytest.mark.parametrize("method", ["gibbs", "particles"])
def test_rows_of_clamped_blocks_have_values_and_derivatives_of_their_own(
    method: str,
) -> None:
    graph, params, rows = conditional()
    cotangent = np.random.default_rng(0).normal(size=(3, 2, 3)).astype(np.float32)

    def value(params, x, key, method):
        return ebmpp.expectation(
            graph,
            params,
            lambda state: state["z"] * state["x"].sum(),
            rng_key=key,
            num_pairs=8,
            num_particles=10,
            method=method,
            x=x,
            y=rows["y"],
        )

    def derivatives(params, x, key, method):
        result, pull = jax.vjp(lambda p, x: value(p, x, key, method), params, x)
        return result, pull(jnp.asarray(cotangent))

    step = jax.jit(partial(derivatives, method=method))
    keys = jax.random.split(zoo.KEY, REPEATS if method == "gibbs" else 100)
    results = [step(params, rows["x"], key) for key in keys]
    results = jax.tree.map(lambda *values: np.stack(values), *results)
    truth = derivatives(params, jnp.asarray(rows["x"]), zoo.KEY, "exact")
    assert truth[0].shape == (3, 2, 3)
    jax.tree.map(lambda r, e: assert_rows_law(r, e, comparisons=60), results, truth)


@pytest.mark.nightly
def test_a_batch_of_params_is_that_of_single_calls() -> None:
    graph = zoo.graph("rbm")
    biases = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)

    def value(bias, key):
        params = {**zoo.params("rbm"), "v": bias}
        fn = lambda x: x["v"] @ bias
        return ebmpp.expectation(graph, params, fn, rng_key=key, num_pairs=4)

    keys = jax.random.split(zoo.KEY, 2)
    step = jax.jit(jax.value_and_grad(value))
    batch = jax.jit(jax.vmap(jax.value_and_grad(value)))(biases, keys)
    single = [step(*args) for args in zip(biases, keys)]
    single = jax.tree.map(lambda *values: np.stack(values), *single)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4), batch, single
    )


@pytest.mark.parametrize("method", ["gibbs", "particles"])
def test_unmet_pairs_and_params_that_are_not_finite_give_nan(method: str) -> None:
    params = two_modes()
    options = {"max_sweeps": 3, "num_pairs": 20, "num_particles": 2}
    step = jax.jit(
        jax.value_and_grad(
            lambda p: loss(p, WEIGHT, 1, zoo.KEY, method=method, **options)
        )
    )
    for p in (params, {**params, "v": jnp.full(4, jnp.nan)}):
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(step(p)))


def test_second_derivatives_are_refused() -> None:
    def value(p):
        return loss(p, WEIGHT, 1, zoo.KEY)

    def norm(p):
        return optax.tree.norm(jax.grad(value)(p))

    for outer in (jax.grad(norm), lambda p: jax.jvp(norm, (p,), (p,))):
        with pytest.raises(ArgumentError, match="second derivative"):
            outer(zoo.params("rbm"))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(value, (zoo.params("rbm"),), (zoo.params("rbm"),))


@pytest.mark.nightly
def test_sixteen_units_by_a_hundred_thousand_pairs() -> None:
    """All derivatives of three observables within 3.5 standard errors of enumeration."""
    graph = ebmpp.layered(v=Bernoulli(8), h=Bernoulli(8))
    params = random_params(graph, 3, scale=1.0)

    def observables(params, key, method):
        def fn(x):
            v, h = x["v"], x["h"]
            return jnp.stack([v.mean() * h.mean(), jnp.cos(v @ h), (v[0] - h[1]) ** 2])

        return ebmpp.expectation(
            graph, params, fn, rng_key=key, num_pairs=1000, method=method
        )

    def jacobian(params, key, method="gibbs"):
        return jax.jacrev(observables)(params, key, method)

    step = jax.jit(jacobian)
    keys = jax.random.split(zoo.KEY, 100)
    results = jax.tree.map(lambda *r: np.stack(r), *(step(params, k) for k in keys))
    truth = jacobian(params, zoo.KEY, "exact")

    def score(r, e):
        return (r.mean(0) - e) / (r.std(0, ddof=1) / np.sqrt(len(r)))

    scores = jax.tree.leaves(jax.tree.map(score, results, truth))
    scores = np.concatenate([np.ravel(s) for s in scores])
    assert scores.size == 3 * 80 and np.abs(scores).max() < 3.5
    assert_law(scores.std(), 1, 0.1)
