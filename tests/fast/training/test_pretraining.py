# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import numpy as np
import pytest

import jax
import jax.numpy as jnp
import optax

from ebmpp import (
    CD,
    Bernoulli,
    Bias,
    Bilinear,
    Factor,
    FactorGraph,
    Gaussian,
    Poisson,
    data,
    exact,
    fit,
    layered,
)
from ebmpp.errors import DeclarationError, StateError
from ebmpp.graph import energy
from ebmpp.training import pretrain
from ebmpp.training.pretraining import _levels, _Pair
from helpers import random_params, three_way_energy

KEY = jax.random.key(0)
DEEP = layered(v=Bernoulli(4), h1=Bernoulli(3), h2=Bernoulli(2), h3=Bernoulli(2))
ROWS = np.array([[1, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]], np.float32)


def quick(graph: FactorGraph, rows: Any = ROWS, **given: Any) -> dict[str, Any]:
    settings = {"rng_key": KEY, "num_steps": 2, "progress_bar": False, **given}
    return pretrain(graph, rows, **settings)


# -- the models of two levels ----------------------------------------------------------------------


def natural(model: _Pair, params: dict, blocks: tuple[str, ...], **statistics: np.ndarray) -> dict:
    return energy.natural(model.graph, params, {b: jnp.asarray(t) for b, t in statistics.items()}, blocks)


def test_input_from_a_side_that_is_missing_is_doubled() -> None:
    params, levels = random_params(DEEP), _levels(DEEP)
    w = {name: np.asarray(value) for name, value in params.items()}
    v, h1, h2, h3 = ROWS[0], np.array([1.0, 0, 1]), np.array([0.0, 1]), np.array([1.0, 1])

    first = _Pair.of(DEEP, levels, 0)  # two copies of v, tied
    given = {f.name: params[f.name] for f in first.graph.factors}
    assert first.graph.visible == {"v": Bernoulli((2, 4))} and first.graph.latent == {"h1": Bernoulli(3)}
    up = natural(first, given, ("h1",), v=np.stack([v, v]))["h1"]
    np.testing.assert_allclose(up, 2 * v @ w["v:h1"] + w["h1"], rtol=1e-5)
    down = natural(first, given, ("v",), h1=h1)["v"]
    np.testing.assert_allclose(down, np.tile(w["v:h1"] @ h1 + w["v"], (2, 1)), rtol=1e-5)

    between = _Pair.of(DEEP, levels, 1)
    given = {f.name: params[f.name] for f in between.graph.factors}
    up = natural(between, given, ("h2",), h1=h1)["h2"]
    np.testing.assert_allclose(up, 2 * h1 @ w["h1:h2"] + w["h2"], rtol=1e-5)
    down = natural(between, given, ("h1",), h2=h2)["h1"]
    np.testing.assert_allclose(down, 2 * w["h1:h2"] @ h2 + w["h1"], rtol=1e-5)

    last = _Pair.of(DEEP, levels, 2)  # two copies of h3
    given = {f.name: params[f.name] for f in last.graph.factors}
    up = natural(last, given, ("h3",), h2=h2)["h3"]
    np.testing.assert_allclose(up, np.tile(h2 @ w["h2:h3"] + w["h3"], (2, 1)), rtol=1e-5)
    down = natural(last, given, ("h2",), h3=np.stack([h3, h3]))["h2"]
    np.testing.assert_allclose(down, 2 * w["h2:h3"] @ h3 + w["h2"], rtol=1e-5)


def test_equal_models_share_their_programs() -> None:
    first, again = (_Pair.of(DEEP, _levels(DEEP), i).graph for i in (0, 0))
    assert first == again and hash(first) == hash(again)
    assert first != _Pair.of(DEEP, _levels(DEEP), 1).graph


