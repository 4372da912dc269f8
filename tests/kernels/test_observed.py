# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks with some observed units: the distribution of the others, and refusals.

Tests graph/states.py.
"""

from typing import Any

from mcmc_tools import scan_kernel, strong_params
from metropolis_tools import Law
import numpy as np
import pytest
import zoo

import jax

import ebmpp
from ebmpp import Bernoulli, Gaussian, Observed, contrib
from ebmpp.errors import StateError
from helpers import assert_law, pair, random_params

#: each row has its own masks: some of both blocks, nothing, all of one block
ROWS = {
    "v": Observed(
        np.array([[2, -1], [-1, -1], [1, 0]]),
        np.array([[True, False], [False, False], [True, True]]),
    ),
    "h": Observed(
        np.array([[np.nan, 1.0], [np.nan] * 2, [np.nan, 0.0]]),
        np.array([[False, True], [False, False], [False, True]]),
    ),
}


def test_free_units_have_the_distribution_given_the_observed_ones():
    graph, params = zoo.graph("categorical"), strong_params("categorical")
    state, _, _ = scan_kernel(
        ebmpp.BlockedGibbs(graph), 20, params, num_chains=3000, clamped=ROWS
    )
    assert state.z["v"].shape == (3000, 3, 2) and state.z["v"].dtype == np.int32
    for b, observed in ROWS.items():
        assert ((state.z[b] == observed.values) | ~observed.known).all()
    for row in range(3):
        observed = {b: (o.values[row], o.known[row]) for b, o in ROWS.items()}
        exact = Law(
            graph,
            params,
            lambda x, g=observed: all((x[b] == v)[k].all() for b, (v, k) in g.items()),
        )
        exact.assert_law(
            {b: z[:, row] for b, z in state.z.items()},
            exact.target,
            3 * len(exact.states),
        )


MASK = np.array([True, False, True, True])


@pytest.mark.parametrize("ignored", [np.nan, np.inf, -7.5])
def test_values_of_unknown_units_are_ignored(ignored):
    observed = {"v": Observed(np.array([1, ignored, 0, 0]), MASK)}
    kernel, args = ebmpp.BlockedGibbs(zoo.graph("rbm")), (strong_params(),)
    # observed units win
    z = kernel.init(zoo.KEY, 0, {"v": np.array([0.0, 1, 1, 0])}, args, observed).z
    np.testing.assert_array_equal(z["v"], [1, 1, 0, 0])
    assert kernel.init(zoo.KEY, 0, None, args, observed).z["v"][1] in (0, 1)


@pytest.mark.parametrize(
    ("block", "observed", "message"),
    [
        ("v", Observed(np.ones(4), MASK.astype(int)), "'v'.*booleans.*int"),
        ("v", Observed(np.ones(5), np.ones(5, bool)), r"'v'.*\(5,\)"),
        ("v", Observed(np.ones(4), np.ones(2, bool)), r"known.*\(2,\)"),
        ("v", Observed(np.array([1, 0, 2.0, 0]), MASK), r"'v'.*2\.0"),
        ("v", Observed(np.array([1, 0, np.nan, 0]), MASK), "nan"),
        ("v", Observed("ones", MASK), "'v'.*'ones'"),
        ("w", Observed(np.ones(4), MASK), "unknown block 'w'"),
    ],
)
def test_wrong_observations_are_refused(block, observed, message):
    graph, params = zoo.graph("rbm"), strong_params()
    for kernel in (
        ebmpp.BlockedGibbs,
        ebmpp.MaximalCoupling,
        contrib.MetropolisCoupling,
    ):
        with pytest.raises(StateError, match=message):
            kernel(graph).init(zoo.KEY, 0, None, (params,), {block: observed})
    with pytest.raises(StateError, match=message):
        ebmpp.local_search(graph, params, rng_key=zoo.KEY, **{block: observed})
    with pytest.raises(StateError, match=message):
        ebmpp.unbiased_expectation(
            graph, params, lambda x: x, rng_key=zoo.KEY, **{block: observed}
        )


VALUES = np.array([1.0, 0.0, 0.0, 1.0])
MASKS = {"some": [True, False, True, False], "none": [False] * 4, "all": [True] * 4}


def units(x: dict) -> dict:
    return x


def estimate(coupling: Any, mask: str, **options: Any) -> Any:
    """The mask is an argument of the compiled program, so that all masks share it."""
    options = {
        "v": Observed(VALUES, np.array(MASKS[mask])),
        "num_pairs": 6000,
    } | options
    options |= {"rng_key": jax.random.key(2), "coupling": coupling}
    return ebmpp.unbiased_expectation(
        zoo.graph("rbm"), strong_params(), units, **options
    )


@pytest.mark.nightly
@pytest.mark.parametrize("coupling", ["maximal", contrib.metropolis_sweep])
def test_estimates_are_unbiased_given_the_observed_units(coupling: str) -> None:
    for mask, options in (
        ("some", {"k": 1, "m": 1, "lag": 1}),
        ("none", {"k": 2, "m": 6, "lag": 3}),
    ):
        result, known = estimate(coupling, mask, **options), np.array(MASKS[mask])
        model = Law(
            zoo.graph("rbm"),
            strong_params(),
            lambda x, k=known: (x["v"] == VALUES)[k].all(),
        )
        free = {"v": ~known, "h": slice(None)}
        for b, units in free.items():
            exact = model.target @ np.array([x[b] for x in model.states])
            error = result.standard_error[b]
            assert_law(result.value[b][units], exact[units], error[units], 14)
        np.testing.assert_array_equal(result.value["v"][known], VALUES[known])


@pytest.mark.nightly
def test_observed_units_need_no_rejection_trials() -> None:
    assert estimate("maximal", "none").trials > 1.1
    result = estimate("maximal", "all")  # neither layer has anything to reject
    assert result.trials == 1 and (result.meeting_time <= 2).all()
    # all pairs share one observation
    with pytest.raises(StateError, match="leading axes"):
        estimate(
            "maximal", "some", v=Observed(np.ones((6, 4)), np.array(MASKS["some"]))
        )


@pytest.mark.nightly
def test_observed_real_units_stay_fixed() -> None:
    graph = pair(Gaussian(2), Bernoulli(2))
    params, first = random_params(graph, seed=4, scale=1.2), 0.7
    # fmt: skip
    result = ebmpp.unbiased_expectation(
        graph,
        params,
        units,
        rng_key=jax.random.key(1),
        num_pairs=6000,
        coupling=("reflection", "common"),
        a=Observed(np.array([first, np.inf]), np.array([True, False])),
    )
    bias, other, weight = (
        np.asarray(params[name], float) for name in ("a", "b", "a:b")
    )
    states = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], float)
    eta = bias + states @ weight.T
    log_weight = states @ other + first * eta[:, 0] + 0.5 * eta[:, 1] ** 2
    probs = np.exp(log_weight - np.logaddexp.reduce(log_weight))
    assert result.value["a"][0] == pytest.approx(first, abs=1e-6)
    assert_law(
        result.value["a"][1], probs @ eta[:, 1], result.standard_error["a"][1], 3
    )
    assert_law(result.value["b"], probs @ states, result.standard_error["b"], 3)
