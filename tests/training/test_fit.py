# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training runs of `fit`: estimators, history, batch order, failures and the progress bar.

Tests training/fitting.py, training/loop.py, training/result.py.
"""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest
from training_tools import (
    ROWS,
    SGD,
    ZEROS,
    Recorder,
    assert_same_run,
    leaves,
    rows_seen,
    train,
)
import zoo

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

import ebmpp
from ebmpp import CD, PCD, Stage
from ebmpp.errors import ArgumentError, DivergenceError, StateError
from ebmpp.estimators.base import Estimate
from helpers import Tensor, random_params

SLOW = optax.sgd(0.1)


def train_rbm(estimator: Any, **options: Any) -> ebmpp.FitResult:
    defaults = {
        "num_steps": 4,
        "batch_size": zoo.BATCH,
        "rng_key": zoo.KEY,
        "optimizer": SGD,
    }
    options = {**defaults, "estimator": estimator, "progress_bar": False, **options}
    return ebmpp.fit(zoo.graph("rbm"), zoo.rows("rbm", 20), **options)


def test_training_raises_the_likelihood() -> None:
    rows, zeros = zoo.rows("rbm", 20), jax.tree.map(np.zeros_like, zoo.params("rbm"))
    monitors = {"log_likelihood": ebmpp.monitors.log_likelihood(zoo.graph("rbm"), rows)}
    options = {
        "num_steps": 300,
        "params": zeros,
        "monitors": monitors,
        "monitor_every": 300,
    }
    fit = train_rbm(PCD(num_chains=8), optimizer=SLOW, **options)
    first, last = fit.history["log_likelihood"].values
    counts = np.unique(rows["v"], axis=0, return_counts=True)[1]
    assert first == pytest.approx(-4 * np.log(2))
    # minus the entropy of the rows
    assert first + 0.2 < last <= (counts / 20) @ np.log(counts / 20)


@pytest.mark.parametrize(
    ("interval", "steps"), [(3, [0, 3, 6, 7]), (7, [0, 7]), (100, [0, 7])]
)
def test_monitors_see_the_params_of_their_steps(
    interval: int, steps: list[int]
) -> None:
    monitors = {"v": lambda p: p["v"].mean(), "double": lambda p: 2 * p["h"].mean()}
    fit = train(
        estimator=Recorder(), num_steps=7, monitors=monitors, monitor_every=interval
    )
    np.testing.assert_array_equal(fit.history["monitor_step"], steps)
    expected = [1 - 0.5**t for t in steps]
    np.testing.assert_allclose(fit.history["v"], expected, rtol=1e-6)
    np.testing.assert_allclose(fit.history["double"], 2 * np.array(expected), rtol=1e-6)
    assert fit.history["v"].dims == ("monitor_step",) and fit.history.sizes["step"] == 7
    assert {"walk", "count", "gradient_norm"} < set(fit.history)
    np.testing.assert_array_equal(fit.history["step"], np.arange(7))
    np.testing.assert_array_equal(fit.history["count"], np.arange(7))
    word = fit.history["word"]
    assert word.dtype == np.uint32 and len(set(word.values)) == 7


def test_results_do_not_depend_on_how_often_the_run_is_monitored() -> None:
    monitors = {"v": lambda p: p["v"].sum()}
    plain = train(num_steps=60)
    for interval in (1, 7):
        fit = train(num_steps=60, monitors=monitors, monitor_every=interval)
        np.testing.assert_array_equal(leaves(fit.params), leaves(plain.params))
        steps = fit.history.drop_dims("monitor_step").drop_vars(
            "monitor_step", errors="ignore"
        )
        assert steps.identical(plain.history)


@pytest.mark.nightly
def test_a_run_on_several_devices_is_that_of_one() -> None:
    mesh = jax.make_mesh((4,), ("rows",))
    single, sharded = (train_rbm(PCD(num_chains=8), mesh=m) for m in (None, mesh))
    np.testing.assert_array_equal(
        sharded.estimator_state["v"], single.estimator_state["v"]
    )
    assert sharded.estimator_state["v"].sharding.spec == P("rows")
    np.testing.assert_allclose(
        leaves(sharded.params), leaves(single.params), rtol=1e-4, atol=1e-5
    )


def test_each_epoch_has_every_row_once() -> None:
    # batches of 4 run across the ends of epochs
    epochs = rows_seen(train(num_steps=15)).reshape(6, 10)
    np.testing.assert_array_equal(
        np.sort(epochs, axis=1), np.tile(np.arange(10), (6, 1))
    )
    assert len({tuple(epoch) for epoch in epochs}) == 6  # a fresh permutation each


@pytest.mark.parametrize("batch_size", [10, 1000])
def test_batches_are_no_larger_than_the_data(batch_size: int) -> None:
    fit = train(num_steps=2, batch_size=batch_size)
    np.testing.assert_array_equal(np.sort(rows_seen(fit), axis=1), [np.arange(10)] * 2)
    assert fit.estimator_state["batch_size"] == 10


def test_data_and_params_of_other_array_libraries_are_accepted() -> None:
    start = random_params(zoo.graph("binomial"), 1)
    expected = train(params=start)
    assert_same_run(train(ROWS.tolist(), params=start, batch_size=4), expected)
    tensors = {name: Tensor(np.asarray(a)) for name, a in start.items()}
    assert_same_run(train(Tensor(ROWS), params=tensors), expected)
    doubles = jax.tree.map(lambda a: np.asarray(a, float), start)
    assert_same_run(train(params=doubles), expected)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_steps": 0}, ArgumentError, "num_steps .*got 0"),
        ({"estimator": CD}, TypeError, "estimator"),
        ({"optimizer": 0.1}, TypeError, "optimizer .*got 0.1"),
        ({"rng_key": 0}, ArgumentError, "rng_key"),
        ({"monitors": {"m": 3}}, ArgumentError, "monitor 'm' .*3"),
        ({"monitors": {"m": lambda p: p["v"]}}, TypeError, r"monitor 'm' .*\(2,\)"),
        (
            {"monitors": {"m": lambda p: float(p["v"][0])}},
            ArgumentError,
            "monitor 'm' .*compiled=False",
        ),
        (
            {"monitors": {"gradient_norm": lambda p: p["v"].sum()}},
            ValueError,
            "'gradient_norm'",
        ),
        ({"params": {**ZEROS, "v": np.zeros(3)}}, ValueError, "'v'"),
        ({"data": ROWS[:, :1]}, StateError, r"'v' .*\(10, 1\)"),
        ({"data": ROWS - 1}, StateError, r"'v' .*-1.0 at index \(0, 0\)"),
        (
            {"data": np.where(ROWS == 2, np.nan, ROWS)},
            StateError,
            r"nan at index \(2, 0\)",
        ),
    ],
)
def test_invalid_arguments_are_refused(options: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        train(options.pop("data", ROWS), **options)


@dataclasses.dataclass(frozen=True)
class Broken(Recorder):
    """Its gradient is not a number from the fourth step on."""

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Any, key: Any
    ) -> Estimate:
        result = super().estimate(graph, params, state, batch, key)
        gradient = jax.tree.map(
            lambda g: jnp.where(state["steps"] < 3, g, jnp.nan), result.gradient
        )
        return result._replace(gradient=gradient)


def test_a_gradient_that_is_not_finite_stops_the_run_at_its_step() -> None:
    with pytest.raises(DivergenceError, match="step 3") as caught:
        train(
            estimator=Broken(),
            num_steps=70,
            monitors={"v": lambda p: p["v"].sum()},
            monitor_every=2,
        )
    assert caught.value.step == 3
    # three steps, not a fourth
    np.testing.assert_allclose(leaves(caught.value.params), 1 - 0.5**3)
    np.testing.assert_array_equal(caught.value.history["count"], [0, 1, 2])
    np.testing.assert_array_equal(caught.value.history["monitor_step"], [0, 2])


def test_overflow_stops_the_run_with_the_last_finite_params() -> None:
    rate = optax.sgd(optax.piecewise_constant_schedule(0.1, {32: 1e38}))
    with pytest.raises(DivergenceError, match="learning rate") as caught:
        train(num_steps=120, optimizer=rate, progress_bar=True)
    error = caught.value
    assert error.step in (33, 34) and error.history.sizes["step"] == error.step
    assert np.isfinite(leaves(error.params)).all()


@dataclasses.dataclass(frozen=True)
class Counted(Recorder):
    """An estimator that counts how often it is traced."""

    metric: str = "counted"
    traced: ClassVar[list[int]] = []

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Any, key: Any
    ) -> Estimate:
        self.traced.append(1)
        return super().estimate(graph, params, state, batch, key)


def test_a_second_run_of_other_length_traces_nothing() -> None:
    train(estimator=Counted(), num_steps=3)
    count = len(Counted.traced)
    other = jax.tree.map(lambda a: a + 1, ZEROS)
    for steps, rate in ((3, 0.5), (20, 0.1), (60, 0.7)):
        train(
            ROWS[::-1].copy(),
            Counted(),
            num_steps=steps,
            rng_key=jax.random.key(3),
            params=other,
            optimizer=optax.sgd(rate),
        )
    assert len(Counted.traced) == count


@pytest.mark.nightly
def test_a_run_without_compilation_is_the_same() -> None:
    compiled = train(num_steps=3)
    with jax.disable_jit():
        eager = train(num_steps=3)
    np.testing.assert_allclose(leaves(eager.params), leaves(compiled.params), rtol=1e-6)


def test_the_bar_shows_compilation_and_each_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages = [Stage(num_steps=n, estimator=Recorder(), optimizer=SGD) for n in (3, 3)]
    train(schedule=stages, progress_bar=True)
    lines = capsys.readouterr().err.split("\r")
    assert any(line.startswith("compiling") and " 0/6 " in line for line in lines)
    assert any("training" in line and "compiled=" in line for line in lines)
    assert " 6/6 " in lines[-1]
