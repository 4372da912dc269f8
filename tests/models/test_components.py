# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Data, scores and likelihoods of the programs in models/; test_rbm.py has models/rbm.py.

Tests contrib/figures.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import jax

import ebmpp
from helpers import assert_law
from models import categorical, custom_energy, dbm, gaussian_bernoulli, harmonium
from shared import corpus

pytestmark = pytest.mark.nightly

KEY = jax.random.key(0)
# of the digits, by the programs' seed 0
ORDER = np.random.default_rng(0).permutation(1797)
COUNTS = np.array([[3.0, 0, 1], [0, 2, 2]])


def test_tables_and_scores() -> None:
    data = categorical.table("iris", bins=3, hidden=0.25, seed=0)
    assert (
        data.train.shape == (100, 4)
        and data.held_out.shape == (50, 4)
        and data.train.max() == 2
    )
    assert 0.15 < 1 - data.known.mean() < 0.35
    frequencies = categorical.frequencies(data, bins=3)
    np.testing.assert_allclose(frequencies.sum(-1), 1)
    accuracy, log_score = categorical.scores(frequencies, data)
    assert 0.2 < accuracy < 0.6 and -1.3 < log_score < -0.9
    assert categorical.scores(data.held_out, data)[0] == 1.0
    neighbours = categorical.neighbours(data)
    assert (neighbours == data.held_out)[data.known].all() and categorical.scores(
        neighbours, data
    )[0] > 0.6


def test_standardised_images_can_be_inverted() -> None:
    data = gaussian_bernoulli.images("digits", seed=0)
    assert np.abs(data.train.mean(0)).max() < 1e-4 and data.train.std(0).max() < 1.001
    digits = np.asarray(ebmpp.data.digits())[ORDER][: len(data.held_out)]
    grey = data.grey(data.held_out) * 17
    # within one grey level
    assert ((grey >= 16 * digits - 1e-3) & (grey <= 16 * digits + 1 + 1e-3)).all()


def test_completions_keep_the_known_half() -> None:
    data = dbm.images("digits", grey=False, seed=0, family=ebmpp.Spin)
    model = dbm.declare(64, (6, 5), ebmpp.Spin)
    halves, completed = dbm.complete(model, model.init(KEY, data.train), data, seed=0)
    digits = np.asarray(ebmpp.data.binarize(ebmpp.data.digits()))[ORDER]
    np.testing.assert_array_equal(halves[:, :32], digits[:20, :32])
    np.testing.assert_array_equal(completed[:, :32], halves[:, :32])
    assert (halves[:, 32:] == 0).all() and ((completed >= 0) & (completed <= 1)).all()
    grey = dbm.images("digits", grey=True, seed=0, family=ebmpp.Spin)
    # eight bits per pixel, which can be inverted
    assert grey.train.shape == (
        1797 - 20,
        64 * 8,
    )
    np.testing.assert_allclose(
        grey.intensities(grey.held_out), ebmpp.data.digits()[ORDER[:20]], atol=1 / 255
    )


def test_an_energy_that_is_not_multi_affine_is_refused() -> None:
    assert (
        "must be affine in the statistics of each unit of block 'v'"
        in custom_energy.rejected_energy()
    )


@pytest.mark.parametrize("kind", ["replicated", "poisson", "presence"])
def test_windows_have_the_word_rates_of_their_document(kind: str) -> None:
    windows = harmonium.windows(
        np.repeat(COUNTS, 2000, 0), kind, 5, np.random.default_rng(0)
    )
    assert windows.shape[1:] == harmonium.declare(kind, 5, 3, 2).families["words"].shape
    if kind == "replicated":
        windows = (windows[..., None] == np.arange(3)).sum(1)
    if kind == "presence":
        expected = 1 - (1 - COUNTS / 4) ** 5
        assert set(np.unique(windows)) == {0, 1}
    else:
        expected = 5 * COUNTS / 4
        assert (windows.sum(1) == 5).all()
    for i in range(2):
        rows = windows[2000 * i : 2000 * (i + 1)]
        assert_law(rows.mean(0), expected[i], rows.std(0) / 2000**0.5, comparisons=6)


def test_retrieval_of_four_documents() -> None:
    """The cosines are 1, 0.8, 0.6 and 0; the first and the third are relevant: (1/1 + 2/3) / 2."""
    train = np.array([[1.0, 0], [0.8, 0.6], [0.6, 0.8], [0, 1]])
    data = corpus.Corpus(
        train,
        np.array([0, 1, 0, 1]),
        np.array([[2.0, 0]]),
        np.array([0]),
        np.array([]),
        [],
    )
    average, ten, precision = harmonium.retrieval(train, data.held_out, data)
    np.testing.assert_allclose([average, ten], [(1 + 2 / 3) / 2, 0.5])
    np.testing.assert_allclose(precision, [1] * 6 + [2 / 3] * 5)


def test_likelihood_of_a_deep_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    argv = "--recipe=likelihood --sides 6 5 --steps=4 --batch-size=10 --no-progress --num-pairs=8"
    dbm.main([*argv.split(), "--particles=1000", f"--out={tmp_path}"])
    graph, params = ebmpp.load(tmp_path / "dbm.ebmpp")
    held_out = dbm.parse(["--recipe=likelihood"]).images.held_out
    bound = np.asarray(ebmpp.evaluate.mean_field_bound(graph, params, held_out)).mean()
    printed, log_z = (
        capsys.readouterr().out,
        float(ebmpp.exact.log_partition(graph, params)),
    )
    numbers = json.loads((tmp_path / "dbm_likelihood.json").read_text())
    assert abs(numbers["log_partition"] - log_z) < 5 * numbers["standard_error"] < 0.5
    assert f"{bound - numbers['log_partition']:.2f} held out" in printed
    likelihood = float(ebmpp.exact.log_likelihood(graph, params, held_out).mean())
    assert numbers["gap"] > 3 * numbers["gap_error"] > 0
    assert abs(bound - log_z + numbers["gap"] - likelihood) < 0.1 * numbers["gap"]
    assert (
        "300 of the 1797 rows of scikit-learn's digits" in printed
        and held_out.shape == (300, 64)
    )
