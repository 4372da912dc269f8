# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bars and stripes 4x4: bias and variance of gradients in the exact log-likelihood.

Sixteen latent units, all 32 rows per step, plain gradient steps. The total
log-likelihood of the rows is exact; the best that any model can reach is ``BEST``. A
run ends with its steps, with a gradient that is not finite, or after ``--seconds`` of
the processor: an unbiased gradient costs what the chains take to meet, which is long
near the optimum. The variance of a gradient is the trace of its covariance over repeats
at the same params.

``--falling`` lets the rate fall linearly to a fiftieth. ``--bound`` projects every
param onto [-bound, bound] after each step, and ``--average`` evaluates the mean of the
second half of the iterates: Algorithm 2.

``python benchmarks/papers/bars_and_stripes.py --only pcd --seeds 1`` stores one run;
``--draw`` draws all runs that are stored.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, section 6.1, figures 2
   and 6, table 1, Algorithm 2.
"""

import argparse
from collections.abc import Sequence
import dataclasses
from functools import partial
import math
import time
from typing import Any

from following import averages, by_method, costs, coupling_numbers, medians
import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row, rounded

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, ParticleUCD, Stage, WeightedPCD, exact
from ebmpp.core import random
from ebmpp.errors import DivergenceError
from ebmpp.estimators import Batch, Estimator, Quantile

ROWS = ebmpp.data.bars_and_stripes(4)
#: of the 32 rows, 28 patterns occur once and two (blank and full) twice
BEST = 28 * math.log(1 / 32) + 4 * math.log(2 / 32)
GRAPH = ebmpp.layered(v=Bernoulli(16), h=Bernoulli(16))

_PERSISTENT = UCD(
    num_pairs=200, init="persistent", marginalize="layers", length=Quantile(0.9)
)
_PARTICLES = ParticleUCD(num_particles=500, path="training", cess_threshold=0.9)
#: label, estimator
METHODS: dict[str, tuple[str, Estimator]] = {
    "ucd": ("UCD, adaptive, 1000 pairs", UCD(num_pairs=1000)),
    "choice": ("UCD, its own choice, 250 pairs", UCD(num_pairs=250)),
    "ucd_few": ("UCD, adaptive, 100 pairs", UCD(num_pairs=100)),
    "persistent": (
        "UCD, adaptive, persistent, layers summed out, 200 pairs",
        _PERSISTENT,
    ),
    "ucd1": ("UCD, k = lag = 1", UCD(num_pairs=1000, k=1, lag=1)),
    "ucd1_few": (
        "UCD, k = m = lag = 1, 100 pairs",
        UCD(num_pairs=100, k=1, m=1, lag=1),
    ),
    "truncated": (
        "UCD, k = lag = 1, stopped at 100 sweeps (biased)",
        UCD(num_pairs=1000, k=1, lag=1, max_sweeps=100, allow_unmet=True),
    ),
    **{f"cd{k}": (f"CD-{k}", CD(k=k)) for k in (1, 2, 5, 10, 20)},
    "pcd": ("PCD-1, 1000 chains", PCD(k=1, num_chains=1000)),
    "pcd_ucd": ("PCD for 2000 steps, then UCD from its chains", _PERSISTENT),
    "particles": ("ParticleUCD, 500 particles", _PARTICLES),
    # corrections of pairs that meet late have a smaller weight
    "window": (
        "ParticleUCD, 500 particles, k = 1, m = 3",
        dataclasses.replace(_PARTICLES, k=1, m=3),
    ),
    "weighted": ("WeightedPCD, 1000 chains", WeightedPCD(num_watchers=0)),
}
_FIRST = 2000  # steps of PCD before UCD
#: seconds of table 1; UCD is the published one, whose chains and draws are stopped
PRINTED = {"CD-1": 5.38, "CD-2": 8.44, "CD-5": 17.89, "CD-10": 33.17, "CD-20": 63.51}
PRINTED |= {METHODS["pcd"][0]: 5.18, METHODS["truncated"][0]: 15.99}
_TICKS = (-109, -110, -112, -115, -120, -130, -150, -200, -300, -500, -1000)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__, METHODS)
    add = parser.add_argument
    add("--steps", type=int, default=5000)
    add("--rate", type=float, default=0.1)
    add(
        "--falling",
        action="store_true",
        help="let the rate fall linearly to a fiftieth",
    )
    add(
        "--bound",
        type=float,
        default=math.inf,
        help="of the params; inf for no projection",
    )
    add(
        "--average",
        action="store_true",
        help="evaluate the mean of the second half of the iterates, too",
    )
    add(
        "--chains",
        type=int,
        default=len(ROWS),
        help="of CD: rows are repeated; 1000 in the paper",
    )
    add(
        "--every",
        type=int,
        default=20,
        help="steps between values of the exact log-likelihood",
    )
    add(
        "--variance-every",
        type=int,
        default=0,
        help="steps between values of the gradient's variance",
    )
    add(
        "--seconds",
        type=float,
        default=math.inf,
        help="of the processor, after which a run ends",
    )
    args = records.parse(parser, argv, "steps", "rate", "bound", "chains", "every")
    args.records = Records(args.out, "bars_and_stripes", args.name)
    return args


@jax.jit
def total(params: Any) -> Array:
    """Return the exact log-likelihood of all rows."""
    return exact.log_likelihood(GRAPH, params, ROWS).sum()


@partial(jax.jit, static_argnums=0)
def gradient_variance(
    estimator: Estimator, params: Any, state: Any, key: Array
) -> Array:
    """Return the trace of the gradient's covariance over 20 repeats at these params."""
    batch = Batch.uniform({"v": jnp.asarray(ROWS)})

    def at(i):
        return estimator.estimate(
            GRAPH, params, state, batch, random.fold_in(key, i)
        ).gradient

    repeats = lax.map(at, jnp.arange(20, dtype=jnp.uint32))
    return sum(g.reshape(20, -1).var(0, ddof=1).sum() for g in jax.tree.leaves(repeats))


