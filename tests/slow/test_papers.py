# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Short runs of the papers' experiments, and their table."""

import importlib
import json
from pathlib import Path
import re
import subprocess
import sys

import numpy as np
import pytest
from ucd_tools import estimate

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.contrib import SDCP
from ebmpp.core import random
from ebmpp.estimators import Batch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "papers"

sys.path.insert(0, str(FOLDER))
from rows import ROWS  # noqa: E402

sys.path.remove(str(FOLDER))


@pytest.fixture
def path(monkeypatch):
    for folder in (ROOT, ROOT / "models", FOLDER):
        monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def papers(path):
    return importlib.import_module("papers")


def run(papers, name, tmp_path):
    papers.main(["--settings", "quick", "--only", name, "--out", str(tmp_path)])
    pictures = list(tmp_path.glob("*.png"))
    assert pictures and all(picture.stat().st_size > 5000 for picture in pictures)
    return [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]


# -- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("settings", ["quick", "small", "paper"])
def test_options_of_a_row_parse(papers, monkeypatch, name, settings):
    row = ROWS[name]
    module = papers.program(row)
    if row.script.startswith("models/"):  # these read their data while parsing
        monkeypatch.setattr(module, "images", lambda *args: None)
    assert row.options(settings)
    for options in row.options(settings):
        assert module.parse([*options, "--out", "somewhere"]).out


def test_quick_settings_need_no_file(monkeypatch, papers):
    monkeypatch.delenv("EBMPP_DATA_DIR", raising=False)
    for name, row in ROWS.items():
        for options in row.options("quick"):
            args = vars(papers.program(row).parse(options))
            assert args.get("data", "digits") == "digits", name


def test_every_figure_and_table_has_a_row():
    expected = {
        "Qiu et al. (2020)": [f"figure {n}" for n in range(2, 13)] + [f"table {n}" for n in (1, 2, 3)],
        "Taniguchi et al. (2023)": ["figure 1", "figure 2", "figure 3", "table 1", "table 2"],
        "Upadhya, Sastry (2017)": ["table 1", *(f"figure {n}" for n in "1 2 3 4 5 6a 6b 7a 7b".split())],
        "Breuleux et al. (2011)": ["figure 1", "figure 2", "figure 3 left", "figure 3 right"],
    }
    for paper, printed in expected.items():
        rows = [row for row in ROWS.values() if row.paper == paper]
        assert {name for row in rows for name in row.printed} == set(printed), paper


def test_there_are_three_states():
    states = ("ran as printed", "needs data: reader tested")
    assert all(row.state in states or re.match(r"ran smaller: \w", row.state) for row in ROWS.values())
    assert all((row.minutes is None) == row.needs_data for row in ROWS.values())


