# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import io
import re
import warnings

import networkx as nx
import numpy as np
import pandas as pd
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, FactorGraph, Gaussian, Spin, exact, layered
from ebmpp.diagnostics.reporting import Work, assemble, certificate, likelihood, mixing, model, pictures
from ebmpp.diagnostics.reporting.page import Section, page
from ebmpp.diagnostics.reporting.subject import Subject, some_rows
from ebmpp.diagnostics.style import grid
from ebmpp.errors import IntractableError, ParameterError, StateError
from helpers import random_params

KEY = jax.random.key(0)
TINY = Work(rows=40, particles=10, temperatures=30, chains=3, sweeps=30, replicas=2, pairs=8, max_sweeps=60)
RBM = layered(v=Bernoulli(9), h=Bernoulli(3))
PARAMS = random_params(RBM, 0, 0.5)
DATA = ebmpp.data.bars_and_stripes(3)


def subject(graph: FactorGraph = RBM, params: dict = PARAMS, data: object = DATA, **others) -> Subject:
    rows = {"train": data} | others
    taken = {name: some_rows(graph, d, TINY.rows, 0)[0] for name, d in rows.items()}
    return Subject(graph, params, taken, TINY, KEY, None)


# -- the page --------------------------------------------------------------------------------------


def test_a_page_is_one_file_and_escapes_what_it_shows() -> None:
    section = Section("A <b> & c")
    figure, (ax,) = grid(1)
    ax.plot([0, 1])
    section.figure("a line", figure, "from <0> to 1")
    section.table("numbers", pd.DataFrame({"x<y": [1.5, np.nan]}), "some")
    section.missing("<log Z>", IntractableError("too many & more"))
    section.fact("one < two")
    made = page("T & U", "", "lead <i>", [section])
    for shown in (
        "A &lt;b&gt; &amp; c",
        "from &lt;0&gt; to 1",
        "x&lt;y",
        "&lt;log Z&gt;",
        "too many &amp; more",
    ):
        assert shown in made
    assert "<li>one &lt; two</li>" in made and "<title>T &amp; U</title>" in made
    # nothing is fetched from elsewhere
    assert re.findall(r'(?:src|href)="(.{11})', made) == ["data:image/"] and "http" not in made
    assert section.figures["a line"].startswith(b"\x89PNG")


def test_long_tables_are_cut_on_the_page_and_say_so() -> None:
    section = Section("t")
    section.table("long", pd.DataFrame({"x": np.arange(50)}), "numbers", most=5)
    assert "numbers (the first 5 of 50 rows)" in section.html() and "<td>6</td>" not in section.html()
    assert len(section.tables["long"]) == 50


def test_what_fails_is_named_on_the_page_and_bugs_are_not_hidden() -> None:
    def refuses(_: Subject) -> Section:
        raise IntractableError("too many states")

    def warns(_: Subject) -> Section:
        warnings.warn("few particles", UserWarning, stacklevel=1)
        return Section("fine")

    def is_wrong(_: Subject) -> Section:
        raise KeyError("v")

    section, why = assemble._guarded("Likelihood", refuses, None)
    assert why == ["Likelihood: IntractableError: too many states"]
    assert "Not computed: Likelihood." in section.html() and "too many states" in section.html()
    section, why = assemble._guarded("x", warns, None)
    assert not why and 'class="caveat">few particles' in section.html()
    with pytest.raises(KeyError):
        assemble._guarded("x", is_wrong, None)


# -- sections --------------------------------------------------------------------------------------


