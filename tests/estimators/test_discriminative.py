# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Discriminative training: conditional likelihoods against enumeration, and the
hybrid's mean gradient.

Tests estimators/discriminative.py.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
from ucd_tools import assert_mean, differences, estimate, exact_gradient, key
import zoo

import jax

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
    layered,
)
from ebmpp.errors import ArgumentError, DeclarationError, IntractableError
from ebmpp.estimators import Discriminative
from ebmpp.estimators.base import Batch
from ebmpp.estimators.discriminative import label_log_probabilities
from helpers import random_params

pytestmark = pytest.mark.nightly

ROWS = {
    "v": np.float32([[1, 0], [1, 1], [0, 1]]),
    "y": np.int32([[0], [2], [1]]),
    "s": np.float32([[1, -1], [-1, -1], [1, 1]]),
}
WEIGHTS = np.float32([0.5, 0.3, 0.4])


@cache
def labelled() -> tuple[FactorGraph, dict[str, Any]]:
    edges = [Bilinear("v", "h"), Bilinear("y", "h"), Bilinear("h", "s")]
    visible = {"v": Bernoulli(2), "y": Categorical(1, 3), "s": Spin(2)}
    graph = FactorGraph(visible, {"h": Bernoulli(2)}, [*map(Bias, "vysh"), *edges])
    return graph, random_params(graph, seed=1, scale=1.0)


def conditional(params: Any, target: str) -> np.ndarray:
    """log p(target | rest) of each row."""
    log_z = lambda names, i: (
        zoo.Oracle(labelled()[0], params, {b: ROWS[b][i] for b in names}).log_z
    )
    rest = [b for b in ROWS if b != target]
    return np.array([log_z(list(ROWS), i) - log_z(rest, i) for i in range(3)])


@pytest.mark.parametrize("target", ["y", "s"])
def test_loss_and_gradient_match_enumeration(target: str) -> None:
    graph, params = labelled()
    estimator = Discriminative(target)
    state = estimator.init_state(graph, params, ROWS, 3, key(0))
    result = estimate(estimator, graph, params, state, ROWS, key(1), WEIGHTS)
    expected = WEIGHTS @ conditional(params, target)
    np.testing.assert_allclose(
        result.metrics["conditional_log_likelihood"],
        expected / WEIGHTS.sum(),
        rtol=1e-4,
    )
    for name, g in differences(
        lambda p: -WEIGHTS @ conditional(p, target), params
    ).items():
        np.testing.assert_allclose(result.gradient[name], g, atol=1e-5)
    table = label_log_probabilities(
        graph, params, {b: x for b, x in ROWS.items() if b != target}, target
    )
    assert table.shape == (3, 3 if target == "y" else 4)
    np.testing.assert_allclose(np.exp(table).sum(1), 1, rtol=1e-5)


def test_mean_gradient_of_the_hybrid_matches_both_losses() -> None:
    graph, params = labelled()
    estimator = Discriminative("y", UCD(num_pairs=4, k=1, lag=1), weight=0.5)
    state, batch = (
        estimator.init_state(graph, params, ROWS, 3, key(0)),
        Batch(ROWS, WEIGHTS),
    )
    draw = lambda pair: estimator.estimate(graph, params, state, batch, pair).gradient
    pairs = np.stack([np.zeros(400), np.arange(400)], 1).astype(np.uint32)
    draws = jax.device_get(jax.jit(lambda pairs: jax.lax.map(draw, pairs))(pairs))
    label = differences(lambda p: -WEIGHTS @ conditional(p, "y"), params)
    joint = exact_gradient(graph, params, ROWS, WEIGHTS)
    expected = {name: g + 0.5 * joint[name] for name, g in label.items()}
    assert_mean([{n: g[i] for n, g in draws.items()} for i in range(400)], expected)


def test_targets_that_cannot_be_predicted_are_refused() -> None:
    start = lambda graph, target: Discriminative(target).init_state(
        graph, {}, {}, 1, key(0)
    )
    wide = FactorGraph(
        {"v": Bernoulli(13), "x": Gaussian(1)}, {"h": Spin(1)}, [*map(Bias, "vxh")]
    )
    for graph, target, error, message in (
        (labelled()[0], "h", DeclarationError, "target .*'h'"),
        (
            layered(v=Bernoulli(2), h=Bernoulli(2)),
            "v",
            DeclarationError,
            "target .*'v'",
        ),
        (wide, "v", IntractableError, r"got Bernoulli\(13\)"),
        (wide, "x", IntractableError, r"got Gaussian\(1"),
    ):
        with pytest.raises(error, match=message):
            start(graph, target)
    with pytest.raises((ArgumentError, TypeError), match="generative"):
        Discriminative("y", PCD)
    with pytest.raises(ArgumentError, match="weight .*-1"):
        Discriminative("y", weight=-1)
