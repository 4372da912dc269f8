# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Warnings of a run: a falling likelihood, late pairs and growing gradients.

Tests training/observers/diagnosis.py.
"""

import dataclasses
import itertools
import os
from typing import Any
import warnings

from network_graphs import enumerated
import numpy as np
import pytest
from training_tools import Recorder, train
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, Factor, monitors
from ebmpp.estimators.base import Estimate
from ebmpp.training.monitors import Monitor
from ebmpp.training.observers.diagnosis import (
    diagnose_explosion,
    diagnose_growth,
    diagnose_pairs,
)
from ebmpp.training.observers.monitoring import diagnose_fall

#: exact values of PCD with 20 chains at rate 1, every 200 steps
NOISY = """
    -6.2 -5.7 -4.0 -7.8 -9.1 -8.4 -18.0 -7.5 -13.2 -7.8 -19.4
    -14.3 -15.3 -13.3 -21.3 -18.8 -19.5 -25.0 -20.6 -24.1 -9.4
""".split()
RISING = -100 - 100 * np.exp(-np.arange(60) / 8)


def fall(values: Any, tail: int = 1) -> str | None:
    values = np.asarray(values, float)
    return diagnose_fall("ll", 10 * np.arange(len(values)), values, tail)


@pytest.mark.parametrize(
    ("values", "tail", "falls"),
    [
        ([-7.1, -194], 1, True),
        ([-25, -7.1, -19.2], 1, True),
        ([-25, -7.1, -19.2], 2, False),
        ([-93.9, -97, -101, -106, -112, -121], 2, True),
        ([-93.9, -97, np.nan, -106, -112, -np.inf], 2, True),
        ([-200, -100, -130, -101, -99, -98], 2, False),
        ([np.nan, np.nan, -1], 1, False),
        ([-5], 1, False),
        (NOISY, 1, True),
        (NOISY, 2, False),
        (NOISY[::-1], 1, False),
    ],
)
def test_a_fall_is_far_below_the_best_value(
    values: list, tail: int, falls: bool
) -> None:
    message = fall(values, tail)
    assert (message is not None) == falls
    assert message is None or ("'ll'" in message and "keep_best" in message)


@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_noise_is_no_fall(noise: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        values = RISING + noise * rng.normal(size=60)
        assert (
            not any(fall(values[:stop], 2) for stop in range(10, 60, 5))
            and fall(values) is None
        )


SUM = Monitor(lambda p: -20.0 * p["v"].sum(), log_likelihood=True)


def test_a_run_warns_once_of_a_likelihood_that_falls() -> None:
    options = {"estimator": Recorder(), "monitor_every": 1, "num_steps": 30}
    both = {"sum": SUM, "other": SUM}
    with pytest.warns(UserWarning, match="keep_best='sum'.*rate") as caught:
        train(monitors=both, **options)
    # of the check, between the user's call and the warning
    has_frames = "EBMPP_CHECK_SHAPES" in os.environ
    assert len(caught) == 1 and (
        has_frames or caught[0].filename.endswith("training_tools.py")
    )
    # the best params are recorded, but are the first ones
    with pytest.warns(UserWarning, match="best before the first step"):
        train(monitors={"sum": SUM}, keep_best="sum", **options)
    train(monitors={"sum": dataclasses.replace(SUM, log_likelihood=False)}, **options)
    graph, rows = zoo.graph("rbm"), zoo.rows("rbm")
    assert monitors.estimated_log_likelihood(
        graph, rows, rng_key=zoo.KEY
    ).log_likelihood
    assert monitors.pseudo_log_likelihood(graph, rows).log_likelihood
    assert not monitors.reconstruction(graph, rows, rng_key=zoo.KEY).log_likelihood


@pytest.mark.nightly
def test_pcd_at_a_large_rate_warns() -> None:
    graph, rows = (
        ebmpp.layered(v=Bernoulli(9), h=Bernoulli(9)),
        ebmpp.data.bars_and_stripes(3),
    )
    options = {
        "optimizer": optax.sgd(1.0),
        "estimator": PCD(num_chains=10),
        "progress_bar": False,
    }
    options |= {
        "monitors": {"exact": monitors.log_likelihood(graph, rows)},
        "monitor_every": 50,
    }
    with pytest.warns(UserWarning, match="'exact' fell from -4"):
        ebmpp.fit(graph, rows, rng_key=jax.random.key(2), num_steps=800, **options)


#: Mean sweeps of UCD() on MNIST at 784x100, rate 0.1, at steps 5, 15, ..., 115.
MNIST = np.interp(
    np.arange(120), np.arange(5, 120, 10), [5, 5, 6, 10, 18, 24, 38, 45, 47, 55, 71, 94]
)
#: The same of `make demo` at 64x20, which ends in half a minute, in round numbers.
DEMO = 55 * (np.arange(101) / 100) ** 2
BUSY = 20 - 18 * np.exp(-np.arange(101) / 30)  # a sound run, whose lag adapts


@pytest.mark.parametrize(
    ("sweeps", "remaining", "units", "warns"),
    [
        (MNIST[:101], 899, 884, True),
        (MNIST[:101], 20, 884, False),
        (MNIST[:25], 975, 884, False),
        (DEMO, 900, 84, False),
        (DEMO, 900, 884, True),
        (BUSY, 3000, 884, False),
        (np.full(1, 2000.0), 999, 884, True),
        (np.full(101, 100.0), 10_000, 884, False),
    ],
)
def test_pairs_are_too_late_for_the_remaining_steps(
    sweeps: Any, remaining: int, units: int, warns: bool
) -> None:
    messages = [
        diagnose_pairs(sweeps, remaining, pace, units) for pace in (1e-3, np.nan)
    ]
    assert [message is not None for message in messages] == [warns, warns]
    for message in filter(None, messages):
        assert all(
            word in message
            for word in ("Centered(PCD())", "ParticleUCD", 'method="mixture"')
        )


@dataclasses.dataclass(frozen=True)
class Late(Recorder):
    """Its pairs take more sweeps from step to step."""

    slope: float = 40.0

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Any, key: Any
    ) -> Estimate:
        result = super().estimate(graph, params, state, batch, key)
        sweeps = self.slope * state["steps"].astype(jnp.float32)
        return result._replace(metrics={"sweeps": sweeps, "meeting_time_mean": sweeps})


def test_a_run_says_early_that_its_pairs_meet_too_late() -> None:
    seen: list[int] = []
    options = {
        "monitor_every": 10,
        "callbacks": [lambda progress: seen.append(progress.step)],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"Centered\(PCD\(\)\)"):
            train(estimator=Late(slope=4000.0), num_steps=1000, **options)
        assert seen[-1] <= 100
        train(estimator=Late(), num_steps=20)
        train(estimator=Late(slope=0.3), num_steps=300)


#: gradient norms of edges and triangles of 12 nodes, of which 7 form a clique
PHASES = np.array(
    """
    9.01 22 164 40.2 38.7 37.9 29.1 8.27 13.5 180 41.4 41 39.1 37.5 21.6 108 40.2 36.1
    30.1 89.1 38 36.2 24.1 180 40.3 40.1 38.2 34.7 25.8 164 41.2
    """.split(),
    float,
)

#: the same, of 6 nodes that form a clique, and of other edges
LEAPS = np.array(
    """
    14.2 15.5 30.9 22.7 13 199 28.5 25.5 25.2 25.1 25.1 22.3 20.4 16.8 8.14 7.98 12.5
    9.17 12.8 152 26.7 26.4 25.4 24.3 24 19.1 32.6 20.4 15 171 26.7
    """.split(),
    float,
)


@pytest.mark.parametrize(
    ("norms", "grows"),
    [
        (PHASES, True),
        (LEAPS, True),
        (np.r_[LEAPS[:29], 24, 25], False),
        (PHASES[:29], False),
        (PHASES[::-1], False),
        (25 * np.exp(-np.arange(31) / 4) + 1, False),
        (np.random.default_rng(0).gamma(2.0, size=300), False),
    ],
)
def test_gradients_grow_in_a_model_with_two_phases(norms: Any, grows: bool) -> None:
    message = diagnose_growth(norms)
    assert (message is not None) == grows
    assert message is None or ("rate" in message and "two phases" in message)


@pytest.mark.nightly
@pytest.mark.parametrize("num_cliques", [2, 6])
def test_a_random_graph_with_two_phases_warns(num_cliques: int) -> None:
    edges = list(itertools.combinations(range(12), 2))
    triples = np.array(
        [
            [edges.index(pair) for pair in itertools.combinations(triple, 2)]
            for triple in itertools.combinations(range(12), 3)
        ]
    )
    pairs = [pair for t in triples.tolist() for pair in itertools.combinations(t, 2)]

    def energy(params: Any, x: Any) -> Any:
        return -params[0] * x.sum() - params[1] * x[triples].prod(-1).sum()

    factor = Factor("x", energy=energy, init=np.zeros(2), lateral={"x": pairs})
    graph = ebmpp.FactorGraph({"x": Bernoulli(66)}, factors=[factor])
    cliques = [[float(a % num_cliques == b % num_cliques) for a, b in edges]]
    options: dict[str, Any] = {"estimator": UCD(), "optimizer": optax.sgd(0.02)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ebmpp.fit(
            graph,
            np.array(cliques),
            rng_key=jax.random.key(1),
            num_steps=31,
            progress_bar=False,
            **options,
        )
    messages = [str(w.message) for w in caught]
    assert any("two phases" in message for message in messages) == (num_cliques == 2)


#: medians of a tenth of the steps each, of networks on 8x8 digits: PCD that leaves a
#: saddle point, slowly, and that diverges
SADDLE = [0.4, 2.9, 6.8, 7.3, 6.9, 7.0, 6.8, 6.5, 6.0, 6.2]
SLOW = [0.4, 0.65, 1.48, 2.36, 2.78, 3.96, 4.24, 4.52, 4.98, 5.8]
DIVERGED = [4.4, 4.0, 3.3, 2.9, 2.6, 3.7, 3e4, 1.4e5, 1.5e5, 3e5]


@pytest.mark.parametrize(
    ("tenths", "diverges"), [(SADDLE, False), (SLOW, False), (DIVERGED, True)]
)
@pytest.mark.parametrize("size", [10, 100])
def test_gradients_of_networks_grow_by_orders_of_magnitude(
    tenths: list[float], diverges: bool, size: int
) -> None:
    noise = np.random.default_rng(0).gamma(9.0, 1 / 9, 10 * size)
    norms = noise * np.repeat(tenths, size)
    message = diagnose_explosion(norms)
    assert (message is not None) == diverges
    assert message is None or "Reduce the rate" in message
    assert diagnose_explosion(norms[-60:]) is None


@pytest.mark.parametrize("rate", [-0.2, 0.2])
def test_a_network_that_diverges_warns(rate: float) -> None:
    graph = enumerated("visible").graph
    options: dict[str, Any] = {"estimator": Recorder(), "optimizer": optax.sgd(rate)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = np.zeros((4, 8))
        ebmpp.fit(
            graph, data, rng_key=zoo.KEY, num_steps=90, progress_bar=False, **options
        )
    messages = [str(w.message) for w in caught]
    assert any("training diverged" in m for m in messages) == (rate < 0)
