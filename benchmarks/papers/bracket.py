# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coverage of the bracket of log Z, and a diverging model under two estimates.

Coverage: twenty random models of four kinds, and ten machines that learned bars and
stripes 4x4 by PCD or by CD, all small enough to sum. On each the bracket of annealed
importance sampling, forward and in reverse from exact draws, is computed with several
keys. Counted is how often the exact log Z lies between the lower end of the lower
estimate's interval and the upper end of the upper one's (each 97.5 % one-sided,
together at least 95 %), how often in each side's own 95 % interval, and how often the
estimate warned of too few effective particles.

Divergence: a machine of 16 latent units learns bars and stripes 4x4 by CD-1 for so long
that it gets worse. Three log-likelihoods are computed along the way: the exact one,
that of the bracket, and ``log mean p(v | h_t)`` over the latent states of chains that
start at the evaluated rows. The chains stay near their starts, so the last one is far
too large for a model whose mass is elsewhere.

**References**

1. Grosse, Ghahramani, Adams (2015), *Sandwiching the marginal likelihood using
   bidirectional Monte Carlo*.
2. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, section 5: chains from
   the data.
"""

import argparse
from collections.abc import Sequence
from functools import cache, partial
import itertools
import json
from pathlib import Path
import textwrap
from typing import Any
import warnings

from matplotlib.figure import Figure
import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row
from scipy import stats

import jax
from jax import Array
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, Bernoulli, Categorical, FactorGraph, Gaussian
from ebmpp.training import Progress

#: a graph and the standard deviation of its params
KINDS: dict[str, tuple[FactorGraph, float]] = {
    "Boltzmann machine 20x10": (ebmpp.layered(v=Bernoulli(20), h=Bernoulli(10)), 1.0),
    "deep, 16x10x8": (
        ebmpp.layered(v=Bernoulli(16), h1=Bernoulli(10), h2=Bernoulli(8)),
        1.0,
    ),
    "categorical, 8 of 4 x 8": (
        ebmpp.layered(v=Categorical(8, 4), h=Bernoulli(8)),
        1.0,
    ),
    "Gaussian-Bernoulli 10x10": (ebmpp.layered(v=Gaussian(10), h=Bernoulli(10)), 0.4),
}
_BARS = ebmpp.layered(v=Bernoulli(16), h=Bernoulli(16))
#: machines that learned bars and stripes: an estimator and its number of steps
TRAINED: dict[str, tuple[ebmpp.estimators.Estimator, int]] = {
    "trained by PCD, 16x16": (PCD(k=1, num_chains=1000), 5000),
    "trained by CD-1, 16x16": (CD(k=1), 20_000),
}
MODELS = 5  # of each kind
LEVEL = 0.95

# of bars and stripes 4x4: minus the entropy of 32 rows of which two occur twice
_BEST = -108.13
_Z = float(stats.norm.isf((1 - LEVEL) / 2))
_SIDES = {"bracket": "the bracket", "lower": "forward alone", "upper": "reverse alone"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__)
    add = parser.add_argument
    add("--repeats", type=int, default=20, help="brackets of each model")
    add("--particles", type=int, default=100)
    add(
        "--temperatures",
        type=int,
        nargs="+",
        default=[20, 300],
        help="of the ladders; the last for CD-1",
    )
    add("--steps", type=int, default=20_000, help="of CD-1")
    add("--points", type=int, default=20, help="evaluations along them")
    add("--rate", type=float, default=0.1)
    add("--sweeps", type=int, default=1000, help="of each chain that starts at a row")
    return records.parse(
        parser, argv, "repeats", "particles", "steps", "points", "rate", "sweeps"
    )


# -- coverage ------------------------------------------------------------------------


@cache
def trained(kind: str, seed: int) -> Any:
    """Return the params of a machine that learned bars and stripes, all rows per step
    at rate 0.1."""
    rows = ebmpp.data.bars_and_stripes(4)
    estimator, steps = TRAINED[kind]
    return ebmpp.fit(
        _BARS,
        rows,
        estimator=estimator,
        optimizer=optax.sgd(0.1),
        num_steps=steps,
        batch_size=len(rows),
        rng_key=jax.random.key(seed),
        progress_bar=False,
    ).params


def model(kind: str, seed: int) -> tuple[FactorGraph, Any]:
    """Return a model of a kind, and its params."""
    if kind in TRAINED:
        return _BARS, trained(kind, seed)
    graph, scale = KINDS[kind]
    generator = np.random.default_rng(seed)

    def normal(a):
        return jnp.asarray(scale * generator.normal(size=a.shape), jnp.float32)

    return graph, jax.tree.map(normal, graph.init(jax.random.key(0)))


def brackets(kind: str, seed: int, temperatures: int, args: argparse.Namespace) -> Row:
    """Return the errors of a model's brackets."""
    graph, params = model(kind, seed)
    exact = float(ebmpp.exact.log_partition(graph, params))
    sides: dict[str, list[tuple[float, float]]] = {"lower": [], "upper": []}
    warned = 0
    for repeat in range(args.repeats):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = ebmpp.bracket(
                graph,
                params,
                rng_key=jax.random.fold_in(
                    jax.random.key(args.seeds[0] + seed), repeat
                ),
                num_particles=args.particles,
                num_temperatures=temperatures,
            )
        warned += bool(caught)
        for side in sides:
            value = getattr(result, side)
            sides[side].append((value.log_partition - exact, value.standard_error))
    return {"kind": kind, "seed": seed, "exact": exact, "warned": warned} | sides


