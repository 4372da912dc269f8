# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The monitored variance of gradients against a known one.

Tests contrib/estimators/gradient_variance.py.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from training_tools import ROWS, SGD, WALKER, train
import zoo

import jax
import jax.numpy as jnp

from ebmpp import Stage
from ebmpp.contrib import SDCP, gradient_variance
from ebmpp.core import random
from ebmpp.estimators.base import Estimate, Estimator
from ebmpp.training.monitors import Monitor
from helpers import assert_law


@dataclasses.dataclass(frozen=True)
class Noise(Estimator):
    """A gradient of known variance."""

    scale: float

    def init_state(
        self, graph: Any, params: Any, data: Any, batch: int, key: Any
    ) -> tuple:
        return ()

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Any, key: Any
    ) -> Estimate:
        flat, unravel = jax.flatten_util.ravel_pytree(params)
        noise = jax.random.normal(jax.random.wrap_key_data(key), flat.shape)
        return Estimate(unravel(100 + self.scale * noise), state, {})


def test_gradient_variance_is_summed_over_all_params() -> None:
    repeats, count = 500, 19
    rows, params = zoo.rows("rbm", 4)["v"], zoo.params("rbm")
    value = gradient_variance(zoo.graph("rbm"), rows, Noise(2.0), repeats, zoo.KEY)(
        params
    )
    expected = 4.0 * count
    # chi-squared
    assert_law(value, expected, expected * np.sqrt(2 / ((repeats - 1) * count)))


@pytest.mark.nightly
def test_gradient_variance_starts_from_the_state_of_the_run() -> None:
    graph = zoo.graph("binomial")
    variance = gradient_variance(graph, ROWS[:4], WALKER, 200, zoo.KEY)
    still = gradient_variance(graph, ROWS[:4], Noise(1.0), 20, zoo.KEY)
    stages = [
        Stage(num_steps=2, estimator=e, optimizer=SGD) for e in (WALKER, Noise(0.0))
    ]
    walk = Monitor(
        lambda params, state: state["walk"] if state else jnp.nan, takes_state=True
    )
    watched = {"variance": variance, "walk at": walk, "still": still}
    history = train(schedule=stages, monitors=watched, monitor_every=1).history
    # a uniform step in [-1, 1] times 0.1, the same in all 8 params; its fourth moment
    # is 1/5
    expected = 8 * 0.01 / 3
    assert_law(
        history["variance"][:3], expected, expected * np.sqrt((9 / 5 - 1) / 200) * 1.1
    )
    assert np.isnan(history["variance"][3:]).all() and history["still"].notnull().all()
    np.testing.assert_array_equal(history["walk at"][1:3], history["walk"][:2])


def test_gradient_variance_is_nan_where_the_state_is_of_another_batch_size() -> None:
    """S-DCP carries a chain per row of the run's batches."""
    graph, rows, params = zoo.graph("rbm"), zoo.rows("rbm", 4)["v"], zoo.params("rbm")
    variance = gradient_variance(graph, rows, SDCP(d=2, k=1), 2, zoo.KEY)
    state = SDCP(d=2, k=1).init_state(
        graph, params, {"v": rows[:2]}, 2, random.key_pair(zoo.KEY)
    )
    assert np.isnan(variance(params, state))
