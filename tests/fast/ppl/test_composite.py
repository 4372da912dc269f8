# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled composites: unbiased estimates, maximal couplings of continuous sites, and refusals."""

from block_tools import NOISY, exact_posterior, offset_step, spin_block
import numpy as np
import numpyro.distributions as dist
import pytest

import jax
import jax.numpy as jnp

from ebmpp.ppl import CoupledComposite, composite_expectation
from ebmpp.ppl.composite import maximal
from helpers import assert_law, assert_rows_law, slow


def test_estimates_of_the_posterior_are_unbiased() -> None:
    kernel = CoupledComposite([spin_block(), offset_step()], lag=2)
    fn = lambda sites: {"x": sites["x"] > 0, "offset": sites["offset"]}
    options = {"rng_key": jax.random.key(3), "num_pairs": 3000, "k": 3, "m": 6}
    result = composite_expectation(kernel, fn, NOISY, **options)
    for name, exact in zip(("x", "offset"), exact_posterior(), strict=True):
        assert_law(result.value[name], exact, result.standard_error[name], comparisons=7)
    assert result.num_unmet == 0 and (result.meeting_time > 2).any()


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (dist.Normal(0.0, 1.0), dist.Normal(1.0, 2.0)),
        slow(dist.Gamma(2.0, 1.0), dist.Gamma(3.0, 2.0)),
        slow(dist.Normal(np.zeros(2), 1.0).to_event(1), dist.Normal(np.ones(2), 1.0).to_event(1)),
    ],
)
def test_maximal_coupling_has_its_marginals_and_overlap(p: dist.Distribution, q: dist.Distribution) -> None:
    def draw(key: jax.Array) -> tuple:
        x, y, is_finite = maximal(key, p, q)
        own = p.sample(jax.random.fold_in(key, 1))
        return x, y, is_finite, q.log_prob(own) - p.log_prob(own)

    x, y, is_finite, log_ratio = map(
        np.asarray, jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(9), 20_000))
    )
    assert is_finite.all()
    for draws, expected in ((x, p), (y, q)):
        assert_rows_law(draws, expected.mean, comparisons=8)
        assert_rows_law((draws - np.asarray(expected.mean)) ** 2, expected.variance, comparisons=8)
    overlap, equal = np.minimum(1.0, np.exp(log_ratio)), (x == y).reshape(len(x), -1).all(-1).astype(float)
    error = np.hypot(equal.std(), overlap.std()) / len(x) ** 0.5
    assert_law(equal.mean(), overlap.mean(), error, comparisons=8)


def test_coupling_of_a_density_that_is_nan_is_flagged() -> None:
    @jax.jit
    def is_finite(mean: jax.Array) -> jax.Array:
        return maximal(jax.random.key(0), dist.Normal(0.0, 1.0), dist.Normal(mean, 1.0))[2]

    assert is_finite(0.5) and not is_finite(jnp.nan)
