# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The choice of UCD between three unbiased gradients: trials, switches, resumed runs.

Tests estimators/ucd.py.
"""

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
from ebmpp import UCD, Bernoulli, Factor, FactorGraph, ParticleUCD
from ebmpp.errors import ArgumentError
from ebmpp.estimators import Centered, ucd
from ebmpp.estimators.base import METHODS
from ebmpp.estimators.pairs import ChainUCD
from ebmpp.training.history import Log, MetricTable
from ebmpp.training.observers.progress import ProgressBar
from helpers import gated

STEPS = 60
ESTIMATOR = UCD(num_pairs=20, num_slots=8, pool_size=30)
# compare at once, and leave the method in use
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


def force(monkeypatch: pytest.MonkeyPatch, possible: tuple[str, ...]) -> None:
    for name, value in FORCED.items():
        monkeypatch.setattr(ucd, name, value)
    monkeypatch.setattr(ucd, "_possible_methods", lambda graph, is_complete: possible)


def run(steps: int = STEPS, **options: Any) -> ebmpp.FitResult:
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "possible",
    [("gibbs", "particles"), pytest.param(METHODS, marks=pytest.mark.nightly)],
)
def test_gradients_across_a_switch_are_unbiased_and_resume(
    possible: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    force(monkeypatch, possible)
    fit = run()
    method = fit.history.method.values
    assert (method[:11] == "").all() and set(method) == {"", *possible[1:]}
    assert (method[11:21] == possible[1]).all()
    assert method[1 + 10 * len(possible)] != "gibbs" and fit.estimator != ESTIMATOR
    graph, params, data = problem("rbm", 4)
    exact = exact_gradient(graph, params, data)
    rows = jax.tree.map(np.asarray, fit.optimizer_state.gradients)
    for steps in (method != "none", method == "", method == "particles"):
        assert_mean(
            [{name: g[i] for name, g in rows.items()} for i in np.flatnonzero(steps)],
            exact,
        )
    assert not fit.history.num_unmet.any() and (fit.history.cost > 0).all()
    assert np.isnan(fit.history.lag.values[method == "particles"]).all()

    class Stop:
        def __call__(self, progress: Any) -> bool:
            return progress.step == 27  # in a trial

    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 9, "monitor_every": 27}
    stopped = run(callbacks=[Stop()], **options)
    assert stopped.history.sizes["step"] == 27
    assert stopped.estimator.method == "particles"
    assert_same_run(run(resume=True, **options), fit)


def history(
    methods: list[str], cost: list[float], **columns: Any
) -> dict[str, np.ndarray]:
    """Return columns of steps whose pairs meet late."""
    steps = len(cost)
    late = {"meeting_time_mean": np.full(steps, 90.0), "lag": np.full(steps, 20.0)}
    numbers = np.array([METHODS.index(method) for method in methods])
    past = {
        "cost": np.array(cost),
        "gradient_norm": np.ones(steps),
        "method": numbers,
    }
    return past | late | columns


def follow(costs: dict[str, float], steps: int) -> np.ndarray:
    """Follow the choices of a run whose methods cost so many sweeps per step."""
    graph = zoo.graph("rbm")
    methods: list[str] = []
    cost: list[float] = []
    until = 0
    last = "gibbs"
    for step in range(steps):
        choice = UCD().choose(graph, history(methods, cost))
        method = METHODS[choice.record.get("method", 0)]
        if step < until:  # also between two choices
            assert method == last and choice.until == until
        until = choice.until
        last = method
        methods.append(method)
        cost.append(costs[method])
    return np.array(methods)


def test_the_cheapest_method_is_chosen_after_enough_work() -> None:
    """A step of 7e8 unit updates: four reach the work of a comparison, and the next
    look is at eleven."""
    methods = follow({"gibbs": 1e8, "mixture": 5e7, "particles": 1e6}, 160)
    assert (methods[:11] == "gibbs").all() and (methods[11:21] == "mixture").all()
    assert (methods[21:] == "particles").all()
    methods = follow({"gibbs": 1e8, "mixture": 1e6, "particles": 5e7}, 50)
    assert (methods[21:31] == "particles").all() and (methods[31:] == "mixture").all()
    methods = follow({"gibbs": 1e8, "mixture": 1.5e8, "particles": 1e9}, 400)
    # repeated after twice the work; the third method costs too much for that
    trials = np.flatnonzero(methods == "mixture")
    assert trials[0] == 11 and len(trials) == 20
    assert (methods == "particles").sum() == 10
    cheap = follow({"gibbs": 1e6, "mixture": 1.0, "particles": 1.0}, 160)
    assert (cheap == "gibbs").all()  # too little work
    soon = history(["gibbs"] * 51, [1e8] * 51, meeting_time_mean=np.full(51, 40.0))
    assert UCD().choose(zoo.graph("rbm"), soon).estimator == UCD()  # chains mix


def test_fixed_methods_and_couplings_are_not_compared() -> None:
    graph = zoo.graph("rbm")
    past = history(["gibbs"] * 51, [1e8] * 51)
    fixed = [{"method": method} for method in METHODS]
    for options in (*fixed, {"coupling": "common"}):
        choice = UCD(**options).choose(graph, past)
        assert choice.estimator == UCD(**options)
        assert choice.until > 10**6 and not choice.record
    for method, coupling in (
        ("chains", None),
        ("auto", "mixture"),
        ("mixture", "common"),
    ):
        with pytest.raises(ArgumentError, match="UCD: (method|coupling)"):
            UCD(method=method, coupling=coupling)
    tried = Centered(UCD()).choose(graph, past).estimator
    assert tried == Centered(UCD(method="mixture"))
    assert ucd._possible_methods(graph, True) == METHODS
    assert ucd._possible_methods(graph, False) == ("gibbs", "particles")
    assert ucd._possible_methods(gated(), True) == METHODS


def _network(params: Any, v: Any) -> Any:
    return jnp.tanh(v @ params).sum()


def test_networks_of_many_units_begin_with_mixtures() -> None:
    """Gibbs pairs, which may never meet there, are not tried."""
    init = np.ones((20, 3))
    factor = Factor("v", energy=_network, init=init, affine=False)
    graph = FactorGraph({"v": Bernoulli(20)}, factors=[factor])
    choice = UCD().choose(graph, {})
    assert choice.estimator == UCD(method="mixture", pool="persistent")
    assert choice.record == {"method": METHODS.index("mixture")}
    late = history(["mixture"] * 11, [1.0] * 11)
    assert UCD().choose(graph, late).estimator.method == "particles"
    soon = late | {"meeting_time_mean": np.full(11, 25.0)}
    assert UCD().choose(graph, soon).estimator == choice.estimator
    assert UCD(coupling="common").choose(graph, {}).estimator.method == "auto"


@pytest.mark.nightly
def test_a_continued_run_chooses_by_the_steps_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut before, in and after a comparison."""
    force(monkeypatch, ("gibbs", "particles"))
    complete = run()
    assert len(set(complete.history["method"].values)) > 1
    part = run(8)
    for steps in (8, 20, STEPS - 36):
        part = run(steps, start=part, params=None)
    assert part.estimator == complete.estimator
    for name in ("optimizer_state", "estimator_state"):
        pair = (getattr(part, name), getattr(complete, name))
        jax.tree.map(np.testing.assert_array_equal, *pair)