@pytest.mark.slow
def test_inner_biases_are_means_of_both_models() -> None:
    graph = layered(v=Bernoulli(4), h1=Bernoulli(3), h2=Bernoulli(2))
    levels, start = _levels(graph), graph.init(jax.random.split(KEY, 7)[0], ROWS)
    made = quick(graph)
    # the first model again, by hand
    model = _Pair.of(graph, levels, 0)
    again = fit(
        model.graph,
        model.rows({"v": jnp.asarray(ROWS)}),
        params={f.name: start[f.name] for f in model.graph.factors},
        rng_key=jax.random.split(KEY, 7)[1],
        estimator=CD(),
        optimizer=optax.sgd(0.05),
        num_steps=2,
        progress_bar=False,
    )
    np.testing.assert_array_equal(made["v:h1"], again.params["v:h1"])
    np.testing.assert_array_equal(made["v"], again.params["v"])
    assert (np.asarray(made["h1"]) != again.params["h1"]).any()
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, start)


def test_two_levels_are_trained_as_they_are() -> None:
    graph = layered(v=Bernoulli(4), h=Bernoulli(3))
    assert _Pair.of(graph, _levels(graph), 0).graph == graph


MIXED = FactorGraph(
    {"x": Poisson(2), "y": Gaussian(3)},
    {"h": Bernoulli(2), "top": Bernoulli(2), "side": Bernoulli(2)},
    [
        *map(Bias, ("x", "y", "h", "top")),
        Bilinear("x", "h"),
        Bilinear("y", "h"),
        Bilinear("side", "y"),
        Bilinear("h", "top"),
    ],
)


def test_levels_may_have_several_blocks() -> None:
    assert _levels(MIXED) == [("x", "y"), ("h", "side"), ("top",)]
    assert set(_Pair.of(MIXED, _levels(MIXED), 1).graph.families) == {"h", "top"}  # nothing is above "side"


@pytest.mark.slow
def test_levels_of_several_blocks_and_other_families_are_trained() -> None:
    generator = np.random.default_rng(0)
    rows = {"x": generator.poisson(2.0, (8, 2)).astype(np.float32), "y": generator.normal(size=(8, 3))}
    made, start = quick(MIXED, rows, optimizer=optax.sgd(0.01)), MIXED.init(KEY, rows)
    MIXED.check(made)
    assert all((np.asarray(made[f.name]) != start[f.name]).any() for f in MIXED.factors)


# -- what it is for --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pretrained_deep_model_starts_far_above_its_start() -> None:
    images = data.binarize(data.digits())[:, 16:48]  # four rows of pixels in the middle
    graph = layered(v=Bernoulli(32), h1=Bernoulli(8), h2=Bernoulli(6))
    base = graph.init(KEY, images)
    made = pretrain(graph, images, rng_key=KEY, num_steps=1000, optimizer=optax.sgd(0.05), progress_bar=False)
    before, after = (float(exact.log_likelihood(graph, p, images[:300]).mean()) for p in (base, made))
    assert after > before + 1.5


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (
            FactorGraph(
                {"v": Bernoulli(4)},
                {"a": Bernoulli(2), "b": Bernoulli(2)},
                [Bilinear("v", "a"), Bilinear("v", "b"), Bilinear("a", "b", name="lateral")],
            ),
            "factor 'lateral' couples 'a' and 'b', which are both at distance 1 from",
        ),
        (
            FactorGraph(
                {"v": Bernoulli(4)},
                {"a": Bernoulli(2), "b": Bernoulli(2)},
                [Factor("v", "a", "b", energy=three_way_energy, init=np.zeros((4, 2, 2)), name="gate")],
            ),
            "factor 'gate' couples 'a' and 'b'",
        ),
        (
            FactorGraph({"v": Bernoulli(4)}, {"a": Bernoulli(2)}, [Bias("v"), Bias("a")]),
            r"no path of factors leads from a visible block to 'a'.* one of \['v'\]",
        ),
        (FactorGraph({"v": Bernoulli(4)}, factors=[Bias("v")]), "has no latent block"),
    ],
)
def test_graphs_that_are_no_chain_of_levels_are_refused(graph: FactorGraph, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        quick(graph)


def test_data_outside_the_support_are_refused() -> None:
    with pytest.raises(StateError, match="block 'v' .*got 2.0"):
        quick(DEEP, 2 * ROWS)
