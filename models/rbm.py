# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A restricted Boltzmann machine on binary images of your choice.

``python models/rbm.py`` trains the machine of ``python -m ebmpp`` (64 pixels, 20 latent
units). Options choose other data (MNIST and its relatives, any IDX file), estimators
and sizes; a smaller layer of up to 20 units is evaluated exactly. It writes three
pictures, the model, and two ArviZ files.

``python models/rbm.py --data mnist --recipe likelihood --binarize bernoulli --out
runs/likelihood`` trains 500 latent units for likelihood, with checkpoints (``--resume``
continues), and bounds log Z from both sides.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import pyplot as plt
import numpy as np
from numpyro.infer import MCMC

from jax import Array

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, FactorGraph
from shared import common, digit_images, rbm_likelihood

_EXACT_UNITS = 20  # 2**20 states are summed in 0.3 s; each further unit doubles that
_NUM_SAMPLES = 64
_WARMUP = 1000
_DRAWS = 100
_THINNING = 20


# -- options -------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    parser = common.options(__doc__, "runs/rbm")
    common.training_options(parser, steps=1000, rate=0.03, num_pairs=50)
    add = parser.add_argument
    add(
        "--recipe",
        choices=("likelihood",),
        help="other defaults, and an estimate of log Z",
    )
    add(
        "--data",
        default="digits",
        help="digits, mnist, an IDX file, or a folder of MNIST's files",
    )
    add(
        "--data-dir",
        help="where MNIST is; default: the environment variable EBMPP_DATA_DIR",
    )
    add(
        "--binarize",
        choices=("threshold", "bernoulli"),
        default="threshold",
        help="how grey becomes binary",
    )
    add(
        "--latent",
        type=int,
        default=20,
        help=f"latent units; up to {_EXACT_UNITS} evaluate exactly",
    )
    add("--estimator", choices=("ucd", "cd", "pcd"), default="ucd")
    add("--k", type=int, help="sweeps; default: adaptive for ucd, 1 for cd and pcd")
    add("--lag", type=int, help="lag of ucd; default: adaptive")
    add = parser.add_argument_group("with --recipe likelihood").add_argument
    add(
        "--decay",
        type=float,
        default=rbm_likelihood.DECAY,
        help="weight decay, before the rate",
    )
    add(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint in the folder",
    )
    add("--particles", type=int, default=100, help="particles per annealing run")
    add(
        "--temperatures",
        type=int,
        default=10_000,
        help="of the final bounds; a tenth of them on the way",
    )
    add("--repeats", type=int, default=3, help="independent seeds of the final bounds")
    add(
        "--sweeps",
        type=int,
        default=10_000,
        help="sweeps of the chains that reverse annealing starts from",
    )
    add(
        "--coupled",
        type=int,
        default=100,
        help="coupled pairs that bound these chains' distance",
    )
    add("--pair-lag", type=int, default=500, help="lag of these pairs")
    if parser.parse_known_args(argv)[0].recipe == "likelihood":
        parser.set_defaults(**rbm_likelihood.DEFAULTS)
    args = common.parse(
        parser,
        argv,
        latent=1,
        repeats=1,
        sweeps=1,
        coupled=1,
        pair_lag=1,
        particles=2,
        temperatures=2,
    )
    if args.estimator != "ucd" and args.lag is not None:
        parser.error(
            f"--lag belongs to coupled chains (--estimator ucd), not to {args.estimator}"
        )
    with common.exit_on_error(parser):
        args.chosen = estimator(args)
        args.images = digit_images.read(
            args.data, args.data_dir, args.binarize, args.seed
        )
    return args


def estimator(args: argparse.Namespace) -> UCD | CD | PCD:
    """Return the estimator that the options name."""
    if args.estimator == "ucd":
        return UCD(num_pairs=args.num_pairs, k=args.k, lag=args.lag)
    k = 1 if args.k is None else args.k
    return CD(k=k) if args.estimator == "cd" else PCD(k=k, num_chains=args.num_pairs)


# -- the model, its training and its samples -----------------------------------------


def declare(pixels: int, latent: int) -> FactorGraph:
    """Two layers, a bias per unit, and weights between the layers."""
    return ebmpp.layered(v=Bernoulli(pixels), h=Bernoulli(latent))


