# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Harmoniums of words: tiny ones against enumeration, and the program with what prepares and judges."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from numpyro.infer import MCMC
import pytest
from scipy.special import gammaln

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import Gaussian, Poisson, exact
from ebmpp.errors import DomainError
from helpers import assert_law, slow
from models import harmonium
from shared import corpus

TOPICS = np.array(list(itertools.product([0.0, 1.0], repeat=2)))
PARAMS = {
    "words:topics": {
        "words": jnp.array([0.3, -0.4, 0.1]),
        "weight": jnp.array([[1.0, -0.5], [-0.3, 0.8], [0.2, 0.6]]),
        "latents": jnp.array([-0.4, 0.3]),
    }
}
COUNTS = np.array([[3.0, 0, 1], [0, 2, 2]])


def log_sum(params: Any, tokens: int) -> Array:
    """log Z by the formula: each topic's words are independent, so a document is a power."""
    p = params["words:topics"]
    return jax.nn.logsumexp(
        tokens * (TOPICS @ p["latents"])
        + tokens * jax.nn.logsumexp(p["words"] + TOPICS @ p["weight"].T, axis=1)
    )


def document_log_probability(params: Any, words: Any, tokens: int) -> Array:
    """log p of words in order, the topics summed out one state after the other."""
    p = params["words:topics"]
    counts = np.bincount(words, minlength=3).astype(float)
    terms = counts @ p["words"] + TOPICS @ (p["weight"].T @ counts) + tokens * (TOPICS @ p["latents"])
    return jax.nn.logsumexp(terms) - log_sum(params, tokens)


