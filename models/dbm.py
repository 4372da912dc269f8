# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A deep Boltzmann machine on handwritten digits, trained end to end, without pretraining.

``python models/dbm.py --out dbm`` trains on scikit-learn's digits;
``--data mnist --sides 500 500`` is the size of the literature, and
``--sides 100 100 100`` adds a layer. Four estimators: ``lmi`` (pairs from local modes,
the default), ``ucd`` (coupled Gibbs chains that start at persistent ones, centered
steps), ``pcd`` (persistent chains, mean-field posterior: the classical baseline) and
``centered`` (``pcd`` in centered steps). It writes samples, completions of half images,
the history of training, and an ArviZ file. ``--grey`` encodes each pixel as eight
binary digits instead of two levels.

``--recipe likelihood --data mnist`` trains for likelihood: centered steps with a
mean-field posterior, 384 chains and 384 rows drawn from their intensities, one in ten
shifted by a pixel; a rate that rises to 0.16 within a twentieth of the steps and falls
linearly to 0, three tenths of it above the first latent layer; momentum 0.5 and a
weight decay of 1.5e-4. The model is the mean of the last tenth of the iterates and is
saved as ``dbm.ebmpp``. No pretraining is needed. At one rate for all layers the upper
ones freeze within the first thousands of steps. The program reports the mean-field
bound of held-out rows minus log Z by particle systems, and estimates the bound's gap by
weighted draws of the latents of some rows.

Units are -1 and 1, so that gradients do not vanish for either value. The two centered
estimators have units of 0 and 1 minus their means, which works better where four in
five pixels are dark.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import json
import math
from typing import Any, NamedTuple
import warnings

from matplotlib import pyplot as plt
import numpy as np

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, FactorGraph, Family, Observed, Spin
from ebmpp.contrib import LocalModeUCD
from ebmpp.estimators import Centered, Estimator, MeanField, Quantile, TargetCost
from shared import common, digit_images, rbm_likelihood

_DEEPEST = 4
_SHOWN = 40
_COLUMNS = 10
_HELD_OUT = _COLUMNS * 2  # images that are completed
_RATES = {"lmi": 0.004, "pcd": 0.004, "ucd": 0.02, "centered": 0.05}
_CENTERED = ("ucd", "centered")
_LIKELIHOOD = {
    "estimator": "centered",
    "sides": (500, 500),
    "num_pairs": 384,
    "batch_size": 384,
    "steps": 50_000,
    "rate": 0.16,
}
# factor of the rate above the first latent layer; share of steps in which it rises
_UPPER = 0.3
_WARM = 0.05
_MEAN_FIELD = 5  # passes
# of the rungs of particle systems
_CESS_THRESHOLD = 0.98
_SWEEPS = 20
# for the gap of the mean-field bound
_DRAWS = 500
_ROWS = 2000


class Images(NamedTuple):
    """Images as rows of units of a family."""

    train: np.ndarray
    held_out: np.ndarray
    shape: tuple[int, int]
    grey: bool
    family: type[Family]
    rows: digit_images.Rows | None = None
    """Rows of the recipe likelihood, with the intensities that training rows are drawn from."""

    @property
    def dark(self) -> float:
        """The lower of a unit's two values."""
        return -1.0 if self.family is Spin else 0.0

    def intensities(self, v: Any) -> np.ndarray:
        """Return rows of means or states as images in [0, 1]."""
        v = np.asarray(v)
        if not self.grey:
            return (v - self.dark) / (1 - self.dark)
        return ebmpp.data.decode_bits(
            v.reshape(len(v), -1, 8), spin=self.family is Spin
        )


