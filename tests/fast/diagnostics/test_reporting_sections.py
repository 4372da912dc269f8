# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What sections of a report compute: moments, ranks, spectra, nearest rows, and the verdict of all."""

import networkx as nx
import numpy as np
import pandas as pd
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, Factor, FactorGraph, Gaussian, Spin, exact, layered
from ebmpp.diagnostics.reporting import Work, likelihood, mixing, moments, nearest, weights
from ebmpp.diagnostics.reporting.page import Section, verdict
from ebmpp.diagnostics.reporting.subject import Chains, Subject, some_rows
from ebmpp.graph import tables
from helpers import assert_law, random_params

KEY = jax.random.key(0)
WORK = Work(rows=40, particles=10, temperatures=30, chains=4, sweeps=30, replicas=2, pairs=8, max_sweeps=60)
RBM = layered(v=Bernoulli(9), h=Bernoulli(3))
PARAMS = random_params(RBM, 0, 0.5)
DATA = ebmpp.data.bars_and_stripes(3)


def subject(graph=RBM, params=PARAMS, data=DATA, whole=True, **others) -> Subject:
    rows = {"train": data} | others
    taken = {name: some_rows(graph, d, WORK.rows, 0)[0] for name, d in rows.items()}
    table = tables.as_table(graph, data, "the report") if whole else None
    return Subject(graph, params, taken, WORK, KEY, None, table)


# -- moments ---------------------------------------------------------------------------------------


def exact_chains(chains=40, draws=50) -> Chains:
    """Independent exact draws, as if they were chains."""
    drawn = ebmpp.perfect_sample(RBM, PARAMS, jax.random.key(5), chains * draws, method="enumerate")
    return Chains({b: np.asarray(v).reshape(chains, draws, -1) for b, v in drawn.items()}, 0.0, 1, "")


def test_moments_are_those_of_model_and_data() -> None:
    made = moments._visible(subject(), exact_chains())
    means, pairs = made["visible means"], made["covariances"]
    np.testing.assert_allclose(means.data, DATA.mean(0), atol=1e-6)
    # all rows are there, so that they have no error
    assert_law(means.model, exact.moments(RBM, PARAMS)["v"], means.error)
    assert means.names[3] == "v[3]" and pairs.names[0] == "v[0], v[1]" and len(pairs.names) == 36
    own = np.cov(DATA.T, bias=True)[np.triu_indices(9, 1)]
    np.testing.assert_allclose(pairs.data, own, atol=1e-6)
    states = (np.arange(512)[:, None] >> np.arange(9)) & 1
    chances = np.asarray(jax.nn.softmax(-RBM.free_energy(PARAMS, {"v": states.astype(float)})))
    centred = states - chances @ states
    wanted = np.einsum("s,si,sj->ij", chances, centred, centred)[np.triu_indices(9, 1)]
    assert_law(pairs.model, wanted, pairs.error)
    latent = moments._latent(subject(), exact_chains())["latent means"]
    np.testing.assert_allclose(latent.data, RBM.mean(PARAMS, {"v": DATA}, "h").mean(0), atol=1e-6)
    assert_law(latent.model, exact.moments(RBM, PARAMS)["h"], latent.error)


def test_rows_that_are_a_part_of_all_have_an_error() -> None:
    rng = np.random.default_rng(0)
    data, model = rng.normal(size=(400, 50)), rng.normal(size=(10, 40, 50))
    part, whole = (moments.compare([""] * 50, data, model, share) for share in (0.0, 1.0))
    assert 0.7 < part.off / part.stated < 1.4
    np.testing.assert_allclose(whole.error, model.mean(1).std(0, ddof=1) / np.sqrt(10))
    assert (part.error > whole.error).all()
    off = moments.compare([""] * 50, data, model + 1.0, 0.0)
    assert off.off > 8 * off.stated


def test_moments_that_differ_are_in_the_verdict() -> None:
    section = Section("moments")
    there = lambda off: moments.Compared(["a", "b"], np.zeros(2), np.full(2, off), np.full(2, 0.01))
    moments._judge(section, {"visible means": there(0.02), "covariances": there(0.02)})
    assert section.sound == ["moments of model and data agree within their errors"] and not section.doubts
    moments._judge(section, {"visible means": there(0.1), "covariances": there(0.02)})
    assert section.doubts == ["visible means of model and data differ by more than their errors"]


