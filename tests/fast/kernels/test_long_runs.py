# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""LongRun: moments of all draws, and a stopped run that resumes bit by bit."""

import os

from long_run_tools import THINNING, assert_same_run, chains, corner, run
from mcmc_tools import samples, strong_params
import numpy as np
import pytest
import zoo

from ebmpp.errors import ArgumentError, CheckpointError
from ebmpp.kernels import LongRun


def test_a_stopped_run_resumes_and_has_the_moments_of_all_draws(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")

    class Stopped(Exception):
        pass

    with monkeypatch.context() as patched:
        replace, count = os.replace, iter(range(1, 100))

        def replace_or_stop(*args):
            # the fifth file: after the draws of step 40, before their checkpoint
            if next(count) >= 5:
                raise Stopped
            replace(*args)

        patched.setattr(os, "replace", replace_or_stop)
        with pytest.raises(Stopped):
            run(tmp_path / "stopped")
    assert_same_run(run(tmp_path / "stopped", resume=True), whole)
    with pytest.raises(CheckpointError, match="resume=True"):
        run(tmp_path / "stopped")
    mcmc = chains(thinning=1)
    mcmc.run(zoo.KEY, strong_params())
    for block, x in samples(mcmc).items():
        flat = x.reshape(-1, x.shape[-1]).astype(float)
        np.testing.assert_allclose(whole.moments.mean[block], flat.mean(0), rtol=1e-12)
        np.testing.assert_allclose(whole.moments.variance[block], flat.var(0, ddof=1), rtol=1e-12)
        np.testing.assert_array_equal(whole.draws().posterior[block], x[:, THINNING - 1 :: THINNING])
    vectors = samples(mcmc)["v"][..., :2].reshape(-1, 2) * 1.5
    np.testing.assert_allclose(whole.covariance, np.cov(vectors.T), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covariance": "v"}, "covariance.*'v'"),
        ({"fold": corner}, "fold"),
        ({"batch_length": 0}, "batch_length.*0"),
        ({"keep": True}, "keep.*directory"),
        ({"resume": True}, "resume.*directory"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        LongRun(chains(), **options)
