# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Runs on rows with missing entries, and runs of particle estimators."""

from collections.abc import Iterator
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_tools import as_memmap, assert_same_run
from ucd_tools import estimate, exact_gradient, flat, key, two_modes
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import (
    CD,
    PCD,
    UCD,
    Bernoulli,
    Observed,
    ParticleUCD,
    TemperedPCD,
    WeightedPCD,
    layered,
)
from ebmpp.contrib import FPCD, SDCP, Herding, LocalModeUCD
from ebmpp.errors import DataError, DivergenceError
from ebmpp.estimators import Batch, Centered
from ebmpp.estimators.pairs import AdaptiveLength
from helpers import assert_rows_law

pytestmark = pytest.mark.nightly

BARS = np.asarray(ebmpp.data.bars_and_stripes(3), np.float32)
MANY = np.tile(BARS, (6, 1))
MANY = np.where(
    np.random.default_rng(7).random(MANY.shape) < 0.25, np.nan, MANY
).astype(np.float32)
HOLES = MANY[: len(BARS)]
GRAPH = layered(v=Bernoulli(9), h=Bernoulli(4))


def train(data: Any, estimator: Any, **options: Any) -> Any:
    options = {
        "num_steps": 4,
        "optimizer": optax.sgd(0.2),
        "progress_bar": False,
    } | options
    return ebmpp.fit(GRAPH, data, rng_key=zoo.KEY, estimator=estimator, **options)


@pytest.mark.parametrize(
    "estimator",
    [UCD(num_slots=4), PCD(k=5, num_chains=50), CD(k=5)],
    ids=["ucd", "pcd", "cd"],
)
def test_training_on_known_entries_raises_their_likelihood(estimator: Any) -> None:
    data = Observed.where_finite(MANY)
    result = train(data, estimator, num_steps=300, optimizer=optax.adam(0.05))
    for rows, least in ((data, 0.3), (BARS, 0.5)):
        before, after = (
            float(ebmpp.exact.log_likelihood(GRAPH, p, rows).mean())
            for p in (GRAPH.init(zoo.KEY, data), result.params)
        )
        assert after > before + least


@pytest.mark.parametrize(
    "estimator",
    [
        FPCD(k=1, num_chains=8),
        TemperedPCD(num_chains=4, num_temperatures=3),
        SDCP(d=2, k=1),
        Herding(num_chains=4),
        LocalModeUCD(num_pairs=8, num_slots=4),
    ],
    ids=lambda e: type(e).__name__,
)
def test_other_estimators_do_not_read_missing_entries_as_zeros(estimator: Any) -> None:
    result = train(Observed.where_finite(HOLES), estimator)
    zeros = train(np.where(np.isnan(HOLES), 0, HOLES), estimator)
    assert np.isfinite(flat(result.params)).all()
    assert np.abs(flat(result.params) - flat(zeros.params)).max() > 1e-3


def test_weighted_chains_report_no_likelihood_of_drawn_entries() -> None:
    estimator = WeightedPCD(num_chains=20, num_watchers=20)
    complete, holes = (
        train(x, estimator).history for x in (BARS, Observed.where_finite(HOLES))
    )
    assert "log_likelihood" in complete and "log_partition" in holes
    assert "log_likelihood" not in holes
    plain = train(BARS, WeightedPCD(num_chains=20, num_watchers=0))
    assert (
        "log_partition" not in plain.history and plain.estimator_state.watchers is None
    )


def test_complete_rows_files_and_streams_train_as_arrays_do(tmp_path: Path) -> None:
    known, file = np.ones(BARS.shape, bool), as_memmap(BARS, tmp_path / "v")
    options = {"batch_size": 5, "estimator": UCD(num_pairs=8, num_slots=4)}
    plain = train(BARS, **options)
    for data in (
        Observed(BARS, known),
        {"v": Observed(BARS, True)},
        Observed(file, known),
    ):
        assert_same_run(train(data, **options), plain)
    options["estimator"] = CD()
    data = Observed.where_finite(HOLES)
    holes = Observed(
        as_memmap(HOLES, tmp_path / "h"), as_memmap(data.known, tmp_path / "k")
    )
    assert_same_run(train(holes, **options), train(data, **options))


def batches(*values: Any) -> Iterator[Any]:
    return iter([Observed.where_finite(v) if np.isnan(v).any() else v for v in values])