# -- ranks -----------------------------------------------------------------------------------------


def test_ranks() -> None:
    rng = np.random.default_rng(0)
    alike = mixing.ranks(rng.normal(size=(5, 400)))
    assert alike.shape == (5, 20) and (alike.sum(1) == 400).all() and (alike.sum(0) == 100).all()
    assert alike.max() < 45  # 20 a bin, each about binomial
    apart = mixing.ranks(np.stack([np.arange(100.0), 1000.0 + np.arange(100)]), bins=4)
    np.testing.assert_array_equal(apart, [[50, 50, 0, 0], [0, 0, 50, 50]])
    tied = mixing.ranks(np.zeros((3, 10)), bins=5)
    assert (tied.sum(1) == 10).all() and (tied == tied[0]).all()


# -- weights ---------------------------------------------------------------------------------------


def test_singular_values_are_those_of_the_weights() -> None:
    made = weights.singular_values(subject())
    row = made.tables["singular_values"].iloc[0]
    wanted = np.linalg.svd(np.asarray(PARAMS["v:h"]), compute_uv=False)
    assert row["blocks"] == "v, h" and row["largest"] == pytest.approx(wanted[0], rel=1e-5)
    assert row["smallest"] == pytest.approx(wanted[-1], rel=1e-5)
    assert row["effective rank"] == pytest.approx((wanted**2).sum() ** 2 / (wanted**4).sum(), rel=1e-5)
    planted = {**PARAMS, "v:h": jnp.outer(jnp.linspace(-1, 1, 9), jnp.array([2.0, -2.0, 2.0]))}
    row = weights.singular_values(subject(params=planted)).tables["singular_values"].iloc[0]
    assert row["above noise"] == 1 and row["effective rank"] == pytest.approx(1, abs=1e-3)


def test_weights_of_any_family_and_of_units_within_a_block() -> None:
    graph = layered(v=Gaussian(4, variance="learned"), h=Categorical(2, 3))
    params = random_params(graph, 1, 0.3)
    made = weights.response(graph, params, "v", "h", 100)
    assert made.shape[:2] == (6, 4)
    np.testing.assert_allclose(made[:, :, 0], np.asarray(params["v:h"]).reshape(4, 6).T, rtol=1e-5)
    lattice = FactorGraph.from_networkx(nx.path_graph(3), Spin)
    assert weights.coupled(lattice) == [("x", "x")]
    made = weights.response(lattice, {**lattice.init(KEY), "x:x": jnp.array([0.5, -0.2])}, "x", "x", 9)
    np.testing.assert_allclose(made[:, :, 0], [[0, 0.5, 0], [0.5, 0, -0.2], [0, -0.2, 0]], atol=1e-6)


def test_spectra_that_there_are_not_are_named() -> None:
    gate = Factor("x", "y", "h", energy=lambda _, x, y, h: -x[0] * y[0] * h[0], name="gate")
    graph = FactorGraph({"x": Bernoulli(1), "y": Bernoulli(1)}, {"h": Bernoulli(1)}, [gate])
    rows = {"x": np.ones((4, 1)), "y": np.ones((4, 1))}
    html = weights.singular_values(subject(graph, graph.init(KEY), rows)).html()
    assert "Not computed: singular values of x, y." in html and "a factor of more blocks" in html
    alone = FactorGraph({"x": Bernoulli(3)}, factors=[ebmpp.Bias("x")])
    html = weights.singular_values(subject(alone, alone.init(KEY), np.ones((4, 3)))).html()
    assert "no two blocks of the model act on one another" in html


