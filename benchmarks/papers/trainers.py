# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""All estimators on one machine and one data set.

A restricted Boltzmann machine on MNIST (784x100 by default), batches of 100 rows
binarised once, 100 chains or pairs, and one rate that falls linearly to 0. Expensive
methods take fewer steps (``share``). With ``--seconds`` all train for that wall time,
compilation included, at a constant rate. The mean log- likelihood per held-out row has
its log Z from a particle system (:func:`ebmpp.smc`), which is too small on average. The
likelihood is therefore **too large** on average, and clearly so where few particles are
effective. Seconds are of training, without compilation.

``python benchmarks/papers/trainers.py`` reads MNIST from ``EBMPP_DATA_DIR``;
``--data digits`` needs no file.
"""

import argparse
from collections.abc import Sequence
import json
import time
from typing import Any, NamedTuple
import warnings

import datasets
from following import by_method
import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row, rounded

import jax
import optax

import ebmpp
from ebmpp import (
    CD,
    PCD,
    PTT,
    UCD,
    Bernoulli,
    ParticleUCD,
    Spin,
    TemperedPCD,
    WeightedPCD,
)
from ebmpp.contrib import CSDCP, FPCD, SDCP, LocalModeUCD
from ebmpp.estimators import Centered, Estimator


class Trainer(NamedTuple):
    """An estimator and its share of the steps."""

    label: str
    estimator: Estimator
    share: float = 1.0
    rate: float = 1.0
    """Factor of the rate."""
    spins: bool = False


#: A unit of 0 and 1 is (1 + spin) / 2, so that a spin's weights are a quarter as large.
TRAINERS = {
    "cd": Trainer("CD-1", CD(k=1)),
    "pcd": Trainer("PCD-1", PCD(num_chains=100)),
    "fpcd": Trainer("FPCD-1", FPCD(num_chains=100, rate=0.01)),
    "tempered": Trainer(
        "TemperedPCD, 5 temperatures",
        TemperedPCD(num_chains=100, num_temperatures=5),
        0.3,
    ),
    "centered": Trainer("centered PCD-1", Centered(PCD(num_chains=100))),
    "sdcp": Trainer("S-DCP, d = 3, K' = 4", SDCP(d=3, k=4)),
    "csdcp": Trainer("CS-DCP, d = 3, K' = 4", CSDCP(d=3, k=4)),
    "weighted": Trainer(
        "WeightedPCD, 1000 chains", WeightedPCD(num_chains=1000, num_watchers=0), 0.5
    ),
    "ptt": Trainer("PTT, 100 chains", PTT(num_chains=100)),
    "choice": Trainer("UCD, its own choice", UCD(), 0.1),
    "ucd": Trainer(
        "UCD, pairs of Gibbs chains", UCD(num_pairs=100, method="gibbs"), 0.1
    ),
    "particles": Trainer(
        "ParticleUCD, 200 particles", ParticleUCD(num_particles=200), 0.05
    ),
    "lmi": Trainer(
        "UCD-LMI, 100 pairs", LocalModeUCD(num_pairs=100), 0.3, 0.25, spins=True
    ),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__, TRAINERS, seeds=(0, 1))
    add = parser.add_argument
    datasets.option(parser, "mnist")
    add("--latent", type=int, default=100)
    add("--steps", type=int, default=4000)
    add("--batch-size", type=int, default=100)
    add("--rate", type=float, default=0.05)
    add(
        "--seconds",
        type=float,
        help="of training, at a constant rate, in place of --steps",
    )
    add(
        "--particles", type=int, default=500, help="of the evaluation, a multiple of 10"
    )
    add("--sweeps", type=int, default=4, help="of the evaluation, per temperature")
    args = records.parse(
        parser, argv, "latent", "steps", "batch_size", "sweeps", "rate"
    )
    tag = datasets.tag(args.data)
    args.records = Records(
        args.out, "trainers", "" if tag == "mnist" else tag, args.name
    )
    return args


class Clock:
    """Callback of ``fit``: seconds per step from the first monitored step on, when all
    is compiled."""

    def __init__(self) -> None:
        self.times: list[tuple[int, float]] = []

    def __call__(self, progress: ebmpp.training.Progress) -> None:
        """Note the time."""
        jax.block_until_ready(progress.params)
        if progress.step > 0:
            self.times.append((progress.step, time.monotonic()))

    @property
    def seconds_per_step(self) -> float:
        """Mean over the run."""
        first, start = self.times[0]
        last, end = self.times[-1]
        return (end - start) / (last - first)


def run(
    name: str, seed: int, data: tuple[np.ndarray, np.ndarray], args: argparse.Namespace
) -> None:
    """Train once and store the run."""
    trainer = TRAINERS[name]
    train, held_out = data
    family = Spin if trainer.spins else Bernoulli
    steps = max(10, round(trainer.share * args.steps))
    rate = optax.linear_schedule(trainer.rate * args.rate, 0.0, steps)
    interval = max(1, steps // 10)
    if args.seconds:
        steps = None
        rate = trainer.rate * args.rate
        interval = 5
    if trainer.spins:
        train = 2 * train - 1
        held_out = 2 * held_out - 1
    rbm = ebmpp.layered(v=family(train.shape[1]), h=family(args.latent))
    clock = Clock()
    with warnings.catch_warnings():
        # weights that resample too often: the row has the share
        warnings.simplefilter("ignore", UserWarning)
        fit = ebmpp.fit(
            rbm,
            train,
            estimator=trainer.estimator,
            optimizer=optax.sgd(rate),
            num_steps=steps,
            max_seconds=args.seconds,
            batch_size=args.batch_size,
            rng_key=jax.random.key(seed),
            monitor_every=interval,
            callbacks=[clock],
            progress_bar=False,
        )
        key = jax.random.fold_in(jax.random.key(seed), 1)
        system = ebmpp.smc(
            rbm,
            fit.params,
            rng_key=key,
            num_particles=args.particles,
            num_sweeps=args.sweeps,
            data=train,
        )
    steps = fit.history.sizes["step"]

    def value(rows):
        return round(system.average_log_likelihood(rows).value, 3)

    row: Row = {
        "method": trainer.label,
        "seed": seed,
        "steps": steps,
        "seconds": rounded(clock.seconds_per_step * steps),
        "ms_a_step": rounded(1e3 * clock.seconds_per_step),
        "held_out": value(held_out),
        "train": value(train[: len(held_out)]),
        "standard_error": round(system.standard_error, 3),
        "effective": round(float(system.effective_sample_size), 1),
        "rungs": int(system.num_rungs),
    }
    for metric in ("meeting_time_mean", "acceptance", "resampled", "corrected"):
        if metric in fit.history:
            row[metric] = round(float(fit.history[metric].mean()), 3)
    print(json.dumps(row), flush=True)
    args.records.save(name, seed, row)


# -- the report ----------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """Return medians over seeds, and the range of the likelihoods, by method."""
    lines = [
        f"{'method':<30}{'seeds':>6}{'steps':>7}{'seconds':>9}{'held out':>10}"
        f"{'range':>20}{'error':>8}"
    ]
    for method, runs in by_method(rows).items():

        def median(name, runs=runs):
            return float(np.median([row[name] for row in runs]))

        values = [row["held_out"] for row in runs]
        lines.append(
            f"{method:<30}{len(runs):>6}{runs[0]['steps']:>7}{median('seconds'):>9.1f}"
            f"{median('held_out'):>10.2f}{f'{min(values):.2f} to {max(values):.2f}':>20}"
            f"{median('standard_error'):>8.2f}"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Draw the held-out likelihood against the seconds of training."""
    rows = result["runs"]
    figure, axes = style.grid(1, (8.6, 4.6))
    for index, (method, runs) in enumerate(by_method(rows).items()):
        look = {
            "color": style.look(index)["color"],
            "marker": style.marker(index),
            "linestyle": "none",
        }
        look["markerfacecolor"] = (
            "white" if index < len(style.COLORS) else look["color"]
        )
        seconds, value, error = (
            np.array([row[n] for row in runs], float)
            for n in ("seconds", "held_out", "standard_error")
        )
        axes[0].errorbar(
            seconds, value, 2 * error, capsize=2, markersize=7, label=method, **look
        )
    axes[0].set(xscale="log", xlabel="seconds of training")
    axes[0].set_ylabel("log-likelihood per held-out row, by smc (nats)")
    title = (
        f"{result['data']}, {args.latent} latent units: one mark per seed, bars: two "
        "standard errors"
    )
    pictures.save(figure, axes, args.records.summary.with_suffix(".png"), title)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    data = None if args.draw else datasets.binary_split(args, 0)
    for seed in args.seeds if data is not None else []:
        for name in args.only:
            run(name, seed, data, args)
    result = args.records.summarize(
        TRAINERS, data=datasets.tag(args.data), latent=args.latent
    )
    print(table(result["runs"]))
    draw(result, args)


if __name__ == "__main__":
    main()
