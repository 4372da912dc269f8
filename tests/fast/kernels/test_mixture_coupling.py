# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled kernels whose pairs share proposals from a pool that is passed beside the params."""

from typing import Any

import numpy as np
from numpyro.infer import MCMC
import pytest

import jax

from ebmpp import Bernoulli, BlockedGibbs, MaximalCoupling, exact
from ebmpp.errors import ArgumentError, StateError
from ebmpp.moves import mixture_sweep
from ebmpp.sampling import mixture_pool
from helpers import assert_rows_law, pair, random_params

GRAPH = pair(Bernoulli(3), Bernoulli(2))
PARAMS = random_params(GRAPH, seed=2, scale=1.5)
KERNEL = MaximalCoupling(GRAPH, coupling="mixture")
ROWS = {"a": np.random.default_rng(0).integers(0, 2, (9, 3)).astype(np.float32)}


def made(seed: int = 0) -> Any:
    return mixture_pool(GRAPH, PARAMS, ROWS, rng_key=jax.random.key(seed))


def run(chains: int, method: str, samples: int = 12) -> tuple[Any, dict[str, np.ndarray]]:
    options = {"num_warmup": 0, "num_samples": samples, "progress_bar": False}
    mcmc = MCMC(KERNEL, num_chains=chains, chain_method=method, **options)
    mcmc.run(jax.random.key(1), PARAMS, pool=made())
    return mcmc.last_state, {b: np.asarray(v) for b, v in mcmc.get_samples(group_by_chain=True).items()}


@pytest.mark.slow
def test_chain_methods_make_the_same_chains() -> None:
    (one, drawn), (other, again) = run(3, "vectorized"), run(3, "sequential")
    jax.tree.map(np.testing.assert_array_equal, drawn, again)
    np.testing.assert_array_equal(one.meeting_time, other.meeting_time)
    assert one.accepted.min() > 0


def test_draws_are_the_models_and_pairs_stay_together() -> None:
    state, drawn = run(4000, "vectorized", 20)
    assert_rows_law(drawn["a"][:, -1], np.asarray(exact.moments(GRAPH, PARAMS)["a"]))
    assert state.met.all() and float(state.distance.max()) == 0
    assert 0.2 < float(state.accepted.mean()) / 41 < 1  # of 21 sweeps of one chain and 20 of the other


def test_the_pool_is_passed_beside_the_params_and_made_before() -> None:
    options = {"num_warmup": 0, "num_samples": 2, "progress_bar": False}
    mcmc = MCMC(KERNEL, **options)
    with pytest.raises(ArgumentError, match="MaximalCoupling: pool is what .*mixture_pool makes"):
        mcmc.run(jax.random.key(0), PARAMS, pool=ROWS)
    with pytest.raises(ArgumentError, match='MaximalCoupling: coupling="mixture" proposes from a pool'):
        mcmc.run(jax.random.key(0), PARAMS)
    with pytest.raises(ArgumentError, match="has no Mixture move"):
        mixture_pool(GRAPH, PARAMS, ROWS, rng_key=jax.random.key(0), coupling="common")
    with pytest.raises(StateError, match="proposes from a pool of values of"):
        MCMC(BlockedGibbs(GRAPH, moves=mixture_sweep(GRAPH)), **options).run(jax.random.key(0), PARAMS)
    assert repr(KERNEL).endswith("coupling='mixture')")
