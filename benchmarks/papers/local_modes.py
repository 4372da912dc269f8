# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""UCD-LMI and its parts: the exact log-likelihood of a small deep machine on digits.

A 64-12-12 deep Boltzmann machine on scikit-learn's 8x8 digits, small enough that the
log-likelihood of held-out rows is exact. UCD-LMI is trained as published, and without
its units of -1 and 1, its summed-out layers, its orthogonal start, or its correction
(every proposal is rejected, so that every pair meets at once: the "biased gradient" of
the paper's table). Beside it stand UCD by coupled Gibbs chains and PCD with a
mean-field posterior. The paper's ablation is by Frechet distances of images from models
of 6272 units per layer.

**References**

1. Taniguchi et al. (2023), *End-to-end training of deep Boltzmann machines by unbiased
   contrastive divergence with local mode initialization*, table 2.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import time
from typing import Any, NamedTuple

import datasets
from following import by_method
import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row

import jax
from jax import Array
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, Spin
from ebmpp.contrib import LocalModeUCD, Metropolis
from ebmpp.estimators import Estimator, MeanField, TargetCost
from ebmpp.estimators.phases import Phase
from ebmpp.moves import Move
from ebmpp.moves.target import Target
from ebmpp.training import monitors

_HELD_OUT = 300
#: A Bernoulli unit is (1 + spin) / 2: its weights are four times as large and take 16
#: times the rate.
_BERNOULLI_RATE = 16
_TICKS = (-20, -22, -25, -30, -50, -100, -300, -1000)


@dataclasses.dataclass(frozen=True)
class Rejected(Metropolis):
    """A proposal that no chain accepts."""

    def _propose(self, target: Target, keys: Array) -> tuple[dict[str, Array], Array]:
        proposal, log_u = super()._propose(target, keys)
        return proposal, jnp.full_like(log_u, jnp.inf)


@dataclasses.dataclass(frozen=True, repr=False)
class Uncorrected(LocalModeUCD):
    """UCD-LMI whose pairs, of the model and of the posterior, meet at once: the
    gradient at their starts."""

    def _phase(
        self, target: Target, start: Any, moves: tuple[Move, ...], *rest: Any
    ) -> Phase:
        return super()._phase(
            target, start, tuple(Rejected(move.blocks) for move in moves), *rest
        )


class Variant(NamedTuple):
    """A way to train."""

    label: str
    estimator: Estimator
    spins: bool = True
    scheme: str = "orthogonal"


_GIBBS = UCD(init="persistent", length=TargetCost(100.0), marginalize="layers")
VARIANTS = {
    "lmi": Variant("UCD-LMI", LocalModeUCD()),
    "biased": Variant("without the correction", Uncorrected()),
    "bernoulli": Variant("without units of -1 and 1", LocalModeUCD(), spins=False),
    "whole": Variant("without summing out", LocalModeUCD(marginalize=())),
    "gaussian": Variant(
        "without orthogonal weights", LocalModeUCD(), scheme="gaussian"
    ),
    "ucd": Variant("UCD, coupled Gibbs chains", _GIBBS, scheme="gaussian"),
    "pcd": Variant(
        "PCD, mean field",
        PCD(num_chains=100, posterior=MeanField(10)),
        scheme="gaussian",
    ),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__, VARIANTS, seeds=(0, 1, 2))
    add = parser.add_argument
    sides = "units of the latent layers; the states of the first are enumerated"
    add("--sides", type=int, nargs=2, default=(12, 12), help=sides)
    datasets.option(parser, "digits")
    add("--steps", type=int, default=3000)
    add(
        "--rate",
        type=float,
        default=0.01,
        help="first rate for spins; it decays along a cosine",
    )
    args = records.parse(parser, argv, "steps", "rate")
    tag = datasets.tag(args.data)
    args.records = Records(
        args.out, "local_modes", "" if tag == "digits" else tag, args.name
    )
    return args


def run(name: str, seed: int, rows: np.ndarray, args: argparse.Namespace) -> None:
    """Train once and store the run."""
    variant = VARIANTS[name]
    rows, family = (2 * rows - 1, Spin) if variant.spins else (rows, Bernoulli)
    dbm = ebmpp.layered(
        v=family(rows.shape[1]), h1=family(args.sides[0]), h2=family(args.sides[1])
    )
    rate = args.rate * (1 if variant.spins else _BERNOULLI_RATE)
    start = time.monotonic()
    fit = ebmpp.fit(
        dbm,
        rows[_HELD_OUT:],
        estimator=variant.estimator,
        optimizer=optax.sgd(optax.cosine_decay_schedule(rate, args.steps, alpha=0.02)),
        num_steps=args.steps,
        init_scheme=variant.scheme,
        rng_key=jax.random.key(seed),
        monitors={"held_out": monitors.log_likelihood(dbm, rows[:_HELD_OUT])},
        monitor_every=max(1, args.steps // 20),
        progress_bar=False,
    )
    row: Row = {
        "method": variant.label,
        "seed": seed,
        "seconds": round(time.monotonic() - start, 1),
    }
    row["step"] = fit.history.monitor_step.values.tolist()
    row["held_out"] = np.round(fit.history.held_out.values.astype(float), 3).tolist()
    for metric in (
        "corrected",
        "posterior_corrected",
        "acceptance",
        "meeting_time_mean",
    ):
        if metric in fit.history:
            row[metric] = float(fit.history[metric].mean())
    args.records.save(name, seed, row)
    print(
        f"{variant.label}, seed {seed}: {row['held_out'][-1]:.2f} after {row['seconds']} s",
        flush=True,
    )


def independent_pixels(rows: np.ndarray) -> float:
    """Return the held-out log-likelihood under each pixel's own rate, which a model must exceed."""
    held_out = rows[:_HELD_OUT]
    train = rows[_HELD_OUT:]
    rate = (train.sum(0) + 1) / (len(train) + 2)
    return float(
        (held_out * np.log(rate) + (1 - held_out) * np.log1p(-rate)).sum(1).mean()
    )


def draw(rows: list[Row], baseline: float, args: argparse.Namespace) -> None:
    """Draw the exact held-out log-likelihood along training: a panel per variant, a
    line per seed."""
    values = np.concatenate([row["held_out"] for row in rows])
    grouped = by_method(rows)
    figure, axes = style.grid(len(grouped), (3.3, 2.5), ncols=3)
    for ax, (label, runs) in zip(axes, grouped.items(), strict=True):
        for row in runs:
            look = style.look(row["seed"]) | {
                "linewidth": 1.3,
                "label": f"seed {row['seed']}",
            }
            ax.plot(row["step"], row["held_out"], **look)
        seconds = np.median([row["seconds"] for row in runs])
        pictures.likelihoods(ax, np.nanmax(values), np.nanmin(values), _TICKS, "")
        ax.axhline(
            baseline,
            color=style.INK,
            linewidth=0.8,
            label=f"independent pixels, {baseline:.1f}",
        )
        ax.set_title(f"{label}\n{seconds:.0f} s per run", fontsize=9)
        ax.set(xlabel="step", ylabel="held-out row, exact (nats)")
    pictures.save(figure, axes, args.records.summary.with_suffix(".png"), ncols=4)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    rows = ebmpp.data.binarize(datasets.shuffled(args.data, 0, args.rows))
    for name in [] if args.draw else args.only:
        for seed in args.seeds:
            run(name, seed, rows, args)
    baseline = round(independent_pixels(rows), 3)
    result = args.records.summarize(
        VARIANTS, independent_pixels=baseline, steps=args.steps
    )
    draw(result["runs"], result["independent_pixels"], args)


if __name__ == "__main__":
    main()
