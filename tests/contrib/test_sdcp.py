# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Stochastic difference of convex functions programming against its published algorithm.

Tests contrib/estimators/sdcp.py.
"""

import numpy as np
import pytest
from ucd_tools import difference, estimate, key, phase, problem

import jax

from ebmpp.contrib import SDCP
from ebmpp.errors import ArgumentError, IntractableError
from helpers import random_params

D = 3
ESTIMATOR = SDCP(d=D, k=2)


def inner_params() -> list[dict[str, jax.Array]]:
    """Params of three inner steps, far apart."""
    return [
        random_params(problem("rbm")[0], seed=seed, scale=2.0) for seed in (1, 2, 3)
    ]


def test_run_follows_algorithm_2() -> None:
    """Two batches of three inner steps; the printed Algorithm 3 would sum the steps of
    one batch."""
    graph, _, data = problem("rbm")
    rate, weights = 0.5, np.float32([0.7, 0.1, 0.4, 0.2])
    rows = np.asarray(data["v"])[:4]
    params = inner_params()[0]
    state = ESTIMATOR.init_state(graph, params, {"v": rows}, 4, key(0))
    theta = {name: np.asarray(a, float) for name, a in params.items()}
    assert ESTIMATOR.steps_per_batch == D
    for batch in range(2):
        start, v = dict(theta), rows if batch == 0 else 1 - rows
        for inner in range(D):
            result = estimate(
                ESTIMATOR,
                graph,
                params,
                state,
                {"v": v},
                key(1 + D * batch + inner),
                weights,
            )
            result = jax.device_get(result)
            params = {
                n: np.asarray(p) - np.float32(rate) * result.gradient[n]
                for n, p in params.items()
            }
            state = result.state
            step = difference(
                phase(theta, state.chains["v"], weights), phase(start, v, weights)
            )
            theta = {n: theta[n] - rate * step[n] for n in theta}
            for name, value in theta.items():
                np.testing.assert_allclose(params[name], value, atol=1e-5)


def test_interacting_latents_and_invalid_arguments_are_refused() -> None:
    graph, params, data = problem("deep")
    with pytest.raises(IntractableError, match="^SDCP .*'h1' and 'h2' interact"):
        SDCP().init_state(graph, params, data, 4, key(0))
    for name, value in (("d", 0), ("d", 1.5), ("k", -1)):
        with pytest.raises(ArgumentError, match=f"{name} .*{value}"):
            SDCP(**{name: value})
