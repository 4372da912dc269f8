# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exponential-family harmoniums on word counts, and how well they find documents of the same kind.

``python models/harmonium.py --out harmonium`` reads the docstrings of numpy, scipy and scikit-learn, labelled
by subpackage; ``--data newsgroups`` the 20 newsgroups where they are on disk. Three kinds (``--kind``):

``replicated``  a document is so many words, units of one category block that share their weights: the
                replicated softmax of Salakhutdinov and Hinton (2009). The latents' biases count once a word.
``poisson``     a document is a count a word, Poisson given binary latents. (With Gaussian latents it would
                not normalise, and the check of its params says so.)
``presence``    a document is which words it has, Bernoulli given Gaussian latents: an undirected relative of
                latent semantic indexing (Welling, Rosen-Zvi, Hinton 2005).

Documents have different lengths. Training sees windows of ``--tokens`` words, drawn afresh from the document
at every step; the params of the replicated softmax mean the same for every length. A document's latent means
are those of its windows, averaged.
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
from ebmpp import PCD, UCD, Bernoulli, Categorical, Factor, FactorGraph, Gaussian, Poisson
from ebmpp.diagnostics import style
from shared import common, corpus

_WINDOWS = 20  # of a document that is looked for


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = common.options(__doc__, "harmonium")
    common.training_options(parser, steps=1500, rate=0.01, num_pairs=50, batch_size=50)
    add = parser.add_argument
    add("--data", choices=("docstrings", "newsgroups"), default="docstrings")
    add("--kind", choices=("replicated", "poisson", "presence"), default="replicated")
    add("--estimator", choices=("ucd", "pcd"), default="pcd")
    add("--words", type=int, default=400, help="size of the vocabulary")
    add("--tokens", type=int, default=40, help="words a window")
    add("--latent", type=int, default=50)
    args = common.parse(parser, argv, words=1, tokens=1, latent=1)
    with common.refusals(parser):
        args.corpus = corpus.load(args.data, args.words, args.seed)
    return args


# -- the models ----------------------------------------------------------------------------------


def energy(p: dict[str, Array], words: Array, h: Array) -> Array:
    """Of a document's words, one-hot ``(tokens, words)``, and the latents: through the counts alone."""
    counts = words.sum(0)
    return -counts @ p["words"] - (counts @ p["weight"]) @ h - counts.sum() * (p["latents"] @ h)


def replicated(tokens: int, words: int, latent: int) -> FactorGraph:
    """The replicated softmax of documents of so many words; the params are those of every length."""
    zero = {"words": np.zeros(words), "weight": np.zeros((words, latent)), "latents": np.zeros(latent)}
    factor = Factor("words", "topics", energy=energy, init=zero)
    return FactorGraph({"words": Categorical(tokens, words)}, {"topics": Bernoulli(latent)}, [factor])


def declare(kind: str, tokens: int, words: int, latent: int) -> FactorGraph:
    """The graph of a kind."""
    if kind == "replicated":
        return replicated(tokens, words, latent)
    if kind == "poisson":
        return ebmpp.layered(words=Poisson(words), topics=Bernoulli(latent))
    return ebmpp.layered(words=Bernoulli(words), topics=Gaussian(latent))


def start(graph: FactorGraph, rates: np.ndarray, tokens: int, seed: int) -> dict[str, Any]:
    """Words at their base rates, small weights.

    :param rates: of each word among all words, the sum being 1.
    """
    made = graph.init(jax.random.key(seed))
    family = graph.families["words"]
    if isinstance(family, Categorical):
        (name,) = made
        own = made[name]
        weight = 0.05 * jax.random.normal(jax.random.key(seed), own["weight"].shape)
        return {name: own | {"words": jnp.log(jnp.asarray(rates)), "weight": weight}}
    mean = tokens * rates if isinstance(family, Poisson) else -np.expm1(-tokens * rates)
    return made | {"words": family.from_mean(jnp.asarray(mean, jnp.float32))}


# -- documents as rows ---------------------------------------------------------------------------


def windows(counts: np.ndarray, kind: str, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """So many words drawn from each document, as rows of the visible block."""
    sums = np.cumsum(counts, 1)
    at = rng.uniform(size=(len(counts), tokens)) * sums[:, -1:]
    drawn = (sums[:, None] <= at[..., None]).sum(-1)
    if kind == "replicated":
        return drawn.astype(np.int32)
    made = np.zeros(counts.shape, np.float32)
    np.add.at(made, (np.arange(len(counts))[:, None], drawn), 1)
    return np.minimum(made, 1) if kind == "presence" else made


def stream(counts: np.ndarray, args: argparse.Namespace) -> Iterator[np.ndarray]:
    """Batches for ever."""
    rng = np.random.default_rng(args.seed + 1)
    while True:
        chosen = rng.choice(len(counts), size=min(args.batch_size, len(counts)), replace=False)
        yield windows(counts[chosen], args.kind, args.tokens, rng)


def codes(graph: FactorGraph, params: Any, counts: np.ndarray, args: argparse.Namespace) -> np.ndarray:
    """Means of the latents given the documents, averaged over their windows."""
    rng = np.random.default_rng(args.seed + 2)
    mean = jax.jit(lambda rows: graph.mean(params, {"words": rows}, "topics"))
    made = [mean(windows(counts, args.kind, args.tokens, rng)) for _ in range(_WINDOWS)]
    return np.mean([np.asarray(m) for m in made], 0)


# -- what it is worth ----------------------------------------------------------------------------


def baselines(data: corpus.Corpus, latent: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Training and held-out documents as vectors, by other means."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfTransformer

    weigh = TfidfTransformer(sublinear_tf=True).fit(data.train)
    tfidf = [weigh.transform(c) for c in (data.train, data.held_out)]
    reduce = TruncatedSVD(min(latent, data.train.shape[1] - 1), random_state=0).fit(tfidf[0])
    return {
        "counts": (data.train, data.held_out),
        "tf-idf": tuple(t.toarray() for t in tfidf),
        f"LSA of tf-idf, {latent}": tuple(reduce.transform(t) for t in tfidf),
    }


def retrieval(train: np.ndarray, queries: np.ndarray, data: corpus.Corpus) -> tuple[float, float, np.ndarray]:
    """How well documents of a query's label come first, by the cosine of their vectors.

    :return: mean average precision, mean precision among the first ten, and precision at 11 recalls.
    """
    unit = lambda a: a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-12)
    order = np.argsort(-unit(queries) @ unit(train).T, axis=1, kind="stable")
    hits = data.train_labels[order] == data.held_out_labels[:, None]
    hits = hits[hits.any(1)]
    precision = hits.cumsum(1) / np.arange(1, hits.shape[1] + 1)
    average = (precision * hits).sum(1) / hits.sum(1)
    recall = hits.cumsum(1) / hits.sum(1, keepdims=True)
    best = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]  # at a recall, or any above
    at = [best[np.arange(len(best)), (recall >= r - 1e-9).argmax(1)].mean() for r in np.linspace(0, 1, 11)]
    return float(average.mean()), float(hits[:, :10].mean()), np.array(at)


