# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Meeting times of coupled pairs by coupling.

``python benchmarks/papers/meeting_times.py`` prints tables and writes pictures:

- ``untrained``: Qiu et al. (2020), figure 5. 500x100 units, every param N(0, 0.1^2),
  1000 pairs.
- ``orthogonal``: Taniguchi et al. (2023), figure 1. d x d units, orthogonal weights,
  from uniform draws and from local modes; units in {0, 1} and in {-1, +1}. A pair is
  stopped after 1000 sweeps and counted as unmet.
"""

import argparse
from collections.abc import Sequence
import time
from typing import Any
import warnings

import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row

import jax
from jax import Array

import ebmpp
from ebmpp import FactorGraph
from ebmpp.contrib import metropolis_sweep

LIMIT = 1000
SEARCHES = 200
COUPLINGS = {
    "maximal on every layer (the default)": "maximal",
    "Algorithm 3 (maximal, common)": ("maximal", "common"),
    "common on every layer": "common",
    "Algorithm 1 (maximal, independent)": ("maximal_independent", "independent"),
}
#: coupling, start
METHODS = {
    "Algorithm 1, uniform start": (("maximal_independent", "independent"), "uniform"),
    "Algorithm 3, uniform start": (("maximal", "common"), "uniform"),
    "maximal everywhere, uniform start": ("maximal", "uniform"),
    "maximal everywhere, local mode": ("maximal", "local_mode"),
    "Metropolis, uniform start": (metropolis_sweep, "uniform"),
    "Metropolis, local mode": (metropolis_sweep, "local_mode"),
}
UNITS = {"{0, 1}": ebmpp.Bernoulli, "{-1, +1}": ebmpp.Spin}


def first_unit(x: dict[str, Array]) -> Array:
    """Return one unit; meeting times do not depend on the function."""
    return x["v"][0]


def untrained(args: argparse.Namespace) -> None:
    """Print and draw the meeting times of the untrained model."""
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(500), h=ebmpp.Bernoulli(100))

    def normal(key, a):
        return 0.1 * jax.random.normal(key, a.shape)

    shapes = rbm.init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(7), len(shapes))
    params = dict(zip(shapes, map(normal, keys, shapes.values()), strict=True))
    figure, axes = style.grid(1, (8.6, 3.8))
    rows: list[Row] = []
    for name, coupling in COUPLINGS.items():
        result = ebmpp.unbiased_expectation(
            rbm,
            params,
            first_unit,
            rng_key=jax.random.key(3),
            num_pairs=args.pairs,
            coupling=coupling,
            k=1,
            m=1,
            lag=1,
        )
        tau = result.meeting_time
        share = float((result.meeting_time <= 10).mean())
        rows.append(
            {
                "coupling": name,
                "pairs": args.pairs,
                "mean": round(float(tau.mean()), 2),
                "at_most_10": round(share, 4),
                "standard_error": round((share * (1 - share) / args.pairs) ** 0.5, 4),
                "discarded_a_sweep": round(2 * (result.trials - 1), 3),
            }
        )
        print(
            f"{name:38} mean {tau.mean():7.1f}, <= 10: {share:.1%}, {result.trials:.2f} trials",
            flush=True,
        )
        label = f"{name}: mean {tau.mean():.1f}, {share:.0%} $\\leq$ 10"
        ebmpp.diagnostics.plot_meeting_times(tau, ax=axes[0], label=label)
    axes[0].set(xlim=(1, None), xscale="log")  # from 8 to 700 sweeps on average
    archive = Records(args.out, "meeting_times_untrained")
    archive.write({"as_printed": "65.4 % of tau <= 10 by Algorithm 3", "runs": rows})
    title = f"500x100, params $N(0, 0.1^2)$, {args.pairs} pairs"
    pictures.save(figure, axes, archive.summary.with_suffix(".png"), title, 2)


def steps(graph: FactorGraph, params: dict, coupling: Any, start: str) -> Row:
    """Return local search steps, meeting times and their sum; unmet pairs count as
    :data:`LIMIT`."""
    begin = time.monotonic()
    result = ebmpp.local_search(
        graph, params, rng_key=jax.random.key(6), num_rows=SEARCHES
    ).steps
    search = (
        np.asarray(result, float) + 1 if start == "local_mode" else np.zeros(SEARCHES)
    )
    with warnings.catch_warnings():
        # unmet pairs and nominal unbiasedness: both are shown
        warnings.simplefilter("ignore", UserWarning)
        try:
            pairs = ebmpp.unbiased_expectation(
                graph,
                params,
                first_unit,
                rng_key=jax.random.key(5),
                num_pairs=SEARCHES,
                coupling=coupling,
                init=start,
                max_sweeps=LIMIT,
                unmet="drop",
                num_slots=64,
            )
        except ebmpp.errors.UnmetError:
            return {"mean": float(LIMIT), "low": LIMIT, "high": LIMIT, "unmet": 1.0}
    tau = np.minimum(pairs.meeting_time, LIMIT)
    low, high = np.quantile(search + tau, [0.1, 0.9])
    row = {
        "mean": (search + tau).mean(),
        "low": low,
        "high": high,
        "unmet": pairs.num_unmet / SEARCHES,
    }
    row |= {"search": search.mean(), "tau": tau.mean(), "tau_above_1": (tau > 1).mean()}
    row |= {"seconds": time.monotonic() - begin}
    return {name: round(float(value), 4) for name, value in row.items()}


def orthogonal(args: argparse.Namespace) -> None:
    """Print and draw steps against the number of units, for both kinds of units."""
    rows: list[Row] = []
    for units, family in UNITS.items():
        for d in args.sizes:
            graph = ebmpp.layered(v=family(d), h=family(d))
            params = graph.init(
                jax.random.key(d), scheme={"weight": "orthogonal", "bias": "zero"}
            )
            for name, (coupling, start) in METHODS.items():
                row = steps(graph, params, coupling, start)
                rows.append({"units": units, "d": d, "method": name} | row)
                print(
                    f"{units:8} d={d:3d} {name:34} {row['mean']:7.1f}, unmet {row['unmet']:6.1%}",
                    flush=True,
                )
    figure, axes = style.grid(len(UNITS), (5.2, 4.2))
    for ax, units in zip(axes, UNITS, strict=True):
        for index, name in enumerate(METHODS):
            subset = [
                row for row in rows if row["units"] == units and row["method"] == name
            ]
            d, mean, low, high = (
                np.array([row[n] for row in subset])
                for n in ("d", "mean", "low", "high")
            )
            look = style.look(index)
            ax.fill_between(d, low, high, color=look["color"], alpha=0.10, linewidth=0)
            ax.plot(
                d, mean, marker=style.marker(index), label=name, markersize=5, **look
            )
            unmet = np.array([row["unmet"] > 0 for row in subset])
            hollow = {
                "linestyle": "none",
                "markerfacecolor": "white",
                "color": look["color"],
            }
            ax.plot(d[unmet], mean[unmet], marker=style.marker(index), **hollow)
        ax.set(xlabel="visible units, and as many latent ones", yscale="log")
        ax.set_ylabel("sweeps: local search + meeting time")
        ax.set_title(f"units in {units}, orthogonal weights, no biases", fontsize=9)
    archive = Records(args.out, "meeting_times_orthogonal")
    printed = (
        "Gibbs couplings: exponential in d. Metropolis from local modes: tau = 1 from "
        "d = 25 on"
    )
    archive.write({"as_printed": printed, "limit": LIMIT, "runs": rows})
    title = f"means and 80 % of {SEARCHES} pairs; hollow: some pairs unmet after {LIMIT} sweeps"
    pictures.save(figure, axes, archive.summary.with_suffix(".png"), title)


EXPERIMENTS = {"untrained": untrained, "orthogonal": orthogonal}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__, draws=False)
    parser.add_argument(
        "experiments", nargs="*", default=list(EXPERIMENTS), help=", ".join(EXPERIMENTS)
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=(2, 10, 25, 50, 100, 200), help="d"
    )
    parser.add_argument(
        "--pairs", type=int, default=1000, help="of the untrained model"
    )
    args = records.parse(parser, argv, "pairs")
    if unknown := sorted(set(args.experiments) - set(EXPERIMENTS)):
        parser.error(f"experiments must be of {list(EXPERIMENTS)}, got {unknown}.")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiments."""
    args = parse(argv)
    for name in args.experiments:
        EXPERIMENTS[name](args)


if __name__ == "__main__":
    main()
