# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Variance of an unbiased gradient by its settings, its cost, and the variance along training.

``means``: a machine with N(0, 1) params whose states can be summed, so that the
variance of independent exact draws is known: the trace of the covariance of one state's
energy gradient. Each estimator runs at the same params until its lag has settled; then
its negative phase is repeated. Its variance is in units of as many independent draws as
it has pairs, its cost in sweeps per pair. A coupled sweep moves two chains and counts
as two.

``training``: the 200x100 machine of ``simulated_rbm.py`` under plain gradient steps of
CD-1, PCD-1 and UCD. At some steps the estimate is repeated at the same params and
chains. The sum of its variances over the entries of b, of c and of W, times the chains
of a step, is the variance that one chain contributes, which is what the paper draws
(its V, of 1000 chains). All methods sum the latents out of a state, the paper the
visible units.

``python benchmarks/papers/gradient_variance.py means`` takes about two minutes.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, appendix C and figure 12.
2. Taniguchi et al. (2023), equation 27: layers summed out.
"""

import argparse
from collections.abc import Sequence
from functools import partial
import math
import time
from typing import Any

from following import by_method
import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row, rounded
import simulated_rbm

import jax
from jax import Array, lax
import jax.numpy as jnp

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, FactorGraph, exact
from ebmpp.core import random
from ebmpp.estimators import Batch, Estimator, TargetCost, TargetVariance

METHODS: dict[str, dict[str, Any]] = {
    "k = lag = 1": {"k": 1, "lag": 1},
    "k = lag = 5": {"k": 5, "lag": 5},
    "k = lag = 20": {"k": 20, "lag": 20},
    "adaptive, 95 % quantile (the default)": {},
    "the same, m=0": {"m": 0},
    "target_variance=1": {"length": TargetVariance(1.0)},
    "target_variance=0.5": {"length": TargetVariance(0.5)},
    "target_variance=1.3, m=0": {"length": TargetVariance(1.3), "m": 0},
    "target_cost=20": {"length": TargetCost(20.0)},
    'init="persistent"': {"init": "persistent"},
    'marginalize="h"': {"marginalize": "h"},
    'marginalize="layers"': {"marginalize": "layers"},
}
#: methods of figure 12: label, estimator
ALONG: dict[str, tuple[str, Estimator]] = {
    "cd1": ("CD-1", CD(k=1)),
    "pcd": ("PCD-1", PCD(k=1, num_chains=1000)),
    "published": (
        "UCD, k = lag = 1, stopped at 100 sweeps",
        UCD(
            num_pairs=1000,
            k=1,
            lag=1,
            max_sweeps=100,
            allow_unmet=True,
            marginalize="h",
        ),
    ),
    "ucd": ("UCD, adaptive", UCD(num_pairs=1000, marginalize="h")),
}
_CHAINS = 1000  # of every method: as many rows, chains or pairs
_FACTORS = {"v": "b", "h": "c", "v:h": "W"}
_SETTLE = 60  # steps until the smoothed lag is constant


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__, ALONG, draws=False)
    add = parser.add_argument
    add("experiment", nargs="?", choices=("means", "training"), default="means")
    add("--visible", type=int, default=16)
    add("--latent", type=int, default=8)
    add("--pairs", type=int, default=500)
    add(
        "--repeats",
        type=int,
        help="at the same params; default: 200, along training 10",
    )
    add("--steps", type=int, default=2000, help="of training")
    add(
        "--points",
        type=int,
        default=20,
        help="of training: how often variances are computed",
    )
    add("--rate", type=float, default=0.2, help="of training")
    add(
        "--truth",
        type=int,
        default=20,
        help="of training: latent units of the true model",
    )
    add("--seconds", type=float, default=math.inf, help="for one run of training")
    args = records.parse(
        parser, argv, "visible", "latent", "pairs", "steps", "points", "rate"
    )
    args.repeats = args.repeats or (200 if args.experiment == "means" else 10)
    if args.repeats < 2:
        parser.error(f"--repeats must be at least 2, got {args.repeats}.")
    return args


# -- means ---------------------------------------------------------------------------


def independent_variance(rbm: FactorGraph, params: Any) -> float:
    """Return the trace of the covariance of one exact draw's energy gradient.

    Its entries are binary statistics, so a variance is mean (1 - mean). The means are
    the gradient of the exact log Z.
    """
    means = jax.grad(lambda p: exact.log_partition(rbm, p))(params)
    return float(
        sum((m * (1 - m)).sum() for m in jax.tree.leaves(jax.tree.map(jnp.abs, means)))
    )


@partial(jax.jit, static_argnums=(0, 1, 5))
def repeat(
    rbm: FactorGraph, estimator: UCD, params: Any, rows: Array, key: Array, repeats: int
) -> tuple[Any, dict[str, Array]]:
    """Return gradients and metrics of consecutive estimates at the same params."""
    batch = Batch.uniform({"v": rows})
    state = estimator.init_state(
        rbm, params, batch.rows, len(rows), random.fold_in(key, 0, 1)
    )

    def step(state: Any, index: Array) -> tuple[Any, tuple[Any, dict[str, Array]]]:
        result = estimator.estimate(
            rbm, params, state, batch, random.fold_in(key, index, 2)
        )
        return result.state, (result.gradient, result.metrics)

    steps = jnp.arange(_SETTLE + repeats, dtype=jnp.uint32)
    _, outcome = lax.scan(step, state, steps)
    return jax.tree.map(lambda a: a[_SETTLE:], outcome)


def means(args: argparse.Namespace) -> None:
    """Print and draw variances and costs at exact draws."""
    rbm = ebmpp.layered(v=Bernoulli(args.visible), h=Bernoulli(args.latent))
    generator = np.random.default_rng(args.seeds[0])

    def normal(a):
        return jnp.asarray(generator.normal(size=a.shape), jnp.float32)

    params = jax.tree.map(normal, rbm.init(jax.random.key(0)))
    key = jax.random.key(args.seeds[0] + 1)
    rows = ebmpp.perfect_sample(
        rbm, params, args.pairs, rng_key=key, method="enumerate"
    )["v"]
    unit = independent_variance(rbm, params)
    table = []
    print(f"{'':40} {'variance':>9} {'error':>7} {'sweeps':>7} {'lag':>6}")
    for name, options in METHODS.items():
        estimator = UCD(num_pairs=args.pairs, **options)
        key = random.key_pair(jax.random.key(2))
        gradients, metrics = repeat(rbm, estimator, params, rows, key, args.repeats)
        leaves = [
            np.asarray(g, float).reshape(args.repeats, -1)
            for g in jax.tree.leaves(gradients)
        ]
        deviation = np.concatenate(leaves, 1)
        deviation = deviation - deviation.mean(0)
        traces = (
            (deviation**2).sum(1)
            * args.repeats
            / (args.repeats - 1)
            * args.pairs
            / unit
        )
        row = {
            "method": name,
            "variance": round(float(traces.mean()), 3),
            "standard_error": round(float(traces.std(ddof=1) / args.repeats**0.5), 3),
            "sweeps_a_pair": round(float(np.mean(metrics["sweeps"])), 1),
            "lag": round(float(np.mean(metrics["lag"])), 1),
        }
        table.append(row)
        numbers = f"{row['variance']:9.2f} {row['standard_error']:7.2f} {row['sweeps_a_pair']:7.1f}"
        print(f"{name:40} {numbers} {row['lag']:6.1f}", flush=True)
    archive = Records(args.out, "gradient_variance", args.name)
    archive.write({"runs": table})
    draw_means(table, archive)


def draw_means(table: list[Row], archive: Records) -> None:
    """Draw variance against cost; along a grey line their product is constant."""
    figure, axes = style.grid(1, (8.2, 4.6))
    ax = axes[0]
    for index, row in enumerate(table):
        look = {
            "color": style.COLORS[index % 8],
            "marker": style.marker(index),
            "linestyle": "none",
        }
        look |= {"markerfacecolor": "none", "capsize": 3, "label": row["method"]}
        ax.errorbar(
            row["sweeps_a_pair"], row["variance"], 2 * row["standard_error"], **look
        )
    ax.set(xscale="log", yscale="log", xlabel="cost: sweeps per pair")
    ax.set_ylabel(
        "variance of the gradient, in units of\nas many independent exact draws"
    )
    ends = np.array(ax.get_xlim())
    heights = ax.get_ylim()
    for product in (1, 2, 5, 10, 20, 50, 100):
        ax.plot(ends, product / ends, color=style.FAINT, linewidth=0.6, zorder=0)
    ax.axhline(
        1, color=style.INK, linestyle="--", linewidth=1, label="independent exact draws"
    )
    ax.set(xlim=ends, ylim=heights)
    title = (
        "bars: two standard errors; along a grey line cost times variance is constant"
    )
    pictures.save(figure, axes, archive.summary.with_suffix(".png"), title)


# -- along training ------------------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 1, 2))
def ascend(
    rbm: FactorGraph,
    estimator: Estimator,
    count: int,
    rows: Array,
    carry: Any,
    key: Array,
    rate: Array,
) -> tuple[Any, dict[str, Array]]:
    """Make plain gradient steps from all rows."""
    batch = Batch.uniform({"v": rows})

    def step(carry: Any, index: Array) -> tuple[Any, dict[str, Array]]:
        params, state = carry
        result = estimator.estimate(
            rbm, params, state, batch, random.fold_in(key, index)
        )
        params = jax.tree.map(lambda p, g: p - rate * g, params, result.gradient)
        return (params, result.state), result.metrics

    return lax.scan(step, carry, jnp.arange(count, dtype=jnp.uint32))


@partial(jax.jit, static_argnums=(0, 1, 2))
def factor_variances(
    rbm: FactorGraph,
    estimator: Estimator,
    repeats: int,
    rows: Array,
    carry: Any,
    key: Array,
) -> dict[str, Array]:
    """Return summed variances of each factor's gradient over repeats, times the chains of one."""
    batch = Batch.uniform({"v": rows})

    def at(i):
        return estimator.estimate(rbm, *carry, batch, random.fold_in(key, i)).gradient

    gradients = lax.map(at, jnp.arange(repeats, dtype=jnp.uint32))
    return {
        name: _CHAINS * g.reshape(repeats, -1).var(0, ddof=1).sum()
        for name, g in gradients.items()
    }


