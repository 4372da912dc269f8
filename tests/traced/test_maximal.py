# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled draws: marginals, the probability of equal draws, conjugate sites of pairs.

Tests traced/maximal.py.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock
from ebmpp.traced.block import Call
from ebmpp.traced.maximal import coupled, maximal
from helpers import assert_law, assert_rows_law, nightly

NUM_DRAWS = 20_000


@pytest.mark.parametrize(
    ("p", "q"),
    [
        (dist.Normal(0.0, 1.0), dist.Normal(1.0, 2.0)),
        nightly(dist.Gamma(2.0, 1.0), dist.Gamma(3.0, 2.0)),
        nightly(
            dist.Normal(np.zeros(2), 1.0).to_event(1),
            dist.Normal(np.ones(2), 1.0).to_event(1),
        ),
    ],
)
def test_maximal_coupling_has_its_marginals_and_overlap(
    p: dist.Distribution, q: dist.Distribution
) -> None:
    def draw(key: jax.Array) -> tuple:
        x, y, is_finite = maximal(key, p, q)
        other = p.sample(jax.random.fold_in(key, 1))
        return x, y, is_finite, q.log_prob(other) - p.log_prob(other)

    x, y, is_finite, log_ratio = map(
        np.asarray,
        jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(9), NUM_DRAWS)),
    )
    assert is_finite.all()
    for draws, expected in ((x, p), (y, q)):
        assert_rows_law(draws, expected.mean, comparisons=8)
        assert_rows_law(
            (draws - np.asarray(expected.mean)) ** 2, expected.variance, comparisons=8
        )
    overlap, equal = (
        np.minimum(1.0, np.exp(log_ratio)),
        (x == y).reshape(len(x), -1).all(-1).astype(float),
    )
    error = np.hypot(equal.std(), overlap.std()) / len(x) ** 0.5
    assert_law(equal.mean(), overlap.mean(), error, comparisons=8)


def test_coupling_of_a_density_that_is_nan_is_flagged() -> None:
    @jax.jit
    def is_finite(mean: jax.Array) -> jax.Array:
        return maximal(
            jax.random.key(0), dist.Normal(0.0, 1.0), dist.Normal(mean, 1.0)
        )[2]

    assert is_finite(0.5) and not is_finite(jnp.nan)


@pytest.mark.parametrize("gap", [nightly(0.3), 6.0])
def test_gaussians_are_equal_where_they_overlap_and_close_elsewhere(gap: float) -> None:
    p = dist.MultivariateNormal(np.zeros(2), np.array([[1.0, 0.5], [0.5, 1.0]]))
    q = dist.MultivariateNormal(np.full(2, gap), np.array([[1.1, 0.5], [0.5, 1.0]]))
    keys = jax.random.split(jax.random.key(3), NUM_DRAWS)
    x, y, is_valid = jax.jit(jax.vmap(lambda key: coupled(key, p, q)))(keys)
    assert is_valid.all()
    assert_rows_law(x, p.mean, comparisons=8)
    assert_rows_law(y, q.mean, comparisons=8)
    products = (y - gap)[:, :, None] * (y - gap)[:, None]
    assert_rows_law(products, q.covariance_matrix, comparisons=8)
    share = np.mean((x == y).all(1))
    if gap < 1:
        assert share > 0.7
    else:
        assert share == 0 and np.std(y - x, axis=0).max() < 0.2


def conjugate(y: jax.Array, kind: jax.Array) -> None:
    """A model with a site of each family, beside a discrete one."""
    z = numpyro.sample("z", dist.Bernoulli(0.4))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    share = numpyro.sample("share", dist.Beta(2.0, 1.0))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    means = numpyro.sample("means", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("count", dist.Poisson(rate), obs=3)
    numpyro.sample("coin", dist.Bernoulli(share), obs=1)
    numpyro.sample("kind", dist.Categorical(weights), obs=kind)
    scale = jnp.sqrt(variance)
    numpyro.sample("y", dist.Normal(means.sum() + z, scale), obs=y)


@pytest.mark.nightly
def test_conjugate_sites_of_pairs_have_their_conditionals_and_meet() -> None:
    call = Call({}, (jnp.float32(1.0), jnp.int32(2)), {})
    sites = ["z", "rate", "variance", "share", "weights", "means"]
    block = GibbsBlock.from_model(conjugate, sites, *call.args)
    first = {"z": jnp.int32(0), "variance": jnp.float32(1.0), "means": jnp.zeros(2)}
    second = {"z": jnp.int32(1), "variance": jnp.float32(1.3), "means": jnp.ones(2)}
    others = {
        "rate": jnp.float32(1.0),
        "share": jnp.float32(0.5),
        "weights": jnp.full(3, 1 / 3),
    }

    @jax.jit
    @jax.vmap
    def step(key: jax.Array) -> tuple:
        pair = block.couple((first | others, call), (second | others, call), key)
        single = block.advance(second | others, call, key + 1).z
        return *pair, single

    keys = jax.random.key_data(jax.random.split(jax.random.key(4), 4000))
    x, y, broken, single = step(keys)
    assert not broken.any()
    for site in sites:
        for place in np.ndindex(y[site].shape[1:]):
            index = (slice(None), *place)
            result = stats.ks_2samp(np.asarray(y[site])[index], single[site][index])
            assert result.pvalue > 1e-4, site
    for site in ("rate", "share", "weights"):  # equal conditionals
        assert (x[site] == y[site]).all()
    assert 0.3 < np.mean(x["variance"] == y["variance"]) < 1
