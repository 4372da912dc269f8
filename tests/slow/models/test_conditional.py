# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The machine over digits and labels runs from beginning to end, and its probabilities are exact."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import jax.numpy as jnp

import ebmpp
from helpers import assert_rows_law, enumerate_numpy, random_params
from models import conditional

FEW = ["--latent=6", "--steps=4", "--batch-size=10", "--num-pairs=4", "--no-progress"]


@pytest.mark.slow
def test_it_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    conditional.main([f"--out={tmp_path}", *FEW])
    for name in ("classes", "halves"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    graph, params = ebmpp.load(tmp_path / "hybrid.ebmpp")
    assert graph == conditional.declare(64, 6) and np.isfinite(params["v:h"]).all()
    with xr.open_datatree(tmp_path / "hybrid.nc", engine="h5netcdf") as tree:
        assert "conditional_log_likelihood" in {v for node in tree.subtree for v in node.data_vars}
    told = capsys.readouterr().out
    assert told.count("wrote") == 8 and "logistic regression" in told


@pytest.mark.slow
def test_labels_and_halves_have_the_exact_law() -> None:
    graph = conditional.declare(4, 2)
    params = random_params(graph, seed=2, scale=1.0)
    states, probs, _ = enumerate_numpy(graph, params)
    v = np.float32([1, 0, 0, 1])

    def labels(agrees: np.ndarray) -> np.ndarray:
        share = np.zeros(10)
        np.add.at(share, [s["y"][0] for s in states], np.where(agrees, probs, 0))
        return share / share.sum()

    whole = labels(np.array([(s["v"] == v).all() for s in states]))
    np.testing.assert_allclose(conditional.label_probabilities(graph, params, v[None])[0], whole, rtol=1e-4)
    upper = labels(np.array([(s["v"][:2] == v[:2]).all() for s in states]))
    rows = np.tile(v, (300, 1))  # chains of their own, so that their spread tells the error
    given_h, completed = conditional.labels_of_halves(graph, params, rows, seed=0)
    assert_rows_law(given_h, upper)
    assert (completed[:, :2] == v[:2]).all()


def test_numbers_are_checked(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        conditional.parse(["--latent=0"])
    assert "--latent is at least 1" in capsys.readouterr().err
    data = conditional.digits("digits", seed=0)
    assert len(data.train["v"]) == len(data.train["y"]) == 1797 - 449
    scored = conditional.scores(jnp.eye(10)[jnp.array([3, 4])] + 1e-9, np.array([[3], [5]]))
    np.testing.assert_allclose(scored, (0.5, np.log(1e-9) / 2), atol=1e-5)
