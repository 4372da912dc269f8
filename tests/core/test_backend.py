# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products that follow from an energy run in full float32; read off the traced programs.

Tests core/backend.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zoo

import jax
from jax.extend import core

import ebmpp
from ebmpp.estimators.base import Batch
from ebmpp.evaluate import mean_field_bound, pseudo_log_likelihood
from helpers import nightly

PRODUCTS = ("dot_general", "conv_general_dilated")
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations of a program and of the programs that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def precisions(fn: Callable[..., Any], *args: Any) -> set:
    """Precisions of the products in a program."""
    traced = equations(jax.make_jaxpr(fn)(*args).jaxpr)
    products = [e for e in traced if e.primitive.name in PRODUCTS]
    assert products, "the program has no product"
    return {e.params["precision"] for e in products}


def rows(graph: ebmpp.FactorGraph) -> dict[str, Any]:
    return {
        b: np.zeros((zoo.BATCH, *f.shape), f.dtype) for b, f in graph.families.items()
    }


@pytest.mark.parametrize("name", ["rbm", nightly("mixed"), nightly("lattice")])
def test_sweeps(name: str) -> None:
    graph = zoo.graph(name)
    kernel, params = ebmpp.BlockedGibbs(graph), graph.init(zoo.KEY)
    state = kernel.init(zoo.KEY, 0, None, model_args=(params,), model_kwargs={})
    sample = lambda state, params: kernel.sample(state, (params,), {})
    assert precisions(sample, state, params) == {HIGHEST}


ESTIMATORS = {
    "ucd": lambda: ebmpp.UCD(),
    "cd": lambda: ebmpp.CD(),
    "pcd": lambda: ebmpp.PCD(num_chains=8),
    "summed": lambda: ebmpp.UCD(marginalize="layers"),
    "mixture": lambda: ebmpp.UCD(method="mixture", pool_size=4),
    "weighted": lambda: ebmpp.WeightedPCD(num_chains=20, num_watchers=20),
    "particles": lambda: ebmpp.ParticleUCD(num_particles=10, max_rungs=8),
    "centered": lambda: ebmpp.Centered(ebmpp.CD()),
}


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("rbm", "ucd"),
        *(nightly("rbm", e) for e in ESTIMATORS if e != "ucd"),
        nightly("mixed", "ucd"),
    ],
)
def test_gradients(name: str, estimator: str) -> None:
    graph, key = zoo.graph(name), np.zeros(2, np.uint32)
    estimator, params = ESTIMATORS[estimator](), graph.init(zoo.KEY)
    data = {b: v for b, v in rows(graph).items() if b in graph.visible}
    state = estimator.init_state(graph, params, data, zoo.BATCH, key)
    step = lambda params, state, batch, key: estimator.estimate(
        graph, params, state, batch, key
    )
    assert precisions(step, params, state, Batch.uniform(data), key) == {HIGHEST}


EVALUATIONS = {
    "log Z": lambda graph, p, x: ebmpp.exact.log_partition(graph, p),
    "free energy": lambda graph, p, x: graph.free_energy(p, {"v": x["v"]}),
    "energy": lambda graph, p, x: graph.energy(p, x),
    "conditional": lambda graph, p, x: graph.conditional(p, x, "h").mean,
    "pseudo-likelihood": lambda graph, p, x: pseudo_log_likelihood(graph, p, x["v"]),
    "bound": lambda graph, p, x: mean_field_bound(graph, p, x["v"]),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations_and_their_gradients(name: str) -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    value = lambda p: EVALUATIONS[name](graph, p, rows(graph))
    assert precisions(value, params) == {HIGHEST}
    assert precisions(jax.grad(lambda p: value(p).sum()), params) == {HIGHEST}


def test_a_lower_precision_of_the_user_is_respected() -> None:
    graph = zoo.graph("rbm")
    with jax.default_matmul_precision("tensorfloat32"):
        assert HIGHEST not in precisions(
            lambda p: graph.free_energy(p, rows(graph)["v"]), zoo.params("rbm")
        )