# -- nearest rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [5, 4096])
def test_the_nearest_row_is_found_among_all(at_once, monkeypatch) -> None:
    monkeypatch.setattr(nearest, "_ROWS", at_once)
    rng = np.random.default_rng(0)
    data = rng.integers(2, size=(60, 9)).astype(float)  # more than the report's rows, 40
    some = rng.integers(2, size=(7, 9)).astype(float)
    given = subject(data=data)
    made = nearest.nearest(given, {"v": some})
    differ = (some[:, None] != data).sum(-1)
    np.testing.assert_allclose(made.distance, differ.min(1), atol=1e-6)
    np.testing.assert_array_equal(differ[np.arange(7), made.index], differ.min(1))
    own = np.asarray(given.train["v"])
    differ = np.sort((own[:, None] != data).sum(-1), axis=1)
    np.testing.assert_allclose(
        nearest.nearest(given, given.train, alone=True).distance, differ[:, 1], atol=1e-6
    )


def test_distances_count_categories_and_take_ranges() -> None:
    graph = layered(v=Categorical(5, 3), h=Bernoulli(2))
    rows = np.arange(40).reshape(8, 5) % 3
    made = nearest.nearest(subject(graph, graph.init(KEY), rows), {"v": np.array([[2, 1, 2, 0, 1]])})
    assert made.distance[0] == pytest.approx((rows != [2, 1, 2, 0, 1]).sum(1).min())
    spins = layered(v=Spin(9), h=Bernoulli(2))
    made = nearest.nearest(subject(spins, spins.init(KEY), 2 * DATA - 1), {"v": 1 - 2 * DATA[:1]})
    assert made.distance[0] == pytest.approx((DATA != 1 - DATA[0]).sum(1).min())
    real = layered(v=Gaussian(2), h=Bernoulli(2))
    made = nearest.nearest(
        subject(real, real.init(KEY), np.array([[0.0, 3.0], [4.0, 4.0]])), {"v": np.zeros((1, 2))}
    )
    assert made.distance[0] == pytest.approx(9) and made.index[0] == 0


# -- what is said on top ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("upper", "lower", "words"),
    [
        (-3.05, -3.0, "-3.02 +- 0.1 a row (two estimates of log Z agree)"),
        (-3.5, -3.0, "-3.50 to -3.00 a row (two estimates of log Z)"),
        (-3.0, -3.5, "-3.50 to -3.00 a row (two estimates of log Z)"),
    ],
)
def test_a_likelihood_has_an_error_where_its_bracket_is_narrower(upper, lower, words) -> None:
    row = pd.Series({"exact": np.nan, "at upper log Z": upper, "at lower log Z": lower, "log Z error": 0.1})
    assert likelihood.in_words(row) == words
    row["exact"] = -3.2
    assert likelihood.in_words(row) == "-3.20 a row (exact)"


def test_a_reverse_estimate_from_chains_is_no_bound_by_itself() -> None:
    words = "bounds log Z from above only if its chains have the model"
    given = subject()
    assert words not in likelihood.likelihood(given).html()  # independent exact draws
    given.__dict__["starts"] = (given.starts[0], False, "some chains")
    html = likelihood.likelihood(given).html()
    assert words in html and "in reverse from some chains" in html


@pytest.mark.parametrize(
    ("ends", "sound", "words"),
    [
        ((-3.0, -3.1), True, "0.7 nats or more above"),
        ((-4.1, -4.0), None, "not known"),
        ((-6, -5), False, "below"),
    ],
)
def test_a_model_is_judged_by_independent_units(ends, sound, words) -> None:
    section = Section("l")
    row = {"exact": np.nan, "at upper log Z": ends[0], "at lower log Z": ends[1], "log Z error": 0.1}
    likelihood._judge(section, "held out", pd.Series(row | {"independent units": -4.0}))
    (told,) = section.sound if sound else section.doubts
    assert words in told and "held out" in told


def test_the_verdict_is_one_line() -> None:
    first, second = Section("a"), Section("b")
    assert verdict([first, second]) == ""
    first.judge(True, "chains agree")
    assert "<b>In order:</b> chains agree." in verdict([first, second])
    second.judge(False, "moments < differ")
    made = verdict([first, second])
    assert "<b>To be doubted:</b> moments &lt; differ. <b>Else in order:</b> chains agree." in made
    assert 'class="verdict doubt"' in made
