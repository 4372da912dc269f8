# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A Boltzmann machine that completes missing entries of a table of categories.

Columns are categorical units of one visible block, joined to binary latent units.
``python models/categorical.py --out categorical`` bins a table of scikit-learn (breast
cancer, wine or iris) by quantiles, trains on some rows, hides entries of the others at
random, and completes these by posterior means and by local search. It compares accuracy
and log score with the columns' frequencies, nearest neighbours and chained regressions.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
import numpy as np
from sklearn import datasets
from sklearn.calibration import calibration_curve
from sklearn.impute import KNNImputer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import KBinsDiscretizer, OneHotEncoder

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import Bernoulli, Categorical, FactorGraph, Observed
from shared import common

_TABLES: dict[str, Callable[[], Any]] = {
    "cancer": datasets.load_breast_cancer,
    "wine": datasets.load_wine,
    "iris": datasets.load_iris,
}


class Table(NamedTuple):
    """Rows of categories, and a mask of the known held-out entries."""

    train: np.ndarray
    held_out: np.ndarray
    known: np.ndarray


# -- options and data ----------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    parser = common.options(__doc__, "categorical")
    common.training_options(parser, steps=4000, rate=0.005, num_pairs=200)
    add = parser.add_argument
    add("--data", choices=tuple(_TABLES), default="cancer")
    add("--bins", type=int, default=4, help="categories per column, by quantiles")
    add(
        "--hidden",
        type=float,
        default=0.3,
        help="share of hidden entries in the held-out rows",
    )
    add("--latent", type=int, default=60, help="latent units")
    add("--estimator", choices=("ucd", "pcd"), default="pcd")
    add("--decay", type=float, default=1e-2, help="weight decay")
    add("--sweeps", type=int, default=2000, help="sweeps of the posterior means")
    args = common.parse(parser, argv, bins=2, latent=1, sweeps=1)
    if not 0 < args.hidden < 1 or not args.decay >= 0:
        parser.error("--hidden must be in (0, 1), and --decay must not be negative.")
    args.table = table(args.data, args.bins, args.hidden, args.seed)
    return args


