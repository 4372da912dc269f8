# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The distribution of BlockedGibbs's draws, against enumeration."""

import itertools

from mcmc_tools import run_mcmc, samples, scan_kernel, strong_params
from metropolis_tools import Law
import numpy as np
import pytest
import zoo

from ebmpp import BlockedGibbs
from helpers import assert_law, assert_rows_law, often

CASES = {
    "rbm": {},
    "rbm, clamped": {"v": [1.0, 0.0, 1.0, 1.0]},
    "deep": {},
    "deep, clamped": {"v": [1.0, 1.0, 0.0]},
    "gated": {},
    "gated, clamped": {"a": [1.0, 1.0]},
    "categorical": {},
    "lattice": {},  # interacting units of one block
}


@pytest.mark.parametrize("case", often(CASES, "rbm", "deep, clamped", "gated", "lattice"))
def test_joint_states_match_enumeration(case):
    name, clamped = case.split(",")[0], {b: np.array(v) for b, v in CASES[case].items()}
    params = strong_params(name)
    # the last draws of many chains are independent
    mcmc = run_mcmc(BlockedGibbs(zoo.graph(name)), params, num_samples=1, num_chains=4000, num_warmup=30,
                    clamped=clamped)  # fmt: skip
    exact = Law(zoo.graph(name), params, lambda x: all((x[b] == v).all() for b, v in clamped.items()))
    exact.assert_law({b: x[:, -1] for b, x in samples(mcmc).items()}, exact.target, len(exact.states))


def test_moments_of_real_units_match_exact_moments():
    state, *_ = scan_kernel(BlockedGibbs(zoo.graph("learned")), 30, zoo.params("learned"), num_chains=4000)
    exact = zoo.moments("learned")
    assert_rows_law(np.stack([state.z["v"], state.z["v"] ** 2], -1), exact["v"], comparisons=6)
    assert_rows_law(state.z["h"], exact["h"], comparisons=6)


def test_rows_of_clamped_values_have_their_own_conditionals():
    params = {name: np.asarray(a, float) for name, a in strong_params().items()}
    v = np.array(list(itertools.product([0.0, 1.0], repeat=4)))
    exact = 1 / (1 + np.exp(-params["h"] - v @ params["v:h"]))
    kernel = BlockedGibbs(zoo.graph("rbm"))
    drawn = scan_kernel(kernel, 1, strong_params(), num_chains=3000, clamped={"v": v})[0].z["h"]
    assert_law(drawn.mean(0), exact, np.sqrt(exact * (1 - exact) / len(drawn)))
