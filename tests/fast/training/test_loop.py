# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Steps that go several in one program, and batches that are read ahead of them."""

import itertools
import threading

import numpy as np
import pytest
from training_tools import NUMBERED, ROWS, Walker, assert_same_run, leaves, mapped, numbered, rows_seen
import xarray as xr

import jax
import jax.numpy as jnp
import optax

from ebmpp import CD, UCD, Stage
from ebmpp.core.programs import Programs
from ebmpp.errors import DataError, DivergenceError
from ebmpp.training import EarlyStop, ahead, loop, steps
from ebmpp.training.batches import Selection, as_source
from ebmpp.training.loop import Loop
from ebmpp.training.schedule import Stages

KEY = jax.random.key(0)
ADAM = optax.adam(0.1)


def ran(alone, data=ROWS, weights=None, every=3, length=1):
    stages = [
        Stage(num_steps=4, estimator=Walker(steps_per_batch=2)),
        Stage(num_steps=70, estimator=Walker(adopts=True), optimizer=ADAM),
    ]
    params = NUMBERED.init(KEY)
    source = as_source(NUMBERED, data, weights, 4, KEY)
    watched = {"monitors": {"size": lambda params: params["a:b"].sum()}, "every": every}
    start = (Stages(stages, scheduled=True), source, jnp.array([1, 2], jnp.uint32), params)
    made = Loop(NUMBERED, *start, **watched, alone=alone)
    made._length = length
    return made.run(0, made.begin(0, params), progress_bar=False), made.log.dataset()


def batches(count=74):
    return [np.roll(ROWS, i, axis=0)[:4] for i in range(count)]


def assert_same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one[0], other[0])
    xr.testing.assert_identical(one[1], other[1])
    assert {n: v.dtype for n, v in one[1].items()} == {n: v.dtype for n, v in other[1].items()}


# -- several steps a program ---------------------------------------------------------------------


@pytest.mark.parametrize("alone", [0, 3, 9])
@pytest.mark.parametrize("weights", [None, np.arange(10)])
def test_steps_that_go_together_are_those_one_by_one(weights, alone):
    (one, told), (several, also) = ran(1000, weights=weights), ran(alone, weights=weights)
    np.testing.assert_allclose(leaves(one), leaves(several), rtol=1e-5, atol=1e-6)
    assert told.sizes == also.sizes == {"step": 74, "monitor_step": 26}
    xr.testing.assert_allclose(told, also, rtol=1e-5)
    assert {n: v.dtype for n, v in told.items()} == {n: v.dtype for n, v in also.items()}


@pytest.mark.parametrize("data", [ROWS, batches], ids=["device", "stream"])
def test_how_many_go_together_changes_no_bit(data, monkeypatch):
    lengths = [ran(0, data, length=length, every=10**6) for length in (1, 50)]
    monkeypatch.setattr(loop, "_LONG", 0.0)  # each by itself
    assert_same_bits(*lengths)
    assert_same_bits(lengths[0], ran(0, data, every=10**6))
    often, seldom = ran(0, data, every=1), lengths[0]
    steps_of = lambda told: told.drop_dims("monitor_step").drop_vars("monitor_step", errors="ignore")
    assert_same_bits((often[0], steps_of(often[1])), (seldom[0], steps_of(seldom[1])))


def test_one_program_does_for_all_lengths(monkeypatch):
    traced = []
    plain = steps.one_step
    monkeypatch.setattr(steps, "one_step", lambda *given: traced.append(1) or plain(*given))
    fresh = Programs(steps.several_steps.__wrapped__, 3)
    monkeypatch.setattr(loop, "several_steps", fresh)
    stage = Stage(num_steps=60, estimator=Walker(), optimizer=optax.sgd(0.1))
    for every in (7, 50, 1):
        source, params = as_source(NUMBERED, ROWS, None, 4, KEY), NUMBERED.init(KEY)
        start = (Stages([stage], scheduled=False), source, jnp.array([1, 2], jnp.uint32), params)
        made = Loop(NUMBERED, *start, every=every, alone=0)
        made.run(0, made.begin(0, params), progress_bar=False)
    assert len(traced) == 2  # for the metrics' shapes, and for the loop


