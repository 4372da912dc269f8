# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The model report: numbers that have exact values, figures, verdicts, refusals.

Tests reporting/assemble.py, reporting/likelihood.py, reporting/mixing.py,
reporting/model.py, reporting/page.py, reporting/samples.py, reporting/subject.py.
"""

import errno
import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace

from matplotlib import image
import networkx as nx
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import jax

import ebmpp
from ebmpp import Bernoulli, Categorical, FactorGraph, Gaussian, Spin, exact, layered
from ebmpp.core import archive
from ebmpp.errors import ParameterError, StateError
from ebmpp.reporting import Budget, assemble, mixing, model
from ebmpp.reporting.page import Section
from helpers import random_params

pytestmark = pytest.mark.nightly

KEY = jax.random.key(0)
TINY = Budget(
    rows=40,
    particles=10,
    temperatures=30,
    chains=3,
    sweeps=30,
    replicas=2,
    pairs=8,
    max_sweeps=60,
)
DATA = ebmpp.data.bars_and_stripes(3)
GRAPHS = {
    "rbm": lambda: layered(v=Bernoulli(9), h=Bernoulli(3)),
    "large dbm": lambda: layered(v=Bernoulli(9), h1=Bernoulli(40), h2=Bernoulli(30)),
    "learned variance": lambda: layered(
        v=Gaussian(9, variance="learned"), h=Bernoulli(3)
    ),
    "categorical": lambda: layered(v=Categorical(5, 3), h=Bernoulli(3)),
    "lattice": lambda: FactorGraph.from_networkx(nx.grid_2d_graph(3, 3), Spin),
}
ROWS = {"categorical": np.arange(40).reshape(8, 5) % 3, "lattice": 2 * DATA - 1}


def report(params=None, data=DATA, **options):
    graph = GRAPHS["rbm"]()
    params = random_params(graph, 0, 0.5) if params is None else params
    return ebmpp.report(
        graph, params, data, **{"rng_key": KEY, "file": None, "budget": TINY} | options
    )


@pytest.fixture(scope="module")
def result():
    return report(held_out=DATA[:5], title="T & U")


def test_likelihoods_and_log_partition_are_exact_where_they_can_be(result):
    graph, params = GRAPHS["rbm"](), random_params(GRAPHS["rbm"](), 0, 0.5)
    table = result.tables["log_likelihood"]
    rate = (DATA.sum(0) + 0.5) / (len(DATA) + 1)
    for name, rows in (("train", DATA), ("held out", DATA[:5])):
        values = np.asarray(exact.log_likelihood(graph, params, rows))
        row = table.loc[name]
        assert row["exact"] == pytest.approx(values.mean(), abs=1e-4)
        assert row["row error"] == pytest.approx(
            values.std(ddof=1) / np.sqrt(len(values)), rel=1e-3
        )
        independent = (rows * np.log(rate) + (1 - rows) * np.log1p(-rate)).sum(1).mean()
        assert row["independent units"] == pytest.approx(independent, rel=1e-4)
    log_z = result.tables["log_partition"].set_index("log Z")
    assert log_z.loc["exact", "value"] == pytest.approx(
        float(exact.log_partition(graph, params)), abs=1e-4
    )


def test_tables_of_params_and_units(result):
    weight = np.asarray(random_params(GRAPHS["rbm"](), 0, 0.5)["v:h"])
    factors = result.tables["factors"].set_index("factor")
    assert factors.loc["v:h", "params"] == 27
    assert factors.loc["v:h", "root mean square"] == pytest.approx(
        np.sqrt((weight**2).mean())
    )
    assert {"samples_v", "filters_v_h", "moments"} <= set(result.figures)
    assert result.tables["moments"]["number"].tolist() == [9, 36, 3]
    assert (
        result.tables["unit_counts"].loc["h"].sum() == len(result.tables["units"]) == 3
    )


def test_the_page_is_one_file_with_a_verdict(result):
    assert "<title>T &amp; U</title>" in result.html
    # nothing is loaded from elsewhere
    assert set(re.findall(r'(?:src|href)="(.{11})', result.html)) <= {"data:image/"}
    assert "http" not in result.html
    assert (
        'class="verdict' in result.html
        and "Passed:" in result.html
        or "Doubtful:" in result.html
    )
    assert (
        result._repr_html_().startswith("<iframe") and "srcdoc" in result._repr_html_()
    )


@pytest.mark.parametrize("name", GRAPHS)
def test_a_report_is_complete_and_reproducible(name, tmp_path):
    graph, rows, file = GRAPHS[name](), ROWS.get(name, DATA), tmp_path / "report.html"
    options = {"held_out": rows[:6], "rng_key": KEY, "budget": TINY}
    first = ebmpp.report(
        graph, graph.init(jax.random.key(1), rows), rows, file=file, **options
    )
    assert (
        first.missing == ()
        and first.file == file
        and file.read_text(encoding="utf-8") == first.html
    )
    assert first.html.count("data:image/png;base64,") == len(first.figures)
    for png in first.figures.values():
        assert np.ptp(image.imread(io.BytesIO(png))) > 0.5
    assert {
        "declaration",
        "log_likelihood",
        "meeting_times",
        "chains",
        "free_energies",
    } <= set(first.figures)
    assert ("no latent units" in first.html) == (name == "lattice")
    assert ("Not computed: the exact value" in first.html) == (name == "large dbm")
    second = ebmpp.report(
        graph, graph.init(jax.random.key(1), rows), rows, file=None, **options
    )
    for table in set(first.tables) - {"seconds"}:
        pd.testing.assert_frame_equal(first.tables[table], second.tables[table])


PROGRAM = """
import sys, jax, numpy as np, ebmpp
from ebmpp.reporting import Budget, assemble, mixing
assemble._SECTIONS.clear()
assemble._SECTIONS["chains"] = mixing.chains
graph = ebmpp.layered(v=ebmpp.Bernoulli(6), h=ebmpp.Bernoulli(3))
key = jax.random.key(0)
for chains in (2, 3, 4):
    budget = Budget(10, particles=5, temperatures=10, chains=chains, sweeps=20,
                    replicas=2, pairs=4, max_sweeps=30)
    ebmpp.report(graph, graph.init(key), np.zeros((20, 6)), rng_key=key, file=None, budget=budget)
