# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What several models' programs share: options, pictures, and a report."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpyro.infer import MCMC

import jax
import optax

import ebmpp
from ebmpp.errors import DivergenceError


def options(description: str, out: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every program has."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--num-pairs", type=int, default=100, help="coupled pairs, or persistent chains")
    add("--steps", type=int, help="gradient steps")
    add("--batch-size", type=int, default=100)
    add("--rate", type=float, help="Adam's first learning rate; it decays along a cosine")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path(out), help="folder for pictures and files")
    add("--no-progress", action="store_true", help="no progress bar")
    parser.set_defaults(**defaults)
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, *counts: str) -> None:
    """End with a message for a number out of range."""
    for name in ("num_pairs", "steps", "batch_size", *counts):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1, not {getattr(args, name)}")
    if not 0 < args.rate < float("inf"):
        parser.error(f"--rate is a positive number, not {args.rate}")


def train(graph: ebmpp.FactorGraph, data: Any, args: argparse.Namespace, **others: Any) -> ebmpp.Fit:
    """Adam under a decaying rate."""
    try:
        return ebmpp.fit(
            graph,
            data,
            optimizer=optax.adam(optax.cosine_decay_schedule(args.rate, args.steps, alpha=0.02)),
            num_steps=args.steps,
            rng_key=jax.random.key(args.seed),
            monitor_every=max(1, args.steps // 25),
            progress_bar=not args.no_progress,
            **others,
        )
    except DivergenceError as error:
        raise SystemExit(str(error)) from error


def chains(kernel: Any, params: Any, key: jax.Array, sweeps: int, count: int, draws: int = 1) -> MCMC:
    """Independent chains from initial draws: nothing of the data helps them."""
    mcmc = MCMC(
        kernel,
        num_warmup=sweeps,
        num_samples=draws,
        num_chains=count,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(key, params)
    return mcmc


def save_figures(out: Path, makers: Mapping[str, Callable[[], Any]]) -> list[Path]:
    """Each figure as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    written = []
    for name, make in makers.items():
        figure = make()
        written.append(out / f"{name}.png")
        figure.savefig(written[-1], dpi=130, bbox_inches="tight")
        matplotlib.pyplot.close(figure)
    return written


def report(lines: Mapping[str, str], written: list[Path]) -> str:
    """The numbers, a line each, and what was written."""
    width = max(map(len, lines))
    told = [f"{name:<{width}}  {value}" for name, value in lines.items()]
    return "\n".join([*told, *(f"wrote {path}" for path in written)])
