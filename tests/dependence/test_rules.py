# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Polynomials by the primitives that compute them.

Tests dependence/flow.py, dependence/powers.py, dependence/program.py,
dependence/propagation.py, dependence/pullback.py, dependence/rules.py,
dependence/terms.py, dependence/unit_sets.py.
"""

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.dependence.program import Program
from ebmpp.dependence.rules import is_polynomial


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
            trace = lambda sites, *_, function=function: function(sites["x"])
            program = Program(trace, {"x": jnp.ones(3)}, {}, [])
            assert is_polynomial(program) is expected