def likelihood(fit: ebmpp.Fit, begin: Any, args: argparse.Namespace) -> str:
    """Held-out log-likelihood a window, log Z by annealed importance sampling, against independent words."""
    rows = windows(args.corpus.held_out, args.kind, args.tokens, np.random.default_rng(args.seed + 3))
    alone = jax.tree.map(jnp.zeros_like, begin) | _without_weights(begin)
    scores = []
    for params, temperatures in ((fit.params, 5000), (alone, 2)):  # without weights any number is exact
        made = ebmpp.ais(
            fit.graph,
            params,
            rng_key=jax.random.key(args.seed),
            num_particles=50,
            num_temperatures=temperatures,
        )
        free = fit.graph.free_energy(params, {"words": rows}).mean()
        scores.append((float(-free - made.log_partition), made))
    (value, ais), (other, _) = scores
    told = (
        f"{value:.2f} (log Z by AIS, standard error {ais.standard_error:.2f}, "
        f"{ais.effective_sample_size:.0f} of {len(ais.log_weights)} particles effective); "
        f"independent words {other:.2f}"
    )
    if args.kind != "replicated":
        return told
    each = [np.exp(-score / args.tokens) for score in (value, other)]
    return f"{told}; perplexity a word {each[0]:.1f} against {each[1]:.1f}"


def _without_weights(begin: Any) -> Any:
    """The params that a run begins at, without weights: independent words at their base rates."""
    if "words:topics" in begin and isinstance(begin["words:topics"], dict):
        own = begin["words:topics"]
        return {"words:topics": jax.tree.map(jnp.zeros_like, own) | {"words": own["words"]}}
    return {"words": begin["words"]}


def top_words(params: Any, words: np.ndarray, count: int = 9) -> list[str]:
    """The words that each latent favours, the most decided latents first."""
    own = params["words:topics"]
    weight = np.asarray(own["weight"] if isinstance(own, dict) else own)
    weight = weight - weight.mean(0)
    first = np.argsort(-np.abs(weight).max(0))
    return [" ".join(words[np.argsort(-weight[:, j])[:count]]) for j in first]


def curves(found: dict[str, tuple]) -> Any:
    """Precision against recall."""
    figure, ax = plt.subplots(figsize=(6.8, 3.6), layout="constrained")
    for index, (name, (score, _, precision)) in enumerate(found.items()):
        mark = {"marker": style.marker(index), "markersize": 4, "markerfacecolor": "none"}
        ax.plot(np.linspace(0, 1, 11), precision, label=f"{name}: {score:.3f}", **style.look(index), **mark)
    ax.set(xlabel="recall", ylabel="precision", ylim=(0, 1), title="documents of the same label")
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "title_fontsize": 8}
    style.tidy(ax, legend=True, title="mean average precision", **beside)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Train, look for documents, draw, save."""
    args = parse(argv)
    data = args.corpus
    graph = declare(args.kind, args.tokens, len(data.words), args.latent)
    common.begin(args, graph)
    common.tell("documents", f"{len(data.train)} for training, {len(data.held_out)} held out")
    rates = (data.train.sum(0) + 1) / (data.train + 1 / len(data.train)).sum()
    first = start(graph, rates, args.tokens, args.seed)
    chosen = UCD(num_pairs=args.num_pairs, start="persistent") if args.estimator == "ucd" else None
    chosen = chosen or PCD(num_chains=args.num_pairs)
    batches = lambda: stream(data.train, args)
    fit = common.train(graph, batches, args, chosen, params=first, batch_size=None)
    common.tell("log-likelihood, held out", likelihood(fit, first, args))
    vectors = {
        f"{args.kind} harmonium, {args.latent}": [
            codes(graph, fit.params, c, args) for c in (data.train, data.held_out)
        ]
    }
    vectors |= baselines(data, args.latent)
    found = {name: retrieval(*pair, data) for name, pair in vectors.items()}
    for name, (average, ten, _) in found.items():
        common.tell(name, f"mean average precision {average:.3f}, precision of the first ten {ten:.3f}")
    for i, words in enumerate(top_words(fit.params, data.words)[:10]):
        common.tell(f"latent {i}", words)
    common.save_figures(args.out, {"retrieval": curves(found), "history": common.course(fit)})
    common.save(args.out / "history.nc", fit)


if __name__ == "__main__":
    main()
