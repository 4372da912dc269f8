# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Runs of models/rbm.py, its data, and its estimates of likelihoods."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import jax

import ebmpp
from models import rbm
from shared import digit_images, rbm_likelihood

pytestmark = pytest.mark.nightly

PICTURES = {"learning_curve.png", "filters.png", "samples.png"}
TINY = "--latent=4 --steps=6 --batch-size=20 --num-pairs=8 --no-progress".split()
SMALL = "--recipe=likelihood --binarize=bernoulli --particles=40 --coupled=20".split()
SMALL += [*TINY, "--temperatures=200", "--repeats=2", "--sweeps=60", "--pair-lag=10"]


def write_idx(path: Path, images: np.ndarray) -> Path:
    sizes = b"".join(n.to_bytes(4, "big") for n in images.shape)
    path.write_bytes(
        bytes([0, 0, 8, images.ndim]) + sizes + images.astype(np.uint8).tobytes()
    )
    return path


def reopen(path: Path) -> xr.DataTree:
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        return tree.load()


def test_digits_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rbm.main(["--out", str(tmp_path / "new" / "demo"), *TINY])
    out = tmp_path / "new" / "demo"
    assert {p.name for p in out.iterdir()} == PICTURES | {
        "draws.nc",
        "history.nc",
        "rbm.ebmpp",
    }
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)

    posterior = reopen(out / "draws.nc")["posterior"]
    assert posterior.sizes["v_dim_0"] == 64 and posterior.sizes["h_dim_0"] == 4
    assert set(np.unique(posterior["v"])) <= {0.0, 1.0}
    history = reopen(out / "history.nc")["history"]
    assert history.sizes["step"] == 6 and history["monitor_step"].values[-1] == 6
    assert {"meeting_time_mean", "lag", "log_likelihood_held_out"} <= set(
        history.data_vars
    )

    printed = capsys.readouterr().out
    likelihood = float(history["log_likelihood_held_out"][-1])
    assert (
        f"{likelihood:.2f} per image, exact" in printed
        and "independent pixels" in printed
    )
    graph, params = ebmpp.load(out / "rbm.ebmpp")
    held_out = rbm.parse([]).images.held_out
    np.testing.assert_allclose(
        ebmpp.exact.log_likelihood(graph, params, held_out).mean(),
        likelihood,
        rtol=1e-5,
    )
    assert str(out / "samples.png") in printed


def test_an_idx_file_too_large_to_enumerate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = 255 * (np.random.default_rng(0).random((30, 6, 5)) < 0.4)
    file = write_idx(tmp_path / "some-idx3-ubyte", images)
    rbm.main(
        [
            "--data",
            str(file),
            "--estimator",
            "pcd",
            "--out",
            str(tmp_path),
            *TINY,
            "--latent",
            "21",
        ]
    )
    assert {p.name for p in tmp_path.glob("*.png")} == PICTURES
    history = reopen(tmp_path / "history.nc")["history"]
    assert "free_energy_gap" in history and "log_likelihood_train" not in history
    assert reopen(tmp_path / "draws.nc")["posterior"].sizes["v_dim_0"] == 30
    assert "no likelihood" in capsys.readouterr().out


def test_mnist_is_read_from_a_folder(tmp_path: Path) -> None:
    images = 255 * (np.random.default_rng(0).random((12, 28, 28)) < 0.4)
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    # without a test file a sixth is held out
    data = rbm.parse(["--data", str(tmp_path)]).images
    assert (data.train.shape, data.held_out.shape) == ((10, 784), (2, 784))
    assert (
        data.origin
        == "2 of the 12 rows of the training file, drawn with seed 0; a pixel is 1 above 1/2"
    )
    assert (
        len({row.tobytes() for part in (data.train, data.held_out) for row in part})
        == 12
    )
    write_idx(tmp_path / "t10k-images-idx3-ubyte", images)
    for argv in (
        ["--data", str(tmp_path)],
        ["--data", "mnist", "--data-dir", str(tmp_path)],
    ):
        data = rbm.parse(argv).images
        assert data.train.shape == data.held_out.shape == (12, 784) and data.shape == (
            28,
            28,
        )
        np.testing.assert_array_equal(data.train, images.reshape(12, -1) / 255)


