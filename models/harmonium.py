# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exponential-family harmoniums on word counts, and retrieval of documents of the same label.

``python models/harmonium.py --out harmonium`` reads the docstrings of numpy, scipy and
scikit-learn, labelled by subpackage; ``--data newsgroups`` the 20 newsgroups if they
are on disk. Three kinds (``--kind``):

``replicated``  a document is a sequence of words, units of one categorical block that
                share their weights: the replicated softmax of Salakhutdinov and Hinton
                (2009). The latents' biases count per word.
``poisson``     a document is a count per word, Poisson given binary latents. (With
                Gaussian latents it would not be normalisable.)
``presence``    a document is the set of its words, Bernoulli given Gaussian latents: an
                undirected relative of latent semantic indexing (Welling, Rosen-Zvi,
                Hinton 2005).

Documents have different lengths. Training draws windows of ``--tokens`` words from a
document at every step; the params of the replicated softmax have the same meaning for
every length. A document's latent means are averages over its windows.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib import pyplot as plt
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, Factor, FactorGraph, Gaussian, Poisson
from ebmpp.diagnostics import style
from shared import common, corpus

_WINDOWS = 20  # of an encoded document


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    parser = common.options(__doc__, "harmonium")
    common.training_options(parser, steps=1500, rate=0.01, num_pairs=50, batch_size=50)
    add = parser.add_argument
    add("--data", choices=("docstrings", "newsgroups"), default="docstrings")
    add("--kind", choices=("replicated", "poisson", "presence"), default="replicated")
    add("--estimator", choices=("ucd", "pcd"), default="pcd")
    add("--words", type=int, default=400, help="size of the vocabulary")
    add("--tokens", type=int, default=40, help="words per window")
    add("--latent", type=int, default=50)
    args = common.parse(parser, argv, words=1, tokens=1, latent=1)
    with common.exit_on_error(parser):
        args.corpus = corpus.load(args.data, args.words, args.seed)
    return args


# -- the models ----------------------------------------------------------------------


def energy(p: dict[str, Array], words: Array, h: Array) -> Array:
    """Return the energy of one-hot words ``(tokens, words)`` and latents; it depends on
    the counts only."""
    counts = words.sum(0)
    return (
        -counts @ p["words"]
        - (counts @ p["weight"]) @ h
        - counts.sum() * (p["latents"] @ h)
    )


def replicated(tokens: int, words: int, latent: int) -> FactorGraph:
    """Declare the replicated softmax of documents of ``tokens`` words; the params serve
    every length."""
    zero = {
        "words": np.zeros(words),
        "weight": np.zeros((words, latent)),
        "latents": np.zeros(latent),
    }
    factor = Factor("words", "topics", energy=energy, init=zero)
    return FactorGraph(
        {"words": Categorical(tokens, words)}, {"topics": Bernoulli(latent)}, [factor]
    )


def declare(kind: str, tokens: int, words: int, latent: int) -> FactorGraph:
    """Declare the graph of a kind."""
    if kind == "replicated":
        return replicated(tokens, words, latent)
    if kind == "poisson":
        return ebmpp.layered(words=Poisson(words), topics=Bernoulli(latent))
    return ebmpp.layered(words=Bernoulli(words), topics=Gaussian(latent))


def start(
    graph: FactorGraph, rates: np.ndarray, tokens: int, seed: int
) -> dict[str, Any]:
    """Return initial params: words at their base rates, small weights.

    :param rates: frequency of each word, with sum 1.
    """
    params = graph.init(jax.random.key(seed))
    family = graph.families["words"]
    if isinstance(family, Categorical):
        ((name, zero),) = params.items()
        weight = 0.05 * jax.random.normal(jax.random.key(seed), zero["weight"].shape)
        return {name: zero | {"words": jnp.log(jnp.asarray(rates)), "weight": weight}}
    mean = tokens * rates if isinstance(family, Poisson) else -np.expm1(-tokens * rates)
    return params | {"words": family.from_mean(jnp.asarray(mean, jnp.float32))}


# -- documents as rows ---------------------------------------------------------------


