# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of Hamiltonian chains: distributions of both, equal proposals, faithfulness.

Tests ppl/hamiltonian.py.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

from ebmpp.errors import StateError
from ebmpp.moves.gradients.hamiltonian import Transition, draw_numbers
from ebmpp.ppl import CoupledHMC
from ebmpp.traced.block import Call

NUM_PAIRS = 4000
LOCATION = 0.5


def model(location: jax.Array) -> None:
    """A model without data, whose draws are exact."""
    scale = numpyro.sample("scale", dist.Gamma(3.0, 2.0))
    numpyro.sample("x", dist.Normal(location, scale))
    numpyro.sample("share", dist.Beta(2.0, 3.0))


CALL = Call({}, (jnp.float32(LOCATION),), {})
SITES = ["scale", "x", "share"]


def draws(seed: int) -> dict[str, jax.Array]:
    """Exact draws of all sites."""
    keys = jax.random.split(jax.random.key(seed), 3)
    scale = jax.random.gamma(keys[0], 3.0, (NUM_PAIRS,)) / 2
    x = LOCATION + scale * jax.random.normal(keys[1], (NUM_PAIRS,))
    return {
        "scale": scale,
        "x": x,
        "share": jax.random.beta(keys[2], 2.0, 3.0, (NUM_PAIRS,)),
    }


@pytest.fixture(scope="module")
def steps() -> tuple[CoupledHMC, jax.stages.Wrapped]:
    """A step with a dense matrix, and three coupled transitions of it."""
    matrix = np.array([[0.3, 0.05, 0.0], [0.05, 0.8, 0.0], [0.0, 0.0, 1.0]])
    step = CoupledHMC(
        model,
        SITES,
        step_size=0.5,
        num_steps=2,
        inverse_mass_matrix=matrix,
        walk_probability=0.7,
    )

    @jax.jit
    @jax.vmap
    def advance(x: dict, y: dict, key: jax.Array) -> tuple:
        for number in range(3):
            keys = key + jnp.uint32([0, number])
            x, y, _ = step.couple((x, CALL), (y, CALL), keys)
        return x, y

    return step, advance


def keys(seed: int) -> jax.Array:
    return jax.random.key_data(jax.random.split(jax.random.key(seed), NUM_PAIRS))


def test_both_chains_keep_the_distribution(steps: tuple) -> None:
    _, advance = steps
    x, y = advance(draws(0), draws(1), keys(2))
    exact = draws(3)
    for chain in (x, y):
        for site in SITES:
            result = stats.ks_2samp(np.asarray(chain[site]), np.asarray(exact[site]))
            assert result.pvalue > 1e-4, site
    assert np.mean(x["x"] == y["x"]) > 0.05  # in three steps, from independent draws
    together = np.asarray(x["x"] == y["x"])
    assert (np.asarray(x["share"] == y["share"]) == together).all()


def test_equal_chains_stay_equal(steps: tuple) -> None:
    step, advance = steps
    x, y = advance(draws(0), draws(0), keys(2))
    assert all((x[site] == y[site]).all() for site in SITES)
    single = jax.jit(jax.vmap(lambda v, key: step.advance(v, CALL, key).z))
    moved = single(draws(0), keys(5))
    share = np.mean(moved["x"] != draws(0)["x"])
    assert 0.5 < share <= 1


def test_proposals_of_the_walk_are_equal_as_often_as_possible() -> None:
    transition = Transition(0.5, 3, 0.5, 1.0, jnp.ones(3))

    @jax.jit
    @jax.vmap
    def propose(key: jax.Array) -> jax.Array:
        z = jnp.array([[0.0, 0.0, 0.0], [0.3, 0.4, 0.0]])
        return transition.proposals(z, draw_numbers(key, 3))

    x, y = np.moveaxis(np.asarray(propose(keys(6))), 1, 0)
    share = np.mean((x == y).all(1))
    exact = 2 * stats.norm.cdf(-0.5)  # centres at a distance of one standard deviation
    assert abs(share - exact) < 4 * np.sqrt(exact * (1 - exact) / NUM_PAIRS)
    for z, centre in ((x, 0.0), (y, np.array([0.3, 0.4, 0.0]))):
        standard = (z - centre) / 0.5
        for column in standard.T:
            assert stats.kstest(column, stats.norm.cdf).pvalue > 1e-4


def test_a_matrix_of_another_size_is_refused() -> None:
    step = CoupledHMC(model, SITES, step_size=0.5, inverse_mass_matrix=np.ones(2))
    values = {site: v[0] for site, v in draws(0).items()}
    with pytest.raises(StateError, match="3 dimensions"):
        step.advance(values, CALL, jnp.zeros(2, jnp.uint32))
