# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Schedules of estimators and optimisers, and steps that share a batch.

Tests training/steps.py.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from training_tools import (
    ADAM,
    ROWS,
    SGD,
    WALKER,
    Recorder,
    rows_seen,
    train,
)
import xarray as xr

import jax
import optax

from ebmpp import CD, Stage
from ebmpp.core import backend, compiled
from ebmpp.errors import ArgumentError
from ebmpp.training import loop, steps

SLOW = optax.sgd(0.1)


def test_params_continue_while_the_rate_changes() -> None:
    estimator = Recorder()
    schedule = [
        Stage(num_steps=n, estimator=estimator, optimizer=o)
        for n, o in ((3, SGD), (2, SLOW))
    ]
    fit = train(
        schedule=schedule, monitors={"v": lambda p: p["v"].mean()}, monitor_every=1
    )
    # the gradient is p - 1, so the distance to 1 is halved three times, then shrinks by
    # 0.9 twice
    distance = np.cumprod([1, 0.5, 0.5, 0.5, 0.9, 0.9])
    np.testing.assert_allclose(1 - fit.history["v"], distance, rtol=1e-5)
    np.testing.assert_array_equal(fit.history["stage"], [0, 0, 0, 1, 1])
    # fresh random words at each step of the run
    assert len(set(fit.history["word"].values)) == 5


def test_metrics_that_a_stage_lacks_are_nan() -> None:
    plain = train(schedule=[Stage(num_steps=5, estimator=WALKER, optimizer=SGD)])
    assert plain.history.drop_vars("stage").identical(train().history)
    estimators = [WALKER, dataclasses.replace(WALKER, metric="other")]
    history = train(
        schedule=[Stage(num_steps=2, estimator=e, optimizer=SGD) for e in estimators]
    ).history
    np.testing.assert_array_equal(np.isnan(history["walk"]), [False, False, True, True])
    np.testing.assert_array_equal(
        np.isnan(history["other"]), [True, True, False, False]
    )
    np.testing.assert_array_equal(history["count"], [0, 1, 0, 1])
    assert history["word"].dtype == np.uint32 and history["other"].dtype == np.float32


@pytest.mark.parametrize("adopts", [False, True])
def test_an_estimator_may_continue_from_the_state_of_the_stage_before(
    adopts: bool,
) -> None:
    second = Stage(
        num_steps=2,
        estimator=dataclasses.replace(WALKER, adopts=adopts),
        optimizer=ADAM,
    )
    fit = train(schedule=[Stage(num_steps=3, estimator=WALKER, optimizer=SGD), second])
    np.testing.assert_array_equal(
        fit.history["count"], [0, 1, 2, 3, 4] if adopts else [0, 1, 2, 0, 1]
    )
    assert int(fit.estimator_state["steps"]) == (5 if adopts else 2)
    assert int(fit.optimizer_state[0].count) == 2


def test_an_estimator_may_use_a_batch_for_several_steps() -> None:
    steps = 3
    fit = train(
        estimator=dataclasses.replace(WALKER, steps_per_batch=steps), num_steps=8
    )
    batches = rows_seen(train(num_steps=8))
    np.testing.assert_array_equal(rows_seen(fit), np.repeat(batches, steps, axis=0)[:8])
    assert len(set(fit.history["word"].values)) == 8


def test_a_stage_begins_with_a_fresh_batch() -> None:
    stage = lambda n, steps: Stage(
        num_steps=n,
        estimator=dataclasses.replace(WALKER, steps_per_batch=steps),
        optimizer=SGD,
    )
    seen = rows_seen(train(schedule=[stage(3, 2), stage(3, 3), stage(1, 1)]))
    np.testing.assert_array_equal(seen, rows_seen(train())[[0, 0, 1, 2, 2, 2, 3]])


class Wrong(Recorder):
    def adopt(self, old: Any, fresh: Any) -> Any:
        return {**fresh, "more": 0}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Stage(num_steps=0), "num_steps .*got 0"),
        (lambda: train(schedule=[]), "schedule"),
        (lambda: train(schedule=[CD()]), r"Stage.*CD\("),
        (lambda: train(schedule=[Stage(num_steps=1)], optimizer=SGD), "optimizer"),
        (
            lambda: train(estimator=Recorder(steps_per_batch=0)),
            "steps_per_batch .*got 0",
        ),
        (
            lambda: train(
                schedule=[Stage(num_steps=1, estimator=e) for e in (WALKER, Wrong())]
            ),
            "Wrong.adopt",
        ),
    ],
)
def test_invalid_stages_are_refused(make: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        make()


def steps_of(data: Any = ROWS, **options: Any) -> int:
    fit = train(data, **{"num_steps": None, "epochs": 2, "batch_size": 4} | options)
    return fit.history.sizes["step"]


def test_epochs_are_passes_over_the_data() -> None:
    size = len(ROWS)
    assert steps_of() == -(-2 * size // 4)
    assert steps_of(estimator=Recorder(steps_per_batch=3)) == 3 * -(-2 * size // 4)
    assert steps_of(batch_size=size) == 2
    assert steps_of([{"v": ROWS}] * 3, epochs=1, batch_size=None) == 3
    stages = [
        Stage(epochs=1, estimator=Recorder(), optimizer=SGD),
        Stage(num_steps=1, estimator=Recorder(), optimizer=SGD),
    ]
    options = {"epochs": None, "estimator": None, "optimizer": None}
    assert steps_of(schedule=stages, **options) == -(-size // 4) + 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_steps": 3}, "fit: epochs .*None with num_steps"),
        ({"epochs": 0}, "epochs .*got 0"),
        ({"schedule": [Stage(num_steps=2)], "estimator": None}, "beside schedule"),
        ({"data": lambda: iter([ROWS])}, "fit: epochs .*without a length"),
        ({"data": [{"v": ROWS}] * 3}, "fit: epochs .*used once"),
    ],
)
def test_epochs_that_have_no_number_of_steps_are_refused(
    options: dict, match: str
) -> None:
    with pytest.raises(ArgumentError, match=match):
        steps_of(**{"batch_size": None} | options)
    with pytest.raises(ArgumentError, match="either num_steps or epochs"):
        Stage(num_steps=2, epochs=2)


def test_steps_in_a_loop_of_known_length_are_those_of_a_while_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    for accelerated in (False, True):
        monkeypatch.setattr(backend, "accelerated", lambda value=accelerated: value)
        # the cache does not know that the device has changed
        run_chunk = compiled(steps.run_chunk.fn, statics=1)
        monkeypatch.setattr(loop, "run_chunk", run_chunk)
        runs.append(train(num_steps=60))  # a chunk, and a part of one
    first, second = runs
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
    xr.testing.assert_allclose(first.history, second.history, rtol=1e-4)


def test_a_loop_of_known_length_ends_where_its_steps_are_expensive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = train(num_steps=20)
    monkeypatch.setattr(backend, "accelerated", lambda: True)
    monkeypatch.setattr(steps, "_WORK_ACCELERATED", 7.0 * 4 * (8 + 32 * 4))
    counts = []

    def run_chunk(*args: Any) -> Any:
        result = fresh(*args)
        counts.append(int(result[2]))
        return result

    fresh = compiled(steps.run_chunk.fn, statics=1)
    monkeypatch.setattr(loop, "run_chunk", run_chunk)
    jax.tree.map(
        np.testing.assert_array_equal, train(num_steps=20).params, usual.params
    )
    assert max(counts) == 7
