# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Steps that are dispatched together."""

import numpy as np
import pytest
from training_tools import NUMBERED, ROWS, Walker, leaves
import xarray as xr

import jax
import jax.numpy as jnp
import optax

from ebmpp import Stage
from ebmpp.training.batches import as_source
from ebmpp.training.loop import Loop
from ebmpp.training.schedule import Stages

KEY = jax.random.key(0)


def ran(together, weights):
    stages = [
        Stage(num_steps=4, estimator=Walker(steps_per_batch=2)),
        Stage(num_steps=7, estimator=Walker(adopts=True), optimizer=optax.adam(0.1)),
    ]
    params = NUMBERED.init(KEY)
    source = as_source(NUMBERED, ROWS, weights, 4, KEY)
    watched = {"monitors": {"size": lambda params: params["a:b"].sum()}, "every": 3}
    start = (Stages(stages, scheduled=True), source, jnp.array([1, 2], jnp.uint32), params)
    loop = Loop(NUMBERED, *start, **watched, together=together)
    return loop.run(0, loop.begin(0, params), progress_bar=False), loop.log.dataset()


@pytest.mark.parametrize("weights", [None, np.arange(10)])
def test_steps_that_go_together_are_those_one_by_one(weights):
    (one, told), (several, also) = ran(False, weights), ran(True, weights)
    np.testing.assert_allclose(leaves(one), leaves(several), rtol=1e-5, atol=1e-6)
    assert told.sizes == also.sizes == {"step": 11, "monitor_step": 5}
    xr.testing.assert_allclose(told, also, rtol=1e-5)
    assert {n: v.dtype for n, v in told.items()} == {n: v.dtype for n, v in also.items()}
