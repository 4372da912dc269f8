# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import itertools
from typing import Any

import numpy as np
import pytest
from ucd_tools import BATCHES, ROWS, estimate, key, problem

import jax
import jax.numpy as jnp
import optax

from ebmpp import (
    FPCD,
    PCD,
    UCD,
    Bernoulli,
    Gaussian,
    Spin,
    TemperedPCD,
    exact,
    fit,
    layered,
    perfect_sample,
)
from ebmpp.core import random
from ebmpp.errors import IntractableError
from ebmpp.estimators import Centered, LocalModeUCD
from ebmpp.estimators.base import Batch
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.layer import gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from ebmpp.sampling.accumulators import EnergyGradient, MarginalGradient
from ebmpp.sampling.search import near_modes
from ebmpp.training.steps import estimate_step
from helpers import assert_rows_law, slow


def ones(key: jax.Array) -> dict[str, jax.Array]:
    return {"a": jnp.ones(3)}


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("rbm", UCD(k=1, num_slots=8)),
        ("rbm", UCD(num_slots=8)),
        slow("rbm", UCD(target_variance=0.4, num_slots=8)),
        slow("rbm", UCD(m=0, num_slots=8)),
        slow("rbm", UCD(m=3, num_slots=8)),
        slow("gaussian", UCD(k=2, m=4, lag=2, num_slots=8)),
        slow("deep", UCD(k=1, num_slots=8)),  # the positive phase is a second set of pairs
        ("rbm", UCD(start="persistent", num_pairs=300, num_slots=8)),
        slow("rbm", UCD(k=1, start="uniform", num_slots=8, marginalize="b")),
        slow("rbm", UCD(k=1, start=ones, num_slots=8)),
        slow("rbm", UCD(target_variance=1.3, num_slots=8)),
        slow("rbm", UCD(target_cost=12.0, num_slots=8)),
        slow("gaussian", UCD(k=2, num_slots=8, marginalize="layers")),
        slow("deep", UCD(num_slots=8, start="local_mode", marginalize="layers")),
        slow("deep", UCD(num_slots=8, start="persistent", marginalize=("h1",), coupling="common")),
        # so small that uniform proposals are accepted, and the name is true
        slow("deep", LocalModeUCD(num_slots=8)),
    ],
)
def test_mean_gradient_is_that_of_the_negative_log_likelihood(name: str, estimator: UCD) -> None:
    graph, params, data = problem(name)
    wanted = jax.tree.map(lambda g: -np.asarray(g), exact.grad_log_likelihood(graph, params, data))
    state = estimator.init(graph, params, data, ROWS, key(0))
    made = []
    for seed in range(BATCHES):
        out = estimate(estimator, graph, params, state, data, key(seed + 1))
        made.append(out.gradient)
        state = out.state  # an adaptive lag moves, and every step stays unbiased given the past
        assert out.metrics["num_unmet"] == 0
    assert np.abs(wanted["a"]).max() > 0.1
    count = sum(g.size for g in jax.tree.leaves(wanted))
    for factor, value in wanted.items():
        assert_rows_law(np.stack([np.asarray(g[factor]) for g in made]), value, count)


def test_steps_of_which_it_was_measured_are_compiled_quick() -> None:
    few, real = layered(v=Spin(4), h=Bernoulli(3)), layered(v=Gaussian(4), h=Bernoulli(3))
    whole = [UCD(), Centered(UCD()), UCD(coupling="common")]
    assert all(estimator.quick(few) and not estimator.quick(real) for estimator in whole)
    others = [UCD(marginalize="h"), UCD(coupling="mixture"), LocalModeUCD(), PCD()]
    assert [estimator.quick(few) for estimator in others] == [False] * 4
    assert estimate_step._program((few, UCD()))._quick() and not estimate_step._program((few, PCD()))._quick()


def test_adaptive_lag_follows_the_past_only() -> None:
    graph, params, data = problem("rbm")
    estimator = UCD(num_slots=8)
    assert estimator.adaptive and not UCD(k=1).adaptive
    first = estimator.init(graph, params, data, ROWS, key(0))
    assert first == (1.0, 1.0, {}, 0, {})
    first = first._replace(seen=jnp.int32(9))  # the next step is the tenth
    for past, lag in ((1.0, 1), (2.4, 2), (2.6, 3), (0.1, 1), (30.0, 30)):
        made = [
            estimate(estimator, graph, params, first._replace(negative=jnp.float32(past)), data, key(seed))
            for seed in range(2)
        ]
        for out in made:  # whatever happens in the step itself
            assert tuple(int(out.metrics[name]) for name in ("lag", "k", "m")) == (lag, lag, 2 * lag)
        moved = {float(out.state.negative) for out in made}
        assert all(value != past for value in moved)
    # 0.9 of the past and 0.1 of the quantile of this step's times to meet, which are small here
    assert 27 <= float(made[0].state.negative) < 28


