# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Linear maps and convolutions between blocks, against the equal Bilinear factor and scipy.

Tests graph/factors/convolution.py, graph/factors/linear.py.
"""

from functools import cache
import pickle
from typing import Any

import numpy as np
import pytest
from scipy.signal import correlate
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Convolution,
    FactorGraph,
    Gaussian,
    Spin,
)
from ebmpp.graph import Linear
from helpers import random_params, random_state


def windows(w: jax.Array, v: jax.Array) -> jax.Array:
    """At module level, so that graphs with it compare equal and pickle."""
    return jnp.convolve(v, w, mode="valid")


@cache
def machine() -> FactorGraph:
    """Nine pixels under two filters of 2x2, with one bias per filter."""
    factors = [
        Bias("v"),
        Bias("h", shared=(1, 2)),
        Convolution("v", "h", window=(2, 2)),
    ]
    return FactorGraph({"v": Bernoulli((3, 3))}, {"h": Bernoulli((2, 2, 2))}, factors)


def test_convolution_equals_a_bilinear_factor_with_shared_weights() -> None:
    """Energies, free energies, natural parameters, and gradients summed over equal weights."""
    graph = machine()
    params = random_params(graph, seed=5, scale=0.8)
    factors = [Bias("v"), Bias("h"), Bilinear("v", "h")]
    dense = FactorGraph({"v": Bernoulli((3, 3))}, {"h": Bernoulli((2, 2, 2))}, factors)
    weight = np.zeros((3, 3, 2, 2, 2), np.float32)
    for k, i, j, a, b in np.ndindex(2, 2, 2, 2, 2):
        weight[i + a, j + b, k, i, j] += np.asarray(params["v:h"])[k, 0, a, b]
    bias = np.broadcast_to(np.asarray(params["h"]), (2, 2, 2))
    unrolled = {"v": params["v"], "h": bias, "v:h": weight}
    x = {
        b: random_state(f, seed=i, rows=(5,))
        for i, (b, f) in enumerate(graph.families.items())
    }

    @jax.jit
    def derive(params: dict, unrolled: dict, x: dict) -> list:
        free = lambda g: jax.value_and_grad(
            lambda p: g.free_energy(p, {"v": x["v"]}).sum()
        )
        eta = lambda g, p: [g.natural_parameters(p, x, b) for b in "vh"]
        both = (graph, params), (dense, unrolled)
        return [(g.energy(p, x), free(g)(p), eta(g, p)) for g, p in both]

    (energy, (free, gradient), eta), (energy_2, (free_2, gradient_2), eta_2) = derive(
        params, unrolled, x
    )
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, (energy, free, eta), (energy_2, free_2, eta_2))
    summed = np.zeros((2, 1, 2, 2))
    for k, i, j, a, b in np.ndindex(2, 2, 2, 2, 2):
        summed[k, 0, a, b] += np.asarray(gradient_2["v:h"])[i + a, j + b, k, i, j]
    close(gradient["v:h"], summed)
    close(gradient["h"], np.asarray(gradient_2["h"]).sum((1, 2), keepdims=True))


@pytest.mark.parametrize(
    ("stride", "padding"), [(2, "SAME"), ((2, 1), ((1, 0), (0, 2)))]
)
def test_strides_and_padding_match_scipy(stride: Any, padding: Any) -> None:
    strides = (stride, stride) if isinstance(stride, int) else stride
    pairs = ((1, 1), (1, 1)) if padding == "SAME" else padding
    generator = np.random.default_rng(0)
    image, filters = (
        generator.normal(size=(2, 5, 5)),
        generator.normal(size=(4, 2, 3, 3)),
    )
    padded = np.pad(image, ((0, 0), *pairs))
    maps = np.stack([correlate(padded, f, mode="valid")[0] for f in filters])[
        :, :: strides[0], :: strides[1]
    ]
    factor = Convolution("v", "h", window=(3, 3), stride=stride, padding=padding)
    graph = FactorGraph(
        {"v": Gaussian((2, 5, 5))}, {"h": Bernoulli(maps.shape)}, [factor]
    )
    params, x = {"v:h": filters.astype(np.float32)}, {"v": image.astype(np.float32)}
    np.testing.assert_allclose(
        graph.natural_parameters(params, x, "h"), maps, rtol=1e-4, atol=1e-5
    )


def test_statistics_of_a_unit_are_channels() -> None:
    factor = Convolution("v", "h", window=(2,))
    graph = FactorGraph(
        {"v": Categorical(4, 3)}, {"h": Spin((2, 3))}, [Bias("v"), factor]
    )
    params = random_params(graph)
    v, h = np.array([0, 2, 1, 1]), np.array([[1, -1, 1], [-1, -1, 1.0]])
    w = np.asarray(params["v:h"])
    assert w.shape == (2, 3, 2)
    energy = -sum(h[k, i] * w[k, v[i + a], a] for k, i, a in np.ndindex(2, 3, 2))
    energy -= np.asarray(params["v"])[np.arange(4), v].sum()
    np.testing.assert_allclose(
        graph.energy(params, {"v": v, "h": h}), energy, rtol=1e-5
    )
    learned = {"v": Gaussian(4, "learned"), "h": Spin((2, 3))}
    # x takes part, x**2 does not
    assert factor.init_params(zoo.KEY, learned).shape == (
        2,
        1,
        2,
    )


def test_shared_bias_starts_at_the_rate_over_positions() -> None:
    graph = FactorGraph(
        {"v": Bernoulli((2, 3, 4))}, factors=[Bias("v", shared=(-1, 1))]
    )
    rows = np.random.default_rng(0).integers(2, size=(50, 2, 3, 4)).astype(np.float32)
    # each of the 12 positions of a row counts like a row
    rate = (600 * rows.mean((0, 2, 3)) + 0.5) / 601
    bias = np.asarray(graph.init(zoo.KEY, rows)["v"])
    assert bias.shape == (2, 1, 1)
    np.testing.assert_allclose(bias.ravel(), np.log(rate / (1 - rate)), rtol=1e-4)


def declared(factor: ebmpp.Factor, h: Any = None) -> FactorGraph:
    return FactorGraph({"v": Bernoulli(5)}, {"h": h or Bernoulli(3)}, [factor])


def test_equality_and_pickles() -> None:
    linear = lambda **options: Linear("v", "h", forward=windows, **options)
    assert linear(shape=(3,)) == linear(shape=[3]) != linear(shape=(4,))
    assert (
        linear(init=np.ones(3)) == linear(init=np.ones(3)) != linear(init=np.zeros(3))
    )
    assert hash(linear(init=np.ones(3))) == hash(linear(init=np.ones(3)))
    assert linear(shape=(3,)) != Linear("v", "h", forward=np.convolve, shape=(3,))
    for graph in (machine(), declared(linear(shape=(3,)))):
        assert pickle.loads(pickle.dumps(graph)) == graph
    strided = Convolution("v", "h", window=(2, 2), stride=2, padding=1)
    assert strided != Convolution("v", "h", window=(2, 2), stride=2)
    assert (
        repr(strided)
        == "Convolution('v', 'h', window=(2, 2), stride=(2, 2), padding=((1, 1), (1, 1)))"
    )
    assert Bias("h") != Bias("h", shared=(0,))
