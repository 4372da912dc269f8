# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Frechet distances of images drawn by Boltzmann machines, by training method
(Taniguchi et al. 2023).

Deep Boltzmann machines by UCD-LMI, by PCD with a mean-field posterior, and by the same
with centered gradients; Gaussian-Bernoulli machines by PCD whose chains make Gibbs
sweeps or Gibbs-Langevin sweeps. Each draws images from noise, which are compared with
held-out ones by the Frechet distance of a classifier's hidden units.

**The distance is not the paper's FID**, which uses features of the Inception network;
ours come from a small classifier that is trained here. The order of the methods can be
compared with the paper's, but no figure. Machines and training are also far smaller
than the paper's (6272 binary units per layer, 100,000 steps).

Classifier, samples and held-out images all have two levels, grey ones being thresholded
at 1/2 (the paper has eight bits per pixel). A distance is computed of the pixels as
drawn, and of the same states with every pixel at its mode given the latents, which
removes the noise of single pixels that local modes do not have. Training rows and
independent pixels are the references.

``--only lmi lmi_biased lmi_binary lmi_whole lmi_gaussian`` removes one part of UCD-LMI
at a time, as the paper's table 2 does. ``python benchmarks/papers/image_quality.py``
reads MNIST from ``EBMPP_DATA_DIR``; ``--data digits`` needs no file.

**References**

1. Taniguchi et al. (2023), *End-to-end training of deep Boltzmann machines by unbiased
   contrastive divergence with local mode initialization*, tables 1 and 2.