@pytest.mark.parametrize("data", [ROWS, batches], ids=["device", "stream"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(data, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_ALONE", 5)
    size = None if data is batches else 4
    given = {"estimator": Walker(), "batch_size": size, "optimizer": ADAM, "checkpoint_every": 4}
    whole = numbered(data, num_steps=30, **given)
    for stop in (2, 7, 20, 30):
        last = numbered(data, num_steps=stop, checkpoint_dir=tmp_path, resume=True, **given)
        assert last.history.sizes["step"] == stop
    assert_same_run(last, whole)


def test_large_batches_from_the_host_go_one_by_one():
    of = lambda rows, index: Selection({"a": jnp.zeros((rows, 200))}, index)
    assert [steps.room(of(100, None)), steps.room(of(110, None)), steps.room(of(110, np.arange(3)))] == [
        50,
        1,
        50,
    ]


def test_pairs_that_have_to_meet_go_one_by_one():
    source, params = as_source(NUMBERED, ROWS, None, 4, KEY), NUMBERED.init(KEY)
    words = jnp.array([1, 2], jnp.uint32)
    alone = lambda estimator: Loop(
        NUMBERED, Stages([Stage(num_steps=9, estimator=estimator)], False), source, words, params, alone=0
    )._goes_alone(3, 0)
    assert [alone(UCD()), alone(CD())] == [True, False]


def test_a_step_that_fails_among_others_is_named():
    stage = Stage(
        num_steps=60,
        estimator=Walker(),
        optimizer=optax.sgd(optax.piecewise_constant_schedule(0.1, {32: 1e38})),
    )
    source, params = as_source(NUMBERED, ROWS, None, 4, KEY), NUMBERED.init(KEY)
    start = (Stages([stage], scheduled=False), source, jnp.array([1, 2], jnp.uint32), params)
    made = Loop(NUMBERED, *start, alone=0)
    made.guard.bounded = True
    made._length = 50
    with pytest.raises(DivergenceError, match="training stopped at step 33: gradient or params") as raised:
        made.run(0, made.begin(0, params), progress_bar=False)
    assert raised.value.step == 33 and raised.value.history.sizes["step"] == 33
    assert np.isfinite(leaves(raised.value.params)).all()


# -- batches that are read ahead -----------------------------------------------------------------


def readers():
    return [thread for thread in threading.enumerate() if thread.name == ahead.NAME]


@pytest.mark.parametrize("alone", [0, 1000])
def test_a_wrong_batch_stops_the_step_it_belongs_to(alone):
    made = batches()
    made[23] = made[23] * np.nan
    with pytest.raises(DataError, match="stopped at step 23: batch 23 of the stream") as raised:
        first = Stage(num_steps=60, estimator=Walker())
        params = NUMBERED.init(KEY)
        source = as_source(NUMBERED, iter(made), None, None, KEY)
        start = (Stages([first], scheduled=False), source, jnp.array([1, 2], jnp.uint32), params)
        Loop(NUMBERED, *start, alone=alone).run(0, Loop(NUMBERED, *start).begin(0, params), False)
    assert raised.value.history.sizes["step"] == 23
    assert not readers()


def test_no_batch_is_read_after_the_last(tmp_path):
    stream = iter(batches(9))
    numbered(stream, num_steps=6)
    assert len(list(stream)) == 3


def test_a_stream_is_read_ahead_by_a_thread_that_ends_with_the_run():
    seen, main = [], threading.get_ident()

    def endless():
        try:
            for rows in itertools.cycle(batches()):
                seen.append(threading.get_ident())
                yield rows
        finally:
            seen.append("closed")

    stop = EarlyStop("size", patience=1, min_delta=1e9)
    watched = {"monitors": {"size": lambda p: p["a:b"].sum()}, "monitor_every": 2, "callbacks": [stop]}
    made = numbered(endless, num_steps=10**6, **watched)
    assert made.history.sizes["step"] == 2
    assert seen[0] == main and main not in seen[1:] and seen[-1] == "closed"
    assert not readers()


def test_rows_on_the_device_need_no_thread(tmp_path):
    source = as_source(NUMBERED, ROWS, None, 4, KEY)
    with ahead.Ahead(source, 9) as device:
        device.batch(0)
        assert not readers()
    with ahead.Ahead(as_source(NUMBERED, mapped(ROWS, tmp_path / "rows"), None, 4, KEY), 9) as file:
        numbers = [np.asarray(file.batch(n).rows["a"]).ravel() for n in (3, 3, 4, 9)]
    assert not readers()
    wanted = [ROWS[source.batch(n).index].ravel() for n in (3, 3, 4, 9)]
    np.testing.assert_array_equal(numbers, wanted)


def test_an_interrupt_ends_the_thread():
    def interrupt(progress):
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        numbered(itertools.cycle(batches()), num_steps=50, callbacks=[interrupt], monitor_every=4)
    assert not readers()


def test_a_thread_keeps_to_the_callers_floats():
    with jax.enable_x64(True):
        made = numbered((rows + 1e-12 for rows in batches()), num_steps=3)
    assert made.history["row 1"].dtype == np.float64
    assert rows_seen(made).shape == (3, 4)
