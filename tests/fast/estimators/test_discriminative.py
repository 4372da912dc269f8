# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditional likelihood against enumeration, and the hybrid's mean gradient."""

from typing import Any

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import (
    PCD,
    UCD,
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    FactorGraph,
    Gaussian,
    Spin,
    exact,
    layered,
)
from ebmpp.core import random
from ebmpp.errors import DeclarationError, IntractableError
from ebmpp.estimators import Discriminative
from ebmpp.estimators.base import Batch, Estimate
from ebmpp.estimators.discriminative import label_log_probabilities
from helpers import assert_rows_law, enumerate_numpy, random_params, slow

GRAPH = FactorGraph(
    {"v": Bernoulli(2), "y": Categorical(1, 3), "s": Spin(2)},
    {"h": Bernoulli(2)},
    [*map(Bias, "vysh"), Bilinear("v", "h"), Bilinear("y", "h"), Bilinear("h", "s")],
)
PARAMS = random_params(GRAPH, seed=1, scale=1.0)
ROWS = {
    "v": jnp.array([[1.0, 0], [1, 1], [0, 1]]),
    "y": jnp.array([[0], [2], [1]]),
    "s": jnp.array([[1.0, -1], [-1, -1], [1, 1]]),
}


def conditional_by_enumeration(target: str) -> np.ndarray:
    """log p(target | rest) of each row, from the list of all states."""
    states, probs, _ = enumerate_numpy(GRAPH, PARAMS)
    made = []
    for i in range(3):
        row = {b: np.asarray(x[i]) for b, x in ROWS.items()}
        same = lambda s, blocks, row=row: all((s[b] == row[b]).all() for b in blocks)
        joint = sum(p for s, p in zip(states, probs, strict=True) if same(s, row))
        rest = sum(p for s, p in zip(states, probs, strict=True) if same(s, set(row) - {target}))
        made.append(np.log(joint / rest))
    return np.array(made)


@jax.jit
def conditional_gradient(params: Any, weights: jax.Array) -> Any:
    """By differences of two joint likelihoods: log p(v, y, s) - log p(v, s)."""

    def loss(p: Any) -> jax.Array:
        joint = -GRAPH.free_energy(p, ROWS)
        others = {"v": ROWS["v"][:, None], "s": ROWS["s"][:, None], "y": jnp.arange(3)[:, None]}
        return -weights @ (joint - jax.nn.logsumexp(-GRAPH.free_energy(p, others), axis=1))

    return jax.grad(loss)(params)


@pytest.mark.parametrize("target", ["y", slow("s")])
def test_the_loss_is_that_of_enumeration(target: str) -> None:
    estimator = Discriminative(target)
    weights = jnp.array([0.5, 0.3, 0.4])
    state = estimator.init(GRAPH, PARAMS, ROWS, 3, random.key_pair(jax.random.key(0)))
    step = jax.jit(estimator.estimate, static_argnums=0)
    made = step(GRAPH, PARAMS, state, Batch(ROWS, weights), random.key_pair(jax.random.key(1)))
    wanted = conditional_by_enumeration(target)
    told = made.metrics["conditional_log_likelihood"]
    np.testing.assert_allclose(told, np.dot(weights, wanted) / 1.2, rtol=1e-4)
    if target == "y":
        gradient = conditional_gradient(PARAMS, weights)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), made.gradient, gradient)
    rest = {b: x for b, x in ROWS.items() if b != target}
    table = label_log_probabilities(GRAPH, PARAMS, rest, target)
    assert table.shape == (3, 3 if target == "y" else 4)
    np.testing.assert_allclose(np.exp(table).sum(1), 1, rtol=1e-5)


@pytest.mark.slow
def test_the_hybrid_is_unbiased_for_both_losses() -> None:
    estimator = Discriminative("y", UCD(num_pairs=4, k=1, lag=1), weight=0.5)
    batch = Batch.of(ROWS)
    state = estimator.init(GRAPH, PARAMS, ROWS, 3, random.key_pair(jax.random.key(0)))

    def one(pair: jax.Array) -> Estimate:
        return estimator.estimate(GRAPH, PARAMS, state, batch, pair).gradient

    pairs = random.fold_in(random.key_pair(jax.random.key(1)), jnp.arange(400))
    drawn = jax.jit(lambda pairs: jax.lax.map(one, pairs))(pairs)
    joint = exact.grad_log_likelihood(GRAPH, PARAMS, ROWS)
    wanted = jax.tree.map(lambda c, g: c - 0.5 * g, conditional_gradient(PARAMS, batch.weights), joint)
    size = sum(a.size for a in jax.tree.leaves(wanted))
    for name, value in wanted.items():
        assert_rows_law(drawn[name], value, comparisons=size)


def test_what_it_carries_is_that_of_the_estimator_beside() -> None:
    alone = PCD(num_chains=3)
    both = Discriminative("y", alone)
    pair = random.key_pair(jax.random.key(0))
    states = [e.init(GRAPH, PARAMS, ROWS, 3, pair) for e in (alone, both)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert both.steps_per_batch == 1 and Discriminative("y").init(GRAPH, PARAMS, ROWS, 3, pair) == ()


def test_what_it_cannot_predict_is_told() -> None:
    pair = random.key_pair(jax.random.key(0))
    start = lambda graph, target: Discriminative(target).init(graph, {}, {}, 1, pair)
    with pytest.raises(
        DeclarationError, match="target 'h' is a visible block beside others; .*'v', 'y', 's'"
    ):
        start(GRAPH, "h")
    with pytest.raises(DeclarationError, match="target 'v' is a visible block beside others"):
        start(layered(v=Bernoulli(2), h=Bernoulli(2)), "v")
    wide = FactorGraph({"v": Bernoulli(13), "x": Gaussian(1)}, {"h": Spin(1)}, [*map(Bias, "vxh")])
    with pytest.raises(IntractableError, match=r"block 'v' .* takes 2\*\*13 values, and 4096 are the most"):
        start(wide, "v")
    with pytest.raises(IntractableError, match="takes infinitely many values"):
        start(wide, "x")
    with pytest.raises(TypeError, match="generative is an estimator such as UCD"):
        Discriminative("y", PCD)
    with pytest.raises(ValueError, match="weight is a number of at least 0, not -1"):
        Discriminative("y", weight=-1)
