# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A restricted Boltzmann machine on handwritten digits, trained by unbiased contrastive divergence.

``python models/rbm.py --out demo`` trains on the digits that come with scikit-learn, evaluates the model
exactly, and writes four pictures and two ArviZ files. ``--help`` lists the options; other data are read
from IDX files (MNIST and its relatives).

``python models/rbm.py --data mnist --recipe likelihood --binarize bernoulli --out runs/likelihood`` trains
500 latent units for likelihood, with checkpoints (``--resume`` goes on), and estimates log Z from both sides.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import pyplot as plt
import numpy as np
from numpyro.infer import MCMC
import xarray as xr

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, FactorGraph, exact
from shared import common, digit_images, rbm_likelihood

_EXACT_UNITS = 20  # the smaller layer is enumerated: 2**20 states take seconds, each unit more doubles it
_SWEEPS = 1000  # before a sample is kept: many times the meeting times of the demo
_SHOWN = 64
_DRAWS, _THINNING = 100, 20


# -- options -------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = common.options(__doc__, "demo")
    common.training_options(parser, steps=2500, rate=0.015)
    add = parser.add_argument
    add("--recipe", choices=("demo", "likelihood"), default="demo", help="likelihood sets other defaults")
    add("--data", default="digits", help="digits, mnist, an IDX file, or a folder of MNIST's files")
    add("--data-dir", help="where MNIST is; default: the environment variable EBMPP_DATA_DIR")
    add("--binarize", choices=("threshold", "bernoulli"), default="threshold", help="of intensities")
    add("--latent", type=int, default=20, help=f"latent units; up to {_EXACT_UNITS} evaluate exactly")
    add("--estimator", choices=("ucd", "cd", "pcd"), default="ucd")
    add("--k", type=int, help="sweeps; default: adaptive for ucd, 1 for cd and pcd")
    add("--lag", type=int, help="ucd's lag; default: adaptive")
    own = parser.add_argument_group("of the recipe likelihood").add_argument
    own("--decay", type=float, default=rbm_likelihood.DECAY, help="of weights, before the rate")
    own("--resume", action="store_true", help="go on from the newest checkpoint in the folder")
    own("--particles", type=int, default=100, help="of a run of annealing")
    own("--temperatures", type=int, default=10_000, help="of the final bounds; a tenth of them on the way")
    own("--repeats", type=int, default=3, help="independent seeds of the final bounds")
    own("--sweeps", type=int, default=10_000, help="of the chains that reverse annealing starts from")
    own("--coupled", type=int, default=100, help="pairs that tell how good these chains are")
    own("--pair-lag", type=int, default=500, help="their lag")
    if parser.parse_known_args(argv)[0].recipe == "likelihood":
        parser.set_defaults(**rbm_likelihood.DEFAULTS)
    args = common.parse(
        parser, argv, latent=1, repeats=1, sweeps=1, coupled=1, pair_lag=1, particles=2, temperatures=2
    )
    if args.estimator != "ucd" and args.lag is not None:
        parser.error(f"--lag belongs to coupled chains (--estimator ucd), not to {args.estimator}")
    with common.refusals(parser):
        args.chosen = estimator(args)
        args.images = digit_images.read(args.data, args.data_dir, args.binarize, args.seed)
    return args


def estimator(args: argparse.Namespace) -> UCD | CD | PCD:
    """The estimator that the options name."""
    if args.estimator == "ucd":
        return UCD(num_pairs=args.num_pairs, k=args.k, lag=args.lag)
    k = 1 if args.k is None else args.k
    return CD(k=k) if args.estimator == "cd" else PCD(k=k, num_chains=args.num_pairs)


# -- the model, its training and its evaluation --------------------------------------------------


def declare(pixels: int, latent: int) -> FactorGraph:
    """Two layers, a bias each, and weights between them."""
    return ebmpp.layered(v=Bernoulli(pixels), h=Bernoulli(latent))


def monitors(rbm: FactorGraph, data: digit_images.Rows) -> dict[str, Callable[[Any], Array]]:
    """What is followed while training: the exact likelihood where it can be had, else free energies."""
    parts = {"train": jnp.asarray(data.train), "held_out": jnp.asarray(data.held_out)}
    if _enumerable(rbm):
        return {f"log_likelihood_{p}": _mean_log_likelihood(rbm, rows) for p, rows in parts.items()}
    # log Z cancels between the two: what remains shows overfitting, and nothing else.
    few = {part: rows[:10_000] for part, rows in parts.items()}
    energy = lambda params, part: rbm.free_energy(params, {"v": few[part]}).mean()
    return {"free_energy_gap": lambda params: energy(params, "held_out") - energy(params, "train")}


def _enumerable(rbm: FactorGraph) -> bool:
    return min(family.size for family in rbm.families.values()) <= _EXACT_UNITS


def _mean_log_likelihood(rbm: FactorGraph, rows: Array) -> Callable[[Any], Array]:
    return lambda params: exact.log_likelihood(rbm, params, rows).mean()


def sample(rbm: FactorGraph, params: Any, seed: int) -> MCMC:
    """Independent chains from uniform draws: nothing of the data helps them."""
    kernel, kept = ebmpp.BlockedGibbs(rbm), _DRAWS * _THINNING
    return common.chains(
        kernel, params, seed + 1, warmup=_SWEEPS, samples=kept, thinning=_THINNING, count=_SHOWN
    )


