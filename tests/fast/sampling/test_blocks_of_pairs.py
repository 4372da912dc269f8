# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Means of many numbers, by sums over blocks of pairs: the same means, and errors that are honest."""

import numpy as np
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.moves.target import Target
from ebmpp.sampling import accumulators
from ebmpp.sampling.accumulators import Function

RBM = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
PARAMS = jax.tree.map(
    lambda a: 0.7 * jax.random.normal(jax.random.key(a.size), a.shape), RBM.init(jax.random.key(0))
)


def estimate(fn: object, seed: int = 0, num_pairs: int = 700, **options: object) -> object:
    """Pairs that meet at different times, so that the corrections count."""
    return ebmpp.unbiased_expectation(
        RBM, PARAMS, fn, rng_key=jax.random.key(seed), num_pairs=num_pairs, k=0, m=2, **options
    )


def test_means_are_those_of_a_row_a_pair_and_errors_nearly(monkeypatch: pytest.MonkeyPatch) -> None:
    by_pair = estimate(lambda x: {"both": jnp.outer(x["v"], x["h"]), "v": x["v"]})
    monkeypatch.setattr(accumulators, "_MOST_KEPT", 1000)
    made = estimate(lambda x: {"both": jnp.outer(x["v"], x["h"]), "v": x["v"]})
    np.testing.assert_array_equal(made.meeting_time, by_pair.meeting_time)
    np.testing.assert_array_equal(made.cost, by_pair.cost)
    for name in ("both", "v"):
        np.testing.assert_allclose(made.value[name], by_pair.value[name], rtol=1e-5, atol=1e-6)
        ratio = made.standard_error[name] / by_pair.standard_error[name]
        assert 0.7 < ratio.min() < ratio.max() < 1.4  # five times what 128 blocks leave to chance
        assert not np.allclose(ratio, 1, rtol=1e-4)  # by blocks they are others


@pytest.mark.slow
def test_a_row_a_pair_is_kept_where_pairs_are_dropped_or_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "_MOST_KEPT", 1)
    few = estimate(lambda x: x["v"], num_pairs=accumulators.BLOCKS)
    one_by_one = estimate(lambda x: x["v"] + 0, num_pairs=accumulators.BLOCKS, unmet="drop")
    np.testing.assert_array_equal(few.standard_error, one_by_one.standard_error)
    with pytest.warns(UserWarning, match="dropped"):
        dropped = estimate(lambda x: jnp.ones(3), max_sweeps=3, unmet="drop")
    assert 0 < dropped.num_unmet < 700
    np.testing.assert_allclose(dropped.value, 1, rtol=1e-6)  # of those that met, whose weights sum to 1


def test_memory_does_not_grow_with_the_pairs() -> None:
    fn = Function(lambda x: jnp.outer(x["v"], jnp.ones(1000)), (("v", (4,), "float32"),))
    for num in (2000, 10**6):
        made = fn.in_blocks(num)
        assert not made.per_job
        (total,) = jax.tree.leaves(jax.eval_shape(lambda: made.init(Target(RBM, PARAMS), num)))
        assert total.shape == (accumulators.BLOCKS, 4, 1000)
        assert made.pairs(np.ones(num, bool)).sum() == num
    assert fn.in_blocks(1000) == fn  # 4 million numbers


@pytest.mark.parametrize("wide", [1, 10**9], ids=["one by one", "in turn"])
def test_sums_are_the_same_however_they_are_added(wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = {"v": jax.random.normal(jax.random.key(0), (50, 4))}
    weights = jnp.where(jnp.arange(50) % 7 == 0, 0.0, jnp.linspace(-1, 2, 50))
    x["v"] = x["v"].at[7].set(jnp.nan)  # of no weight
    jobs = jnp.arange(50) * 5 % 23
    fn = lambda x: {"square": jnp.outer(x["v"], x["v"]), "one": jnp.ones(())}
    target, state = Target(RBM, PARAMS), (("v", (4,), "float32"),)
    for rows in (None, 5):
        sums = Function(fn, state, rows)
        zero = sums.init(target, 23)
        whole = sums.add(target, zero, x, weights, jobs)
        with monkeypatch.context() as patch:
            patch.setattr(accumulators, "_WIDE", wide)
            patch.setattr(accumulators, "_MOST_KEPT", 17 * 8)  # eight rows at a time, and two at last
            made = sums.add(target, zero, x, weights, jobs)
        where = np.asarray(jobs if rows is None else jobs % rows)
        expected = np.zeros(len(zero["one"]))
        np.add.at(expected, where, weights)
        np.testing.assert_allclose(whole["one"], expected, rtol=1e-5, atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), made, whole)
        assert np.isfinite(whole["square"]).all()


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "_MOST_KEPT", 1)
    exact, runs = ebmpp.exact.moments(RBM, PARAMS)["v"], 400
    found = [estimate(lambda x: x["v"], seed, num_pairs=300) for seed in range(runs)]
    z = np.array([(made.value - exact) / made.standard_error for made in found])
    inside = (np.abs(z) < stats.norm.isf(0.025)).mean(0)
    share = stats.t.cdf(stats.norm.isf(0.025), accumulators.BLOCKS - 1) * 2 - 1
    assert share > 0.945
    assert np.abs(inside - share).max() < 4 * np.sqrt(0.95 * 0.05 / runs)
