# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased contrastive divergence: mean gradients, adaptive windows, states and arguments.

Tests estimators/pairs.py.
"""

import itertools
from typing import Any

import networkx as nx
import numpy as np
import pytest
from ucd_tools import assert_unbiased, initial, key, problem, step
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, Bias, FactorGraph, TemperedPCD
from ebmpp.contrib import FPCD, LocalModeUCD, metropolis_sweep
from ebmpp.core import random
from ebmpp.coupling.accumulators import EnergyGradient, MarginalGradient
from ebmpp.coupling.slots import Outcome, Window
from ebmpp.errors import ArgumentError, IntractableError
from ebmpp.estimators import Centered, Quantile, TargetCost, TargetVariance
from ebmpp.estimators.phases import pair_metrics
from ebmpp.moves import gibbs_sweep, mixture_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from helpers import assert_rows_law, nightly

ADAPTIVE = UCD(num_slots=8)
SMALL = {"method": "mixture", "pool_size": 30, "num_slots": 8}


def ones(key: jax.Array) -> dict[str, jax.Array]:
    """A start of the visible block alone."""
    return {"v": jnp.ones(4)}


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("rbm", ADAPTIVE),
        nightly("rbm", UCD(k=1, init="uniform", marginalize="h", num_slots=8)),
        nightly(
            "deep", UCD(k=1, num_slots=8)
        ),  # the positive phase is a second set of pairs
        nightly("rbm", UCD(k=1, num_slots=8)),
        nightly("rbm", UCD(m=0, num_slots=8)),
        nightly("rbm", UCD(m=3, num_slots=8)),
        nightly("rbm", UCD(length=TargetVariance(0.4), num_slots=8)),
        nightly("rbm", UCD(length=TargetCost(12.0), num_slots=8)),
        nightly("rbm", UCD(init="persistent", num_pairs=300, num_slots=8)),
        nightly("rbm", UCD(k=1, init=ones, num_slots=8)),
        nightly("gaussian", UCD(k=2, m=4, lag=2, marginalize="layers", num_slots=8)),
        nightly("deep", UCD(num_slots=8, init="local_mode", marginalize="layers")),
        nightly(
            "deep",
            UCD(num_slots=8, init="persistent", marginalize=("h1",), coupling="common"),
        ),
        nightly(
            "deep", LocalModeUCD(num_slots=8)
        ),  # so small that uniform proposals are accepted
    ],
)
def test_mean_gradient_matches_exact_gradient(name: str, estimator: UCD) -> None:
    metrics = assert_unbiased(estimator, name)
    assert all(m["num_unmet"] == 0 for m in metrics)
    assert max(m["meeting_time_max"] - m["lag"] for m in metrics) > 2


@pytest.mark.nightly
def test_training_with_chains_that_keep_to_the_data_is_reported() -> None:
    bits = ebmpp.FactorGraph.from_networkx(nx.complete_graph(6), Bernoulli, shared=True)
    rows = np.array(
        [x for x in itertools.product((0, 1), repeat=6) if sum(x) == 3], np.float32
    )
    options = {
        "estimator": UCD(num_pairs=100),
        "optimizer": optax.sgd(1e-4),
        "num_steps": 15,
    }
    options |= {"rng_key": zoo.KEY, "progress_bar": False}
    fit = lambda penalty: ebmpp.fit(
        bits,
        rows,
        params={"x": jnp.full(6, 5 * penalty), "x:x": jnp.float32(-2 * penalty)},
        **options,
    )
    with pytest.warns(UserWarning, match="overlap z"):
        fit(50.0)
    # sound: a warning would be an error
    assert fit(0.3).history["meeting_time_max"].max() > 3


def test_adaptive_window_depends_on_past_only() -> None:
    first = initial(ADAPTIVE, "rbm")
    assert (float(first.negative), float(first.positive), int(first.seen)) == (1, 1, 0)
    lengths = {}
    for past, lag in ((1.0, 1), (2.4, 2), (2.6, 3), (0.1, 1), (60.0, 60)):
        # the tenth step is next
        state = first._replace(negative=jnp.float32(past), seen=jnp.int32(9))
        results = [step(ADAPTIVE, "rbm", state, seed) for seed in (1, 2)]
        for result in results:  # whatever happens in the step itself
            assert tuple(int(result.metrics[name]) for name in ("lag", "k", "m")) == (
                lag,
                lag,
                2 * lag,
            )
        lengths[past] = float(results[0].state.negative)
    assert lengths[2.4] != 2.4
    # 0.9 of the past and 0.1 of the quantile of this step's meeting times, which are
    # short
    assert 54 <= lengths[60.0] < 55
    metrics = [
        step(ADAPTIVE, "rbm", first._replace(negative=jnp.float32(n)), 1).metrics
        for n in (1, 60)
    ]
    short, long = metrics
    assert (
        0.1 < short["corrected"] < 1
        and 1 < short["meeting_time_mean"] < short["meeting_time_max"]
    )
    assert long["corrected"] == 0 and 60 < long["meeting_time_max"] < 120


@pytest.mark.nightly
def test_early_steps_have_equal_weight_in_the_adaptive_lag() -> None:
    past, lengths = initial(ADAPTIVE, "rbm")._replace(negative=jnp.float32(100.0)), {}
    for seen in (0, 1, 3, 9, 50):
        state = past._replace(seen=jnp.int32(seen))
        lengths[seen] = float(step(ADAPTIVE, "rbm", state, 2).state.negative)
    # the quantile of this step's times: there was no step before
    assert 1 <= lengths[0] < 15
    for seen, share in ((1, 1 / 2), (3, 1 / 4), (9, 1 / 10), (50, 1 / 10)):
        assert lengths[seen] == pytest.approx(
            100 + share * (lengths[0] - 100), rel=1e-5
        )


@pytest.mark.parametrize("allow_unmet", [False, nightly(True)])
def test_unmet_pairs_make_the_gradient_nan_unless_allowed(allow_unmet: bool) -> None:
    estimator = UCD(k=1, max_sweeps=2, allow_unmet=allow_unmet, num_slots=8)
    result = step(estimator, "rbm", initial(estimator, "rbm"), 1)
    assert result.metrics["num_unmet"] > 0
    assert all(
        (np.isfinite(g) if allow_unmet else np.isnan(g)).all()
        for g in result.gradient.values()
    )


def test_marginal_gradients_have_the_same_mean_and_lower_variance() -> None:
    graph = zoo.graph("deep")
    draws, num = zoo.oracle("deep").draw(np.random.default_rng(0), 4000), 4000
    target = Target(graph, zoo.params("deep"))
    unit, jobs = jnp.ones(1), jnp.zeros(1, int)

    def sample(accumulator: Any) -> np.ndarray:
        def gradient(x: Any) -> Any:
            row = {b: v[None] for b, v in x.items()}
            return accumulator.add(target, accumulator.init(target, 1), row, unit, jobs)

        leaves = jax.tree.leaves(jax.jit(jax.vmap(gradient))(draws))
        return np.concatenate([np.asarray(g).reshape(num, -1) for g in leaves], axis=1)

    plain = sample(EnergyGradient())
    for groups in ((("h1",),), (("h1",), ("h2",)), graph.layers):
        summed = sample(MarginalGradient(groups))
        assert summed.var(0).sum() < 0.95 * plain.var(0).sum()
        assert_rows_law(summed - plain, 0.0)  # draw by draw


def test_chains_of_another_estimator_are_adopted() -> None:
    estimator = UCD(init="persistent", num_pairs=5)
    fresh = initial(estimator, "rbm")
    chains = initial(PCD(num_chains=3), "rbm", 1)
    adopted = estimator.adopt(chains, fresh).chains
    for b, v in chains.items():
        np.testing.assert_array_equal(adopted[b], np.asarray(v)[[0, 1, 2, 0, 1]])
    fast = initial(FPCD(num_chains=5), "rbm", 1)
    np.testing.assert_array_equal(
        estimator.adopt(fast, fresh).chains["v"], fast.chains["v"]
    )
    tempered = TemperedPCD(num_chains=5, num_temperatures=3)
    for other in (tempered, Centered(tempered)):
        state = initial(other, "rbm", 1)
        coldest = {
            b: v[:, -1] for b, v in getattr(state, "inner", state).chains.items()
        }
        jax.tree.map(
            np.testing.assert_array_equal, estimator.adopt(state, fresh).chains, coldest
        )
    for before in ((), {"negative": jnp.ones(())}):  # nothing to adopt
        assert estimator.adopt(before, fresh).chains is fresh.chains
    plain = initial(UCD(), "rbm")
    assert UCD().adopt(chains, plain) is plain
    past = fresh._replace(
        negative=jnp.array(30.0), positive=jnp.array(2.0), seen=jnp.array(4)
    )
    adopted = UCD().adopt(past, plain)
    assert (float(adopted.negative), float(adopted.positive), int(adopted.seen)) == (
        30,
        2,
        4,
    )
    assert adopted.chains == {}


@pytest.mark.nightly
def test_pools_are_adopted_from_stage_to_stage() -> None:
    chains, plain = initial(PCD(num_chains=3), "rbm", 1), initial(UCD(), "rbm")
    pooled = UCD(pool="persistent", **SMALL)
    fresh, other = (initial(pooled, "rbm", seed) for seed in (0, 1))
    jax.tree.map(
        np.testing.assert_array_equal, pooled.adopt(other, fresh).pool, other.pool
    )
    adopted = pooled.adopt(chains, fresh)
    np.testing.assert_array_equal(
        adopted.pool["v"], np.asarray(chains["v"])[np.arange(30) % 3]
    )
    # chosen from the stage's own data
    assert UCD(**SMALL).adopt(other, fresh).pool is fresh.pool
    assert (
        UCD().adopt(other, plain).pool == {}
        and pooled.adopt(plain, fresh).pool is fresh.pool
    )


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, (7, 14, 7)),
        ({"m": 0}, (7, 7, 7)),
        ({"m": 3}, (7, 10, 7)),
        ({"lag": 2}, (7, 9, 2)),
        ({"k": 3, "lag": 2}, (3, 3, 2)),
        ({"k": 3, "m": 5}, (3, 5, 1)),
        ({"max_sweeps": 5}, (7, 11, 4)),  # the lag stays below the limit
    ],
)
def test_window_follows_arguments(
    options: dict[str, Any], window: tuple[int, ...]
) -> None:
    assert tuple(int(n) for n in UCD(**options).window(jnp.float32(7.2))[:3]) == window


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Quantile, {"q": 1.0}, "q .*1"),
        (TargetVariance, {"target": 0.0}, "target .*0"),
        (TargetCost, {"target": 0.5}, "target .*0.5"),
        (UCD, {"k": -1}, "k .*-1"),
        (UCD, {"k": 1.0}, "k .*1.0"),
        (UCD, {"num_pairs": 0}, "num_pairs .*0"),
        (UCD, {"lag": 0}, "lag .*0"),
        (UCD, {"max_sweeps": 1}, "max_sweeps .*1"),
        (UCD, {"k": 3, "m": 2}, "m .*3, got 2"),
        (UCD, {"init": "noise"}, "init .*'noise'"),
        (UCD, {"pool": "rows"}, "pool .*'rows'"),
        (UCD, {"length": 0.95}, "length .*0.95"),
        (UCD, {"length": TargetVariance(1.0), "m": 0}, "length=TargetVariance.*1.0"),
        (UCD, {"length": TargetVariance(2.0), "k": 3}, "length=TargetVariance.*'k': 3"),
        (UCD, {"length": TargetCost(9.0), "m": 5}, "length=TargetCost.*'m': 5"),
    ],
)
def test_invalid_arguments_raise(
    make: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(**options)


def test_couplings_and_marginalized_blocks_are_checked_before_training() -> None:
    assert hash(UCD(coupling=["maximal", "common"])) == hash(
        UCD(coupling=("maximal", "common"))
    )
    graph, params, data = problem("deep")
    for estimator, error, message in (
        (UCD(coupling="crn"), ArgumentError, "'crn'"),
        (UCD(coupling=("maximal",)), ArgumentError, "2 layers"),
        (UCD(method="mixture", marginalize="h"), ArgumentError, "marginalize 'h'"),
        (UCD(marginalize=("h1", "h2")), IntractableError, "'h1' and 'h2' interact"),
    ):
        with pytest.raises(error, match=message):
            estimator.init_state(graph, params, data, 4, key(0))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("rbm", UCD(**SMALL)),
        ("rbm", UCD(k=1, pool="persistent", **SMALL)),
        ("gaussian", UCD(**SMALL)),
        ("deep", UCD(**SMALL)),
    ],
)
def test_mean_gradient_with_a_pool_matches_exact_gradient(
    name: str, estimator: UCD
) -> None:
    metrics = assert_unbiased(estimator, name)
    assert all(0.2 < m["acceptance"] < 1 for m in metrics)
    # pairs on the posterior move layer by layer
    assert "posterior_acceptance" not in metrics[0]


@pytest.mark.nightly
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
    custom = UCD(
        k=1,
        num_pairs=5,
        pool=pool,
        **{**SMALL, "method": "auto", "coupling": mixture_sweep(zoo.graph("rbm"))},
    )
    gradients = [step(e, "rbm", first, 1).gradient for e in (short, custom)]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


def test_pools_that_hardly_help_and_late_pairs_are_reported() -> None:
    accepted = {"acceptance": np.array([0.9, 0.9, 0.004, 0.003])}
    mixture = UCD(method="mixture")
    for estimator in (
        mixture,
        UCD(coupling=mixture_sweep(zoo.graph("rbm"))),
        Centered(mixture),
    ):
        assert "0.0035" in (estimator.diagnose(accepted) or "")
        assert estimator.diagnose({"acceptance": np.array([0.0, 0.5])}) is None
    for estimator in (UCD(), UCD(coupling=metropolis_sweep), PCD()):
        assert estimator.diagnose(accepted) is None
    # most pairs meet where they start
    late = {
        "meeting_time_max": np.full(9, 900.0),
        "lag": np.ones(9),
    }
    assert (
        "the last pair" in (UCD().diagnose(late) or "")
        and UCD(lag=1).diagnose(late) is None
    )
    graph = FactorGraph({"a": Bernoulli(2)}, factors=[Bias("a")])
    with pytest.raises(IntractableError, match="several layers"):
        mixture.init_state(
            graph, graph.init(zoo.KEY), {"a": jnp.ones((3, 2))}, 3, key(0)
        )


@pytest.mark.nightly
def test_persistent_chains_move_by_one_sweep_whatever_the_pairs_do() -> None:
    graph, params, _ = problem("rbm")
    estimator = UCD(k=1, init="persistent", num_pairs=6, num_slots=4)
    states = [initial(estimator, "rbm")]
    for seed in range(1, 4):
        states.append(step(estimator, "rbm", states[-1], seed).state)
    for before, after in itertools.pairwise(states):
        assert any((before.chains[b] != after.chains[b]).any() for b in before.chains)
    keys = random.fold_in(random.fold_in(key(1), 3), jnp.arange(6))
    alone, _ = draw_sweep(
        Target(graph, params), states[0].chains, gibbs_sweep(graph), keys
    )
    jax.tree.map(np.testing.assert_array_equal, alone, states[1].chains)


class Reporting(PCD):
    """Reports the number of its steps."""

    def diagnose(self, history: dict) -> str | None:
        return f"{len(history['gradient_norm'])} steps"


@pytest.mark.nightly
def test_fit_warns_of_what_an_estimator_reports_of_its_stage() -> None:
    stages = [
        ebmpp.Stage(num_steps=n, estimator=e, optimizer=optax.sgd(0.1))
        for n, e in ((2, PCD(num_chains=4)), (3, Reporting(num_chains=4)))
    ]
    with pytest.warns(UserWarning, match="^fit: steps 2 to 4: 3 steps$") as caught:
        ebmpp.fit(
            zoo.graph("rbm"),
            zoo.rows("rbm"),
            schedule=stages,
            rng_key=zoo.KEY,
            progress_bar=False,
        )
    assert len(caught) == 1


@jax.jit
def _metrics(times: jax.Array) -> dict[str, jax.Array]:
    window = Window(*(jnp.int32(n) for n in (2, 4, 2, 0)))
    return pair_metrics(
        Outcome((), times, jnp.float32(1), None, jnp.float32(0)), window
    )


def metrics(*times: int) -> dict[str, np.ndarray]:
    return jax.device_get(_metrics(np.array(times, np.int32)))


def test_unmet_pairs_are_counted_separately() -> None:
    partly = metrics(3, 7, -1, 5)
    assert (
        partly["num_unmet"],
        partly["meeting_time_max"],
        partly["meeting_time_mean"],
    ) == (1, 7, 5)
    np.testing.assert_allclose(
        partly["sweeps"], ((4 + 3 - 2) + (7 + 7 - 2) + (5 + 5 - 2)) / 3, rtol=1e-6
    )
    assert partly["corrected"] == 0.75  # later than k + lag, or never
    unmet = metrics(-1, -1, -1, -1)
    names = ("num_unmet", "meeting_time_mean", "sweeps", "corrected")
    assert [unmet[name] for name in names] == [4, 0, 0, 1]


def test_sums_of_long_times_do_not_overflow() -> None:
    long = metrics(*[2**29] * 4)
    assert long["meeting_time_mean"] == 2**29 and long["num_unmet"] == 0
    np.testing.assert_allclose(long["sweeps"], 2**30, rtol=1e-6)
