# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A gated machine that learns shifts from pairs of a digit and the shifted digit.

``python models/third_order.py``. Blocks x (an image), y (the image shifted by at most
one pixel in one of nine ways) and h interact in threes,
``-sum_f (A x)_f (B y)_f (C h)_f``: each latent unit gates correlations between the
images, so that it encodes the shift rather than the image. The energy is factored
(Memisevic, Hinton 2010) and multi-affine; its three layers x, y and h, their
conditionals and the gradient follow from it.

Training uses no labels. A linear classifier then predicts the shift from the latents'
means given a held-out pair, and an analogy (x is to y as a new image is to what?) is
answered by clamping h. The program writes pictures of the analogies and of the filters,
and an ArviZ file.

References: Memisevic, Hinton (2007), *Unsupervised learning of image transformations*;
Memisevic, Hinton (2010), *Learning to represent spatial transformations with factored
higher-order Boltzmann machines*; Taylor, Hinton (2009), *Factored conditional
restricted Boltzmann machines for modeling motion style*; Susskind et al. (2011),
*Modeling the joint density of two images under a variety of transformations*.
"""

from collections.abc import Sequence
import itertools
import math
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import CD, UCD, Bernoulli, Bias, Factor, FactorGraph
from shared import common, digit_images

# rows down, columns to the right
MOVES = tuple(itertools.product((-1, 0, 1), (-1, 0, 1)))


class Pairs(NamedTuple):
    """Images, the shifted images, and the index of the shift."""

    x: np.ndarray
    y: np.ndarray
    move: np.ndarray


def pairs(images: np.ndarray, seed: int) -> Pairs:
    """Pair each image with a random cyclic shift of it."""
    move = np.random.default_rng(seed).integers(len(MOVES), size=len(images))
    y = np.stack(
        [np.roll(x, MOVES[m], (0, 1)) for x, m in zip(images, move, strict=True)]
    )
    return Pairs(images.reshape(len(images), -1), y.reshape(len(images), -1), move)


def gate(w: dict[str, Array], x: Array, y: Array, h: Array) -> Array:
    """Return minus the product of three projections onto common factors."""
    return -jnp.sum((x @ w["x"]) * (y @ w["y"]) * (h @ w["h"]))


def declare(pixels: int, latent: int, factors: int) -> FactorGraph:
    """Declare two visible blocks and a latent one in one factor."""
    sizes = {"x": pixels, "y": pixels, "h": latent}

    def init(key: Array) -> dict[str, Array]:
        def draw(i, size):
            return 0.1 * jax.random.normal(jax.random.fold_in(key, i), (size, factors))

        return {b: draw(i, size) for i, (b, size) in enumerate(sizes.items())}

    return FactorGraph(
        visible={"x": Bernoulli(pixels), "y": Bernoulli(pixels)},
        latent={"h": Bernoulli(latent)},
        factors=[*map(Bias, "xyh"), Factor("x", "y", "h", energy=gate, init=init)],
    )


def latents(machine: FactorGraph, params: Any, data: Pairs) -> Array:
    """Return the means of h given both images."""
    return machine.mean(params, {"x": data.x, "y": data.y}, "h")


def accuracy(machine: FactorGraph, params: Any, train: Pairs, new: Pairs) -> float:
    """Return the accuracy of a linear classifier of the shift on the latents of new pairs."""
    classifier = LogisticRegression(max_iter=2000).fit(
        latents(machine, params, train), train.move
    )
    return float(classifier.score(latents(machine, params, new), new.move))


def baseline(train: Pairs, new: Pairs) -> float:
    """Return the accuracy of a linear classifier on the two images, which ignores correlations."""
    classifier = LogisticRegression(max_iter=2000).fit(
        np.hstack([train.x, train.y]), train.move
    )
    return float(classifier.score(np.hstack([new.x, new.y]), new.move))


def analogies(
    machine: FactorGraph, params: Any, data: Pairs, images: np.ndarray
) -> Array:
    """Return the means of y given each of ``images`` and the latents of a pair of ``data``."""
    h = machine.mode(params, {"x": data.x, "y": data.y}, "h")
    return machine.mean(params, {"x": images, "h": h}, "y")


def transferred(machine: FactorGraph, params: Any, data: Pairs) -> float:
    """Return how often an analogy for another image is nearest to that image under the
    pair's shift."""
    images = np.roll(data.x, 1, 0)
    result = np.asarray(analogies(machine, params, data, images))
    side = math.isqrt(images.shape[1])
    moved = [
        np.roll(images.reshape(-1, side, side), m, (1, 2)).reshape(images.shape)
        for m in MOVES
    ]
    nearest = np.argmin([((result - y) ** 2).sum(1) for y in moved], axis=0)
    return float((nearest == data.move).mean())