def windows(
    counts: np.ndarray, kind: str, tokens: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw words from each document, as rows of the visible block."""
    sums = np.cumsum(counts, 1)
    at = rng.uniform(size=(len(counts), tokens)) * sums[:, -1:]
    words = (sums[:, None] <= at[..., None]).sum(-1)
    if kind == "replicated":
        return words.astype(np.int32)
    rows = np.zeros(counts.shape, np.float32)
    np.add.at(rows, (np.arange(len(counts))[:, None], words), 1)
    return np.minimum(rows, 1) if kind == "presence" else rows


def stream(counts: np.ndarray, args: argparse.Namespace) -> Iterator[np.ndarray]:
    """Yield batches without end."""
    rng = np.random.default_rng(args.seed + 1)
    while True:
        index = rng.choice(
            len(counts), size=min(args.batch_size, len(counts)), replace=False
        )
        yield windows(counts[index], args.kind, args.tokens, rng)


def codes(
    graph: FactorGraph, params: Any, counts: np.ndarray, args: argparse.Namespace
) -> np.ndarray:
    """Return the latents' means given the documents, averaged over their windows."""
    rng = np.random.default_rng(args.seed + 2)
    mean = jax.jit(lambda rows: graph.mean(params, {"words": rows}, "topics"))
    return np.mean(
        [mean(windows(counts, args.kind, args.tokens, rng)) for _ in range(_WINDOWS)], 0
    )


# -- evaluation ----------------------------------------------------------------------


def baselines(
    data: corpus.Corpus, latent: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return training and held-out documents as vectors of other methods."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfTransformer

    transformer = TfidfTransformer(sublinear_tf=True).fit(data.train)
    tfidf = [transformer.transform(c) for c in (data.train, data.held_out)]
    reduce = TruncatedSVD(min(latent, data.train.shape[1] - 1), random_state=0).fit(
        tfidf[0]
    )
    return {
        "counts": (data.train, data.held_out),
        "tf-idf": tuple(t.toarray() for t in tfidf),
        f"LSA of tf-idf, {latent}": tuple(reduce.transform(t) for t in tfidf),
    }


def retrieval(
    train: np.ndarray, queries: np.ndarray, data: corpus.Corpus
) -> tuple[float, float, np.ndarray]:
    """Rank training documents by cosine similarity to each query.

    :return: mean average precision, mean precision of the first ten, and precision at
        11 recalls.
    """

    def unit(a):
        return a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-12)

    order = np.argsort(-unit(queries) @ unit(train).T, axis=1, kind="stable")
    hits = data.train_labels[order] == data.held_out_labels[:, None]
    hits = hits[hits.any(1)]
    precision = hits.cumsum(1) / np.arange(1, hits.shape[1] + 1)
    average = (precision * hits).sum(1) / hits.sum(1)
    recall = hits.cumsum(1) / hits.sum(1, keepdims=True)
    # at a recall, or any above
    best = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
    at = [
        best[np.arange(len(best)), (recall >= r - 1e-9).argmax(1)].mean()
        for r in np.linspace(0, 1, 11)
    ]
    return float(average.mean()), float(hits[:, :10].mean()), np.array(at)


def likelihood(fit: ebmpp.FitResult, first: Any, args: argparse.Namespace) -> str:
    """Describe the held-out log-likelihood per window, with log Z by AIS, beside
    independent words."""
    rows = windows(
        args.corpus.held_out,
        args.kind,
        args.tokens,
        np.random.default_rng(args.seed + 3),
    )
    independent = jax.tree.map(jnp.zeros_like, first) | _without_weights(first)
    scores = []
    # without weights AIS is exact
    for params, temperatures in (
        (fit.params, 5000),
        (independent, 2),
    ):
        estimate = ebmpp.ais(
            fit.graph,
            params,
            rng_key=jax.random.key(args.seed),
            num_particles=50,
            num_temperatures=temperatures,
        )
        free = fit.graph.free_energy(params, {"words": rows}).mean()
        scores.append((float(-free - estimate.log_partition), estimate))
    (value, ais), (other, _) = scores
    text = f"{value:.2f} ({common.describe_ais(ais)}); independent words {other:.2f}"
    if args.kind != "replicated":
        return text
    perplexity = [np.exp(-score / args.tokens) for score in (value, other)]
    return (
        f"{text}; perplexity per word {perplexity[0]:.1f} against {perplexity[1]:.1f}"
    )


def _without_weights(first: Any) -> Any:
    """Return the initial params without weights: independent words at their base rates."""
    if isinstance(factor := first.get("words:topics"), dict):
        return {
            "words:topics": jax.tree.map(jnp.zeros_like, factor)
            | {"words": factor["words"]}
        }
    return {"words": first["words"]}


def top_words(params: Any, words: np.ndarray, count: int = 9) -> list[str]:
    """Return the words with the largest weights per latent, latents of large weights first."""
    factor = params["words:topics"]
    weight = np.asarray(factor["weight"] if isinstance(factor, dict) else factor)
    weight = weight - weight.mean(0)
    first = np.argsort(-np.abs(weight).max(0))
    return [" ".join(words[np.argsort(-weight[:, j])[:count]]) for j in first]


def curves(scores: dict[str, tuple]) -> Any:
    """Draw precision against recall."""
    figure, ax = plt.subplots(figsize=(6.8, 3.6), layout="constrained")
    for index, (name, (score, _, precision)) in enumerate(scores.items()):
        mark = {
            "marker": style.marker(index),
            "markersize": 4,
            "markerfacecolor": "none",
        }
        ax.plot(
            np.linspace(0, 1, 11),
            precision,
            label=f"{name}: {score:.3f}",
            **style.look(index),
            **mark,
        )
    ax.set(
        xlabel="recall",
        ylabel="precision",
        ylim=(0, 1),
        title="documents of the same label",
    )
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "title_fontsize": 8}
    style.tidy(ax, legend=True, title="mean average precision", **beside)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Train, retrieve documents, draw, save."""
    args = parse(argv)
    data = args.corpus
    graph = declare(args.kind, args.tokens, len(data.words), args.latent)
    common.begin(args, graph)
    common.print_row(
        "documents", f"{len(data.train)} for training, {len(data.held_out)} held out"
    )
    rates = (data.train.sum(0) + 1) / (data.train + 1 / len(data.train)).sum()
    first = start(graph, rates, args.tokens, args.seed)
    estimator = common.pcd_or_ucd(args, "persistent")

    def batches():
        return stream(data.train, args)

    fit = common.train(graph, batches, args, estimator, params=first, batch_size=None)
    common.print_row("log-likelihood, held out", likelihood(fit, first, args))
    vectors = {
        f"{args.kind} harmonium, {args.latent}": [
            codes(graph, fit.params, c, args) for c in (data.train, data.held_out)
        ]
    }
    vectors |= baselines(data, args.latent)
    scores = {name: retrieval(*pair, data) for name, pair in vectors.items()}
    for name, (average, ten, _) in scores.items():
        common.print_row(
            name,
            f"mean average precision {average:.3f}, precision of the first ten {ten:.3f}",
        )
    for i, words in enumerate(top_words(fit.params, data.words)[:10]):
        common.print_row(f"latent {i}", words)
    common.save_figures(
        args.out, {"retrieval": curves(scores), "history": common.plot_training(fit)}
    )
    common.save(args.out / "history.nc", fit)


if __name__ == "__main__":
    main()
