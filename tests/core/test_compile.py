# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The bounded cache of compiled functions: called from the host and inside a caller's program.

Tests core/compile.py.
"""

import warnings

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core.compile import compiled


def test_a_function_is_compiled_once() -> None:
    traces = []
    fn = compiled(lambda x: traces.append(x) or x + 1)
    np.testing.assert_array_equal(
        [fn(np.float32([0, 1])) for _ in range(3)], [[1, 2]] * 3
    )
    assert len(traces) == fn._cache_size() == 1


def test_a_compiled_function_is_traced_and_differentiated_inside_another() -> None:
    fn = compiled(lambda x: jnp.sin(x) ** 2)
    x = np.linspace(0, 1, 7, dtype=np.float32)
    expected = np.sin(x) ** 2
    np.testing.assert_allclose(jax.jit(lambda y: fn(y))(x), expected, rtol=1e-6)
    # a constant
    np.testing.assert_allclose(jax.jit(lambda y: y + fn(x))(0 * x), expected, rtol=1e-6)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(jax.grad(fn)))(x), np.sin(2 * x), rtol=1e-6
    )


def test_static_arguments_select_a_program_and_the_oldest_is_dropped() -> None:
    traces: list[tuple[int, str]] = []

    def fn(x: jax.Array, power: int, y: jax.Array, name: str) -> jax.Array:
        traces.append((power, name))
        return x**power - y

    cached = compiled(fn, statics=(1, 3), size=2)
    for x in (2.0, 3.0):
        assert float(cached(x, 3, 1.0, "a")) == x**3 - 1
    assert traces == [(3, "a")] and len(cached) == 1
    cached(2.0, 2, 1.0, "b")
    cached(2.0, 2, 1.0, "c")
    assert len(cached) == 2
    cached(2.0, 3, 1.0, "a")
    assert traces == [(3, "a"), (2, "b"), (2, "c"), (3, "a")]


def test_a_function_defined_in_a_loop_is_reported_once() -> None:
    apply = compiled(lambda fn, x: fn(x), statics=1)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(5):
            apply(lambda x: x + 1, 1.0)
    assert [str(w.message).split(",")[0].split()[0] for w in caught] == ["<lambda>"]
    assert "compiled three times" in str(caught[0].message)


def test_one_function_with_several_shapes_is_not_reported() -> None:
    apply = compiled(lambda fn, size, x: fn(x) + size, statics=2)
    fn = lambda x: x + 1
    for size in range(5):
        apply(fn, size, 1.0)
