# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Callbacks, stopping early, and the best params."""

import dataclasses

import numpy as np
import pytest
from training_tools import Recorder, Walker, assert_same_run, leaves, numbered
import xarray as xr

import jax
import jax.numpy as jnp
import optax

from ebmpp.errors import ArgumentError
from ebmpp.training import EarlyStop, Progress
from ebmpp.training.monitors import Monitor

ZERO = {"a": jnp.zeros(1), "b": jnp.zeros(1), "a:b": jnp.zeros((1, 1))}
SIZE = {"size": lambda p: p["a"].sum()}


def hill(p):
    """Up and down again: the params run from 0 to 1, one half nearer a step."""
    return -((p["a"].sum() - 0.8) ** 2)


def options(**given):
    return {"params": ZERO, "optimizer": optax.sgd(0.5), "monitor_every": 1, "num_steps": 12, **given}


nan = np.nan


@pytest.mark.parametrize(
    ("values", "settings", "stops"),
    [
        ([1, 2, 3, 4], {"patience": 1}, False),
        ([1, 2, 2], {"patience": 1}, True),
        ([1, 3, 2, 2.9], {"patience": 3}, False),
        ([1, 3, 2, 2.9, 3], {"patience": 3}, True),
        ([1, 3, 2, 2.9, 3.1], {"patience": 3}, False),
        ([1, 2, 3, 4], {"patience": 3, "mode": "min"}, True),
        ([4, 3, 2, 1], {"patience": 1, "mode": "min"}, False),
        ([0, 0.4, 0.8, 1.2], {"patience": 3, "min_delta": 0.5}, False),
        ([0, 0.4, 0.5, 0.5], {"patience": 3, "min_delta": 0.5}, True),
        ([1, nan, nan], {"patience": 2}, True),
        ([nan, nan, 1], {"patience": 2}, False),
        ([], {"patience": 1}, False),
    ],
)
def test_early_stopping_is_a_function_of_the_history(values, settings, stops):
    history = xr.Dataset({"m": ("monitor_step", np.array(values, float))})
    assert EarlyStop("m", **settings)(Progress(0, None, None, history)) is stops


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 0}, "patience is an int of at least 1, not 0"),
        ({"mode": "most"}, "EarlyStop: mode is one of 'max', 'min', not 'most'"),
        ({"min_delta": -1.0}, "min_delta is a number of at least 0, not -1.0"),
    ],
)
def test_early_stop_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        EarlyStop("m", **settings)


def test_a_run_stops_where_its_monitor_gets_worse():
    made = numbered(monitors={"hill": hill}, callbacks=[EarlyStop("hill", patience=2)], **options())
    # values at a = 0, 1/2, 3/4, 7/8, 15/16: the best is the third, and two more are waited for
    np.testing.assert_array_equal(made.history["monitor_step"], [0, 1, 2, 3, 4])
    assert made.history.sizes["step"] == 4
    np.testing.assert_allclose(made.params["a"], 15 / 16)


def test_an_unknown_monitor_is_named_before_anything_is_compiled():
    with pytest.raises(ValueError, match=r"the monitors are \['size'\], and 'loss' is not among them"):
        numbered(monitors=SIZE, callbacks=[EarlyStop("loss")], **options())


def test_callbacks_see_the_run():
    seen = []

    def look(progress):
        values = progress.history.get("size")
        seen.append((progress.step, float(progress.params["a"][0]), progress.history.sizes["step"]))
        assert int(progress.estimator_state["steps"]) == progress.step
        assert len(values) == len(seen) and values[-1] == progress.params["a"][0]

    given = options(monitor_every=4, num_steps=10)
    made = numbered(estimator=Walker(), monitors=SIZE, callbacks=[look], **given)
    assert [step for step, _, _ in seen] == [n for _, _, n in seen] == [0, 4, 8, 10]
    np.testing.assert_array_equal([a for _, a, _ in seen], made.history["size"])


@pytest.mark.parametrize("name", ["gradient_norm", "row 0", "step"])
def test_a_monitor_takes_no_metrics_place(name):
    with pytest.raises(ValueError, match=f"a monitor is named '{name}', as is what the history has"):
        numbered(monitors={name: hill}, **options())


def test_every_callback_is_called_also_where_one_stops():
    calls = []
    first, second = (lambda p, n=n: calls.append(n) or p.step == 2 for n in range(2))
    made = numbered(callbacks=[first, second], **options())
    assert calls == [0, 1] * 3 and made.history.sizes["step"] == 2


def test_the_best_params_are_kept():
    made = numbered(monitors={"hill": hill, **SIZE}, keep_best="hill", **options())
    assert made.best_step == 2 == made.history["hill"].values.argmax()
    np.testing.assert_allclose(made.best_params["a"], 0.75)
    least = numbered(monitors={"hill": hill, **SIZE}, keep_best=("size", "min"), **options())
    assert least.best_step == 0
    np.testing.assert_array_equal(leaves(least.best_params), leaves(ZERO))
    most = numbered(monitors=SIZE, keep_best="size", **options(num_steps=5, monitor_every=2))
    assert most.best_step == 5  # the params after the last step are looked at too


def test_there_is_no_best_of_nan():
    made = numbered(monitors={"none": lambda p: p["a"].sum() * jnp.nan}, keep_best="none", **options())
    assert made.best_params is None and made.best_step is None
    plain = numbered(**options())
    assert plain.best_params is None and plain.best_step is None


@pytest.mark.parametrize(
    ("keep_best", "message"),
    [
        ("loss", r"'loss' is the name of a monitor, and they are \['size'\]"),
        (("size", "up"), "mode is one of 'max', 'min'"),
    ],
)
def test_keep_best_refuses(keep_best, message):
    with pytest.raises(ValueError, match=message):
        numbered(monitors=SIZE, keep_best=keep_best, **options())


