# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Gradients from particle systems, and from weighted persistent chains, against exact ones."""

from annealing_tools import model
import numpy as np
import pytest

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import ParticleUCD, Stage, WeightedPCD, exact, layered
from ebmpp.core import random
from ebmpp.errors import ArgumentError, DivergenceError
from ebmpp.estimators import Batch
from ebmpp.estimators.base import Estimate, Estimator
from helpers import assert_law, assert_rows_law, often

RBM = layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
BARS = ebmpp.data.bars_and_stripes(3)
RUN = {"rng_key": jax.random.key(0), "num_steps": 6, "progress_bar": False}
DRAWS = 300
STARTS = 60


def rows_of(graph: ebmpp.FactorGraph, seed: int = 3) -> dict:
    """Draws of the visible blocks' default laws."""
    keys = random.fold_in(random.key_pair(jax.random.key(seed)), jnp.arange(6))
    from ebmpp.moves.gibbs import initial_rows

    return initial_rows(graph, graph.visible, keys)


def draws(
    graph: ebmpp.FactorGraph, params: dict, estimator: Estimator, before: dict | None = None
) -> Estimate:
    """Independent estimates of one gradient; ``before``: params of a step that went before."""
    batch = Batch.of(rows_of(graph))
    init = estimator.init(graph, before or params, batch.rows, 6, random.key_pair(jax.random.key(1)))

    def one(key: jax.Array) -> Estimate:
        state = init
        if before is not None:
            state = estimator.estimate(graph, before, state, batch, random.fold_in(key, 0, 5)).state
        return estimator.estimate(graph, params, state, batch, key)

    keys = random.fold_in(random.key_pair(jax.random.key(2)), jnp.arange(DRAWS))
    return jax.jit(lambda keys: jax.lax.map(one, keys))(keys)


def assert_unbiased(graph: ebmpp.FactorGraph, params: dict, made: Estimate) -> None:
    exactly = exact.grad_log_likelihood(graph, params, rows_of(graph))
    for name, g in made.gradient.items():
        assert_rows_law(g, -np.asarray(exactly[name]), comparisons=100)


NAMES = ("rbm", "dbm", "categorical", "gaussian", "harmonium", "three layers")


@pytest.mark.parametrize("name", often(NAMES, "rbm", "dbm"))
def test_gradients_are_unbiased(name: str) -> None:
    """So few particles that one system in several is turned down; the deep one has both phases by pairs."""
    graph, params, _ = model(name, 1)
    path = "line" if name == "dbm" else "training"
    before = None if path == "line" else jax.tree.map(lambda a: 0.7 * a, params)
    made = draws(graph, params, ParticleUCD(num_particles=6, path=path, evenness=0.5, max_rungs=8), before)
    assert_unbiased(graph, params, made)
    assert made.metrics["meeting_time_max"].max() > 1 and not made.metrics["num_unmet"].any()
    assert made.metrics["acceptance"].mean() < 0.97


@pytest.mark.slow
def test_more_pairs_and_a_longer_window_are_unbiased_and_vary_less() -> None:
    graph, params, log_z = model("rbm", 1)
    plain = draws(graph, params, ParticleUCD(num_particles=6, evenness=0.5, max_rungs=8, m=0))
    more = draws(graph, params, ParticleUCD(num_particles=6, evenness=0.5, max_rungs=8, m=3, num_pairs=2))
    assert_unbiased(graph, params, plain)
    assert_unbiased(graph, params, more)
    spread = lambda made: sum(float(g.var(0).sum()) for g in made.gradient.values())
    assert spread(more) < 0.3 * spread(plain)
    z = np.exp(np.asarray(more.metrics["log_partition"]) - log_z)
    assert_rows_law(z, 1.0)
    each = np.asarray(more.metrics["log_likelihood"] + more.metrics["log_partition"])
    np.testing.assert_allclose(
        each, exact.log_likelihood(graph, params, rows_of(graph)).mean() + log_z, rtol=1e-4
    )


@pytest.mark.parametrize("path", often(["line", "training"], "training"))
def test_a_run_tells_its_likelihood_and_its_path_follows_training(path: str) -> None:
    ll = lambda p: exact.log_likelihood(RBM, p, BARS).mean()
    estimator = ParticleUCD(num_particles=100, path=path)
    options = RUN | {"num_steps": 150, "optimizer": optax.sgd(0.5)}
    made = ebmpp.fit(RBM, BARS, estimator=estimator, monitors={"ll": ll}, monitor_every=50, **options)
    told = made.history.log_likelihood.values
    for at in (50, 100):
        assert told[at] == pytest.approx(float(made.history.ll.sel(monitor_step=at)), abs=0.3)
    assert made.history.num_rungs[-1] > made.history.num_rungs[0]
    assert made.history.acceptance.min() > 0.5 and made.history.ll[-1] > made.history.ll[0] + 0.3


@pytest.mark.slow
def test_stages_hand_on_the_path() -> None:
    same = ParticleUCD(num_particles=20, path="training", max_rungs=16)
    stages = [
        Stage(num_steps=3, estimator=same),
        Stage(num_steps=2, estimator=same),
    ]
    made = ebmpp.fit(RBM, BARS, schedule=stages, **RUN | {"num_steps": None})
    assert made.estimator_state.seen == 5
    other = ParticleUCD(num_particles=20, path="training", max_rungs=8)
    stages[1] = Stage(num_steps=2, estimator=other)
    made = ebmpp.fit(RBM, BARS, schedule=stages, **RUN | {"num_steps": None})
    assert made.estimator_state.seen == 2


