# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Difference-of-convex programming: exact log-likelihood along training on two small data sets.

Four latent units, all rows a step, plain gradient steps, the same starts for every method: CD, PCD and the
centered gradient with 12 sweeps a step against S-DCP and CS-DCP with 3 inner steps of 4 sweeps each. An epoch
is one pass over the data: one step of the former, three inner steps of the latter, 12 sweeps for all. CD-4
with three plain steps an epoch tells what of the gain is more steps for the same sweeps. The log-likelihood
is the exact mean over rows; the dashed line is the best that any model can reach. Two more run the batch
algorithms as they are printed: Algorithm 3 adds up its step from inner step to inner step, of which Algorithm
2 knows nothing, and Algorithm 4 takes its batch means of the latents once for all inner steps but its
gradients relative to offsets that move between them.

``python benchmarks/dc_programming.py`` takes a few minutes; ``--trials 25 --epochs 50000`` is the paper's
setting. Trials run side by side in one compiled loop. Every panel and method is kept in a file of its own
(``raw/`` in the output folder) and drawn again with ``--draw``.

**References**

1. Upadhya, Sastry (2017), *Learning RBM with a DC programming approach*, section 4, figures 1 and 2.
"""

import argparse
from collections.abc import Sequence
import dataclasses
from functools import partial
import json
from pathlib import Path
import time
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

import jax
from jax import Array, lax
import jax.numpy as jnp

import ebmpp
from ebmpp import CD, PCD, Bernoulli, FactorGraph, exact
from ebmpp.contrib import CSDCP, SDCP
from ebmpp.core import random
from ebmpp.diagnostics import style
from ebmpp.estimators import Batch, Centered, Estimator
from ebmpp.estimators.base import Estimate


class Panel(NamedTuple):
    """A data set and a learning rate."""

    title: str
    rows: np.ndarray
    rate: float

    @property
    def best(self) -> float:
        """The highest mean log-likelihood: that of the rows' own distribution."""
        count = np.unique(self.rows, axis=0, return_counts=True)[1]
        return float((count * np.log(count / count.sum())).sum() / count.sum())


_BAS, _BAR = ebmpp.data.bars_and_stripes(3), ebmpp.data.shifting_bar(9, 1)
PANELS = {
    "bas": Panel("bars and stripes 3x3, 16 rows, rate 0.3", _BAS, 0.3),
    "bas14": Panel("bars and stripes 3x3, 14 distinct rows, rate 0.3", np.unique(_BAS, axis=0), 0.3),
    "bar3": Panel("shifting bar (9, 1), rate 0.3", _BAR, 0.3),
    "bar5": Panel("shifting bar (9, 1), rate 0.5", _BAR, 0.5),
}
METHODS = {
    "cd": "CD-12",
    "cd4": "CD-4, 3 steps an epoch",
    "pcd": "PCD-12",
    "cg": "centered gradient, CD-12",
    "sdcp": "S-DCP, d = 3, K' = 4",
    "csdcp": "CS-DCP, d = 3, K' = 4",
    "alg3": "S-DCP, Algorithm 3 as printed",
    "alg4": "CS-DCP, Algorithm 4 as printed",
}
_TICKS = (-2.2, -2.3, -2.4, -2.6, -2.8, -3, -3.5, -4, -5, -6, -8, -12)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(METHODS), default=list(METHODS), help="methods to run")
    add("--panels", nargs="+", choices=tuple(PANELS), default=["bas", "bar3", "bar5"])
    add("--trials", type=int, default=5)
    add("--epochs", type=int, default=10_000, help="cut to a multiple of --points")
    add("--points", type=int, default=200, help="values of the exact log-likelihood along the way")
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw what there is")
    args = parser.parse_args(argv)
    if min(args.trials, args.epochs, args.points) < 1:
        parser.error("--trials, --epochs and --points are positive")
    args.points = min(args.points, args.epochs)
    return args


@dataclasses.dataclass(frozen=True)
class Algorithm3(SDCP):
    """S-DCP whose step is the sum of the batch's gradients up to its inner step: the sum is never reset."""

    def init(self, graph: FactorGraph, params: Any, data: Any, batch: int, key: Array) -> Any:
        """With an empty sum."""
        return super().init(graph, params, data, batch, key), jax.tree.map(jnp.zeros_like, params)

    def estimate(self, graph: FactorGraph, params: Any, state: Any, batch: Batch, key: Array) -> Estimate:
        """The sum with the gradient of this inner step."""
        inner, total = state
        made = super().estimate(graph, params, inner, batch, key)
        first = inner.inner == 0
        total = jax.tree.map(lambda s, g: jnp.where(first, g, s + g), total, made.gradient)
        return Estimate(total, (made.state, total), made.metrics)


