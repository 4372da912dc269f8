# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import CD, Bernoulli, layered
from ebmpp.core import random
from ebmpp.errors import IntractableError
from ebmpp.estimators import SDCP
from ebmpp.estimators.base import Batch, Estimate
from helpers import assert_rows_law, pair, random_params

RBM = pair(Bernoulli(3), Bernoulli(2))
#: params of three inner steps, far apart
PARAMS = [random_params(RBM, seed=seed, scale=2.0) for seed in (1, 2, 3)]
DATA = {"a": jnp.array([[1.0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 1, 1]])}
DEEP = layered(v=Bernoulli(2), h1=Bernoulli(2), h2=Bernoulli(2))


def key(seed: int) -> jax.Array:
    return random.key_pair(jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=(0, 1))
def estimate(graph: Any, estimator: Any, params: Any, state: Any, batch: Batch, pair: Any) -> Estimate:
    return estimator.estimate(graph, params, state, batch, pair)


# -- Algorithm 2, in numpy -----------------------------------------------------------------------


def on(eta: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-eta))


def as_numpy(params: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, float) for name, value in params.items()}


def phase(params: dict[str, np.ndarray], v: np.ndarray) -> dict[str, np.ndarray]:
    """E[-dE/dtheta | v]: the gradient of g, and the f' of Algorithm 2."""
    h = on(params["b"] + v @ params["a:b"])
    return {"a": v, "b": h, "a:b": np.outer(v, h)}


def weighted(params: dict[str, np.ndarray], rows: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    each = [phase(params, v) for v in np.asarray(rows, float)]
    return {n: sum(w * e[n] for w, e in zip(weights, each, strict=True)) for n in each[0]}


@pytest.mark.parametrize("weights", [[1.0], [0.7, 0.1, 0.4, 0.2]])
def test_a_run_is_algorithm_2(weights):
    # two batches of d = 3 inner steps; the printed Algorithm 3 would add the steps of one batch up
    d, rate, rows = 3, 0.5, len(weights)
    estimator = SDCP(d=d, k=2)
    batches = [{"a": DATA["a"][:rows]}, {"a": 1 - DATA["a"][-rows:]}]
    params = PARAMS[0]
    state = estimator.init(RBM, params, DATA, rows, key(0))
    theta = as_numpy(params)
    step = 0
    for batch in batches:
        start = {n: v.copy() for n, v in theta.items()}
        for _ in range(estimator.steps_per_batch):
            given = Batch(batch, jnp.array(weights))
            out = estimate(RBM, estimator, params, state, given, key(step + 1))
            params = jax.tree.map(lambda p, g: p - rate * g, params, out.gradient)
            state, step = out.state, step + 1
            f = weighted(theta, state.chains["a"], np.array(weights))
            g = weighted(start, batch["a"], np.array(weights))
            theta = {n: theta[n] - rate * (f[n] - g[n]) for n in theta}
            for name, value in theta.items():
                np.testing.assert_allclose(params[name], value, atol=5e-6)
    assert step == 2 * d


# -- the law of the inner steps --------------------------------------------------------------------

STATES = np.array(list(itertools.product((0, 1), repeat=3)), float)
HIDDEN = np.array(list(itertools.product((0, 1), repeat=2)), float)


def _law(states: np.ndarray, prob: np.ndarray) -> np.ndarray:
    return np.prod(np.where(states[None] == 1, prob[:, None], 1 - prob[:, None]), -1)


def transition(params: dict[str, np.ndarray]) -> np.ndarray:
    """P(v' | v) of one sweep that draws h, then v."""
    down = _law(STATES, on(params["a"] + HIDDEN @ params["a:b"].T))
    return _law(HIDDEN, on(params["b"] + STATES @ params["a:b"])) @ down


def test_mean_gradient_of_each_inner_step_is_that_of_its_chains_law():
    # chains start at the rows and go on, under the params of each step; the positive phase stays
    d, k, copies = 3, 2, 100
    estimator = SDCP(d=d, k=k)
    batch = Batch.of({"a": jnp.tile(DATA["a"], (copies, 1))})
    empty = estimator.init(RBM, PARAMS[0], batch.rows, 4 * copies, key(0))
    made = []
    for seed in range(60):
        state, grads = empty, []
        for inner in range(d):
            out = estimate(RBM, estimator, PARAMS[inner], state, batch, key(d * seed + inner))
            grads.append(out.gradient)
            state = out.state
        made.append(grads)
    rows = np.asarray(DATA["a"])
    law = np.array([(rows == s).all(1).mean() for s in STATES])
    positive = weighted(as_numpy(PARAMS[0]), rows, np.full(4, 1 / 4))
    for inner in range(d):
        theta = as_numpy(PARAMS[inner])
        law = law @ np.linalg.matrix_power(transition(theta), k)
        negative = weighted(theta, STATES, law)
        for name in theta:
            samples = [np.asarray(grads[inner][name]) for grads in made]
            assert_rows_law(samples, negative[name] - positive[name], 3 * 11)


# -- CD, restarts, one program ---------------------------------------------------------------------


def test_one_inner_step_is_cd_bitwise():
    batch = Batch.of(DATA)
    ours = estimate(RBM, SDCP(d=1, k=3), PARAMS[0], (), batch, key(1))
    theirs = estimate(RBM, CD(k=3), PARAMS[0], (), batch, key(1))
    assert SDCP(d=1).steps_per_batch == 1 and SDCP(d=1).init(RBM, PARAMS[0], DATA, 4, key(0)) == ()
    jax.tree.map(np.testing.assert_array_equal, ours.gradient, theirs.gradient)


def test_first_inner_step_is_that_of_cd_and_the_next_batch_starts_afresh():
    estimator, batch = SDCP(d=3, k=2), Batch.of(DATA)
    empty = state = estimator.init(RBM, PARAMS[0], DATA, 4, key(0))
    plain = estimate(RBM, CD(k=2), PARAMS[0], (), batch, key(1)).gradient
    programs, made = [], []
    for inner in range(3):
        made.append(estimate(RBM, estimator, PARAMS[inner], state, batch, key(inner + 1)))
        state = made[-1].state
        programs.append(estimate._cache_size())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), made[0].gradient, plain)
    assert [int(out.state.inner) for out in made] == [1, 2, 0]
    for out in made[1:]:
        jax.tree.map(np.testing.assert_array_equal, out.state.positive, made[0].state.positive)
    other = Batch.of({"a": 1 - DATA["a"]})
    ours, fresh = (estimate(RBM, estimator, PARAMS[1], given, other, key(7)) for given in (state, empty))
    jax.tree.map(np.testing.assert_array_equal, ours, fresh)
    assert {*programs, estimate._cache_size()} == {programs[0]}  # one program serves every inner step


