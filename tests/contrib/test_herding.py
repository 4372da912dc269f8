# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Herding: local modes, moments of the visited states, and the record of them.

Tests contrib/estimators/herding.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ucd_tools import estimate, key
import zoo

import jax
import optax

import ebmpp
from ebmpp.contrib import Herding
from helpers import random_params

pytestmark = pytest.mark.nightly

DATA = {"v": np.float32([[1, 1, -1], [1, 1, 1], [-1, -1, 1], [1, 1, -1]])}
VISIBLE = np.array(list(np.ndindex(2, 2, 2)), float) * 2 - 1
HIDDEN = np.array(list(np.ndindex(2, 2)), float) * 2 - 1


def test_states_are_local_modes_and_the_gradient_moves_away_from_them() -> None:
    graph = zoo.graph("spin")
    params = random_params(graph, seed=3, scale=1.0)
    a, b, w = (np.asarray(params[name], float) for name in ("v", "h", "v:h"))
    best_hidden = lambda v: HIDDEN[(HIDDEN @ (b + v @ w)).argmax()]
    estimator, weights = Herding(num_chains=5), np.float32([0.4, 0.3, 0.2, 0.1])
    state = estimator.init_state(graph, params, DATA, 4, key(0))
    result = jax.device_get(
        estimate(estimator, graph, params, state, DATA, key(1), weights)
    )
    v, h = result.state.x["v"], result.state.x["h"]
    for i in range(5):  # no layer can be improved
        np.testing.assert_array_equal(
            v[i], VISIBLE[(VISIBLE @ (a + w @ h[i])).argmax()]
        )
        np.testing.assert_array_equal(h[i], best_hidden(v[i]))
    modes = np.array([best_hidden(row) for row in DATA["v"]])
    positive = np.einsum("n,ni,nj->ij", weights, DATA["v"], modes)
    negative = np.einsum("ni,nj->ij", v, h) / 5
    np.testing.assert_allclose(result.gradient["v:h"], negative - positive, atol=1e-6)


def test_moments_of_visited_states_converge_to_those_of_the_data() -> None:
    graph, estimator = zoo.graph("spin"), Herding(num_chains=1)
    params = random_params(graph, seed=5, scale=1.0)
    state, visited = estimator.init_state(graph, params, DATA, 4, key(0)), []
    for seed in range(400):
        result = jax.device_get(
            estimate(estimator, graph, params, state, DATA, key(seed))
        )
        params = {
            name: np.asarray(p) - result.gradient[name] for name, p in params.items()
        }
        state = result.state
        visited.append(state.x["v"][0])
    # params stay bounded, so means differ by their range over the number of steps
    np.testing.assert_allclose(np.mean(visited, 0), DATA["v"].mean(0), atol=0.03)
    assert len(np.unique(np.stack(visited), axis=0)) > 2
    np.testing.assert_array_equal(state.visited()["v"], visited)


def herd(num_kept: int, steps: int, **options: Any) -> Any:
    options = {
        "rng_key": zoo.KEY,
        "optimizer": optax.sgd(1.0),
        "progress_bar": False,
    } | options
    estimator = Herding(num_chains=3, num_kept=num_kept)
    return ebmpp.fit(
        zoo.graph("spin"),
        DATA,
        estimator=estimator,
        num_steps=steps,
        monitor_every=1,
        **options,
    )


@pytest.mark.parametrize("num_kept", [10, 100])
def test_a_run_keeps_the_last_visited_states_in_order(
    num_kept: int, tmp_path: Path
) -> None:
    states = []
    record = lambda progress: states.append(np.asarray(progress.estimator_state.x["h"]))
    state = herd(num_kept, 8, callbacks=[record]).estimator_state
    visited = np.concatenate(states[1:])  # the first are draws
    np.testing.assert_array_equal(state.visited()["h"], visited[-num_kept:])
    assert state.buffer["v"].shape == (num_kept, 3)
    herd(num_kept, 5, checkpoint_dir=tmp_path)
    resumed = herd(num_kept, 8, checkpoint_dir=tmp_path, resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.estimator_state, state)