# -- options and data ----------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    parser = common.options(__doc__, "dbm")
    common.training_options(parser, steps=4000, rate=None)
    digit_images.option(parser)
    add = parser.add_argument
    add("--grey", action="store_true", help="eight binary digits per pixel")
    add(
        "--sides",
        type=int,
        nargs="+",
        default=(100, 100),
        help=f"units of one to {_DEEPEST} latent layers",
    )
    add("--estimator", choices=tuple(_RATES), default="lmi")
    add(
        "--cost",
        type=float,
        help="sweeps per pair of ucd on average; default: until they meet",
    )
    add("--checkpoint-dir", help="folder of checkpoints, from which a run continues")
    add(
        "--recipe",
        choices=("demo", "likelihood"),
        default="demo",
        help="likelihood sets other defaults",
    )
    add(
        "--particles",
        type=int,
        default=1000,
        help="particles that estimate log Z, with the recipe",
    )
    add(
        "--decay",
        type=float,
        default=rbm_likelihood.DECAY,
        help="weight decay of the recipe, before the rate",
    )
    if parser.parse_known_args(argv)[0].recipe == "likelihood":
        parser.set_defaults(**_LIKELIHOOD)
    args = common.parse(parser, argv, particles=20)
    if args.recipe == "likelihood" and (args.grey or args.estimator not in _CENTERED):
        parser.error(
            "--recipe likelihood must have two levels, without --grey, and a centered --estimator."
        )
    if len(args.sides) > _DEEPEST or min(args.sides) < 1:
        parser.error(
            f"--sides must be one to {_DEEPEST} positive numbers, got {list(args.sides)}."
        )
    if args.cost is not None and not args.cost > 1:
        parser.error(f"--cost must be above 1, got {args.cost}.")
    args.rate = args.rate or _RATES[args.estimator]
    with common.exit_on_error(parser):
        family = Bernoulli if args.estimator in _CENTERED else Spin
        if args.recipe == "likelihood":
            args.images = bernoulli_images(args)
        else:
            args.images = images(args.data, args.grey, args.seed, family)
    return args


def bernoulli_images(args: argparse.Namespace) -> Images:
    """Digits whose pixels are drawn with their intensities as probabilities; one in six
    is held out."""
    rows = digit_images.read(args.data, None, "bernoulli", args.seed)
    return Images(rows.train, rows.held_out, rows.shape, False, Bernoulli, rows)


def images(name: str, grey: bool, seed: int, family: type[Family] = Spin) -> Images:
    """Return digits as spins or as units of 0 and 1, some held out."""
    rows = digit_images.shuffled(name, np.random.default_rng(seed))
    side = math.isqrt(rows.shape[1])
    units = (
        ebmpp.data.encode_bits(rows).reshape(len(rows), -1)
        if grey
        else ebmpp.data.binarize(rows)
    )
    if family is Spin:
        units = 2 * units - 1
    return Images(units[_HELD_OUT:], units[:_HELD_OUT], (side, side), grey, family)


# -- the model and its training ------------------------------------------------------


def declare(
    visible: int, sides: Sequence[int], family: type[Family] = Spin
) -> FactorGraph:
    """Declare layers of two-valued units, all of one family."""
    return ebmpp.layered(
        v=family(visible), **{f"h{i}": family(side) for i, side in enumerate(sides, 1)}
    )


def estimator(args: argparse.Namespace) -> Estimator:
    """Return the estimator that the options name."""
    if args.estimator == "lmi":
        return LocalModeUCD(num_pairs=args.num_pairs)
    rates = {}
    if args.recipe == "likelihood":
        upper = [f"h{i}" for i in range(2, len(args.sides) + 1)]
        upper += [f"h{i}:h{i + 1}" for i in range(1, len(args.sides))]
        rates = dict.fromkeys(upper, _UPPER)
    if args.estimator == "ucd":
        pairs = {
            "num_pairs": args.num_pairs,
            "start": "persistent",
            "marginalize": "layers",
        }
        length = Quantile(0.9) if args.cost is None else TargetCost(args.cost)
        return Centered(UCD(length=length, **pairs), rates=rates)
    pcd = PCD(num_chains=args.num_pairs, posterior=MeanField(_MEAN_FIELD))
    return Centered(pcd, rates=rates) if args.estimator == "centered" else pcd


