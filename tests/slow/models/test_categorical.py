# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The machine over a table runs from beginning to end, and its completions have the exact law."""

from pathlib import Path

import numpy as np
import pytest

import ebmpp
from helpers import assert_rows_law, enumerate_numpy, random_params
from models import categorical
from models.categorical import Table

FEW = ["--latent=5", "--steps=4", "--batch-size=10", "--num-pairs=4", "--sweeps=20", "--no-progress"]


@pytest.mark.slow
def test_it_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    categorical.main([f"--out={tmp_path}", "--data=wine", *FEW])
    assert (tmp_path / "completions.png").stat().st_size > 5000
    assert ebmpp.load(tmp_path / "table.ebmpp")[0] == categorical.declare(13, 4, 5)
    told = capsys.readouterr().out
    assert told.count("wrote") == 3 and "chained regressions" in told


@pytest.mark.slow
def test_completions_have_the_exact_law() -> None:
    graph = categorical.declare(3, 3, 2)
    params = random_params(graph, seed=4, scale=1.0)
    states, probs, _ = enumerate_numpy(graph, params)
    row, known = np.array([2, 0, 1], np.int32), np.array([True, False, False])
    agrees = np.array([s["v"][0] == 2 for s in states])
    given = np.where(agrees, probs, 0) / probs[agrees].sum()
    wanted = np.einsum("s,sjk->jk", given, [s["v"][:, None] == np.arange(3) for s in states])
    data = Table(row[None], np.tile(row, (200, 1)), np.tile(known, (200, 1)))
    made = categorical.posterior(graph, params, data, sweeps=100, seed=0)
    assert_rows_law(made[:, 1:], wanted[1:])
    modes = categorical.search(graph, params, data, seed=0)
    assert (modes[:, 0] == 2).all()


def test_tables_and_scores() -> None:
    data = categorical.table("iris", bins=3, hidden=0.25, seed=0)
    assert data.train.shape == (100, 4) and data.held_out.shape == (50, 4) and data.train.max() == 2
    assert 0.15 < 1 - data.known.mean() < 0.35
    told = categorical.frequencies(data, bins=3)
    np.testing.assert_allclose(told.sum(-1), 1)
    right, log_score = categorical.scores(told, data)
    assert 0.2 < right < 0.6 and -1.3 < log_score < -0.9
    assert categorical.scores(data.held_out, data)[0] == 1.0
    values = categorical.neighbours(data)
    assert (values == data.held_out)[data.known].all() and categorical.scores(values, data)[0] > 0.6


def test_numbers_are_checked(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        categorical.parse(["--bins=1"])
    assert "--bins is at least 2, not 1" in capsys.readouterr().err
