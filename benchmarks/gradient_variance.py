# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What holds the variance of an unbiased gradient, and what it costs.

A machine with N(0, 1) params whose states can be summed, so that the variance of independent exact draws is
known: the trace of the covariance of one state's energy gradient. Each estimator runs at the same params
until its lag has settled, then its negative phase is repeated; its variance is told in units of as many
independent draws as it has pairs, and its cost in sweeps a pair (a coupled sweep moves two chains and counts
as two).

``python benchmarks/gradient_variance.py`` takes about two minutes.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, section 5.1, where variances are compared.
2. Taniguchi et al. (2023), equation 27: layers summed out.
"""

import argparse
from collections.abc import Sequence
from functools import partial
import json
from pathlib import Path
from typing import Any

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

import ebmpp
from ebmpp import UCD, Bernoulli, FactorGraph, exact
from ebmpp.core import random
from ebmpp.diagnostics import style
from ebmpp.estimators import Batch

METHODS: dict[str, dict[str, Any]] = {
    "k = lag = 1": {"k": 1, "lag": 1},
    "k = lag = 5": {"k": 5, "lag": 5},
    "k = lag = 20": {"k": 20, "lag": 20},
    "adaptive, 95 % quantile (the default)": {},
    "the same, m=0": {"m": 0},
    "target_variance=1": {"target_variance": 1.0},
    "target_variance=0.5": {"target_variance": 0.5},
    "target_variance=1.3, m=0": {"target_variance": 1.3, "m": 0},
    "target_cost=20": {"target_cost": 20.0},
    'start="persistent"': {"start": "persistent"},
    'marginalize="h"': {"marginalize": "h"},
    'marginalize="layers"': {"marginalize": "layers"},
}
_SETTLE = 60  # steps until the smoothed lag has come to rest


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--visible", type=int, default=16)
    add("--latent", type=int, default=8)
    add("--pairs", type=int, default=500)
    add("--repeats", type=int, default=200)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw the table that there is")
    args = parser.parse_args(argv)
    if min(args.visible, args.latent, args.pairs) < 1 or args.repeats < 2:
        parser.error("--visible, --latent and --pairs are at least 1, --repeats 2")
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


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, tabulate, draw."""
    args = parse(argv)
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