def train(dbm: FactorGraph, args: argparse.Namespace) -> ebmpp.FitResult:
    """Train by plain gradient steps at a decaying rate, or by the recipe."""
    rows = args.images.rows
    if rows is not None and rows.grey is not None:
        fit = common.train(
            dbm,
            digit_images.batches(rows.grey, args.batch_size, args.seed, rows.shape),
            args,
            estimator(args),
            rbm_likelihood.optimizer(args.rate, args.steps, _WARM, args.decay),
            checkpoint_dir=args.checkpoint_dir,
            resume=args.checkpoint_dir is not None,
        )
        return dataclasses.replace(
            fit, params=ebmpp.optimizers.averaged_params(fit.optimizer_state)
        )
    return common.train(
        dbm,
        args.images.train,
        args,
        estimator(args),
        optax.sgd(common.cosine(args, alpha=0.04)),
        init_scheme="orthogonal" if args.estimator == "lmi" else "gaussian",
        checkpoint_dir=args.checkpoint_dir,
        resume=args.checkpoint_dir is not None,
    )


# -- samples and report --------------------------------------------------------------


def sample(
    dbm: FactorGraph, params: Any, seed: int, sweeps: int
) -> dict[str, jax.Array]:
    """Return states some sweeps away from local modes that are found from noise."""
    key = jax.random.key(seed + 1)
    modes = ebmpp.local_search(dbm, params, rng_key=key, num_rows=_SHOWN).state
    if not sweeps:
        return modes
    run = common.chains(
        ebmpp.BlockedGibbs(dbm),
        params,
        seed + 1,
        warmup=sweeps - 1,
        count=_SHOWN,
        init=modes,
    )
    return run.get_samples()


