# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A dozen fixed small graphs, shared by all tests so that they share compiled programs.

Every graph has an exact answer: :func:`moments` enumerates it in float64 on the host,
without the package's own sums. Graphs and params are made on first use, because a
declaration compiles. Use ``KEY``, ``NUM_PAIRS`` and ``BATCH`` unless the test is about
another size: each new shape is another program.
"""

from functools import cache
from typing import Any

import networkx as nx
import numpy as np
from oracle import Oracle, numpy_statistics

import jax

from ebmpp import (
    Bernoulli,
    Binomial,
    Categorical,
    FactorGraph,
    Gaussian,
    Poisson,
    Spin,
    layered,
)
import helpers

KEY = jax.random.key(0)
#: pairs of an unbiased estimate, and chains of a kernel whose distribution is tested
NUM_PAIRS = 1000
#: rows of a training step
BATCH = 8

_GRAPHS = {
    "rbm": lambda: layered(v=Bernoulli(4), h=Bernoulli(3)),
    "deep": lambda: layered(v=Bernoulli(3), h1=Bernoulli(3), h2=Bernoulli(2)),
    "gated": helpers.gated,
    "lattice": lambda: FactorGraph.from_networkx(nx.grid_2d_graph(3, 3), Spin),
    "spin": lambda: layered(v=Spin(3), h=Spin(2)),
    "categorical": lambda: layered(v=Categorical(2, 3), h=Bernoulli(2)),
    "binomial": lambda: layered(v=Binomial(2, 3), h=Bernoulli(2)),
    "poisson": lambda: layered(v=Poisson(2), h=Bernoulli(2)),
    "gaussian": lambda: layered(v=Gaussian(3), h=Bernoulli(2)),
    "learned": lambda: layered(v=Gaussian(2, "learned"), h=Bernoulli(2)),
    "mixed": lambda: layered(v=Spin(2), h1=Categorical(2, 3), h2=Gaussian(2)),
}
NAMES = tuple(_GRAPHS)


@cache
def graph(name: str) -> FactorGraph:
    """The graph called ``name``, the same object at each call."""
    return _GRAPHS[name]()


@cache
def params(name: str) -> dict[str, Any]:
    """Params that couple its units clearly and stay inside every family's domain."""
    return helpers.random_params(graph(name), seed=1)


@cache
def oracle(name: str) -> Oracle:
    """Its exact distribution, by enumeration and integration in float64."""
    return Oracle(graph(name), params(name), {})


def rows(name: str, num_rows: int = BATCH, seed: int = 0) -> dict[str, np.ndarray]:
    """Training rows of the visible blocks, drawn from the model."""
    drawn = oracle(name).draw(np.random.default_rng(seed), num_rows)
    return {block: drawn[block] for block in graph(name).visible}


@cache
def moments(name: str) -> dict[str, np.ndarray]:
    """Its exact mean statistics, one array of shape ``(*shape, *stat_shape)`` per block."""
    exact, means = oracle(name), {}
    weights = np.exp(exact.log_weights - exact.log_z)
    covariance = np.linalg.inv(exact.precision) if exact.normal else None
    for block, family in graph(name).families.items():
        if block not in exact.reals:
            means[block] = np.tensordot(
                weights, numpy_statistics(family, exact.x[block]), 1
            )
            continue
        units = [i for i, (b, _) in enumerate(exact.normal) if b == block]
        mean = exact.mean[:, units]
        square = mean**2 + covariance[:, units, units]
        both = np.stack([weights @ mean, weights @ square], -1)
        means[block] = both.reshape(*family.shape, 2)[..., : 2 if family.learned else 1]
        means[block] = means[block] if family.learned else means[block][..., 0]
    return means
