# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import PCD, Spin, TemperedPCD, exact, layered
from ebmpp.core import random
from ebmpp.estimators import Batch
from helpers import assert_rows_law

MAGNET = layered(v=Spin(6), h=Spin(6))
#: two modes that plain chains do not change between
PARAMS = {"v": jnp.full(6, 0.05), "h": jnp.zeros(6), "v:h": jnp.full((6, 6), 0.9)}
DATA = {"v": jnp.array([[1.0] * 6, [-1.0] * 6])}


def key(seed: int) -> jax.Array:
    return random.key_pair(jax.random.key(seed))


def gradients(estimator, steps=150, warm=50):
    batch = Batch.of(DATA)
    step = jax.jit(lambda s, pair: estimator.estimate(MAGNET, PARAMS, s, batch, pair))
    state, made, metrics = estimator.init(MAGNET, PARAMS, DATA, 2, key(0)), [], []
    # all chains in one mode: whoever leaves it does so on its own
    up = lambda s: jax.tree.map(jnp.ones_like, s)
    state = state._replace(chains=up(state.chains)) if hasattr(state, "chains") else up(state)
    for seed in range(steps):
        out = step(state, key(seed + 1))
        state = out.state
        if seed >= warm:
            made.append(np.asarray(out.gradient["v"]))
            metrics.append(out.metrics)
    return np.stack(made), state, metrics


@pytest.mark.slow
def test_tempered_chains_weigh_modes_that_plain_ones_do_not_leave():
    wanted = -np.asarray(exact.grad_log_likelihood(MAGNET, PARAMS, DATA)["v"])
    # batch means of 10 steps: neighbouring steps are not independent
    made, state, metrics = gradients(TemperedPCD(k=2, num_chains=50, num_temperatures=6))
    assert_rows_law(made.reshape(10, 10, -1).mean(1), wanted)
    stuck, _, _ = gradients(PCD(k=2, num_chains=50))
    assert np.abs(stuck.mean(0) - wanted).min() > 0.3
    assert state.chains["v"].shape == (50, 6, 6)
    # the ladder has moved to where all neighbours are refused alike
    betas = np.asarray(state.betas)
    assert betas[0] == 0 and betas[-1] == 1 and (np.diff(betas) > 0).all()
    assert not np.allclose(betas, np.linspace(0, 1, 6), atol=0.02)
    spread = [float(m["swap_rejection_max"] - m["swap_rejection_mean"]) for m in metrics]
    assert np.mean(spread) < 0.15


@pytest.mark.parametrize("given", [{"k": 0}, {"num_chains": 0}, {"num_temperatures": 1}])
def test_numbers_are_checked(given):
    with pytest.raises(ValueError, match=f"TemperedPCD: {next(iter(given))} is an int of at least"):
        TemperedPCD(**given)
