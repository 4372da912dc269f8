# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A Boltzmann machine of digits and their labels, which classifies and samples digits of a class.

The label is a visible categorical block of one unit beside the pixels, and one latent
block is joined to both (Larochelle and Bengio, 2008).
``python models/conditional.py --out conditional`` trains on scikit-learn's digits by
three losses (generative, discriminative, hybrid), compares their held-out accuracy with
logistic regression's, samples digits by class, and predicts labels from upper halves of
images.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, Categorical, FactorGraph, Observed
from ebmpp.estimators import Discriminative
from shared import common, digit_images

_CLASSES = 10
_SHOWN = 10
_SWEEPS = 1000  # of a sampled digit
_LOSSES = ("generative", "discriminative", "hybrid")


class Digits(NamedTuple):
    """Binary images and labels."""

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    shape: tuple[int, int]


# -- options and data ----------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    parser = common.options(__doc__, "conditional")
    common.training_options(parser, steps=3000, rate=0.01)
    digit_images.option(parser)
    add = parser.add_argument
    add("--latent", type=int, default=100, help="latent units")
    add("--losses", nargs="+", choices=_LOSSES, default=_LOSSES)
    add(
        "--estimator",
        choices=("ucd", "pcd"),
        default="pcd",
        help="estimator of the generative gradient",
    )
    add(
        "--weight",
        type=float,
        default=0.1,
        help="weight of the generative loss in the hybrid",
    )
    args = common.parse(parser, argv, latent=1)
    if not args.weight >= 0:
        parser.error(f"--weight must not be negative, got {args.weight}.")
    with common.exit_on_error(parser):
        args.digits = digits(args.data, args.seed)
    return args