def meeting_times(rbm: FactorGraph, params: Any, seed: int) -> Any:
    """How long 1000 pairs of chains from uniform draws take to meet: the price of a sample."""
    ink = lambda x: x["v"].sum()
    return ebmpp.unbiased_expectation(rbm, params, ink, rng_key=jax.random.key(seed + 2), num_pairs=1000)


# -- what is written -----------------------------------------------------------------------------


def _filters(params: Any, shape: tuple[int, int]) -> Any:
    weights = np.asarray(params["v:h"]).T[:100]
    axes = ebmpp.plots.plot_units(weights, shape, ncols=8 if len(weights) <= 32 else 10)
    axes.set_title(f"weights of {len(weights)} latent units to the pixels", fontsize=10)
    return axes.figure


def _samples(rbm: FactorGraph, params: Any, data: digit_images.Rows, mcmc: MCMC) -> Any:
    latent = mcmc.get_samples(group_by_chain=True)["h"][:, -1]  # a chain each, so independent
    means = rbm.mean(params, {"h": latent}, "v")
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.9), layout="constrained")
    sweeps = _SWEEPS + _DRAWS * _THINNING
    shown = {"real images, held out": data.held_out[:_SHOWN]}
    shown[f"samples: mean of v given h, {sweeps} sweeps from noise"] = means
    common.panels(axes, shown, data.shape, ncols=8)
    return figure


def _meeting_times(met: dict[str, Any]) -> Any:
    figure, ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for label, estimate in met.items():
        ebmpp.plots.plot_meeting_times(estimate.meeting_time, estimate.lag, estimate.met, ax=ax, label=label)
    ax.set_xlim(1, None)
    ax.set_xscale("log")  # a few sweeps before, hundreds after
    ax.set_title("share of 1000 coupled pairs that have not met", fontsize=10)
    return figure


def draws(params: Any, mcmc: MCMC, held_out: np.ndarray) -> xr.DataTree:
    """The draws with the params and the held-out rows, for ArviZ."""
    tree = ebmpp.to_datatree(mcmc)
    named = {
        name: ([f"{b}_dim_0" for b in name.split(":")], np.asarray(value)) for name, value in params.items()
    }
    tree["params"] = xr.DataTree(xr.Dataset(named))
    tree["observed_data"] = xr.DataTree(xr.Dataset({"v": (("row", "v_dim_0"), held_out)}))
    return tree


# -- the two recipes -----------------------------------------------------------------------------


def demo(rbm: FactorGraph, args: argparse.Namespace) -> None:
    """A machine of the size that can be summed, with all pictures."""
    data = args.images
    baseline = digit_images.independent_pixels(data.train, data.held_out)
    # large steps first, while chains mix fast and gradients are cheap
    fit = common.train(rbm, data.train, args, args.chosen, monitors=monitors(rbm, data))
    last = fit.history.isel(monitor_step=-1)
    if "log_likelihood_train" in fit.history:
        common.tell("log-likelihood, held out", f"{float(last.log_likelihood_held_out):.2f} an image, exact")
        common.tell("log-likelihood, training", f"{float(last.log_likelihood_train):.2f} an image, exact")
        common.tell("independent pixels", f"{baseline:.2f} (held out)")
    else:
        told = "held out minus training: far from 0 is overfitting; no likelihood"
        common.tell("free-energy gap", f"{float(last.free_energy_gap):.2f}, {told}")
    start = rbm.init(jax.random.key(args.seed), data.train)
    met = {"before training": meeting_times(rbm, start, args.seed)}
    met["trained"] = meeting_times(rbm, fit.params, args.seed)
    tau = met["trained"].meeting_time
    common.tell("meeting time", f"mean {tau.mean():.0f}, max {tau.max():.0f} sweeps (1000 pairs from noise)")
    mcmc = sample(rbm, fit.params, args.seed)
    figures = {
        "learning_curve": common.course(fit, {"independent pixels": baseline}),
        "filters": _filters(fit.params, data.shape),
        "samples": _samples(rbm, fit.params, data, mcmc),
        "meeting_times": _meeting_times(met),
    }
    common.save_figures(args.out, figures)
    common.save(args.out / "rbm.nc", draws(fit.params, mcmc, data.held_out))
    common.save(args.out / "history.nc", fit)


def likelihood(rbm: FactorGraph, args: argparse.Namespace) -> None:
    """Train for likelihood, bound it from both sides, draw, save."""
    params, curve = rbm_likelihood.train(rbm, args)
    common.save_model(args.out / "rbm.ebmpp", rbm, params)
    made = rbm_likelihood.evaluate(rbm, params, args)
    rbm_likelihood.report(made, args)
    mcmc = sample(rbm, params, args.seed)
    rbm_likelihood.save(curve, made, args)
    figures = {
        "rbm_likelihood": rbm_likelihood.draw(curve, made, args),
        "rbm_filters": _filters(params, args.images.shape),
        "rbm_samples": _samples(rbm, params, args.images, mcmc),
    }
    common.save_figures(args.out, figures)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate, draw, save."""
    args = parse(argv)
    rbm = declare(args.images.train.shape[1], args.latent)
    common.begin(args, rbm)
    common.tell("images", f"{len(args.images.train)} for training, {len(args.images.held_out)} held out")
    common.tell("held out", args.images.origin)
    {"demo": demo, "likelihood": likelihood}[args.recipe](rbm, args)


if __name__ == "__main__":
    main()
