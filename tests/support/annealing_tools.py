# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of annealed importance sampling share: models with their log Z, one number of particles."""

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Exponential,
    FactorGraph,
    Gaussian,
    Poisson,
    Spin,
    exact,
    layered,
)
from helpers import pair, random_params

RING = FactorGraph(
    {"a": Spin(3)},
    {"b": Bernoulli(2), "c": Categorical(2, num_categories=3)},
    [*map(Bias, "abc"), Bilinear("a", "b"), Bilinear("b", "c"), Bilinear("a", "c")],
)
# no bias on the exponential's neighbour: its reference is the family's default
DECAY = pair(Exponential(3), Bernoulli(4))
GRAPHS = {
    "rbm": layered(v=Bernoulli(7), h=Bernoulli(5)),
    "dbm": layered(v=Bernoulli(5), h1=Spin(3), h2=Bernoulli(4)),
    "categorical": layered(v=Categorical(4, num_categories=3), h=Categorical(3, num_categories=3)),
    "gaussian": layered(v=Gaussian(5), h=Bernoulli(4)),
    "learned variance": layered(v=Gaussian(5, variance="learned"), h=Spin(4)),
    "harmonium": layered(v=Poisson(4), h=Bernoulli(3)),
    "exponential": DECAY,
    "three layers": RING,
}
SCALE = {"gaussian": 0.7, "learned variance": 0.3, "harmonium": 0.5, "exponential": 0.2}
KEY = jax.random.key(0)
PAIR = jnp.zeros(2, jnp.uint32)
NUM = 2000  # the same everywhere, so that a graph is compiled once


def model(name: str, seed: int) -> tuple[FactorGraph, dict, float]:
    """A model and its exact log Z."""
    graph = GRAPHS[name]
    params = random_params(graph, seed, SCALE.get(name, 1.0))
    return graph, params, float(exact.log_partition(graph, params))


def uniform(graph: FactorGraph) -> dict:
    """A reference that is far from most models."""
    return {b: f.default_eta() for b, f in graph.families.items()}