def pictures(
    machine: FactorGraph, fit: ebmpp.FitResult, new: Pairs, others: np.ndarray
) -> dict[str, Any]:
    """Draw analogies, one row per shift, and the filters of the factors."""
    side = math.isqrt(new.x.shape[1])
    rows = np.array(
        [np.flatnonzero(new.move == m)[0] for m in range(len(MOVES)) if m in new.move]
    )
    examples = Pairs(*(a[rows] for a in new))
    columns = [(examples.x, examples.y)]
    for image in others:
        images = np.broadcast_to(image, examples.x.shape)
        columns.append((images, analogies(machine, fit.params, examples, images)))
    analogy, axes = plt.subplots(
        1, len(columns), figsize=(10, 6.6), layout="constrained"
    )
    analogy.get_layout_engine().set(wspace=0.04)
    grids = {}
    for number, pair in enumerate(columns):
        name = f"image {number}," if number else "held-out pair:"
        after = "inferred y" if number else "x, y"
        grids[f"{name}\n{after}"] = np.stack(pair, 1).reshape(-1, side, side)
    common.panels(axes, grids, ncols=2)
    figure, axes = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
    weights = {
        b: np.asarray(fit.params["x:y:h"][b]).T[:64].reshape(-1, side, side)
        for b in "xy"
    }
    filters = {f"filters of the factors in {b}": w for b, w in weights.items()}
    common.panels(axes, filters, ncols=8)
    return {"analogies": analogy, "filters": figure}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, classify shifts, draw, save."""
    parser = common.options(__doc__, "demo")
    common.training_options(parser, steps=2000, rate=0.01)
    digit_images.option(parser)
    parser.add_argument("--latent", type=int, default=40)
    parser.add_argument("--factors", type=int, default=80)
    parser.add_argument("--estimator", choices=("cd", "ucd"), default="cd")
    args = common.parse(parser, argv, digit_images.images, latent=1, factors=1)
    images = args.images
    copies = len(MOVES) if args.data == "digits" else 1
    train = pairs(np.repeat(images.train, copies, 0), args.seed)
    new = pairs(images.held_out, args.seed + 1)
    machine = declare(train.x.shape[1], args.latent, args.factors)
    common.begin(args, machine)
    estimator = CD(k=1) if args.estimator == "cd" else UCD(num_pairs=args.num_pairs)
    fit = common.train(machine, {"x": train.x, "y": train.y}, args, estimator)
    subset = Pairs(*(a[::copies][:5000] for a in train))
    right = accuracy(machine, fit.params, subset, new)
    common.print_row(
        "move, from the latents", f"{right:.3f} right of {len(new.x)} new pairs"
    )
    common.print_row(
        "move, from the images",
        f"{baseline(subset, new):.3f} (chance {1 / len(MOVES):.3f})",
    )
    common.print_row(
        "move, carried over",
        f"{transferred(machine, fit.params, new):.3f} right, onto another image",
    )
    others = new.x[np.unique(images.held_out_labels, return_index=True)[1][:6]]
    common.save_figures(args.out, pictures(machine, fit, new, others))
    common.save(args.out / "history.nc", fit)


if __name__ == "__main__":
    main()
