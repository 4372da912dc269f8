# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for arrays whose leading axis counts rows.

Tests core/rows.py, core/types.py.
"""

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp.core.rows import expand, in_chunks, num_rows


def test_num_rows_is_the_length_that_the_blocks_share() -> None:
    assert num_rows({"v": np.zeros((3, 2)), "h": np.zeros((3, 5, 4))}) == 3
    assert num_rows({"v": jnp.zeros((0, 2))}) == 0


@pytest.mark.parametrize("array", [np, jnp])
def test_expanded_rows_broadcast_against_their_units(array: object) -> None:
    weights, values = array.arange(3.0), array.ones((3, 2, 4))  # ty: ignore
    assert expand(weights, target=values).shape == (3, 1, 1)
    assert type(expand(weights, target=values)) is type(weights)
    np.testing.assert_array_equal(
        (expand(weights, values) * values)[:, 1, 3], [0, 1, 2]
    )


def test_an_array_with_all_axes_is_unchanged() -> None:
    values = np.ones((3, 2))
    assert expand(values, target=values).shape == (3, 2)
    assert expand(np.float64(2.0), target=values).shape == (1, 1)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_rows_in_chunks_do_not_depend_on_their_number(count: int) -> None:
    rng = np.random.default_rng(0)
    factor, x = (
        jnp.asarray(rng.normal(size=(5, 5))),
        jnp.asarray(rng.normal(size=(9, 5))),
    )

    def fn(x):
        return {"solved": jnp.linalg.solve(factor, jnp.exp(x)), "product": factor @ x}

    run = jax.jit(lambda x: in_chunks(fn, 4, x))
    first, expected = run(x[:count]), run(x)
    for name, value in first.items():
        np.testing.assert_array_equal(value, expected[name][:count])
        np.testing.assert_allclose(value, jax.vmap(fn)(x)[name][:count], rtol=1e-4)
