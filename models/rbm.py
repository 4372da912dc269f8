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
import dataclasses
import math
from pathlib import Path
import time
from typing import Any, NamedTuple

import numpy as np
from numpyro.infer import MCMC
import xarray as xr

import jax
from jax import Array
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, FactorGraph, exact
from ebmpp.errors import DivergenceError

try:
    from models import common, rbm_likelihood
except ImportError:  # run as a file
    import common
    import rbm_likelihood

_EXACT_UNITS = 20  # the smaller layer is enumerated: 2**20 states take seconds, each unit more doubles it
_SWEEPS = 1000  # before a sample is kept: many times the meeting times of the demo
_SHOWN = 64
_DRAWS, _THINNING = 100, 20


class Images(NamedTuple):
    """Binary images, one row each, and how to show a row."""

    train: np.ndarray
    held_out: np.ndarray
    shape: tuple[int, int]
    grey: np.ndarray | None = None
    """Intensities of the training rows, where pixels are 1 with that probability."""


# -- options -------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--recipe", choices=("demo", "likelihood"), default="demo", help="likelihood sets other defaults")
    add("--data", default="digits", help="digits, mnist, an IDX file, or a folder of MNIST's files")
    add("--data-dir", help="where MNIST is; default: the environment variable EBMPP_DATA_DIR")
    add("--binarize", choices=("threshold", "bernoulli"), default="threshold", help="of intensities")
    add("--latent", type=int, default=20, help=f"latent units; up to {_EXACT_UNITS} evaluate exactly")
    add("--estimator", choices=("ucd", "cd", "pcd"), default="ucd")
    add("--k", type=int, help="sweeps; default: adaptive for ucd, 1 for cd and pcd")
    add("--lag", type=int, help="ucd's lag; default: adaptive")
    add("--num-pairs", type=int, default=100, help="coupled pairs of ucd, or chains of pcd")
    add("--steps", type=int, default=2500)
    add("--batch-size", type=int, default=100)
    add("--rate", type=float, default=0.015, help="Adam's first learning rate; it decays along a cosine")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("demo"), help="folder for pictures and files")
    add("--no-progress", action="store_true", help="no progress bar")
    own = parser.add_argument_group("of the recipe likelihood").add_argument
    own("--resume", action="store_true", help="go on from the newest checkpoint in the folder")
    own("--particles", type=int, default=100, help="of a run of annealing")
    own("--temperatures", type=int, default=10_000, help="of the final bounds; a tenth of them on the way")
    own("--repeats", type=int, default=3, help="independent seeds of the final bounds")
    own("--sweeps", type=int, default=10_000, help="of the chains that reverse annealing starts from")
    own("--coupled", type=int, default=100, help="pairs that tell how good these chains are")
    own("--pair-lag", type=int, default=500, help="their lag")
    if parser.parse_known_args(argv)[0].recipe == "likelihood":
        parser.set_defaults(**rbm_likelihood.DEFAULTS)
    args = parser.parse_args(argv)
    counts = ("latent", "num_pairs", "steps", "batch_size", "repeats", "sweeps", "coupled", "pair_lag")
    for name in counts:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1, not {getattr(args, name)}")
    if not (args.rate > 0 and math.isfinite(args.rate)):
        parser.error(f"--rate is a positive number, not {args.rate}")
    if args.particles < 2 or args.temperatures < 2:
        parser.error("--particles and --temperatures are at least 2")
    if args.estimator != "ucd" and args.lag is not None:
        parser.error(f"--lag belongs to coupled chains (--estimator ucd), not to {args.estimator}")
    try:
        args.chosen = estimator(args)
        args.images = images(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def estimator(args: argparse.Namespace) -> UCD | CD | PCD:
    """The estimator that the options name."""
    if args.estimator == "ucd":
        return UCD(num_pairs=args.num_pairs, k=args.k, lag=args.lag)
    k = 1 if args.k is None else args.k
    return CD(k=k) if args.estimator == "cd" else PCD(k=k, num_chains=args.num_pairs)


# -- data ----------------------------------------------------------------------------------------


def images(args: argparse.Namespace) -> Images:
    """The binarised images; one row in six is held out where there is no test set."""
    if args.data == "digits":
        return _split(ebmpp.data.digits(), (8, 8), args)
    path = Path(args.data)
    if args.data == "mnist" or path.is_dir():
        folder = args.data_dir if args.data == "mnist" else path
        train = ebmpp.data.mnist(folder, "train")
        try:
            test = ebmpp.data.mnist(folder, "test")
        except FileNotFoundError:  # the training file alone: 10,000 of its 60,000 images are held out
            return _split(train, (28, 28), args)
        return _binary(train, test, (28, 28), args)
    rows = ebmpp.data.idx(path)
    if rows.ndim not in (2, 3) or len(rows) < 2 or not rows.size:
        raise ValueError(f"{path}: shape {rows.shape}; expected at least two images, (N, height, width)")
    shape = rows.shape[1:] if rows.ndim == 3 else (1, rows.shape[1])
    scale = 255 if rows.dtype == np.uint8 else 1
    return _split(rows.reshape(len(rows), -1) / scale, shape, args)


def _split(rows: np.ndarray, shape: tuple[int, int], args: argparse.Namespace) -> Images:
    rows = rows[np.random.default_rng(args.seed).permutation(len(rows))]
    held_out = -(-len(rows) // 6)
    return _binary(rows[held_out:], rows[:held_out], shape, args)


def _binary(
    train: np.ndarray, held_out: np.ndarray, shape: tuple[int, int], args: argparse.Namespace
) -> Images:
    if args.binarize == "threshold":
        return Images(ebmpp.data.binarize(train), ebmpp.data.binarize(held_out), shape)
    keys = jax.random.split(jax.random.key(args.seed + 5))
    drawn = (
        ebmpp.data.binarize(x, "bernoulli", rng_key=k) for x, k in zip((train, held_out), keys, strict=True)
    )
    return Images(*drawn, shape, train)


# -- the model, its training and its evaluation --------------------------------------------------


def declare(pixels: int, latent: int) -> FactorGraph:
    """Two layers, a bias each, and weights between them."""
    return ebmpp.layered(v=Bernoulli(pixels), h=Bernoulli(latent))


def monitors(rbm: FactorGraph, data: Images) -> dict[str, Callable[[Any], Array]]:
    """What is followed while training: the exact likelihood where it can be had, else free energies."""
    parts = {"train": jnp.asarray(data.train), "held_out": jnp.asarray(data.held_out)}
    if _enumerable(rbm):
        return {f"log_likelihood_{p}": _mean_log_likelihood(rbm, rows) for p, rows in parts.items()}
    # log Z cancels between the two: what remains shows overfitting, and nothing else.
    few = {part: rows[:10_000] for part, rows in parts.items()}
    energy = lambda params, part: rbm.free_energy(params, {"v": few[part]}).mean()  # noqa: E731
    return {"free_energy_gap": lambda params: energy(params, "held_out") - energy(params, "train")}


def _enumerable(rbm: FactorGraph) -> bool:
    return min(family.size for family in rbm.families.values()) <= _EXACT_UNITS


def _mean_log_likelihood(rbm: FactorGraph, rows: Array) -> Callable[[Any], Array]:
    return lambda params: exact.log_likelihood(rbm, params, rows).mean()


def independent_pixels(data: Images) -> float:
    """The held-out rows' mean log-likelihood when each pixel has its own rate: what a model must beat."""
    rate = (data.train.sum(0) + 1) / (len(data.train) + 2)
    each = data.held_out * np.log(rate) + (1 - data.held_out) * np.log1p(-rate)
    return float(each.sum(1).mean())


def train(rbm: FactorGraph, args: argparse.Namespace) -> ebmpp.Fit:
    """Adam under a decaying rate: large steps first, while chains mix fast and gradients are cheap."""
    return ebmpp.fit(
        rbm,
        args.images.train,
        estimator=args.chosen,
        optimizer=optax.adam(optax.cosine_decay_schedule(args.rate, args.steps, alpha=0.02)),
        num_steps=args.steps,
        batch_size=args.batch_size,
        rng_key=jax.random.key(args.seed),
        monitors=monitors(rbm, args.images),
        monitor_every=max(1, args.steps // 25),
        progress_bar=not args.no_progress,
    )


def sample(rbm: FactorGraph, params: Any, seed: int) -> MCMC:
    """Independent chains from uniform draws: nothing of the data helps them."""
    kernel = ebmpp.BlockedGibbs(rbm)
    mcmc = MCMC(
        kernel,
        num_warmup=_SWEEPS,
        num_samples=_DRAWS * _THINNING,
        thinning=_THINNING,
        num_chains=_SHOWN,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed + 1), params)
    return mcmc


def meeting_times(rbm: FactorGraph, params: Any, seed: int) -> Any:
    """How long 1000 pairs of chains from uniform draws take to meet: the price of a sample."""
    ink = lambda x: x["v"].sum()  # noqa: E731
    return ebmpp.unbiased_expectation(rbm, params, ink, rng_key=jax.random.key(seed + 2), num_pairs=1000)


# -- what is written -----------------------------------------------------------------------------


def draw(rbm: FactorGraph, fit: ebmpp.Fit, args: argparse.Namespace, mcmc: MCMC, met: dict) -> list[Path]:
    """The four pictures."""
    import matplotlib

    matplotlib.use("agg")
    figures = {
        "learning_curve": lambda: _learning_curve(fit, independent_pixels(args.images)),
        "filters": lambda: _filters(fit, args.images.shape),
        "samples": lambda: _samples(rbm, fit, args.images, mcmc),
        "meeting_times": lambda: _meeting_times(met),
    }
    written = []
    for name, make in figures.items():
        figure = make()
        written.append(args.out / f"{name}.png")
        figure.savefig(written[-1], dpi=130)
        matplotlib.pyplot.close(figure)
    return written


def _learning_curve(fit: ebmpp.Fit, baseline: float) -> Any:
    from matplotlib import pyplot as plt

    history = fit.history
    exactly = "log_likelihood_train" in history
    others = [n for n in ("gradient_norm", "meeting_time_mean", "meeting_time_max", "lag") if n in history]
    panels = 3 if "lag" in history else 2
    figure, axes = plt.subplots(1, panels, figsize=(4 * panels, 3.2), layout="constrained")
    first, *rest = axes
    for name, label in (("train", "training"), ("held_out", "held out")):
        if exactly:
            first.plot(history.monitor_step, history[f"log_likelihood_{name}"], label=label, linewidth=1.6)
    if exactly:
        first.axhline(baseline, color="0.5", linestyle="--", linewidth=1, label="independent pixels")
        first.legend(frameon=False, fontsize=8, loc="center right")
        first.set_ylabel("exact log-likelihood an image")
    else:
        first.plot(history.monitor_step, history.free_energy_gap, linewidth=1.6)
        first.set_ylabel("free energy, held out minus training")
    first.set_xlabel("step")
    first.grid(alpha=0.25)
    first.spines[["top", "right"]].set_visible(False)
    ebmpp.plots.plot_history(history[others], axes=rest)
    return figure


def _filters(fit: ebmpp.Fit, shape: tuple[int, int]) -> Any:
    weights = np.asarray(fit.params["v:h"]).T[:100]
    axes = ebmpp.plots.plot_units(weights, shape, ncols=8 if len(weights) <= 32 else 10)
    axes.set_title("weights of the latent units", fontsize=10)
    return axes.figure


def _samples(rbm: FactorGraph, fit: ebmpp.Fit, data: Images, mcmc: MCMC) -> Any:
    from matplotlib import pyplot as plt

    latent = mcmc.get_samples(group_by_chain=True)["h"][:, -1]  # a chain each, so independent
    means = rbm.mean(fit.params, {"h": latent}, "v")
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.9), layout="constrained")
    ebmpp.plots.plot_units(data.held_out[:_SHOWN], data.shape, ncols=8, ax=axes[0])
    ebmpp.plots.plot_units(means, data.shape, ncols=8, ax=axes[1])
    axes[0].set_title("real images, held out", fontsize=10)
    axes[1].set_title(
        f"samples: mean of v given h, {_SWEEPS + _DRAWS * _THINNING} sweeps from noise", fontsize=10
    )
    return figure


