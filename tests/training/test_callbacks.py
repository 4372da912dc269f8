# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Callbacks, early stopping, and the best params.

Tests training/callbacks.py, training/observers/base.py,
training/observers/monitoring.py, training/observers/progress.py.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from training_tools import Recorder, assert_same_run, leaves, train
import xarray as xr

import jax.numpy as jnp

from ebmpp.training import EarlyStop, Progress
from ebmpp.training.monitors import Monitor

SUM = {"sum": lambda p: p["v"].sum()}
nan = np.nan


def hill(params: Any) -> Any:
    """Rise to its maximum at 0.8 and fall again while the params go from 0 to 1, half
    of the way per step."""
    return -((params["v"][0] - 0.8) ** 2)


def train_halving(**options: Any) -> Any:
    return train(
        **{"estimator": Recorder(), "monitor_every": 1, "num_steps": 12, **options}
    )


@pytest.mark.parametrize(
    ("values", "settings", "stops"),
    [
        ([1, 2, 3, 4], {"patience": 1}, False),
        ([1, 2, 2], {"patience": 1}, True),
        ([1, 3, 2, 2.9, 3], {"patience": 3}, True),
        ([1, 2, 3, 4], {"patience": 3, "mode": "min"}, True),
        ([4, 3, 2, 1], {"patience": 1, "mode": "min"}, False),
        ([0, 0.4, 0.5, 0.5], {"patience": 3, "min_delta": 0.5}, True),
        ([1, nan, nan], {"patience": 2}, True),
        ([nan, nan, 1], {"patience": 2}, False),
        ([], {"patience": 1}, False),
    ],
)
def test_early_stopping_is_a_function_of_the_history(
    values: list, settings: dict, stops: bool
) -> None:
    history = xr.Dataset({"m": ("monitor_step", np.array(values, float))})
    assert EarlyStop("m", **settings)(Progress(0, None, None, history)) is stops


