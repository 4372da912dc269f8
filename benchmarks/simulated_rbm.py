# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rows simulated from a known 200x20 Boltzmann machine, fitted with 100 latent units.

The truth has weights and biases N(0, 1); its 1000 rows are exact draws (its 2**20 latent states are
enumerated). Every method takes plain gradient steps at rate 0.2 from all rows and the same start. The
fitted model is too large to sum, so log p(v) a row comes from annealed importance sampling along the way,
with its standard error: a forward estimate of log Z is too small on average, so the log-likelihood is **too
large** rather than too small where chains miss a mode. The truth's own log-likelihood is exact; on many
held-out rows no model has a larger one, so a value above it by more than its errors would be a wrong log Z.

``python benchmarks/simulated_rbm.py`` runs every method after another, in some minutes. A run ends where its
steps do, where a gradient is not finite, or at the first value after ``--seconds``. Each is kept in a file of
its own as it goes (``raw/`` in the output folder), so runs can be left in the background side by side
(``--only ucd --steps 3000``), and drawn at any time with ``--draw``.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, section 5.2, figure 3.
"""

import argparse
from collections.abc import Sequence
import json
import math
from pathlib import Path
from typing import Any

from following import Watch, gather, raw
import numpy as np
import xarray as xr

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli
from ebmpp.diagnostics import style

METHODS = {
    "ucd": ("UCD, adaptive, 1000 pairs", UCD(num_pairs=1000)),
    "ucd_few": ("UCD, adaptive, 100 pairs", UCD(num_pairs=100)),
    "cd1": ("CD-1", CD(k=1)),
    "pcd": ("PCD-1, 1000 chains", PCD(k=1, num_chains=1000)),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(METHODS), default=list(METHODS), help="methods to run")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=300)
    add("--points", type=int, default=10, help="values of the log-likelihood along a run, after the first")
    add("--rate", type=float, default=0.2)
    add("--rows", type=int, default=1000)
    add("--visible", type=int, default=200)
    add("--latent", type=int, default=100, help="of the fitted model; the truth has 20")
    add("--particles", type=int, default=100)
    add("--temperatures", type=int, default=3000)
    add("--seconds", type=float, default=math.inf, help="for one run")
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw what there is")
    args = parser.parse_args(argv)
    if min(args.steps, args.points, args.rows) < 1 or not args.rate > 0:
        parser.error("--steps, --points, --rows and --rate are positive")
    return args


def simulate(args: argparse.Namespace) -> tuple[dict[str, jax.Array], dict[str, float]]:
    """Rows of the truth to train on and held out, and its exact log-likelihood a row of both."""
    truth = ebmpp.layered(v=Bernoulli(args.visible), h=Bernoulli(20))
    weights, draws = jax.random.split(jax.random.key(args.seed))
    generator = np.random.default_rng(args.seed)
    params = jax.tree.map(
        lambda a: jnp.asarray(generator.normal(size=a.shape), jnp.float32), truth.init(weights)
    )
    drawn = ebmpp.perfect_sample(truth, params, draws, 2 * args.rows, method="enumerate")["v"]
    rows = {"log_likelihood": drawn[: args.rows], "held_out": drawn[args.rows :]}
    log_z = ebmpp.exact.log_partition(truth, params)
    each = lambda v: -truth.free_energy(params, {"v": v}) - log_z
    return rows, {name: float(each(v).mean()) for name, v in rows.items()}


def run(method: str, rows: dict[str, jax.Array], truth: dict[str, float], args: argparse.Namespace) -> None:
    """One training run, kept as it goes."""
    label, estimator = METHODS[method]
    watch = Watch(
        raw(args.out, "simulated_rbm", method),
        ebmpp.layered(v=Bernoulli(args.visible), h=Bernoulli(args.latent)),
        rows,
        rows["log_likelihood"],
        particles=args.particles,
        temperatures=args.temperatures,
        seed=args.seed,
        known={f"truth_{name}": value for name, value in truth.items()},
        seconds=args.seconds,
    )
    ended = watch.train(
        rows["log_likelihood"],
        args.steps,
        rng_key=jax.random.key(args.seed),
        estimator=estimator,
        optimizer=optax.sgd(args.rate),
        num_steps=args.steps,
        batch_size=args.rows,
        monitor_every=max(1, args.steps // args.points),
    )
    last = watch.points[-1]
    print(
        f"{label}: {last['log_likelihood']:.2f} +- {last['standard_error']:.2g} a row at step "
        f"{last['step']}, {last['effective']:.0f} of {args.particles} particles effective, "
        f"{last['seconds']:.0f} s ({ended})",
        flush=True,
    )


# -- the report ------------------------------------------------------------------------------------


def numbers(runs: dict[str, xr.Dataset]) -> list[dict[str, Any]]:
    """A run in a few numbers."""
    rows = []
    for method, made in runs.items():
        best, last = int(np.nanargmax(made["log_likelihood"].values)), made.isel(point=-1)
        row = {
            "method": METHODS[method][0],
            "steps": int(last["step"]),
            "ended": made.attrs["ended"],
            "best": round(float(made["log_likelihood"][best]), 2),
            "best_at": int(made["step"][best]),
            "last": round(float(last["log_likelihood"]), 2),
            "last_held_out": round(float(last["held_out"]), 2),
            "last_standard_error": round(float(last["standard_error"]), 3),
            "last_effective_particles": round(float(last["effective"]), 1),
            "seconds": round(float(last["seconds"]), 1),
            "curve": {
                n: [round(float(v), 3) for v in made[n].values]
                for n in ("step", "seconds", "log_likelihood", "held_out", "standard_error")
            },
        }
        if "meeting_time_mean" in made:
            row["meeting_time_mean_last"] = round(float(made["meeting_time_mean"][-20:].mean()), 1)
            row["meeting_time_max"] = int(made["meeting_time_max"].max())
            waited = (made["meeting_time_mean"] - made["lag"]).values
            row["sweeps_to_meet"] = [round(float(part.mean()), 2) for part in _parts(waited)]
        rows.append(row)
    return rows


_PARTS = 60


def _parts(values: np.ndarray) -> list[np.ndarray]:
    """Steps after one another, as many each."""
    return np.array_split(values, min(_PARTS, len(values)))


_TICKS = (-48, -50, -52, -54, -56, -58, -60, -65, -70, -80, -100, -150, -300)
_RUN = {"log_likelihood": "training row", "held_out": "held-out row"}


def draw(rows: list[dict[str, Any]], truth: dict[str, float], path: Path) -> None:
    """Log-likelihoods a row with two standard errors by step and by time, and meeting times.

    :param rows: as :func:`numbers` makes them, and as they are kept.
    :param truth: the true model's own.
    """
    import matplotlib

    matplotlib.use("agg")

    figure, axes = style.grid(4, (5.4, 3.5), ncols=2)
    panels = [("log_likelihood", "step"), ("held_out", "step"), ("held_out", "seconds")]
    for index, row in enumerate(rows):
        look = style.look(index) | {"linewidth": 1.4, "label": row["method"]}
        curve = {n: np.array(v) for n, v in row["curve"].items()}
        marks = {"marker": style.marker(index), "markersize": 4, "capsize": 2, "markerfacecolor": "none"}
        for ax, (name, x) in zip(axes, panels, strict=False):
            ax.errorbar(curve[x], curve[name], 2 * curve["standard_error"], **look, **marks)
        if "sweeps_to_meet" in row:
            steps = row["steps"] * (np.arange(len(row["sweeps_to_meet"])) + 0.5) / len(row["sweeps_to_meet"])
            axes[3].plot(steps, row["sweeps_to_meet"], **look)
    for ax, (name, x) in zip(axes, panels, strict=False):
        values = np.concatenate([row["curve"][name] for row in rows])
        low, top = np.nanmin(values), max(np.nanmax(values), truth[name]) + 1
        style.below(ax, top, [t for t in _TICKS if low < t < top])
        ax.set_ylim(top - 1.15 * (top - low), top - 0.7)
        ax.axhline(truth[name], color=style.INK, linewidth=0.8, label="the true model")
        ax.set(ylabel=f"log-likelihood a {_RUN[name]} (nats)")
        ax.set_xlabel("step" if x == "step" else "training, in seconds on two cores")
    axes[3].set(xlabel="step", ylabel="sweeps to meet, after the lag, mean", ylim=(0, None))
    for ax in axes:
        style.tidy(ax)
    style.legend_below(figure, axes, ncols=5)
    figure.savefig(path, dpi=110)


def report(out: Path) -> None:
    """Draw and tabulate every run that there is."""
    runs, kept = gather(out, "simulated_rbm", METHODS), out / "simulated_rbm.json"
    if runs:
        known = next(iter(runs.values())).attrs
        truth = {n: round(float(v), 2) for n, v in known.items() if n.startswith("truth")}
        made = truth | {"runs": numbers(runs)}
        kept.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    elif not kept.exists():
        raise SystemExit(f"no runs in {out / 'raw'}: run some first, without --draw")
    made = json.loads(kept.read_text(encoding="utf-8"))
    draw(made["runs"], {name: made[f"truth_{name}"] for name in _RUN}, kept.with_suffix(".png"))
    print(f"wrote {kept.with_suffix('.png')}" + (f" and {kept}" if runs else f" of the numbers in {kept}"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    if not args.draw:
        rows, truth = simulate(args)
        for method in args.only:
            run(method, rows, truth, args)
    report(args.out)


if __name__ == "__main__":
    main()