def test_a_callback_cannot_change_the_run():
    given = options(monitors=SIZE, estimator=Walker())
    plain, tried = numbered(**given), []

    def vandal(progress):
        progress.params["a"] = progress.params["a"] + 100
        progress.params.pop("b")
        progress.estimator_state["at"] = jnp.zeros(())
        for name in progress.history.data_vars:
            try:
                progress.history[name].values[:] = 0
            except ValueError as error:
                tried.append(str(error))
        progress.history["step"] = ("step", np.zeros(progress.history.sizes["step"]))

    mean = Monitor(lambda p: float(p.pop("a")[0]), compiled=False)
    made = numbered(**given | {"callbacks": [vandal], "monitors": SIZE | {"mean": mean}})
    assert_same_run(dataclasses.replace(made, history=made.history.drop_vars("mean")), plain)
    assert tried and all("read-only" in told for told in tried)
    made.history["size"].values[:] = 0  # what is returned is the caller's own


def test_params_that_the_caller_writes_later_do_not_change_the_run():
    start = {name: np.zeros(a.shape, np.float32) for name, a in ZERO.items()}
    spoil = lambda progress: [a.fill(7) for a in start.values()] and None
    made = numbered(**options(params=start, callbacks=[spoil]))
    np.testing.assert_array_equal(leaves(made.params), leaves(numbered(**options()).params))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"callbacks": EarlyStop("size")},
            "callbacks is a list of functions of a Progress, not EarlyStop",
        ),
        ({"callbacks": [3]}, r"fit: callbacks\[0\] is a function of a Progress, not 3"),
        ({"monitors": {"size": 3}}, "fit: monitor 'size' is a function of the params, not 3"),
        ({"monitors": [hill]}, "fit: monitors is a dict of functions of the params"),
        ({"rng_key": 0}, r"fit: rng_key is a jax key, not the number 0: give jax.random.key\(0\)"),
        ({"rng_key": jax.random.split(jax.random.key(0), 3)}, r"not an array of keys of shape \(3,\)"),
        ({"keep_best": ["size", "max", 3]}, "fit: keep_best is the name of a monitor, or that and"),
        ({"resume": "yes"}, "fit: resume is True or False, not 'yes'"),
        ({"num_steps": 2**31}, "fit: num_steps is an int of at least 1, and at most 2147483647, not"),
    ],
)
def test_arguments_are_refused_by_name(given, message):
    with pytest.raises(ArgumentError, match=message):
        numbered(**options(**given))


def test_numpys_whole_numbers_are_whole_numbers():
    given = {"num_steps": np.int64(3), "monitor_every": np.int32(2), "batch_size": np.uint8(4)}
    made = numbered(**options(monitors=SIZE, **given))
    assert made.history.sizes["step"] == 3 and list(made.history.monitor_step.values) == [0, 2, 3]


LEAVE = {
    "float": lambda p: float(p["a"][0]),
    "numpy": lambda p: np.log(p["a"].sum()),
    "if": lambda p: p["a"][0] if p["a"][0] > 0 else 0.0,
}


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
def test_a_monitor_that_leaves_jax_is_told_how_not_to_be_compiled(leave):
    with pytest.raises(ArgumentError, match=r"monitor 'm' leaves jax .*Monitor\(fn, compiled=False\)"):
        numbered(**options(monitors={"m": leave}))
    with pytest.raises(ArgumentError, match=r"monitor 'm' leaves jax"):
        numbered(**options(monitors={"m": Monitor(leave)}))
    with np.errstate(divide="ignore"):
        made = numbered(**options(monitors={"m": Monitor(leave, compiled=False)}))
    assert made.history["m"].shape == (13,)


@pytest.mark.parametrize("value", [None, "low", {"a": 1}])
def test_a_monitor_that_returns_no_number_is_refused(value):
    with pytest.raises(ArgumentError, match="monitor 'm' returned .* and a scalar is expected"):
        numbered(**options(monitors={"m": Monitor(lambda p: value, compiled=False)}))
    with pytest.raises(ArgumentError, match="monitor 'm' returned .* and a scalar is expected"):
        numbered(**options(monitors={"m": lambda p: value}))


# -- with checkpoints ----------------------------------------------------------------------------


def test_a_stopped_run_stops_again_and_goes_on_without_the_callback(tmp_path):
    given = {"monitors": {"hill": hill}, "keep_best": "hill", "estimator": Walker(), "params": ZERO}
    given |= {"monitor_every": 2, "num_steps": 12, "optimizer": optax.sgd(0.5)}
    stop = [lambda progress: progress.step == 6]
    kept = {"checkpoint_dir": tmp_path, "checkpoint_every": 4, "resume": True}
    stopped = numbered(**given, callbacks=stop)
    for _ in range(2):
        assert_same_run(numbered(**given, callbacks=stop, **kept), stopped)
        assert sorted(path.stem for path in tmp_path.glob("*.zip")) == [
            "checkpoint-000004",
            "checkpoint-000006",
        ]
    assert stopped.history.sizes["step"] == 6
    assert_same_run(numbered(**given, **kept), numbered(**given))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_callback_keeps_the_checkpoints(tmp_path, error):
    given = {"estimator": Recorder(), "num_steps": 9, "monitor_every": 3}
    kept = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}

    def fail(progress):
        if progress.step == 6:
            raise error("no disk")

    with pytest.raises(error, match="no disk"):
        numbered(**given, **kept, callbacks=[fail])
    assert (tmp_path / "checkpoint-000006.zip").exists()
    assert_same_run(numbered(**given, **kept, resume=True), numbered(**given))
