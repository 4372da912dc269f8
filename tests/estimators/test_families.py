# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased gradients of models of every family, against exact ones."""

from typing import Any

import pytest
from ucd_tools import assert_mean, estimate, exact_gradient, key
import zoo

from ebmpp import UCD, ParticleUCD

ESTIMATORS = {
    "pairs": UCD(num_pairs=200),
    "particles": ParticleUCD(num_particles=100),
}
NAMES = ("gated", "lattice", "poisson", "learned", "mixed")


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_mean_gradient_matches_the_exact_one(kind: str, name: str) -> None:
    graph, params = zoo.graph(name), zoo.params(name)
    estimator: Any = ESTIMATORS[kind]
    rows = zoo.rows(name)
    state = estimator.init_state(graph, params, rows, zoo.BATCH, key(0))
    gradients = []
    for seed in range(20):
        result = estimate(estimator, graph, params, state, rows, key(seed + 1))
        # lengths and rungs adapt, and every step stays unbiased given the past
        state = result.state
        gradients.append(result.gradient)
    assert_mean(gradients, exact_gradient(graph, params, rows))
