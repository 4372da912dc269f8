# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bars and stripes, 4x4: what bias and variance do to the exact log-likelihood.

Sixteen latent units, all 32 rows a step, learning rate 0.1. The total log-likelihood of the rows is
computed exactly along the way; the best that any model can reach is ``BEST``. Every method takes plain
gradient steps from the same start. A curve ends where its steps do, or where a gradient is not finite.

``python benchmarks/bars_and_stripes.py`` runs every method after another. Each run is kept in a file of
its own as it goes (``raw/`` in the output folder), so runs can be left in the background side by side
(``--only pcd --seeds 1``), killed, and drawn at any time with ``--draw``.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, section 5.1.
"""

import argparse
from collections.abc import Sequence
from functools import partial
import json
import math
import os
from pathlib import Path
import time
from typing import Any

import numpy as np
import xarray as xr

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, FactorGraph, bits, exact
from ebmpp.estimators import Batch, Estimator

ROWS = ebmpp.data.bars_and_stripes(4)
#: of the 32 rows, 28 patterns occur once and two (blank and full) twice
BEST = 28 * math.log(1 / 32) + 4 * math.log(2 / 32)
METHODS: dict[str, tuple[str, Any]] = {
    "ucd": ("UCD, adaptive k and lag", UCD(num_pairs=1000)),
    "ucd1": ("UCD, k = lag = 1", UCD(num_pairs=1000, k=1, lag=1)),
    "cd1": ("CD-1", CD(k=1)),
    "pcd": ("PCD-1, 1000 chains", PCD(k=1, num_chains=1000)),
}
_COLORS = {"ucd": "#2b6cb0", "ucd1": "#6b46c1", "cd1": "#c05621", "pcd": "#2f855a"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(METHODS), default=list(METHODS), help="methods to run")
    add("--seeds", type=int, nargs="+", default=[0], help="one run a method and seed")
    add("--steps", type=int, default=5000)
    add("--rate", type=float, default=0.1)
    add("--every", type=int, default=20, help="steps between values of the exact log-likelihood")
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


@partial(jax.jit, static_argnums=(0, 1))
def ascend(
    rbm: FactorGraph, estimator: Estimator, params: Any, state: Any, pair: Array, step: Array, rate: Array
) -> tuple[Any, Any, dict[str, Array]]:
    """One gradient step from all rows. Not ``fit``, so that a run can be kept while it goes."""
    made = estimator.estimate(
        rbm, params, state, Batch.of({"v": jnp.asarray(ROWS)}), bits.fold_in(pair, step)
    )
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(made.gradient)]).all()
    moved = jax.tree.map(lambda p, g: p - rate * g, params, made.gradient)
    return moved, made.state, {"finite": finite, **made.metrics}


class Recorder:
    """The history of a run, on disk as it goes."""

    def __init__(self, path: Path) -> None:
        self.path, self.begin = path, time.monotonic()
        self.steps: list[dict[str, Array]] = []
        self.curve: list[tuple[int, float, float]] = []

    def add(self, step: int, value: float) -> None:
        """A point of the curve."""
        self.curve.append((step, value, time.monotonic() - self.begin))

    def save(self, ended: str = "still running, or killed") -> None:
        """Write, then rename: a run killed while it writes leaves the file before."""
        step, value, seconds = (list(column) for column in zip(*self.curve, strict=True))
        rows = jax.device_get(self.steps)
        columns = {n: ("step", np.array([row[n] for row in rows])) for n in (rows[0] if rows else {})}
        columns |= {"log_likelihood": ("monitor_step", value), "seconds": ("monitor_step", seconds)}
        made = xr.Dataset(columns, {"monitor_step": step}, {"ended": ended})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".tmp")
        made.to_netcdf(fresh, engine="h5netcdf")
        os.replace(fresh, self.path)


def raw(out: Path, method: str, seed: int) -> Path:
    """Where a run is kept."""
    return out / "raw" / f"bars_and_stripes-{method}-{seed}.nc"


def run(method: str, seed: int, args: argparse.Namespace) -> None:
    """One training run, kept as it goes."""
    label, estimator = METHODS[method]
    rbm, key = declare(), jax.random.key(seed)
    recorder = Recorder(raw(args.out, method, seed))
    params, pair = rbm.init(key, ROWS), bits.key_pair(jax.random.fold_in(key, 1))
    state = estimator.init(rbm, params, {"v": jnp.asarray(ROWS)}, len(ROWS), bits.fold_in(pair, 0, 1))
    ended, saved = "all steps", time.monotonic()
    recorder.add(0, float(total(rbm, params)))
    for step in range(args.steps):
        before = params
        params, state, metrics = ascend(rbm, estimator, params, state, pair, np.uint32(step), args.rate)
        if not metrics.pop("finite"):
            params, ended = before, f"stopped: the gradient of step {step} is not finite"
            break
        recorder.steps.append(metrics)
        if (step + 1) % args.every == 0:
            recorder.add(step + 1, float(total(rbm, params)))
        if time.monotonic() - saved > args.save_every:
            recorder.save()
            saved = time.monotonic()
    if recorder.curve[-1][0] < len(recorder.steps):
        recorder.add(len(recorder.steps), float(total(rbm, params)))
    recorder.save(ended)
    step, value, seconds = recorder.curve[-1]
    print(f"{label}, seed {seed}: {value:.2f} at step {step} after {seconds:.0f} s ({ended})", flush=True)


# -- the report ----------------------------------------------------------------------------------


def gather(out: Path) -> dict[tuple[str, int], xr.Dataset]:
    """Every run that there is, finished or not."""
    found = {}
    for method in METHODS:
        for path in sorted((out / "raw").glob(f"bars_and_stripes-{method}-*.nc")):
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
        }
        if "meeting_time_max" in made:
            row["meeting_time_mean_last"] = round(float(made["meeting_time_mean"][-100:].mean()), 1)
            row["meeting_time_max"] = int(made["meeting_time_max"].max())
            row["lag_last"] = int(made["lag"][-1])
        rows.append(row)
    return rows


def draw(runs: dict[tuple[str, int], xr.Dataset], path: Path) -> None:
    """Log-likelihood and meeting times against the step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    named = set()
    for (method, _), made in runs.items():
        label = None if method in named else METHODS[method][0]  # a legend entry a method, not a seed
        named.add(method)
        style = {"color": _COLORS[method], "linewidth": 1.3, "label": label}
        axes[0].plot(made["monitor_step"], made["log_likelihood"], **style)
        if "meeting_time_mean" in made:
            waited = (made["meeting_time_mean"] - made["lag"]).values  # the lag's sweeps are not coupled
            axes[1].plot(made["step"], _smooth(waited), **style)
    axes[0].axhline(BEST, color="0.4", linestyle="--", linewidth=1, label=f"best possible, {BEST:.2f}")
    axes[0].set(xlabel="step", ylabel="total log-likelihood of the 32 rows", ylim=(-360, -90))
    axes[1].set(xlabel="step", ylabel="mean sweeps to meet, after the lag", yscale="log")
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[1]:
            ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _smooth(y: np.ndarray, window: int = 20) -> np.ndarray:
    """Means over the ``window`` steps before; fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(y)])
    end = np.arange(1, len(y) + 1)
    start = np.maximum(end - window, 0)
    return (sums[end] - sums[start]) / (end - start)


def report(out: Path) -> None:
    """Draw and tabulate every run that there is."""
    runs = gather(out)
    if not runs:
        raise SystemExit(f"no runs in {out / 'raw'}: run some first, without --draw")
    draw(runs, out / "bars_and_stripes.png")
    made = {"best_possible": round(BEST, 2), "runs": numbers(runs)}
    (out / "bars_and_stripes.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {out / 'bars_and_stripes.png'} and {out / 'bars_and_stripes.json'}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    for seed in [] if args.draw else args.seeds:
        for method in args.only:
            run(method, seed, args)
    report(args.out)


if __name__ == "__main__":
    main()
