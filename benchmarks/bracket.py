# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How far to trust estimates of log Z: coverage of the bracket, and a diverging model that flatters.

Coverage: twenty random models of four kinds, and ten machines that learned bars and stripes 4x4 by PCD or by
CD, all small enough to sum. On each the bracket of annealed importance sampling, forward and in reverse from
exact draws, is computed several times with keys of its own; counted is how often the exact log Z lies between
the lower end of the lower estimate's interval and the upper end of the upper one's (each 97.5 % one-sided, so
95 % at least), in each side's own 95 % interval, and how often the estimate warned that too few particles
were effective.

The default call: ``ais(graph, params, rng_key=key)`` and no more, on the machines by PCD, over forty keys,
with a tenth of the temperatures too; and the same from the model's own biases in place of the pilot's means.

Divergence: a machine of 16 latent units learns bars and stripes 4x4 by CD-1 for so long that it gets worse.
Three log-likelihoods along the way: exact; by the bracket; and by chains that start at the evaluated rows,
``log mean p(v | h_t)`` over their latent states, which stay near what they started from and so flatter a
model whose mass has gone elsewhere.

**References**

1. Grosse, Ghahramani, Adams (2015), *Sandwiching the marginal likelihood using bidirectional Monte Carlo*.
2. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, section 5: chains from the data.
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

import numpy as np
from scipy import stats

import jax
from jax import Array
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, Bernoulli, Categorical, FactorGraph, Gaussian
from ebmpp.diagnostics import style
from ebmpp.training import Progress

#: a graph and the standard deviation of its params
KINDS: dict[str, tuple[FactorGraph, float]] = {
    "Boltzmann machine 20x10": (ebmpp.layered(v=Bernoulli(20), h=Bernoulli(10)), 1.0),
    "deep, 16x10x8": (ebmpp.layered(v=Bernoulli(16), h1=Bernoulli(10), h2=Bernoulli(8)), 1.0),
    "categorical, 8 of 4 x 8": (ebmpp.layered(v=Categorical(8, 4), h=Bernoulli(8)), 1.0),
    "Gaussian-Bernoulli 10x10": (ebmpp.layered(v=Gaussian(10), h=Bernoulli(10)), 0.4),
}
_BARS = ebmpp.layered(v=Bernoulli(16), h=Bernoulli(16))
#: what learned bars and stripes: an estimator and how many steps it made
TRAINED: dict[str, tuple[ebmpp.estimators.Estimator, int]] = {
    "trained by PCD, 16x16": (PCD(k=1, num_chains=1000), 5000),
    "trained by CD-1, 16x16": (CD(k=1), 20_000),
}
MODELS = 5  # of a kind
LEVEL = 0.95

_BEST = -108.13  # of bars and stripes 4x4: the entropy of 32 rows of which two are there twice

