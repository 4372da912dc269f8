# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The choice of UCD between three unbiased gradients: trials, switches, resumed runs."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from training_tools import assert_same_run
from ucd_tools import assert_mean, exact_gradient, initial, problem
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import UCD, ParticleUCD
from ebmpp.errors import ArgumentError
from ebmpp.estimators import Centered, ucd
from ebmpp.training.history import Bar, Log
from helpers import gated

STEPS = 60
ESTIMATOR = UCD(num_pairs=20, num_slots=8, pool_size=30)
# compare at once, and leave the way in use
FORCED = {
    "_WORK": 0.0,
    "_LONG": -np.inf,
    "_MARGIN": np.inf,
}


class Kept(NamedTuple):
    count: jax.Array
    gradients: Any


def _init(params: Any) -> Kept:
    return Kept(
        jnp.zeros((), int), jax.tree.map(lambda a: jnp.zeros((STEPS, *a.shape)), params)
    )


def _update(gradient: Any, state: Kept, params: Any = None) -> tuple[Any, Kept]:
    put = lambda table, g: table.at[state.count].set(g)
    zero = jax.tree.map(jnp.zeros_like, gradient)
    return zero, Kept(state.count + 1, jax.tree.map(put, state.gradients, gradient))


#: An optimiser that leaves the params as they are and keeps all gradients.
KEEPER = optax.GradientTransformation(_init, _update)


def force(monkeypatch: pytest.MonkeyPatch, possible: tuple[int, ...] = (0, 2)) -> None:
    for name, value in FORCED.items():
        monkeypatch.setattr(ucd, name, value)
    monkeypatch.setattr(ucd, "_possible", lambda graph, is_complete: possible)


def run(steps: int = STEPS, **options: Any) -> ebmpp.Fit:
    graph, params, data = problem("rbm", 4)
    options = {
        "params": params,
        "batch_size": 4,
        "rng_key": zoo.KEY,
        "progress_bar": False,
    } | options
    return ebmpp.fit(
        graph, data, estimator=ESTIMATOR, optimizer=KEEPER, num_steps=steps, **options
    )


@pytest.mark.parametrize(
    "possible", [(0, 2), pytest.param((0, 1, 2), marks=pytest.mark.slow)]
)
def test_gradients_across_a_switch_are_unbiased_and_resume(
    possible: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    force(monkeypatch, possible)
    fit = run()
    way, choices = (
        np.nan_to_num(fit.history[name].values).astype(int)
        for name in ("way", "chosen_way")
    )
    assert (way[:11] == 0).all() and set(way) == set(possible)
    assert (way[11:21] == possible[1]).all() and (
        choices[11 : 1 + 10 * len(possible)] == 0
    ).all()
    assert choices[1 + 10 * len(possible)] != 0 and fit.estimator != ESTIMATOR
    graph, params, data = problem("rbm", 4)
    exact = exact_gradient(graph, params, data)
    rows = jax.tree.map(np.asarray, fit.optimizer_state.gradients)
    for steps in (way >= 0, way == 0, way == 2):
        assert_mean(
            [{name: g[i] for name, g in rows.items()} for i in np.flatnonzero(steps)],
            exact,
        )
    assert not fit.history.num_unmet.any() and (fit.history.cost > 0).all()
    assert np.isnan(fit.history.lag.values[way == 2]).all()

    class Stop:
        def __call__(self, progress: Any) -> bool:
            return progress.step == 27  # in a trial

    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 9, "monitor_every": 27}
    stopped = run(callbacks=[Stop()], **options)
    assert (
        stopped.history.sizes["step"] == 27 and stopped.estimator.pairs == "particles"
    )
    assert_same_run(run(resume=True, **options), fit)


def history(
    way: np.ndarray, choices: np.ndarray, cost: np.ndarray, **columns: Any
) -> dict[str, np.ndarray]:
    base = {
        "cost": cost,
        "gradient_norm": np.ones(len(cost)),
        "meeting_time_mean": np.full(len(cost), 90.0),
    }
    return (
        base
        | {"lag": np.full(len(cost), 20.0), "way": way, "chosen_way": choices}
        | columns
    )