def test_streams_may_have_missing_entries_in_some_batches() -> None:
    mixed = train(
        batches(BARS[:5], HOLES[:5], HOLES[5:10], BARS[:5]),
        UCD(num_pairs=8, num_slots=4),
    )
    missing = mixed.history.posterior_meeting_time_mean.values
    assert np.isnan(missing).tolist() == [True, False, False, True]
    with pytest.raises(DataError, match="step 1: block 'v'"):
        train(batches(BARS[:5], HOLES[:5]), Centered(CD()))
    cycle = itertools.cycle([Observed.where_finite(HOLES[i : i + 5]) for i in (0, 5)])
    assert np.isfinite(flat(train(cycle, CD()).params)).all()


def test_fully_known_rows_have_a_positive_phase_without_noise() -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    batch = Batch.uniform(
        {"v": jnp.asarray(zoo.rows("rbm", 4)["v"])}, {"v": jnp.ones((4, 4), bool)}
    )
    past = AdaptiveLength(jnp.ones(()), jnp.ones((), jnp.int32))
    phase = jax.jit(UCD(k=1, lag=1, num_slots=4).posterior_phase, static_argnums=0)
    gradients = [
        phase(graph, params, past, batch, jnp.array([0, s], jnp.uint32)).gradient
        for s in (1, 2)
    ]
    np.testing.assert_allclose(*map(flat, gradients), atol=1e-6)


@pytest.mark.parametrize("path", ["line", "training"])
def test_particle_runs_report_their_likelihood_and_their_path_follows(
    path: str,
) -> None:
    ll = lambda p: ebmpp.exact.log_likelihood(GRAPH, p, BARS).mean()
    options = {
        "num_steps": 150,
        "optimizer": optax.sgd(0.5),
        "monitors": {"ll": ll},
        "monitor_every": 50,
    }
    history = train(BARS, ParticleUCD(num_particles=100, path=path), **options).history
    for at in (50, 100):
        exact = float(history.ll.sel(monitor_step=at))
        assert history.log_likelihood.values[at] == pytest.approx(exact, abs=0.3)
    assert (
        history.num_rungs[-1] > history.num_rungs[0]
        and history.ll[-1] > history.ll[0] + 0.3
    )


def test_an_unmet_pair_of_systems_stops_training() -> None:
    estimator = ParticleUCD(num_particles=2, max_rungs=2, max_systems=3)
    options = {
        "num_steps": 200,
        "params": two_modes(8.0),
        "progress_bar": False,
        "rng_key": zoo.KEY,
    }
    with pytest.raises(DivergenceError, match="max_systems=3"):
        ebmpp.fit(zoo.graph("rbm"), zoo.rows("rbm"), estimator=estimator, **options)


ROWS = {"v": np.float32([[1] * 4, [0] * 4])}


def gradients(
    estimator: Any, steps: int = 250, warmup: int = 50
) -> tuple[np.ndarray, Any, list[Any]]:
    """Gradients by ``v`` of a run at fixed params whose chains all start in one mode."""
    graph, params = zoo.graph("rbm"), two_modes(5.0, 0.05)
    state, results, metrics = (
        estimator.init_state(graph, params, ROWS, 2, key(0)),
        [],
        [],
    )
    ones = lambda s: jax.tree.map(jnp.ones_like, s)
    state = (
        state._replace(chains=ones(state.chains))
        if hasattr(state, "chains")
        else ones(state)
    )
    for seed in range(steps):
        result = jax.device_get(
            estimate(estimator, graph, params, state, ROWS, key(seed + 1))
        )
        state = result.state
        if seed >= warmup:
            results.append(result.gradient["v"])
            metrics.append(result.metrics)
    return np.stack(results), state, metrics


def test_tempered_chains_weigh_modes_that_plain_chains_do_not_leave() -> None:
    exact = exact_gradient(zoo.graph("rbm"), two_modes(5.0, 0.05), ROWS)["v"]
    # batch means of 20 steps: neighbouring steps are not independent
    result, state, metrics = gradients(
        TemperedPCD(k=2, num_chains=50, num_temperatures=6)
    )
    assert_rows_law(result.reshape(10, 20, -1).mean(1), exact)
    stuck, _, _ = gradients(PCD(k=2, num_chains=50))
    assert np.abs(stuck.mean(0) - exact).min() > 0.2
    # the ladder has moved to where all neighbours are rejected alike
    betas = np.asarray(state.betas)
    assert betas[0] == 0 and betas[-1] == 1 and (np.diff(betas) > 0).all()
    assert not np.allclose(betas, np.linspace(0, 1, 6), atol=0.02)
    spread = [
        float(m["swap_rejection_max"] - m["swap_rejection_mean"]) for m in metrics
    ]
    assert np.mean(spread) < 0.15
