# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Models, data far from their laws, and a compiled step: shared by the tests of UCD."""

import functools
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp import UCD, Bernoulli, FactorGraph, Gaussian, layered
from ebmpp.core import random
from ebmpp.estimators.base import Batch, Estimate
from helpers import pair, random_params

BATCHES, ROWS = 40, 400
MODELS = {
    "rbm": (pair(Bernoulli(3), Bernoulli(2)), 1.2),
    "gaussian": (pair(Gaussian(2), Bernoulli(2)), 0.8),
    "deep": (layered(a=Bernoulli(3), h1=Bernoulli(2), h2=Bernoulli(2)), 1.2),
}


def key(seed: int) -> jax.Array:
    return random.key_pair(jax.random.key(seed))


@functools.cache
def problem(name: str) -> tuple[FactorGraph, dict[str, Any], dict[str, jax.Array]]:
    """A model and data rows far from its law."""
    graph, scale = MODELS[name]
    params = random_params(graph, seed=2, scale=scale)
    rows = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 1]], np.float32)[:, : graph.families["a"].size]
    return graph, params, {"a": jnp.tile(jnp.asarray(rows), (ROWS // 4, 1))}


@functools.partial(jax.jit, static_argnums=(0, 1))
def estimate(estimator: UCD, graph: FactorGraph, params: Any, state: Any, batch: Any, pair: Any) -> Estimate:
    return estimator.estimate(graph, params, state, Batch.of(batch), pair)
