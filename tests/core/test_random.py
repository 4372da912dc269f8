# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random words and keys, compared with JAX row by row, and their uniformity.

Tests core/random.py.
"""

import numpy as np
import pytest

import jax
from jax.extend.random import threefry_2x32
import jax.numpy as jnp

from ebmpp.core import random

KEYS = np.random.default_rng(0).integers(0, 2**32, (5, 2), dtype=np.uint32)


def words(keys: np.ndarray, count: int) -> np.ndarray:
    return np.asarray(jax.jit(random.words, static_argnums=1)(keys, count))


@pytest.mark.parametrize("count", [2, 6, 7])
def test_words_are_those_of_jax_and_depend_on_their_row_alone(count: int) -> None:
    result = words(KEYS, count)
    counter = np.arange(count + count % 2, dtype=np.uint32)
    expected = [
        np.asarray(threefry_2x32(jnp.asarray(key), counter))[:count] for key in KEYS
    ]
    assert result.dtype == np.uint32
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(
        words(KEYS[[4, 2, 0, 1, 3]], count), result[[4, 2, 0, 1, 3]]
    )
    np.testing.assert_array_equal(words(KEYS[1], count), result[1])
    assert words(KEYS, 0).shape == (5, 0)


def test_fold_in_separates_every_counter() -> None:
    grid = np.arange(8)
    keys = np.asarray(jax.jit(random.fold_in)(KEYS[:, None, None], grid[:, None], grid))
    assert keys.shape == (5, 8, 8, 2)
    assert len({tuple(key) for key in keys.reshape(-1, 2).tolist()}) == 5 * 64
    np.testing.assert_array_equal(random.fold_in(KEYS[2], 3, 4), keys[2, 3, 4])
    np.testing.assert_array_equal(random.fold_in(KEYS[2], 3), keys[2, 3, 0])


def test_keys_on_an_accelerator_are_those_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fold = lambda: random._folded.__wrapped__(
        KEYS, np.array(7, np.uint32), np.arange(5, dtype=np.uint32)
    )
    on_cpu = np.asarray(fold())
    monkeypatch.setattr(random.backend, "accelerated", lambda: True)
    np.testing.assert_array_equal(fold(), on_cpu)


def test_key_pairs_of_typed_legacy_and_other_keys() -> None:
    typed = jax.random.key(5)
    np.testing.assert_array_equal(
        random.key_pair(typed), random.key_pair(jax.random.key_data(typed))
    )
    keys = jax.random.split(typed, (2, 3))
    pairs = np.asarray(random.key_pair(keys))
    assert pairs.shape == (2, 3, 2)
    np.testing.assert_array_equal(pairs[1, 2], random.key_pair(keys[1, 2]))
    assert random.key_pair(jax.random.key(0, impl="rbg")).shape == (2,)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("is_typed", [True, False])
def test_split_keys_are_those_of_jax(implementation: str, is_typed: bool) -> None:
    make = jax.random.key if is_typed else jax.random.PRNGKey
    with jax.default_prng_impl(implementation):
        key = make(3)
        expected = list(jax.random.split(key, 5))
        calls = [lambda key: random.split(key, 5)]
        calls.append(jax.jit(calls[0]))
        calls.append(lambda key: jax.jit(lambda: random.split(key, 5))())
        if not is_typed:
            calls.append(lambda key: random.split(np.asarray(key), 5))
        for call in calls:
            keys = call(key)
            assert [k.dtype for k in keys] == [k.dtype for k in expected]
            data = [jax.random.key_data(jnp.stack(k)) for k in (keys, expected)]
            np.testing.assert_array_equal(*data)


def test_uniforms_are_their_words_and_open_uniforms_exclude_the_ends() -> None:
    """Many values, because the square root of a square is exact only by rounding."""
    values = np.append(np.arange(0, 2**24, 7, dtype=np.uint32), np.uint32(2**24 - 1))
    uniforms = jax.jit(random.uniform)(values << 8)
    np.testing.assert_array_equal(uniforms, (values * 2.0**-24).astype(uniforms.dtype))
    low, high = np.asarray(random.open_uniform(np.array([0, 2**32 - 1], np.uint32)))
    assert 0 < low < 1e-7 and high < 1  # 1 would become an infinite Gaussian draw
