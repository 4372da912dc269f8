# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import itertools

import numpy as np
import pytest

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import Spin
from ebmpp.core import random
from ebmpp.estimators import Batch, Herding
from helpers import random_params

RBM = ebmpp.layered(v=Spin(3), h=Spin(2))
PARAMS = random_params(RBM, seed=3, scale=1.0)
DATA = {"v": jnp.array([[1.0, 1, -1], [1, 1, 1], [-1, -1, 1], [1, 1, -1]])}


def key(seed: int) -> jax.Array:
    return random.key_pair(jax.random.key(seed))


A, B, W = (np.asarray(PARAMS[name], float) for name in ("v", "h", "v:h"))


def energies(v: np.ndarray, h: np.ndarray) -> float:
    return -(v @ A + h @ B + v @ W @ h)


@jax.jit
def step(state, batch, pair):
    return Herding(num_chains=5).estimate(RBM, PARAMS, state, batch, pair)


def test_states_are_local_modes_and_the_gradient_pushes_away_from_them() -> None:
    estimator = Herding(num_chains=5)
    state = estimator.init(RBM, PARAMS, DATA, 4, key(0))
    weights = jnp.array([0.4, 0.3, 0.2, 0.1])
    made = step(state, Batch(DATA, weights), key(1))
    v, h = (np.asarray(made.state.x[b]) for b in ("v", "h"))
    for x in range(5):  # no layer can be improved
        best_v = min(itertools.product((-1.0, 1.0), repeat=3), key=lambda c: energies(np.array(c), h[x]))
        best_h = min(itertools.product((-1.0, 1.0), repeat=2), key=lambda c: energies(v[x], np.array(c)))
        assert tuple(v[x]) == best_v and tuple(h[x]) == best_h
    at_modes = [
        min(itertools.product((-1.0, 1.0), repeat=2), key=lambda c: energies(row, np.array(c)))
        for row in np.asarray(DATA["v"])
    ]
    positive = np.einsum("n,ni,nj->ij", weights, DATA["v"], np.array(at_modes))
    negative = np.einsum("ni,nj->ij", v, h) / 5
    np.testing.assert_allclose(made.gradient["v:h"], negative - positive, atol=1e-6)


def test_moments_of_the_visited_states_come_to_those_of_the_data() -> None:
    graph = ebmpp.FactorGraph(
        {"v": Spin(3)}, {"h": Spin(2)}, [ebmpp.Bias("v"), ebmpp.Bias("h"), ebmpp.Bilinear("v", "h")]
    )
    params = random_params(graph, seed=5, scale=1.0)
    estimator = Herding(num_chains=1)
    batch = Batch.of(DATA)
    step = jax.jit(lambda p, s, pair: estimator.estimate(graph, p, s, batch, pair))
    state = estimator.init(graph, params, DATA, 4, key(0))
    optimizer, seen = optax.sgd(1.0), []
    carried = optimizer.init(params)
    for seed in range(400):
        made = step(params, state, key(seed))
        updates, carried = optimizer.update(made.gradient, carried)
        params, state = optax.apply_updates(params, updates), made.state
        seen.append(np.asarray(state.x["v"][0]))
    # params stay bounded, so means differ by their range over the number of steps: by 1/T, not 1/sqrt(T)
    np.testing.assert_allclose(np.mean(seen, 0), np.asarray(DATA["v"]).mean(0), atol=0.03)
    assert len(np.unique(np.stack(seen), axis=0)) > 2
    np.testing.assert_array_equal(state.visited()["v"], seen)


def herd(num_kept: int, steps: int, **options) -> ebmpp.training.Fit:
    estimator, every = Herding(num_chains=3, num_kept=num_kept), {"monitor_every": 1}
    given = {"rng_key": jax.random.key(1), "optimizer": optax.sgd(1.0), "progress_bar": False, **every}
    return ebmpp.fit(RBM, DATA, estimator=estimator, num_steps=steps, **given, **options)


@pytest.mark.parametrize("num_kept", [3, 10, 24, 100])
def test_a_run_keeps_the_last_visited_states_in_their_order(num_kept: int) -> None:
    seen = []
    look = lambda progress: seen.append(np.asarray(progress.estimator_state.x["h"]))
    made = herd(num_kept, 8, callbacks=[look]).estimator_state
    every = np.concatenate(seen[1:])  # the first are not visited: they are draws
    np.testing.assert_array_equal(made.visited()["h"], every[-num_kept:])
    assert made.kept["v"].shape == (num_kept, 3)


def test_visited_states_go_on_with_the_run(tmp_path) -> None:
    kept = {"checkpoint_dir": tmp_path}
    herd(10, 5, **kept)
    whole, again = herd(10, 8), herd(10, 8, **kept, resume=True)
    jax.tree.map(np.testing.assert_array_equal, again.estimator_state, whole.estimator_state)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_chains": 0}, "num_chains is an int of at least 1, not 0"),
        ({"num_chains": 5, "num_kept": 4}, "num_kept is an int of at least 5, not 4"),
    ],
)
def test_numbers_are_checked(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        Herding(**given)