def follow(
    costs: tuple[float, ...], steps: int, estimator: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Follow the choices of a run whose ways cost so many sweeps per step."""
    graph, estimator = zoo.graph("rbm"), estimator or UCD()
    ways: list[int] = []
    choices: list[int] = []
    cost: list[float] = []
    until, last = 0, {"way": 0, "chosen_way": 0}
    for step in range(steps):
        past = history(*(np.array(a) for a in (ways, choices, cost)))
        choice = estimator.choose(graph, past)
        if step < until:  # also between two choices
            assert dict(choice.record) == last and choice.until == until
        until, last = choice.until, dict(choice.record)
        ways, choices = (
            [*ways, last.get("way", 0)],
            [*choices, last.get("chosen_way", 0)],
        )
        cost = [*cost, costs[ways[-1]]]
    return np.array(ways), np.array(choices)


def test_the_cheapest_way_is_chosen_after_enough_work() -> None:
    """A step of 7e8 unit updates: four reach the work of a comparison, and the next look is at eleven."""
    ways, choices = follow((1e8, 5e7, 1e6), 160)
    assert (
        (ways[:11] == 0).all() and (ways[11:21] == 1).all() and (ways[21:] == 2).all()
    )
    assert (choices[:31] == 0).all() and (choices[31:] == 2).all()
    ways, choices = follow((1e8, 1.5e8, 1e9), 400)
    assert (choices == 0).all()
    # repeated after twice the work; the third way costs too much for that
    trials = np.flatnonzero(ways == 1)
    assert trials[0] == 11 and len(trials) == 20 and (ways == 2).sum() == 10
    assert (follow((1e6, 1.0, 1.0), 160)[0] == 0).all()  # too little work
    graph, long = zoo.graph("rbm"), np.full(51, 1e8)
    soon = history(0 * long, 0 * long, long, meeting_time_mean=np.full(51, 40.0))
    assert UCD().choose(graph, soon).estimator == UCD()  # chains mix


def test_fixed_ways_and_couplings_are_not_compared() -> None:
    graph, long = zoo.graph("rbm"), np.full(51, 1e8)
    past = history(0 * long, 0 * long, long)
    for options in (
        {"pairs": "gibbs"},
        {"pairs": "mixture"},
        {"pairs": "particles"},
        {"coupling": "common"},
    ):
        choice = UCD(**options).choose(graph, past)
        assert (
            choice.estimator == UCD(**options)
            and choice.until > 10**6
            and not choice.record
        )
    for pairs, coupling in (
        ("chains", None),
        ("gibbs", "mixture"),
        ("mixture", "common"),
    ):
        with pytest.raises(ArgumentError, match="UCD: (pairs|coupling)"):
            UCD(pairs=pairs, coupling=coupling)
    assert Centered(UCD()).choose(graph, past).estimator == Centered(
        UCD(pairs="mixture")
    )
    assert ucd._possible(graph, True) == (0, 1, 2) and ucd._possible(graph, False) == (
        0,
        2,
    )
    assert ucd._possible(gated(), True) == (0, 2)


def test_fixed_ways_are_the_estimators_of_these_names() -> None:
    assert UCD(pairs="mixture").coupling == "mixture"
    particles = UCD(num_pairs=80, pairs="particles")._estimator
    assert particles == ParticleUCD(num_particles=160, posterior=UCD(num_pairs=80))
    plain, particle = (
        initial(UCD(pairs="gibbs"), "rbm"),
        initial(UCD(pairs="particles"), "rbm"),
    )
    assert jax.tree.structure(plain) == jax.tree.structure(initial(UCD(), "rbm"))
    past = plain._replace(negative=jnp.float32(70), seen=jnp.int32(9))
    held = UCD(pairs="particles").adopt(past, particle)
    back = UCD().adopt(held, plain)
    assert (float(held.gibbs), float(back.negative), int(back.seen)) == (70, 70, 0)


def test_the_progress_bar_shows_meeting_times_without_the_lag() -> None:
    log = Log({})
    log.steps.append(
        {
            "meeting_time_mean": 480.0,
            "meeting_time_max": 900,
            "lag": 350,
            "gradient_norm": 1.0,
        }
    )
    assert log.latest() == {"tau": "130", "max": "550", "lag": "350", "grad": "1"}
    log.steps.append(
        {"meeting_time_mean": 1.5, "meeting_time_max": 2, "gradient_norm": 1.0}
    )
    log.steps.columns()
    assert log.latest() == {"tau": "1.5", "max": "2", "grad": "1"}
    Bar(1, 0, hidden=True).begin(UCD())
