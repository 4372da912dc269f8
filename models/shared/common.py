# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Parts that the programs share: options, training, chains, pictures, files and printed rows."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
import math
from pathlib import Path
import time
from typing import Any

from matplotlib import pyplot as plt
from numpyro.infer import MCMC

import jax
import optax

import ebmpp
from ebmpp import PCD, UCD, FactorGraph, Stage
from ebmpp.diagnostics import style
from ebmpp.errors import DivergenceError

plt.switch_backend("agg")  # pictures are written to files

_HISTORY = (
    "free_energy_gap",
    "gradient_norm",
    "meeting_time_mean",
    "meeting_time_max",
    "lag",
)


# -- options -------------------------------------------------------------------------


def options(description: str, out: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every program.

    :param description: the program's docstring, of which the first line is shown.
    :param out: the default folder.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path(out), help="folder for pictures and files")
    add("--no-progress", action="store_true", help="no progress bar")
    return parser


def training_options(
    parser: argparse.ArgumentParser,
    steps: int,
    rate: float | None,
    num_pairs: int = 100,
    batch_size: int = 100,
) -> None:
    """Add the options of a program that trains.

    :param rate: default; None if the program sets it later.
    """
    add = parser.add_argument
    add("--num-pairs", type=int, default=num_pairs, help="coupled pairs, or chains")
    add("--steps", type=int, default=steps, help="gradient steps")
    add("--batch-size", type=int, default=batch_size)
    add(
        "--rate",
        type=float,
        default=rate,
        help="first learning rate; it decays along a cosine",
    )


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    reader: Callable[[str, int], Any] | None = None,
    **least: int,
) -> argparse.Namespace:
    """Return the checked options; a number out of range ends the program.

    :param reader: function that reads ``args.images`` from ``--data`` and ``--seed``.
    :param least: smallest values; 1 for the training options.
    """
    args = parser.parse_args(argv)
    known = {name: 1 for name in ("num_pairs", "steps", "batch_size") if name in args}
    for name, value in (known | least).items():
        if getattr(args, name) < value:
            parser.error(
                f"--{name.replace('_', '-')} must be at least {value}, got {getattr(args, name)}."
            )
    if getattr(args, "rate", None) is not None and not (
        args.rate > 0 and math.isfinite(args.rate)
    ):
        parser.error(f"--rate must be a positive number, got {args.rate}.")
    if not (
        getattr(args, "decay", 0.0) >= 0 and math.isfinite(getattr(args, "decay", 0.0))
    ):
        parser.error(f"--decay must be a number of at least 0, got {args.decay}.")
    if reader is not None:
        with exit_on_error(parser):
            args.images = reader(args.data, args.seed)
    return args


