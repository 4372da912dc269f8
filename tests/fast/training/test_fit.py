# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import os
from pathlib import Path
import subprocess
import sys
from typing import Any, ClassVar

import numpy as np
import pytest
from training_tools import NUMBERED, ROWS, Recorder, leaves, rows_seen

import jax
import jax.numpy as jnp
import optax

from ebmpp import CD, PCD, UCD, Bernoulli, Bias, Bilinear, FactorGraph, Stage, exact, fit, layered
from ebmpp.data import bars_and_stripes
from ebmpp.errors import DivergenceError, StateError
from ebmpp.estimators import Centered
from ebmpp.estimators.base import Estimate, Estimator
from ebmpp.training import bar as bar_module, loop as loop_module
from ebmpp.training.fitting import Fit, estimate_step
from helpers import Tensor, pair, random_params

RBM = pair(Bernoulli(3), Bernoulli(2))
DATA = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 1], [1, 1, 1], [1, 1, 0]], np.float32)
KEY = jax.random.key(0)
UCD_SMALL = UCD(k=1, num_pairs=16, num_slots=4)
MEETING = {
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


class Broken(Recorder):
    """Its gradient is not a number from the fourth step on."""

    def init(self, graph: FactorGraph, params: Any, data: Any, batch: int, key: jax.Array) -> jax.Array:
        return jnp.array(0)

    def estimate(self, graph: FactorGraph, params: Any, state: Any, batch: Any, key: Any) -> Estimate:
        bad = jnp.where(state >= 3, jnp.nan, 0.5)
        return Estimate(jax.tree.map(lambda p: jnp.full_like(p, bad), params), state + 1, {"at": state})


def train(estimator: Any = CD(), data: Any = DATA, graph: FactorGraph = RBM, **given: Any) -> Fit:
    settings = {"rng_key": KEY, "num_steps": 7, "batch_size": 4, "progress_bar": False, **given}
    return fit(graph, data, estimator=estimator, **settings)


@pytest.mark.parametrize(
    ("estimator", "extra"),
    [(CD(k=2), set()), (PCD(num_chains=8), set()), (UCD_SMALL, MEETING), (UCD(num_slots=4), MEETING)],
)
def test_every_estimator_trains_and_repeats_itself(estimator: Any, extra: set[str]) -> None:
    made, again = train(estimator), train(estimator)
    assert set(made.history.data_vars) == {"gradient_norm"} | extra
    assert all(variable.dims == ("step",) for variable in made.history.values())
    np.testing.assert_array_equal(made.history["step"], np.arange(7))
    assert made.history.identical(again.history)
    np.testing.assert_array_equal(leaves(made.params), leaves(again.params))
    other = train(estimator, rng_key=jax.random.key(1))
    assert (leaves(made.params) != leaves(other.params)).all()
    assert made.graph == RBM and np.isfinite(leaves(made.params)).all()


def test_training_raises_the_likelihood() -> None:
    monitors = {"loglik": lambda p: exact.log_likelihood(RBM, p, DATA).mean()}
    params = jax.tree.map(jnp.zeros_like, RBM.init(KEY))
    made = train(CD(), params=params, num_steps=300, batch_size=6, monitors=monitors, monitor_every=300)
    first, last = made.history["loglik"].values
    assert first == pytest.approx(-3 * np.log(2)) and last > first + 0.2
    assert last <= (2 * np.log(2 / 6) * 2 + 2 * np.log(1 / 6)) / 6 + 1e-5  # minus the data's entropy


@pytest.mark.parametrize(("every", "steps"), [(3, [0, 3, 6, 7]), (7, [0, 7]), (100, [0, 7])])
def test_monitors_are_kept_at_their_steps(every: int, steps: list[int]) -> None:
    params = jax.tree.map(jnp.zeros_like, RBM.init(KEY))
    monitors = {"mean": lambda p: p["a"].mean(), "double": lambda p: 2 * p["b"].mean()}
    optimizer = optax.sgd(0.5)
    made = train(Recorder(), params=params, monitors=monitors, monitor_every=every, optimizer=optimizer)
    np.testing.assert_array_equal(made.history["monitor_step"], steps)
    # the gradient is p - 1: after t steps of rate 1/2 from 0, p = 1 - 2^-t
    np.testing.assert_allclose(made.history["mean"], [1 - 0.5**t for t in steps], rtol=1e-6)
    np.testing.assert_allclose(made.history["double"], [2 - 2 * 0.5**t for t in steps], rtol=1e-6)
    assert made.history["mean"].dims == ("monitor_step",)


# -- data ----------------------------------------------------------------------------------------

TWO = FactorGraph(
    {"u": Bernoulli(2), "v": Bernoulli(3)},
    {"h": Bernoulli(2)},
    [*map(Bias, "uvh"), Bilinear("u", "h"), Bilinear("v", "h")],
)


def with_nan() -> np.ndarray:
    data = DATA.copy()
    data[4, 1] = np.nan
    return data


@pytest.mark.parametrize(
    ("graph", "data", "message"),
    [
        (RBM, with_nan(), r"block 'a' .*got nan at index \(4, 1\)"),
        (RBM, 3 * DATA, r"block 'a' .*got 3.0 at index \(0, 0\).*expected values in \{0, 1\}"),
        (RBM, DATA[:, :2], r"block 'a' got shape \(6, 2\), expected \(\.\.\., 3\)"),
        (RBM, DATA[:0], r"one leading axis of at least one row; got leading axes \(0,\)"),
        (RBM, DATA[0], r"one leading axis of at least one row; got leading axes \(\)"),
        (RBM, DATA[None], r"one leading axis of at least one row; got leading axes \(1, 6\)"),
        (RBM, {"w": DATA}, "unknown visible block 'w'; there is 'a'"),
        (RBM, {"a": DATA, "b": DATA[:, :2]}, "unknown visible block 'b'"),
        (TWO, DATA, r"data is one array, and there are visible blocks \['u', 'v'\]: give a dict"),
        (TWO, {"v": DATA}, "block 'u' is missing"),
    ],
)
def test_data_that_do_not_fit_are_refused(graph: FactorGraph, data: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        train(data=data, graph=graph)


def test_order_of_blocks_in_the_data_does_not_matter() -> None:
    made = train(data={"u": DATA[:, :2], "v": DATA}, graph=TWO)
    swapped = train(data={"v": DATA, "u": DATA[:, :2]}, graph=TWO)
    assert made.history.identical(swapped.history)
    np.testing.assert_array_equal(leaves(made.params), leaves(swapped.params))


def test_every_row_is_seen_once_an_epoch() -> None:
    made = train(Recorder(), ROWS, NUMBERED, num_steps=15, batch_size=4)
    epochs = rows_seen(made).reshape(6, 10)  # batches of 4 run across the ends of epochs
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(10), (6, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 6  # a fresh permutation each
    assert len(set(made.history["word"].values)) == 15  # fresh draws each step


@pytest.mark.parametrize("batch_size", [10, 11, 1000])
def test_batches_as_large_as_the_data_hold_every_row(batch_size: int) -> None:
    made = train(Recorder(), ROWS, NUMBERED, num_steps=2, batch_size=batch_size)
    np.testing.assert_array_equal(np.sort(rows_seen(made), axis=1), [np.arange(10)] * 2)
    assert made.estimator_state == 10


@pytest.mark.parametrize("name", ["num_steps", "batch_size", "monitor_every"])
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_counts_are_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"fit: {name} is an int of at least 1, not {value}"):
        train(**{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"estimator": CD}, "estimator is one such as UCD\\(\\) or CD\\(k=1\\), not <class"),
        ({"estimator": "cd"}, "not 'cd'"),
        ({"optimizer": 0.1}, "optimizer is an optax transformation such as .*, not 0.1"),
        ({"optimizer": optax.adam}, "not <function adam"),
        ({"monitors": {"bias": lambda p: p["a"]}}, r"monitor 'bias' returned shape \(3,\), and a scalar"),
    ],
)
def test_what_is_no_estimator_optimizer_or_monitor_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        train(**given)