def test_likelihood_from_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rbm.main([*SMALL, "--out", str(tmp_path)])
    numbers = json.loads((tmp_path / "rbm_likelihood.json").read_text())
    graph, params = ebmpp.load(tmp_path / "rbm.ebmpp")
    held_out = rbm.parse(SMALL).images.held_out
    likelihood = float(ebmpp.exact.log_likelihood(graph, params, held_out).mean())
    for side in ("forward", "reverse"):
        mean = numbers[side]["pooled"]
        assert abs(mean["held_out"] - likelihood) < 5 * mean["standard_error"] + 1e-3
        assert 0 < mean["standard_error"] < 0.1 and mean["effective"] > 40
        assert mean["held_out"] == pytest.approx(
            np.mean(numbers[side]["held_out"]), abs=0.01
        )
    by_particles = numbers["particles"]
    assert (
        abs(by_particles["held_out"] - likelihood)
        < 5 * by_particles["standard_error"] + 1e-3
    )
    assert by_particles["particles"] == 400 and all(
        "standard_error" in point for point in numbers["curve"]
    )
    assert numbers["meeting"]["unmet"] == 0 and numbers["meeting"]["tv_bound"] < 0.5
    assert [p["step"] for p in numbers["curve"]] == list(range(7))
    names = ("likelihood", "meeting_times", "filters", "samples")
    pictures = {f"rbm_{name}.png" for name in names}
    assert {p.name for p in tmp_path.glob("*.png")} == pictures
    printed = capsys.readouterr().out
    assert f"{numbers['reverse']['pooled']['held_out']:.2f} +- " in printed
    annealed = numbers["annealed"]
    assert (
        annealed["held_out"] < likelihood + 4 * annealed["standard_error"]
        and annealed["rows"] == 80
    )

    rbm.main([*SMALL, "--out", str(tmp_path), "--resume"])  # only evaluates again
    resumed = json.loads((tmp_path / "rbm_likelihood.json").read_text())
    assert [p["step"] for p in resumed["curve"]] == list(range(7))
    assert (
        resumed["forward"] == numbers["forward"]
        and resumed["reverse"] == numbers["reverse"]
    )
    np.testing.assert_array_equal(
        ebmpp.load(tmp_path / "rbm.ebmpp")[1]["v:h"], params["v:h"]
    )


def test_held_out_pixels_are_drawn_once() -> None:
    first, repeated = (rbm.parse(["--binarize", "bernoulli"]).images for _ in range(2))
    np.testing.assert_array_equal(first.held_out, repeated.held_out)
    split = "300 of the 1797 rows of scikit-learn's digits, drawn with seed 0"
    assert (
        first.origin
        == f"{split}; pixels drawn once with their intensities as probabilities, seed 0"
    )
    assert set(np.unique(first.held_out)) == {0.0, 1.0}


def test_batches_are_drawn_again_each_epoch() -> None:
    grey = np.random.default_rng(0).random((50, 5, 5)).astype(np.float32)
    # so that no ink is lost when an image moves
    grey[:, [0, -1]], grey[:, :, [0, -1]] = (
        0,
        0,
    )
    grey[:, 2, 2] = 1  # certain, unless the image has moved
    stream = digit_images.batches(grey.reshape(50, 25), 20, seed=1, shape=(5, 5))()
    # 400 epochs of two batches; ten rows left out
    batches = np.array([next(stream) for _ in range(800)])
    assert set(np.unique(batches)) == {0.0, 1.0}
    ink = batches.reshape(-1, 25).sum(1).mean()
    assert abs(ink - grey.sum((1, 2)).mean()) < 4 * np.sqrt(25 * 0.25 / 16_000)
    # a tenth of the rows has moved: the certain pixel then has the values of its
    # neighbours
    missing = 0.1 * (1 - (grey[:, 2, [1, 3]].mean() + grey[:, [1, 3], 2].mean()) / 2)
    assert abs((batches[:, :, 12] == 0).mean() - missing) < 4 * np.sqrt(
        missing / 16_000
    )
    assert not (batches[0] == batches[2]).all()
    repeated = digit_images.batches(grey.reshape(50, 25), 20, seed=1, shape=(5, 5))()
    np.testing.assert_array_equal(next(repeated), batches[0])


def test_learning_rate_rises_and_falls_and_weights_decay() -> None:
    params = {"v": np.zeros(2)}

    def rates(warmup: float) -> np.ndarray:
        """Return the rates, from updates at a gradient of one with a momentum of a half."""
        optimizer, updates = rbm_likelihood.optimizer(0.1, 100, warmup), []
        state = optimizer.init(params)
        for _ in range(100):
            update, state = optimizer.update({"v": np.ones(2)}, state, params)
            updates.append(-float(update["v"][0]))
        return np.array(updates) / (2 - 0.5 ** np.arange(100))

    falling = np.linspace(0.1, 0, 101)[:-1]
    np.testing.assert_allclose(rates(0.0), falling, atol=1e-6)
    optimizer, ones = (
        rbm_likelihood.optimizer(0.1, 10),
        {"v": np.ones(2), "v:h": np.ones((2, 2))},
    )
    updates, _ = optimizer.update(
        jax.tree.map(np.zeros_like, ones), optimizer.init(ones), ones
    )
    assert not np.any(updates["v"]) and np.all(updates["v:h"] < 0)  # only weights decay
    rising = rates(0.2)
    np.testing.assert_allclose(rising[:20], np.linspace(0.02, 0.1, 21)[:-1], atol=1e-6)
    np.testing.assert_allclose(rising[20:], np.linspace(0.1, 0, 81)[:-1], atol=1e-6)