def test_the_list_shows_every_row():
    printed = subprocess.run(
        [sys.executable, FOLDER / "papers.py", "--list"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    for row in ROWS.values():
        assert f"{row.name}: {row.paper}" in printed and row.state in printed and row.time in printed
        assert all(f"{row.script}.py {options}".rstrip() in printed for options in row.small)


# -- the programs --------------------------------------------------------------------------------


def test_bars_and_stripes_are_learned(papers, tmp_path):
    (result,) = run(papers, "u5", tmp_path)
    assert result["best_possible"] == -108.13
    assert {run["method"] for run in result["runs"]} == {"CD-1", "PCD-1, 1000 chains"}
    # independent fair pixels have -354.9
    assert all(-330 < run["last"] < -108.13 for run in result["runs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.script.startswith("bench")])
def test_a_row_runs(papers, name, tmp_path):
    result, *_ = run(papers, name, tmp_path)
    assert result.get("runs", result)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.script.startswith("models")])
def test_a_row_of_the_models_runs(papers, name, tmp_path):
    run(papers, name, tmp_path)


# -- their estimators ----------------------------------------------------------------------------


@pytest.mark.slow
def test_algorithm_4_is_the_printed_one(path):
    """Compare its inner steps in centered params with the text of the paper, on the same chains."""
    dc = importlib.import_module("dc_programming")
    rbm, rows, key = dc.declare(), jnp.asarray(ebmpp.data.bars_and_stripes(3)), jax.random.key(0)
    noise = lambda a: a + 0.3 * jax.random.normal(jax.random.key(3), a.shape)
    params, batch, pair = (
        jax.tree.map(noise, rbm.init(key, rows)),
        Batch.uniform({"v": rows}),
        random.key_pair(key),
    )
    algorithm = dc.Algorithm4(SDCP(d=3, k=4), sliding=0.3)
    state = algorithm.init(rbm, params, batch.rows, len(rows), random.fold_in(pair, 0, 1))

    v, rate, slide = np.asarray(rows, float), 0.1, 0.3
    w, b, c = (np.asarray(params[name], float) for name in ("v:h", "v", "h"))
    probability = lambda v, w, c: 1 / (1 + np.exp(-(v @ w + c)))
    mu, lam = v.mean(0), np.full(4, 0.5)
    positive = probability(v, w, c)
    mu_batch, lam_batch = mu, positive.mean(0)
    b, c = b + w @ lam, c + w.T @ mu  # centered
    for step in range(3):
        estimate = algorithm.estimate(rbm, params, state, batch, random.fold_in(pair, step, 2))
        state = estimate.state
        negative_v = np.asarray(state[0].inner.chains["v"], float)
        negative_h = probability(negative_v - mu, w, c)
        lam_batch = np.asarray(
            state[0].means["h"], float
        )  # conditional on the offsets, not the rows: see Centered
        b, c = b + slide * w @ (lam_batch - lam), c + slide * w.T @ (mu_batch - mu)
        mu, lam = mu + slide * (mu_batch - mu), lam + slide * (lam_batch - lam)
        if step == 0:
            of_g = (v - mu).T @ (positive - lam) / len(v)
        w = w + rate * (of_g - (negative_v - mu).T @ (negative_h - lam) / len(v))
        b = b + rate * (v.mean(0) - negative_v.mean(0))
        c = c + rate * (positive.mean(0) - negative_h.mean(0))
        params = jax.tree.map(lambda p, g: p - rate * g, params, estimate.gradient)
        expected = {"v:h": w, "v": b - w @ lam, "h": c - w.T @ mu}
        for name, value in expected.items():
            np.testing.assert_allclose(params[name], value, atol=1e-5)


def test_algorithm_3_sums_all_gradients(path):
    dc = importlib.import_module("dc_programming")
    rbm, rows, key = dc.declare(), jnp.asarray(ebmpp.data.bars_and_stripes(3)), jax.random.key(0)
    params, batch, pair = rbm.init(key, rows), Batch.uniform({"v": rows}), random.key_pair(key)
    plain, printed = SDCP(d=3, k=4), dc.Algorithm3(d=3, k=4)
    first = random.fold_in(pair, 0, 1)
    state, other = (e.init(rbm, params, batch.rows, len(rows), first) for e in (plain, printed))
    total = 0.0
    for step in range(6):
        key = random.fold_in(pair, step, 2)
        step_estimate = plain.estimate(rbm, params, state, batch, key)
        summed = printed.estimate(rbm, params, other, batch, key)
        state, other = step_estimate.state, summed.state
        total = step_estimate.gradient["v:h"] + (0 if step % 3 == 0 else total)
        np.testing.assert_allclose(summed.gradient["v:h"], total, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_uncorrected_pairs_meet_at_once(path):
    modes = importlib.import_module("local_modes")
    rows = 2 * ebmpp.data.bars_and_stripes(2) - 1
    dbm = ebmpp.layered(v=ebmpp.Spin(4), h1=ebmpp.Spin(3), h2=ebmpp.Spin(2))
    params, batch = dbm.init(jax.random.key(0), rows), Batch.uniform({"v": jnp.asarray(rows)})
    pair, corrected = random.key_pair(jax.random.key(1)), {}
    for estimator in (modes.LocalModeUCD(num_pairs=200), modes.Uncorrected(num_pairs=200)):
        state = estimator.init(dbm, params, batch.rows, len(rows), random.fold_in(pair, 0, 1))
        metrics = estimate(estimator, dbm, params, state, batch.rows, random.fold_in(pair, 0, 2)).metrics
        corrected[type(estimator).__name__] = [
            float(metrics[n]) for n in ("corrected", "posterior_corrected")
        ]
    assert corrected["Uncorrected"] == [0, 0]
    assert corrected["LocalModeUCD"][0] > 0  # with nine units some proposals are accepted
