# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""UCD whose pairs share proposals from a pool: unbiased, the pool's course, what is told and refused."""

from pathlib import Path

import numpy as np
import pytest
from ucd_tools import BATCHES, ROWS, estimate, key, problem

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, Observed, exact, layered
from ebmpp.errors import ArgumentError, IntractableError, StateError
from ebmpp.estimators import Centered
from ebmpp.estimators.base import Batch
from ebmpp.moves import mixture_sweep
from helpers import assert_rows_law, gated, often, slow

SMALL = {"coupling": "mixture", "pool_size": 30, "num_slots": 8}
RBM = layered(v=Bernoulli(9), h=Bernoulli(3))
DATA = np.asarray(ebmpp.data.bars_and_stripes(3))


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("rbm", UCD(**SMALL)),
        slow("rbm", UCD(k=1, pool="persistent", **SMALL)),
        slow("gaussian", UCD(**SMALL)),
        slow("deep", UCD(**SMALL)),
    ],
)
def test_mean_gradient_is_that_of_the_negative_log_likelihood(name: str, estimator: UCD) -> None:
    graph, params, data = problem(name)
    wanted = jax.tree.map(lambda g: -np.asarray(g), exact.grad_log_likelihood(graph, params, data))
    state, made = estimator.init(graph, params, data, ROWS, key(0)), []
    for seed in range(BATCHES):
        out = estimate(estimator, graph, params, state, data, key(seed + 1))
        made.append(out.gradient)
        state = out.state
        assert 0.3 < out.metrics["acceptance"] < 1
        assert "posterior_acceptance" not in out.metrics  # pairs on the posterior move layer by layer
    count = sum(g.size for g in jax.tree.leaves(wanted))
    for factor, value in wanted.items():
        assert_rows_law(np.stack([np.asarray(g[factor]) for g in made]), value, count)


@pytest.mark.parametrize("pool", often(["data", "persistent"], "persistent"))
def test_the_pool_owes_nothing_to_the_pairs_and_holds_the_data(pool: str) -> None:
    graph, params, data = problem("rbm")
    rows = {tuple(row) for row in np.asarray(data["a"])}
    few, many = (UCD(k=1, num_pairs=n, pool=pool, **SMALL) for n in (5, 9))
    first = few.init(graph, params, data, ROWS, key(0))
    assert {b: v.shape for b, v in first.pool.items()} == {"a": (30, 3), "b": (30, 2)}
    moved = [estimate(e, graph, params, first, data, key(1)).state.pool for e in (few, many)]
    jax.tree.map(np.testing.assert_array_equal, *moved)
    assert (np.asarray(moved[0]["b"]) != np.asarray(first.pool["b"])).any()
    same = (np.asarray(moved[0]["a"]) == np.asarray(first.pool["a"])).all()
    assert same == (pool == "data")
    assert {tuple(row) for row in np.asarray(first.pool["a"])} <= rows


def test_a_stage_hands_its_pool_on() -> None:
    graph, params, data = problem("rbm")
    persistent = UCD(pool="persistent", **SMALL)
    fresh = persistent.init(graph, params, data, ROWS, key(0))
    other = persistent.init(graph, params, data, ROWS, key(1))
    taken = persistent.adopt(other._replace(negative=jnp.array(7.0)), fresh)
    jax.tree.map(np.testing.assert_array_equal, taken.pool, other.pool)
    assert taken.negative == 7
    chains = PCD(num_chains=4).init(graph, params, data, ROWS, key(1))
    taken = persistent.adopt(chains, fresh)
    np.testing.assert_array_equal(taken.pool["a"], np.asarray(chains["a"])[np.arange(30) % 4])
    rows = UCD(**SMALL)
    assert rows.adopt(other, fresh).pool is fresh.pool  # chosen from the stage's own data
    plain = UCD().init(graph, params, data, ROWS, key(0))
    assert UCD().adopt(other, plain).pool == {}
    assert persistent.adopt(plain, fresh).pool is fresh.pool


