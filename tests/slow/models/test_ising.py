# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The Ising program runs from beginning to end, and what it compares with is right."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from models import ising


def test_energy_of_the_infinite_lattice_is_the_limit_of_strips() -> None:
    """A strip of width 8 by its transfer matrix: close below the critical coupling."""
    rows = np.array(list(itertools.product([-1, 1], repeat=8)))
    inside = (rows * np.roll(rows, 1, axis=1)).sum(1)
    across = rows @ rows.T

    def free_energy(coupling: float) -> float:
        half = np.exp(0.5 * coupling * inside)
        matrix = half[:, None] * np.exp(coupling * across) * half
        return np.log(np.linalg.eigvalsh(matrix)[-1]) / 8

    for coupling, gap in ((0.2, 2e-4), (0.3, 5e-3)):  # what the width leaves, which grows with the coupling
        slope = (free_energy(coupling + 1e-4) - free_energy(coupling - 1e-4)) / 2e-4
        assert float(ising.energy_per_spin(coupling)) == pytest.approx(-slope, abs=gap)


def test_magnetisation_is_0_in_the_disorder_and_near_1_far_in_the_order() -> None:
    assert ising.spontaneous_magnetization([0.1, 0.43]).tolist() == [0, 0]
    # one spin in a frozen lattice is turned at the price of four bonds: 1 - 2 exp(-8 K) to first order
    assert float(ising.spontaneous_magnetization(1.0)) == pytest.approx(1 - 2 * np.exp(-8), abs=1e-4)


@pytest.mark.slow
def test_it_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    few = ["--side=8", "--num-chains=4", "--sweeps=20", "--num-pairs=4", "--no-progress"]
    ising.main([f"--out={tmp_path}", *few])
    for name in ("onsager", "states", "meeting_times"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    with xr.open_datatree(tmp_path / "ising.nc", engine="h5netcdf") as tree:
        assert tree.energy.sizes == {"coupling": 8} and tree["meeting"].meeting_time.shape == (8, 4)
    assert capsys.readouterr().out.count("pairs met") == 8


def test_numbers_are_checked(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        ising.parse(["--side=2"])
    assert "--side is at least 3" in capsys.readouterr().err
