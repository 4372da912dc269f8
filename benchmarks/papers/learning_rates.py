# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Likelihood against CPU time on 8x8 digits, each estimator at its best learning rate.

The model, data and split are those of ``python -m ebmpp``: 64 pixels, 20 latent units,
300 of 1797 images held out. Each estimator runs with each rate, decayed by a cosine to
2 % of it. CPU seconds include compilation, without a cache of programs, and exclude the
exact likelihoods along the run. The picture has the best rate of each estimator by the
mean final likelihood over the seeds.

``python benchmarks/papers/learning_rates.py --out DIR`` takes ten minutes.
"""

import argparse
from collections.abc import Sequence
import json
from pathlib import Path
import time
from typing import NamedTuple

import numpy as np

import jax
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli
from ebmpp.__main__ import digits, independent_pixels
from ebmpp.core import Rows
from ebmpp.estimators import Centered, Estimator
from ebmpp.training import Progress

RATES = (0.1, 0.03, 0.01, 0.003)
POINTS = 12


class Method(NamedTuple):
    """An estimator, its number of steps, and the look of its curve."""

    estimator: Estimator
    steps: int
    style: str
    color: str


METHODS = {
    "Centered(PCD)": Method(Centered(PCD(num_chains=100)), 10_000, "^-", "#009e73"),
    "PCD": Method(PCD(num_chains=100), 10_000, "s--", "#cc79a7"),
    "UCD": Method(UCD(num_pairs=50), 1_000, "o-", "#1a202c"),
}


class Clock:
    """CPU seconds of a run without its evaluations, and the likelihoods between."""

    def __init__(self, rbm: ebmpp.FactorGraph, held_out: Rows) -> None:
        self.rbm = rbm
        self.held_out = held_out
        self.seconds: list[float] = []
        self.likelihoods: list[float] = []
        self._excluded = 0.0
        self._began = time.process_time()

    def __call__(self, progress: Progress) -> None:
        """Evaluate the params exactly."""
        now = time.process_time()
        values = ebmpp.exact.log_likelihood(self.rbm, progress.params, self.held_out)
        self.likelihoods.append(float(values.mean()))
        self.seconds.append(now - self._began - self._excluded)
        self._excluded += time.process_time() - now


def run(method: Method, rate: float, seed: int) -> dict[str, list[float]]:
    """Return CPU seconds and held-out likelihoods along one run."""
    jax.clear_caches()  # compilation counts
    train, held_out = digits(0)
    rbm = ebmpp.layered(v=Bernoulli(64), h=Bernoulli(20))
    clock = Clock(rbm, held_out)
    schedule = optax.cosine_decay_schedule(rate, method.steps, alpha=0.02)
    ebmpp.fit(
        rbm,
        train,
        estimator=method.estimator,
        optimizer=optax.adam(schedule),
        num_steps=method.steps,
        batch_size=100,
        rng_key=jax.random.key(seed),
        monitor_every=method.steps // POINTS,
        callbacks=[clock],
        progress_bar=False,
    )
    return {"seconds": clock.seconds, "likelihood": clock.likelihoods}


def picture(
    runs: dict[str, dict[str, list[dict]]], baseline: float, file: Path
) -> None:
    """Plot the runs of each method's best rate against CPU seconds."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, by_rate in runs.items():
        rate = max(by_rate, key=lambda rate: final(by_rate[rate]))
        method = METHODS[name]
        for number, curve in enumerate(by_rate[rate]):
            axes.plot(
                curve["seconds"],
                curve["likelihood"],
                method.style,
                color=method.color,
                markersize=4,
                label=None if number else f"{name}, rate {rate}",
            )
    axes.axhline(baseline, color="0.3", linestyle=":", label="independent pixels")
    axes.set(
        xlabel="CPU seconds, compilation included",
        ylabel="nats per image",
        title="exact log-likelihood of held-out images",
    )
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


def final(curves: Sequence[dict]) -> float:
    """Return the mean of the last likelihoods."""
    return float(np.mean([curve["likelihood"][-1] for curve in curves]))


def main() -> None:
    """Run all methods, print the final likelihoods, and write the record and the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    args = parser.parse_args()
    runs: dict[str, dict[str, list[dict]]] = {}
    for name, method in METHODS.items():
        runs[name] = {}
        for rate in args.rates:
            curves = [run(method, rate, seed) for seed in args.seeds]
            runs[name][str(rate)] = curves
            seconds = np.mean([curve["seconds"][-1] for curve in curves])
            spread = [round(curve["likelihood"][-1], 2) for curve in curves]
            print(
                f"{name:14s} rate {rate:<6} {spread}, {seconds:.0f} CPU-s", flush=True
            )
    (args.out / "learning_rates.json").write_text(json.dumps(runs, indent=1))
    picture(runs, independent_pixels(*digits(0)), args.out / "learning_rates.png")


if __name__ == "__main__":
    main()