@pytest.mark.parametrize("dtype", [int, np.float16, float])
def test_params_of_any_numbers_are_taken(dtype: type) -> None:
    start = {name: np.zeros(s.shape, dtype) for name, s in RBM.param_shapes.items()}
    whole = train(Recorder(), params=jax.tree.map(jnp.zeros_like, RBM.init(KEY)))
    made = train(Recorder(), params=start)
    assert {leaf.dtype for leaf in jax.tree.leaves(made.params)} == {np.dtype(np.float32)}
    jax.tree.map(np.testing.assert_array_equal, made.params, whole.params)


def test_arrays_of_another_library_are_taken() -> None:
    start = random_params(RBM, 1)
    own = train(Recorder(), params=start)
    made = train(Recorder(), Tensor(DATA), params={name: Tensor(np.asarray(a)) for name, a in start.items()})
    jax.tree.map(np.testing.assert_array_equal, made.params, own.params)


@pytest.mark.slow  # everything compiles anew
def test_training_in_64_bits() -> None:
    with jax.enable_x64(True):
        start = {name: np.zeros(s.shape, np.float32) for name, s in RBM.param_shapes.items()}
        for estimator in (dataclasses.replace(UCD_SMALL, coupling="common"), Centered(CD())):
            made = train(estimator, params=start)
            assert {leaf.dtype for leaf in jax.tree.leaves(made.params)} == {np.dtype(np.float64)}


