# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Greedy layer-wise pretraining.

Tests contrib/pretraining.py.
"""

from typing import Any

import numpy as np
import pytest
from training_tools import Recorder
import zoo

import jax
import optax

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Factor,
    FactorGraph,
    Gaussian,
    Poisson,
    layered,
)
from ebmpp.contrib import pretrain
from ebmpp.contrib.pretraining import _levels, _Pair
from ebmpp.errors import DeclarationError
from ebmpp.estimators.base import Estimate
from ebmpp.graph import energy
from helpers import random_params, three_way_energy

ROWS = np.array([[1, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]], np.float32)


def run(graph: FactorGraph, rows: Any = ROWS, **options: Any) -> dict[str, Any]:
    return pretrain(
        graph, rows, rng_key=zoo.KEY, progress_bar=False, **{"num_steps": 1, **options}
    )


def natural(
    model: _Pair, params: dict, block: str, **statistics: np.ndarray
) -> np.ndarray:
    index = {factor.name: params[factor.name] for factor in model.graph.factors}
    return energy.natural(model.graph, index, statistics, (block,))[block]


@pytest.mark.nightly
def test_input_is_doubled_where_one_side_is_missing() -> None:
    deep = layered(v=Bernoulli(4), h1=Bernoulli(3), h2=Bernoulli(2), h3=Bernoulli(2))
    params = {name: np.asarray(value) for name, value in random_params(deep).items()}
    v, h1, h2, h3 = (
        ROWS[0],
        np.float32([1, 0, 1]),
        np.float32([0, 1]),
        np.float32([1, 1]),
    )
    first, middle, last = (_Pair.make(deep, _levels(deep), i) for i in range(3))
    assert first.graph.visible == {"v": Bernoulli((2, 4))} and first.graph.latent == {
        "h1": Bernoulli(3)
    }
    two, close = (
        lambda a: np.stack([a, a]),
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
    )
    close(natural(first, params, "h1", v=two(v)), 2 * v @ params["v:h1"] + params["h1"])
    close(natural(first, params, "v", h1=h1), two(params["v:h1"] @ h1 + params["v"]))
    close(natural(middle, params, "h2", h1=h1), 2 * h1 @ params["h1:h2"] + params["h2"])
    close(natural(middle, params, "h1", h2=h2), 2 * params["h1:h2"] @ h2 + params["h1"])
    close(natural(last, params, "h3", h2=h2), two(h2 @ params["h2:h3"] + params["h3"]))
    close(
        natural(last, params, "h2", h3=two(h3)), 2 * params["h2:h3"] @ h3 + params["h2"]
    )


class Push(Recorder):
    """Its gradient is minus the number of visible units, which distinguishes the models."""

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Any, key: Any
    ) -> Estimate:
        size = sum(family.size for family in graph.visible.values())
        return Estimate(jax.tree.map(lambda p: 0 * p - size, params), state, {})


@pytest.mark.nightly
def test_inner_biases_are_means_of_both_models() -> None:
    # the first model has two copies of the 3 units of v, the second the 3 of h1
    graph = zoo.graph("deep")
    start = graph.init(jax.random.split(zoo.KEY, 7)[0], ROWS[:, :3])
    params = run(graph, ROWS[:, :3], estimator=Push(), optimizer=optax.sgd(1.0))
    for name, change in {"v": 6, "h1": 4.5, "h2": 3, "v:h1": 6, "h1:h2": 3}.items():
        np.testing.assert_allclose(
            params[name] - start[name], change, rtol=1e-5, err_msg=name
        )


def several_blocks() -> FactorGraph:
    factors = [
        *map(Bias, ("x", "y", "h", "top")),
        Bilinear("x", "h"),
        Bilinear("y", "h"),
    ]
    factors += [Bilinear("side", "y"), Bilinear("h", "top")]
    latent = {"h": Bernoulli(2), "top": Bernoulli(2), "side": Bernoulli(2)}
    return FactorGraph({"x": Poisson(2), "y": Gaussian(3)}, latent, factors)


def test_levels_may_have_several_blocks() -> None:
    rbm, graph = zoo.graph("rbm"), several_blocks()
    assert _Pair.make(rbm, _levels(rbm), 0).graph == rbm
    assert _levels(graph) == [("x", "y"), ("h", "side"), ("top",)]
    # nothing is above "side"
    assert set(_Pair.make(graph, _levels(graph), 1).graph.families) == {
        "h",
        "top",
    }


GATE = Factor(
    "v", "a", "b", energy=three_way_energy, init=np.zeros((4, 2, 2)), name="gate"
)
LATERAL = [Bilinear("v", "a"), Bilinear("v", "b"), Bilinear("a", "b", name="lateral")]


@pytest.mark.parametrize(
    ("latent", "factors", "match"),
    [
        ("ab", LATERAL, "'lateral' couples 'a' and 'b'"),
        ("ab", [GATE], "'gate' couples 'a' and 'b'"),
        ("a", [Bias("v"), Bias("a")], "'a'"),
        ("", [Bias("v")], "latent"),
    ],
)
def test_graphs_without_a_chain_of_levels_are_refused(
    latent: str, factors: list, match: str
) -> None:
    graph = FactorGraph({"v": Bernoulli(4)}, {b: Bernoulli(2) for b in latent}, factors)
    with pytest.raises(DeclarationError, match=match):
        run(graph)


@pytest.mark.nightly
def test_levels_of_several_blocks_and_families_are_trained() -> None:
    graph, generator = several_blocks(), np.random.default_rng(0)
    rows = {
        "x": generator.poisson(2.0, (8, 2)).astype(np.float32),
        "y": generator.normal(size=(8, 3)),
    }
    options = {"optimizer": optax.sgd(0.01), "num_steps": 2, "progress_bar": False}
    params, start = (
        pretrain(graph, rows, rng_key=zoo.KEY, **options),
        graph.init(zoo.KEY, rows),
    )
    graph.check(params)
    assert all((np.asarray(params[name]) != start[name]).any() for name in start)


@pytest.mark.nightly
def test_a_pretrained_deep_model_starts_above_its_initial_likelihood() -> None:
    # four rows of pixels in the middle
    images = ebmpp.data.binarize(ebmpp.data.digits())[:, 16:48]
    graph = ebmpp.layered(v=Bernoulli(32), h1=Bernoulli(8), h2=Bernoulli(6))
    options = {
        "rng_key": zoo.KEY,
        "num_steps": 1000,
        "optimizer": optax.sgd(0.05),
        "progress_bar": False,
    }
    likelihood = lambda params: float(
        ebmpp.exact.log_likelihood(graph, params, images[:300]).mean()
    )
    assert (
        likelihood(pretrain(graph, images, **options))
        > likelihood(graph.init(zoo.KEY, images)) + 1.5
    )
