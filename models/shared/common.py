# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What the programs here share: options, a course of training, chains, pictures, and what they print."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
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
from ebmpp import FactorGraph, Stage
from ebmpp.diagnostics import style
from ebmpp.errors import DivergenceError

plt.switch_backend("agg")  # pictures are files: nobody looks at a window

_COURSE = ("free_energy_gap", "gradient_norm", "meeting_time_mean", "meeting_time_max", "lag")


# -- options -------------------------------------------------------------------------------------


def options(description: str, out: str) -> argparse.ArgumentParser:
    """The options of every program.

    :param description: its docstring, of which the first line is shown.
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
    """The options of a program that trains, with its defaults; one without a rate sets it later."""
    add = parser.add_argument
    add("--num-pairs", type=int, default=num_pairs, help="coupled pairs, or chains")
    add("--steps", type=int, default=steps, help="gradient steps")
    add("--batch-size", type=int, default=batch_size)
    add("--rate", type=float, default=rate, help="first learning rate; it decays along a cosine")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, **least: int) -> argparse.Namespace:
    """The options, checked; a message for a number out of range ends the program.

    :param least: the smallest value of some, 1 for those of training.
    """
    args = parser.parse_args(argv)
    known = {name: 1 for name in ("num_pairs", "steps", "batch_size") if name in args}
    for name, value in (known | least).items():
        if getattr(args, name) < value:
            parser.error(f"--{name.replace('_', '-')} is at least {value}, not {getattr(args, name)}")
    if getattr(args, "rate", None) is not None and not (args.rate > 0 and math.isfinite(args.rate)):
        parser.error(f"--rate is a positive number, not {args.rate}")
    if not (getattr(args, "decay", 0.0) >= 0 and math.isfinite(getattr(args, "decay", 0.0))):
        parser.error(f"--decay is a number of at least 0, not {args.decay}")
    return args


@contextmanager
def refusals(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Data that cannot be read and settings that cannot be had end the program with their message."""
    try:
        yield
    except (OSError, ValueError) as error:
        parser.error(str(error))


# -- training and chains -------------------------------------------------------------------------


def begin(args: argparse.Namespace, graph: FactorGraph) -> None:
    """The folder, before time is spent, and what is trained."""
    args.out.mkdir(parents=True, exist_ok=True)
    print(graph)
    tell("layers", str(graph.layers))


def cosine(args: argparse.Namespace, alpha: float = 0.02) -> optax.Schedule:
    """A learning rate that decays to ``alpha`` times the first."""
    return optax.cosine_decay_schedule(args.rate, args.steps, alpha=alpha)


def train(
    graph: FactorGraph,
    data: Any,
    args: argparse.Namespace,
    estimator: Any,
    optimizer: optax.GradientTransformation | None = None,
    last: Sequence[Stage] = (),
    **others: Any,
) -> ebmpp.Fit:
    """Train as the options say; tells how long it took, and ends the program where training fails.

    :param optimizer: Adam at a decaying rate, by default.
    :param last: stages to end with.
    :param others: more arguments of :func:`ebmpp.fit`.
    """
    optimizer = optax.adam(cosine(args)) if optimizer is None else optimizer
    first = {"num_steps": args.steps, "estimator": estimator, "optimizer": optimizer}
    stages = {"schedule": [Stage(**first), *last]} if last else first
    settings = {"batch_size": args.batch_size, "progress_bar": not args.no_progress}
    if "monitors" in others:
        settings["monitor_every"] = max(1, args.steps // 25)
    begin = time.monotonic()
    try:
        fit = ebmpp.fit(graph, data, rng_key=jax.random.key(args.seed), **stages, **settings | others)
    except DivergenceError as error:
        raise SystemExit(str(error)) from error
    jax.block_until_ready(fit.params)
    steps = " and ".join(f"{s.num_steps} steps of {s.estimator!r}" for s in (Stage(**first), *last))
    tell("training", f"{steps} in {time.monotonic() - begin:.0f} s")
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
    """Chains that have been run.

    :param warmup: sweeps that are dropped.
    :param samples: sweeps after these.
    :param count: how many chains; one takes all rows of clamped blocks.
    :param init: their first states; by default independent draws, so that nothing of the data helps them.
    :param thinning: every so many of ``samples`` are kept.
    :param clamped: blocks, or units, that are held.
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


# -- what is drawn, written and told -------------------------------------------------------------


def tell(name: str, value: str) -> None:
    """Print a line of the report."""
    print(f"{name:<26}{value}", flush=True)


def panels(axes: Any, shown: Mapping[str, Any], *shape: Any, fontsize: int = 10, **grid: Any) -> None:
    """Images in grids, one a title.

    :param axes: as many as there are titles.
    :param shown: images by title.
    :param shape: of one image, where they are rows of pixels.
    :param grid: more arguments of :func:`ebmpp.plots.plot_units`.
    """
    for ax, (title, images) in zip(axes, shown.items(), strict=True):
        ebmpp.plots.plot_units(images, *shape, ax=ax, **grid)
        ax.set_title(title, fontsize=fontsize)


def course(fit: ebmpp.Fit, baselines: Mapping[str, float] | None = None, also: Sequence[str] = ()) -> Any:
    """The course of training: exact likelihoods where they were followed, norms and meeting times.

    :param baselines: likelihoods to compare with.
    :param also: more of the history, where it has that.
    """
    history, exactly = fit.history, "log_likelihood_train" in fit.history
    followed = history[[name for name in (*_COURSE, *also) if name in history]]
    count = len(ebmpp.plots.panels(followed)) + exactly
    figure, axes = plt.subplots(1, count, figsize=(3.8 * count, 3.1), layout="constrained", squeeze=False)
    ebmpp.plots.plot_history(followed, axes=axes[0, exactly:])
    if exactly:
        ax = axes[0, 0]
        for index, (name, label) in enumerate((("train", "training"), ("held_out", "held out"))):
            curve = history[f"log_likelihood_{name}"]
            ax.plot(history.monitor_step, curve, label=label, linewidth=1.6, **style.look(index))
        for index, (name, value) in enumerate((baselines or {}).items()):
            ax.axhline(value, color=style.INK, linestyle=style.dashes(2 + index), linewidth=1, label=name)
        ax.set(xlabel="step", ylabel="exact log-likelihood an image (nats)")
        style.tidy(ax, legend=True, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return figure


def save_figures(out: Path, figures: Mapping[str, Any]) -> None:
    """Each figure as a PNG."""
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=130, bbox_inches="tight")
        plt.close(figure)
        print(f"wrote {out / name}.png")


def save(path: Path, source: Any) -> None:
    """A fit, chains, or what has been made of such for ArviZ, as a netCDF file."""
    tree = source if hasattr(source, "to_netcdf") else ebmpp.to_datatree(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree.to_netcdf(path, engine="h5netcdf")
    print(f"wrote {path}")


def save_model(path: Path, graph: FactorGraph, params: Any) -> None:
    """A declaration and its params."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ebmpp.save(path, graph, params)
    print(f"wrote {path}")