class Curve:
    """Callback of ``fit``: exact log-likelihoods, seconds and variances; stops the run
    after a time."""

    def __init__(self, estimator: Estimator, args: argparse.Namespace) -> None:
        self.estimator = estimator
        self.args = args
        self.points: list[tuple[int, float, float]] = []
        self.variance: list[tuple[int, float]] = []
        self.start = time.monotonic()
        self.used = time.process_time()
        self.excluded = 0.0

    def __call__(self, progress: ebmpp.training.Progress) -> bool:
        """Add a point."""
        jax.block_until_ready(progress.params)
        now = time.monotonic()
        step = progress.step
        self.points.append(
            (step, float(total(progress.params)), now - self.start - self.excluded)
        )
        if self.args.variance_every and step and step % self.args.variance_every == 0:
            key = random.key_pair(jax.random.key(step))
            value = gradient_variance(
                self.estimator, progress.params, progress.estimator_state, key
            )
            self.variance.append((step, float(value)))
        self.excluded += time.monotonic() - now
        return time.process_time() - self.used > self.args.seconds

    @property
    def ms_a_step(self) -> float:
        """Milliseconds per step from the second point on, before which everything is compiled."""
        if len(self.points) < 3:
            return math.nan
        first, _, start = self.points[1]
        last, _, end = self.points[-1]
        return 1e3 * (end - start) / (last - first)


