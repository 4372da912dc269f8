# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Models with exact log Z for tests of annealing, and a number of particles that all tests share."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache

import numpy as np
from oracle import Oracle
import zoo

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

_GRAPHS: dict[str, Callable[[], FactorGraph]] = {
    "rbm": lambda: layered(v=Bernoulli(7), h=Bernoulli(5)),
    "dbm": lambda: layered(v=Bernoulli(5), h1=Spin(3), h2=Bernoulli(4)),
    "categorical": lambda: layered(v=Categorical(4, num_categories=3), h=Categorical(3, num_categories=3)),
    "gaussian": lambda: layered(v=Gaussian(5), h=Bernoulli(4)),
    "learned variance": lambda: layered(v=Gaussian(5, variance="learned"), h=Spin(4)),
    "harmonium": lambda: layered(v=Poisson(4), h=Bernoulli(3)),
    # no bias on the exponential's neighbour: its reference is the family's default
    "exponential": lambda: pair(Exponential(3), Bernoulli(4)),
    "three layers": lambda: FactorGraph(
        {"a": Spin(3)},
        {"b": Bernoulli(2), "c": Categorical(2, num_categories=3)},
        [*map(Bias, "abc"), Bilinear("a", "b"), Bilinear("b", "c"), Bilinear("a", "c")],
    ),
}


class _Graphs(Mapping[str, FactorGraph]):
    """Graphs by name, declared on first use."""

    def __getitem__(self, name: str) -> FactorGraph:
        return _graph(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_GRAPHS)

    def __len__(self) -> int:
        return len(_GRAPHS)


@cache
def _graph(name: str) -> FactorGraph:
    return _GRAPHS[name]()


GRAPHS = _Graphs()
SCALE = {"gaussian": 0.7, "learned variance": 0.3, "harmonium": 0.5, "exponential": 0.2}
KEY = zoo.KEY
PAIR = np.zeros(2, np.uint32)
NUM = 2000


def model(name: str, seed: int) -> tuple[FactorGraph, dict, float]:
    """A model and its exact log Z, by the package's own sum."""
    graph = GRAPHS[name]
    params = random_params(graph, seed, SCALE.get(name, 1.0))
    return graph, params, float(exact.log_partition(graph, params))


def zoo_model(name: str, seed: int = 1, scale: float = 1.0) -> tuple[FactorGraph, dict, float]:
    """A graph of the zoo with stronger params, and its log Z by enumeration in NumPy."""
    graph = zoo.graph(name)
    params = random_params(graph, seed, {"poisson": 0.5, "learned": 0.3}.get(name, scale))
    return graph, params, Oracle(graph, params, {}).log_z


def uniform(graph: FactorGraph) -> dict:
    """A reference that is far from most models."""
    return {b: f.default_eta() for b, f in graph.families.items()}