@dataclasses.dataclass(frozen=True)
class Algorithm4(Centered):
    """CS-DCP whose positive phase keeps the offsets of inner step 0, while those of the negative one slide.

    Of a restricted Boltzmann machine. With m = E[v], n = E[h] given the rows, the centered gradient of the
    weights gets, beside that of :class:`Centered`, the difference of (m - mu)(n - lambda)^T at the offsets of
    this inner step and of the first; biases follow as there.
    """

    def init(self, graph: FactorGraph, params: Any, data: Any, batch: int, key: Array) -> Any:
        """With the offsets of inner step 0."""
        state = super().init(graph, params, data, batch, key)
        return state, state.offsets

    def estimate(self, graph: FactorGraph, params: Any, state: Any, batch: Batch, key: Array) -> Estimate:
        """The direction of :class:`Centered`, and what the old offsets change."""
        inner, first = state
        made = super().estimate(graph, params, inner, batch, key)
        now = made.state.offsets
        first = jax.tree.map(lambda a, b: jnp.where(inner.step == 0, a, b), now, first)
        mean = {b: -made.state.inner.positive[b] for b in ("v", "h")}
        product = lambda o: jnp.outer(mean["v"] - o["v"], mean["h"] - o["h"])
        extra = product(now) - product(first)
        gradient = dict(made.gradient)
        gradient["v:h"] = gradient["v:h"] + extra
        gradient["v"] = gradient["v"] - extra @ now["h"]
        gradient["h"] = gradient["h"] - extra.T @ now["v"]
        return Estimate(gradient, (made.state, first), made.metrics)


def make(method: str, rows: int) -> tuple[Estimator, int]:
    """The estimator of that name and its steps an epoch; persistent chains are as many as rows."""
    return {
        "cd": (CD(k=12), 1),
        "cd4": (CD(k=4), 3),
        "pcd": (PCD(k=12, num_chains=rows), 1),
        "cg": (Centered(CD(k=12)), 1),
        "sdcp": (SDCP(d=3, k=4), 3),
        "csdcp": (CSDCP(d=3, k=4), 3),
        "alg3": (Algorithm3(d=3, k=4), 3),
        "alg4": (Algorithm4(SDCP(d=3, k=4)), 3),
    }[method]


def declare() -> FactorGraph:
    """A 9-4 restricted Boltzmann machine."""
    return ebmpp.layered(v=Bernoulli(9), h=Bernoulli(4))


def begin(rbm: FactorGraph, rows: np.ndarray, key: Array) -> Any:
    """Weights N(0, 0.01^2), visible biases at the rows' base rates, latent ones 0."""
    return {**rbm.init(key, rows), "v": jax.scipy.special.logit(jnp.asarray(rows).mean(0))}


@partial(jax.jit, static_argnums=(0, 1, 4, 5))
def train(
    rbm: FactorGraph, estimator: Estimator, rows: Array, rate: Array, points: int, every: int, keys: Array
) -> Array:
    """Mean log-likelihood of the rows at the start and after each ``every`` steps, a row a trial."""
    batch = Batch.of({"v": rows})
    mean = lambda params: exact.log_likelihood(rbm, params, rows).mean()

    def step(carry: Any, index: Array, pair: Array) -> tuple[Any, None]:
        params, state = carry
        made = estimator.estimate(rbm, params, state, batch, random.fold_in(pair, index, 2))
        return (jax.tree.map(lambda p, g: p - rate * g, params, made.gradient), made.state), None

    def one(key: Array) -> Array:
        pair = random.key_pair(jax.random.fold_in(key, 1))
        params = begin(rbm, rows, key)
        state = estimator.init(rbm, params, batch.rows, len(rows), random.fold_in(pair, 0, 1))

        def some(carry: Any, start: Array) -> tuple[Any, Array]:
            steps = start + jnp.arange(every)
            carry, _ = lax.scan(lambda c, i: step(c, i, pair), carry, steps)
            return carry, mean(carry[0])

        _, values = lax.scan(some, (params, state), every * jnp.arange(points))
        return jnp.concatenate([mean(params)[None], values])

    return jax.vmap(one)(keys)


def raw(out: Path, panel: str, method: str) -> Path:
    """Where the curves of a panel and method are kept."""
    return out / "raw" / f"dc_programming-{panel}-{method}.nc"


def run(panel: str, method: str, args: argparse.Namespace) -> None:
    """All trials of a method on a panel."""
    given, begun = PANELS[panel], time.monotonic()
    keys = jax.random.split(jax.random.key(0), args.trials)  # the same starts for every method
    every = args.epochs // args.points
    estimator, inner = make(method, len(given.rows))
    rows = jnp.asarray(given.rows)
    curves = jax.device_get(train(declare(), estimator, rows, given.rate, args.points, every * inner, keys))
    seconds = time.monotonic() - begun
    made = xr.Dataset(
        {"log_likelihood": (("trial", "epoch"), curves)},
        {"epoch": every * np.arange(args.points + 1)},
        {"seconds": round(seconds, 1)},
    )
    path = raw(args.out, panel, method)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.to_netcdf(path, engine="h5netcdf")
    last = made["log_likelihood"][:, -1].values
    print(f"{panel}, {METHODS[method]}: {last.mean():.3f} +- {last.std():.3f} in {seconds:.0f} s", flush=True)


# -- the report ----------------------------------------------------------------------------------


