# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased estimates given observed units."""

from typing import Any

from mcmc_tools import strong_params
from metropolis_tools import Law
import numpy as np
import pytest
import zoo

import jax

import ebmpp
from ebmpp import Bernoulli, Gaussian, Observed
from ebmpp.errors import StateError
from helpers import assert_law, pair, random_params

VALUES = np.array([1.0, 0.0, 0.0, 1.0])
MASKS = {"some": [True, False, True, False], "none": [False] * 4, "all": [True] * 4}


def units(x: dict) -> dict:
    return x


def estimate(coupling: str, mask: str, seed: int = 2, **options: Any) -> Any:
    """The mask is an argument of the compiled program, so that all masks share it."""
    options = {"rng_key": jax.random.key(seed), "num_pairs": 6000, "coupling": coupling} | options
    observed = Observed(VALUES, np.array(MASKS[mask]))
    return ebmpp.unbiased_expectation(zoo.graph("rbm"), strong_params(), units, v=observed, **options)


@pytest.mark.parametrize("coupling", ["maximal", "metropolis"])
def test_estimates_are_unbiased_given_the_observed_units(coupling: str) -> None:
    for mask, options in (("some", {"k": 1, "m": 1, "lag": 1}), ("none", {"k": 2, "m": 6, "lag": 3})):
        result, known = estimate(coupling, mask, **options), np.array(MASKS[mask])
        model = Law(zoo.graph("rbm"), strong_params(), lambda x, k=known: (x["v"] == VALUES)[k].all())
        for b in ("v", "h"):
            exact = model.target @ np.array([x[b] for x in model.states])
            assert_law(result.value[b], exact, result.standard_error[b], 14)


def test_observed_units_need_no_rejection_trials() -> None:
    assert estimate("maximal", "none").trials > 1.1
    result = estimate("maximal", "all")  # neither layer has anything to reject
    assert result.trials == 1 and (result.meeting_time <= 2).all()


def test_observed_real_units_stay_fixed() -> None:
    graph = pair(Gaussian(2), Bernoulli(2))
    params, first = random_params(graph, seed=4, scale=1.2), 0.7
    result = ebmpp.unbiased_expectation(
        graph, params, units, rng_key=jax.random.key(1), num_pairs=6000, coupling=("reflection", "common"),
        a=Observed(np.array([first, np.inf]), np.array([True, False])),
    )  # fmt: skip
    bias, other, weight = (np.asarray(params[name], float) for name in ("a", "b", "a:b"))
    states = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], float)
    eta = bias + states @ weight.T
    log_weight = states @ other + first * eta[:, 0] + 0.5 * eta[:, 1] ** 2
    probs = np.exp(log_weight - np.logaddexp.reduce(log_weight))
    assert result.value["a"][0] == pytest.approx(first, abs=1e-6)
    assert_law(result.value["a"][1], probs @ eta[:, 1], result.standard_error["a"][1], 3)
    assert_law(result.value["b"], probs @ states, result.standard_error["b"], 3)


def test_all_pairs_share_one_observation() -> None:
    observed = Observed(np.ones((6, 4)), np.array(MASKS["some"]))
    with pytest.raises(StateError, match="without leading axes"):
        ebmpp.unbiased_expectation(
            zoo.graph("rbm"), strong_params(), units, rng_key=zoo.KEY, num_pairs=6, v=observed
        )