def follow(method: str, seed: int, rows: Array, args: argparse.Namespace) -> Row:
    """Return the variances along one run."""
    label, estimator = ALONG[method]
    rbm = ebmpp.layered(v=Bernoulli(rows.shape[1]), h=Bernoulli(100))
    rng_key = jax.random.key(seed)
    params = rbm.init(rng_key, rows)
    key = random.key_pair(jax.random.fold_in(rng_key, 1))
    state = estimator.init_state(
        rbm, params, {"v": rows}, len(rows), random.fold_in(key, 0, 1)
    )
    carry = (params, state)
    interval = max(1, args.steps // args.points)
    spent = []
    row: Row = {"method": label, "seed": seed, "step": [], "ended": "all steps"}
    row |= {name: [] for name in (*_FACTORS.values(), "meeting_time_mean", "sweeps")}
    for step in range(interval, args.steps + 1, interval):
        start = time.monotonic()
        at = random.fold_in(key, step, 2)
        carry, metrics = jax.device_get(
            ascend(rbm, estimator, interval, rows, carry, at, args.rate)
        )
        spent.append(time.monotonic() - start)
        at = random.fold_in(key, step, 3)
        variances = factor_variances(rbm, estimator, args.repeats, rows, carry, at)
        row["step"].append(step)
        for name, value in variances.items():
            row[_FACTORS[name]].append(rounded(value, 4))
        if "sweeps" in metrics:
            row["meeting_time_mean"].append(
                round(float(metrics["meeting_time_mean"].mean()), 2)
            )
            row["sweeps"].append(round(float(metrics["sweeps"].mean()), 2))
        if sum(spent) > args.seconds:
            row["ended"] = f"stopped after {args.seconds:.0f} s"
            break
    row["ms_a_batch"] = rounded(1e3 * np.mean(spent[1:] or spent) / interval)
    last = ", ".join(f"{name} {row[name][-1]:.4g}" for name in _FACTORS.values())
    print(
        f"{label}, seed {seed}: {last} at step {row['step'][-1]}, {row['ms_a_batch']} ms per step",
        flush=True,
    )
    return row


def training(args: argparse.Namespace) -> None:
    """Print and draw figure 12."""
    truth = simulated_rbm.parse(["--rows", str(_CHAINS), "--truth", str(args.truth)])
    rows = simulated_rbm.simulate(truth)[0]["log_likelihood"]
    runs = [
        follow(method, seed, rows, args) for seed in args.seeds for method in args.only
    ]
    archive = Records(args.out, "gradient_variance_training", args.name)
    printed = "UCD's variance is comparable to that of CD and PCD, but for a few extreme cases"
    archive.write({"as_printed": printed, "runs": runs})
    figure, axes = style.grid(3, (4.2, 3.6))
    for index, (label, subset) in enumerate(by_method(runs).items()):
        look = style.look(index) | {"label": label, "linewidth": 1.4}
        for ax, name in zip(axes, _FACTORS.values(), strict=True):
            pictures.band(
                ax,
                max((row["step"] for row in subset), key=len),
                [row[name] for row in subset],
                **look,
            )
            ax.set(
                xlabel="step",
                ylabel=f"variance of one chain's gradient in {name}",
                yscale="log",
            )
    title = f"200x100 units, 1,000 rows of a 200x20 machine: {pictures.over(len(args.seeds))}"
    pictures.save(figure, axes, archive.summary.with_suffix(".png"), title, 4)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the experiments."""
    args = parse(argv)
    (training if args.experiment == "training" else means)(args)


if __name__ == "__main__":
    main()