def covered(row: Row) -> dict[str, np.ndarray]:
    """Return which intervals hold the exact value: the bracket's and each side's own."""
    (low, low_error), (high, high_error) = (
        np.transpose(row[side]) for side in ("lower", "upper")
    )
    return {
        "bracket": (low - _Z * low_error <= 0) & (high + _Z * high_error >= 0),
        "lower": np.abs(low) <= _Z * low_error,
        "upper": np.abs(high) <= _Z * high_error,
    }


def coverage(rows: Sequence[Row]) -> dict[str, Row]:
    """Return counts, the 95 % interval of the rate, and the probability of so few at
    the nominal rate."""
    table: dict[str, Row] = {}
    for name in _SIDES:
        hits = np.concatenate([covered(row)[name] for row in rows])
        count = int(hits.sum())
        total = len(hits)
        interval = stats.binomtest(count, total).proportion_ci()
        table[name] = {
            "covered": count,
            "of": total,
            "rate": round(count / total, 4),
            "interval": [round(interval.low, 4), round(interval.high, 4)],
            "p_of_fewer": float(
                f"{stats.binomtest(count, total, LEVEL, alternative='less').pvalue:.3g}"
            ),
        }
    table["warned"] = {"of": len(hits), "warned": sum(row["warned"] for row in rows)}
    return table


# -- divergence ----------------------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 4))
def by_chains_from_rows(
    graph: FactorGraph, params: Any, rows: Array, rng_key: Array, sweeps: int
) -> Array:
    """Return log mean p(v | h_t) of every row, with h_t from a chain that starts at it."""

    def step(
        carry: tuple[Array, Array], key: Array
    ) -> tuple[tuple[Array, Array], None]:
        v, total = carry
        first, second = jax.random.split(key)
        h = graph.conditional(params, {"v": v}, "h").sample(first)
        conditional = graph.conditional(params, {"h": h}, "v")
        total = jnp.logaddexp(total, conditional.log_prob(rows))
        return (conditional.sample(second).astype(v.dtype), total), None

    start = rows, jnp.full(len(rows), -jnp.inf)
    (_, total), _ = jax.lax.scan(step, start, jax.random.split(rng_key, sweeps))
    return total - jnp.log(sweeps)


