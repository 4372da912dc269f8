# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bars and stripes, 4x4: what bias and variance do to the exact log-likelihood.

Sixteen latent units, all 32 rows a step, learning rate 0.1 (the paper's is 0.01: ``--rate``). The total
log-likelihood of the rows is computed exactly along the way; the best that any model can reach is ``BEST``.
Every method takes plain gradient steps from the same start. A run ends where its steps do, where a gradient
is not finite, or where ``--seconds`` are over: an unbiased gradient costs what the chains take to meet, and
near the optimum that is long. The variance of the gradient (its trace, for one step's estimate) is that of
repeats at the same params.

``python benchmarks/bars_and_stripes.py`` runs every method after another. Each run is kept in a file of
its own as it goes (``raw/`` in the output folder), so runs can be left in the background side by side
(``--only pcd --seeds 1``), killed, and drawn at any time with ``--draw``.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, section 6.1, figures 2 and 6, table 1.
"""

import argparse
from collections.abc import Sequence
from functools import partial
import json
import math
import os
from pathlib import Path
import time
from typing import Any, NamedTuple

from bars_pictures import curves, discarded, falls
from following import costs
import numpy as np
import xarray as xr

import jax
from jax import Array, lax
import jax.numpy as jnp

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, FactorGraph, exact
from ebmpp.core import random
from ebmpp.estimators import Batch, Estimator, Quantile

ROWS = ebmpp.data.bars_and_stripes(4)
#: of the 32 rows, 28 patterns occur once and two (blank and full) twice
BEST = 28 * math.log(1 / 32) + 4 * math.log(2 / 32)


class Part(NamedTuple):
    """Steps of one estimator at one rate."""

    until: float
    estimator: Estimator
    rate: float = 1.0
    """Times the rate that is asked for."""


_ADAPTIVE = UCD(num_pairs=1000)
_PERSISTENT = UCD(num_pairs=200, start="persistent", marginalize="layers", length=Quantile(0.9))
METHODS: dict[str, tuple[str, list[Part]]] = {
    "ucd": ("UCD, adaptive k and lag", [Part(math.inf, _ADAPTIVE)]),
    "ucd_few": ("UCD, adaptive, 100 pairs", [Part(math.inf, UCD(num_pairs=100))]),
    "persistent": (
        "UCD, adaptive, persistent, layers summed out, 200 pairs",
        [Part(math.inf, _PERSISTENT)],
    ),
    "ucd1": ("UCD, k = lag = 1", [Part(math.inf, UCD(num_pairs=1000, k=1, lag=1))]),
    "truncated": (
        "UCD, k = lag = 1, stopped at 100 sweeps (biased)",
        [Part(math.inf, UCD(num_pairs=1000, k=1, lag=1, max_sweeps=100, allow_unmet=True))],
    ),
    "cd1": ("CD-1", [Part(math.inf, CD(k=1))]),
    "cd2": ("CD-2", [Part(math.inf, CD(k=2))]),
    "cd5": ("CD-5", [Part(math.inf, CD(k=5))]),
    "cd10": ("CD-10", [Part(math.inf, CD(k=10))]),
    "cd20": ("CD-20", [Part(math.inf, CD(k=20))]),
    "pcd": ("PCD-1, 1000 chains", [Part(math.inf, PCD(k=1, num_chains=1000))]),
    "pcd_ucd": (
        "PCD for 2000 steps, then UCD from its chains",
        [Part(2000, PCD(k=1, num_chains=200)), Part(math.inf, _PERSISTENT)],
    ),
}

_TRUNCATED = "truncated"
#: seconds of table 1; UCD is the published one, whose chains and draws are stopped
PRINTED = {"CD-1": 5.38, "CD-2": 8.44, "CD-5": 17.89, "CD-10": 33.17, "CD-20": 63.51}
PRINTED |= {METHODS["pcd"][0]: 5.18, METHODS[_TRUNCATED][0]: 15.99}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(METHODS), default=list(METHODS), help="methods to run")
    add("--seeds", type=int, nargs="+", default=[0], help="one run a method and seed")
    add("--steps", type=int, default=5000)
    add("--rate", type=float, default=0.1)
    add("--chains", type=int, default=len(ROWS), help="of CD: rows are repeated; 1000 in the paper")
    add("--name", default="", help="of this version, put at the end of the names of its files")
    add("--every", type=int, default=20, help="steps between values of the exact log-likelihood")
    add("--seconds", type=float, default=math.inf, help="for one run")
    add("--variance-every", type=int, default=0, help="steps between values of the gradient's variance")
    add("--save-every", type=float, default=20.0, help="seconds between saves of a run")
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw what there is")
    args = parser.parse_args(argv)
    if min(args.steps, args.every) < 1 or not args.rate > 0:
        parser.error("--steps, --every and --rate are positive")
    return args


def declare() -> FactorGraph:
    """A 16-16 restricted Boltzmann machine."""
    return ebmpp.layered(v=Bernoulli(16), h=Bernoulli(16))


@partial(jax.jit, static_argnums=0)
def total(rbm: FactorGraph, params: Any) -> Array:
    """The exact log-likelihood of all rows together."""
    return exact.log_likelihood(rbm, params, ROWS).sum()


def repeated(chains: int) -> Array:
    """All rows, as often as it takes to have so many."""
    return jnp.tile(jnp.asarray(ROWS), (-(-chains // len(ROWS)), 1))


@partial(jax.jit, static_argnums=(0, 1, 2))
def ascend(
    rbm: FactorGraph,
    estimator: Estimator,
    count: int,
    rows: Array,
    params: Any,
    state: Any,
    pair: Array,
    start: Array,
    rate: Array,
) -> tuple[Any, Any, dict[str, Array]]:
    """``count`` gradient steps from all rows. Not ``fit``, so that a run can be kept while it goes."""
    batch = Batch.of({"v": rows})

    def one(carry: tuple, step: Array) -> tuple[tuple, dict[str, Array]]:
        params, state, going = carry
        made = estimator.estimate(rbm, params, state, batch, random.fold_in(pair, step))
        going &= jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(made.gradient)]).all()
        params = jax.tree.map(lambda p, g: jnp.where(going, p - rate * g, p), params, made.gradient)
        return (params, made.state, going), {"finite": going, **made.metrics}

    carry = params, state, jnp.array(True)
    (params, state, _), metrics = lax.scan(one, carry, start + jnp.arange(count, dtype=jnp.uint32))
    return params, state, metrics


@partial(jax.jit, static_argnums=(0, 1))
def spread(rbm: FactorGraph, estimator: Estimator, params: Any, state: Any, pair: Array) -> Array:
    """Trace of the covariance of the gradient at these params, from repeats."""
    batch = Batch.of({"v": jnp.asarray(ROWS)})
    one = lambda i: estimator.estimate(rbm, params, state, batch, random.fold_in(pair, i)).gradient
    made = lax.map(one, jnp.arange(20, dtype=jnp.uint32))
    return sum(g.reshape(20, -1).var(0, ddof=1).sum() for g in jax.tree.leaves(made))


class Recorder:
    """The history of a run, on disk as it goes."""

    def __init__(self, path: Path) -> None:
        self.path, self.begin = path, time.monotonic()
        self.steps: list[dict[str, np.ndarray]] = []
        self.curve: list[tuple[int, float, float]] = []
        self.steady: list[float] = []  # seconds of the training between two points, the first left out
        self.variance: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> None:
        """A point of the curve."""
        self.curve.append((step, value, time.monotonic() - self.begin))

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.begin

    def save(self, ended: str = "still running, or killed") -> None:
        """Write, then rename: a run killed while it writes leaves the file before."""
        step, value, seconds = (list(column) for column in zip(*self.curve, strict=True))
        names = {n: None for part in self.steps for n in part}
        size = lambda part: len(next(iter(part.values())))
        columns = {
            n: ("step", np.concatenate([part.get(n, np.full(size(part), np.nan)) for part in self.steps]))
            for n in names
        }
        columns |= {"log_likelihood": ("monitor_step", value), "seconds": ("monitor_step", seconds)}
        if self.variance:
            at, values = (list(column) for column in zip(*self.variance, strict=True))
            columns |= {"variance_step": ("point", at), "variance": ("point", values)}
        cost = 1e3 * sum(self.steady[1:]) / max(1, step[-1] - step[min(1, len(step) - 1)])
        made = xr.Dataset(columns, {"monitor_step": step}, {"ended": ended, "ms_a_step": cost})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".tmp")
        made.to_netcdf(fresh, engine="h5netcdf")
        os.replace(fresh, self.path)


def raw(args: argparse.Namespace, method: str, seed: int | str) -> Path:
    """Where a run is kept."""
    return args.out / "raw" / f"{script(args)}-{method}-{seed}.nc"


def script(args: argparse.Namespace) -> str:
    """What files are named by."""
    return "_".join(filter(None, ["bars_and_stripes", args.name]))


def run(method: str, seed: int, args: argparse.Namespace) -> None:
    """One training run, kept as it goes."""
    label, parts = METHODS[method]
    rbm, key = declare(), jax.random.key(seed)
    recorder, rows = Recorder(raw(args, method, seed)), repeated(args.chains)
    params, pair = rbm.init(key, ROWS), random.key_pair(jax.random.fold_in(key, 1))
    recorder.add(0, float(total(rbm, params)))
    step, state, saved, ended = 0, None, time.monotonic(), ""
    for part in parts:
        made = (rbm, params, {"v": rows}, len(rows), random.fold_in(pair, step, 1))
        fresh = part.estimator.init(*made)
        state = fresh if state is None else part.estimator.adopt(state, fresh)
        while step < min(part.until, args.steps) and not ended:
            rate = args.rate * part.rate
            args_, begun = (rows, params, state, pair, np.uint32(step), rate), time.monotonic()
            params, state, metrics = jax.device_get(ascend(rbm, part.estimator, args.every, *args_))
            recorder.steady.append(time.monotonic() - begun)
            finite = metrics.pop("finite")
            if not finite.all():
                ended = f"stopped: the gradient of step {step + int(np.argmin(finite))} is not finite"
                break
            recorder.steps.append(metrics or {"none": np.full(args.every, np.nan)})
            step += args.every
            recorder.add(step, float(total(rbm, params)))
            if args.variance_every and step % args.variance_every == 0:
                value = spread(rbm, part.estimator, params, state, random.fold_in(pair, step, 2))
                recorder.variance.append((step, float(value)))
            if recorder.seconds > args.seconds:
                ended = f"stopped after {args.seconds:.0f} s"
            if time.monotonic() - saved > args.save_every:
                recorder.save()
                saved = time.monotonic()
    ended = ended or "all steps"
    recorder.save(ended)
    step, value, seconds = recorder.curve[-1]
    print(f"{label}, seed {seed}: {value:.2f} at step {step} after {seconds:.0f} s ({ended})", flush=True)


# -- the report ----------------------------------------------------------------------------------


def gather(args: argparse.Namespace) -> dict[tuple[str, int], xr.Dataset]:
    """Every run that there is, finished or not."""
    found = {}
    for method in METHODS:
        for path in sorted((args.out / "raw").glob(raw(args, method, "*").name)):
            with xr.open_dataset(path, engine="h5netcdf") as made:
                found[method, int(path.stem.rsplit("-", 1)[1])] = made.load()
    return found


def numbers(runs: dict[tuple[str, int], xr.Dataset]) -> list[dict[str, Any]]:
    """A run in a few numbers."""
    rows = []
    for (method, seed), made in runs.items():
        curve = made["log_likelihood"]
        best = int(np.argmax(curve.values))
        row = {
            "method": METHODS[method][0],
            "seed": seed,
            "steps": int(made["monitor_step"][-1]),
            "ended": made.attrs["ended"],
            "best": round(float(curve[best]), 2),
            "best_at": int(made["monitor_step"][best]),
            "last": round(float(curve[-1]), 2),
            "seconds": round(float(made["seconds"][-1]), 1),
            "ms_a_batch": float(f"{made.attrs.get('ms_a_step', math.nan):.3g}"),
            "sweeps_a_batch": getattr(METHODS[method][1][0].estimator, "k", None),
        }
        if "meeting_time_max" in made:
            row["meeting_time_mean_last"] = round(float(made["meeting_time_mean"][-100:].mean()), 1)
            row["meeting_time_max"] = int(made["meeting_time_max"].max())
            row["lag_last"] = int(made["lag"][-1])
            row["meeting_time_mean"] = round(float(made["meeting_time_mean"].mean()), 2)
            row["sweeps_a_batch"] = round(float(made["sweeps"].mean()), 2)
            row["discarded_a_sweep"] = round(float(discarded(made).mean()), 3)
        rows.append(row)
    return rows


def report(args: argparse.Namespace) -> None:
    """Draw and tabulate every run that there is."""
    runs, kept = gather(args), args.out / f"{script(args)}.json"
    if runs:
        labels = {name: label for name, (label, _) in METHODS.items()}
        curves(runs, labels, BEST, args.out / f"{script(args)}_curves.png")
        made = {"best_possible": round(BEST, 2), "runs": numbers(runs)}
        kept.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        print(costs(made["runs"], PRINTED))
    elif not kept.exists():
        raise SystemExit(f"no runs in {args.out / 'raw'}: run some first, without --draw")
    rows = json.loads(kept.read_text(encoding="utf-8"))["runs"]
    falls(rows, [label for label, _ in METHODS.values()], BEST, kept.with_suffix(".png"))
    print(f"wrote {kept.with_suffix('.png')}" + (f" and {kept}" if runs else f" of the numbers in {kept}"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    for seed in [] if args.draw else args.seeds:
        for method in args.only:
            run(method, seed, args)
    report(args)


if __name__ == "__main__":
    main()
