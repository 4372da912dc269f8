# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest
from scipy import stats

import jax
from jax.extend.random import threefry_2x32
import jax.numpy as jnp

from ebmpp.core import random


@pytest.fixture(scope="module")
def pairs() -> jax.Array:
    return random.key_pair(jax.random.split(jax.random.key(3), 5))


@pytest.mark.parametrize("count", [2, 6, 64])
def test_the_words_are_those_of_jax(pairs: jax.Array, count: int) -> None:
    counter = jnp.arange(count, dtype=jnp.uint32)
    expected = [threefry_2x32(pair, counter) for pair in pairs]
    np.testing.assert_array_equal(random.words(pairs, count), expected)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_an_odd_count_of_words(pairs: jax.Array, count: int) -> None:
    drawn = random.words(pairs, count)
    assert drawn.shape == (5, count)
    assert drawn.dtype == jnp.uint32
    even = random.words(pairs, count + count % 2)
    np.testing.assert_array_equal(drawn, even[:, :count])


def test_a_row_depends_on_its_own_key_alone(pairs: jax.Array) -> None:
    together = random.words(pairs, 6)
    shuffled = random.words(pairs[jnp.array([4, 2, 0])], 6)
    np.testing.assert_array_equal(shuffled, together[jnp.array([4, 2, 0])])
    np.testing.assert_array_equal(random.words(pairs[1], 6), together[1])
    mapped = jax.jit(jax.vmap(lambda p: random.words(p, 6)))(pairs)
    np.testing.assert_array_equal(mapped, together)


def test_fold_in_separates_every_counter(pairs: jax.Array) -> None:
    grid = jnp.arange(8)
    made = random.fold_in(pairs[:, None, None], grid[:, None], grid)
    assert made.shape == (5, 8, 8, 2)
    assert len({tuple(p) for p in np.asarray(made).reshape(-1, 2).tolist()}) == 5 * 64
    np.testing.assert_array_equal(random.fold_in(pairs[2], 3, 4), made[2, 3, 4])
    np.testing.assert_array_equal(random.fold_in(pairs[2], 3), made[2, 3, 0])


def test_keys_on_an_accelerator_are_those_of_a_processor(
    pairs: jax.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = lambda key: random._folded.__wrapped__(key, jnp.uint32(7), jnp.arange(5, dtype=jnp.uint32))
    here = folded(pairs)
    monkeypatch.setattr(random.backend, "accelerated", lambda: True)
    np.testing.assert_array_equal(folded(pairs), here)
    assert here.shape == (5, 2)


def test_key_pairs_of_typed_legacy_and_other_keys() -> None:
    typed = jax.random.key(5)
    legacy = jax.random.key_data(typed)
    np.testing.assert_array_equal(random.key_pair(typed), random.key_pair(legacy))
    many = jax.random.split(typed, (2, 3))
    made = random.key_pair(many)
    assert made.shape == (2, 3, 2)
    np.testing.assert_array_equal(made[1, 2], random.key_pair(many[1, 2]))
    assert random.key_pair(jax.random.key(0, impl="rbg")).shape == (2,)


def test_the_ranges_of_uniforms() -> None:
    ends = jnp.array([0, 2**32 - 1], jnp.uint32)
    np.testing.assert_array_equal(random.uniform(ends), np.float32([0.0, 1 - 2.0**-24]))
    low, high = np.asarray(random.open_uniform(ends))
    assert 0 < low < 1e-7
    assert high < 1, "1 would become an infinite Gaussian draw"


def test_every_uniform_is_its_word() -> None:
    """All of them: that the root of a square is the number itself is a fact of rounding, and to be held."""
    every = np.arange(2**24, dtype=np.uint32)
    uniforms = jax.jit(random.uniform)(every << 8)
    np.testing.assert_array_equal(uniforms, (every * 2.0**-24).astype(uniforms.dtype))


def test_uniforms_are_uniform_and_bits_are_fair(pairs: jax.Array) -> None:
    drawn = np.asarray(random.words(pairs[0], 2**16))
    counts = np.bincount((np.asarray(random.uniform(drawn)) * 64).astype(int), minlength=64)
    assert stats.chisquare(counts).pvalue > 1e-4
    low = np.bincount(drawn & 63, minlength=64)  # the bits that a uniform drops
    assert stats.chisquare(low).pvalue > 1e-4
    ones = (drawn[:, None] >> np.arange(32) & 1).sum(0)
    assert (np.abs(ones - 2**15) < 5 * 2**7).all()  # five standard deviations of sqrt(n) / 2


def test_a_key_hashed_once_is_the_key() -> None:
    key = jnp.array([[0, 1], [2**31 - 1, 2**31], [2**32 - 2, 2**32 - 1]], jnp.uint32)
    np.testing.assert_array_equal(jax.jit(random.once)(key), key)