def test_a_method_is_one_of_these_estimators() -> None:
    assert UCD(method="mixture").current == ChainUCD(coupling="mixture")
    particles = UCD(num_pairs=80, method="particles").current
    assert particles == ParticleUCD(num_particles=160, posterior=ChainUCD(num_pairs=80))
    plain = initial(UCD(method="gibbs"), "rbm")
    particle = initial(UCD(method="particles"), "rbm")
    assert jax.tree.structure(plain) == jax.tree.structure(initial(UCD(), "rbm"))
    past = plain._replace(negative=jnp.float32(70), seen=jnp.int32(9))
    held = UCD(method="particles").adopt(past, particle)
    back = UCD().adopt(held, plain)
    assert (float(held.gibbs), float(back.negative), int(back.seen)) == (70, 70, 0)


def row_of(metrics: dict[str, float]) -> MetricTable:
    return MetricTable({name: np.array([value]) for name, value in metrics.items()})


def test_the_progress_bar_shows_meeting_times_without_the_lag() -> None:
    log = Log({})
    late = {"meeting_time_mean": 480.0, "meeting_time_max": 900.0, "lag": 350.0}
    log.steps = row_of(late | {"gradient_norm": 1.0})
    assert log.latest() == {"tau": "130", "max": "550", "lag": "350", "grad": "1"}
    early = {"meeting_time_mean": 1.5, "meeting_time_max": 2.0, "gradient_norm": 1.0}
    log.steps = row_of(early)
    assert log.latest() == {"tau": "1.5", "max": "2", "grad": "1"}
    ProgressBar(log, 1, 0, is_hidden=True).begin(UCD())
