# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Parts of ``python -m ebmpp``: options, data, stages and steps of training; and a short run.

Tests __main__.py.
"""

import dataclasses
from pathlib import Path
import re

import numpy as np
import pytest
import xarray as xr

import ebmpp
from ebmpp import __main__ as program


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ["--steps", "99"],
            "--steps must be at least 100, got 99: fewer train next to nothing",
        ),
        (["--latent", "21"], "--latent must be from 1 to 20, got 21"),
        (["--seed=-1"], "--seed must be from 0 to 4294967295, got -1"),
        (["--out", __file__], "cannot be a folder: File exists"),
        (["--out", "/proc"], "--out /proc cannot be a folder"),
    ],
)
def test_options_are_checked(
    option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        program.parse(option)
    assert message in capsys.readouterr().err


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        program.parse(["--out", str(tmp_path / "none")])
    assert "pip install 'ebmpp[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_rows_are_split_once() -> None:
    train, held_out = program.digits(0)
    assert len(held_out) == 300
    everything = ebmpp.data.binarize(ebmpp.data.digits())
    both = np.concatenate([train, held_out])
    code = 2.0 ** np.arange(64)
    np.testing.assert_array_equal(np.sort(both @ code), np.sort(everything @ code))
    assert not np.array_equal(held_out, program.digits(1)[1])


def test_independent_pixels_are_the_likelihood_of_a_model_without_weights() -> None:
    train, held_out = program.digits(0)
    rate = (train.sum(0) + 1) / (len(train) + 2)
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(64), h=ebmpp.Bernoulli(1))
    params = {
        "v": np.log(rate / (1 - rate)),
        "h": np.zeros(1),
        "v:h": np.zeros((64, 1)),
    }
    expected = ebmpp.exact.log_likelihood(rbm, params, held_out).mean()
    assert program.independent_pixels(train, held_out) == pytest.approx(
        float(expected), rel=1e-5
    )


def test_a_few_steps_of_training_and_a_learning_curve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train, held_out = program.digits(0)
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(64), h=ebmpp.Bernoulli(3))
    stage = program.StageTimer()
    with stage("training by PCD"):
        method = program.METHODS["PCD"]._replace(
            estimator=ebmpp.PCD(num_chains=4), steps=1
        )
        fit, seconds = program.learn(rbm, method, train, held_out, 10, seed=0)
    assert re.fullmatch(
        r"training by PCD +\d+\.\d s, +\d+\.\d s of them compiling\n",
        capsys.readouterr().out,
    )
    assert fit.history.monitor_step.values.tolist() == list(range(11))
    history = fit.history.assign(
        {f"meeting_time_{n}": fit.history.gradient_norm for n in ("mean", "max")}
    )
    fit = dataclasses.replace(
        fit, history=history.assign(lag=fit.history.gradient_norm)
    )
    run = program.Run(fit, seconds)
    figure = program.learning_curve({"UCD": run, "PCD": run}, -24.7)
    left = figure.axes[0]
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert labels == ["UCD, 10 steps", "PCD, 10 steps", "independent pixels"]
    np.testing.assert_allclose(
        left.lines[0].get_ydata(), fit.history.log_likelihood_held_out
    )
    assert left.lines[0].get_xdata().tolist() == seconds == sorted(seconds)
    assert len({line.get_linestyle() for line in left.lines}) == 3


PICTURES = {"learning_curve.png", "filters.png", "samples.png", "meeting_times.png"}


STAGES = (
    "training by UCD",
    "training by PCD",
    "evaluating",
    "sampling",
    "drawing and saving",
)


@pytest.mark.nightly
def test_it_writes_and_prints_what_it_announces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ebmpp, "enable_compilation_cache", lambda: tmp_path)
    out = tmp_path / "new" / "digits"
    program.main(["--out", str(out), "--steps", "100", "--latent", "8"])
    assert {p.name for p in out.iterdir()} == PICTURES | {
        "draws.nc",
        "history.nc",
        "digits.ebmpp",
    }
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)
    with xr.open_datatree(out / "draws.nc", engine="h5netcdf") as tree:
        assert dict(tree["posterior"].sizes) == {
            "chain": 64,
            "draw": 100,
            "h_dim_0": 8,
            "v_dim_0": 64,
        }
        held_out = tree["observed_data"]["v"].values
    with xr.open_datatree(out / "history.nc", engine="h5netcdf") as tree:
        exactly = float(tree["history"]["log_likelihood_held_out"][-1])
        assert tree["history"].sizes["step"] == 100
        assert tree["history_pcd"].sizes["step"] == 1000
    graph, params = ebmpp.load(out / "digits.ebmpp")
    np.testing.assert_allclose(
        ebmpp.exact.log_likelihood(graph, params, held_out).mean(), exactly, rtol=1e-5
    )
    # short, but not for nothing
    assert exactly > program.independent_pixels(*program.digits(0)) + 1.5
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert all(
        sum(line.startswith(stage) and "s, " in line for line in lines) == 1
        for stage in STAGES
    )
    assert f"{exactly:.2f} nats per image, exact" in printed
    assert f'az.from_netcdf("{out}/draws.nc")' in printed and "ebmpp.report(" in printed


@pytest.mark.nightly
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
    monkeypatch.setattr(
        ebmpp, "enable_compilation_cache", lambda: enable(tmp_path / "file" / "below")
    )
    with pytest.raises(Reached):
        program.main(["--out", str(tmp_path)])
    assert (
        "Compiled programs are not stored: enable_compilation_cache: directory"
        in capsys.readouterr().err
    )
