# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Energies that are not multi-affine are refused, even where they look affine between two states."""

from collections.abc import Callable

import numpy as np
import pytest

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Binomial, Categorical, Factor, FactorGraph, Family, Gaussian, Poisson, Spin
from ebmpp.errors import NotMultiAffineError
from ebmpp.graph.factors.polynomial import is_polynomial
from helpers import often

TWO_BLOCKS: dict[str, tuple[Family, Callable[..., Array]]] = {
    "equal bits": (Bernoulli(1), lambda w, a, b: -w * (a == b).sum()),
    "equal signs": (Spin(1), lambda w, a, b: -w * (a * b > 0).sum()),
    "choice": (Spin(3), lambda w, a, b: jnp.where(a == b, -w, w).sum()),
    "equal categories": (Categorical(1, 3), lambda w, a, b: -w * jnp.all(a == b, -1).sum()),
    "gated by a comparison": (Bernoulli(2), lambda w, a, b: -w * (a * (b > 0)).sum()),
    "minimum": (Bernoulli(2), lambda w, a, b: -w * jnp.minimum(a, b).sum()),
}
ONE_BLOCK: dict[str, tuple[Family, Callable[..., Array]]] = {
    "relu of bits": (Bernoulli(2), lambda w, v: w * jax.nn.relu(v).sum()),
    "absolute value": (Spin(2), lambda w, v: w * jnp.abs(v).sum()),
    "distant kink": (Gaussian(3), lambda w, v: w * jax.nn.relu(v - 4).sum()),
    "largest count": (Binomial(2, 9), lambda w, v: w * (v == 9).sum()),
    "large counts": (Poisson(1), lambda w, v: w * jnp.where(v > 50.5, v, 0.5 * v).sum()),
    "one count": (Poisson(2), lambda w, v: w * (v[0] == 57)),
    "far reals": (Gaussian(1), lambda w, v: w * jnp.maximum(v - 20.5, 0).sum()),
    "far squares": (Gaussian(2, variance="learned"), lambda w, v: w * jax.nn.relu(-v[1, 0] - 2000)),
    "far roots": (ebmpp.Exponential(2), lambda w, v: w * jnp.sqrt((v[0] - v[1] - 300) ** 2)),
    "many values": (Binomial(1, 1000), lambda w, v: w * jnp.clip(v, 0, 990).sum()),
    "inner function": (Poisson(1), jax.jit(lambda w, v: w * jax.nn.relu(v - 80).sum())),
}


@pytest.mark.parametrize("name", often(TWO_BLOCKS, "equal bits", "choice", "equal categories"))
def test_kinks_between_two_blocks_are_refused(name: str) -> None:
    family, energy = TWO_BLOCKS[name]
    factor = Factor("a", "b", energy=energy, init=np.float32(1.3))
    with pytest.raises(NotMultiAffineError, match="block '[ab]'"):
        FactorGraph({"a": family, "b": family}, factors=[factor])


@pytest.mark.parametrize("name", ONE_BLOCK)
def test_kinks_in_one_block_are_refused(name: str) -> None:
    family, energy = ONE_BLOCK[name]
    with pytest.raises(NotMultiAffineError, match="block 'v'"):
        FactorGraph({"v": family}, factors=[Factor("v", energy=energy, init=np.float32(1.3))])


@pytest.mark.parametrize(("slope", "value"), [(-1000, 0), (0, 5000)])
def test_small_interactions_beside_large_terms_are_refused(slope: float, value: float) -> None:
    energy = lambda w, v: value + slope * v[2] + 0.3 * v[0] * v[1]
    with pytest.raises(NotMultiAffineError, match="block 'v'"):
        FactorGraph({"v": Bernoulli(3)}, factors=[Factor("v", energy=energy)])


def test_declared_pairs_are_probed_at_states() -> None:
    """The product of a declared pair is accepted, a comparison of the pair is not."""
    factor = lambda energy: Factor("x", energy=energy, init=1.3, lateral={"x": np.array([[0, 1]])})
    declare = lambda energy: FactorGraph({"x": Bernoulli(3)}, factors=[factor(energy)])
    declare(lambda w, x: -w * (x[0] * x[1] + jnp.round(0 * x[2])))
    with pytest.raises(NotMultiAffineError, match="block 'x'"):
        declare(lambda w, x: -w * ((x[0] == x[1]) + x[2]))


def test_rounding_of_large_sums_is_tolerated() -> None:
    energy = lambda w, v, h: -jnp.sort(jnp.stack([v @ jnp.exp(jnp.tanh(w)) @ h, jnp.float32(1e9)]))[0]
    factor = Factor("v", "h", energy=energy, init=np.zeros((784, 500), np.float32))
    FactorGraph({"v": Bernoulli(784)}, {"h": Spin(500)}, [factor])


def test_polynomials_are_recognised() -> None:
    """No energy of arithmetic is tried far out, which takes tenths of a second."""
    index, image = np.array([1, 0]), np.ones((2, 1, 3, 3), np.float32)
    kernel = jnp.ones((2, 1, 2, 2))
    polynomials = [
        lambda x: jnp.einsum("i,ij,j->", x, jnp.tanh(jnp.eye(3)), x) - x[0] * x[1],
        lambda x: (x[index] * jnp.where(index > 0, x[:2], 2.0)).sum() / 3 + jax.jit(jnp.dot)(x, x),
        lambda x: jax.lax.conv(x[:2, None, None, None] * image, kernel, (1, 1), "VALID").sum(),
        lambda x: jnp.zeros(3).at[index].add(x[:2]).sum() + jax.checkpoint(jnp.sum)(x**2 - x),
        lambda x: jax.lax.scan(lambda c, a: (c + a * c, None), x[0], x)[0],
    ]
    others = [jnp.max, lambda x: x[0] / x[1], lambda x: jnp.exp(x).sum(), lambda x: (x > 0).sum() * x[0]]
    for functions, expected in ((polynomials, True), (others, False)):
        for function in functions:
            assert is_polynomial(jax.make_jaxpr(function)(jnp.ones(3)).jaxpr, [True]) is expected
