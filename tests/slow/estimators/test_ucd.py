# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased contrastive divergence with pools, persistent chains and local modes, and warnings of runs."""

import itertools

import numpy as np
import pytest
from ucd_tools import assert_unbiased, initial, key, problem, step
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, layered
from ebmpp.core import random
from ebmpp.errors import IntractableError
from ebmpp.estimators import Centered
from ebmpp.moves import mixture_sweep
from ebmpp.moves.layer import gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from helpers import gated

SMALL = {"coupling": "mixture", "pool_size": 30, "num_slots": 8}
RUN = {"rng_key": zoo.KEY, "progress_bar": False, "optimizer": optax.sgd(0.1)}


# -- pools of proposals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("rbm", UCD(**SMALL)),
        ("rbm", UCD(k=1, pool="persistent", **SMALL)),
        ("gaussian", UCD(**SMALL)),
        ("deep", UCD(**SMALL)),
    ],
)
def test_mean_gradient_with_a_pool_matches_exact_gradient(name: str, estimator: UCD) -> None:
    metrics = assert_unbiased(estimator, name)
    assert all(0.2 < m["acceptance"] < 1 for m in metrics)
    assert "posterior_acceptance" not in metrics[0]  # pairs on the posterior move layer by layer


@pytest.mark.parametrize("pool", ["data", "persistent"])
def test_the_pool_does_not_depend_on_the_pairs(pool: str) -> None:
    short, long = (UCD(k=1, num_pairs=n, pool=pool, **SMALL) for n in (5, 9))
    first = jax.device_get(initial(short, "rbm"))
    assert {b: v.shape for b, v in first.pool.items()} == {"v": (30, 4), "h": (30, 3)}
    moved = [step(e, "rbm", first, 1).state.pool for e in (short, long)]
    jax.tree.map(np.testing.assert_array_equal, *moved)
    assert (moved[0]["h"] != first.pool["h"]).any()
    assert (moved[0]["v"] == first.pool["v"]).all() == (pool == "data")
    rows = {tuple(row) for row in np.asarray(problem("rbm")[2]["v"])}
    assert {tuple(row) for row in first.pool["v"]} <= rows
    custom = UCD(k=1, num_pairs=5, pool=pool, **{**SMALL, "coupling": mixture_sweep(zoo.graph("rbm"))})
    gradients = [step(e, "rbm", first, 1).gradient for e in (short, custom)]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


def test_pools_are_adopted_from_stage_to_stage() -> None:
    persistent = UCD(pool="persistent", **SMALL)
    fresh, other = (initial(persistent, "rbm", seed) for seed in (0, 1))
    adopted = persistent.adopt(other._replace(negative=jnp.array(7.0)), fresh)
    jax.tree.map(np.testing.assert_array_equal, adopted.pool, other.pool)
    assert adopted.negative == 7
    chains = initial(PCD(num_chains=4), "rbm", 1)
    adopted = persistent.adopt(chains, fresh)
    np.testing.assert_array_equal(adopted.pool["v"], np.asarray(chains["v"])[np.arange(30) % 4])
    assert UCD(**SMALL).adopt(other, fresh).pool is fresh.pool  # chosen from the stage's own data
    plain = initial(UCD(), "rbm")
    assert UCD().adopt(other, plain).pool == {}
    assert persistent.adopt(plain, fresh).pool is fresh.pool


def test_pools_that_hardly_help_are_reported() -> None:
    accepted = {"acceptance": np.array([0.9, 0.9, 0.004, 0.003])}
    mixture = UCD(coupling="mixture")
    for estimator in (mixture, UCD(coupling=mixture_sweep(zoo.graph("rbm"))), Centered(mixture)):
        assert "0.0035" in (estimator.diagnose(accepted) or "")
        assert estimator.diagnose({"acceptance": np.array([0.0, 0.5])}) is None
    for estimator in (UCD(), UCD(coupling="metropolis"), PCD()):
        assert estimator.diagnose(accepted) is None
    graph = gated()
    with pytest.raises(IntractableError, match="two layers"):
        mixture.init(graph, graph.init(zoo.KEY), {"a": jnp.ones((3, 2))}, 3, key(0))


# -- chains, modes, warnings -----------------------------------------------------------------------


def test_persistent_chains_move_by_one_sweep_whatever_the_pairs_do() -> None:
    graph, params, _ = problem("rbm")
    estimator = UCD(k=1, start="persistent", num_pairs=6, num_slots=4)
    states = [initial(estimator, "rbm")]
    for seed in range(1, 4):
        states.append(step(estimator, "rbm", states[-1], seed).state)
    for before, after in itertools.pairwise(states):
        assert any((before.chains[b] != after.chains[b]).any() for b in before.chains)
    keys = random.fold_in(random.fold_in(key(1), 3), jnp.arange(6))
    alone, _ = draw_sweep(Target(graph, params), states[0].chains, gibbs_sweep(graph), keys)
    jax.tree.map(np.testing.assert_array_equal, alone, states[1].chains)


def test_a_run_that_starts_in_deep_modes_gives_a_warning() -> None:
    graph = layered(v=Bernoulli(8), h=Bernoulli(2))
    weights = np.zeros((8, 2), np.float32)
    weights[:, 0] = 4.2
    params = {"v": np.full(8, -2.1, np.float32), "h": np.array([-16.8, 0], np.float32), "v:h": weights}
    data = np.repeat([[0.0] * 8, [1.0] * 8], 50, axis=0)
    options = {**RUN, "optimizer": optax.sgd(0.0), "num_steps": 10, "batch_size": 100}
    with pytest.warns(UserWarning, match="UCD: the last pair"):
        result = ebmpp.fit(graph, data, params=params, estimator=UCD(), **options)
    assert (result.history.lag == 1).all()  # most pairs meet where they start
    assert UCD(lag=1).diagnose({"meeting_time_max": np.full(9, 900.0), "lag": np.ones(9)}) is None


class Reporting(PCD):
    """Reports the number of its steps."""

    def diagnose(self, history: dict) -> str | None:
        return f"{len(history['gradient_norm'])} steps"


def test_fit_warns_of_what_an_estimator_reports_of_its_stage() -> None:
    stages = [
        ebmpp.Stage(num_steps=n, estimator=e, optimizer=optax.sgd(0.1))
        for n, e in ((2, PCD(num_chains=4)), (3, Reporting(num_chains=4)))
    ]
    with pytest.warns(UserWarning, match="^fit: steps 2 to 4: 3 steps$") as caught:
        ebmpp.fit(zoo.graph("rbm"), zoo.rows("rbm"), schedule=stages, rng_key=zoo.KEY, progress_bar=False)
    assert len(caught) == 1