@contextmanager
def exit_on_error(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End the program with the message of an error about data or settings."""
    try:
        yield
    except (OSError, ValueError) as error:
        parser.error(str(error))


# -- training and chains -------------------------------------------------------------


def begin(args: argparse.Namespace, graph: FactorGraph) -> None:
    """Create the output folder and print the graph."""
    args.out.mkdir(parents=True, exist_ok=True)
    print(graph)
    print_row("layers", str(graph.layers))


def pcd_or_ucd(args: argparse.Namespace, start: str = "data", **pcd: Any) -> PCD | UCD:
    """Return the estimator of ``--estimator`` with ``--num-pairs`` chains or pairs.

    :param start: where pairs of UCD start.
    :param pcd: further arguments of PCD.
    """
    if args.estimator == "ucd":
        return UCD(num_pairs=args.num_pairs, init=start)
    return PCD(num_chains=args.num_pairs, **pcd)


def cosine(args: argparse.Namespace, alpha: float = 0.02) -> optax.Schedule:
    """Return a learning rate that decays to ``alpha`` times the first."""
    return optax.cosine_decay_schedule(args.rate, args.steps, alpha=alpha)


def train(
    graph: FactorGraph,
    data: Any,
    args: argparse.Namespace,
    estimator: Any,
    optimizer: optax.GradientTransformation | None = None,
    last: Sequence[Stage] = (),
    **others: Any,
) -> ebmpp.FitResult:
    """Train by the options and print the time; a training that diverges ends the program.

    :param optimizer: default: Adam at a decaying rate.
    :param last: final stages.
    :param others: further arguments of :func:`ebmpp.fit`.
    """
    optimizer = optax.adam(cosine(args)) if optimizer is None else optimizer
    first = {"num_steps": args.steps, "estimator": estimator, "optimizer": optimizer}
    stages = {"schedule": [Stage(**first), *last]} if last else first
    settings = {"batch_size": args.batch_size, "progress_bar": not args.no_progress}
    if "monitors" in others:
        settings["monitor_every"] = max(1, args.steps // 25)
    start = time.monotonic()
    try:
        fit = ebmpp.fit(
            graph,
            data,
            rng_key=jax.random.key(args.seed),
            **stages,
            **settings | others,
        )
    except DivergenceError as error:
        raise SystemExit(str(error)) from error
    jax.block_until_ready(fit.params)
    steps = " and ".join(
        f"{s.num_steps} steps of {s.estimator!r}" for s in (Stage(**first), *last)
    )
    print_row("training", f"{steps} in {time.monotonic() - start:.0f} s")
    return fit


def chains(
    kernel: Any,
    params: Any,
    seed: int,
    *,
    warmup: int,
    samples: int = 1,
    count: int = 1,
    init: Any = None,
    thinning: int = 1,
    progress_bar: bool = False,
    **clamped: Any,
) -> MCMC:
    """Run chains.

    :param warmup: sweeps that are dropped.
    :param samples: sweeps after these.
    :param count: number of chains; one chain takes all rows of clamped blocks.
    :param init: first states; default: independent draws, without help from the data.
    :param thinning: one in ``thinning`` of ``samples`` is kept.
    :param clamped: clamped blocks or units.
    """
    mcmc = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=samples,
        num_chains=count,
        thinning=thinning,
        chain_method="vectorized",
        progress_bar=progress_bar,
    )
    mcmc.run(jax.random.key(seed), params, init_params=init, **clamped)
    return mcmc


# -- pictures, files and printed rows ------------------------------------------------


def print_row(name: str, value: str) -> None:
    """Print a row of the report."""
    print(f"{name:<26}{value}", flush=True)


def describe_ais(ais: Any) -> str:
    """Return the standard error and the effective particles of log Z as text."""
    error = ais.standard_error
    effective = ais.effective_sample_size
    return (
        f"+- {error:.2f} of log Z by AIS, {effective:.0f} of {len(ais.log_weights)} "
        "particles effective"
    )


def panels(
    axes: Any, images: Mapping[str, Any], *shape: Any, fontsize: int = 10, **grid: Any
) -> None:
    """Draw grids of images, one per title.

    :param axes: one per title.
    :param images: images by title.
    :param shape: shape of one image, if images are rows of pixels.
    :param grid: further arguments of :func:`ebmpp.plots.plot_units`.
    """
    for ax, (title, rows) in zip(axes, images.items(), strict=True):
        ebmpp.plots.plot_units(rows, *shape, ax=ax, **grid)
        ax.set_title(title, fontsize=fontsize)


def plot_training(
    fit: ebmpp.FitResult,
    baselines: Mapping[str, float] | None = None,
    also: Sequence[str] = (),
) -> Any:
    """Draw the history of training: exact likelihoods if they were monitored, norms and
    meeting times.

    :param baselines: likelihoods to compare with.
    :param also: further columns of the history, if it has them.
    """
    history = fit.history
    is_exact = "log_likelihood_train" in fit.history
    columns = history[[name for name in (*_HISTORY, *also) if name in history]]
    count = len(ebmpp.plots.panels("history", columns)[1]) + is_exact
    figure, axes = plt.subplots(
        1, count, figsize=(3.8 * count, 3.1), layout="constrained", squeeze=False
    )
    ebmpp.plots.plot_history(columns, axes=axes[0, is_exact:])
    if is_exact:
        ax = axes[0, 0]
        for index, (name, label) in enumerate(
            (("train", "training"), ("held_out", "held out"))
        ):
            curve = history[f"log_likelihood_{name}"]
            ax.plot(
                history.monitor_step,
                curve,
                label=label,
                linewidth=1.6,
                **style.look(index),
            )
        for index, (name, value) in enumerate((baselines or {}).items()):
            ax.axhline(
                value,
                color=style.INK,
                linestyle=style.dashes(2 + index),
                linewidth=1,
                label=name,
            )
        ax.set(xlabel="step", ylabel="exact log-likelihood per image (nats)")
        style.tidy(ax, legend=True, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return figure


def save_figures(out: Path, figures: Mapping[str, Any]) -> None:
    """Write each figure as a PNG file."""
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=130, bbox_inches="tight")
        plt.close(figure)
        print(f"wrote {out / name}.png")


def save(path: Path, source: Any) -> None:
    """Write a fit, chains, or a DataTree as a netCDF file."""
    tree = source if hasattr(source, "to_netcdf") else ebmpp.to_datatree(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree.to_netcdf(path, engine="h5netcdf")
    print(f"wrote {path}")


def save_model(path: Path, graph: FactorGraph, params: Any) -> None:
    """Write a graph and its params."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ebmpp.save(path, graph, params)
    print(f"wrote {path}")