def test_metrics_tell_the_meeting_times() -> None:
    graph, params, data = problem("rbm")
    state = UCD().init(graph, params, data, ROWS, key(0))
    metrics = estimate(UCD(k=1, num_slots=8), graph, params, state, data, key(1)).metrics
    assert set(metrics) == {
        "meeting_time_mean",
        "meeting_time_max",
        "num_unmet",
        "lag",
        "k",
        "m",
        "sweeps",
        "trials",
        "corrected",
    }
    assert 1 < metrics["meeting_time_mean"] < metrics["meeting_time_max"]
    assert metrics["trials"] >= 1


@pytest.mark.slow  # tests/test_training.py has the same of fit
def test_unmet_pairs_make_the_gradient_not_a_number_unless_allowed() -> None:
    graph, params, data = problem("rbm")
    state = UCD().init(graph, params, data, ROWS, key(0))
    strict = estimate(UCD(k=1, max_sweeps=2, num_slots=8), graph, params, state, data, key(1))
    assert strict.metrics["num_unmet"] > 0
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(strict.gradient))
    lax = estimate(UCD(k=1, max_sweeps=2, allow_unmet=True, num_slots=8), graph, params, state, data, key(1))
    assert lax.metrics["num_unmet"] == strict.metrics["num_unmet"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(lax.gradient))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": -1}, "UCD: k is an int of at least 0, not -1"),
        ({"k": 1.0}, "UCD: k is an int of at least 0, not 1.0"),
        ({"num_pairs": 0}, "UCD: num_pairs is an int of at least 1, not 0"),
        ({"lag": 0}, "UCD: lag is an int of at least 1, not 0"),
        ({"max_sweeps": 0}, "UCD: max_sweeps is an int of at least 1, not 0"),
        ({"k": 3, "m": 2}, "UCD: m is at least k; got k=3, m=2"),
        ({"quantile": 1.0}, r"quantile is a number in \(0, 1\)"),
        ({"smoothing": 1.0}, r"smoothing is a number in \[0, 1\)"),
    ],
)
def test_numbers_out_of_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UCD(**given)


def test_coupling_is_checked_against_the_layers_before_training() -> None:
    graph, params, data = problem("rbm")
    assert hash(UCD(coupling=["maximal", "common"])) == hash(UCD(coupling=("maximal", "common")))
    with pytest.raises(ValueError, match="coupling 'crn' is unknown"):
        UCD(coupling="crn").init(graph, params, data, ROWS, key(0))
    with pytest.raises(ValueError, match="names 1 layers, and the sweep has 2"):
        UCD(coupling=("maximal",)).init(graph, params, data, ROWS, key(0))


# -- starts, sums, targets -----------------------------------------------------------------------


def test_persistent_chains_go_on_by_one_sweep_whatever_the_pairs_do() -> None:
    graph, params, data = problem("rbm")
    estimator = UCD(k=1, start="persistent", num_pairs=6, num_slots=4)
    first = estimator.init(graph, params, data, ROWS, key(0))
    assert {b: v.shape for b, v in first.chains.items()} == {"a": (6, 3), "b": (6, 2)}
    moved = [first]
    for seed in range(1, 4):
        moved.append(estimate(estimator, graph, params, moved[-1], data, key(seed)).state)
    for before, after in itertools.pairwise(moved):
        assert any((before.chains[b] != after.chains[b]).any() for b in before.chains)
    # what the pairs do is no business of the chains: they are those of the sweep alone
    own = random.fold_in(random.fold_in(key(1), 3), jnp.arange(6))
    alone, _ = draw_sweep(Target(graph, params), first.chains, gibbs_sweep(graph), own)
    jax.tree.map(np.testing.assert_array_equal, alone, moved[1].chains)


def test_chains_of_another_estimator_are_taken_over() -> None:
    graph, params, data = problem("rbm")
    estimator = UCD(start="persistent", num_pairs=5)
    fresh = estimator.init(graph, params, data, ROWS, key(0))
    chains = PCD(num_chains=3).init(graph, params, data, ROWS, key(1))
    taken = estimator.adopt(chains, fresh).chains
    for b, v in chains.items():
        np.testing.assert_array_equal(taken[b], np.asarray(v)[[0, 1, 2, 0, 1]])
    fast = FPCD(num_chains=5).init(graph, params, data, ROWS, key(1))
    np.testing.assert_array_equal(estimator.adopt(fast, fresh).chains["a"], fast.chains["a"])
    for before in ((), {"negative": jnp.ones(())}):  # nothing to take
        assert estimator.adopt(before, fresh).chains is fresh.chains
    other = UCD().init(graph, params, data, ROWS, key(0))
    assert UCD().adopt(chains, other) is other


