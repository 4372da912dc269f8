# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local modes are local modes."""

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.errors import StateError

GRAPH = ebmpp.layered(v=ebmpp.Bernoulli(4), h1=ebmpp.Spin(3), h2=ebmpp.Categorical(2, 3))
PARAMS = jax.tree.map(
    lambda a: jax.random.normal(jax.random.key(a.size), a.shape), GRAPH.init(jax.random.key(0))
)


def test_no_layer_can_raise_the_density_of_what_is_found() -> None:
    mode = ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(1), num_rows=200)
    value = np.asarray(GRAPH.log_density(PARAMS, mode.state))
    states, weights = ebmpp.exact.probabilities(GRAPH, PARAMS)
    every = np.asarray(GRAPH.log_density(PARAMS, states))
    for row in range(0, 200, 20):
        for layer in GRAPH.layers:
            others = [b for b in GRAPH.families if b not in layer]
            same = np.all([(states[b] == mode.state[b][row]).all(1) for b in others], axis=0)
            assert every[same].max() <= value[row] + 1e-4
    assert (mode.steps >= 0).all()
    assert value.max() == pytest.approx(every.max(), abs=1e-4)  # of 200 starts one finds the best
    assert weights.sum() == pytest.approx(1, abs=1e-5)


def test_clamped_blocks_stay_and_starts_are_used() -> None:
    v = jnp.array([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    mode = ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(2), v=v)
    assert (mode.state["v"] == v).all()
    again = ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(3), init=mode.state)
    # a mode of the latents given v need not be one of all blocks, but searching on never goes down
    assert (GRAPH.log_density(PARAMS, again.state) >= GRAPH.log_density(PARAMS, mode.state)).all()


def test_gaussian_means_are_found() -> None:
    graph = ebmpp.layered(v=ebmpp.Gaussian(3), h=ebmpp.Gaussian(2))
    params = {"v": jnp.ones(3), "h": jnp.zeros(2), "v:h": 0.3 * jnp.ones((3, 2))}
    mode = ebmpp.local_search(graph, params, rng_key=jax.random.key(0), num_rows=3)
    precision = np.block([[np.eye(3), -0.3 * np.ones((3, 2))], [-0.3 * np.ones((2, 3)), np.eye(2)]])
    exact = np.linalg.solve(precision, np.array([1.0, 1, 1, 0, 0]))
    assert np.abs(np.asarray(mode.state["v"]) - exact[:3]).max() < 2e-3


def test_bad_calls_are_told() -> None:
    with pytest.raises(StateError, match="every block is clamped"):
        ebmpp.local_search(
            GRAPH,
            PARAMS,
            rng_key=jax.random.key(0),
            v=jnp.ones(4),
            h1=jnp.ones(3),
            h2=jnp.zeros(2, int),
        )
    with pytest.raises(StateError, match=r"num_rows=3 with leading axes \(2,\)"):
        ebmpp.local_search(GRAPH, PARAMS, rng_key=jax.random.key(0), num_rows=3, v=jnp.ones((2, 4)))