def complete(
    dbm: FactorGraph, params: Any, data: Images, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return upper halves of held-out images, and their completions by local search."""
    rows = jnp.asarray(data.held_out[:_HELD_OUT])
    width = rows.shape[1]
    known = jnp.arange(width) < width // 2
    halves = jnp.where(known, rows, data.dark)
    modes = ebmpp.local_search(
        dbm, params, rng_key=jax.random.key(seed + 2), v=Observed(rows, known)
    )
    mean = dbm.mean(params, modes.state, "v")
    return data.intensities(halves), data.intensities(jnp.where(known, rows, mean))


def _samples(dbm: FactorGraph, fit: ebmpp.FitResult, args: argparse.Namespace) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.2), layout="constrained")
    images = {"real images": args.images.intensities(args.images.train[:_SHOWN])}
    for sweeps, origin in (
        (0, "local modes from noise"),
        (100, "after 100 Gibbs sweeps"),
    ):
        name = f"{origin}: means given the latents"
        state = sample(dbm, fit.params, args.seed, sweeps)
        images[name] = args.images.intensities(dbm.mean(fit.params, state, "v"))
    common.panels(axes, images, args.images.shape, ncols=_COLUMNS)
    return figure


def _completions(
    dbm: FactorGraph, fit: ebmpp.FitResult, args: argparse.Namespace
) -> Any:
    halves, completed = complete(dbm, fit.params, args.images, args.seed)
    truth = args.images.intensities(args.images.held_out[:_HELD_OUT])
    figure, axes = plt.subplots(3, 1, figsize=(7, 5), layout="constrained")
    title = "completed: means given the latents of a local mode"
    images = {"held out": truth, "given": halves, title: completed}
    common.panels(axes, images, args.images.shape, ncols=_COLUMNS)
    return figure


def report(fit: ebmpp.FitResult) -> None:
    """Print meeting times of the last steps."""
    last = fit.history.isel(step=slice(-100, None)).mean()
    for phase, name in (("", "model"), ("posterior_", "posterior")):
        value = {
            n.removeprefix(phase): float(last[n]) for n in last if n.startswith(phase)
        }
        if "meeting_time_mean" in value:
            text = f"mean {value['meeting_time_mean']:.1f}, lag {value['lag']:.0f}, "
            text += f"corrected {value['corrected']:.3g} of the pairs"
            if "acceptance" in value:
                text += f", accepted {value['acceptance']:.3g} of the proposals"
            common.print_row(f"meeting times, {name}", text)


def report_bound(dbm: FactorGraph, params: Any, args: argparse.Namespace) -> None:
    """Save the model, and print lower bounds of its rows' log-likelihood."""
    common.save_model(args.out / "dbm.ebmpp", dbm, params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the effective sample size is reported
        system = ebmpp.smc(
            dbm,
            params,
            rng_key=jax.random.key(args.seed + 5),
            num_particles=args.particles,
            cess_threshold=_CESS_THRESHOLD,
            num_sweeps=_SWEEPS,
            data=args.images.train,
            progress_bar=not args.no_progress,
        )
    held_out = args.images.held_out
    parts = {"held out": held_out, "training rows": args.images.train[: len(held_out)]}
    bound = {
        n: np.asarray(ebmpp.evaluate.mean_field_bound(dbm, params, rows))
        for n, rows in parts.items()
    }
    values = {n: float(b.mean()) - system.log_partition for n, b in bound.items()}
    gap, error = _gap(dbm, params, held_out[:_ROWS], args.seed + 6)
    common.print_row("likelihoods are of", args.images.rows.origin)
    common.print_row("log Z", repr(system))
    common.print_row(
        "log-likelihood, at least",
        ", ".join(f"{value:.2f} {name}" for name, value in values.items())
        + f" (mean field; +- {system.standard_error:.2f} from log Z, +- "
        f"{bound['held out'].std() / math.sqrt(len(held_out)):.2f} from the rows)",
    )
    common.print_row(
        "log-likelihood, held out",
        f"{values['held out'] + gap:.2f} (the bound is {gap:.3f} +- {error:.3f} below "
        f"by {_DRAWS} weighted draws of each of {min(_ROWS, len(held_out))} rows)",
    )
    numbers = {
        "log_partition": system.log_partition,
        "standard_error": system.standard_error,
    } | values
    numbers |= {"gap": gap, "gap_error": error}
    numbers |= {
        "log_z": system.log_z.tolist(),
        "rungs": system.num_rungs,
        "origin": args.images.rows.origin,
    }
    (args.out / "dbm_likelihood.json").write_text(json.dumps(numbers, indent=1) + "\n")


def _gap(
    dbm: FactorGraph, params: Any, rows: np.ndarray, seed: int
) -> tuple[float, float]:
    """Return the mean gap between the mean-field bound and one by weighted draws, and
    its standard error."""
    draws = {"num_draws": _DRAWS, "rng_key": jax.random.key(seed)}
    near, far = (
        ebmpp.evaluate.mean_field_bound(dbm, params, rows, **d) for d in (draws, {})
    )
    gap = np.asarray(near, float) - np.asarray(far, float)
    return float(gap.mean()), float(gap.std(ddof=1) / math.sqrt(len(gap)))


def main(argv: Sequence[str] | None = None) -> None:
    """Train, draw, save."""
    args = parse(argv)
    dbm = declare(args.images.train.shape[1], args.sides, args.images.family)
    common.begin(args, dbm)
    common.print_row(
        "images", f"{len(args.images.train)} of {args.images.train.shape[1]} units"
    )
    fit = train(dbm, args)
    report(fit)
    if args.images.rows is not None:
        report_bound(dbm, fit.params, args)
    figures = {
        "samples": _samples(dbm, fit, args),
        "completions": _completions(dbm, fit, args),
        "history": common.plot_training(fit, also=("corrected", "acceptance")),
    }
    common.save_figures(args.out, figures)
    common.save(args.out / "history.nc", fit)


if __name__ == "__main__":
    main()
