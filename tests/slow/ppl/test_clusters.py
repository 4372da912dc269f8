# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Cluster moves of units of a model on a lattice above its critical coupling."""

from model_cases import Call, advance, run_alone
import numpy as np
import numpyro
import numpyro.distributions as dist

from ebmpp import GibbsBlock
from helpers import assert_rows_law


def test_regions_flip_above_the_critical_coupling() -> None:
    def model() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([6, 6]).to_event(2))
        numpyro.factor("prior", 2.0 * ((z[1:] == z[:-1]).sum() + (z[:, 1:] == z[:, :-1]).sum()))

    block = GibbsBlock.from_model(model, ["z"], clusters=True)
    last = run_alone(block, {"z": np.zeros((6, 6), np.int32)}, 20, 1000).z["z"]
    assert_rows_law((np.asarray(last).mean((1, 2)) > 0.5)[:, None], np.array([0.5]))


def test_step_moves_clusters_before_the_sweep() -> None:
    """Units that a strong coupling ties flip together, which sweeps alone hardly ever do."""

    def model() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([6]).to_event(1))
        numpyro.factor("prior", 6.0 * (z[1:] == z[:-1]).sum())

    block = GibbsBlock.from_model(model, ["z"], clusters=True)
    moved = advance(block, {"z": np.zeros(6, np.int32)}, Call({}, (), {})).z["z"]
    assert_rows_law(moved.mean(1, keepdims=True) > 0.5, np.array([0.5]))
