# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The denoising model runs from beginning to end, and its lattice is the Ising model it says."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import jax.numpy as jnp

from models import denoising


@pytest.mark.slow
def test_it_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    few = ["--images=2", "--warmup=20", "--samples=30", "--chains=2", "--latent=4", "--steps=5"]
    denoising.main([f"--out={tmp_path}", "--no-progress", *few])
    for prior, side in (("ising", 16), ("rbm", 8)):
        assert (tmp_path / f"{prior}.png").stat().st_size > 5000
        with xr.open_datatree(tmp_path / f"{prior}.nc", engine="h5netcdf") as tree:
            assert tree.posterior.x.shape == (2, 30, 2, side, side)
            assert set(np.unique(tree.posterior.x)) <= {0.0, 1.0}
            assert (tree.posterior.scale > 0).all()
    told = capsys.readouterr().out
    assert told.count("pixels wrong") == 2 and "scale" in told


def test_the_ising_prior_counts_pairs_of_equal_neighbours() -> None:
    prior = denoising.ising(4, 0.3)
    x = np.random.default_rng(0).integers(0, 2, (5, 4, 4))
    s = 2 * x - 1
    pairs = (s[:, 1:] * s[:, :-1]).sum((1, 2)) + (s[:, :, 1:] * s[:, :, :-1]).sum((1, 2))
    energy = prior.graph.energy(prior.params, prior.layout.split(jnp.asarray(x, jnp.float32)))
    gaps = np.asarray(energy) + 0.3 * pairs
    np.testing.assert_allclose(gaps, gaps[0], atol=1e-5)


def test_numbers_are_checked(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        denoising.parse(["--images=0"])
    assert "--images is at least 1" in capsys.readouterr().err
