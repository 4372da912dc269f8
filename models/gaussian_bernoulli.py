# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A Gaussian-Bernoulli machine on grey images: pixels with learned means and variances,
binary latents.

``python models/gaussian_bernoulli.py --out gaussian_bernoulli`` trains on
scikit-learn's digits; ``--data mnist --latent 256`` is larger. The parametrisation is
that of Liao et al. (2022)::

    E(v, h) = sum_i ((v_i - mean_i)**2 / 2 - v_i (W (h - 1/2))_i) / variance_i - <bias, h>

up to a constant, with the logarithm of the variance as the parameter. The 1/2 is ours:
the set of models is the same, and steps of the weights do not change the mean. Every
value of the params is a model, weights act on the pixels' scale, and the gradient is
well conditioned, whereas natural parameters of the variance would need a bound and a
separate rate. The model is one custom factor.

Estimators: ``ucd`` (pairs of Gibbs chains that meet exactly), ``pcd``, and ``langevin``
(persistent chains that move by Gibbs-Langevin steps). Samples are drawn by both
samplers, and their variances are compared with the exact ones: the Langevin kernel's
temperature is 1.
"""

import argparse
from collections.abc import Sequence
import math
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, Factor, FactorGraph, Gaussian, contrib, exact
from ebmpp.estimators import TargetCost
from shared import common, digit_images

_EXACT = 16  # latents whose states are enumerated
_SWEEPS = 2000
_SHOWN = 40
_CHAINS = 1000  # for moments


class Images(NamedTuple):
    """Standardised images as rows, and their original scale."""

    train: np.ndarray
    held_out: np.ndarray
    shape: tuple[int, int]
    centre: np.ndarray
    scale: np.ndarray

    def grey(self, v: Any) -> np.ndarray:
        """Return rows as images in [0, 1]."""
        return np.clip(np.asarray(v) * self.scale + self.centre, 0, 1)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    parser = common.options(__doc__, "gaussian_bernoulli")
    common.training_options(parser, steps=2000, rate=0.01, num_pairs=200)
    digit_images.option(parser)
    add = parser.add_argument
    add(
        "--latent",
        type=int,
        default=_EXACT,
        help=f"latent units; up to {_EXACT} evaluate exactly",
    )
    add("--estimator", choices=("ucd", "pcd", "langevin"), default="pcd")
    add("--cost", type=float, default=60.0, help="sweeps per pair of ucd on average")
    add(
        "--step-size",
        type=float,
        default=0.5,
        help="Langevin step size, in standard deviations",
    )
    args = common.parse(parser, argv, latent=1)
    with common.exit_on_error(parser):
        args.images = images(args.data, args.seed)
        args.model = declare(args.images.train.shape[1], args.latent)
        args.chosen = estimator(args)
    return args


def images(name: str, seed: int) -> Images:
    """Return standardised digits in random order."""
    rng = np.random.default_rng(seed)
    levels = {"digits": 17, "mnist": 256}[name]
    return spread(digit_images.shuffled(name, rng), levels, rng)


def spread(rows: np.ndarray, levels: int, rng: np.random.Generator) -> Images:
    """Spread grey levels over their steps, standardise, and hold the first sixth out.

    Without spreading, the density of discrete values is unbounded.
    """
    rows = np.asarray(rows, np.float32)
    rows = (rows * (levels - 1) + rng.uniform(size=rows.shape)) / levels
    cut = len(rows) // 6
    centre = rows[cut:].mean(0)
    # does not scale up pixels that are always dark
    scale = np.maximum(rows[cut:].std(0), 0.1)
    rows = ((rows - centre) / scale).astype(np.float32)
    side = math.isqrt(rows.shape[1])
    return Images(rows[cut:], rows[:cut], (side, side), centre, scale)


# -- the model -----------------------------------------------------------------------


def energy(p: dict[str, Array], v: Array, h: Array) -> Array:
    """Return the energy of the pixels' statistics x and x**2 and of the latents."""
    precision = jnp.exp(-p["log_variance"])
    x = v[..., 0]
    square = v[..., 1]
    pixels = precision @ (square / 2) - (precision * p["mean"]) @ x
    return pixels - (precision * x) @ p["weight"] @ (h - 0.5) - p["bias"] @ h


