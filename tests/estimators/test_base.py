# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of estimators: typed, columns by name, pytrees, and readable categories."""

import numpy as np
import zoo

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import PCD
from ebmpp.core import random
from ebmpp.estimators import HasChains, StepMetrics
from ebmpp.estimators.base import METHODS, Batch, column_of, decode, total_unmet


class Inner(StepMetrics):
    num_unmet: Array


class Outer(StepMetrics):
    num_unmet: Array
    posterior: Inner | None
    acceptance: Array | None = None


def test_metrics_are_columns_by_name_and_pytrees() -> None:
    metrics = Outer(num_unmet=jnp.array(2), posterior=Inner(num_unmet=jnp.array(3)))
    assert list(metrics) == ["num_unmet", "posterior_num_unmet"] and len(metrics) == 2
    assert {**metrics} == {"num_unmet": 2, "posterior_num_unmet": 3}
    doubled = jax.jit(lambda m: jax.tree.map(lambda a: 2 * a, m))(metrics)
    assert isinstance(doubled, Outer) and doubled["posterior_num_unmet"] == 6
    exact = Outer(num_unmet=jnp.array(2), posterior=None, acceptance=jnp.array(0.5))
    assert list(exact) == ["num_unmet", "acceptance"]
    assert (total_unmet(metrics), total_unmet(exact), total_unmet({})) == (5, 2, 0)


def test_columns_have_labels_and_categories_names() -> None:
    assert column_of("num_unmet").label == "unmet pairs"
    assert column_of("held_out").label == "held out"
    names = decode("method", np.array([np.nan, 2.0, 0.0]))
    assert names.tolist() == ["", METHODS[2], METHODS[0]]
    assert decode("lag", np.ones(2)).tolist() == [1, 1]


def test_keys_of_an_estimator_may_be_typed() -> None:
    graph, params, rows = (f("rbm") for f in (zoo.graph, zoo.params, zoo.rows))

    def step(key: Array) -> Array:
        state = PCD(num_chains=4).init_state(graph, params, rows, zoo.BATCH, key)
        batch = Batch.uniform(rows)
        return PCD().estimate(graph, params, state, batch, key).gradient["v"]

    results = jax.jit(step)(zoo.KEY), jax.jit(step)(random.key_pair(zoo.KEY))
    np.testing.assert_array_equal(*results)


def test_states_tell_if_they_have_chains() -> None:
    class State:
        model_chains = {"v": np.zeros((2, 3))}

    assert isinstance(State(), HasChains) and not isinstance((), HasChains)