def gather(out: Path) -> dict[str, dict[str, xr.Dataset]]:
    """Every panel and method that there is."""
    found: dict[str, dict[str, xr.Dataset]] = {}
    for panel in PANELS:
        for method in METHODS:
            if raw(out, panel, method).exists():
                with xr.open_dataset(raw(out, panel, method), engine="h5netcdf") as made:
                    found.setdefault(panel, {})[method] = made.load()
    return found


def numbers(panel: str, method: str, made: xr.Dataset) -> dict[str, Any]:
    """A method on a panel in a few numbers."""
    curves = made["log_likelihood"].values
    last, mean, best = curves[:, -1], curves.mean(0), PANELS[panel].best
    near, spread = np.flatnonzero(mean >= best / 0.9), curves.std(0)
    some = np.unique(np.linspace(0, len(mean) - 1, 60).astype(int))
    return {
        "panel": panel,
        "method": METHODS[method],
        "trials": len(curves),
        "epochs": int(made["epoch"][-1]),
        "best_possible": round(best, 3),
        "last_mean": round(float(last.mean()), 3),
        "last_std": round(float(last.std()), 3),
        "last_min": round(float(last.min()), 3),
        "last_max": round(float(last.max()), 3),
        "highest_mean": round(float(mean.max()), 3),
        "epochs_until_mean_within_10_percent": int(made["epoch"][near[0]]) if len(near) else None,
        "seconds": made.attrs["seconds"],
        "curve": {"epoch": made["epoch"].values[some].tolist()}
        | {name: np.round(values[some], 3).tolist() for name, values in (("mean", mean), ("std", spread))},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The numbers as lines of text."""
    columns = f"{'last mean':>11}{'std':>7}{'min':>8}{'max':>8}{'within 10 %':>13}"
    lines = [f"{'panel':<7}{'method':<32}{'best':>8}{columns}"]
    for row in rows:
        reached = row["epochs_until_mean_within_10_percent"]
        lines.append(
            f"{row['panel']:<7}{row['method']:<32}{row['best_possible']:>8.3f}{row['last_mean']:>11.3f}"
            f"{row['last_std']:>7.3f}{row['last_min']:>8.3f}{row['last_max']:>8.3f}"
            f"{'-' if reached is None else reached:>13}"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Means over trials, with bands of one standard deviation, against the sweeps of a chain.

    :param rows: as :func:`numbers` makes them, and as they are kept.
    """
    import matplotlib

    matplotlib.use("agg")

    panels = list(dict.fromkeys(row["panel"] for row in rows))
    figure, axes = style.grid(len(panels), (4.6, 4.0))
    for ax, panel in zip(axes, panels, strict=True):
        own, best = [row for row in rows if row["panel"] == panel], PANELS[panel].best
        for index, (name, label) in enumerate(METHODS.items()):
            for row in own:
                if row["method"] == label:
                    epoch, mean, spread = (np.array(row["curve"][n]) for n in ("epoch", "mean", "std"))
                    look = style.look(index) | {"linewidth": 1.3, "label": label}
                    ax.plot(epoch / 1000, mean, **look)
                    low, high = mean - spread, mean + spread
                    ax.fill_between(epoch / 1000, low, high, color=look["color"], alpha=0.12, linewidth=0)
        ax.axhline(best, color=style.INK, linestyle="--", linewidth=0.8, label="best possible")
        lowest = min(min(row["curve"]["mean"]) for row in own)
        top = best + 0.15
        style.below(ax, top, [t for t in _TICKS if lowest - 1 < t < best])
        ax.set_ylim(top - 1.15 * (top - lowest), best + 0.03)
        ax.set(xlabel="thousands of epochs, of 12 sweeps each", title=PANELS[panel].title)
        ax.title.set_fontsize(9)
        ax.set_ylabel("log-likelihood a row, exact (nats)")
        style.tidy(ax)
        ax.tick_params(labelsize=8)
    trials = rows[0]["trials"]
    told = f"four latent units; means of {trials} trials, and one standard deviation"
    figure.suptitle(told, fontsize=9)
    style.legend_below(figure, axes, ncols=3 if len(panels) < 3 else 5)
    figure.savefig(path, dpi=120)


def report(out: Path) -> None:
    """Draw and tabulate what there is."""
    found, kept = gather(out), out / "dc_programming.json"
    if found:
        rows = [numbers(panel, m, made) for panel, methods in found.items() for m, made in methods.items()]
        kept.write_text(json.dumps({"runs": rows}, indent=1) + "\n", encoding="utf-8")
        print(table(rows))
    elif not kept.exists():
        raise SystemExit(f"no runs in {out / 'raw'}: run some first, without --draw")
    draw(json.loads(kept.read_text(encoding="utf-8"))["runs"], kept.with_suffix(".png"))
    print(f"wrote {kept.with_suffix('.png')}" + (f" and {kept}" if found else f" of the numbers in {kept}"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    for panel in [] if args.draw else args.panels:
        for method in args.only:
            run(panel, method, args)
    report(args.out)


if __name__ == "__main__":
    main()
