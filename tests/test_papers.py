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
    script = papers.EXPERIMENTS[name][0]
    pictures = list(tmp_path.glob("*.png"))
    assert pictures and all(picture.stat().st_size > 5000 for picture in pictures)
    if script == "meeting_times":
        return {}  # tables on the terminal
    (report,) = tmp_path.glob(f"{script}*.json")
    return json.loads(report.read_text())


def test_bars_and_stripes_are_learnt(papers, tmp_path):
    made = run(papers, "u5", tmp_path)
    assert made["best_possible"] == -108.13
    assert {run["method"] for run in made["runs"]} == {"CD-1", "PCD-1, 1000 chains"}
    # sixteen fair coins a row are -354.9
    assert all(-330 < run["last"] < -108.13 for run in made["runs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["u6", "u10", "d4", "lmi", "l7", "l8", "r4", "ais"])
def test_the_others_run(papers, name, tmp_path):
    run(papers, name, tmp_path)


def test_every_experiment_has_all_settings(papers):
    for script, settings in papers.EXPERIMENTS.values():
        assert (FOLDER / f"{script}.py").is_file()
        assert set(settings) == {"quick", "small", "paper"}
