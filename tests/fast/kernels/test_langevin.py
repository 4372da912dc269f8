# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled Gibbs-Langevin sweeps against an exact mixture of Gaussians, and refusals."""

from langevin_tools import PARAMS, exact_moments, moments, stationary
import numpy as np
import pytest
import zoo

import jax

from ebmpp import Observed, core, moves
from ebmpp.errors import DeclarationError, IntractableError
from ebmpp.kernels import GibbsLangevin
from ebmpp.moves.move import coupled_sweep, equal
from ebmpp.moves.target import Target
from helpers import assert_rows_law, slow

ROWS = 8000


@pytest.mark.parametrize("marginalize", [(), slow(("h",))])
def test_both_chains_of_a_pair_keep_the_distribution_and_pairs_meet(marginalize):
    graph, x, y = zoo.graph("learned"), stationary(ROWS, 5), stationary(ROWS, 6)
    sweep = moves.langevin_sweep(graph, step_size=1.0, num_steps=3, marginalize=marginalize)

    @jax.jit
    def step(z, t):
        pairs = core.random.fold_in(core.random.key_pair(zoo.KEY), t, np.arange(ROWS))
        return coupled_sweep(Target(graph, PARAMS), z, sweep, pairs)

    z, met = {b: np.stack([x[b], y[b]]) for b in x}, np.zeros(ROWS, bool)
    for t in range(5):
        z, _, broken, accepted = step(z, np.uint32(t))
        together = np.asarray(equal(z["v"]) & equal(z["h"]))
        assert not broken.any() and together[met].all()
        met = together
    assert 0.3 < met.mean() < 1
    assert 0.3 < accepted.mean() / 6 < 1  # three proposals of each chain
    for i in range(2):
        assert_rows_law(moments(z["v"][i], z["h"][i]), exact_moments(), comparisons=20)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("learned", {"step_size": 0.0}, ValueError, "step_size.*0.0"),
        ("learned", {"step_size": float("nan")}, ValueError, "step_size.*nan"),
        ("learned", {"step_size": 2.0, "adjust": False}, ValueError, "unadjusted"),
        ("learned", {"num_steps": 0}, ValueError, "num_steps.*0"),
        ("learned", {"marginalize": "w"}, ValueError, "marginalize.*'w'"),
        ("learned", {"marginalize": "v"}, DeclarationError, "v"),
        ("rbm", {}, DeclarationError, "BlockedGibbs"),
    ],
)
def test_wrong_options_are_refused(name, options, error, message):
    with pytest.raises(error, match=message):
        GibbsLangevin(zoo.graph(name), **options)


def test_summed_out_blocks_may_not_be_observed_in_part():
    observed = {"h": Observed(np.zeros(2), np.array([True, False]))}
    kernel = GibbsLangevin(zoo.graph("learned"), marginalize="h")
    state = kernel.init(zoo.KEY, 0, None, (PARAMS,), observed)
    with pytest.raises(IntractableError, match="'h'.*observed"):
        kernel.sample(state, (PARAMS,), observed)
