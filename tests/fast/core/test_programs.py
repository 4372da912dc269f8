# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: called from the host and inside a caller's program, one per set of static arguments."""

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core import programs


def test_a_program_is_compiled_once() -> None:
    traces = []
    program = programs.Program(lambda x: traces.append(x) or x + 1)
    np.testing.assert_array_equal([program(np.float32([0, 1])) for _ in range(3)], [[1, 2]] * 3)
    assert len(traces) == program._cache_size() == 1
    program.clear_cache()
    assert program._cache_size() == 0


def test_a_program_is_traced_and_differentiated_inside_another() -> None:
    program = programs.Program(lambda x: jnp.sin(x) ** 2)
    x = np.linspace(0, 1, 7, dtype=np.float32)
    expected = np.sin(x) ** 2
    np.testing.assert_allclose(jax.jit(lambda y: program(y))(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda y: y + program(x))(0 * x), expected, rtol=1e-6)  # a constant
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(program)))(x), np.sin(2 * x), rtol=1e-6)


def test_static_arguments_select_a_program_and_the_oldest_is_dropped() -> None:
    traces: list[tuple[int, str]] = []

    def fn(x: jax.Array, power: int, y: jax.Array, name: str) -> jax.Array:
        traces.append((power, name))
        return x**power - y

    cached = programs.compiled(statics=(1, 3), kept=2)(fn)
    for x in (2.0, 3.0):
        assert float(cached(x, 3, 1.0, "a")) == x**3 - 1
    assert traces == [(3, "a")] and len(cached) == 1
    cached(2.0, 2, 1.0, "b")
    cached(2.0, 2, 1.0, "c")
    assert len(cached) == 2
    cached(2.0, 3, 1.0, "a")
    assert traces == [(3, "a"), (2, "b"), (2, "c"), (3, "a")]
