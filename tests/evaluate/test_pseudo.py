# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pseudo-likelihood against conditionals summed over all joint states.

Tests evaluate/scores.py.
"""

import numpy as np
import pytest
import zoo

from ebmpp import Bernoulli, Bias, Bilinear, FactorGraph, Gaussian, Spin
from ebmpp.evaluate import pseudo_log_likelihood
from ebmpp.training import monitors
from helpers import nightly, random_params


def by_enumeration(graph, params, rows):
    """sum_i log p(v_i | v_-i), each a ratio of sums over joint states."""
    oracle = zoo.Oracle(graph, params, {})
    p = np.exp(oracle.log_weights - oracle.log_z)
    flat = lambda x: np.concatenate(
        [np.reshape(x[b], (len(x[b]), -1)) for b in graph.visible], 1
    )
    states, values = flat(oracle.x), []
    for row in flat(rows):
        same = states == row
        joint = p[same.all(1)].sum()
        values.append(
            sum(
                np.log(joint / p[np.delete(same, i, 1).all(1)].sum())
                for i in range(len(row))
            )
        )
    return np.array(values)


def visible_pair():
    return FactorGraph(
        {"a": Spin(2), "b": Bernoulli(3)},
        factors=[Bias("a"), Bias("b"), Bilinear("a", "b")],
    )


@pytest.mark.parametrize("name", ["categorical", "visible", nightly("rbm")])
def test_pseudo_likelihood_matches_enumeration(name):
    graph = visible_pair() if name == "visible" else zoo.graph(name)
    params, rng = random_params(graph, seed=1, scale=1.0), np.random.default_rng(0)
    rows = {
        b: v
        for b, v in zoo.Oracle(graph, params, {}).draw(rng, 3).items()
        if b in graph.visible
    }
    expected = by_enumeration(graph, params, rows)
    np.testing.assert_allclose(
        pseudo_log_likelihood(graph, params, rows), expected, rtol=1e-5
    )
    np.testing.assert_allclose(
        monitors.pseudo_log_likelihood(graph, rows)(params), expected.mean(), rtol=1e-5
    )


def test_pseudo_likelihood_of_independent_units_is_the_likelihood():
    graph = FactorGraph({"a": Gaussian(3)}, factors=[Bias("a")])
    mean, x = np.float32([0.5, -1.0, 2.0]), np.random.default_rng(0).normal(size=(4, 3))
    exact = -0.5 * ((x - mean) ** 2 + np.log(2 * np.pi)).sum(1)
    np.testing.assert_allclose(
        pseudo_log_likelihood(graph, {"a": mean}, x), exact, rtol=1e-5
    )