def test_moves_of_ones_own_take_the_pool_too() -> None:
    graph, params, data = problem("rbm")
    own = UCD(coupling=mixture_sweep(graph), pool_size=30, num_slots=8)
    named, other = (estimate(e, graph, params, e.init(graph, params, data, ROWS, key(0)), data, key(1))
                    for e in (UCD(**SMALL), own))  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, named.gradient, other.gradient)


def test_what_hardly_helps_is_told_once() -> None:
    accepted = {"acceptance": np.array([0.9, 0.9, 0.004, 0.003])}
    for estimator in (
        UCD(coupling="mixture"),
        UCD(coupling=mixture_sweep(RBM)),
        Centered(UCD(coupling="mixture")),
    ):
        assert "0.0035 of the proposals from the pool were accepted" in (estimator.caution(accepted) or "")
        assert estimator.caution({"acceptance": np.array([0.0, 0.5])}) is None
        assert estimator.caution({"acceptance": np.empty(0)}) is None
    for estimator in (UCD(), UCD(coupling="metropolis"), PCD()):
        assert estimator.caution(accepted) is None


class Wary(PCD):
    def caution(self, told: dict) -> str | None:
        return f"{len(told['gradient_norm'])} steps"


def test_fit_warns_of_what_an_estimator_says_of_its_stage() -> None:
    stage = lambda estimator, n: ebmpp.Stage(num_steps=n, estimator=estimator, optimizer=optax.sgd(0.1))
    with pytest.warns(UserWarning, match="^fit: steps 2 to 4: 3 steps$") as caught:
        schedule = [stage(PCD(num_chains=4), 2), stage(Wary(num_chains=4), 3)]
        ebmpp.fit(RBM, DATA, schedule=schedule, rng_key=jax.random.key(0), progress_bar=False)
    assert len(caught) == 1


@pytest.mark.slow
def test_a_resumed_run_has_the_pool(tmp_path: Path) -> None:
    options = {
        "estimator": UCD(k=1, num_pairs=4, pool="persistent", coupling="mixture", pool_size=8, num_slots=4)
    }
    options |= {"optimizer": optax.sgd(0.1), "rng_key": jax.random.key(0), "progress_bar": False}
    run = lambda n, **more: ebmpp.fit(RBM, DATA, num_steps=n, **options, **more)
    whole = run(6)
    run(3, checkpoint_dir=tmp_path)
    resumed = run(6, checkpoint_dir=tmp_path, resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    jax.tree.map(np.testing.assert_array_equal, whole.estimator_state.pool, resumed.estimator_state.pool)
    assert 0 < float(whole.history.acceptance.mean()) <= 1


def test_what_does_not_go_is_refused() -> None:
    with pytest.raises(ArgumentError, match="UCD: pool is one of .*'persistent'.* not 'rows'"):
        UCD(pool="rows")
    with pytest.raises(ArgumentError, match="pool_size is an int of at least 1, not 0"):
        UCD(pool_size=0)
    graph = gated()
    with pytest.raises(IntractableError, match="in two layers"):
        UCD(coupling="mixture").init(graph, graph.init(jax.random.key(0)), {"a": jnp.ones((3, 2))}, 3, key(0))
    holes = Observed.where_finite(np.where(np.arange(9) == 2, np.nan, DATA))
    with pytest.raises(
        StateError, match='missing entries, so no pool is made of them; give pool="persistent"'
    ):
        ebmpp.fit(
            RBM, holes, estimator=UCD(**SMALL), num_steps=1, rng_key=jax.random.key(0), progress_bar=False
        )


@pytest.mark.slow
def test_rows_that_lack_entries_train_with_persistent_chains_in_the_pool() -> None:
    graph, params, data = problem("rbm")
    estimator = UCD(pool="persistent", num_pairs=8, **SMALL)
    batch = Batch.of(data, {"a": jnp.asarray(np.arange(ROWS)[:, None] % 3 != np.arange(3))})
    state = estimator.init(graph, params, data, ROWS, key(0))
    made = jax.jit(lambda s: estimator.estimate(graph, params, s, batch, key(1)))(state)
    assert 0.3 < made.metrics["acceptance"] and "posterior_meeting_time_mean" in made.metrics
