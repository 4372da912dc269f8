# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased gradients of models of every family, against exact ones."""

from typing import Any

import numpy as np
from oracle import Oracle
import pytest
from random_graphs import random_graph
from ucd_tools import assert_mean, estimate, exact_gradient, key
import zoo

from ebmpp import UCD, FactorGraph, ParticleUCD

ESTIMATORS = {
    "pairs": UCD(num_pairs=200),
    "particles": ParticleUCD(num_particles=100),
}
NAMES = ("gated", "lattice", "poisson", "learned", "mixed")


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_mean_gradient_matches_the_exact_one(kind: str, name: str) -> None:
    assert_unbiased(kind, zoo.graph(name), zoo.params(name), zoo.rows(name), 20)


#: seeds of random graphs, and the kinds of their first two blocks
RANDOM = {
    20: ("poisson", "exponential"),
    1: ("learned", "gaussian"),
    12: ("categorical", "binomial"),
    3: ("exponential", "spin"),
    4: ("bernoulli", "learned"),
    15: ("poisson", "categorical"),
    5: ("spin", "categorical"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", RANDOM)
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_mean_gradient_of_a_random_graph(kind: str, seed: int) -> None:
    graph, params = random_graph(seed, *RANDOM[seed])
    drawn = Oracle(graph, params, {}).draw(np.random.default_rng(seed), 4)
    rows = {block: drawn[block] for block in graph.visible}
    assert_unbiased(kind, graph, params, rows, 100)


def assert_unbiased(
    kind: str, graph: FactorGraph, params: Any, rows: Any, steps: int
) -> None:
    estimator: Any = ESTIMATORS[kind]
    num_rows = len(next(iter(rows.values())))
    state = estimator.init_state(graph, params, rows, num_rows, key(0))
    gradients = []
    for seed in range(steps):
        result = estimate(estimator, graph, params, state, rows, key(seed + 1))
        # lengths and rungs adapt, and every step stays unbiased given the past
        state = result.state
        gradients.append(result.gradient)
    assert_mean(gradients, exact_gradient(graph, params, rows))