def monitors(
    rbm: FactorGraph, data: digit_images.Rows
) -> dict[str, Callable[[Any], Array]]:
    """Return the exact likelihood where states can be summed, else a difference of free
    energies."""
    train = data.train
    held_out = data.held_out
    if min(family.size for family in rbm.families.values()) <= _EXACT_UNITS:
        likelihood = ebmpp.monitors.log_likelihood
        return {
            "log_likelihood_train": likelihood(rbm, train),
            "log_likelihood_held_out": likelihood(rbm, held_out),
        }
    # log Z cancels: the gap shows overfitting, and nothing else.
    return {
        "free_energy_gap": ebmpp.monitors.free_energy_gap(
            rbm, train[:10_000], held_out[:10_000]
        )
    }


def sample(rbm: FactorGraph, params: Any, seed: int) -> MCMC:
    """Run independent chains from uniform draws, without help from the data."""
    samples = {
        "samples": _DRAWS * _THINNING,
        "thinning": _THINNING,
        "count": _NUM_SAMPLES,
    }
    return common.chains(
        ebmpp.BlockedGibbs(rbm), params, seed + 1, warmup=_WARMUP, **samples
    )


# -- pictures ------------------------------------------------------------------------


def _filters(params: Any, shape: tuple[int, int]) -> Any:
    weights = np.asarray(params["v:h"]).T[:100]
    axes = ebmpp.plots.plot_units(weights, shape, ncols=8 if len(weights) <= 32 else 10)
    axes.set_title(f"weights of {len(weights)} latent units to the pixels", fontsize=10)
    return axes.figure


def _samples(rbm: FactorGraph, params: Any, data: digit_images.Rows, mcmc: MCMC) -> Any:
    # one per chain, so independent
    latent = mcmc.get_samples(group_by_chain=True)["h"][:, -1]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.9), layout="constrained")
    sweeps = _WARMUP + _DRAWS * _THINNING
    images = {
        "real images, held out": data.held_out[:_NUM_SAMPLES],
        f"samples: E[v | h] after {sweeps} sweeps from noise": rbm.mean(
            params, {"h": latent}, "v"
        ),
    }
    common.panels(axes, images, data.shape, ncols=8)
    return figure


# -- with and without the recipe -----------------------------------------------------


def train(rbm: FactorGraph, args: argparse.Namespace) -> None:
    """Train, evaluate, draw and save."""
    data = args.images
    fit = common.train(rbm, data.train, args, args.chosen, monitors=monitors(rbm, data))
    last = fit.history.isel(monitor_step=-1)
    baselines = {
        "independent pixels": digit_images.independent_pixels(data.train, data.held_out)
    }
    if "log_likelihood_train" in fit.history:
        common.print_row(
            "log-likelihood, held out",
            f"{float(last.log_likelihood_held_out):.2f} per image, exact",
        )
        common.print_row(
            "log-likelihood, training",
            f"{float(last.log_likelihood_train):.2f} per image, exact",
        )
        common.print_row(
            "independent pixels",
            f"{baselines['independent pixels']:.2f} per image, held out",
        )
    else:
        gap = "held out minus training; far from 0 is overfitting, and this is no likelihood"
        common.print_row("free-energy gap", f"{float(last.free_energy_gap):.2f}, {gap}")
    mcmc = sample(rbm, fit.params, args.seed)
    figures = {
        "learning_curve": common.plot_training(fit, baselines),
        "filters": _filters(fit.params, data.shape),
        "samples": _samples(rbm, fit.params, data, mcmc),
    }
    common.save_figures(args.out, figures)
    common.save(args.out / "draws.nc", mcmc)
    common.save(args.out / "history.nc", fit)
    common.save_model(args.out / "rbm.ebmpp", rbm, fit.params)


def likelihood(rbm: FactorGraph, args: argparse.Namespace) -> None:
    """Train for likelihood, bound it from both sides, draw, save."""
    params, curve = rbm_likelihood.train(rbm, args)
    common.save_model(args.out / "rbm.ebmpp", rbm, params)
    result = rbm_likelihood.evaluate(rbm, params, args)
    rbm_likelihood.report(result, args)
    mcmc = sample(rbm, params, args.seed)
    rbm_likelihood.save(curve, result, args)
    figures = rbm_likelihood.draw(curve, result, args) | {
        "rbm_filters": _filters(params, args.images.shape),
        "rbm_samples": _samples(rbm, params, args.images, mcmc),
    }
    common.save_figures(args.out, figures)


def main(argv: Sequence[str] | None = None) -> None:
    """Train by the options, with or without the recipe."""
    args = parse(argv)
    rbm = declare(args.images.train.shape[1], args.latent)
    common.begin(args, rbm)
    common.print_row(
        "images",
        f"{len(args.images.train)} for training, {len(args.images.held_out)} held out",
    )
    common.print_row("held out", args.images.origin)
    (train if args.recipe is None else likelihood)(rbm, args)


if __name__ == "__main__":
    main()
