# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What holds the variance of an unbiased gradient, and what it costs; and the variance along training.

``means``: a machine with N(0, 1) params whose states can be summed, so that the variance of independent exact
draws is known: the trace of the covariance of one state's energy gradient. Each estimator runs at the same
params until its lag has settled, then its negative phase is repeated; its variance is told in units of as
many independent draws as it has pairs, and its cost in sweeps a pair (a coupled sweep moves two chains and
counts as two).

``training``: the 200x100 machine of ``simulated_rbm.py`` under plain gradient steps of CD-1, PCD-1 and UCD.
At some steps the estimate is repeated at the same params and chains; the sum of its variances over the
entries of b, of c and of W, times the chains of a step, is the variance of what one chain contributes, which
the paper draws (its V, of 1000 chains). All methods sum the latents out of a state, as CD does here (the
paper: the visible units). Seconds and sweeps of a step are told beside it.

``python benchmarks/gradient_variance.py means`` takes about two minutes.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, appendix C and figure 12.
2. Taniguchi et al. (2023), equation 27: layers summed out.
"""

import argparse
from collections.abc import Sequence
from functools import partial
import json
import math
from pathlib import Path
import time
from typing import Any

import bands
import numpy as np
import simulated_rbm

import jax
from jax import Array, lax
import jax.numpy as jnp

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, FactorGraph, exact
from ebmpp.core import random
from ebmpp.diagnostics import style
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
    'start="persistent"': {"start": "persistent"},
    'marginalize="h"': {"marginalize": "h"},
    'marginalize="layers"': {"marginalize": "layers"},
}
_ADAPTIVE, _PUBLISHED = (
    UCD(num_pairs=1000, marginalize="h"),
    UCD(num_pairs=1000, k=1, lag=1, max_sweeps=100, allow_unmet=True, marginalize="h"),
)
#: of figure 12
ALONG: dict[str, tuple[str, Estimator]] = {
    "cd1": ("CD-1", CD(k=1)),
    "pcd": ("PCD-1", PCD(k=1, num_chains=1000)),
    "published": ("UCD, k = lag = 1, stopped at 100 sweeps", _PUBLISHED),
    "ucd": ("UCD, adaptive", _ADAPTIVE),
}
_CHAINS = 1000  # of every method: as many rows, chains or pairs
_FACTORS = {"v": "b", "h": "c", "v:h": "W"}
_SETTLE = 60  # steps until the smoothed lag has come to rest


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("experiment", nargs="?", choices=("means", "training"), default="means")
    add("--visible", type=int, default=16)
    add("--latent", type=int, default=8)
    add("--pairs", type=int, default=500)
    add("--repeats", type=int, help="at the same params; default: 200, along training 10")
    add("--seed", type=int, default=0, help="of means")
    add("--seeds", type=int, nargs="+", default=[0], help="of training")
    add("--only", nargs="+", choices=tuple(ALONG), default=list(ALONG), help="of training")
    add("--steps", type=int, default=2000, help="of training")
    add("--points", type=int, default=20, help="of training: where variances are taken")
    add("--rate", type=float, default=0.2, help="of training")
    add("--truth", type=int, default=20, help="of training: latent units of the true model")
    add("--seconds", type=float, default=math.inf, help="for one run of training")
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw the table that there is")
    args = parser.parse_args(argv)
    args.repeats = args.repeats or (200 if args.experiment == "means" else 10)
    if min(args.visible, args.latent, args.pairs, args.steps, args.points) < 1 or args.repeats < 2:
        parser.error("--visible, --latent, --pairs, --steps and --points are at least 1, --repeats 2")
    return args


def model(args: argparse.Namespace) -> tuple[FactorGraph, Any, Array]:
    """The machine, its params, and rows drawn from it exactly."""
    rbm = ebmpp.layered(v=Bernoulli(args.visible), h=Bernoulli(args.latent))
    normal = np.random.default_rng(args.seed).normal
    params = jax.tree.map(
        lambda a: jnp.asarray(normal(size=a.shape), jnp.float32), rbm.init(jax.random.key(0))
    )
    key = jax.random.key(args.seed + 1)
    rows = ebmpp.perfect_sample(rbm, params, key, args.pairs, method="enumerate")["v"]
    return rbm, params, rows


def independent(rbm: FactorGraph, params: Any) -> float:
    """Trace of the covariance of one exact draw's energy gradient, by autodiff of the exact log Z.

    The statistics that the gradient consists of are all binary, so a variance is mean (1 - mean).
    """
    means = jax.grad(lambda p: exact.log_partition(rbm, p))(params)
    return float(sum((m * (1 - m)).sum() for m in jax.tree.leaves(jax.tree.map(jnp.abs, means))))


@partial(jax.jit, static_argnums=(0, 1, 5))
def repeat(
    rbm: FactorGraph, estimator: UCD, params: Any, rows: Array, pair: Array, repeats: int
) -> tuple[Any, dict[str, Array]]:
    """Gradients and metrics of estimates after one another at the same params."""
    batch = Batch.of({"v": rows})
    state = estimator.init(rbm, params, batch.rows, len(rows), random.fold_in(pair, 0, 1))

    def one(state: Any, step: Array) -> tuple[Any, tuple[Any, dict[str, Array]]]:
        made = estimator.estimate(rbm, params, state, batch, random.fold_in(pair, step, 2))
        return made.state, (made.gradient, made.metrics)

    _, made = lax.scan(one, state, jnp.arange(_SETTLE + repeats, dtype=jnp.uint32))
    return jax.tree.map(lambda a: a[_SETTLE:], made)


def measure(
    name: str, rbm: FactorGraph, params: Any, rows: Array, args: argparse.Namespace
) -> dict[str, Any]:
    """A line of the table."""
    estimator = UCD(num_pairs=args.pairs, **METHODS[name])
    pair = random.key_pair(jax.random.key(args.seed + 2))
    gradients, metrics = repeat(rbm, estimator, params, rows, pair, args.repeats)
    flat = np.concatenate(
        [np.asarray(g, float).reshape(args.repeats, -1) for g in jax.tree.leaves(gradients)], 1
    )
    each = ((flat - flat.mean(0)) ** 2).sum(1) * args.repeats / (args.repeats - 1) * args.pairs
    unit = independent(rbm, params)
    sweeps, lag = (np.asarray(metrics[n], float) for n in ("sweeps", "lag"))
    return {
        "method": name,
        "variance": round(float(each.mean() / unit), 3),
        "standard_error": round(float(each.std(ddof=1) / args.repeats**0.5 / unit), 3),
        "sweeps_a_pair": round(float(sweeps.mean()), 1),
        "lag": round(float(lag.mean()), 1),
    }


#: Of methods that are alike, a colour each.
_KINDS = (
    ("k = lag = 1", "k = lag = 5", "k = lag = 20"),
    ("adaptive, 95 % quantile (the default)", "the same, m=0"),
    ("target_variance=1", "target_variance=0.5", "target_variance=1.3, m=0", "target_cost=20"),
    ('start="persistent"', 'marginalize="h"', 'marginalize="layers"'),
)


def draw(table: list[dict[str, Any]], path: Path) -> None:
    """Variance against cost, both on logarithmic axes: along a grey line their product is the same."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    rows = {row["method"]: row for row in table}
    figure, ax = plt.subplots(figsize=(8.2, 4.6), layout="constrained")
    for kind, names in enumerate(_KINDS):
        for mark, name in enumerate(names):
            row = rows[name]
            look = {"color": style.COLORS[kind], "marker": style.marker(mark), "linestyle": "none"}
            look["markerfacecolor"] = "none"  # two of them lie on one place
            at = row["sweeps_a_pair"], row["variance"], 2 * row["standard_error"]
            ax.errorbar(*at, markersize=6 + mark, capsize=3, label=name, **look)
    ax.set(xscale="log", yscale="log", xlabel="cost: sweeps a pair")
    ax.set_ylabel("variance of the gradient, in units of\nas many independent exact draws")
    ends, heights = np.array(ax.get_xlim()), ax.get_ylim()
    for product in (1, 2, 5, 10, 20, 50, 100):
        ax.plot(ends, product / ends, color=style.FAINT, linewidth=0.6, zorder=0)
    ax.axhline(1, color=style.INK, linestyle="--", linewidth=1, label="independent exact draws")
    ax.set(xlim=ends, ylim=heights)
    ax.set_xticks([5, 10, 20], ["5", "10", "20"])
    ax.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
    ax.minorticks_off()
    ax.set_title("bars: two standard errors; along a grey line cost times variance is the same", fontsize=9)
    style.tidy(ax, legend=True)
    ax.grid(visible=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# -- along training ------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 1, 2))
def ascend(
    rbm: FactorGraph, estimator: Estimator, count: int, rows: Array, carry: Any, key: Array, rate: Array
) -> tuple[Any, dict[str, Array]]:
    """Plain gradient steps from all rows."""
    batch = Batch.of({"v": rows})

    def one(carry: Any, index: Array) -> tuple[Any, dict[str, Array]]:
        params, state = carry
        made = estimator.estimate(rbm, params, state, batch, random.fold_in(key, index))
        params = jax.tree.map(lambda p, g: p - rate * g, params, made.gradient)
        return (params, made.state), made.metrics

    return lax.scan(one, carry, jnp.arange(count, dtype=jnp.uint32))


@partial(jax.jit, static_argnums=(0, 1, 2))
def scatter(
    rbm: FactorGraph, estimator: Estimator, repeats: int, rows: Array, carry: Any, key: Array
) -> dict[str, Array]:
    """Summed variances of a factor's gradient, of repeats, times the chains of one."""
    batch = Batch.of({"v": rows})
    one = lambda i: estimator.estimate(rbm, *carry, batch, random.fold_in(key, i)).gradient
    made = lax.map(one, jnp.arange(repeats, dtype=jnp.uint32))
    return {name: _CHAINS * g.reshape(repeats, -1).var(0, ddof=1).sum() for name, g in made.items()}


def follow(method: str, seed: int, rows: Array, args: argparse.Namespace) -> dict[str, Any]:
    """Variances along one run."""
    label, estimator = ALONG[method]
    rbm, key = ebmpp.layered(v=Bernoulli(rows.shape[1]), h=Bernoulli(100)), jax.random.key(seed)
    params, pair = rbm.init(key, rows), random.key_pair(jax.random.fold_in(key, 1))
    state = estimator.init(rbm, params, {"v": rows}, len(rows), random.fold_in(pair, 0, 1))
    carry, every, begun = (params, state), max(1, args.steps // args.points), 0.0
    made: dict[str, Any] = {"method": label, "seed": seed, "step": [], "ended": "all steps"}
    made |= {name: [] for name in (*_FACTORS.values(), "meeting_time_mean", "sweeps")}
    spent: list[float] = []
    for step in range(every, args.steps + 1, every):
        begun = time.monotonic()
        at = random.fold_in(pair, step, 2)
        carry, told = jax.device_get(ascend(rbm, estimator, every, rows, carry, at, args.rate))
        spent.append(time.monotonic() - begun)
        variances = scatter(rbm, estimator, args.repeats, rows, carry, random.fold_in(pair, step, 3))
        made["step"].append(step)
        for name, value in variances.items():
            made[_FACTORS[name]].append(float(f"{float(value):.4g}"))
        if "sweeps" in told:
            made["meeting_time_mean"].append(round(float(told["meeting_time_mean"].mean()), 2))
            made["sweeps"].append(round(float(told["sweeps"].mean()), 2))
        if sum(spent) > args.seconds:
            made["ended"] = f"stopped after {args.seconds:.0f} s"
            break
    made["ms_a_batch"] = float(f"{1e3 * np.mean(spent[1:] or spent) / every:.3g}")
    made["sweeps_a_batch"] = float(np.mean(made["sweeps"])) if made["sweeps"] else 1.0
    told = ", ".join(f"{name} {made[name][-1]:.4g}" for name in _FACTORS.values())
    print(
        f"{label}, seed {seed}: {told} at step {made['step'][-1]}, {made['ms_a_batch']} ms a step", flush=True
    )
    return made


def draw_along(runs: list[dict[str, Any]], path: Path) -> None:
    """Variances of b, c and W against the step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.ticker import LogLocator

    figure, axes = style.grid(3, (4.2, 3.6))
    for index, (label, _) in enumerate(ALONG.values()):
        own = [made for made in runs if made["method"] == label]
        look = style.look(index) | {"label": label, "linewidth": 1.4}
        for ax, name in zip(axes, _FACTORS.values(), strict=True):
            if own:
                x = max((made["step"] for made in own), key=len)
                bands.band(ax, x, [np.array(made[name]) for made in own], **look)
    for ax, name in zip(axes, _FACTORS.values(), strict=True):
        ax.set(xlabel="step", ylabel=f"variance of one chain's gradient in {name}", yscale="log")
        ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.tick_params(axis="y", which="both", labelsize=8)
        style.tidy(ax)
    told = "200x100 units, 1,000 rows of a 200x20 machine, times the chains of a step"
    figure.suptitle(f"{told}: {bands.over(len({made['seed'] for made in runs}))}", fontsize=9)
    style.legend_below(figure, axes, ncols=4)
    figure.savefig(path, dpi=120)


def training(args: argparse.Namespace) -> None:
    """Figure 12."""
    kept = args.out / "gradient_variance_training.json"
    if args.draw:
        draw_along(json.loads(kept.read_text(encoding="utf-8"))["runs"], kept.with_suffix(".png"))
        return
    truth, runs = simulated_rbm.parse(["--rows", str(_CHAINS), "--truth", str(args.truth)]), []
    rows = simulated_rbm.simulate(truth)[0]["log_likelihood"]
    for seed in args.seeds:
        runs += [follow(method, seed, rows, args) for method in args.only]
    args.out.mkdir(parents=True, exist_ok=True)
    made = {"as_printed": "UCD's variance is comparable to that of CD and PCD, but for a few extreme cases"}
    text = json.dumps(made | {"runs": runs}, indent=1) + "\n"
    kept.write_text(text, encoding="utf-8")
    draw_along(runs, kept.with_suffix(".png"))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, tabulate, draw."""
    args = parse(argv)
    if args.experiment == "training":
        training(args)
        return
    kept = args.out / "gradient_variance.json"
    if args.draw:
        draw(json.loads(kept.read_text(encoding="utf-8"))["runs"], kept.with_suffix(".png"))
        return
    rbm, params, rows = model(args)
    table = []
    print(f"{'':40} {'variance':>9} {'error':>7} {'sweeps':>7} {'lag':>6}")
    for name in METHODS:
        row = measure(name, rbm, params, rows, args)
        table.append(row)
        told = f"{row['variance']:9.2f} {row['standard_error']:7.2f} {row['sweeps_a_pair']:7.1f}"
        told += f" {row['lag']:6.1f}"
        print(f"{name:40} {told}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"runs": table}, indent=1) + "\n", encoding="utf-8")
    draw(table, kept.with_suffix(".png"))


if __name__ == "__main__":
    main()
