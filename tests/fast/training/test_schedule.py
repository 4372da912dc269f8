# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Schedules of estimators and optimisers, and steps that keep their rows."""

import numpy as np
import pytest
from training_tools import NUMBERED, ROWS, Recorder, Walker, leaves, numbered, rows_seen

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, Stage

FAST, SLOW = optax.sgd(0.5), optax.sgd(0.1)
ZERO = {"a": jnp.zeros(1), "b": jnp.zeros(1), "a:b": jnp.zeros((1, 1))}


def test_params_go_on_and_the_rate_changes():
    schedule = [
        Stage(num_steps=3, estimator=Recorder(), optimizer=FAST),
        Stage(num_steps=2, estimator=Recorder(), optimizer=SLOW),
    ]
    monitors = {"a": lambda p: p["a"].sum()}
    made = numbered(schedule=schedule, params=ZERO, monitors=monitors, monitor_every=1)
    # the gradient is p - 1, so what is left to 1 halves three times, and shrinks by 0.9 twice
    left = np.cumprod([1, 0.5, 0.5, 0.5, 0.9, 0.9])
    np.testing.assert_allclose(1 - made.history["a"], left, rtol=1e-5)
    np.testing.assert_array_equal(made.history["stage"], [0, 0, 0, 1, 1])
    assert len(set(made.history["word"].values)) == 5  # fresh draws at each step of the run


def test_one_stage_is_a_run_without_a_schedule():
    one = numbered(schedule=[Stage(num_steps=4, estimator=Walker(), optimizer=FAST)])
    plain = numbered(estimator=Walker(), optimizer=FAST, num_steps=4)
    np.testing.assert_array_equal(leaves(one.params), leaves(plain.params))
    assert one.history.drop_vars("stage").identical(plain.history)


def test_what_a_stage_does_not_measure_is_nan():
    schedule = [
        Stage(num_steps=2, estimator=Recorder()),
        Stage(num_steps=3, estimator=Walker(metric="other")),
        Stage(num_steps=1, estimator=Walker(metric="third")),
    ]
    history = numbered(schedule=schedule).history
    missing = {name: np.isnan(history[name].values).tolist() for name in ("other", "third", "count", "word")}
    no, yes = False, True
    assert missing["other"] == [yes, yes, no, no, no, yes]
    assert missing["third"] == [yes] * 5 + [no]
    np.testing.assert_array_equal(history["count"], [np.nan, np.nan, 0, 1, 2, 0])
    assert missing["word"] == [no] * 6 and history["word"].dtype == np.uint32
    assert history["other"].dtype == np.float32 and history["count"].dtype == np.float64


@pytest.mark.parametrize("adopts", [False, True])
def test_an_estimator_may_adopt_what_the_one_before_carried(adopts):
    schedule = [
        Stage(num_steps=3, estimator=Walker()),
        Stage(num_steps=2, estimator=Walker(adopts=adopts), optimizer=optax.adam(0.1)),
    ]
    made = numbered(schedule=schedule)
    np.testing.assert_array_equal(made.history["count"], [0, 1, 2, 3, 4] if adopts else [0, 1, 2, 0, 1])
    assert int(made.estimator_state["steps"]) == (5 if adopts else 2)
    assert int(made.optimizer_state[0].count) == 2


class Wrong(Walker):
    def adopt(self, old, fresh):
        return {**fresh, "more": 0}


def test_adopting_keeps_the_structure():
    schedule = [Stage(num_steps=1, estimator=Walker()), Stage(num_steps=1, estimator=Wrong())]
    with pytest.raises(TypeError, match=r"Wrong\.adopt returned a pytree of another structure"):
        numbered(schedule=schedule)


class Bare:
    def init(self, graph, params, data, batch, key):
        return ()

    def estimate(self, graph, params, state, batch, key):
        return None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stage(num_steps=1, estimator=Bare()),
        lambda: ebmpp.estimators.Centered(Bare()),
        lambda: ebmpp.estimators.Discriminative("y", Bare()),
    ],
)
def test_an_estimator_that_lacks_a_part_is_told_where_to_inherit_it(make):
    with pytest.raises(TypeError, match=r"Bare has no adopt, .*inherit from ebmpp\.estimators\.Estimator"):
        make()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_estimator_may_keep_its_rows_for_several_steps(steps):
    made = numbered(estimator=Walker(steps_per_batch=steps), batch_size=5, num_steps=8)
    each = rows_seen(numbered(estimator=Walker(), batch_size=5, num_steps=8))
    np.testing.assert_array_equal(rows_seen(made), np.repeat(each, steps, axis=0)[:8])
    assert len(set(made.history["word"].values)) == 8


def test_a_stage_begins_with_a_fresh_batch():
    schedule = [
        Stage(num_steps=3, estimator=Walker(steps_per_batch=2)),
        Stage(num_steps=3, estimator=Walker(steps_per_batch=3)),
        Stage(num_steps=1, estimator=Walker()),
    ]
    each = rows_seen(numbered(estimator=Walker(), batch_size=2, num_steps=4))
    seen = rows_seen(numbered(schedule=schedule, batch_size=2))
    np.testing.assert_array_equal(seen, each[[0, 0, 1, 2, 2, 2, 3]])


@pytest.mark.parametrize("given", [{"estimator": CD()}, {"optimizer": SLOW}, {"num_steps": 3}])
def test_a_schedule_and_what_it_replaces_are_not_given_both(given):
    with pytest.raises(ValueError, match=f"schedule takes the place of {next(iter(given))}; give"):
        ebmpp.fit(NUMBERED, ROWS, rng_key=jax.random.key(0), schedule=[Stage(num_steps=1)], **given)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Stage(num_steps=0), ValueError, "Stage: num_steps is an int of at least 1, not 0"),
        (lambda: numbered(schedule=[]), ValueError, "needs at least one Stage"),
        (lambda: numbered(schedule=[CD()]), TypeError, r"entry is an ebmpp\.Stage, not CD\("),
        (
            lambda: numbered(estimator=Walker(steps_per_batch=0)),
            ValueError,
            "Walker: steps_per_batch is an int of at least 1, not 0",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