def declare(pixels: int, latent: int) -> FactorGraph:
    """Declare one factor over both blocks."""
    zero = {
        "mean": np.zeros(pixels),
        "log_variance": np.zeros(pixels),
        "weight": np.zeros((pixels, latent)),
        "bias": np.zeros(latent),
    }
    factor = Factor("v", "h", energy=energy, init=zero)
    return FactorGraph(
        {"v": Gaussian(pixels, variance="learned")}, {"h": Bernoulli(latent)}, [factor]
    )


def start(rows: np.ndarray, latent: int, seed: int) -> dict[str, Any]:
    """Return the data's means and variances, and small weights."""
    weight = (
        0.1
        * rows.std(0)[:, None]
        * jax.random.normal(jax.random.key(seed), (rows.shape[1], latent))
    )
    marginal = {
        "mean": jnp.asarray(rows.mean(0)),
        "log_variance": jnp.log(jnp.asarray(rows.var(0))),
    }
    return {"v:h": marginal | {"weight": weight, "bias": jnp.zeros(latent)}}


def estimator(args: argparse.Namespace) -> UCD | PCD:
    """Return the estimator that the options name."""
    if args.estimator == "ucd":
        return UCD(
            num_pairs=args.num_pairs, init="persistent", length=TargetCost(args.cost)
        )
    # a wrong step ends the program here
    moves = contrib.langevin_sweep(args.model, step_size=args.step_size)
    return PCD(
        num_chains=args.num_pairs, moves=moves if args.estimator == "langevin" else None
    )


# -- training and evaluation ---------------------------------------------------------


def train(args: argparse.Namespace) -> ebmpp.FitResult:
    """Train, with the exact likelihood as a monitor for few latents."""
    monitors = {}
    if args.latent <= _EXACT:
        for name in ("train", "held_out"):
            rows = jnp.asarray(getattr(args.images, name))
            monitors[f"log_likelihood_{name}"] = lambda p, rows=rows: (
                exact.log_likelihood(args.model, p, rows).mean()
            )
    return common.train(
        args.model,
        args.images.train,
        args,
        args.chosen,
        params=start(args.images.train, args.latent, args.seed),
        monitors=monitors,
    )


def gaussians(data: Images) -> dict[str, float]:
    """Return held-out log-likelihoods of one Gaussian without and with covariances, as
    baselines."""
    from scipy import stats

    centre = data.train.mean(0)
    spread = np.cov(data.train.T)
    spread[np.diag_indices_from(spread)] += 1e-3
    covariances = {
        "independent pixels": np.diag(np.diag(spread)),
        "one Gaussian": spread,
    }
    return {
        name: float(stats.multivariate_normal(centre, cov).logpdf(data.held_out).mean())
        for name, cov in covariances.items()
    }


def held_out(fit: ebmpp.FitResult, args: argparse.Namespace) -> str:
    """Return the mean log-likelihood of held-out images as text."""
    if args.latent <= _EXACT:
        return f"{float(fit.history.log_likelihood_held_out[-1]):.2f} per image, exact"
    ais = ebmpp.ais(
        fit.graph,
        fit.params,
        rng_key=jax.random.key(args.seed + 5),
        num_temperatures=5000,
    )
    value = (
        -fit.graph.free_energy(fit.params, {"v": args.images.held_out}).mean()
        - ais.log_partition
    )
    return f"{float(value):.2f} per image ({common.describe_ais(ais)})"