def test_likelihoods_are_exact_where_they_can_be() -> None:
    held_out = DATA[:5]
    made = likelihood.likelihood(subject(held_out=held_out))
    table = made.tables["log_likelihood"]
    for name, rows in (("train", DATA), ("held_out", held_out)):
        each = np.asarray(exact.log_likelihood(RBM, PARAMS, rows))
        assert table.loc[name, "exact"] == pytest.approx(each.mean(), abs=1e-4)
        assert table.loc[name, "row error"] == pytest.approx(each.std(ddof=1) / np.sqrt(len(each)), rel=1e-3)
        rate = (DATA.sum(0) + 0.5) / (len(DATA) + 1)
        alone = (rows * np.log(rate) + (1 - rows) * np.log1p(-rate)).sum(1).mean()
        assert table.loc[name, "independent units"] == pytest.approx(alone, rel=1e-4)
    log_z = made.tables["log_partition"].set_index("log Z")
    assert log_z.loc["exact", "value"] == pytest.approx(float(exact.log_partition(RBM, PARAMS)), abs=1e-4)
    assert (log_z["a bound on average"][:2] == "yes").all()
    assert "(exact)" in made.facts[0] and "Not computed" not in made.html()


def test_filters_are_the_weights() -> None:
    np.testing.assert_allclose(pictures.filters(RBM, PARAMS, "v", "h"), PARAMS["v:h"].T, rtol=1e-6)
    graph = layered(v=Gaussian(4, variance="learned"), h=Categorical(2, 3))
    params = random_params(graph, 1, 0.3)
    weight = np.asarray(params["v:h"]).reshape(4, 6).T
    np.testing.assert_allclose(pictures.filters(graph, params, "v", "h"), weight, rtol=1e-6)


def test_shapes_of_images() -> None:
    graph = FactorGraph(
        {"a": Bernoulli(16), "b": Bernoulli((2, 3)), "c": Bernoulli(6)}, factors=list(map(ebmpp.Bias, "abc"))
    )
    assert pictures.image_shapes(graph, None) == {"a": (4, 4), "b": (2, 3)}
    assert pictures.image_shapes(graph, {"c": (3, 2)})["c"] == (3, 2)
    with pytest.raises(StateError, match=r"image_shape of block 'c' is \(2, 2\), and it has 6 units"):
        pictures.image_shapes(graph, {"c": (2, 2)})
    with pytest.raises(StateError, match="names block 'd'"):
        pictures.image_shapes(graph, {"d": (2, 2)})


@pytest.mark.slow
def test_pairs_that_do_not_meet_are_said_plainly() -> None:
    weight = jnp.full((9, 3), 9.0)  # all units on, or all off
    strong = {"v:h": weight, "v": -0.5 * weight.sum(1), "h": -0.5 * weight.sum(0)}
    html = mixing.meeting(subject(params=strong)).html()
    assert re.search(r"[1-8] of 8 pairs had not met", html) is not None
    assert "Not computed: unbiased means" in html or "no pair met, so the bound is 1" in html


def test_units_and_declaration() -> None:
    made = model.units(subject())
    assert made.tables["unit_counts"].loc["h"].sum() == 3
    assert len(made.tables["units"]) == 3
    lattice = FactorGraph.from_networkx(nx.grid_2d_graph(3, 3), Spin)
    made = model.units(subject(lattice, lattice.init(KEY), 2 * DATA - 1))
    assert "the model has no latent units" in made.html()
    sizes = model.declaration(subject()).tables["factors"].set_index("factor")
    assert sizes.loc["v:h", "params"] == 27
    assert sizes.loc["v:h", "largest size"] == pytest.approx(np.abs(PARAMS["v:h"]).max())


def test_rows_are_drawn_at_most_so_many() -> None:
    rows, total = some_rows(RBM, np.repeat(DATA, 10, 0), 40, 1)
    assert rows["v"].shape == (40, 9) and total == 160
    assert len(np.unique(np.asarray(rows["v"]), axis=0)) > 5
    with pytest.raises(StateError, match=r"leading axes \(\)"):
        some_rows(RBM, DATA[0], 40, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"work": "slow"}, ValueError, "work is one of 'quick', 'thorough', or .*, not 'slow'"),
        ({"image_shape": (2, 2)}, StateError, "it has 9 units"),
        ({"held_out": DATA[:, :4]}, StateError, "block 'v' got shape"),
        ({"data": DATA + 3}, StateError, "expected values in"),
        ({"params": {"v": np.zeros(9)}}, ParameterError, "lacks factor"),
    ],
)
def test_wrong_arguments(options: dict, error: type, message: str) -> None:
    given = {"params": PARAMS, "data": DATA} | options
    with pytest.raises(error, match=message):
        ebmpp.report(RBM, rng_key=KEY, path=None, **given)