def test_coldest_replicas_and_past_times_are_taken_over() -> None:
    graph, params, data = problem("rbm")
    estimator = UCD(start="persistent", num_pairs=5)
    fresh = estimator.init(graph, params, data, ROWS, key(0))
    tempered = TemperedPCD(num_chains=5, num_temperatures=3)
    for before in (tempered, Centered(tempered)):
        state = before.init(graph, params, data, ROWS, key(1))
        taken = estimator.adopt(state, fresh).chains
        replicas = getattr(state, "inner", state).chains
        jax.tree.map(np.testing.assert_array_equal, taken, {b: v[:, -1] for b, v in replicas.items()})
    went = fresh._replace(negative=jnp.array(30.0), positive=jnp.array(2.0), seen=jnp.array(4))
    taken = UCD().adopt(went, UCD().init(graph, params, data, ROWS, key(0)))
    assert (float(taken.negative), float(taken.positive), taken.chains, int(taken.seen)) == (30, 2, {}, 4)


def test_early_steps_weigh_alike() -> None:
    graph, params, data = problem("rbm")
    estimator = UCD(num_slots=8)
    past = estimator.init(graph, params, data, ROWS, key(0))._replace(negative=jnp.float32(100.0))
    left = {}
    for seen in (0, 1, 3, 9, 50):
        state = past._replace(seen=jnp.int32(seen))
        left[seen] = float(estimate(estimator, graph, params, state, data, key(2)).state.negative)
    now = left[0]  # the quantile of this step's times to meet: there was no step before
    assert 1 <= now < 10
    for seen, share in ((1, 1 / 2), (3, 1 / 4), (9, 1 / 10), (50, 1 / 10)):
        assert left[seen] == pytest.approx(100 + share * (now - 100), rel=1e-5)


def test_summing_layers_out_lowers_the_variance() -> None:
    graph, params, _ = problem("deep")
    groups = {"h1": (("h1",),), "h1 of a posterior": (("h1",), ("h2",)), "layers": graph.layers}
    draws = perfect_sample(graph, params, jax.random.key(0), num_samples=4000)
    one, jobs, target = jnp.ones(1), jnp.zeros(1, int), Target(graph, params)

    def spread(accumulator: Any) -> tuple[float, np.ndarray]:
        def gradient(x: Any) -> Any:
            row = {b: v[None] for b, v in x.items()}
            return accumulator.add(target, accumulator.init(target, 1), row, one, jobs)

        made = jax.tree.leaves(jax.jit(jax.vmap(gradient))(draws))
        flat = np.concatenate([np.asarray(g).reshape(4000, -1) for g in made], axis=1)
        return flat.var(0, ddof=1).sum(), flat

    plain, whole = spread(EnergyGradient())
    for name, summed in groups.items():
        made, each = spread(MarginalGradient(summed))
        assert made < 0.9 * plain, name
        assert_rows_law(each - whole, 0.0)  # of one mean, draw by draw


@pytest.mark.parametrize(
    ("given", "window"),
    [
        ({}, (7, 14, 7)),
        ({"m": 0}, (7, 7, 7)),
        ({"m": 3}, (7, 10, 7)),
        ({"lag": 2}, (7, 9, 2)),
        ({"k": 3, "lag": 2}, (3, 3, 2)),
        ({"k": 3, "m": 5}, (3, 5, 1)),
        ({"max_sweeps": 5}, (7, 11, 4)),
    ],
)
def test_the_window_is_twice_the_lag_unless_told(given: dict[str, Any], window: tuple[int, ...]) -> None:
    assert tuple(int(n) for n in UCD(**given).window(jnp.float32(7.2))[:3]) == window


def test_the_share_of_pairs_with_a_correction_is_told() -> None:
    graph, params, data = problem("rbm")
    state = UCD().init(graph, params, data, ROWS, key(0))
    estimator = UCD(num_slots=8)  # one program: k and lag are what the state says
    short, long = (
        estimate(estimator, graph, params, state._replace(negative=jnp.float32(n)), data, key(1)).metrics
        for n in (1, 60)
    )
    assert 0.1 < short["corrected"] < 1 and short["meeting_time_max"] > 2
    assert long["corrected"] == 0 and 60 < long["meeting_time_max"] < 120


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"start": "noise"}, "start is one of .*'persistent'.* not 'noise'"),
        ({"target_variance": 0.0}, "target_variance is a number above 0, not 0.0"),
        ({"target_variance": 1.0, "m": 0}, "target_variance is a number above 1, not 1.0"),
        ({"target_cost": 0.5}, "target_cost is a number above 1, not 0.5"),
        ({"target_variance": 2.0, "k": 3}, "give one target, and leave k"),
        ({"target_variance": 2.0, "target_cost": 9.0}, "give one target"),
        (
            {"target_variance": 2.0, "lag": 1},
            r"'target_variance': 2.0} with {'lag': 1}: .* leave out lag and m",
        ),
        ({"target_cost": 9.0, "m": 5}, r"{'target_cost': 9.0} with {'m': 5}: .* leave out lag and m"),
    ],
)
def test_starts_and_targets_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UCD(**given)


