# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training and transforming with custom families."""

import functools

import numpy as np
from own_families import Ordinal, Ternary
import pytest
import zoo

import jax

from ebmpp import Bernoulli, Categorical, Family, fit, layered, local_search
from ebmpp.estimators import PCD


@pytest.mark.parametrize("family", [Ternary(4), Ordinal((2, 2))], ids=repr)
def test_training_with_a_custom_visible_family(family: Family) -> None:
    graph = layered(v=family, h=Bernoulli(2))
    data = np.random.default_rng(0).integers(0, 3, (40, *family.shape)).astype(np.float32)
    options = {"num_steps": 5, "batch_size": 20, "rng_key": zoo.KEY, "progress_bar": False}
    params = fit(graph, data, estimator=PCD(num_chains=20), **options).params
    graph.check(params)
    state = local_search(graph, params, rng_key=zoo.KEY).state
    assert np.asarray(family.in_support(state["v"])).all()


def test_inverse_of_means_of_rare_categories() -> None:
    """Units that are always the same, and one row of the default distribution."""
    counts = 1e5 * np.eye(4)[[0, 2]] + 0.25
    rare = (counts / counts.sum(1, keepdims=True)).astype(np.float32)
    inverse = jax.jit(functools.partial(Family.from_mean, Categorical(2, 4)))(rare)
    weights = np.exp(np.asarray(inverse, float))
    np.testing.assert_allclose(weights / weights.sum(1, keepdims=True), rare, rtol=1e-3)