# -- failures ------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_stops_training_at_its_step() -> None:
    assert isinstance(Recorder(), Estimator)
    params = jax.tree.map(jnp.zeros_like, RBM.init(KEY))
    monitors = {"a": lambda p: p["a"].sum()}
    with pytest.raises(DivergenceError, match="stopped at step 3: gradient or params were not") as caught:
        train(Broken(), params=params, optimizer=optax.sgd(1.0), monitors=monitors)
    assert caught.value.step == 3
    np.testing.assert_allclose(leaves(caught.value.params), -1.5)  # three steps of -0.5, not a fourth
    np.testing.assert_array_equal(caught.value.history["at"], [0, 1, 2])
    assert np.isfinite(caught.value.history["gradient_norm"]).all()


@pytest.mark.parametrize("progress_bar", [False, True])
def test_a_huge_rate_stops_with_the_last_good_params(progress_bar: bool) -> None:
    with pytest.raises(DivergenceError, match="lower the learning rate") as caught:
        train(Recorder(), num_steps=60, optimizer=optax.sgd(1e20), progress_bar=progress_bar)
    error = caught.value
    assert 1 <= error.step < 10
    assert np.isfinite(leaves(error.params)).all() and np.abs(leaves(error.params)).max() > 1e10
    assert error.history.sizes["step"] == error.step


def test_unmet_pairs_stop_training_unless_allowed() -> None:
    params = random_params(RBM, seed=2, scale=1.2)
    limited = dataclasses.replace(UCD_SMALL, max_sweeps=2)
    with pytest.raises(DivergenceError, match=r"\d+ coupled pairs had not met: raise max_sweeps") as caught:
        train(limited, params=params)
    np.testing.assert_array_equal(leaves(caught.value.params), leaves(params))
    assert caught.value.step == 0
    made = train(dataclasses.replace(limited, allow_unmet=True), params=params)
    assert made.history["num_unmet"].sum() > 0
    assert np.isfinite(leaves(made.params)).all()


# -- programs ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counted(Recorder):
    """It counts how often it is traced."""

    traced: ClassVar[list[int]] = []

    def estimate(self, graph: FactorGraph, params: Any, state: Any, batch: Any, key: Any) -> Estimate:
        self.traced.append(graph.families["b"].size)
        return super().estimate(graph, params, state, batch, key)


def test_steps_and_optimisers_do_not_trace_again() -> None:
    Counted.traced.clear()
    train(Counted(), num_steps=1)
    made = train(Counted(), num_steps=20)
    other = train(Counted(), num_steps=5, optimizer=optax.adam(0.01), rng_key=jax.random.key(3))
    train(
        Counted(), num_steps=2, data=DATA[::-1], params=other.params, graph=pair(Bernoulli(3), Bernoulli(2))
    )
    assert Counted.traced == [2]
    assert len(made.history["step"]) == 20


