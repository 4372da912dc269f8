# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Parallel trajectory tempering: invariant swaps, the ladder, training, arguments.

Tests estimators/trajectory.py.
"""

from typing import Any

import numpy as np
import pytest
from training_tools import assert_same_run
from ucd_tools import HIDDEN, STATES, key, phase, problem, visible_transition
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PTT
from ebmpp.annealing.path import Path
from ebmpp.annealing.reference import base_rates
from ebmpp.errors import ArgumentError
from ebmpp.estimators import trajectory
from ebmpp.estimators.phases import row_keys
from helpers import assert_rows_law

ROWS, SCALES = 4000, (0.1, 0.5, 1.0)


def hidden_distribution(params: Any) -> np.ndarray:
    """Return the probabilities of the hidden states of the zoo's rbm, whose visible
    units are summed out."""
    p = {name: np.asarray(a, float) for name, a in params.items()}
    log_p = HIDDEN @ p["h"] + np.logaddexp(0, p["v"] + HIDDEN @ p["v:h"].T).sum(1)
    return np.exp(log_p - log_p.max()) / np.exp(log_p - log_p.max()).sum()


def test_swaps_and_sweeps_leave_the_distribution_of_the_ladder_invariant() -> None:
    graph, params, data = problem("rbm", 4)
    models = [jax.tree.map(lambda a, c=c: c * a, params) for c in SCALES]
    path = Path.through(graph, base_rates(graph, data), models)
    assert path.sampled == ("h",)
    exact, rng = (
        [hidden_distribution(model) for model in models],
        np.random.default_rng(0),
    )
    index = np.stack([rng.choice(8, ROWS, p=p) for p in exact], 1)
    x = {"h": jnp.asarray(HIDDEN[index], jnp.float32)}

    new, rates = jax.jit(trajectory.sweep_and_swap)(path, x, row_keys(key(1), ROWS))
    assert (np.asarray(rates) > 0.1).all() and (np.asarray(rates) < 0.9).all()
    assert (np.asarray(new["h"]) != np.asarray(x["h"])).any((0, 2)).all()
    number = np.asarray(new["h"]).astype(int) @ np.array([4, 2, 1])
    for level, p in enumerate(exact):
        assert_rows_law(np.eye(8)[number[:, level]], p)
    centred = np.asarray(new["h"]) - np.stack([p @ HIDDEN for p in exact])
    for low in range(2):  # neighbours stay independent
        assert_rows_law(
            np.einsum("ri,rj->rij", centred[:, low], centred[:, low + 1]), 0.0
        )


@pytest.mark.nightly
def test_the_gradient_at_equilibrium_chains_is_the_models() -> None:
    graph, params, data = problem("rbm", 4)
    estimator = PTT(num_chains=ROWS, num_models=2, reservoir=2)
    state = estimator.init_state(graph, params, {"v": data["v"]}, 4, key(3))
    assert {b: v.shape for b, v in state.reservoir.items()} == {"h": (ROWS, 2, 3)}
    drawn = np.concatenate(
        [np.asarray(state.chains["h"]), np.asarray(state.reservoir["h"])], 1
    )
    number = drawn.reshape(-1, 3).astype(int) @ np.array([4, 2, 1])
    np.testing.assert_allclose(
        np.bincount(number) / len(number), hidden_distribution(params), atol=0.02
    )
    path = Path.line(graph, state.eta0, params)
    rows = np.repeat(
        HIDDEN, np.round(hidden_distribution(params) * 10_000).astype(int), 0
    )
    gradient = trajectory._mean_gradient(
        path, params, {"h": jnp.asarray(rows, jnp.float32)}
    )
    model = np.linalg.matrix_power(visible_transition(params), 10_000)[0]
    for name, exact in phase(params, STATES, model).items():
        np.testing.assert_allclose(-np.asarray(gradient[name]), exact, atol=2e-3)


STEPS = 300
OPTIONS: dict[str, Any] = {
    "optimizer": optax.adam(0.05),
    "batch_size": 14,
    "progress_bar": False,
}


def train(steps: int, **options: Any) -> ebmpp.FitResult:
    rows = ebmpp.data.bars_and_stripes(3)
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(6))
    estimator = PTT(num_chains=100, k=1, reservoir=5)
    return ebmpp.fit(
        rbm,
        rows,
        estimator=estimator,
        num_steps=steps,
        rng_key=zoo.KEY,
        **OPTIONS,
        **options,
    )


@pytest.mark.nightly
def test_training_nears_the_exact_likelihood_freezes_models_and_resumes(
    tmp_path: Any,
) -> None:
    fit = train(STEPS)
    rows = {"v": ebmpp.data.bars_and_stripes(3)}
    value = float(np.mean(ebmpp.exact.log_likelihood(fit.graph, fit.params, rows)))
    # at best -2.64, independent pixels have -6.2; PCD reaches -6.0 after 500 steps
    assert value > -4.6
    frozen = fit.history.num_frozen.values
    assert frozen[-1] >= 3 and np.diff(frozen).max() == 1
    at = np.flatnonzero(np.diff(frozen, prepend=0))
    assert (fit.history.swap_acceptance.values[at] < 0.25).all() and np.diff(
        at
    ).min() > 5
    assert fit.history.swap_acceptance.values.mean() > 0.2
    train(int(at[0]) + 3, checkpoint_dir=tmp_path)
    assert_same_run(train(STEPS, checkpoint_dir=tmp_path, resume=True), fit)
    state = fit.estimator_state
    assert (
        state.model_chains["h"].shape == (100, 6)
        and int(state.age) == STEPS - 1 - at[-1]
    )
    for b, v in fit.graph.param_shapes.items():
        assert jax.tree.leaves(state.models[b])[0].shape == (
            2,
            *jax.tree.leaves(v)[0].shape,
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_models", 1),
        ("acceptance", 1.0),
        ("reservoir", 0),
        ("num_chains", 0),
        ("k", 0),
    ],
)
def test_invalid_arguments_raise(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"PTT: {name} "):
        PTT(**{name: value})
