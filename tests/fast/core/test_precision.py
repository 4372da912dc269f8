# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Products in full float32, wherever a product follows from an energy: read off the traced programs."""

from collections.abc import Callable, Iterator
from typing import Any

import networkx as nx
import numpy as np
import pytest

import jax
from jax.extend import core

import ebmpp
from ebmpp import Bernoulli, Categorical, Gaussian, Spin
from ebmpp.core import random
from ebmpp.estimators.base import Batch
from ebmpp.evaluate import mean_field_bound, pseudo_log_likelihood

PRODUCTS = ("dot_general", "conv_general_dilated")
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def steps(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All of a program, and of what it calls."""
    for step in jaxpr.eqns:
        yield step
        for inner in jax.tree.leaves(list(step.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from steps(inner)


def precisions(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Of the products of floats in a program."""
    found = [s for s in steps(jax.make_jaxpr(fn)(*args).jaxpr) if s.primitive.name in PRODUCTS]
    assert found, "no product in the program"
    return [s.params["precision"] for s in found]


GRAPHS = {
    "machine": ebmpp.layered(v=Bernoulli(6), h=Bernoulli(4)),
    "deep": ebmpp.layered(v=Gaussian(6, variance="learned"), h1=Bernoulli(4), h2=Categorical(3, 3)),
    "lattice": ebmpp.FactorGraph.from_networkx(nx.grid_2d_graph(4, 4), family=Spin),
    "joined": ebmpp.FactorGraph.from_networkx(nx.complete_graph(6), family=Spin),
    "convolution": ebmpp.FactorGraph(
        visible={"v": Bernoulli((6, 6))},
        latent={"h": Bernoulli((2, 4, 4))},
        factors=[ebmpp.Bias("v"), ebmpp.Convolution("v", "h", window=(3, 3))],
    ),
}
ESTIMATORS = {
    "cd": ebmpp.CD(),
    "pcd": ebmpp.PCD(num_chains=8),
    "ucd": ebmpp.UCD(),
    "summed": ebmpp.UCD(marginalize="layers"),
    "mixture": ebmpp.UCD(coupling="mixture", pool_size=4),
    "weighted": ebmpp.WeightedPCD(num_chains=20, num_watchers=20),
    "particles": ebmpp.ParticleUCD(num_particles=10, max_rungs=8),
    "centered": ebmpp.estimators.Centered(ebmpp.CD()),
}


def rows(graph: ebmpp.FactorGraph) -> dict[str, Any]:
    return {b: np.zeros((8, *f.shape), f.dtype) for b, f in graph.families.items()}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_sweep(name: str) -> None:
    graph = GRAPHS[name]
    kernel, params = ebmpp.BlockedGibbs(graph), graph.init(jax.random.key(0))
    state = kernel.init(jax.random.key(1), 0, None, model_args=(params,), model_kwargs={})
    made = precisions(lambda state, params: kernel.sample(state, (params,), {}), state, params)
    assert set(made) == {HIGHEST}


CASES = [("machine", name) for name in ESTIMATORS] + [
    ("deep", name) for name in ("ucd", "summed", "particles")
]


@pytest.mark.parametrize(("name", "estimator"), CASES)
def test_a_gradient(name: str, estimator: str) -> None:
    graph, key = GRAPHS[name], random.key_pair(jax.random.key(0))
    made, params = ESTIMATORS[estimator], graph.init(jax.random.key(0))
    data = {b: v for b, v in rows(graph).items() if b in graph.visible}
    state = made.init(graph, params, data, 8, key)
    step = lambda params, state, batch, key: made.estimate(graph, params, state, batch, key)
    assert set(precisions(step, params, state, Batch.of(data), key)) == {HIGHEST}


def evaluations() -> dict[str, Callable[..., Any]]:
    graph = GRAPHS["machine"]
    v = rows(graph)["v"]
    return {
        "log Z": lambda p: ebmpp.exact.log_partition(graph, p),
        "free energy": lambda p: graph.free_energy(p, {"v": v}),
        "energy": lambda p: graph.energy(p, rows(graph)),
        "conditional": lambda p: graph.conditional(p, rows(graph), "h").mean,
        "pseudo": lambda p: pseudo_log_likelihood(graph, p, v),
        "bound": lambda p: mean_field_bound(graph, p, v),
    }


@pytest.mark.parametrize("name", evaluations())
def test_an_evaluation(name: str) -> None:
    params = GRAPHS["machine"].init(jax.random.key(0))
    assert set(precisions(evaluations()[name], params)) == {HIGHEST}
    assert set(precisions(jax.grad(lambda p: evaluations()[name](p).sum()), params)) == {HIGHEST}


def test_whoever_asks_for_less_gets_less() -> None:
    graph = GRAPHS["machine"]
    params = graph.init(jax.random.key(0))
    with jax.default_matmul_precision("tensorfloat32"):
        made = precisions(lambda p: graph.free_energy(p, rows(graph)["v"]), params)
    assert HIGHEST not in made
