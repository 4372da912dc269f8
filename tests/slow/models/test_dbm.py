# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The deep Boltzmann machine runs from beginning to end."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import jax

import ebmpp
from models import dbm

FEW = ["--steps=4", "--batch-size=10", "--num-pairs=4", "--no-progress"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "sides"),
    [
        ("pcd", "12 8"),
        ("centered", "12 8"),
        ("lmi", "12 8"),
        ("pcd", "12"),
        ("lmi", "9 8 7"),
        ("ucd", "6 5 4"),
        ("ucd", "6"),
    ],
)
def test_it_writes_what_it_says(
    estimator: str, sides: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    dbm.main([f"--out={tmp_path}", f"--estimator={estimator}", "--sides", *sides.split(), *FEW])
    for name in ("samples", "completions", "history"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    with xr.open_datatree(tmp_path / "history.nc", engine="h5netcdf") as tree:
        assert "gradient_norm" in {v for node in tree.subtree for v in node.data_vars}
    told = capsys.readouterr().out
    assert ("accepted 0 of the proposals" in told) == (estimator == "lmi")
    assert told.count("wrote") == 4


@pytest.mark.slow
def test_the_recipe_for_likelihood_saves_a_mean_iterate(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    dbm.main(
        [
            f"--out={tmp_path}",
            "--recipe=likelihood",
            "--sides",
            "6",
            "5",
            *FEW,
            "--num-pairs=8",
            "--particles=1000",
        ]
    )
    graph, params = ebmpp.load(tmp_path / "dbm.ebmpp")
    held_out = dbm.parse(["--recipe=likelihood"]).images.held_out
    bound = np.asarray(ebmpp.evaluate.mean_field_bound(graph, params, held_out))
    told, log_z = capsys.readouterr().out, float(ebmpp.exact.log_partition(graph, params))
    numbers = json.loads((tmp_path / "dbm_likelihood.json").read_text())
    assert abs(numbers["log_partition"] - log_z) < 5 * numbers["standard_error"] < 0.5
    assert f"{bound.mean() - numbers['log_partition']:.2f} held out" in told
    exactly = float(ebmpp.exact.log_likelihood(graph, params, held_out).mean())
    assert numbers["gap"] > 3 * numbers["gap_error"] > 0
    assert abs(bound.mean() - log_z + numbers["gap"] - exactly) < 0.1 * numbers["gap"]
    assert "300 of the 1797 rows of scikit-learn's digits" in told and held_out.shape == (300, 64)


@pytest.mark.parametrize("given", ["-1", "nan"])
def test_a_decay_is_at_least_zero(given: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        dbm.parse(["--recipe=likelihood", f"--decay={given}"])
    assert "--decay is a number of at least 0" in capsys.readouterr().err
    assert dbm.parse(["--recipe=likelihood", "--decay=0"]).decay == 0


def test_the_recipe_for_likelihood_refuses_what_it_cannot_draw(capsys: pytest.CaptureFixture) -> None:
    for given in ("--grey", "--estimator=pcd"):
        with pytest.raises(SystemExit):
            dbm.parse(["--recipe=likelihood", given])
        assert "without --grey, and of a centered --estimator" in capsys.readouterr().err


VALUES = [(ebmpp.Spin, {-1.0, 1.0}), (ebmpp.Bernoulli, {0.0, 1.0})]


@pytest.mark.parametrize(("family", "values"), VALUES)
def test_grey_images_are_eight_digits_a_pixel_and_come_back(
    family: type[ebmpp.Family], values: set[float]
) -> None:
    data = dbm.images("digits", grey=True, seed=0, family=family)
    assert data.train.shape == (1797 - 20, 64 * 8) and set(np.unique(data.train)) == values
    order = np.random.default_rng(0).permutation(1797)
    np.testing.assert_allclose(data.intensities(data.held_out), ebmpp.data.digits()[order[:20]], atol=1 / 255)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family, _ in VALUES])
def test_completions_keep_what_is_known(family: type[ebmpp.Family]) -> None:
    data = dbm.images("digits", grey=False, seed=0, family=family)
    model = dbm.declare(64, (6, 5), family)
    halves, whole = dbm.complete(model, model.init(jax.random.key(0), data.train), data, seed=0)
    np.testing.assert_array_equal(whole[:, :32], halves[:, :32])
    shown = np.asarray(ebmpp.data.binarize(ebmpp.data.digits()))[np.random.default_rng(0).permutation(1797)]
    np.testing.assert_array_equal(halves[:, :32], shown[:20, :32])
    assert (halves[:, 32:] == 0).all() and ((whole >= 0) & (whole <= 1)).all()


def test_layers_alternate_however_many_there_are() -> None:
    assert dbm.declare(64, (6,)).layers == (("v",), ("h1",))
    assert dbm.declare(64, (6, 5, 4)).layers == (("v", "h2"), ("h1", "h3"))
    deep = dbm.declare(64, (7, 6, 5, 4))
    assert deep.layers == (("v", "h2", "h4"), ("h1", "h3"))
    assert [deep.families[f"h{i}"].size for i in (1, 2, 3, 4)] == [7, 6, 5, 4]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--steps=0", "--steps is at least 1"),
        ("--sides 9 9 9 9 9", "--sides are one to 4 numbers of at least 1, not [9, 9, 9, 9, 9]"),
        ("--sides 9 0", "not [9, 0]"),
    ],
)
def test_numbers_are_checked(given: str, said: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        dbm.parse(given.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("estimator", "family"), [("lmi", ebmpp.Spin), ("ucd", ebmpp.Bernoulli)])
def test_units_and_the_rate_follow_the_estimator(estimator: str, family: type[ebmpp.Family]) -> None:
    args = dbm.parse([f"--estimator={estimator}"])
    assert args.images.family is family and args.rate > 0
    assert dbm.parse([f"--estimator={estimator}", "--rate=0.5"]).rate == 0.5