def test_blocks_to_sum_out_are_checked_before_training() -> None:
    graph, params, data = problem("deep")
    with pytest.raises(IntractableError, match="blocks 'h1' and 'h2' interact"):
        UCD(marginalize=("h1", "h2")).init(graph, params, data, ROWS, key(0))
    with pytest.raises(ValueError, match=r"marginalize names \['h'\], and the blocks are"):
        UCD(marginalize="h").init(graph, params, data, ROWS, key(0))


@pytest.mark.slow
def test_local_modes_of_a_model_of_real_size_meet_at_once_and_say_so() -> None:
    graph = layered(v=Spin(60), h=Spin(40))
    params = graph.init(jax.random.key(0), scheme="orthogonal")
    data = {"v": 2.0 * jax.random.bernoulli(jax.random.key(1), shape=(20, 60)) - 1}
    estimator = LocalModeUCD(num_slots=8)
    made = estimate(estimator, graph, params, estimator.init(graph, params, data, 20, key(0)), data, key(1))
    assert made.metrics["acceptance"] == 0 and made.metrics["corrected"] == 0
    assert made.metrics["meeting_time_max"] == 1
    # what is left is the mean over the starts: one Gibbs sweep from modes
    pairs = random.fold_in(random.fold_in(key(1), 0), jnp.arange(20))

    @jax.jit
    def gradient(params: Any) -> Any:
        free = initial_rows(graph, graph.families, pairs)
        modes = near_modes(Target(graph, params), free, pairs)

        def loss(p: Any) -> jax.Array:
            model = graph.free_energy(p, {"v": modes["v"]}) + graph.free_energy(p, {"h": modes["h"]})
            return graph.free_energy(p, data).mean() - model.mean() / 2

        return jax.grad(loss)(params)

    wanted = gradient(params)
    for name, value in wanted.items():
        np.testing.assert_allclose(made.gradient[name], value, atol=2e-5)


def test_it_prints_what_was_asked_for() -> None:
    assert repr(UCD(num_pairs=10, k=2)) == "UCD(num_pairs=10, k=2)"
    assert repr(LocalModeUCD(num_pairs=10)) == "LocalModeUCD(num_pairs=10)"
    assert eval(repr(LocalModeUCD(start="uniform"))) == LocalModeUCD(start="uniform")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rbm", "deep"])
def test_weighted_rows_have_the_gradient_of_the_weighted_likelihood(name: str) -> None:
    graph, params, data = problem(name)
    weights = jnp.tile(jnp.array([0.5, 2.5, 0.0, 1.5]), ROWS // 4) / ROWS  # of sum 1.125
    wanted = jax.grad(lambda p: -(weights @ exact.log_likelihood(graph, p, data)))(params)
    estimator = UCD(k=2, num_slots=8)
    step = jax.jit(lambda s, pair: estimator.estimate(graph, params, s, Batch(data, weights), pair))
    state = estimator.init(graph, params, data, ROWS, key(0))
    made = [step(state, key(seed + 1)).gradient for seed in range(BATCHES)]
    count = sum(g.size for g in jax.tree.leaves(wanted))
    for factor, value in wanted.items():
        assert_rows_law(np.stack([np.asarray(g[factor]) for g in made]), value, count)


@pytest.mark.slow
def test_a_run_that_begins_amid_deep_modes_is_told_of() -> None:
    graph = layered(v=Bernoulli(8), h=Bernoulli(2))
    weights = np.zeros((8, 2), np.float32)
    weights[:, 0] = 4.2
    params = {"v": np.full(8, -2.1, np.float32), "h": np.array([-16.8, 0], np.float32), "v:h": weights}
    data = np.repeat([[0.0] * 8, [1.0] * 8], 50, axis=0)
    options = {"num_steps": 10, "batch_size": 100, "progress_bar": False, "optimizer": optax.sgd(0.0)}
    with pytest.warns(UserWarning, match="UCD: the last pair of a step took .* times as long as the lag"):
        made = fit(graph, data, rng_key=key(0), params=params, estimator=UCD(), **options)
    assert (made.history.lag == 1).all()  # most pairs meet where they start
    assert UCD(lag=1).caution({"meeting_time_max": np.full(9, 900.0), "lag": np.ones(9)}) is None