# -- a posterior that is not one layer -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Halves:
    """A stand-in for an approximate posterior."""

    def statistics(self, graph: Any, params: Any, rows: Any) -> Any:
        size = len(next(iter(rows.values())))
        halves = {b: jnp.full((size, *f.statistic_shape), 0.5) for b, f in graph.latent.items()}
        return {**graph.statistics(rows), **halves}


def test_posterior_stands_in_for_the_exact_one():
    params = random_params(DEEP, seed=4)
    batch = Batch.of({"v": jnp.array([[1.0, 0.0], [1.0, 1.0]])})
    estimator = SDCP(d=2, k=1, posterior=Halves())
    out = estimate(
        DEEP, estimator, params, estimator.init(DEEP, params, batch.rows, 2, key(0)), batch, key(1)
    )
    v, h1, h2 = (np.asarray(out.state.chains[b]) for b in ("v", "h1", "h2"))
    positive = {"h2": -0.5 * np.ones(2), "v:h1": -np.outer([1.0, 0.5], [0.5, 0.5])}
    negative = {"h2": h2.mean(0), "v:h1": v.T @ h1 / 2}
    for name, value in positive.items():
        np.testing.assert_allclose(out.state.positive[name], value)
        np.testing.assert_allclose(out.gradient[name], value + negative[name], atol=1e-6)


def test_posterior_that_is_not_one_layer_is_refused():
    with pytest.raises(IntractableError, match="^SDCP needs an exact positive phase, and latent blocks 'h1'"):
        SDCP().init(DEEP, DEEP.init(jax.random.key(0)), {"v": jnp.zeros((1, 2))}, 1, key(0))


@pytest.mark.parametrize("options", [{"d": 0}, {"d": 1.5}, {"k": -1}])
def test_counts_are_positive(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} is an int of at least 1, not {value}"):
        SDCP(**options)
