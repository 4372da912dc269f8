# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The papers' experiments run, at settings that show no more than that."""

import importlib.util
import json
from pathlib import Path
import sys

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def papers(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    spec = importlib.util.spec_from_file_location("papers", FOLDER / "papers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(papers, name, tmp_path):
    papers.main(["--settings", "quick", "--only", name, "--out", str(tmp_path)])
    pictures = list(tmp_path.glob("*.png"))
    assert pictures and all(picture.stat().st_size > 5000 for picture in pictures)
    return [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]


def test_bars_and_stripes_are_learnt(papers, tmp_path):
    (made,) = run(papers, "u5", tmp_path)
    assert made["best_possible"] == -108.13
    assert {run["method"] for run in made["runs"]} == {"CD-1", "PCD-1, 1000 chains"}
    # sixteen fair coins a row are -354.9
    assert all(-330 < run["last"] < -108.13 for run in made["runs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["u6", "u8", "u9", "d4", "d5", "d7", "lmi", "l8", "r4", "ais"])
def test_the_others_run(papers, name, tmp_path):
    (made,) = run(papers, name, tmp_path)
    assert made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["u10", "l7"])
def test_meeting_times_are_drawn(papers, name, tmp_path):
    assert run(papers, name, tmp_path) == []  # tables on the terminal


def test_every_experiment_has_all_settings(papers):
    for script, settings in papers.EXPERIMENTS.values():
        assert (FOLDER / f"{script}.py").is_file()
        assert set(settings) == {"quick", "small", "paper"}