def stages(method: str, args: argparse.Namespace) -> list[Stage]:
    """Return the stages of a run."""
    rate = (
        optax.linear_schedule(args.rate, args.rate / 50, args.steps)
        if args.falling
        else args.rate
    )
    optimizer = optax.sgd(rate)
    if math.isfinite(args.bound):
        optimizer = ebmpp.optimizers.projected(
            optimizer, ebmpp.optimizers.box(-args.bound, args.bound)
        )
    if args.average:
        optimizer = ebmpp.optimizers.averaged(optimizer, from_step=args.steps // 2)
    estimator = METHODS[method][1]
    if method != "pcd_ucd" or args.steps <= _FIRST:
        return [Stage(num_steps=args.steps, estimator=estimator, optimizer=optimizer)]
    return [
        Stage(
            num_steps=_FIRST, estimator=PCD(k=1, num_chains=200), optimizer=optimizer
        ),
        Stage(num_steps=args.steps - _FIRST, estimator=estimator, optimizer=optimizer),
    ]


def run(method: str, seed: int, args: argparse.Namespace) -> None:
    """Train once and store the run."""
    label, estimator = METHODS[method]
    rows = (
        np.tile(ROWS, (-(-args.chains // len(ROWS)), 1))
        if isinstance(estimator, CD)
        else ROWS
    )
    curve = Curve(estimator, args)
    ended = "all steps"
    mean = None
    try:
        fit = ebmpp.fit(
            GRAPH,
            rows,
            schedule=stages(method, args),
            batch_size=len(rows),
            rng_key=jax.random.key(seed),
            monitor_every=args.every,
            callbacks=[curve],
            progress_bar=False,
        )
        history = fit.history
        if history.sizes["step"] < args.steps:
            ended = f"stopped after {args.seconds:.0f} s"
        if args.average:
            mean = float(total(ebmpp.optimizers.averaged_params(fit.optimizer_state)))
    except DivergenceError as error:
        history = error.history
        ended = f"stopped: {error}"
    steps, values, seconds = (
        np.array(column) for column in zip(*curve.points, strict=True)
    )
    best = int(values.argmax())
    row: Row = {
        "method": label,
        "seed": seed,
        "steps": int(steps[-1]),
        "ended": ended,
        "best": round(values[best], 2),
        "best_at": int(steps[best]),
        "last": round(values[-1], 2),
        "largest_fall": round((np.maximum.accumulate(values) - values).max(), 2),
        "mean_of_iterates": mean,
        "seconds": round(seconds[-1], 1),
        "processor": round(time.process_time() - curve.used, 1),
        "ms_a_batch": rounded(curve.ms_a_step),
        "sweeps_a_batch": getattr(estimator, "k", None),
        "curve": [[int(s), round(v, 2)] for s, v in zip(steps, values, strict=True)],
        "variance": curve.variance,
    }
    if "lag" in history:
        row |= coupling_numbers(history)
    elif "meeting_time_mean" in history:  # particle systems
        row["meeting_time_mean"] = rounded(history["meeting_time_mean"].mean())
        row["meeting_time_max"] = int(history["meeting_time_max"].max())
        row["acceptance"] = rounded(history["acceptance"].mean())
        row["sweeps_to_meet"] = averages(
            history["meeting_time_mean"].values.astype(float)
        )
    args.records.save(method, seed, row)
    print(
        f"{label}, seed {seed}: {values[-1]:.2f} at step {steps[-1]} after "
        f"{seconds[-1]:.0f} s ({ended})",
        flush=True,
    )


# -- the report ----------------------------------------------------------------------


def draw(rows: list[Row], args: argparse.Namespace) -> None:
    """Draw log-likelihoods, meeting times, discarded draws and variances against the step."""
    names = [
        n
        for n in ("sweeps_to_meet", "discarded", "variance")
        if any(row.get(n) for row in rows)
    ]
    figure, axes = style.grid(1 + len(names), (5.4, 3.9), ncols=2)
    for index, (label, runs) in enumerate(by_method(rows).items()):
        look = style.look(index) | {
            "linewidth": 1.3,
            "label": f"{label}, {len(runs)} seeds",
        }
        steps = max(([s for s, _ in row["curve"]] for row in runs), key=len)
        pictures.band(
            axes[0], steps, [[v for _, v in row["curve"]] for row in runs], **look
        )
        for row in runs:
            if row["mean_of_iterates"] is not None:
                mark = {"marker": style.marker(index), "color": look["color"]}
                axes[0].plot(row["steps"], row["mean_of_iterates"], **mark)
        for ax, name in zip(axes[1:], names, strict=True):
            if name == "variance" and runs[0]["variance"]:
                at = max(([s for s, _ in row["variance"]] for row in runs), key=len)
                pictures.band(
                    ax, at, [[v for _, v in row["variance"]] for row in runs], **look
                )
            elif subset := [
                row for row in runs if name != "variance" and row.get(name)
            ]:
                size = max(len(row[name]) for row in subset)
                at = (
                    max(row["steps"] for row in subset) * (np.arange(size) + 0.5) / size
                )
                pictures.band(ax, at, [row[name] for row in subset], **look)
    low = min(v for row in rows for _, v in row["curve"])
    pictures.likelihoods(axes[0], BEST, low, _TICKS, f"best possible, {BEST:.2f}")
    axes[0].set_ylabel("total log-likelihood of the 32 rows (nats)")
    texts = {
        "sweeps_to_meet": "sweeps to meet, after the lag, mean",
        "discarded": "discarded draws per coupled sweep",
        "variance": "variance of a gradient (trace)",
    }
    for ax, name in zip(axes[1:], names, strict=True):
        ax.set(ylabel=texts[name], yscale="linear" if name == "discarded" else "log")
    for ax in axes:
        ax.set_xlabel("step")
    pictures.save(
        figure,
        axes,
        args.records.summary.with_suffix(".png"),
        "medians, and ranges over seeds",
        2,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    for seed in [] if args.draw else args.seeds:
        for method in args.only:
            run(method, seed, args)
    rows = args.records.summarize(METHODS, best_possible=round(BEST, 2))["runs"]
    for name in ("last", "best", "largest_fall", "processor"):
        print(medians(rows, name), end="\n\n")
    print(costs(rows, PRINTED))
    draw(rows, args)


if __name__ == "__main__":
    main()
