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
from ebmpp.dependence.rules import is_polynomial, linear_sums


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


def test_linear_sums_are_found() -> None:
    """The last products before the first function that is not affine, and nothing else."""
    matrix = np.ones((3, 5), np.float32)
    kernel = jnp.ones((2, 1, 2))

    def convolved(x):
        return jax.lax.conv(x[None, None], kernel, (1,), "VALID")

    cases = [
        (lambda x: jnp.tanh(x @ matrix + 1).sum(), [(5,)]),
        (lambda x: jnp.tanh((x @ matrix) @ matrix.T).sum(), [(3,)]),
        (lambda x: jnp.tanh(2 * x.sum()) + jnp.exp(x[::-1] @ matrix).sum(), [(), (5,)]),
        (lambda x: jnp.abs(convolved(x)).sum(), [(1, 2, 2)]),
        (lambda x: (x * (x @ np.eye(3, dtype=np.float32))).sum(), [(3,)]),
        (lambda x: x @ np.ones(3, np.float32), [()]),
        (lambda x: (jnp.tanh(x) @ matrix).sum(), []),
        # products of few digits are not carried
        (lambda x: jnp.tanh(jnp.bfloat16(x) @ jnp.bfloat16(matrix)).sum(), []),
    ]
    for function, expected in cases:
        trace = lambda sites, *_, function=function: function(sites["x"])
        program = Program(trace, {"x": jnp.ones(3)}, {}, [])
        slots = linear_sums(program)
        assert [program.shapes[slot] for slot in slots] == expected
