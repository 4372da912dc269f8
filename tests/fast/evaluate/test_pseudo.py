# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pseudo-likelihood against conditionals that are summed from all joint states."""

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, Categorical, FactorGraph, Gaussian, Spin
from ebmpp.errors import IntractableError, ParameterError
from ebmpp.evaluate import pseudo_log_likelihood
from ebmpp.training import monitors
from helpers import assert_rows_law, enumerate_numpy, random_params

KEY = jax.random.key(0)
MIXED = FactorGraph(
    {"a": Spin(2), "c": Categorical(2, num_categories=3)},
    {"h": Bernoulli(2)},
    [Bias("a"), Bias("c"), Bias("h"), Bilinear("a", "h"), Bilinear("c", "h")],
)
VISIBLE = FactorGraph({"a": Spin(2), "b": Bernoulli(3)}, factors=[Bias("a"), Bias("b"), Bilinear("a", "b")])


def by_enumeration(graph, params, rows):
    """sum_i log p(v_i | v_-i), each a ratio of sums over joint states."""
    states, p, _ = enumerate_numpy(graph, params)
    listed = np.array([np.concatenate([s[b].ravel() for b in graph.visible]) for s in states])
    made = []
    for row in np.concatenate([np.reshape(rows[b], (len(rows[b]), -1)) for b in graph.visible], axis=1):
        same = listed == row
        joint = p[same.all(1)].sum()
        made.append(sum(np.log(joint / p[np.delete(same, i, 1).all(1)].sum()) for i in range(len(row))))
    return np.array(made)


@pytest.mark.parametrize(
    ("graph", "rows"),
    [
        (MIXED, {"a": np.array([[1, -1], [1, 1]]), "c": np.array([[0, 2], [1, 1]])}),
        (VISIBLE, {"a": np.array([[1, -1], [1, 1]]), "b": np.array([[0, 1, 1], [1, 0, 1]])}),
    ],
    ids=["latents", "visible"],
)
def test_against_enumeration(graph, rows):
    params = random_params(graph, seed=1, scale=1.0)
    wanted = by_enumeration(graph, params, rows)
    np.testing.assert_allclose(pseudo_log_likelihood(graph, params, rows), wanted, rtol=1e-5)
    if graph is VISIBLE:
        monitor = monitors.pseudo_log_likelihood(graph, rows)
        np.testing.assert_allclose(monitor(params), wanted.mean(), rtol=1e-5)
    many = {b: np.repeat(v[:1], 500, 0) for b, v in rows.items()}
    some = pseudo_log_likelihood(graph, params, many, num_units=2, rng_key=KEY)
    assert_rows_law(some, wanted[0])
    assert len(np.unique(np.asarray(some))) > 3


def test_of_independent_units_it_is_the_likelihood():
    graph = FactorGraph({"a": Gaussian(3)}, factors=[Bias("a")])
    params, x = {"a": jnp.array([0.5, -1.0, 2.0])}, np.random.default_rng(0).normal(size=(4, 3))
    exact = -0.5 * ((x - np.asarray(params["a"])) ** 2 + np.log(2 * np.pi)).sum(1)
    np.testing.assert_allclose(pseudo_log_likelihood(graph, params, x), exact, rtol=1e-5)


def test_what_has_no_conditional_is_refused():
    deep = ebmpp.layered(v=Bernoulli(3), a=Bernoulli(2), b=Bernoulli(2))
    with pytest.raises(IntractableError, match="latent blocks 'a' and 'b' interact .*reconstruction"):
        monitors.pseudo_log_likelihood(deep, np.ones((2, 3)))
    grey = ebmpp.layered(v=Gaussian(3), h=Bernoulli(2))
    with pytest.raises(IntractableError, match=r"a unit of 'v' \(Gaussian.* infinitely many values"):
        pseudo_log_likelihood(grey, grey.init(KEY), np.ones((2, 3)))
    params, rows = random_params(VISIBLE), {"a": np.ones((1, 2)), "b": np.ones((1, 3))}
    with pytest.raises(ValueError, match=r"rng_key=jax.random.key"):
        pseudo_log_likelihood(VISIBLE, params, rows, num_units=1)
    with pytest.raises(ValueError, match="num_units is an int of at least 1, not 0"):
        pseudo_log_likelihood(VISIBLE, params, rows, num_units=0, rng_key=KEY)
    with pytest.raises(ParameterError, match="lacks factor"):
        pseudo_log_likelihood(VISIBLE, {"a": params["a"]}, rows)