2. Montavon, Mueller (2012), *Deep Boltzmann machines and the centering trick*.
3. Liao et al. (2022), *Gaussian-Bernoulli RBMs without tears*.
"""

import argparse
from collections.abc import Sequence
import dataclasses
from pathlib import Path
import sys
import textwrap
import time
from typing import Any, NamedTuple

import datasets
import local_modes
import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row, rounded

import jax
import optax

import ebmpp
from ebmpp import PCD, Bernoulli, BlockedGibbs, FactorGraph, Spin
from ebmpp.contrib import GibbsLangevin, LocalModeUCD, langevin_sweep
from ebmpp.contrib.sample_quality import ClassifierFeatures, frechet_distance
from ebmpp.estimators import Centered, Estimator, MeanField

_ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(_ROOT), str(_ROOT / "models")]  # a script sees its own folder only
from models import gaussian_bernoulli  # noqa: E402
from shared import common  # noqa: E402

_SHOWN = 20  # images of each run


class Method(NamedTuple):
    """A way to train, its samplers, and the FID that the paper prints."""

    label: str
    fid: float | None
    samplers: tuple[str, ...]
    pixels: str
    rate: float
    scheme: str = "gaussian"
    estimator: Estimator | None = None


_BOTH = ("Gibbs", "local modes")
_MODES = ("local modes",)
#: A unit of 0 and 1 is (1 + spin) / 2: its weights are four times as large and take up
#: to 16 times the rate.
METHODS = {
    "lmi": Method(
        "UCD-LMI", 10.33, _BOTH[::-1], "spin", 0.01, "orthogonal", LocalModeUCD()
    ),
    "pcd": Method("PCD, mean field", None, _BOTH, "spin", 0.004),
    "centered": Method("centered PCD, mean field", 89.10, _BOTH, "binary", 0.05),
    "gibbs": Method("Gaussian-Bernoulli", 47.53, ("Gibbs",), "grey", 0.0005),
    "langevin": Method(
        "Gaussian-Bernoulli, Langevin", 17.49, ("Gibbs-Langevin",), "grey", 0.0005
    ),
}
_TABLE_1 = tuple(METHODS)
METHODS |= {
    name: Method(f"UCD-LMI, {text}", fid, _MODES, pixels, rate, scheme, estimator)
    for name, text, fid, pixels, rate, scheme, estimator in (
        (
            "lmi_biased",
            "no correction",
            112.1,
            "spin",
            0.01,
            "orthogonal",
            local_modes.Uncorrected(),
        ),
        (
            "lmi_binary",
            "units of 0 and 1",
            30.27,
            "binary",
            0.16,
            "orthogonal",
            LocalModeUCD(),
        ),
        (
            "lmi_whole",
            "nothing summed out",
            13.70,
            "spin",
            0.01,
            "orthogonal",
            LocalModeUCD(marginalize=()),
        ),
        (
            "lmi_gaussian",
            "no orthogonal weights",
            18.20,
            "spin",
            0.01,
            "gaussian",
            LocalModeUCD(),
        ),
    )
}


class Data(NamedTuple):
    """Images of two levels, the grey ones, and the classifier that compares."""

    train: np.ndarray
    held_out: np.ndarray
    grey: gaussian_bernoulli.Images
    edge: float
    """The spread grey level from which on a pixel counts as 1."""
    features: ClassifierFeatures


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__)
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        choices=tuple(METHODS),
        default=list(_TABLE_1),
        help="methods to run",
    )
    datasets.option(parser, "mnist")
    add(
        "--sides",
        type=int,
        nargs=2,
        default=(200, 200),
        help="latent units of the layers; their sum in one",
    )
    add("--steps", type=int, default=10_000)
    add("--batch-size", type=int, default=100)
    add("--chains", type=int, default=100, help="persistent chains, or pairs")
    add("--samples", type=int, default=2000)
    add(
        "--sweeps",
        type=int,
        default=300,
        help="of each chain, from noise to its sample",
    )
    add("--epochs", type=int, default=20, help="of the classifier")
    args = records.parse(
        parser, argv, "steps", "batch_size", "chains", "sweeps", "epochs"
    )
    if args.samples < 40:
        parser.error(
            f"--samples must be at least 40 for a standard error, got {args.samples}."
        )
    tag = datasets.tag(args.data)
    args.records = Records(
        args.out, "image_quality", args.name, "" if tag == "mnist" else tag
    )
    return args


def load(args: argparse.Namespace) -> Data:
    """Read images, hold one in six out, and train the classifier on the others."""
    rows, labels = datasets.read(args.data, labels=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(rows))[: args.rows]
    levels = 17 if args.data == "digits" else 256
    binary = ebmpp.data.binarize(rows)[order]
    cut = len(order) // 6
    grey = gaussian_bernoulli.spread(rows[order], levels, rng)
    # every pixel gets variance 1, so that Adam's steps, all of one size, are small for
    # each of them
    deviation = grey.train.std(0)
    grey = grey._replace(
        train=grey.train / deviation,
        held_out=grey.held_out / deviation,
        scale=grey.scale * deviation,
    )
    edge = (1 + (levels - 1) // 2) / levels  # binarize's threshold in whole levels
    features = ClassifierFeatures.fit(
        binary[cut:], labels[order[cut:]], num_epochs=args.epochs
    )
    print(f"classifier: accuracy {features.accuracy:.1%}", flush=True)
    return Data(binary[cut:], binary[:cut], grey, edge, features)


# -- models --------------------------------------------------------------------------


def declare(name: str, data: Data, args: argparse.Namespace) -> FactorGraph:
    """Return the machine: two latent layers, or one with as many units for grey pixels."""
    pixels = data.train.shape[1]
    sides = args.sides
    if METHODS[name].pixels == "grey":
        return gaussian_bernoulli.declare(pixels, sum(sides))
    family = Spin if METHODS[name].pixels == "spin" else Bernoulli
    return ebmpp.layered(v=family(pixels), h1=family(sides[0]), h2=family(sides[1]))


def estimator(name: str, graph: FactorGraph, chains: int) -> Estimator:
    """Return the estimator of a method."""
    if (fixed := METHODS[name].estimator) is not None:
        return dataclasses.replace(fixed, num_pairs=chains)
    if METHODS[name].pixels == "grey":
        moves = langevin_sweep(graph) if name == "langevin" else None
        return PCD(num_chains=chains, moves=moves)
    pcd = PCD(num_chains=chains, posterior=MeanField(10))
    return Centered(pcd) if name == "centered" else pcd


def train(
    name: str, graph: FactorGraph, data: Data, seed: int, args: argparse.Namespace
) -> ebmpp.FitResult:
    """Train by plain steps, or by Adam's for grey pixels, at a rate that decays along a cosine."""
    method = METHODS[name]
    schedule = optax.cosine_decay_schedule(method.rate, args.steps, alpha=0.04)
    rows = data.train
    options = {"init_scheme": method.scheme, "optimizer": optax.sgd(schedule)}
    if method.pixels == "spin":
        rows = 2 * rows - 1
    if method.pixels == "grey":
        rows = data.grey.train
        start = gaussian_bernoulli.start(rows, sum(args.sides), seed)
        options = {"params": start, "optimizer": optax.adam(schedule)}
    return ebmpp.fit(
        graph,
        rows,
        estimator=estimator(name, graph, args.chains),
        num_steps=args.steps,
        batch_size=args.batch_size,
        rng_key=jax.random.key(seed),
        progress_bar=False,
        **options,
    )


