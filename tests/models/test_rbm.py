# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The demo runs from its command line, and what it writes can be read."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from models import rbm

PICTURES = {"learning_curve.png", "filters.png", "samples.png", "meeting_times.png"}
TINY = ["--latent", "4", "--steps", "6", "--batch-size", "20", "--num-pairs", "8", "--no-progress"]


def write_idx(path: Path, images: np.ndarray) -> Path:
    sizes = b"".join(n.to_bytes(4, "big") for n in images.shape)
    path.write_bytes(bytes([0, 0, 8, images.ndim]) + sizes + images.astype(np.uint8).tobytes())
    return path


def reopen(path: Path) -> xr.DataTree:
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        return tree.load()


def test_digits_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rbm.main(["--out", str(tmp_path / "new" / "demo"), *TINY])
    out = tmp_path / "new" / "demo"
    assert {p.name for p in out.iterdir()} == PICTURES | {"rbm.nc", "history.nc"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)

    tree = reopen(out / "rbm.nc")
    assert set(tree.children) == {"posterior", "params", "observed_data"}
    assert tree["posterior"].sizes["v_dim_0"] == 64 and tree["posterior"].sizes["h_dim_0"] == 4
    assert set(np.unique(tree["posterior"]["v"])) <= {0.0, 1.0}
    assert tree["params"]["v:h"].shape == (64, 4)
    assert tree["observed_data"]["v"].shape == (300, 64)
    history = reopen(out / "history.nc")["history"]
    assert history.sizes["step"] == 6 and history["monitor_step"].values[-1] == 6
    assert {"meeting_time_mean", "lag", "log_likelihood_held_out"} <= set(history.data_vars)

    printed = capsys.readouterr().out
    exactly = float(history["log_likelihood_held_out"][-1])
    assert f"{exactly:.2f} an image, exact" in printed and "independent pixels" in printed
    assert str(out / "samples.png") in printed


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [pytest.param("cd", marks=pytest.mark.slow), "pcd"])
def test_an_idx_file_too_large_to_enumerate(
    tmp_path: Path, estimator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    images = 255 * (np.random.default_rng(0).random((30, 6, 5)) < 0.4)
    file = write_idx(tmp_path / "some-idx3-ubyte", images)
    rbm.main(["--data", str(file), "--estimator", estimator, "--out", str(tmp_path), *TINY, "--latent", "21"])
    assert {p.name for p in tmp_path.glob("*.png")} == PICTURES
    history = reopen(tmp_path / "history.nc")["history"]
    assert "free_energy_gap" in history and "log_likelihood_train" not in history
    assert reopen(tmp_path / "rbm.nc")["observed_data"].sizes["v_dim_0"] == 30
    assert "no likelihood" in capsys.readouterr().out


def test_a_folder_of_mnist(tmp_path: Path) -> None:
    images = 255 * (np.random.default_rng(0).random((12, 28, 28)) < 0.4)
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte", images)
    for argv in (["--data", str(tmp_path)], ["--data", "mnist", "--data-dir", str(tmp_path)]):
        data = rbm.parse(argv).images
        assert data.train.shape == data.held_out.shape == (12, 784) and data.shape == (28, 28)
        np.testing.assert_array_equal(data.train, images.reshape(12, -1) / 255)


def test_without_a_test_file_a_sixth_of_mnist_is_held_out(tmp_path: Path) -> None:
    images = 255 * (np.random.default_rng(0).random((12, 28, 28)) < 0.4)
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    data = rbm.parse(["--data", str(tmp_path)]).images
    assert (data.train.shape, data.held_out.shape) == ((10, 784), (2, 784))
    rows = {row.tobytes() for part in (data.train, data.held_out) for row in part}
    assert len(rows) == 12


def test_the_split_is_a_partition() -> None:
    data = rbm.parse(["--seed", "3"]).images
    rows = np.concatenate([data.train, data.held_out])
    assert len(rows) == 1797
    from ebmpp.data import binarize, digits

    np.testing.assert_array_equal(rows.sum(0), binarize(digits()).sum(0))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--latent", "0"], "--latent is at least 1, not 0"),
        (["--num-pairs", "-3"], "--num-pairs is at least 1"),
        (["--rate", "nan"], "--rate is a positive number"),
        (["--estimator", "cd", "--lag", "5"], "--lag belongs to coupled chains"),
        (["--estimator", "cd", "--k", "0"], "k is a positive int, not 0"),
        (["--lag", "0"], "lag is an int of at least 1"),
        (["--data", "nowhere.idx"], "nowhere.idx: no such file"),
        (["--data", "mnist", "--data-dir", "nowhere"], "no train-images-idx3-ubyte"),
        (["--estimator", "magic"], "invalid choice"),
    ],
)
def test_bad_options_say_what_is_wrong(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        rbm.main([*argv, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_labels_are_not_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rbm.main(["--data", str(write_idx(tmp_path / "labels", np.arange(5)))])
    assert "expected at least two images" in capsys.readouterr().err
