# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Learn handwritten digits: train a Boltzmann machine by unbiased gradients, judge it exactly, draw from it.

``python -m ebmpp`` needs the package and its extra ``plots``, and no data but those that come with
scikit-learn. It writes four pictures, the model, and two files that open in ArviZ into one folder. It is made
of public names alone, as a program of yours would be; ``models/rbm.py`` in the repository has more options:
other data, estimators and sizes.
"""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
import sys
from typing import Any

import numpy as np
from numpyro.infer import MCMC
import xarray as xr

import jax
import optax

import ebmpp
from ebmpp import Bernoulli, Fit

_MOST_LATENT = 20  # the latent layer is enumerated: 2**20 states take seconds, each unit more doubles it
_HELD_OUT = 300  # of 1797 images
_PAIRS = 100
_FOLLOWED = ["meeting_time_mean", "meeting_time_max", "lag"]
_CHAINS, _SWEEPS, _DRAWS, _THINNING = 64, 1000, 100, 20


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked; a message for a wrong one, or a missing extra, ends the program."""
    parser = argparse.ArgumentParser("python -m ebmpp", description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("ebmpp-digits"), help="folder for all files (default: %(default)s)")
    add("--steps", type=int, default=1000, help="gradient steps (default: %(default)s)")
    add("--latent", type=int, default=16, help=f"latent units, 1 to {_MOST_LATENT} (default: %(default)s)")
    add("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps is at least 1, not {args.steps}")
    if not 1 <= args.latent <= _MOST_LATENT:
        parser.error(f"--latent is from 1 to {_MOST_LATENT}, not {args.latent}: their states are enumerated")
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed is from 0 to {2**32 - 1}, not {args.seed}")
    if find_spec("matplotlib") is None:
        parser.error("the pictures need matplotlib, of the extra plots: pip install 'ebmpp[plots]'")
    try:  # before time is spent
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out} cannot be a folder: {error.strerror}")
    return args


