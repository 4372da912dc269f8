# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Energies that are accepted or refused as multi-affine; tests/fast/bad_inputs refuses more of them."""

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Factor, FactorGraph, Gaussian, Spin
from ebmpp.errors import NotMultiAffineError
from ebmpp.graph.factors.probe import is_polynomial


def test_affine_energies_are_accepted() -> None:
    blocks = {"v": Bernoulli(2), "h": Bernoulli(3)}
    mixed = Factor("v", "h", energy=lambda p, v, h: v.sum() * h.sum() - 2 * v[0] + 1.0)
    assert FactorGraph(blocks, factors=[mixed]).edges == {("v", "h")}
    # x**2 is a statistic
    squared = Factor("x", "h", energy=lambda p, x, h: (x[:, 1] * h[:2]).sum())
    graph = FactorGraph(
        {"x": Gaussian(2, "learned"), "h": Bernoulli(3)}, factors=[squared]
    )
    assert graph.layers == (("x",), ("h",))


def test_declared_pairs_are_probed_at_states() -> None:
    """The product of a declared pair is accepted, a comparison of the pair is not."""
    factor = lambda energy: Factor(
        "x", energy=energy, init=1.3, lateral={"x": np.array([[0, 1]])}
    )
    declare = lambda energy: FactorGraph({"x": Bernoulli(3)}, factors=[factor(energy)])
    declare(lambda w, x: -w * (x[0] * x[1] + jnp.round(0 * x[2])))
    with pytest.raises(NotMultiAffineError, match="block 'x'"):
        declare(lambda w, x: -w * ((x[0] == x[1]) + x[2]))


def test_rounding_of_large_sums_is_tolerated() -> None:
    energy = lambda w, v, h: (
        -jnp.sort(jnp.stack([v @ jnp.exp(jnp.tanh(w)) @ h, jnp.float32(1e9)]))[0]
    )
    factor = Factor("v", "h", energy=energy, init=np.zeros((784, 500), np.float32))
    FactorGraph({"v": Bernoulli(784)}, {"h": Spin(500)}, [factor])


def test_polynomials_are_recognised() -> None:
    """No energy of arithmetic is tried far out, which takes tenths of a second."""
    index, image = np.array([1, 0]), np.ones((2, 1, 3, 3), np.float32)
    kernel = jnp.ones((2, 1, 2, 2))
    polynomials = [
        lambda x: jnp.einsum("i,ij,j->", x, jnp.tanh(jnp.eye(3)), x) - x[0] * x[1],
        lambda x: (
            (x[index] * jnp.where(index > 0, x[:2], 2.0)).sum() / 3
            + jax.jit(jnp.dot)(x, x)
        ),
        lambda x: jax.lax.conv(
            x[:2, None, None, None] * image, kernel, (1, 1), "VALID"
        ).sum(),
        lambda x: (
            jnp.zeros(3).at[index].add(x[:2]).sum() + jax.checkpoint(jnp.sum)(x**2 - x)
        ),
        lambda x: jax.lax.scan(lambda c, a: (c + a * c, None), x[0], x)[0],
    ]
    others = [
        jnp.max,
        lambda x: x[0] / x[1],
        lambda x: jnp.exp(x).sum(),
        lambda x: (x > 0).sum() * x[0],
    ]
    for functions, expected in ((polynomials, True), (others, False)):
        for function in functions:
            assert (
                is_polynomial(jax.make_jaxpr(function)(jnp.ones(3)).jaxpr, [True])
                is expected
            )
