# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What several programs here share: options, handwritten digits, a course of training, and files."""

import argparse
from collections.abc import Mapping, Sequence
import math
from pathlib import Path
import time
from typing import Any, NamedTuple

import numpy as np
from numpyro.infer import MCMC

import jax
import optax

import ebmpp
from ebmpp import FactorGraph, Stage
from ebmpp.errors import DivergenceError


class Images(NamedTuple):
    """Binary images of shape ``(rows, side, side)`` and the digits that they show."""

    train: np.ndarray
    train_labels: np.ndarray
    held_out: np.ndarray
    held_out_labels: np.ndarray


def options(description: str, num_steps: int, rate: float) -> argparse.ArgumentParser:
    """The options of every program; each adds its own."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--data", choices=("digits", "mnist"), default="digits", help="mnist is read from EBMPP_DATA_DIR")
    add("--num-steps", type=int, default=num_steps)
    add("--batch-size", type=int, default=100)
    add("--num-chains", type=int, default=100, help="chains, or coupled pairs of them")
    add("--rate", type=float, default=rate, help="Adam's first learning rate; it decays along a cosine")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("demo"), help="folder for pictures and files")
    add("--no-progress", action="store_true", help="no progress bar")
    return parser


def checked(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, *positive: str
) -> argparse.Namespace:
    """The options; those named ``positive`` are at least 1, among others. ``images`` is added."""
    args = parser.parse_args(argv)
    for name in ("num_steps", "batch_size", "num_chains", *positive):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1, not {getattr(args, name)}")
    if not (args.rate > 0 and math.isfinite(args.rate)):
        parser.error(f"--rate is a positive number, not {args.rate}")
    try:
        args.images = images(args.data, args.seed)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def images(name: str, seed: int) -> Images:
    """Digits in two levels, one in six held out."""
    pixels, labels = (ebmpp.data.digits if name == "digits" else ebmpp.data.mnist)(labels=True)
    order = np.random.default_rng(seed).permutation(len(pixels))
    side = math.isqrt(pixels.shape[1])
    rows, labels = ebmpp.data.binarize(pixels)[order].reshape(-1, side, side), labels[order]
    held_out = -(-len(rows) // 6)
    return Images(rows[held_out:], labels[held_out:], rows[:held_out], labels[:held_out])


def train(
    graph: FactorGraph,
    data: Any,
    args: argparse.Namespace,
    estimator: Any,
    last: Sequence[Stage] = (),
    **others: Any,
) -> ebmpp.Fit:
    """Adam at a decaying rate; prints how long it took, and ends the program where training fails.

    :param last: stages to end with.
    :param others: more arguments of :func:`ebmpp.fit`.
    """
    begin = time.monotonic()
    optimizer = optax.adam(optax.cosine_decay_schedule(args.rate, args.num_steps, alpha=0.02))
    first = Stage(num_steps=args.num_steps, estimator=estimator, optimizer=optimizer)
    try:
        fit = ebmpp.fit(
            graph,
            data,
            schedule=[first, *last],
            batch_size=args.batch_size,
            rng_key=jax.random.key(args.seed),
            progress_bar=not args.no_progress,
            **others,
        )
    except DivergenceError as error:
        raise SystemExit(str(error)) from error
    jax.block_until_ready(fit.params)
    steps = " and ".join(f"{s.num_steps} of {s.estimator!r}" for s in (first, *last))
    print(f"training                  {steps}, in {time.monotonic() - begin:.0f} s")
    return fit


def chains(
    graph: FactorGraph, params: Any, count: int, sweeps: int, seed: int, **clamped: jax.Array
) -> dict[str, jax.Array]:
    """States of ``count`` chains, ``sweeps`` sweeps from noise.

    :param clamped: blocks that are held, ``count`` rows each.
    :return: the other blocks.
    """
    mcmc = MCMC(
        ebmpp.BlockedGibbs(graph),
        num_warmup=sweeps - 1,
        num_samples=1,
        num_chains=1 if clamped else count,  # a chain takes all clamped rows
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed + 1), params, **clamped)
    drawn = mcmc.get_samples(group_by_chain=True)
    return {b: v[0, 0] if clamped else v[:, 0] for b, v in drawn.items()}


def save_figures(figures: Mapping[str, Any], folder: Path) -> None:
    """Figures as PNG."""
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=130, bbox_inches="tight")
        plt.close(figure)
        print(f"wrote {folder / name}.png")


def save(figures: Mapping[str, Any], fit: ebmpp.Fit, folder: Path) -> None:
    """Figures as PNG and the course of training as a netCDF file for ArviZ."""
    save_figures(figures, folder)
    ebmpp.to_datatree(fit).to_netcdf(folder / "history.nc", engine="h5netcdf")
    print(f"wrote {folder / 'history.nc'}")