def digits(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Black and white images of 8x8, a row each: those to train on, and those held out."""
    rows = np.random.default_rng(seed).permutation(ebmpp.data.binarize(ebmpp.data.digits()))
    return rows[_HELD_OUT:], rows[:_HELD_OUT]


def independent_pixels(train: np.ndarray, held_out: np.ndarray) -> float:
    """The held-out images' mean log-likelihood where each pixel has its own rate: what a model must beat."""
    rate = (train.sum(0) + 1) / (len(train) + 2)
    return float((held_out * np.log(rate) + (1 - held_out) * np.log1p(-rate)).sum(1).mean())


def learn(rbm: ebmpp.FactorGraph, train: np.ndarray, held_out: np.ndarray, steps: int, seed: int) -> Fit:
    """Unbiased gradients from coupled chains; large steps first, while chains mix fast and meet soon."""
    return ebmpp.fit(
        rbm,
        train,
        estimator=ebmpp.UCD(num_pairs=_PAIRS),
        optimizer=optax.adam(optax.cosine_decay_schedule(0.015, steps, alpha=0.02)),
        num_steps=steps,
        batch_size=100,
        rng_key=jax.random.key(seed),
        monitors={
            "log_likelihood_train": ebmpp.monitors.log_likelihood(rbm, train),
            "log_likelihood_held_out": ebmpp.monitors.log_likelihood(rbm, held_out),
        },
        monitor_every=max(1, steps // 20),
        progress_bar=sys.stderr.isatty(),
    )


def sample(rbm: ebmpp.FactorGraph, params: Any, seed: int) -> MCMC:
    """Chains from uniform draws: nothing of the data helps them."""
    mcmc = MCMC(
        ebmpp.BlockedGibbs(rbm),
        num_warmup=_SWEEPS,
        num_samples=_DRAWS * _THINNING,
        thinning=_THINNING,
        num_chains=_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed + 1), params)
    return mcmc


def learning_curve(fit: Fit, baseline: float) -> Any:
    """Exact likelihoods along training on one axis, and what the gradients cost."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
    for name, label, look in (("train", "training images", "o-"), ("held_out", "held-out images", "s--")):
        curve = fit.history[f"log_likelihood_{name}"]
        left.plot(curve.monitor_step, curve, look, markersize=3, label=label)
    left.axhline(baseline, color="0.3", linestyle=":", label="independent pixels, held out")
    left.set(xlabel="step", ylabel="exact log-likelihood an image (nats)")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False, fontsize=8)
    left.spines[["top", "right"]].set_visible(False)
    ebmpp.plots.plot_history(fit.history[_FOLLOWED], axes=[right])
    return figure


def draw(out: Path, fit: Fit, means: np.ndarray, train: np.ndarray, held_out: np.ndarray, met: Any) -> None:
    """The four pictures, as PNG files."""
    from matplotlib import pyplot as plt

    plt.switch_backend("agg")  # pictures are files: nobody looks at a window
    plots = ebmpp.plots
    pictures: dict[str, Any] = {"learning_curve": learning_curve(fit, independent_pixels(train, held_out))}
    weights = np.asarray(fit.params["v:h"]).T
    axes = plots.plot_units(weights, (8, 8))
    axes.set_title(f"weights of {len(weights)} latent units to the pixels", fontsize=10)
    pictures["filters"] = axes.figure
    pictures["samples"], axes = plt.subplots(1, 2, figsize=(9, 4.9), layout="constrained")
    told = f"samples: mean of v given h, {_SWEEPS + _DRAWS * _THINNING} sweeps from noise"
    shown = {"real images, held out": held_out[:_CHAINS], told: means}
    for ax, (title, images) in zip(axes, shown.items(), strict=True):
        plots.plot_units(images, (8, 8), ax=ax).set_title(title, fontsize=10)
    axes = plots.plot_meeting_times(met)
    axes.set_title(f"share of {len(met.met)} pairs from noise that have not met", fontsize=10)
    pictures["meeting_times"] = axes.figure
    for name, figure in pictures.items():
        figure.savefig(out / f"{name}.png", dpi=130)
        plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, judge, draw, save."""
    args = parse(argv)
    train, held_out = digits(args.seed)
    rbm = ebmpp.layered(v=Bernoulli(64), h=Bernoulli(args.latent))
    print(rbm, flush=True)
    fit = learn(rbm, train, held_out, args.steps, args.seed)
    last = fit.history.isel(monitor_step=-1)
    print(f"log-likelihood, held out   {float(last.log_likelihood_held_out):.2f} nats an image, exact")
    print(f"log-likelihood, training   {float(last.log_likelihood_train):.2f} nats an image, exact")
    print(f"independent pixels         {independent_pixels(train, held_out):.2f} nats an image, held out")
    key, ink = jax.random.key(args.seed + 2), lambda x: x["v"].sum()
    met = ebmpp.unbiased_expectation(rbm, fit.params, ink, rng_key=key, num_pairs=500)
    longest = f"mean {met.meeting_time.mean():.0f}, max {met.meeting_time.max():.0f} sweeps"
    print(f"meeting time               {longest}, of 500 pairs from noise", flush=True)

    mcmc = sample(rbm, fit.params, args.seed)
    latent = mcmc.get_samples(group_by_chain=True)["h"][:, -1]  # of a chain each, so independent
    means = np.asarray(rbm.mean(fit.params, {"h": latent}, "v"))
    draw(args.out, fit, means, train, held_out, met)
    draws = ebmpp.to_datatree(mcmc)
    draws["observed_data"] = xr.DataTree(xr.Dataset({"v": (("row", "v_dim_0"), held_out)}))
    draws.to_netcdf(args.out / "draws.nc", engine="h5netcdf")
    ebmpp.to_datatree(fit).to_netcdf(args.out / "history.nc", engine="h5netcdf")
    ebmpp.save(args.out / "digits.ebmpp", rbm, fit.params)
    print(f"wrote four pictures, draws.nc, history.nc and digits.ebmpp to {args.out}/")


if __name__ == "__main__":
    main()