@pytest.mark.parametrize("path", often(["line", "training"], "line"))
def test_too_few_rungs_are_as_even_as_they_can_be_and_told_of(path: str) -> None:
    """They are fitted once, not at every step, as would be where they fell short of what was asked for."""
    graph, params, _ = model("rbm", 1)
    far = jax.tree.map(lambda a: 3 * a, params)
    estimator = ParticleUCD(num_particles=100, path=path, evenness=0.99, max_rungs=8)
    options = RUN | {"optimizer": optax.sgd(0.0), "params": far}
    with pytest.warns(UserWarning, match="at 100% of the steps rungs were less than half as even"):
        made = ebmpp.fit(graph, rows_of(graph), estimator=estimator, **options)
    rungs = made.history.num_rungs.values
    assert 3 <= rungs.max() <= 8 and (rungs == rungs[0]).all()
    assert made.history.evenness.min() > 0.3 and made.estimator_state.asked < 0.95


def test_an_unmet_pair_stops_training() -> None:
    far = jax.tree.map(lambda a: jnp.full_like(a, 8.0), RBM.init(jax.random.key(0)))
    far["v"], far["h"] = -20 * jnp.ones(9), -20 * jnp.ones(4)
    estimator = ParticleUCD(num_particles=2, max_rungs=2, max_systems=3)
    with pytest.raises(DivergenceError, match="coupled pairs had not met: raise max_systems, which is 3"):
        ebmpp.fit(RBM, BARS, estimator=estimator, params=far, **RUN | {"num_steps": 200})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_particles": 1}, "num_particles is an int of at least 2"),
        ({"path": "beta"}, "ParticleUCD: path"),
        ({"k": 2}, "m is at least k; got k=2, m=1"),
        ({"evenness": 1.0}, "ParticleUCD: evenness"),
        ({"max_systems": 2}, "max_systems is at least m \\+ 2"),
        ({"posterior": None}, "ParticleUCD: posterior"),
    ],
)
def test_particle_ucd_refuses(given: dict, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        ParticleUCD(**given)


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", often(["rbm", "dbm"], "rbm"))
def test_weights_follow_the_params(name: str) -> None:
    """Z of the watchers stays unbiased as the params move far, with few of them, so that they resample."""
    graph, params, log_z = model(name, 1)
    posterior = ebmpp.estimators.MeanField() if name == "dbm" else None
    estimator = WeightedPCD(num_chains=50, num_watchers=20, posterior=posterior)
    before = jax.tree.map(lambda a: 0.5 * a, params)
    batch = Batch.of(rows_of(graph))
    step = jax.jit(lambda p, s, key: estimator.estimate(graph, p, s, batch, key))
    told = []
    for i in range(STARTS):
        key = random.fold_in(random.key_pair(jax.random.key(7)), i)
        state = estimator.init(graph, before, batch.rows, 6, random.fold_in(key, 0))
        assert state.watchers is not None and state.watchers.log_weights.shape == (10, 2)
        for share in (0.75, 1.0):
            key = random.fold_in(key, 1)
            made = step(jax.tree.map(lambda a, s=share: s * a, params), state, key)
            state = made.state
        told.append(jax.device_get(made.metrics))
    assert_rows_law(np.exp([m["log_partition"] - log_z for m in told]), 1.0)
    assert np.mean([m["effective_sample_size"] for m in told]) < 49.9


@pytest.mark.slow
def test_many_chains_make_the_exact_gradient() -> None:
    graph, params, log_z = model("rbm", 1)
    before = jax.tree.map(lambda a: 0.7 * a, params)
    estimator = WeightedPCD(num_chains=4000, num_watchers=4000)
    batch = Batch.of(rows_of(graph))
    state = estimator.init(graph, before, batch.rows, 6, random.key_pair(jax.random.key(1)))
    step = jax.jit(lambda p, s, key: estimator.estimate(graph, p, s, batch, key))
    for i, share in enumerate((0.8, 0.9, 1.0)):
        made = step(jax.tree.map(lambda a, s=share: s * a, params), state, random.key_pair(jax.random.key(i)))
        state = made.state
    exactly = exact.grad_log_likelihood(graph, params, batch.rows)
    for name, g in made.gradient.items():
        assert_law(g, -np.asarray(exactly[name]), 0.5 / np.sqrt(2000), comparisons=60)
    told = made.metrics
    assert abs(told["log_partition"] - log_z) < 5 * told["log_partition_error"] < 0.3


def test_weights_that_follow_their_own_noise_are_told_of() -> None:
    estimator = WeightedPCD()
    assert "at 60% of the steps" in (estimator.caution({"resampled": np.array([1, 0, 1, 0, 1])}) or "")
    assert estimator.caution({"resampled": np.array([1, 0, 0, 0])}) is None
    even = np.array([0.9, 0.95, 0.8, 0.95])
    held = ParticleUCD().caution({"longest_stay": np.array([0, 3, 25, 1]), "evenness": even})
    assert held is not None and "turned down 25 others, at step 2 of its stage" in held
    assert ParticleUCD().caution({"longest_stay": np.array([0, 3]), "evenness": even[:2]}) is None
    left = ParticleUCD().caution({"longest_stay": np.array([0, 3]), "evenness": np.array([0.9, 0.04])})
    assert left is not None and "at step 1 of its stage a rung left 4.0% of the particles effective" in left


def test_watchers_may_be_left_out_and_are_islands() -> None:
    made = ebmpp.fit(RBM, BARS, estimator=WeightedPCD(num_chains=20, num_watchers=0), **RUN)
    assert "log_partition" not in made.history and made.estimator_state.watchers is None
    assert {"effective_sample_size", "resampled"} <= set(made.history)
    with pytest.raises(ArgumentError, match="num_watchers is a multiple of 10, at least 20, or 0; got 15"):
        WeightedPCD(num_watchers=15)
