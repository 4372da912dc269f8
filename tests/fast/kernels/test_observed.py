# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks with some observed units: the distribution of the others, and refusals."""

from mcmc_tools import scan_kernel, strong_params
from metropolis_tools import Law
import numpy as np
import pytest
import zoo

import ebmpp
from ebmpp import Observed
from ebmpp.errors import StateError

#: each row has its own masks: some of both blocks, nothing, all of one block
ROWS = {
    "v": Observed(
        np.array([[2, -1], [-1, -1], [1, 0]]), np.array([[True, False], [False, False], [True, True]])
    ),
    "h": Observed(
        np.array([[np.nan, 1.0], [np.nan] * 2, [np.nan, 0.0]]),
        np.array([[False, True], [False, False], [False, True]]),
    ),
}


def test_free_units_have_the_distribution_given_the_observed_ones():
    graph, params = zoo.graph("categorical"), strong_params("categorical")
    state, _, _ = scan_kernel(ebmpp.BlockedGibbs(graph), 30, params, num_chains=8000, clamped=ROWS)
    assert state.z["v"].shape == (8000, 3, 2) and state.z["v"].dtype == np.int32
    for b, observed in ROWS.items():
        assert ((state.z[b] == observed.values) | ~observed.known).all()
    for row in range(3):
        given = {b: (o.values[row], o.known[row]) for b, o in ROWS.items()}
        exact = Law(graph, params, lambda x, g=given: all((x[b] == v)[k].all() for b, (v, k) in g.items()))
        exact.assert_law({b: z[:, row] for b, z in state.z.items()}, exact.target, 3 * len(exact.states))


MASK = np.array([True, False, True, True])


@pytest.mark.parametrize("ignored", [np.nan, np.inf, -7.5])
def test_values_of_unknown_units_are_ignored(ignored):
    observed = {"v": Observed(np.array([1, ignored, 0, 0]), MASK)}
    kernel, args = ebmpp.BlockedGibbs(zoo.graph("rbm")), (strong_params(),)
    z = kernel.init(zoo.KEY, 0, {"v": np.array([0.0, 1, 1, 0])}, args, observed).z  # observed units win
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
    kernels = (
        ebmpp.BlockedGibbs,
        ebmpp.MaximalCoupling,
        ebmpp.kernels.MetropolisCoupling,
        ebmpp.kernels.LocalSearch,
    )
    for kernel in kernels:
        with pytest.raises(StateError, match=message):
            kernel(graph).init(zoo.KEY, 0, None, (params,), {block: observed})
    with pytest.raises(StateError, match=message):
        ebmpp.local_search(graph, params, rng_key=zoo.KEY, **{block: observed})
    with pytest.raises(StateError, match=message):
        ebmpp.unbiased_expectation(graph, params, lambda x: x, rng_key=zoo.KEY, **{block: observed})