"""


def test_few_replicas_do_not_abort_the_compiler():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-500:]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_loses_no_results(call, tmp_path, monkeypatch):
    file = tmp_path / "report.html"
    file.write_text("the page before")
    monkeypatch.setattr(assemble, "_SECTIONS", {"The model": model.declaration})

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(archive.os, call, fail)
    with pytest.warns(UserWarning, match=r"report\.html cannot be written.*No space"):
        result = report(file=file, title="\udcff and \N{GREEK SMALL LETTER THETA}")
    monkeypatch.undo()
    assert file.read_text() == "the page before" and len([*tmp_path.iterdir()]) == 1
    assert result.file is None and "No space left" in result.missing[-1]
    assert result.figures and "<title>" in result.html
    assert report(file=file, title="\udcff").file == file
    assert file.read_bytes().count(b"<title>") == 1


def test_pairs_that_do_not_meet_are_reported():
    weight = np.full((9, 3), 9.0, np.float32)  # all units on, or all off
    html = report(
        {"v:h": weight, "v": -0.5 * weight.sum(1), "h": -0.5 * weight.sum(0)}
    ).html
    assert re.search(r"[1-8] of 8 pairs had not met", html) is not None
    assert "Doubtful:" in html
    assert (
        "chains are stuck at different values" in html
        and "Gibbs chains from noise are stuck in" in html
    )


def test_unmet_pairs_do_not_count_in_the_quantiles(monkeypatch):
    met = np.arange(20) < 10
    pairs = {
        "meeting_time": ("chain", np.where(met, [3, 2] * 10, 300)),
        "met": ("chain", met),
        "lag": 1,
    }
    tree = xr.DataTree.from_dict({"meeting": xr.Dataset(pairs)})
    monkeypatch.setattr(
        mixing, "_pairs", lambda subject, lag: tree if lag == 1 else None
    )
    section, budget = Section("Mixing"), Budget(pairs=20, max_sweeps=300)
    mixing.meeting_times(section, SimpleNamespace(budget=budget))
    words = "10 of 20 pairs met within 300 sweeps, after 2 in the median and at most 3"
    assert section.facts == [f"Mixing from noise: {words}."]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": "slow"}, ValueError, "budget.*'slow'"),
        ({"held_out": DATA[:, :4]}, StateError, "'v'"),
        ({"data": DATA + 3}, StateError, "values"),
        ({"params": {"v": np.zeros(9)}}, ParameterError, "'h'"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        report(**options)
    with pytest.raises(ValueError, match="sweeps.*3"):
        Budget(sweeps=3)
