# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""``python -m ebmpp`` runs from beginning to end, what it writes can be read, and it refuses plainly."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import ebmpp
from ebmpp import __main__ as program

PICTURES = {"learning_curve.png", "filters.png", "samples.png", "meeting_times.png"}


def test_it_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "digits"
    program.main(["--out", str(out), "--steps", "4", "--latent", "3"])
    assert {p.name for p in out.iterdir()} == PICTURES | {"draws.nc", "history.nc", "digits.ebmpp"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)
    with xr.open_datatree(out / "draws.nc", engine="h5netcdf") as tree:
        assert dict(tree["posterior"].sizes) == {"chain": 64, "draw": 100, "h_dim_0": 3, "v_dim_0": 64}
        held_out = tree["observed_data"]["v"].values
    with xr.open_datatree(out / "history.nc", engine="h5netcdf") as tree:
        exactly = float(tree["history"]["log_likelihood_held_out"][-1])
        assert tree["history"].sizes["step"] == 4
    graph, params = ebmpp.load(out / "digits.ebmpp")
    np.testing.assert_allclose(ebmpp.exact.log_likelihood(graph, params, held_out).mean(), exactly, rtol=1e-5)
    assert f"{exactly:.2f} nats an image, exact" in capsys.readouterr().out


def test_rows_are_shared_out_once() -> None:
    train, held_out = program.digits(0)
    assert len(held_out) == 300
    every = ebmpp.data.binarize(ebmpp.data.digits())
    both = np.concatenate([train, held_out])
    np.testing.assert_array_equal(np.sort(both @ 2.0 ** np.arange(64)), np.sort(every @ 2.0 ** np.arange(64)))
    assert not np.array_equal(held_out, program.digits(1)[1])


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--steps", "0"], "--steps is at least 1, not 0"),
        (["--latent", "21"], "--latent is from 1 to 20, not 21"),
        (["--seed=-1"], "--seed is from 0 to 4294967295, not -1"),
        (["--out", __file__], "cannot be a folder: File exists"),
    ],
)
def test_options_are_checked(option: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.parse(option)
    assert told in capsys.readouterr().err


def test_the_extra_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        program.parse(["--out", str(tmp_path / "none")])
    assert "pip install 'ebmpp[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
