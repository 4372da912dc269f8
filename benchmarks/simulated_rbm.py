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

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, section 6.2, figures 3, 7, 8 and 9, table 2.
"""

import argparse
from collections.abc import Sequence
import functools
import json
import math
from pathlib import Path
from typing import Any

import bands
from following import Watch, a_step, costs, gather, raw
import numpy as np
import xarray as xr

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, Stage
from ebmpp.diagnostics import style

METHODS = {
    "ucd": ("UCD, adaptive, 1000 pairs", UCD(num_pairs=1000)),
    "ucd_few": ("UCD, adaptive, 100 pairs", UCD(num_pairs=100)),
    "published": (
        "UCD, k = lag = 1, stopped at 100 sweeps (biased)",
        UCD(num_pairs=1000, k=1, lag=1, max_sweeps=100, allow_unmet=True),
    ),
    "cd1": ("CD-1", CD(k=1)),
    "cd2": ("CD-2", CD(k=2)),
    "cd5": ("CD-5", CD(k=5)),
    "cd10": ("CD-10", CD(k=10)),
    "pcd": ("PCD-1, 1000 chains", PCD(k=1, num_chains=1000)),
    "pcd_ucd": ("PCD, then UCD at a tenth of the rate", UCD(num_pairs=1000)),
}
#: seconds of table 2; UCD is the published one
PRINTED = {"CD-1": 16.52, "CD-2": 24.44, "CD-5": 48.54, "CD-10": 89.09, METHODS["pcd"][0]: 16.18}
PRINTED |= {METHODS["published"][0]: 28.47}
_FIRST = 500  # steps of PCD before UCD, as in figure 9; half of all at most


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(METHODS), default=list(METHODS), help="methods to run")
    add("--seeds", type=int, nargs="+", default=[0], help="of start and chains; the truth stays")
    add("--steps", type=int, default=300)
    add("--points", type=int, default=10, help="values of the log-likelihood along a run, after the first")
    add("--rate", type=float, default=0.2)
    add("--rows", type=int, default=1000)
    add("--visible", type=int, default=200)
    add("--latent", type=int, default=100, help="of the fitted model")
    add("--truth", type=int, default=20, help="latent units of the true model, whose states are enumerated")
    add("--particles", type=int, default=100)
    add("--temperatures", type=int, default=3000)
    add("--seconds", type=float, default=math.inf, help="for one run")
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw what there is")
    args = parser.parse_args(argv)
    if min(args.steps, args.points, args.rows) < 1 or not args.rate > 0:
        parser.error("--steps, --points, --rows and --rate are positive")
    return args


@functools.cache  # a new transformation would compile again
def sgd(rate: float) -> optax.GradientTransformation:
    """Plain gradient steps."""
    return optax.sgd(rate)


def stages(method: str, steps: int, rate: float) -> list[Stage]:
    """Of a run."""
    estimator, optimizer = METHODS[method][1], sgd(rate)
    if method != "pcd_ucd" or steps == 1:
        return [Stage(num_steps=steps, estimator=estimator, optimizer=optimizer)]
    first = min(_FIRST, steps // 2)
    return [
        Stage(num_steps=first, estimator=METHODS["pcd"][1], optimizer=optimizer),
        Stage(num_steps=steps - first, estimator=estimator, optimizer=sgd(rate / 10)),
    ]


def simulate(args: argparse.Namespace, seed: int = 0) -> tuple[dict[str, jax.Array], dict[str, float]]:
    """Rows of the truth to train on and held out, and its exact log-likelihood a row of both."""
    truth = ebmpp.layered(v=Bernoulli(args.visible), h=Bernoulli(args.truth))
    weights, draws = jax.random.split(jax.random.key(seed))
    generator = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda a: jnp.asarray(generator.normal(size=a.shape), jnp.float32), truth.init(weights)
    )
    drawn = ebmpp.perfect_sample(truth, params, draws, 2 * args.rows, method="enumerate")["v"]
    rows = {"log_likelihood": drawn[: args.rows], "held_out": drawn[args.rows :]}
    log_z = ebmpp.exact.log_partition(truth, params)
    each = lambda v: -truth.free_energy(params, {"v": v}) - log_z
    return rows, {name: float(each(v).mean()) for name, v in rows.items()}


def run(
    method: str, seed: int, rows: dict[str, jax.Array], truth: dict[str, float], args: argparse.Namespace
) -> None:
    """One training run, kept as it goes."""
    watch = Watch(
        raw(args.out, "simulated_rbm", method, seed),
        ebmpp.layered(v=Bernoulli(args.visible), h=Bernoulli(args.latent)),
        rows,
        rows["log_likelihood"],
        particles=args.particles,
        temperatures=args.temperatures,
        seed=seed,
        known={f"truth_{name}": value for name, value in truth.items()},
        seconds=args.seconds,
    )
    ended = watch.train(
        rows["log_likelihood"],
        args.steps,
        rng_key=jax.random.key(seed),
        schedule=stages(method, args.steps, args.rate),
        batch_size=args.rows,
        monitor_every=max(1, args.steps // args.points),
    )
    last = watch.points[-1]
    print(
        f"{METHODS[method][0]}, seed {seed}: {last['log_likelihood']:.2f} +- {last['standard_error']:.2g} "
        f"a row at step {last['step']}, {last['effective']:.0f} of {args.particles} particles effective, "
        f"{last['seconds']:.0f} s ({ended})",
        flush=True,
    )


# -- the report ------------------------------------------------------------------------------------


def numbers(method: str, seed: int, made: xr.Dataset) -> dict[str, Any]:
    """A run in a few numbers."""
    best, last = int(np.nanargmax(made["log_likelihood"].values)), made.isel(point=-1)
    row = {
        "method": METHODS[method][0],
        "seed": seed,
        "steps": int(last["step"]),
        "ended": made.attrs["ended"],
        "best": round(float(made["log_likelihood"][best]), 2),
        "best_at": int(made["step"][best]),
        "last": round(float(last["log_likelihood"]), 2),
        "last_held_out": round(float(last["held_out"]), 2),
        "last_standard_error": round(float(last["standard_error"]), 3),
        "last_effective_particles": round(float(last["effective"]), 1),
        "seconds": round(float(last["seconds"]), 1),
        "ms_a_batch": float(f"{1e3 * a_step(made):.3g}"),
        "sweeps_a_batch": getattr(METHODS[method][1], "k", None),
        "curve": {
            n: [round(float(v), 3) for v in made[n].values]
            for n in ("step", "seconds", "log_likelihood", "held_out", "standard_error")
        },
    }
    if "meeting_time_mean" in made:
        row["meeting_time_mean_last"] = round(float(made["meeting_time_mean"][-20:].mean()), 1)
        row["meeting_time_max"] = int(made["meeting_time_max"].max())
        row["sweeps_a_batch"] = round(float(made["sweeps"].mean()), 1)
        row["discarded_a_sweep"] = round(float(2 * (made["trials"] - 1).mean()), 3)
        row["sweeps_to_meet"] = parts((made["meeting_time_mean"] - made["lag"]).values)
        row["discarded"] = parts(2 * (made["trials"].values - 1))
    return row


def parts(values: np.ndarray, most: int = 60) -> list[float | None]:
    """Means over steps after one another, as many each; None where there were no pairs."""
    means = [float(part.mean()) for part in np.array_split(values, min(most, len(values)))]
    return [round(mean, 3) if np.isfinite(mean) else None for mean in means]


_TICKS = (-48, -50, -52, -54, -56, -58, -60, -65, -70, -80, -100, -150, -300)
_COUPLED = {
    "sweeps_to_meet": "sweeps to meet, after the lag, mean",
    "discarded": "discarded draws a coupled sweep",
}
_RUN = {"log_likelihood": "training row", "held_out": "held-out row"}


def draw(rows: list[dict[str, Any]], truth: dict[str, float], path: Path) -> None:
    """Log-likelihoods a row by step and by time; meeting times and discarded draws by step.

    :param rows: as :func:`numbers` makes them, and as they are kept.
    :param truth: the true model's own.
    """
    import matplotlib

    matplotlib.use("agg")

    told = [name for name in _COUPLED if any(name in row for row in rows)]
    figure, axes = style.grid(3 + len(told), (5.0, 3.6), ncols=2 if len(told) == 1 else 3)
    panels = [("log_likelihood", "step"), ("held_out", "step"), ("held_out", "seconds")]
    for index, label in enumerate(dict.fromkeys(row["method"] for row in rows)):
        own = [row for row in rows if row["method"] == label]
        look = style.look(index) | {"linewidth": 1.4, "label": label}
        marks = {"marker": style.marker(index), "markersize": 4, "markerfacecolor": "none"}
        for ax, (name, x) in zip(axes, panels, strict=False):
            longest = max((row["curve"][x] for row in own), key=len)
            bands.band(ax, longest, [np.array(row["curve"][name]) for row in own], **look, **marks)
        for ax, name in zip(axes[3:], told, strict=True):
            coupled = [row for row in own if name in row]
            if coupled:
                last, size = max((row["steps"], len(row[name])) for row in coupled)
                steps = last * (np.arange(size) + 0.5) / size
                bands.band(ax, steps, [np.array(row[name], float) for row in coupled], **look)
    for ax, (name, x) in zip(axes, panels, strict=False):
        values = np.concatenate([row["curve"][name] for row in rows])
        low, top = np.nanmin(values), max(np.nanmax(values), truth[name]) + 1
        style.below(ax, top, [t for t in _TICKS if low < t < top])
        ax.set_ylim(top - 1.15 * (top - low), top - 0.7)
        ax.axhline(truth[name], color=style.INK, linewidth=0.8, label="the true model")
        ax.set(ylabel=f"log-likelihood a {_RUN[name]} (nats)")
        ax.set_xlabel("step" if x == "step" else "training, in seconds")
    for ax, name in zip(axes[3:], told, strict=True):
        ax.set(xlabel="step", ylabel=_COUPLED[name], ylim=(0, None))
    for ax in axes:
        style.tidy(ax)
    seeds = bands.over(len({row.get("seed", 0) for row in rows}))
    figure.suptitle(f"1,000 rows of a known 200x20 machine, fitted with 100 units: {seeds}", fontsize=9)
    style.legend_below(figure, axes, ncols=3)
    figure.savefig(path, dpi=110)


def report(out: Path) -> None:
    """Draw and tabulate every run that there is."""
    runs, kept = gather(out, "simulated_rbm", METHODS), out / "simulated_rbm.json"
    if runs:
        known = next(iter(next(iter(runs.values())).values())).attrs
        truth = {n: round(float(v), 2) for n, v in known.items() if n.startswith("truth")}
        rows = [numbers(method, seed, made) for method, own in runs.items() for seed, made in own.items()]
        kept.write_text(json.dumps(truth | {"runs": rows}, indent=1) + "\n", encoding="utf-8")
        print(costs(rows, PRINTED))
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
        for seed in args.seeds:
            for method in args.only:
                run(method, seed, rows, truth, args)
    report(args.out)


if __name__ == "__main__":
    main()
