# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How long pairs take to meet, by coupling: three experiments.

``python benchmarks/meeting_times.py`` writes tables to the terminal and figures to ``benchmarks/report``:

- ``untrained``: Qiu et al. (2020), figure 5. 500x100 units, every param N(0, 0.1^2), 1000 pairs.
- ``trained``: the models of ``engine.py``, where what counts is the time until all pairs have met.
- ``orthogonal``: Taniguchi et al. (2023), figure 1. d x d units, orthogonal weights, from uniform draws and
  from local modes; units in {0, 1} and in {-1, +1}. A pair is stopped after 1000 sweeps and counted as unmet.
"""

import argparse
from collections.abc import Sequence
from functools import partial
import json
from pathlib import Path
import time
from typing import Any
import warnings

from engine import DEFAULT_SLOTS, MODELS, ONE, trained
from handwritten import interleaved
import matplotlib
from matplotlib import pyplot as plt
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp.core import random
from ebmpp.coupling.accumulators import EnergyGradient
from ebmpp.coupling.engine import run_pairs
from ebmpp.diagnostics import style
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target

PAIRS, LIMIT, REPEATS = 1000, 1000, 5
REPORT = Path(__file__).parent / "report"
COUPLINGS = {
    "default": None,
    "maximal on every layer": "maximal",
    "Algorithm 3 (maximal, common)": ("maximal", "common"),
    "common on every layer": "common",
    "Algorithm 1 (maximal, independent)": ("maximal_independent", "independent"),
}


def starting(rbm: ebmpp.FactorGraph, params: dict, v: Array) -> dict[str, Array]:
    """``v`` and latents drawn given it."""
    h = rbm.conditional(params, {"v": v}, "h").sample(jax.random.key(1))
    return {"v": v, "h": h.astype(jnp.float32)}


def untrained(out: Path, pairs: int = PAIRS, repeats: int = REPEATS) -> None:
    """The table and the figure of the untrained model."""
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(500), h=ebmpp.Bernoulli(100))
    normal = lambda key, a: 0.1 * jax.random.normal(key, a.shape)
    shapes = rbm.init(jax.random.key(0))
    params = dict(
        zip(shapes, map(normal, jax.random.split(jax.random.key(7), 3), shapes.values()), strict=True)
    )
    v = jax.random.bernoulli(jax.random.key(2), 0.5, (pairs, 500)).astype(jnp.float32)
    axes = plt.figure(figsize=(8.6, 3.8), layout="constrained").add_subplot()
    print(f"{'500x100, untrained':36} {'tau mean':>8} {'<= 10':>7} {'trials':>7} {'ms':>8}")
    runs, rows = timed(rbm, params, starting(rbm, params, v), COUPLINGS, repeats), []
    for name, (outcome, seconds) in runs.items():
        tau = np.asarray(outcome.meeting_time)
        share = (tau <= 10).mean()
        print(
            f"{name:36} {tau.mean():8.1f} {share:7.1%} {outcome.trials:7.2f} {1e3 * seconds:8.0f}", flush=True
        )
        row = {"coupling": name, "mean": round(float(tau.mean()), 2), "at_most_10": round(float(share), 4)}
        row |= {"standard_error": round(float((share * (1 - share) / pairs) ** 0.5), 4), "pairs": pairs}
        rows.append(row | {"discarded_a_sweep": round(float(2 * (outcome.trials - 1)), 3)})
        rows[-1]["ms"] = round(1e3 * seconds, 1)
        if name != "default":
            ebmpp.diagnostics.plot_meeting_times(
                tau, ax=axes, label=f"{name}: mean {tau.mean():.1f}, {share:.0%} $\\leq$ 10"
            )
    axes.set_xlim(1, None)
    axes.set_xscale("log")  # from 8 to 700 sweeps on average, and none is cut
    axes.set_title(f"500x100, params $N(0, 0.1^2)$, {pairs} pairs", fontsize=10)
    keep({"as_printed": "65.4 % of tau <= 10 by Algorithm 3", "runs": rows}, "meeting_times_untrained", out)
    save(axes, "meeting_times_untrained.png", out)


def timed(
    rbm: ebmpp.FactorGraph, params: dict, start: dict, names: dict, repeats: int = REPEATS
) -> dict[str, tuple]:
    """Outcome and seconds (minimum of interleaved runs) by coupling."""
    pair = random.key_pair(jax.random.key(3))

    def run(coupling: object) -> object:
        moves = resolve_moves(rbm, coupling)
        target = Target(rbm, params)
        return run_pairs(target, moves, EnergyGradient(), DEFAULT_SLOTS, start, start, pair, ONE)

    found = interleaved({name: lambda c=c: run(c) for name, c in names.items()}, repeats)
    return {name: (run(c), found[name][1]) for name, c in names.items()}


def by_time(out: Path) -> None:
    """Time to meeting on trained models: what the default coupling is chosen by."""
    names = {name: COUPLINGS[name] for name in ("Algorithm 3 (maximal, common)", "maximal on every layer")}
    print(f"{'trained':14} {'coupling':32} {'tau mean':>8} {'max':>6} {'trials':>7} {'ms':>8}")
    for model, recipe in MODELS.items():
        rbm, params, v = trained(recipe)
        for name, (outcome, seconds) in timed(rbm, params, starting(rbm, params, v), names).items():
            tau = np.asarray(outcome.meeting_time)
            told = f"{tau.mean():8.1f} {tau.max():6d} {outcome.trials:7.2f} {1e3 * seconds:8.1f}"
            print(f"{model:14} {name:32} {told}", flush=True)


#: name: coupling, start
METHODS = {
    "Algorithm 1, uniform start": (("maximal_independent", "independent"), "uniform"),
    "Algorithm 3, uniform start": (("maximal", "common"), "uniform"),
    "maximal everywhere, uniform start": ("maximal", "uniform"),
    "maximal everywhere, local mode": ("maximal", "local_mode"),
    "Metropolis, uniform start": ("metropolis", "uniform"),
    "Metropolis, local mode": ("metropolis", "local_mode"),
}


def first_unit(x: dict[str, Array]) -> Array:
    """Something to estimate; the meeting times do not depend on it."""
    return x["v"][0]


def steps(graph: ebmpp.FactorGraph, params: dict, coupling: object, start: str) -> dict[str, float]:
    """Local search steps T, meeting times tau (unmet pairs at the limit) and their sum; the share unmet."""
    begun = time.monotonic()
    found = ebmpp.local_search(graph, params, rng_key=jax.random.key(6), num_rows=200).steps
    search = np.asarray(found, float) + 1 if start == "local_mode" else np.zeros(200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # unmet pairs and nominal unbiasedness: both are shown
        try:
            est = ebmpp.unbiased_expectation(
                graph, params, first_unit, rng_key=jax.random.key(5), num_pairs=200, coupling=coupling,
                init=start, max_sweeps=LIMIT, unmet="drop", num_slots=64,
            )  # fmt: skip
        except ebmpp.errors.UnmetError:
            return {"mean": float(LIMIT), "low": LIMIT, "high": LIMIT, "unmet": 1.0}
    tau = np.minimum(est.meeting_time, LIMIT)
    low, high = np.quantile(search + tau, [0.1, 0.9])
    made = {"mean": (search + tau).mean(), "low": low, "high": high, "unmet": est.num_unmet / 200}
    made |= {"search": search.mean(), "tau": tau.mean(), "tau_above_1": (tau > 1).mean()}
    made |= {"seconds": time.monotonic() - begun}
    return {name: round(float(value), 4) for name, value in made.items()}


SIZES = (2, 10, 25, 50, 100, 200)
UNITS = {"{0, 1}": ebmpp.Bernoulli, "{-1, +1}": ebmpp.Spin}


def toy(out: Path, sizes: Sequence[int] = SIZES) -> None:
    """Steps against the number of units, for both kinds of units."""
    found = {}
    for units, family in UNITS.items():
        for d in sizes:
            graph = ebmpp.layered(v=family(d), h=family(d))
            params = graph.init(jax.random.key(d), scheme={"weight": "orthogonal", "bias": "zero"})
            for name, (coupling, start) in METHODS.items():
                made = found[units, d, name] = steps(graph, params, coupling, start)
                parts = f"T {made.get('search', 0):5.1f} tau {made.get('tau', np.inf):6.1f}"
                told = f"steps {made['mean']:7.1f}  {parts}  unmet {made['unmet']:6.1%}"
                print(f"{units:8} d={d:3d} {name:34} {told}", flush=True)
    rows = [{"units": u, "d": d, "method": n} | made for (u, d, n), made in found.items()]
    printed = (
        "Gibbs couplings grow exponentially with d; by Metropolis from local modes tau is always 1 from "
    )
    printed += "d = 25 on, and T grows gradually"
    keep({"as_printed": printed, "pairs": 200, "limit": LIMIT, "runs": rows}, "meeting_times_orthogonal", out)
    draw_toy(found, sizes, out)


def draw_toy(found: dict[tuple[str, int, str], dict], sizes: Sequence[int], out: Path) -> None:
    """The figure of steps by units, number of units and method: means, and 80 % of the pairs."""
    figure, panels = style.grid(len(UNITS), (5.2, 4.2))
    for axes, units in zip(panels, UNITS, strict=True):
        for index, (name, (_, start)) in enumerate(METHODS.items()):
            own = [found[units, d, name] for d in sizes]
            mean, low, high, unmet = ([made[n] for made in own] for n in ("mean", "low", "high", "unmet"))
            color, mark = style.COLORS[index], style.marker(index)
            line = "-" if start == "local_mode" else "--"
            axes.fill_between(sizes, low, high, color=color, alpha=0.10, linewidth=0)
            axes.plot(sizes, mean, line, color=color, marker=mark, label=name, linewidth=1.5, markersize=5)
            there = [(d, y) for d, y, share in zip(sizes, mean, unmet, strict=True) if share]
            if there:
                axes.plot(*zip(*there, strict=True), mark, color=color, markerfacecolor="white", markersize=5)
        axes.axhline(LIMIT, color=style.FAINT, linewidth=0.8)
        axes.set(xlabel="visible units, and as many latent ones", yscale="log")
        axes.set_ylabel("sweeps: local search + meeting time")
        axes.set_title(f"units in {units}, orthogonal weights, no biases", fontsize=9)
        axes.yaxis.set_major_formatter("{x:g}")
        style.tidy(axes)
    told = f"means and 80 % of 200 pairs; hollow: some pairs unmet after {LIMIT} sweeps, counted as {LIMIT}"
    figure.suptitle(told, fontsize=9)
    style.legend_below(figure, panels, ncols=3)
    figure.savefig(out / "meeting_times_orthogonal.png", dpi=120)


def keep(made: dict[str, Any], name: str, out: Path) -> None:
    """Write the numbers."""
    (out / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def save(axes: plt.Axes, name: str, out: Path) -> None:
    """Write the figure."""
    out.mkdir(exist_ok=True)
    axes.figure.savefig(out / name, dpi=130)


EXPERIMENTS = {"untrained": untrained, "trained": by_time, "orthogonal": toy}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", default=list(EXPERIMENTS), help=", ".join(EXPERIMENTS))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="d of the orthogonal models")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of the untrained model")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each time on it")
    parser.add_argument("--out", type=Path, default=REPORT, help="folder for pictures")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.experiments) - set(EXPERIMENTS))
    if unknown:
        parser.error(f"the experiments are {list(EXPERIMENTS)}, not {unknown}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for."""
    matplotlib.use("Agg")
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    experiments = EXPERIMENTS | {"orthogonal": partial(toy, sizes=args.sizes)}
    experiments["untrained"] = partial(untrained, pairs=args.pairs, repeats=args.repeats)
    for name in args.experiments:
        begun = time.time()
        experiments[name](args.out)
        print(f"{name}: {time.time() - begun:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