def draw_states(
    sampler: str, graph: FactorGraph, params: Any, seed: int, args: argparse.Namespace
) -> Any:
    """Return states, each from its own start in noise."""
    if sampler == "local modes":
        key = jax.random.key(1000 + seed)
        return ebmpp.local_search(
            graph, params, rng_key=key, num_rows=args.samples
        ).state
    kernel = (
        GibbsLangevin(graph) if sampler == "Gibbs-Langevin" else BlockedGibbs(graph)
    )
    run = common.chains(
        kernel, params, 1000 + seed, warmup=args.sweeps - 1, count=args.samples
    )
    return run.get_samples()


def two_levels(name: str, data: Data, v: Any) -> np.ndarray:
    """Return values of a method's visible units as images of two levels."""
    if METHODS[name].pixels == "grey":
        return (data.grey.grey(v) >= data.edge).astype(np.float32)
    return (np.asarray(v) > (0.0 if METHODS[name].pixels == "spin" else 0.5)).astype(
        np.float32
    )


# -- measures ------------------------------------------------------------------------


def measure(images: np.ndarray, data: Data) -> dict[str, float]:
    """Return the distance from held-out images, also extrapolated to infinitely many samples."""
    result = frechet_distance(
        images, data.held_out, features=data.features, extrapolate=True
    )
    values = {
        "distance": result.value,
        "extrapolated": result.extrapolated,
        "error": result.standard_error,
    }
    return {name: rounded(value, 4) for name, value in values.items()}


def run(name: str, seed: int, data: Data, args: argparse.Namespace) -> None:
    """Train once, and store the distances by sampler."""
    graph = declare(name, data, args)
    start = time.monotonic()
    method = METHODS[name]
    fit = train(name, graph, data, seed, args)
    jax.block_until_ready(fit.params)
    known: Row = {"seed": seed, "train_seconds": round(time.monotonic() - start, 1)}
    for metric in ("corrected", "acceptance"):
        if metric in fit.history:
            known[metric] = float(fit.history[metric].mean())
    for number, sampler in enumerate(method.samplers):
        state = draw_states(sampler, graph, fit.params, seed, args)
        eta = graph.natural_parameters(fit.params, state, "v")
        samples = two_levels(name, data, state["v"])
        modes = two_levels(name, data, graph.families["v"].mode(eta))
        row = known | {
            "method": f"{method.label}: {sampler}",
            "fid": None if number else method.fid,
        }
        row |= {"drawn": measure(samples, data), "modes": measure(modes, data)}
        row["shown"] = (
            np.concatenate([samples[:_SHOWN], modes[:_SHOWN]]).astype(int).tolist()
        )
        args.records.save(f"{name}-{number}", seed, row)
        print(line(row), flush=True)


def references(data: Data, args: argparse.Namespace) -> None:
    """Store the distances of training rows and of independent pixels."""
    rng = np.random.default_rng(0)
    rate = data.train.mean(0)
    rows = {
        "training rows": data.train[rng.permutation(len(data.train))[: args.samples]],
        "independent pixels": (
            rng.uniform(size=(args.samples, len(rate))) < rate
        ).astype(np.float32),
    }
    for number, (label, images) in enumerate(rows.items()):
        examples = images[: 2 * _SHOWN].astype(int).tolist()
        row = {
            "method": label,
            "seed": 0,
            "fid": None,
            "drawn": measure(images, data),
            "shown": examples,
        }
        args.records.save(f"references-{number}", 0, row)