def sample(fit: ebmpp.FitResult, args: argparse.Namespace) -> dict[str, Any]:
    """Run chains from noise by both samplers."""
    kernels = {
        "Gibbs": ebmpp.BlockedGibbs(fit.graph),
        "Gibbs-Langevin": contrib.GibbsLangevin(fit.graph, args.step_size),
    }
    settings = {"warmup": _SWEEPS, "count": _CHAINS}
    return {
        n: common.chains(k, fit.params, args.seed + 1, **settings)
        for n, k in kernels.items()
    }


def relative_variance(mcmc: Any, moments: dict[str, Array]) -> str:
    """Describe the total variance of the draws relative to the exact one: 1 if the
    temperature is 1."""
    first, second = np.asarray(moments["v"]).T
    v = np.asarray(mcmc.get_samples()["v"], float)
    spread = ((v - first) ** 2).sum(1) / (second - first**2).sum()
    return (
        f"{spread.mean():.3f} of the exact variance (standard error "
        f"{spread.std() / len(v) ** 0.5:.3f})"
    )


# -- report --------------------------------------------------------------------------


def _samples(
    fit: ebmpp.FitResult, args: argparse.Namespace, runs: dict[str, Any]
) -> Any:
    data = args.images
    figure, axes = plt.subplots(2, 2, figsize=(9.4, 6.4), layout="constrained")
    rows = {"real images, held out": data.held_out[:_SHOWN]}
    for name, mcmc in runs.items():
        draws = {b: x[:_SHOWN] for b, x in mcmc.get_samples().items()}
        eta = fit.graph.natural_parameters(fit.params, draws, "v")
        rows[f"{name}: mean of v given h, {_SWEEPS} sweeps from noise"] = (
            fit.graph.families["v"].mode(eta)
        )
    rows["v of the last chains"] = draws["v"]
    grey = {title: data.grey(v) for title, v in rows.items()}
    common.panels(axes.flat, grey, data.shape, ncols=8)
    return figure


def _params(fit: ebmpp.FitResult, args: argparse.Namespace) -> Any:
    p = fit.params["v:h"]
    data = args.images
    figure, axes = plt.subplots(
        1, 2, figsize=(9, 4), layout="constrained", width_ratios=(3, 1)
    )
    weight = np.asarray(p["weight"]).T[:100] * data.scale
    ebmpp.plots.plot_units(
        weight, data.shape, ncols=8 if len(weight) <= 32 else 10, ax=axes[0]
    )
    axes[0].set_title("contribution of each latent to the mean", fontsize=10)
    deviation = np.exp(0.5 * np.asarray(p["log_variance"])) * data.scale
    image = axes[1].imshow(deviation.reshape(data.shape), cmap="magma", vmin=0)
    figure.colorbar(image, ax=axes[1], shrink=0.6)
    axes[1].set_title("standard deviation given h", fontsize=10)
    axes[1].axis("off")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Train, sample, compare, draw, save."""
    args = parse(argv)
    common.begin(args, args.model)
    common.print_row(
        "images",
        f"{len(args.images.train)} for training, {len(args.images.held_out)} held out",
    )
    fit = train(args)
    common.print_row("log-likelihood, held out", held_out(fit, args))
    baselines = gaussians(args.images)
    for name, value in baselines.items():
        common.print_row(name, f"{value:.2f} (held out)")
    runs = sample(fit, args)
    common.print_row(
        "Langevin acceptance",
        f"{float(runs['Gibbs-Langevin'].last_state.acceptance.mean()):.2f}",
    )
    if args.latent <= _EXACT:
        moments = exact.moments(fit.graph, fit.params)
        for name, mcmc in runs.items():
            common.print_row(f"{name} chains", relative_variance(mcmc, moments))
    figures = {
        "samples": _samples(fit, args, runs),
        "params": _params(fit, args),
        "learning_curve": common.plot_training(fit, baselines, also=["acceptance"]),
    }
    common.save_figures(args.out, figures)
    common.save(args.out / "samples.nc", runs["Gibbs-Langevin"])
    common.save(args.out / "history.nc", fit)


if __name__ == "__main__":
    main()
