# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Monitors against enumeration, and their programs.

Tests training/monitors.py.
"""

from typing import Any

import numpy as np
from oracle import enumerate_numpy
import pytest
import zoo

import jax

import ebmpp
from ebmpp import CD, PCD, Bernoulli, ParticleUCD, Stage
from ebmpp.errors import IntractableError, StateError
from ebmpp.estimators import gradient_bias
from ebmpp.training import monitors
from helpers import assert_rows_law


def marginal(
    name: str, row: np.ndarray
) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """Return probabilities of the joint states that contain a visible row, and these states."""
    states, weights, _ = enumerate_numpy(zoo.graph(name), zoo.params(name))
    index = [i for i, x in enumerate(states) if (x["v"] == row).all()]
    return weights[index], [states[i] for i in index]


def test_log_likelihood_is_the_mean_over_rows() -> None:
    rows = zoo.rows("rbm", 4)["v"]
    expected = np.mean([np.log(marginal("rbm", row)[0].sum()) for row in rows])
    monitor = monitors.log_likelihood(zoo.graph("rbm"), rows)
    np.testing.assert_allclose(monitor(zoo.params("rbm")), expected, rtol=1e-5)
    other = monitors.log_likelihood(zoo.graph("rbm"), 1 - rows)
    # one program for all data
    assert other.fn == monitor.fn and hash(other.fn) == hash(monitor.fn)


def test_free_energy_gap_is_the_gap_of_log_likelihoods() -> None:
    rows = zoo.rows("rbm", 4)["v"]
    gap = monitors.free_energy_gap(zoo.graph("rbm"), rows[:1], rows[1:])(
        zoo.params("rbm")
    )
    log_p = [np.log(marginal("rbm", row)[0].sum()) for row in rows]
    np.testing.assert_allclose(gap, log_p[0] - np.mean(log_p[1:]), rtol=1e-4)


def test_estimated_log_likelihood_is_near_the_exact_one() -> None:
    graph, params, rows = zoo.graph("rbm"), zoo.params("rbm"), zoo.rows("rbm", 4)["v"]
    options = {"num_particles": 400, "num_temperatures": 60, "data": 1 - rows}
    make = lambda i: monitors.estimated_log_likelihood(
        graph, rows, rng_key=jax.random.key(i), **options
    )
    values = np.array([make(i)(params) for i in range(10)])
    exact = float(monitors.log_likelihood(graph, rows)(params))
    assert_rows_law(values[:, None], [exact], comparisons=1)
    assert make(0)(params) == values[0] != values[1]


def test_intractable_sums_are_refused_at_once() -> None:
    big = ebmpp.layered(v=Bernoulli(40), h=Bernoulli(40))
    with pytest.raises(IntractableError, match=r"2\*\*40"):
        monitors.log_likelihood(big, np.zeros((2, 40)))
    with pytest.raises(IntractableError, match="'h1' and 'h2'"):
        monitors.free_energy_gap(zoo.graph("deep"), np.eye(3), np.eye(3))


def exact_reconstruction(name: str, rows: np.ndarray) -> float:
    """Return the mean over latents given v of the squared error, by enumeration of joint states."""
    graph = zoo.graph(name)
    states, p, _ = enumerate_numpy(graph, zoo.params(name))
    statistics = np.stack([x["v"][:, None] == np.arange(3) for x in states]).astype(
        float
    )
    errors = []
    for row in rows:
        weights, joint = marginal(name, row)
        for weight, x in zip(weights / weights.sum(), joint, strict=True):
            same = np.array([(y["h"] == x["h"]).all() for y in states])
            mean = np.tensordot(p[same] / p[same].sum(), statistics[same], 1)
            errors.append(
                weight * (((row[:, None] == np.arange(3)) - mean) ** 2).mean()
            )
    return float(np.sum(errors)) / len(rows)


def test_reconstruction_has_the_mean_of_a_draw_of_the_latents() -> None:
    rows = np.array([[0, 2], [1, 1], [2, 2]])
    monitor = lambda key: monitors.reconstruction(
        zoo.graph("categorical"), rows, rng_key=key
    )(zoo.params("categorical"))
    values = jax.vmap(monitor)(jax.random.split(zoo.KEY, 400))
    assert_rows_law(values, exact_reconstruction("categorical", rows))
    deep = jax.tree.map(np.zeros_like, zoo.params("deep"))
    assert (
        float(
            monitors.reconstruction(zoo.graph("deep"), np.eye(3), rng_key=zoo.KEY)(deep)
        )
        == 0.25
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda graph, rows: monitors.log_likelihood(graph, rows),
        lambda graph, rows: monitors.free_energy_gap(graph, rows / 2, rows),
        lambda graph, rows: monitors.reconstruction(graph, rows, rng_key=zoo.KEY),
        lambda graph, rows: monitors.gradient_bias(graph, rows, CD(), rng_key=zoo.KEY),
    ],
)
def test_data_of_monitors_are_checked_at_once(make: Any) -> None:
    with pytest.raises(StateError, match=r"got 2.0 at index \(0, 0\)"):
        make(zoo.graph("rbm"), np.full((2, 4), 2.0))


@pytest.mark.nightly
def test_gradient_bias_starts_from_the_state_of_the_run() -> None:
    """It is nan where the chains belong to another estimator or stage."""
    graph, rows = zoo.graph("rbm"), zoo.rows("rbm", 4)["v"]
    stages = [
        Stage(num_steps=1, estimator=PCD(num_chains=20)),
        Stage(num_steps=1, estimator=CD()),
    ]
    options = {"rng_key": zoo.KEY, "num_repeats": 3, "num_references": 3}
    options |= {"reference": ParticleUCD(num_particles=20, max_rungs=4)}
    bias = monitors.gradient_bias(graph, rows, PCD(num_chains=20), **options)
    run = {
        "rng_key": zoo.KEY,
        "monitors": {"bias": bias},
        "monitor_every": 1,
        "progress_bar": False,
    }
    fit = ebmpp.fit(graph, rows, schedule=stages, **run)
    values = fit.history["bias"].values
    assert (
        np.isfinite(values[:2]).all() and np.isnan(values[2]) and fit.estimator == CD()
    )
    direct = gradient_bias(graph, zoo.params("rbm"), rows, CD(), **options)
    monitor = monitors.gradient_bias(graph, rows, CD(), **options)
    assert monitor(zoo.params("rbm")) == direct.total.squared_bias