def table(name: str, bins: int, hidden: float, seed: int) -> Table:
    """Return a table in quantile bins of its training rows, with a third of the rows held out."""
    generator = np.random.default_rng(seed)
    values, _ = _TABLES[name](return_X_y=True)
    order = generator.permutation(len(values))
    held_out = order[: len(order) // 3]
    train = order[len(order) // 3 :]
    quantiles = KBinsDiscretizer(
        bins,
        encode="ordinal",
        strategy="quantile",
        quantile_method="averaged_inverted_cdf",
    )
    binned = quantiles.fit(values[train]).transform(values).astype(np.int32)
    known = generator.random(binned[held_out].shape) >= hidden
    return Table(binned[train], binned[held_out], known)


# -- model, training and completion --------------------------------------------------


def declare(columns: int, bins: int, latent: int) -> FactorGraph:
    """Declare one visible block of categorical units and one binary latent block."""
    return ebmpp.layered(v=Categorical(columns, bins), h=Bernoulli(latent))


def train(graph: FactorGraph, args: argparse.Namespace) -> ebmpp.FitResult:
    """Train by Adam at a decaying rate, with weight decay because tables are small."""
    decay = optax.add_decayed_weights(args.decay, {"v": False, "h": False, "v:h": True})
    return common.train(
        graph,
        args.table.train,
        args,
        common.pcd_or_ucd(args, k=2),
        optax.chain(decay, optax.adam(common.cosine(args))),
    )


def posterior(
    graph: FactorGraph, params: Any, data: Table, sweeps: int, seed: int
) -> np.ndarray:
    """Return p(category | known entries of the row) of each entry, by Gibbs sweeps."""
    observed = Observed(jnp.asarray(data.held_out), jnp.asarray(data.known))
    kernel = ebmpp.BlockedGibbs(graph)
    run = common.chains(
        kernel, params, seed + 1, warmup=200, samples=sweeps, v=observed
    )

    # the mean of p(v | h) has less noise than that of v, and no probability is 0
    def add(total, h):
        return (total + graph.mean(params, {"h": h}, "v"), None)

    start = jnp.zeros((*data.held_out.shape, graph.families["v"].num_categories))
    total, _ = jax.jit(lambda h: jax.lax.scan(add, start, h))(run.get_samples()["h"])
    return np.asarray(total) / sweeps


def search(graph: FactorGraph, params: Any, data: Table, seed: int) -> np.ndarray:
    """Return the local mode of each row, from one random start."""
    observed = Observed(jnp.asarray(data.held_out), jnp.asarray(data.known))
    modes = ebmpp.local_search(
        graph, params, rng_key=jax.random.key(seed + 2), v=observed
    )
    return np.asarray(modes.state["v"])


# -- baselines -----------------------------------------------------------------------


def frequencies(data: Table, bins: int) -> np.ndarray:
    """Return each column's frequencies, with one pseudo-count: independent columns."""
    counts = (data.train[..., None] == np.arange(bins)).sum(0) + 1
    return np.broadcast_to(
        counts / counts.sum(1, keepdims=True), (*data.held_out.shape, bins)
    )


def neighbours(data: Table) -> np.ndarray:
    """Return the imputation of scikit-learn's nearest neighbours, rounded."""
    hidden = np.where(data.known, data.held_out, np.nan)
    completed = (
        KNNImputer(n_neighbors=10).fit(data.train.astype(float)).transform(hidden)
    )
    return np.rint(completed).astype(int)


def chained(data: Table, bins: int, rounds: int = 5) -> np.ndarray:
    """Return predictions of each column by logistic regression on all others, completed in turn.

    This is a categorical form of scikit-learn's IterativeImputer, which has regressions
    of numbers only.
    """
    code = OneHotEncoder(
        categories=[np.arange(bins)] * (data.train.shape[1] - 1), sparse_output=False
    )
    probabilities = frequencies(data, bins).copy()
    filled = np.where(data.known, data.held_out, probabilities.argmax(-1))
    models = []
    for j in range(data.train.shape[1]):
        others = code.fit_transform(np.delete(data.train, j, 1))
        models.append(
            LogisticRegression(C=0.1, max_iter=500).fit(others, data.train[:, j])
        )
    for _ in range(rounds):
        for j, model in enumerate(models):
            probabilities[:, j] = 1e-6
            probabilities[:, j, model.classes_] = model.predict_proba(
                code.transform(np.delete(filled, j, 1))
            )
            filled[:, j] = np.where(
                data.known[:, j], data.held_out[:, j], probabilities[:, j].argmax(-1)
            )
    return probabilities


def scores(completed: np.ndarray, data: Table) -> tuple[float, float]:
    """Return accuracy on hidden entries, and their mean log-probability (nan for values
    without one)."""
    values = completed.argmax(-1) if completed.ndim == 3 else completed
    right = float((values == data.held_out)[~data.known].mean())
    if completed.ndim == 2:
        return right, float("nan")
    at = np.take_along_axis(completed, data.held_out[..., None], -1)[..., 0]
    return right, float(np.log(at[~data.known]).mean())


def picture(
    completions: dict[str, np.ndarray],
    graph: FactorGraph,
    params: Any,
    args: argparse.Namespace,
) -> Any:
    """Draw the calibration of the posterior, and the latent weights of each column's categories."""
    data = args.table
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1, 1.6)
    )
    truth = (data.held_out[..., None] == np.arange(graph.families["v"].num_categories))[
        ~data.known
    ].ravel()
    for name, probabilities in completions.items():
        if probabilities.ndim == 3:
            share, predicted = calibration_curve(
                truth, probabilities[~data.known].ravel().clip(0, 1), n_bins=10
            )
            left.plot(
                predicted, share, marker="o", markersize=3, linewidth=1.2, label=name
            )
    left.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
    left.set(
        xlabel="predicted probability", ylabel="observed share", title="hidden entries"
    )
    left.legend(frameon=False, fontsize=7)
    weights = np.asarray(params["v:h"])
    weights = (weights - weights.mean(1, keepdims=True)).reshape(-1, weights.shape[-1])
    bound = np.abs(weights).max()
    image = right.imshow(weights.T, cmap="RdBu", vmin=-bound, vmax=bound, aspect="auto")
    figure.colorbar(image, ax=right)
    right.set(
        xlabel="column and category",
        ylabel="latent unit",
        title="weights, centered in each column",
    )
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Train, complete, compare, save."""
    args = parse(argv)
    data = args.table
    graph = declare(data.train.shape[1], args.bins, args.latent)
    hidden = int((~data.known).sum())
    common.begin(args, graph)
    common.print_row(
        "rows",
        f"{len(data.train)}; {hidden} entries hidden in {len(data.held_out)} more",
    )
    fit = train(graph, args)
    completions = {
        "posterior means": posterior(graph, fit.params, data, args.sweeps, args.seed),
        "local search": search(graph, fit.params, data, args.seed),
        "columns' frequencies": frequencies(data, args.bins),
        "nearest neighbours": neighbours(data),
        "chained regressions": chained(data, args.bins),
    }
    print(f"{'':<22}  accuracy  log score")
    for name, value in completions.items():
        right, log_score = scores(value, data)
        print(f"{name:<22}  {right:8.3f}  {log_score:9.3f}")
    common.save_figures(
        args.out, {"completions": picture(completions, graph, fit.params, args)}
    )
    common.save_model(args.out / "table.ebmpp", graph, fit.params)
    common.save(args.out / "history.nc", fit)


if __name__ == "__main__":
    main()