def digits(name: str, seed: int) -> Digits:
    """Return labelled images, a part of them held out."""
    if name == "mnist":
        train, test = (
            ebmpp.data.mnist(split=split, labels=True) for split in ("train", "test")
        )
        return Digits(_rows(*train), _rows(*test), (28, 28))
    images, labels = ebmpp.data.digits(labels=True)
    order = np.random.default_rng(seed).permutation(len(images))
    held_out = order[: len(order) // 4]
    train = order[len(order) // 4 :]
    return Digits(
        _rows(images[train], labels[train]),
        _rows(images[held_out], labels[held_out]),
        (8, 8),
    )


def _rows(images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    return {"v": ebmpp.data.binarize(images), "y": labels[:, None]}


# -- model, training and predictions -------------------------------------------------


def declare(pixels: int, latent: int) -> FactorGraph:
    """Declare pixels v, a label y, and latent units h joined to both."""
    return FactorGraph(
        visible={"v": Bernoulli(pixels), "y": Categorical(1, _CLASSES)},
        latent={"h": Bernoulli(latent)},
        factors=[
            Bias("v"),
            Bias("y"),
            Bias("h"),
            Bilinear("v", "h"),
            Bilinear("y", "h"),
        ],
    )


def estimator(loss: str, args: argparse.Namespace) -> Any:
    """Return the estimator of a loss."""
    generative = common.pcd_or_ucd(args)
    if loss == "generative":
        return generative
    return Discriminative("y", generative if loss == "hybrid" else None, args.weight)


def train(graph: FactorGraph, loss: str, args: argparse.Namespace) -> ebmpp.FitResult:
    """Train by Adam at a decaying rate; the last params are reported, not the best ones."""
    held_out = args.digits.held_out

    def accuracy(p):
        return scores(label_probabilities(graph, p, held_out["v"]), held_out["y"])[0]

    return common.train(
        graph,
        args.digits.train,
        args,
        estimator(loss, args),
        monitors={"accuracy": accuracy},
        monitor_every=max(1, args.steps // 20),
    )


def label_probabilities(graph: FactorGraph, params: Any, v: Any) -> jax.Array:
    """Return p(y | v) exactly, from free energies of each image with each label."""
    labels = jnp.arange(_CLASSES)[:, None]
    return jax.nn.softmax(
        -graph.free_energy(params, {"v": jnp.asarray(v)[:, None], "y": labels})
    )


def scores(probabilities: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    """Return the accuracy and the mean log-probability of the true labels."""
    at = jnp.take_along_axis(jnp.asarray(probabilities), jnp.asarray(y), 1)
    return (jnp.argmax(probabilities, 1) == y[:, 0]).mean(), jnp.log(at).mean()


def baseline(data: Digits) -> tuple[float, float]:
    """Return the scores of logistic regression on the same pixels."""
    model = LogisticRegression(max_iter=2000).fit(
        data.train["v"], data.train["y"][:, 0]
    )
    return tuple(
        map(float, scores(model.predict_proba(data.held_out["v"]), data.held_out["y"]))
    )


def run(
    graph: FactorGraph, params: Any, seed: int, warmup: int, draws: int, **clamped: Any
) -> dict[str, Any]:
    """Return draws with clamped blocks or units, ``(draws, rows, *shape)``."""
    kernel = ebmpp.BlockedGibbs(graph)
    return common.chains(
        kernel, params, seed + 1, warmup=warmup, samples=draws, **clamped
    ).get_samples()


def draw_classes(graph: FactorGraph, params: Any, seed: int) -> jax.Array:
    """Return images given each label: the mean of v given the latents, after many
    sweeps from noise."""
    labels = jnp.repeat(jnp.arange(_CLASSES), _SHOWN)[:, None]
    samples = run(graph, params, seed, _SWEEPS - 1, 1, y=labels)
    return graph.mean(params, {"h": samples["h"][0]}, "v")


def labels_of_halves(
    graph: FactorGraph, params: Any, v: np.ndarray, seed: int
) -> tuple[Any, Any]:
    """Return p(y | upper half) and the mean of the lower half, one row per image, by
    sampling both."""
    known = jnp.arange(v.shape[1]) < v.shape[1] // 2
    samples = run(graph, params, seed, 200, 800, v=Observed(jnp.asarray(v), known))
    # p(y | h) is averaged instead of y, so that no probability is 0
    label = jax.lax.map(lambda h: graph.mean(params, {"h": h}, "y")[:, 0], samples["h"])
    return label.mean(0), jnp.where(known, v, samples["v"].mean(0))


# -- report --------------------------------------------------------------------------


def pictures(
    graph: FactorGraph, params: Any, args: argparse.Namespace, halves: tuple
) -> dict[str, Any]:
    """Draw digits of each class, and predictions from upper halves."""
    first, ax = plt.subplots(figsize=(5, 5), layout="constrained")
    ebmpp.plots.plot_units(
        draw_classes(graph, params, args.seed), args.digits.shape, ncols=_SHOWN, ax=ax
    )
    ax.set_title(
        f"one row per label: mean of v given h, {_SWEEPS} sweeps from noise", fontsize=9
    )
    probabilities, completed = (np.asarray(a)[:_SHOWN] for a in halves)
    second, axes = plt.subplots(
        3, 1, figsize=(8, 4.2), layout="constrained", height_ratios=(1, 1, 1.6)
    )
    images = {
        "held out": args.digits.held_out["v"][:_SHOWN],
        "lower half: mean of samples": completed,
    }
    common.panels(axes[:2], images, args.digits.shape, fontsize=9, ncols=_SHOWN)
    axes[2].imshow(probabilities.T, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    truth = args.digits.held_out["y"][:_SHOWN, 0]
    axes[2].scatter(
        np.arange(len(truth)),
        truth,
        marker="s",
        s=60,
        facecolors="none",
        edgecolors="tab:red",
    )
    axes[2].set(yticks=range(_CLASSES), xticks=[], ylabel="label")
    axes[2].set_title("p(label | upper half); the true label is framed", fontsize=9)
    return {"classes": first, "halves": second}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, compare, draw, save."""
    args = parse(argv)
    data = args.digits
    graph = declare(args.digits.train["v"].shape[1], args.latent)
    common.begin(args, graph)
    rows = {"logistic regression": baseline(data)}
    fits = {}
    for loss in args.losses:
        fits[loss] = train(graph, loss, args)
        predicted = label_probabilities(graph, fits[loss].params, data.held_out["v"])
        rows[loss] = scores(predicted, data.held_out["y"])
    generative = next(
        fits[loss]
        for loss in ("generative", "hybrid", "discriminative")
        if loss in fits
    )
    subset = {b: x[:500] for b, x in data.held_out.items()}
    halves = labels_of_halves(graph, generative.params, subset["v"], args.seed)
    rows["from upper halves, generative"] = scores(halves[0], subset["y"])
    cut = data.train["v"].shape[1] // 2
    half = Digits(
        *({"v": p["v"][:, :cut], "y": p["y"]} for p in (data.train, subset)), data.shape
    )
    rows["from upper halves, logistic regression"] = baseline(half)
    width = max(map(len, rows))
    print(f"{'held out':<{width}}  accuracy  log p(label)")
    for name, (accuracy, log_score) in rows.items():
        print(f"{name:<{width}}  {float(accuracy):8.3f}  {float(log_score):12.3f}")
    common.save_figures(args.out, pictures(graph, generative.params, args, halves))
    for loss, fit in fits.items():
        common.save_model(args.out / f"{loss}.ebmpp", graph, fit.params)
        common.save(args.out / f"{loss}.nc", fit)


if __name__ == "__main__":
    main()
