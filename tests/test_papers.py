# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Short runs of the papers' experiments, and their table."""

import importlib
import json
from pathlib import Path
import re
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "papers"

sys.path.insert(0, str(FOLDER))
from rows import ROWS  # noqa: E402

pytestmark = pytest.mark.nightly

sys.path.remove(str(FOLDER))


@pytest.fixture
def papers(monkeypatch):
    for folder in (ROOT, ROOT / "models", FOLDER):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("papers")


def run(papers, name, tmp_path):
    papers.main(["--settings", "quick", "--only", name, "--out", str(tmp_path)])
    pictures = list(tmp_path.glob("*.png"))
    assert pictures and all(picture.stat().st_size > 5000 for picture in pictures)
    return [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("settings", ["quick", "small", "paper"])
def test_options_of_a_row_parse_and_quick_ones_need_no_file(
    papers, monkeypatch, name, settings
):
    monkeypatch.delenv("EBMPP_DATA_DIR", raising=False)
    row = ROWS[name]
    module = papers.program(row)
    if row.script.startswith("models/"):  # these read their data while parsing
        monkeypatch.setattr(module, "images", lambda *args: None)
    assert row.options(settings)
    for options in row.options(settings):
        args = vars(module.parse([*options, "--out", "somewhere"]))
        assert args["out"] and (
            settings != "quick" or args.get("data", "digits") == "digits"
        )


def test_every_figure_and_table_has_a_row():
    expected = {
        "Qiu et al. (2020)": [f"figure {n}" for n in range(2, 13)]
        + [f"table {n}" for n in (1, 2, 3)],
        "Taniguchi et al. (2023)": [
            "figure 1",
            "figure 2",
            "figure 3",
            "table 1",
            "table 2",
        ],
        "Upadhya, Sastry (2017)": [
            "table 1",
            *(f"figure {n}" for n in "1 2 3 4 5 6a 6b 7a 7b".split()),
        ],
        "Breuleux et al. (2011)": [
            "figure 1",
            "figure 2",
            "figure 3 left",
            "figure 3 right",
        ],
    }
    for paper, printed in expected.items():
        rows = [row for row in ROWS.values() if row.paper == paper]
        states = r"ran as printed|needs data: reader tested|ran smaller: \w.*"
        assert all(re.fullmatch(states, row.state, re.S) for row in rows)
        assert all((row.minutes is None) == row.needs_data for row in rows)
        assert {name for row in rows for name in row.printed} == set(printed), paper


def test_the_list_shows_every_row():
    printed = subprocess.run(
        [sys.executable, FOLDER / "papers.py", "--list"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    for row in ROWS.values():
        assert (
            f"{row.name}: {row.paper}" in printed
            and row.state in printed
            and row.time in printed
        )
        assert all(
            f"{row.script}.py {options}".rstrip() in printed for options in row.small
        )


def test_bars_and_stripes_are_learned(papers, tmp_path):
    (result,) = run(papers, "u5", tmp_path)
    assert result["best_possible"] == -108.13
    assert {run["method"] for run in result["runs"]} == {"CD-1", "PCD-1, 1000 chains"}
    # independent fair pixels have -354.9
    assert all(-330 < run["last"] < -108.13 for run in result["runs"])


# the local-mode inits of Taniguchi et al. (2023) start in modes that few sweeps leave
@pytest.mark.filterwarnings("ignore:.*a block is where it started in all:UserWarning")
@pytest.mark.release
@pytest.mark.parametrize("name", ROWS)
def test_a_row_runs(papers, name, tmp_path):
    results = run(papers, name, tmp_path)
    assert ROWS[name].script.startswith("models") or results[0].get("runs", results[0])
