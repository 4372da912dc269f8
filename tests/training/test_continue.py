# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Runs that continue another one, and runs with a limit of time.

Tests training/dataset.py, training/history.py.
"""

import dataclasses
import itertools
import pickle
import time
from typing import Any

import numpy as np
import pytest
from training_tools import (
    ADAM,
    ROWS,
    WALKER,
    assert_continues,
    assert_same_run,
    rows_seen,
    train,
)
import xarray as xr
import zoo

import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Stage
from ebmpp.errors import ArgumentError
from ebmpp.training import optimizers
from ebmpp.training.history import Log
from ebmpp.training.observers.diagnosis import PairWatch
from ebmpp.training.steps import Stages

SUM = {"sum": lambda p: p["v"].sum()}


def test_a_continued_run_resumes_from_its_checkpoints(tmp_path: Any) -> None:
    first = train(optimizer=ADAM)
    options = {
        "optimizer": ADAM,
        "params": None,
        "start": first,
        "checkpoint_dir": tmp_path,
    }
    train(**options, num_steps=2)
    resumed = train(**options, num_steps=4, resume=True)
    assert_same_run(resumed, train(**options | {"checkpoint_dir": None}, num_steps=4))
    with pytest.raises(ebmpp.errors.CheckpointError, match="steps_before"):
        train(
            **options | {"start": dataclasses.replace(first, num_steps=9)},
            num_steps=4,
            resume=True,
        )


def test_a_stream_begins_at_its_first_batch() -> None:
    batches = [ROWS[i : i + 2] for i in range(0, 10, 2)]
    first = train(itertools.cycle(batches))
    second = train(iter(batches), start=first, params=None, num_steps=3)
    np.testing.assert_array_equal(rows_seen(second), rows_seen(first)[:3])


@pytest.mark.nightly
def test_other_settings_adopt_the_state_of_the_estimator() -> None:
    options = {"rng_key": zoo.KEY, "progress_bar": False}
    graph, rows = zoo.graph("rbm"), zoo.rows("rbm", 8)
    first = ebmpp.fit(graph, rows, estimator=PCD(num_chains=4), num_steps=2, **options)
    wider = ebmpp.fit(
        graph, rows, estimator=PCD(num_chains=8), start=first, num_steps=1, **options
    )
    assert wider.estimator_state["v"].shape[0] == 8
    stages = [
        Stage(num_steps=1, estimator=PCD(num_chains=4)),
        Stage(num_steps=2, estimator=CD()),
    ]
    scheduled = ebmpp.fit(graph, rows, schedule=stages, start=first, **options)
    assert scheduled.num_steps == 5 and scheduled.estimator == CD()


def test_parts_of_an_optimiser_of_the_same_structure_continue() -> None:
    params = {"v": np.ones(2, np.float32)}
    moved = lambda o: o.update(params, o.init(params), params)[1]
    ramp = optax.linear_schedule(0.1, 0.0, 10)
    adam = moved(optax.adam(0.1))
    carried = optimizers.carried(adam, optax.adam(0.3).init(params))
    assert carried[0] is adam[0]
    scheduled = optimizers.carried(adam, optax.adam(ramp).init(params))
    assert scheduled[0] is adam[0] and scheduled[1].count == 0
    assert (
        optimizers.carried(moved(optax.sgd(0.1)), optax.adam(0.3).init(params))[0].count
        == 0
    )
    inject = optax.inject_hyperparams(optax.adam)
    state = optimizers.carried(moved(inject(0.1)), inject(0.3).init(params))
    assert (
        state.hyperparams["learning_rate"] == np.float32(0.3)
        and state.inner_state[0].count == 1
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"params": zoo.params("binomial")}, "params"),
        ({"estimator": CD()}, "start"),
        ({"schedule": [Stage(num_steps=2)]}, "start"),
        ({"start": 3}, "start"),
        ({"graph": "rbm"}, "start"),
        ({"max_seconds": 0}, "max_seconds"),
        ({"max_seconds": np.nan}, "max_seconds"),
        ({"max_seconds": "1 h"}, "max_seconds"),
    ],
)
def test_an_invalid_start_or_limit_is_refused(options: dict, match: str) -> None:
    with pytest.raises(ArgumentError, match=f"fit: {match}"):
        train(**{"params": None, "start": train(num_steps=1)} | options)


def test_a_pickled_fit_continues_with_an_optimiser() -> None:
    first = pickle.loads(pickle.dumps(train(num_steps=2)))
    assert first.optimizer is None
    with pytest.raises(ArgumentError, match="fit: optimizer"):
        train(params=None, start=first, optimizer=None)
    assert_continues(train(params=None, start=first, num_steps=3), train(num_steps=5))


LIMIT: dict[str, Any] = {
    "num_steps": None,
    "max_seconds": 1e-9,
    "monitors": SUM,
    "optimizer": ADAM,
}


def without_attrs(fit: Any) -> Any:
    assert fit.history.attrs == {"stopped_by": "max_seconds"}
    return dataclasses.replace(fit, history=fit.history.drop_attrs())


def test_a_limit_of_time_ends_a_run_at_the_first_look_and_resumes(
    tmp_path: Any, capsys: Any
) -> None:
    """The first look is after one step, the next one after 51."""
    unlimited = {**LIMIT, "max_seconds": None}
    first = train(**LIMIT, checkpoint_dir=tmp_path, keep_best="sum", progress_bar=True)
    assert "stopped by max_seconds" in capsys.readouterr().err
    assert_same_run(
        without_attrs(first), train(**unlimited | {"num_steps": 1}, keep_best="sum")
    )
    second = train(**LIMIT, checkpoint_dir=tmp_path, keep_best="sum", resume=True)
    assert_same_run(
        without_attrs(second), train(**unlimited | {"num_steps": 51}, keep_best="sum")
    )
    uninterrupted = train(
        **LIMIT | {"num_steps": 60, "max_seconds": 900},
        checkpoint_dir=tmp_path,
        keep_best="sum",
        resume=True,
    )
    assert_same_run(
        uninterrupted, train(**unlimited | {"num_steps": 60}, keep_best="sum")
    )


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_late_pairs_are_judged_by_the_steps_that_fit_into_the_time(
    seconds: float,
) -> None:
    columns = {"meeting_time_mean": np.full(25, 9.0), "sweeps": np.full(25, 1000.0)}
    now = time.monotonic()
    stages = Stages([Stage(num_steps=2**31 - 1)])
    watch = PairWatch(Log({}), stages, 100, 0, now + seconds)
    assert watch.diagnose(columns, 25) is None  # the pace is not known
    watch._last_look = (10, now - 1.5)
    assert (watch.diagnose(columns, 25) is None) == (seconds == 0)


def test_a_limit_of_time_leaves_out_later_stages() -> None:
    stages = [
        Stage(num_steps=1, estimator=WALKER),
        Stage(num_steps=200, estimator=UCD()),
    ]
    fit = train(schedule=stages, max_seconds=1e-9)
    assert fit.history.sizes["step"] == 1 and fit.estimator == WALKER


def test_a_frame_of_the_history_has_one_row_per_step() -> None:
    fit = train(num_steps=12, monitors=SUM, monitor_every=5)
    assert isinstance(fit.history, xr.Dataset) and fit.history["sum"].dims == (
        "monitor_step",
    )
    frame = fit.history.to_dataframe()
    assert frame.index.name == "step" and list(frame.index) == list(range(12))
    assert set(frame.columns) == set(fit.history.data_vars)
    np.testing.assert_array_equal(frame["walk"], fit.history["walk"])
    valid = frame["sum"].dropna()
    assert list(valid.index) == [4, 9, 11]  # after steps 5, 10 and 12
    np.testing.assert_array_equal(valid, fit.history["sum"][1:])
    assert len(fit.history.isel(step=slice(3)).to_dataframe()) == 3
    assert pickle.loads(pickle.dumps(fit.history)).identical(fit.history)
