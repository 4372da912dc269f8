# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for arrays whose leading axis counts rows.

Tests core/rows.py, core/types.py.
"""

import numpy as np
import pytest

import jax.numpy as jnp

from ebmpp.core.rows import expand, num_rows


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