_Z = float(stats.norm.isf((1 - LEVEL) / 2))
_SIDES = {"bracket": "the bracket", "lower": "forward alone", "upper": "reverse alone"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--repeats", type=int, default=20, help="brackets of each model")
    add("--particles", type=int, default=100)
    add("--temperatures", type=int, nargs="+", default=[20, 300], help="of the ladders; the last for CD-1")
    add("--steps", type=int, default=20_000, help="of CD-1")
    add("--points", type=int, default=20, help="evaluations along them")
    add("--rate", type=float, default=0.1)
    add("--sweeps", type=int, default=1000, help="of each chain that starts at a row")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw the numbers that there are")
    args = parser.parse_args(argv)
    if (
        min(args.repeats, args.steps, args.points, args.sweeps) < 1
        or min(args.particles, *args.temperatures) < 2
    ):
        parser.error("numbers are positive, particles and temperatures at least 2")
    return args


# -- coverage --------------------------------------------------------------------------------------


def random_params(graph: FactorGraph, scale: float, seed: int) -> Any:
    """Every param N(0, scale^2)."""
    generator = np.random.default_rng(seed)
    draw = lambda a: jnp.asarray(scale * generator.normal(size=a.shape), jnp.float32)
    return jax.tree.map(draw, graph.init(jax.random.key(0)))


@cache
def trained(kind: str, seed: int) -> Any:
    """Params of a machine that learned bars and stripes, all rows a step at rate 0.1."""
    rows, (estimator, steps) = ebmpp.data.bars_and_stripes(4), TRAINED[kind]
    options = {"num_steps": steps, "batch_size": len(rows), "rng_key": jax.random.key(seed)}
    made = ebmpp.fit(
        _BARS, rows, estimator=estimator, optimizer=optax.sgd(0.1), progress_bar=False, **options
    )
    return made.params


def model(kind: str, seed: int) -> tuple[FactorGraph, Any]:
    """A model of a kind, and its params."""
    if kind in TRAINED:
        return _BARS, trained(kind, seed)
    graph, scale = KINDS[kind]
    return graph, random_params(graph, scale, seed)


def brackets(kind: str, seed: int, temperatures: int, args: argparse.Namespace) -> dict[str, Any]:
    """A model's exact log Z, and its estimates' errors."""
    graph, params = model(kind, seed)
    exact = float(ebmpp.exact.log_partition(graph, params))
    sides: dict[str, list[tuple[float, float]]] = {"lower": [], "upper": []}
    warned = 0
    for repeat in range(args.repeats):
        with warnings.catch_warnings(record=True) as told:  # they are counted
            warnings.simplefilter("always")
            made = ebmpp.bracket(
                graph,
                params,
                rng_key=jax.random.fold_in(jax.random.key(args.seed + seed), repeat),
                num_particles=args.particles,
                num_temperatures=temperatures,
            )
        warned += bool(told)
        for side in sides:
            value = getattr(made, side)
            sides[side].append((value.log_partition - exact, value.standard_error))
    return {
        "kind": kind,
        "seed": seed,
        "temperatures": temperatures,
        "exact": exact,
        "warned": warned,
    } | sides


def covered(made: dict[str, Any]) -> dict[str, np.ndarray]:
    """Which intervals hold the exact value: of the bracket and of each side alone."""
    (low, low_error), (high, high_error) = (np.transpose(made[side]) for side in ("lower", "upper"))
    return {
        "bracket": (low - _Z * low_error <= 0) & (high + _Z * high_error >= 0),
        "lower": np.abs(low) <= _Z * low_error,
        "upper": np.abs(high) <= _Z * high_error,
    }


def coverage(models: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts, with the 95 % interval of the rate and the chance of so few if the rate were as stated."""
    table = {}
    for name in ("bracket", "lower", "upper"):
        hits = np.concatenate([covered(made)[name] for made in models])
        test = stats.binomtest(int(hits.sum()), len(hits), LEVEL, alternative="less")
        interval = stats.binomtest(int(hits.sum()), len(hits)).proportion_ci()
        table[name] = {
            "covered": int(hits.sum()),
            "of": len(hits),
            "rate": round(float(hits.mean()), 4),
            "interval": [round(interval.low, 4), round(interval.high, 4)],
            "nominal": LEVEL,
            "p_of_fewer": float(f"{test.pvalue:.3g}"),
        }
    table["warned"] = {"of": len(hits), "warned": sum(made["warned"] for made in models)}
    return table


# -- the default call ------------------------------------------------------------------------------


def own_biases(graph: FactorGraph, params: Any) -> dict[str, Array]:
    """Natural parameters of the model's own biases."""
    return {b: params[b] for b in graph.families}


def called(
    seed: int, keys: Sequence[int], kind: str = "trained by PCD, 16x16", **options: Any
) -> list[dict[str, float]]:
    """What ``ais`` says of a trained machine, key by key, and how far off it is."""
    graph, params = model(kind, seed)
    exact, points = float(ebmpp.exact.log_partition(graph, params)), []
    for key in keys:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made = ebmpp.ais(graph, params, rng_key=jax.random.key(key), **options)
        point = {"error": made.log_partition - exact, "standard_error": made.standard_error}
        points.append(point | {"effective": made.effective_sample_size, "warned": bool(told)})
    return points


def in_short(points: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over keys: how far off, how far it says, how often within two standard errors."""
    error, told = (np.array([p[name] for p in points]) for name in ("error", "standard_error"))
    return {
        "keys": len(points),
        "root_mean_square_error": round(float(np.sqrt((error**2).mean())), 4),
        "stated": round(float(np.sqrt((told**2).mean())), 4),
        "within_two": int((np.abs(error) <= 2 * told).sum()),
        "effective": round(float(np.mean([p["effective"] for p in points])), 1),
        "warned": int(sum(p["warned"] for p in points)),
    }


def defaults() -> list[dict[str, Any]]:
    """Forty keys, eight on each of five machines, by where particles start."""
    table = []
    for start in ("pilot", "own biases"):
        for temperatures in (1000, 10_000):
            points: list[dict[str, float]] = []
            for seed in range(MODELS):
                options: dict[str, Any] = {"num_temperatures": temperatures}
                if start == "own biases":
                    options["reference"] = own_biases(*model("trained by PCD, 16x16", seed))
                points += called(seed, range(8 * seed, 8 * seed + 8), **options)
            table.append({"start": start, "temperatures": temperatures} | in_short(points))
            print(table[-1], flush=True)
    return table


# -- divergence ------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 4))
def from_the_rows(graph: FactorGraph, params: Any, rows: Array, rng_key: Array, sweeps: int) -> Array:
    """log mean p(v | h_t) of every row, with h_t from a chain that starts at it."""

    def step(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], None]:
        v, total = carry
        first, second = jax.random.split(key)
        h = graph.conditional(params, {"v": v}, "h").sample(first)
        law = graph.conditional(params, {"h": h}, "v")
        return (law.sample(second).astype(v.dtype), jnp.logaddexp(total, law.log_prob(rows))), None

    start = rows, jnp.full(len(rows), -jnp.inf)
    (_, total), _ = jax.lax.scan(step, start, jax.random.split(rng_key, sweeps))
    return total - jnp.log(sweeps)


def diverge(args: argparse.Namespace) -> list[dict[str, float]]:
    """CD-1 for long, and the total log-likelihood of the 32 rows in three ways."""
    rows = jnp.asarray(ebmpp.data.bars_and_stripes(4))
    rbm = ebmpp.layered(v=Bernoulli(16), h=Bernoulli(16))
    points: list[dict[str, float]] = []

    def watch(progress: Progress) -> None:
        key, params = jax.random.fold_in(jax.random.key(args.seed), progress.step), progress.params
        made = ebmpp.bracket(
            rbm,
            params,
            rng_key=key,
            num_particles=args.particles,
            num_temperatures=args.temperatures[-1],
            ladder="adaptive",
            data=rows,
        )
        weight = -float(rbm.free_energy(params, {"v": rows}).sum())
        total = lambda log_z: weight - len(rows) * log_z
        points.append(
            {
                "step": progress.step,
                "exact": total(made.exact),
                "above": total(made.lower.log_partition),
                "above_error": len(rows) * made.lower.standard_error,
                "below": total(made.upper.log_partition),
                "below_error": len(rows) * made.upper.standard_error,
                "from_the_rows": float(from_the_rows(rbm, params, rows, key, args.sweeps).sum()),
            }
        )

    ebmpp.fit(
        rbm,
        rows,
        estimator=CD(k=1),
        optimizer=optax.sgd(args.rate),
        num_steps=args.steps,
        batch_size=len(rows),
        rng_key=jax.random.key(args.seed),
        monitor_every=max(1, args.steps // args.points),
        callbacks=[watch],
        progress_bar=False,
    )
    return points


# -- the report ------------------------------------------------------------------------------------


def draw(made: dict[str, Any], path: Path) -> None:
    """How often intervals hold the exact value, by kind of model; log-likelihoods along CD-1.

    :param made: as it is kept.
    """
    import matplotlib

    matplotlib.use("agg")

    figure, axes = style.grid(1 + len(made["ladders"]), (4.9, 4.2))
    for ax, ladder in zip(axes, made["ladders"], strict=False):
        _draw_coverage(ax, ladder["coverage"])
        told = f"{ladder['temperatures']} temperatures, {made['particles']} particles; bars: 95 %"
        ax.set_title(told, fontsize=9)
    _draw_divergence(axes[-1], made["cd"])
    for ax in axes:
        style.tidy(ax)
    style.legend_below(figure, axes, ncols=4)
    figure.savefig(path, dpi=120)


def _draw_coverage(ax: Any, table: dict[str, dict[str, Any]]) -> None:
    kinds = (*KINDS, *TRAINED)
    for index, (side, label) in enumerate(_SIDES.items()):
        rate = np.array([table[kind][side]["rate"] for kind in kinds])
        low, high = np.transpose([table[kind][side]["interval"] for kind in kinds])
        look = {"color": style.COLORS[index], "marker": style.marker(index), "linestyle": "none"}
        look |= {"markersize": 5, "markerfacecolor": "white", "capsize": 2, "label": label}
        ax.errorbar(rate, np.arange(len(kinds)) + 0.22 * (index - 1), xerr=[rate - low, high - rate], **look)
    ax.axvline(LEVEL, color=style.INK, linewidth=0.8, linestyle="--", label=f"as stated, {LEVEL:g}")
    ax.set_yticks(range(len(kinds)), [textwrap.fill(kind, 16) for kind in kinds], fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="share of intervals that hold the exact log Z", xlim=(min(0.64, ax.get_xlim()[0]), 1.01))


def _draw_divergence(ax: Any, points: Sequence[dict[str, float]]) -> None:
    step = [point["step"] / 1000 for point in points]
    column = lambda name: np.array([point[name] for point in points])
    below, above = (column("below") - 2 * column("below_error"), column("above") + 2 * column("above_error"))
    color = style.COLORS[5]
    ax.fill_between(step, below, above, color=color, alpha=0.5, label="the bracket, two standard errors")
    ax.plot(step, column("exact"), color=style.INK, linewidth=1.4, label="exact")
    flattering = style.look(1) | {"linewidth": 1.6, "label": "by chains from the rows"}
    ax.plot(step, column("from_the_rows"), **flattering)
    ax.axhline(_BEST, color=style.INK, linestyle=":", linewidth=1, label="the best possible of any model")
    ax.set(xlabel="thousands of steps of CD-1", ylabel="log-likelihood of the 32 rows (nats)")
    ax.set_title("bars and stripes 4x4, a machine that diverges", fontsize=9)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    kept, tables = args.out / "bracket.json", []
    if args.draw:
        draw(json.loads(kept.read_text(encoding="utf-8")), kept.with_suffix(".png"))
        return
    for temperatures in args.temperatures:
        kinds = (*KINDS, *TRAINED)
        made = [brackets(kind, seed, temperatures, args) for kind in kinds for seed in range(MODELS)]
        table = {"all": coverage(made), "random": coverage([m for m in made if m["kind"] in KINDS])}
        table["trained"] = coverage([m for m in made if m["kind"] in TRAINED])
        table |= {kind: coverage([m for m in made if m["kind"] == kind]) for kind in kinds}
        tables.append({"temperatures": temperatures, "coverage": table})
        for group, side in itertools.product(("random", "trained"), ("bracket", "lower", "upper")):
            row = table[group][side]
            print(
                f"{temperatures} temperatures, {group} models, {side}: {row['covered']} of {row['of']} "
                f"intervals hold the exact value ({row['rate']:.1%}); "
                f"{table[group]['warned']['warned']} warned",
                flush=True,
            )
    default_call = defaults()
    points = diverge(args)
    best, last = max(point["exact"] for point in points), points[-1]
    print(
        f"CD-1: exact {best:.1f} at best, {last['exact']:.1f} after {last['step']} steps; there the "
        f"bracket says {last['below']:.1f} to {last['above']:.1f} and chains from the rows "
        f"{last['from_the_rows']:.1f}"
    )
    settings = {"particles": args.particles, "repeats": args.repeats}
    rounded = [{k: round(v, 3) for k, v in point.items()} for point in points]
    made = settings | {"ladders": tables, "default_call": default_call, "cd": rounded}
    kept.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    draw(made, kept.with_suffix(".png"))
    print(f"wrote bracket.png and bracket.json in {args.out}")


if __name__ == "__main__":
    main()
