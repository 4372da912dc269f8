# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""``python -m ebmpp`` runs from beginning to end, and its files can be read."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import ebmpp
from ebmpp import __main__ as program

PICTURES = {"learning_curve.png", "filters.png", "samples.png", "meeting_times.png"}
STAGES = ("training by UCD", "training by PCD", "evaluating", "sampling", "drawing and saving")


def test_it_writes_and_prints_what_it_announces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ebmpp, "enable_compilation_cache", lambda: tmp_path)
    out = tmp_path / "new" / "digits"
    program.main(["--out", str(out), "--steps", "100", "--latent", "8"])
    assert {p.name for p in out.iterdir()} == PICTURES | {"draws.nc", "history.nc", "digits.ebmpp"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)
    with xr.open_datatree(out / "draws.nc", engine="h5netcdf") as tree:
        assert dict(tree["posterior"].sizes) == {"chain": 64, "draw": 100, "h_dim_0": 8, "v_dim_0": 64}
        held_out = tree["observed_data"]["v"].values
    with xr.open_datatree(out / "history.nc", engine="h5netcdf") as tree:
        exactly = float(tree["history"]["log_likelihood_held_out"][-1])
        assert tree["history"].sizes["step"] == tree["history_pcd"].sizes["step"] == 100
    graph, params = ebmpp.load(out / "digits.ebmpp")
    np.testing.assert_allclose(ebmpp.exact.log_likelihood(graph, params, held_out).mean(), exactly, rtol=1e-5)
    assert exactly > program.independent_pixels(*program.digits(0)) + 2  # short, but not for nothing
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert all(sum(line.startswith(stage) and "s, " in line for line in lines) == 1 for stage in STAGES)
    assert f"{exactly:.2f} nats per image, exact" in printed
    assert f'az.from_netcdf("{out}/draws.nc")' in printed and "ebmpp.report(" in printed


def test_a_cache_that_cannot_be_written_does_not_end_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def stop(seed: int) -> None:
        raise Reached

    monkeypatch.setattr(program, "digits", stop)
    (tmp_path / "file").touch()
    enable = ebmpp.enable_compilation_cache
    monkeypatch.setattr(ebmpp, "enable_compilation_cache", lambda: enable(tmp_path / "file" / "below"))
    with pytest.raises(Reached):
        program.main(["--out", str(tmp_path)])
    assert "Compiled programs are not stored: enable_compilation_cache: directory" in capsys.readouterr().err