@pytest.mark.parametrize("tokens", [2, slow(3)])
def test_one_set_of_params_is_the_replicated_softmax_of_every_length(tokens: int) -> None:
    graph = harmonium.replicated(tokens, 3, 2)
    documents = np.array(list(itertools.product(range(3), repeat=tokens)))
    wanted = np.array([document_log_probability(PARAMS, d, tokens) for d in documents])
    np.testing.assert_allclose(np.exp(wanted).sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(exact.log_likelihood(graph, PARAMS, documents), wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(exact.log_partition(graph, PARAMS), log_sum(PARAMS, tokens), rtol=1e-5)


@pytest.mark.slow
def test_gibbs_chains_have_the_law_of_documents() -> None:
    mcmc = MCMC(
        ebmpp.BlockedGibbs(harmonium.replicated(2, 3, 2)),
        num_warmup=25,
        num_samples=1,
        num_chains=8000,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), PARAMS)
    drawn = np.asarray(mcmc.get_samples()["words"])
    documents = np.array(list(itertools.product(range(3), repeat=2)))
    share = (drawn[:, None] == documents).all(-1).mean(0)
    wanted = np.exp([float(document_log_probability(PARAMS, d, 2)) for d in documents])
    assert_law(share, wanted, np.sqrt(wanted * (1 - wanted) / len(drawn)))


@pytest.mark.slow
def test_coupled_gradients_are_those_of_the_log_partition_function() -> None:
    graph = harmonium.replicated(3, 3, 2)
    wanted = jax.grad(lambda p: -log_sum(p, 3))(PARAMS)
    est = ebmpp.unbiased_expectation(
        graph,
        PARAMS,
        lambda x: jax.grad(lambda p: graph.energy(p, x))(PARAMS),
        rng_key=jax.random.key(1),
        num_pairs=6000,
    )
    for name, value in est.value["words:topics"].items():
        assert_law(value, wanted["words:topics"][name], est.standard_error["words:topics"][name], 11)


def test_poisson_and_presence_harmoniums_have_the_likelihood_of_their_formulas() -> None:
    made = harmonium.declare("poisson", 9, 3, 2)
    weight, bias, own = (
        np.array(a) for a in ([[0.5, -0.2], [0.1, 0.3], [-0.4, 0.2]], [0.2, -0.1, 0.0], [0.1, 0.4])
    )
    params = {"words": bias, "topics": own, "words:topics": weight}
    params = {name: jnp.asarray(a, jnp.float32) for name, a in params.items()}
    rate = np.exp(bias + TOPICS @ weight.T)
    log_z = np.logaddexp.reduce(TOPICS @ own + rate.sum(1))
    terms = COUNTS @ bias + np.logaddexp.reduce(own @ TOPICS.T + COUNTS @ weight @ TOPICS.T, axis=1)
    wanted = terms - gammaln(COUNTS + 1).sum(1) - log_z
    np.testing.assert_allclose(exact.log_likelihood(made, params, COUNTS), wanted, rtol=1e-5)

    presence = harmonium.declare("presence", 9, 3, 2)
    documents = np.array(list(itertools.product([0.0, 1.0], repeat=3)))
    score = documents @ bias + 0.5 * ((own + documents @ weight) ** 2).sum(1)  # the latents integrated out
    got = exact.log_likelihood(presence, params, documents)
    np.testing.assert_allclose(got, score - np.logaddexp.reduce(score), rtol=1e-5)


def test_poisson_words_with_gaussian_latents_are_refused_as_the_program_says() -> None:
    graph = ebmpp.layered(words=Poisson(3), topics=Gaussian(2))
    params = graph.init(jax.random.key(0))
    with pytest.raises(DomainError, match="does not normalise"):
        graph.check(params)


@pytest.mark.parametrize("kind", ["replicated", "poisson", "presence"])
def test_windows_are_words_of_the_document(kind: str) -> None:
    rng = np.random.default_rng(0)
    made = harmonium.windows(np.repeat(COUNTS, 2000, 0), kind, 5, rng)
    graph = harmonium.declare(kind, 5, 3, 2)
    assert made.shape[1:] == graph.families["words"].shape
    if kind == "replicated":
        made = (made[..., None] == np.arange(3)).sum(1)
    if kind == "presence":
        wanted = 1 - (1 - COUNTS / 4) ** 5
        assert set(np.unique(made)) == {0, 1}
    else:
        wanted = 5 * COUNTS / 4
        assert (made.sum(1) == 5).all()
    for i in range(2):
        rows = made[2000 * i : 2000 * (i + 1)]
        assert_law(rows.mean(0), wanted[i], rows.std(0) / 2000**0.5, comparisons=6)


def test_runs_begin_at_the_base_rates_of_words() -> None:
    rates = np.array([0.5, 0.3, 0.2])
    for kind, wanted in (("poisson", 4 * rates), ("presence", 1 - np.exp(-4 * rates))):
        graph = harmonium.declare(kind, 4, 3, 2)
        params = harmonium.start(graph, rates, 4, 0)
        np.testing.assert_allclose(graph.families["words"].mean(params["words"]), wanted, rtol=1e-5)
    params = harmonium.start(harmonium.replicated(4, 3, 2), rates, 4, 0)
    np.testing.assert_allclose(jax.nn.softmax(params["words:topics"]["words"]), rates, rtol=1e-5)


def test_retrieval_by_hand() -> None:
    """Cosines 1, 0.8, 0.6 and 0: hits first and third of two, so (1/1 + 2/3) / 2."""
    train = np.array([[1.0, 0], [0.8, 0.6], [0.6, 0.8], [0, 1]])
    data = corpus.Corpus(train, np.array([0, 1, 0, 1]), np.array([[2.0, 0]]), np.array([0]), np.array([]), [])
    average, ten, precision = harmonium.retrieval(train, data.held_out, data)
    np.testing.assert_allclose([average, ten], [(1 + 2 / 3) / 2, 0.5])
    np.testing.assert_allclose(precision, [1] * 6 + [2 / 3] * 5)


def test_top_words_are_what_weights_say() -> None:
    weight = jnp.array([[0.0, 3.0], [0.1, -3.0], [-0.1, 0.0]])
    words = np.array(["a", "b", "c"])
    assert harmonium.top_words({"words:topics": weight}, words, 2) == ["a c", "b a"]


@pytest.mark.slow
def test_documents_are_the_same_every_time_and_have_labels() -> None:
    first, again = (corpus.load("docstrings", 100, seed=0) for _ in range(2))
    np.testing.assert_array_equal(first.train, again.train)
    assert len(first.train) > 300 and first.train.shape[1] == 100 == len(first.words)
    assert (np.concatenate([first.train, first.held_out]).sum(1) >= 30).all()
    used = np.concatenate([first.train_labels, first.held_out_labels])
    assert np.bincount(used).min() >= 30 and len(first.labels) == used.max() + 1
    assert "scipy.stats" in first.labels


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicated", "poisson", "presence"])
def test_it_writes_what_it_says(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    few = ["--steps=3", "--words=60", "--tokens=8", "--latent=4", "--batch-size=6", "--num-pairs=4"]
    harmonium.main([f"--out={tmp_path}", f"--kind={kind}", "--no-progress", *few])
    for name in ("retrieval", "history"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    told = capsys.readouterr().out
    assert told.count("mean average precision") == 4 and told.count("wrote") == 3
    assert ("perplexity" in told) == (kind == "replicated")