def diverge(args: argparse.Namespace) -> list[dict[str, float]]:
    """Return the total log-likelihood of the 32 rows along CD-1, computed in three ways."""
    rows = jnp.asarray(ebmpp.data.bars_and_stripes(4))
    points = []

    def evaluate(progress: Progress) -> None:
        key = jax.random.fold_in(jax.random.key(args.seeds[0]), progress.step)
        params = progress.params
        result = ebmpp.bracket(
            _BARS,
            params,
            rng_key=key,
            num_particles=args.particles,
            num_temperatures=args.temperatures[-1],
            ladder="adaptive",
            data=rows,
        )
        energy = float(_BARS.free_energy(params, {"v": rows}).sum())

        def total(log_z):
            return -energy - len(rows) * log_z

        point = {
            "step": progress.step,
            "exact": total(result.exact),
            "above": total(result.lower.log_partition),
            "above_error": len(rows) * result.lower.standard_error,
            "below": total(result.upper.log_partition),
            "below_error": len(rows) * result.upper.standard_error,
            "from_the_rows": float(
                by_chains_from_rows(_BARS, params, rows, key, args.sweeps).sum()
            ),
        }
        points.append({name: round(value, 3) for name, value in point.items()})

    ebmpp.fit(
        _BARS,
        rows,
        estimator=CD(k=1),
        optimizer=optax.sgd(args.rate),
        num_steps=args.steps,
        batch_size=len(rows),
        rng_key=jax.random.key(args.seeds[0]),
        monitor_every=max(1, args.steps // args.points),
        callbacks=[evaluate],
        progress_bar=False,
    )
    return points


# -- the report ----------------------------------------------------------------------


def draw(result: Row, path: Path) -> None:
    """Draw how often intervals hold the exact value, by kind of model, and likelihoods
    along CD-1."""
    count = len(result["ladders"])
    figure = Figure(figsize=(4.4 * count, 7.2), layout="constrained")
    rows = [[f"{i}" for i in range(count)], ["cd"] * count]
    axes = [*figure.subplot_mosaic(rows).values()]
    kinds = (*KINDS, *TRAINED)
    for ax, ladder in zip(axes, result["ladders"], strict=False):
        for index, (side, label) in enumerate(_SIDES.items()):
            cells = [ladder["coverage"][kind][side] for kind in kinds]
            rate = np.array([cell["rate"] for cell in cells])
            low, high = np.transpose([cell["interval"] for cell in cells])
            look = {
                "color": style.COLORS[index],
                "marker": style.marker(index),
                "linestyle": "none",
            }
            look |= {
                "markersize": 5,
                "markerfacecolor": "white",
                "capsize": 2,
                "label": label,
            }
            ax.errorbar(
                rate,
                np.arange(len(kinds)) + 0.22 * (index - 1),
                xerr=[rate - low, high - rate],
                **look,
            )
        ax.axvline(
            LEVEL,
            color=style.INK,
            linewidth=0.8,
            linestyle="--",
            label=f"nominal, {LEVEL:g}",
        )
        ax.set_yticks(
            range(len(kinds)), [textwrap.fill(kind, 16) for kind in kinds], fontsize=8
        )
        ax.invert_yaxis()
        ax.set(xlabel="share of intervals that hold the exact log Z", xlim=(0.62, 1.01))
        ax.set_title(
            f"{ladder['temperatures']} temperatures, {result['particles']} particles",
            fontsize=9,
        )
    _draw_divergence(axes[-1], result["cd"])
    pictures.save(figure, axes, path, ncols=4)


def _draw_divergence(ax: Any, points: Sequence[dict[str, float]]) -> None:
    def column(name):
        return np.array([point[name] for point in points])

    step = column("step") / 1000
    below = column("below") - 2 * column("below_error")
    above = column("above") + 2 * column("above_error")
    ax.fill_between(
        step,
        below,
        above,
        color=style.COLORS[5],
        alpha=0.5,
        label="bracket, two standard errors",
    )
    ax.plot(step, column("exact"), color=style.INK, linewidth=1.4, label="exact")
    ax.plot(
        step,
        column("from_the_rows"),
        linewidth=1.6,
        label="by chains from the rows",
        **style.look(1),
    )
    ax.axhline(
        _BEST, color=style.INK, linestyle=":", linewidth=1, label="best possible"
    )
    ax.set(
        xlabel="thousands of steps of CD-1",
        ylabel="log-likelihood of the 32 rows (nats)",
    )
    ax.set_title("bars and stripes 4x4, a machine that diverges", fontsize=9)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    archive = Records(args.out, "bracket", args.name)
    if not args.draw:
        ladders = []
        kinds = (*KINDS, *TRAINED)
        for temperatures in args.temperatures:
            rows = [
                brackets(kind, seed, temperatures, args)
                for kind in kinds
                for seed in range(MODELS)
            ]
            groups = {kind: [kind] for kind in kinds} | {
                "random": KINDS,
                "trained": TRAINED,
                "all": kinds,
            }
            table = {
                name: coverage([r for r in rows if r["kind"] in members])
                for name, members in groups.items()
            }
            ladders.append({"temperatures": temperatures, "coverage": table})
            for group, side in itertools.product(("random", *TRAINED), _SIDES):
                cell = table[group][side]
                warned = table[group]["warned"]["warned"]
                print(
                    f"{temperatures} temperatures, {group}, {side}: {cell['covered']} "
                    f"of {cell['of']} intervals hold the exact value "
                    f"({cell['rate']:.1%}); {warned} warned",
                    flush=True,
                )
        points = diverge(args)
        print(f"CD-1, last: {points[-1]}")
        sizes = {"particles": args.particles, "repeats": args.repeats}
        archive.write(sizes | {"ladders": ladders, "cd": points})
    draw(
        json.loads(archive.summary.read_text(encoding="utf-8")),
        archive.summary.with_suffix(".png"),
    )


if __name__ == "__main__":
    main()