def test_work_is_checked() -> None:
    with pytest.raises(ValueError, match="sweeps is an int of at least 4, not 3"):
        Work(sweeps=3)
    with pytest.raises(ValueError, match="rows is an int of at least 1, not True"):
        Work(rows=True)


@pytest.mark.slow
def test_the_bias_of_a_fit_is_told_where_it_is_asked_for() -> None:
    run = {"rng_key": KEY, "num_steps": 2, "progress_bar": False}
    fit = ebmpp.fit(RBM, DATA, estimator=ebmpp.PCD(num_chains=60), **run)
    asked = dataclasses.replace(TINY, references=3)
    at = lambda params, work: dataclasses.replace(subject(params=params), work=work)
    told = lambda subject, history: certificate.bias(subject, history).html()
    assert "no fit was given" in told(at(fit.params, asked), fit.history)
    assert "Work(references=20)" in told(at(fit.params, TINY), fit)
    assert "not the last ones of the fit" in told(at(PARAMS, asked), fit)
    made = certificate.bias(at(fit.params, asked), fit)
    table = made.tables["gradient_bias"].set_index("factor")
    assert list(table.index) == [*RBM.param_shapes, "all"]
    assert table.loc["all", "squared bias"] == pytest.approx(table["squared bias"][:-1].sum())
    assert (
        "20 groups of 3 of its last chains" in made.html() and "Bias of the gradient of PCD" in made.facts[0]
    )
    with pytest.raises(ValueError, match="references is an int of at least 3, not 2"):
        Work(references=2)


# -- whole reports -----------------------------------------------------------------------------------

MODELS = {
    "rbm": (RBM, DATA),
    "dbm": (layered(v=Bernoulli(9), h1=Bernoulli(4), h2=Bernoulli(3)), DATA),
    "large dbm": (layered(v=Bernoulli(9), h1=Bernoulli(40), h2=Bernoulli(30)), DATA),
    "gaussian": (layered(v=Gaussian(9), h=Bernoulli(3)), DATA),
    "learned variance": (layered(v=Gaussian(9, variance="learned"), h=Bernoulli(3)), DATA),
    "categorical": (layered(v=Categorical(5, 3), h=Bernoulli(3)), np.arange(40).reshape(8, 5) % 3),
    "lattice": (FactorGraph.from_networkx(nx.grid_2d_graph(3, 3), Spin), 2 * DATA - 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_report_is_whole_and_its_numbers_are_those_of_the_key(name: str, tmp_path) -> None:
    from matplotlib import image

    graph, rows = MODELS[name]
    params = graph.init(jax.random.key(1), rows)
    path = tmp_path / "made.html"
    made = ebmpp.report(graph, params, rows, held_out=rows[:6], rng_key=KEY, path=path, work=TINY)
    assert made.missing == ()
    assert path.read_text(encoding="utf-8") == made.html and made.path == path
    assert made.html.count("data:image/png;base64,") == len(made.figures)
    for png in made.figures.values():
        assert np.ptp(image.imread(io.BytesIO(png))) > 0.5
    assert {"declaration", "log_likelihood", "meeting_times", "chains", "free_energies"} <= set(made.figures)
    assert ("no latent units" in made.html) == (name == "lattice")
    assert ("bounded from below by mean field" in made.html) == ("dbm" in name)
    assert ("Not computed: the exact value" in made.html) == (name == "large dbm")
    assert made._repr_html_().startswith("<iframe") and "srcdoc" in made._repr_html_()
    again = ebmpp.report(graph, params, rows, held_out=rows[:6], rng_key=KEY, path=None, work=TINY)
    assert again.path is None
    for table in set(made.tables) - {"seconds"}:
        pd.testing.assert_frame_equal(made.tables[table], again.tables[table])
