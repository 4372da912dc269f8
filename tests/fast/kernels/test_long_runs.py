# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""LongRun: moments of all draws, and a stopped run that resumes bit by bit."""

import os

from long_run_tools import THINNING, assert_same_run, chains, run
from mcmc_tools import samples, strong_params
import numpy as np
import pytest
import zoo

from ebmpp.errors import ArgumentError, CheckpointError
from ebmpp.kernels import LongRun


def test_a_stopped_run_resumes_and_has_the_moments_of_all_draws(tmp_path, monkeypatch):
    expected = run(tmp_path / "whole")

    class Stopped(Exception):
        pass

    with monkeypatch.context() as patched:
        replace, count = os.replace, iter(range(1, 100))

        def replace_or_stop(*args):
            # the third file: after the draws of step 45, before their checkpoint
            if next(count) >= 3:
                raise Stopped
            replace(*args)

        patched.setattr(os, "replace", replace_or_stop)
        with pytest.raises(Stopped):
            run(tmp_path / "stopped")
    assert_same_run(run(tmp_path / "stopped", resume=True), expected)
    with pytest.raises(CheckpointError, match="resume=True"):
        run(tmp_path / "stopped")
    mcmc = chains(thinning=1)
    mcmc.run(zoo.KEY, strong_params())
    for block, x in samples(mcmc).items():
        flat = x.reshape(-1, x.shape[-1]).astype(float)
        np.testing.assert_allclose(expected.moments.mean[block], flat.mean(0), rtol=1e-6)
        np.testing.assert_allclose(expected.moments.variance[block], flat.var(0, ddof=1), rtol=1e-5)
        np.testing.assert_array_equal(expected.draws().posterior[block], x[:, THINNING - 1 :: THINNING])


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"batch_length": 0}, "batch_length"),
        ({"batch_length": 8, "keep": True, "directory": "run"}, "batch_length"),
        ({"keep": True}, "directory"),
        ({"resume": True}, "directory"),
    ],
)
def test_invalid_options_are_refused(options, argument):
    with pytest.raises(ArgumentError, match=argument):
        LongRun(chains(), **options)