def _meeting_times(met: dict[str, Any]) -> Any:
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    for label, estimate in met.items():
        ebmpp.plots.plot_meeting_times(estimate.meeting_time, estimate.lag, estimate.met, ax=ax, label=label)
    ax.set_title("coupled chains that have not met", fontsize=10)
    return figure


def save(fit: ebmpp.Fit, args: argparse.Namespace, mcmc: MCMC) -> list[Path]:
    """The draws with the params and the held-out rows, and the history, as netCDF files for ArviZ."""
    tree = ebmpp.to_datatree(mcmc)
    params = {
        name: ([f"{b}_dim_0" for b in name.split(":")], np.asarray(value))
        for name, value in fit.params.items()
    }
    tree["params"] = xr.DataTree(xr.Dataset(params))
    tree["observed_data"] = xr.DataTree(xr.Dataset({"v": (("row", "v_dim_0"), args.images.held_out)}))
    paths = [args.out / "rbm.nc", args.out / "history.nc"]
    for path, made in zip(paths, (tree, ebmpp.to_datatree(fit)), strict=True):
        made.to_netcdf(path, engine="h5netcdf")
    return paths


def report(fit: ebmpp.Fit, args: argparse.Namespace, seconds: float, trained: Any) -> str:
    """The numbers, a line each."""
    last = fit.history.isel(monitor_step=-1)
    lines = {"images": f"{len(args.images.train)} for training, {len(args.images.held_out)} held out"}
    lines["training"] = f"{args.steps} steps of {args.chosen!r} in {seconds:.0f} s"
    if "log_likelihood_train" in fit.history:
        lines["log-likelihood, held out"] = f"{float(last.log_likelihood_held_out):.2f} an image, exact"
        lines["log-likelihood, training"] = f"{float(last.log_likelihood_train):.2f} an image, exact"
        lines["independent pixels"] = f"{independent_pixels(args.images):.2f} (held out)"
    else:
        gap = f"{float(last.free_energy_gap):.2f}"
        lines["free-energy gap"] = f"{gap}, held out minus training: far from 0 is overfitting; no likelihood"
    tau = trained.meeting_time
    lines["meeting time"] = f"mean {tau.mean():.0f}, max {tau.max():.0f} sweeps (1000 pairs from noise)"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def likelihood(rbm: FactorGraph, args: argparse.Namespace) -> None:
    """Train for likelihood, bound it from both sides, draw, save."""
    fit, params, curve = rbm_likelihood.train(rbm, args)
    ebmpp.save(args.out / "rbm.ebmpp", rbm, params)
    made = rbm_likelihood.evaluate(rbm, params, args)
    fit, mcmc = dataclasses.replace(fit, params=params), sample(rbm, params, args.seed)
    figures = {
        "rbm_likelihood": lambda: rbm_likelihood.draw(curve, made, args),
        "rbm_filters": lambda: _filters(fit, args.images.shape),
        "rbm_samples": lambda: _samples(rbm, fit, args.images, mcmc),
    }
    written = [rbm_likelihood.save(curve, made, args), args.out / "rbm.ebmpp"]
    written += common.save_figures(args.out, figures)
    lines = {"images": f"{len(args.images.train)} for training, {len(args.images.held_out)} held out"}
    lines["training"] = f"{args.steps} steps of {ebmpp.Centered(args.chosen)!r}"
    print(common.report(lines | rbm_likelihood.report(made, args), written))


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate, draw, save."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rbm = declare(args.images.train.shape[1], args.latent)
    print(f"{rbm!r}\nlayers {rbm.layers}")
    try:
        {"demo": demo, "likelihood": likelihood}[args.recipe](rbm, args)
    except DivergenceError as error:
        raise SystemExit(str(error)) from error


def demo(rbm: FactorGraph, args: argparse.Namespace) -> None:
    """A machine of the size that can be summed, with all pictures."""
    begin = time.monotonic()
    fit = train(rbm, args)
    seconds = time.monotonic() - begin
    start = rbm.init(jax.random.key(args.seed), args.images.train)
    met = {"before training": meeting_times(rbm, start, args.seed)}
    met["trained"] = meeting_times(rbm, fit.params, args.seed)
    mcmc = sample(rbm, fit.params, args.seed)
    written = draw(rbm, fit, args, mcmc, met) + save(fit, args, mcmc)
    print(report(fit, args, seconds, met["trained"]))
    print("\n".join(f"wrote {path}" for path in written))


if __name__ == "__main__":
    main()