# -- the report ----------------------------------------------------------------------


def line(row: Row) -> str:
    """Return a row of the table."""
    cells = [f"{row['method']:<46}{row['seed']:>5}"]
    for part in ("drawn", "modes"):
        value = row.get(part)
        text = f"{value['extrapolated']:.1f} +- {value['error']:.1f}" if value else ""
        cells.append(f"{value['distance']:>9.1f} {text:>16}" if value else " " * 26)
    return "".join(cells) + f"{row['fid'] or '':>8}"


def draw_distances(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw each run's distance with two standard errors, and against the seconds of training."""
    figure, (left, right) = style.grid(2, (5.6, 1.4 + 0.36 * len(rows)))
    for place, row in enumerate(rows):
        for index, (part, name) in enumerate(
            {"drawn": "as drawn", "modes": "pixels at modes"}.items()
        ):
            if part in row:
                look = {
                    "color": style.COLORS[index],
                    "marker": style.marker(index),
                    "linestyle": "none",
                }
                look |= {
                    "markersize": 6,
                    "markerfacecolor": "white",
                    "label": name,
                    "capsize": 2,
                }
                value = row[part]["distance"]
                error = 2 * row[part]["error"]
                left.errorbar(value, place + 0.16 * (2 * index - 1), xerr=error, **look)
                if "train_seconds" in row:
                    right.errorbar(row["train_seconds"], value, yerr=error, **look)
        if "train_seconds" in row:
            right.annotate(
                f"{place + 1}",
                (row["train_seconds"], row["drawn"]["distance"]),
                fontsize=8,
            )
    names = [
        textwrap.fill(f"{place + 1}  {row['method']}", 40)
        for place, row in enumerate(rows)
    ]
    left.set_yticks(range(len(rows)), names, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel(
        "Frechet distance from held-out images,\nin a small classifier's features (not the FID)"
    )
    right.set(xlabel="seconds of training", xscale="log", yscale="log")
    pictures.save(figure, np.array([left, right]), path, title, 2)


def draw_images(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw images of each run, as drawn and with pixels at their modes."""
    figure, axes = style.grid(len(rows), (4.7, 2.25), ncols=2)
    for ax, row in zip(axes, rows, strict=True):
        images = np.array(row["shown"], float)
        side = round(images.shape[1] ** 0.5)
        ebmpp.plots.plot_units(images, (side, side), ncols=10, ax=ax)
        ax.axis("off")
        ax.set_title(
            f"{row['method']}\ndistance {row['drawn']['distance']:.1f}",
            fontsize=9,
            loc="left",
        )
    figure.suptitle(
        f"{title}\nupper two lines as drawn, lower two with pixels at their modes",
        fontsize=9,
    )
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    if not args.draw:
        data = load(args)
        references(data, args)
        for name in args.only:
            for seed in args.seeds:
                run(name, seed, data, args)
    names = [f"{name}-{n}" for name in ("references", *METHODS) for n in (0, 1)]
    rows = args.records.load(names)
    size = "-".join(map(str, args.sides))
    title = (
        f"{datasets.tag(args.data)} in two levels, latent {size}, {args.steps:,} steps"
    )
    if rows:
        args.records.write(
            {
                "title": title,
                "runs": [{k: row[k] for k in row if k != "shown"} for row in rows],
            }
        )
        draw_images(rows, title, args.records.summary.with_suffix(".png"))
    else:
        rows = args.records.summarize(())["runs"]
    head = (
        f"{'':<46}{'seed':>5}{'as drawn':>9} {'extrapolated':>16}{'modes':>9} "
        f"{'extrapolated':>16}"
    )
    print(
        f"{head}{'FID *':>8}",
        *map(line, rows),
        "* as printed: another measure",
        sep="\n",
    )
    draw_distances(rows, title, args.out / f"{args.records.stem}_distances.png")


if __name__ == "__main__":
    main()