@pytest.mark.slow
def test_programs_of_many_models_and_optimisers_do_not_pile_up() -> None:
    Counted.traced.clear()
    live = lambda: len(jax.devices()[0].client.live_executables())
    counts = []
    for width in [*range(3, 27), 26]:
        graph = pair(Bernoulli(3), Bernoulli(width))
        params = jax.tree.map(lambda s: np.zeros(s.shape), graph.param_shapes)
        train(Counted(), graph=graph, params=params, optimizer=optax.sgd(0.1), num_steps=2)
        counts.append(live())
    assert Counted.traced == list(range(3, 27))  # the last was kept
    assert len(estimate_step) <= 16
    assert counts[-1] - counts[-8] <= 8, counts


def test_any_optax_transformation_is_an_optimizer() -> None:
    params = jax.tree.map(jnp.zeros_like, RBM.init(KEY))
    made = train(Recorder(), params=params, num_steps=3, optimizer=optax.adam(0.1))
    # the gradient keeps its sign, so each of Adam's first steps is about its rate
    np.testing.assert_allclose(leaves(made.params), 0.3, atol=0.02)
    assert int(made.optimizer_state[0].count) == 3


SEARCH = """
import jax, numpy as np, optax, ebmpp
data = np.asarray(ebmpp.data.bars_and_stripes(3))
for width in range(3, 203):
    graph = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(width))
    ebmpp.fit(graph, data, rng_key=jax.random.key(0), estimator=ebmpp.CD(), optimizer=optax.sgd(0.1),
              num_steps=3, batch_size=8, progress_bar=False)
print(int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**30)
"""


@pytest.mark.slow
def test_a_search_over_two_hundred_widths_stays_under_three_gibibytes() -> None:
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("the system does not tell a process's memory there")
    here = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": here}
    made = subprocess.run([sys.executable, "-c", SEARCH], capture_output=True, text=True, env=environment)
    assert made.returncode == 0, made.stderr
    assert float(made.stdout) < 3


def test_the_bar_tells_compiling_from_training(capsys: pytest.CaptureFixture[str]) -> None:
    graph, data = layered(v=Bernoulli(4), h=Bernoulli(3)), bars_and_stripes(2)
    stages = [Stage(num_steps=3, estimator=CD(k=k)) for k in (1, 2)]
    fit(graph, data, rng_key=jax.random.key(0), schedule=stages, progress_bar=True)
    shown = capsys.readouterr().err.split("\r")
    compiling = [line for line in shown if line.startswith("compiling")]
    assert [line for line in compiling if " 0/6 " in line] and [line for line in compiling if " 3/6 " in line]
    assert any("training" in line and " 1/6 " in line and "compiled=" in line for line in shown)
    assert " 6/6 " in shown[-1]


def test_the_bar_tells_that_steps_are_compiled_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_ALONE", 3)
    graph, data = layered(v=Bernoulli(4), h=Bernoulli(3)), bars_and_stripes(2)
    options = {"estimator": CD(k=1), "num_steps": 8, "progress_bar": True}
    fit(graph, data, rng_key=jax.random.key(0), **options)
    compiling = [line for line in capsys.readouterr().err.split("\r") if line.startswith("compiling")]
    assert [any(f" {step}/8 " in line for line in compiling) for step in (0, 2, 3, 6)] == [
        True,
        False,
        True,
        False,
    ]


class Step:
    """What a step made, when somebody waits for it."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def block_until_ready(self) -> None:
        self.clock[0] += self.seconds
        self.seconds = 0.0


def test_the_bar_waits_for_steps_that_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(bar_module.time, "monotonic", lambda: clock[0])

    def ahead(bar: bar_module.Bar, each: list[float]) -> list[bool]:
        """Of steps of so many seconds: which are under way still when the bar has counted them."""
        steps = [Step(clock, seconds) for seconds in each]
        for step in steps:
            bar.made(1, step)
        return [step.seconds > 0 for step in steps]

    with bar_module.Bar(100, 0, False) as bar:
        bar.begin(0)
        assert ahead(bar, [9.0, 2.0, 2.0, 0.01, 0.01, 3.0]) == [False, False, False, False, True, True]
        slow = Step(clock, 3.0)
        bar.tell(lambda: slow.block_until_ready() or {})  # a look finds that steps are long now
        assert ahead(bar, [3.0, 3.0]) == [False, False]
    with bar_module.Bar(100, 0, True) as hidden:
        hidden.begin(0)
        assert ahead(hidden, [3.0, 3.0]) == [True, True]