def test_a_run_stops_when_its_monitor_gets_worse() -> None:
    fit = train_halving(
        monitors={"hill": hill}, callbacks=[EarlyStop("hill", patience=2)]
    )
    # params 0, 1/2, 3/4, 7/8, 15/16: the third is the best, and patience allows two
    # more
    np.testing.assert_array_equal(fit.history["monitor_step"], [0, 1, 2, 3, 4])
    assert fit.history.sizes["step"] == 4
    np.testing.assert_allclose(fit.params["v"], 15 / 16)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"callbacks": [EarlyStop("loss")]}, "'loss'"),
        ({"keep_best": "loss"}, "'loss'"),
        ({"keep_best": ("sum", "up")}, "'up'"),
    ],
)
def test_unknown_monitors_and_modes_are_refused(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        train_halving(monitors=SUM, **options)
    with pytest.raises(ValueError, match="patience .*got 0"):
        EarlyStop("sum", patience=0)


def test_callbacks_see_the_run_at_their_steps() -> None:
    seen = []

    def look(progress: Progress) -> None:
        seen.append(
            (
                progress.step,
                float(progress.params["v"].sum()),
                progress.history.sizes["step"],
            )
        )
        assert int(progress.estimator_state["steps"]) == progress.step
        assert progress.history["sum"].values[-1] == progress.params["v"].sum()

    # every callback is called when one stops the run
    stop = lambda progress: progress.step == 10
    fit = train(monitors=SUM, callbacks=[stop, look], monitor_every=2, num_steps=12)
    assert (
        [step for step, _, _ in seen]
        == [count for _, _, count in seen]
        == [0, 2, 4, 6, 8, 10]
    )
    np.testing.assert_array_equal([value for _, value, _ in seen], fit.history["sum"])


def test_the_best_params_are_those_of_the_best_monitor_value() -> None:
    fit = train_halving(monitors={"hill": hill} | SUM, keep_best="hill")
    assert fit.best_step == 2 == fit.history["hill"].values.argmax()
    np.testing.assert_allclose(fit.best_params["v"], 0.75)
    with pytest.warns(UserWarning, match="'sum' was best before the first step, 0,"):
        fit = train_halving(monitors={"hill": hill} | SUM, keep_best=("sum", "min"))
    assert fit.best_step == 0 and (leaves(fit.best_params) == 0).all()
    fit = train_halving(monitors=SUM, keep_best="sum", num_steps=5, monitor_every=2)
    assert fit.best_step == 5  # the params after the last step count
    fit = train_halving(
        monitors={"none": lambda p: p["v"].sum() * nan}, keep_best="none"
    )
    assert fit.best_params is None and fit.best_step is None


def test_a_run_that_stops_without_a_gain_warns_once() -> None:
    options = {"callbacks": [EarlyStop("sum", patience=2, mode="min")]}
    with pytest.warns(UserWarning, match="rate") as caught:
        fit = train_halving(monitors=SUM, keep_best=("sum", "min"), **options)
    assert len(caught) == 1 and fit.best_step == 0
    assert fit.history.sizes["step"] == 2
    with pytest.warns(UserWarning, match="'sum' was best before the first step"):
        train_halving(monitors=SUM, **options)


def test_a_callback_cannot_change_the_run() -> None:
    plain, errors = train(monitors=SUM, monitor_every=1), []

    def vandal(progress: Progress) -> None:
        progress.params["v"] = progress.params.pop("v") + 100
        progress.estimator_state["walk"] = jnp.zeros(())
        for name in progress.history.data_vars:
            try:
                progress.history[name].values[:] = 0
            except ValueError as error:
                errors.append(str(error))

    mean = Monitor(lambda p: float(p.pop("v")[0]), compiled=False)
    fit = train(monitors=SUM | {"mean": mean}, monitor_every=1, callbacks=[vandal])
    assert_same_run(
        dataclasses.replace(fit, history=fit.history.drop_vars("mean")), plain
    )
    assert errors and all("read-only" in error for error in errors)
    fit.history["sum"].values[:] = 0  # the returned history belongs to the caller


def test_a_stopped_run_stops_again_and_resumes_without_the_callback(
    tmp_path: Any,
) -> None:
    options = {
        "monitors": {"hill": hill},
        "keep_best": "hill",
        "monitor_every": 2,
        "num_steps": 12,
    }
    checkpoints = {"checkpoint_dir": tmp_path, "checkpoint_every": 4, "resume": True}
    stop = [lambda progress: progress.step == 6]
    stopped = train(**options, callbacks=stop)
    assert stopped.history.sizes["step"] == 6
    for _ in range(2):
        assert_same_run(train(**options, callbacks=stop, **checkpoints), stopped)
        names = sorted(path.stem for path in tmp_path.glob("*.zip"))
        assert names == ["checkpoint-000004", "checkpoint-000006"]
    assert_same_run(train(**options, **checkpoints), train(**options))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_callback_carries_the_run_and_keeps_its_checkpoints(
    error: type, tmp_path: Any
) -> None:
    options = {"monitors": SUM, "keep_best": "sum", "monitor_every": 3}
    checkpoints = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}

    def fail(progress: Progress) -> None:
        if progress.step == 6:
            raise error("failed")

    with pytest.raises(error, match="failed") as caught:
        train(**options, **checkpoints, num_steps=9, callbacks=[fail])
    expected = train(**options, num_steps=6)
    assert_same_run(caught.value.fit, expected)
    assert caught.value.step == 6 and caught.value.history.identical(expected.history)
    np.testing.assert_array_equal(leaves(caught.value.params), leaves(expected.params))
    assert "6 steps" in caught.value.__notes__[0]
    resumed = train(**options, **checkpoints, num_steps=9, resume=True)
    assert_same_run(resumed, train(**options, num_steps=9))


@pytest.mark.parametrize("at", [0, 3])
def test_an_exception_keeps_its_attributes_and_one_before_the_first_step_carries_nothing(
    at: int,
) -> None:
    def fail(progress: Progress) -> None:
        if progress.step == at:
            error = RuntimeError("failed")
            error.params = 3
            raise error

    with pytest.raises(RuntimeError, match="failed") as caught:
        train(num_steps=9, monitor_every=3, callbacks=[fail])
    assert caught.value.params == 3 and hasattr(caught.value, "fit") == (at == 3)
