# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Projection and averaging, as Algorithm 2 of Qiu et al. has them: what they do to a run that falls.

Bars and stripes 4x4 with sixteen latent units, all 32 rows a step, plain gradient steps at a constant rate.
After each step every param is projected onto [-bound, bound], a compact convex set, and the mean of the
iterates of the last half is the model. Each estimator runs with and without the projection. The exact total
log-likelihood of the rows, of which the best possible is -108.13, is followed for the iterate, and told of
the mean in the end.

``python benchmarks/projection.py`` runs all; everything goes through :func:`ebmpp.fit`.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, Algorithm 2, whose mean is of all iterates, and
   corollary 1.
"""

import argparse
from collections.abc import Sequence
import json
import math
from pathlib import Path
import time
from typing import Any

import bands
import numpy as np

import jax
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, ParticleUCD, exact
from ebmpp.diagnostics import style
from ebmpp.estimators import Estimator

ROWS = ebmpp.data.bars_and_stripes(4)
BEST = 28 * math.log(1 / 32) + 4 * math.log(2 / 32)
ESTIMATORS: dict[str, tuple[str, Estimator, float]] = {
    # label, estimator, share of the steps
    "pcd": ("PCD-1, 1000 chains", PCD(num_chains=1000), 1.0),
    "ucd1": ("UCD, k = lag = 1, 100 pairs", UCD(num_pairs=100, k=1, m=1, lag=1), 0.3),
    "particles": ("ParticleUCD, 300 particles", ParticleUCD(num_particles=300, path="training"), 1.0),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(ESTIMATORS), default=list(ESTIMATORS))
    add("--steps", type=int, default=10_000)
    add("--rate", type=float, default=0.1)
    add(
        "--bounds",
        type=float,
        nargs="+",
        default=[5.0, math.inf],
        help="of the params; inf for no projection",
    )
    add("--points", type=int, default=50)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--out", type=Path, default=Path("benchmarks/report"))
    args = parser.parse_args(argv)
    if min(args.steps, args.points) < 2 or not args.rate > 0 or not min(args.bounds) > 0:
        parser.error("--steps and --points are at least 2, --rate and --bounds positive")
    return args


def run(name: str, bound: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run: its curves, and what it cost."""
    label, estimator, share = ESTIMATORS[name]
    rbm = ebmpp.layered(v=Bernoulli(16), h=Bernoulli(16))
    steps = max(2, int(share * args.steps))
    descent = optax.sgd(args.rate)
    if math.isfinite(bound):
        descent = ebmpp.optimizers.projected(descent, ebmpp.optimizers.box(-bound, bound))
    total = jax.jit(lambda params: exact.log_likelihood(rbm, params, ROWS).sum())

    begun = time.monotonic()
    fit = ebmpp.fit(
        rbm,
        ROWS,
        estimator=estimator,
        optimizer=ebmpp.optimizers.averaged(descent, start=steps // 2),
        num_steps=steps,
        rng_key=jax.random.key(seed),
        monitors={"exact": total},
        monitor_every=max(1, steps // args.points),
        progress_bar=False,
    )
    curve = fit.history["exact"].values
    mean = float(total(ebmpp.optimizers.averaged_params(fit.optimizer_state)))
    fall = float((np.maximum.accumulate(curve) - curve).max())
    made = {
        "estimator": label,
        "bound": bound if math.isfinite(bound) else None,
        "seed": seed,
        "steps": steps,
    }
    made |= {"seconds": round(time.monotonic() - begun, 1), "last": float(curve[-1]), "mean": mean}
    made |= {"best": float(curve.max()), "fall": fall, "largest": float(abs(fit.params["v:h"]).max())}
    curves = {"at": fit.history.monitor_step.values.tolist(), "curve": curve.tolist()}
    print(json.dumps(made), flush=True)
    return made | curves


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Iterates as bands over seeds, and the mean of the last half at the end, a panel an estimator."""
    import matplotlib

    matplotlib.use("agg")

    labels, bounds = ([*dict.fromkeys(one[n] for one in runs)] for n in ("estimator", "bound"))
    figure, axes = style.grid(len(labels), (4.6, 3.8))
    for ax, label in zip(axes, labels, strict=False):
        for index, bound in enumerate(bounds):
            own = [one for one in runs if (one["estimator"], one["bound"]) == (label, bound)]
            told = "no projection" if bound is None else f"params within {bound:g}"
            color = style.look(index)["color"]
            bands.band(ax, own[0]["at"], [np.array(one["curve"]) for one in own], label=told, color=color)
            mean = [one["mean"] for one in own]
            ax.plot(
                [own[0]["steps"]] * len(own),
                mean,
                style.marker(index),
                color=color,
                label=f"{told}: the mean",
            )
        style.below(ax, BEST + 0.5, (-108.5, -110, -115, -125, -150, -200, -300))
        ax.set(title=label, xlabel="step", ylabel="total log-likelihood (nats)")
        style.tidy(ax, legend=label == labels[-1])
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all, and keep numbers and picture."""
    args = parse(argv)
    each = ((name, bound, seed) for name in args.only for bound in args.bounds for seed in args.seeds)
    runs = [run(*one, args) for one in each]
    args.out.mkdir(parents=True, exist_ok=True)
    short = [{k: v for k, v in one.items() if k not in ("at", "curve")} for one in runs]
    (args.out / "projection.json").write_text(json.dumps(short, indent=1) + "\n", encoding="utf-8")
    draw(runs, args.out / "projection.png")


if __name__ == "__main__":
    main()
