# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Boltzmann machines on MNIST under plain gradient steps: three experiments of the papers.

- ``dc``: Upadhya, Sastry (2017), figure 3. 784x500, batches of 200, rate 0.01: CD, PCD and the centered
  gradient with 24 sweeps a batch, S-DCP and CS-DCP with 6 inner steps of 4. As many sweeps for all.
- ``spectral``: their figure 5. Batches of 1000; CD-24 under stochastic spectral descent beside them.
- ``ucd``: Qiu, Zhang, Wang (2020), section 6.3, on MNIST in place of Fashion-MNIST. 784x1000, batches of
  1000, rate 0.1, 1000 chains: CD-1, CD-10, PCD, UCD as published (k = lag = 1, stopped at 100 sweeps and so
  biased), UCD with an adaptive lag, and PCD first and then UCD from its chains at a tenth of the rate.

Images are binarised once at random; 10,000 of them are held out. The mean log-likelihood of a row comes from
annealed importance sampling along the way, with its standard error; a forward estimate is too large on
average, so a value is to be believed as far as its effective sample size says.

``python benchmarks/mnist_rbm.py dc --epochs 4`` reads MNIST from ``EBMPP_DATA_DIR``; ``--data digits`` takes
the digits that come with scikit-learn. Every run is kept in a file of its own as it goes (``raw/`` in the
output folder) and can be drawn at any time with ``--draw``.
"""

import argparse
from collections.abc import Callable, Sequence
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from following import Watch, gather, raw
import numpy as np
import xarray as xr

import jax
import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, FactorGraph, Stage
from ebmpp.diagnostics import style
from ebmpp.estimators import CSDCP, SDCP, Centered, Estimator

_PUBLISHED = UCD(num_pairs=1000, k=1, lag=1, max_sweeps=100, allow_unmet=True)

Stages = Callable[[FactorGraph, int, float], list[Stage]]
"""From a graph, a number of batches and a rate."""


def plain(estimator: Estimator, updates: int = 1) -> Stages:
    """Gradient steps, ``updates`` of them a batch."""
    return lambda _, batches, rate: [
        Stage(num_steps=batches * updates, estimator=estimator, optimizer=optax.sgd(rate))
    ]


def spectral(graph: FactorGraph, batches: int, rate: float) -> list[Stage]:
    """Spectral descent; its step has the sum of all singular values for its length, hence the small rate."""
    optimizer = ebmpp.training.spectral_descent(rate / 10, graph)
    return [Stage(num_steps=batches, estimator=CD(k=24), optimizer=optimizer)]


def warmed(_: FactorGraph, batches: int, rate: float) -> list[Stage]:
    """PCD until five in six batches are gone (500 of 600), then UCD."""
    first = max(1, batches * 5 // 6)
    return [
        Stage(num_steps=first, estimator=PCD(k=1, num_chains=1000), optimizer=optax.sgd(rate)),
        Stage(
            num_steps=max(1, batches - first),
            estimator=UCD(num_pairs=1000, start="persistent"),
            optimizer=optax.sgd(rate / 10),
        ),
    ]


class Method(NamedTuple):
    """What is trained."""

    label: str
    stages: Stages
    updates: int = 1
    """Steps a batch."""


class Experiment(NamedTuple):
    """One figure."""

    title: str
    latent: int
    batch_size: int
    rate: float
    cost: str
    """What an epoch costs."""
    methods: dict[str, Method]


_DC = {
    "cd": Method("CD-24", plain(CD(k=24))),
    "pcd": Method("PCD-24", plain(PCD(k=24, num_chains=200))),
    "cg": Method("centered gradient, CD-24", plain(Centered(CD(k=24)))),
    "sdcp": Method("S-DCP, d = 6, K' = 4", plain(SDCP(d=6, k=4), 6), 6),
    "csdcp": Method("CS-DCP, d = 6, K' = 4", plain(CSDCP(d=6, k=4), 6), 6),
}
_EQUAL = "epoch (24 sweeps a batch for every method)"
EXPERIMENTS = {
    "dc": Experiment("784x500, batches of 200", 500, 200, 0.01, _EQUAL, _DC),
    "spectral": Experiment(
        "784x500, batches of 1000",
        500,
        1000,
        0.01,
        _EQUAL,
        {
            "ssd": Method("stochastic spectral descent, CD-24", spectral),
            **{name: _DC[name] for name in ("cd", "sdcp", "csdcp")},
        },
    ),
    "ucd": Experiment(
        "784x1000, batches of 1000",
        1000,
        1000,
        0.1,
        "epoch (sweeps an epoch differ: see the minutes)",
        {
            "cd1": Method("CD-1", plain(CD(k=1))),
            "cd10": Method("CD-10", plain(CD(k=10))),
            "pcd": Method("PCD-1, 1000 chains", plain(PCD(k=1, num_chains=1000))),
            "published": Method("UCD, k = lag = 1, stopped at 100 sweeps", plain(_PUBLISHED)),
            "ucd": Method("UCD, adaptive, 1000 pairs", plain(UCD(num_pairs=1000))),
            "pcd_ucd": Method("PCD, then UCD at a tenth of the rate", warmed),
        },
    ),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("experiment", choices=tuple(EXPERIMENTS))
    add("--only", nargs="+", help="methods to run")
    add("--data", choices=("digits", "mnist"), default="mnist")
    add("--latent", type=int, help="default: the paper's")
    add("--batch-size", type=int, help="default: the paper's")
    add("--rate", type=float, help="default: the paper's")
    add("--epochs", type=float, default=4.0)
    add("--points", type=int, default=8, help="values of the log-likelihood along a run, after the first")
    add("--particles", type=int, default=100)
    add("--temperatures", type=int, default=1000)
    add("--seconds", type=float, default=math.inf, help="for one run")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw what there is")
    args = parser.parse_args(argv)
    made = EXPERIMENTS[args.experiment]
    args.only = args.only or list(made.methods)
    unknown = sorted(set(args.only) - set(made.methods))
    if unknown:
        parser.error(f"--only: {args.experiment} has {list(made.methods)}, not {unknown}")
    args.latent, args.rate = args.latent or made.latent, args.rate or made.rate
    args.batch_size = args.batch_size or made.batch_size
    if min(args.latent, args.batch_size, args.points) < 1 or min(args.epochs, args.rate) <= 0:
        parser.error("--latent, --batch-size, --points, --epochs and --rate are positive")
    return args


def images(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and held out, one in six, binarised once."""
    grey = ebmpp.data.mnist() if args.data == "mnist" else ebmpp.data.digits()
    rng = np.random.default_rng(args.seed)
    grey = grey[rng.permutation(len(grey))]
    rows = (rng.random(grey.shape, np.float32) < grey).astype(np.float32)
    cut = len(rows) // 6
    return rows[cut:], rows[:cut]


def run(name: str, data: tuple[np.ndarray, np.ndarray], args: argparse.Namespace) -> None:
    """One training run, kept as it goes."""
    train, held_out = data
    method = EXPERIMENTS[args.experiment].methods[name]
    rbm = ebmpp.layered(v=Bernoulli(train.shape[1]), h=Bernoulli(args.latent))
    batches = max(1, round(args.epochs * len(train) / args.batch_size))
    stages = method.stages(rbm, batches, args.rate)
    steps = sum(stage.num_steps for stage in stages)
    rows = {"log_likelihood": train[: len(held_out)], "held_out": held_out}
    a_step = args.batch_size / len(train) / method.updates
    watch = Watch(
        raw(args.out, f"mnist_rbm_{args.experiment}", name),
        rbm,
        rows,
        train,
        particles=args.particles,
        temperatures=args.temperatures,
        seed=args.seed,
        known={"epochs_a_step": a_step, "rate": args.rate},
        seconds=args.seconds,
    )
    ended = watch.train(
        train,
        steps,
        schedule=stages,
        batch_size=args.batch_size,
        monitor_every=max(1, steps // args.points),
        rng_key=jax.random.key(args.seed),
    )
    last = watch.points[-1]
    told = f"{method.label}: {last['held_out']:.2f} a held-out row at step {last['step']}"
    told += f" +- {last['standard_error']:.2g}, {last['effective']:.0f} particles effective"
    print(f"{told}, {last['seconds']:.0f} s ({ended})", flush=True)


# -- the report ------------------------------------------------------------------------------------


def numbers(runs: dict[str, xr.Dataset], methods: dict[str, Method]) -> list[dict[str, Any]]:
    """A run in a few numbers, and its curve."""
    rows = []
    for name, made in runs.items():
        best, last = int(np.nanargmax(made["held_out"].values)), made.isel(point=-1)
        epochs = made["step"].values * made.attrs["epochs_a_step"]
        row = {
            "method": methods[name].label,
            "rate": made.attrs["rate"],
            "epochs": round(float(epochs[-1]), 2),
            "ended": made.attrs["ended"],
            "held_out_best": round(float(made["held_out"][best]), 2),
            "best_at_epoch": round(float(epochs[best]), 2),
            "held_out_last": round(float(last["held_out"]), 2),
            "train_last": round(float(last["log_likelihood"]), 2),
            "standard_error_last": round(float(last["standard_error"]), 3),
            "effective_particles_last": round(float(last["effective"]), 1),
            "seconds": round(float(last["seconds"]), 1),
            "curve": [
                [round(float(x), digits) for x, digits in zip(point, (3, 2, 3, 1), strict=True)]
                for point in zip(
                    epochs,
                    *(made[n].values for n in ("held_out", "standard_error", "seconds")),
                    strict=True,
                )
            ],
        }
        if "meeting_time_mean" in made:
            tau = made["meeting_time_mean"].values
            row["meeting_time_mean_last"] = round(float(tau[-20:].mean()), 1)
            row["meeting_time_max"] = int(np.nanmax(made["meeting_time_max"]))
            some = np.unique(np.linspace(0, len(tau) - 1, 200).astype(int))
            a_step = made.attrs["epochs_a_step"]
            row["meeting_times"] = [[round(float(i * a_step), 3), round(float(tau[i]), 1)] for i in some]
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], experiment: Experiment, path: Path) -> None:
    """Held-out log-likelihoods against the epoch, and the minutes where these are known; meeting times.

    :param rows: as :func:`numbers` makes them, and as they are kept.
    """
    import matplotlib

    matplotlib.use("agg")

    timed = [row for row in rows if len(row["curve"][0]) > 2]
    coupled = [row for row in rows if "meeting_times" in row]
    panels = ["epoch"] + ["minutes"] * bool(timed) + ["meeting"] * bool(coupled)
    figure, axes = style.grid(len(panels), (5.2, 3.8))
    looks = {row["method"]: style.look(i) | {"marker": style.marker(i)} for i, row in enumerate(rows)}
    for panel, ax in zip(panels, axes, strict=True):
        for row in coupled if panel == "meeting" else timed if panel == "minutes" else rows:
            look = looks[row["method"]] | {"label": row["method"], "markersize": 4, "linewidth": 1.4}
            if panel == "meeting":
                x, tau = np.array(row["meeting_times"]).T
                ax.plot(x, tau, **look | {"marker": "none"})
                continue
            curve = np.array([[*point, np.nan, np.nan][:4] for point in row["curve"]]).T
            error = None if np.isnan(curve[2]).all() else 2 * curve[2]
            x = curve[0] if panel == "epoch" else curve[3] / 60
            ax.errorbar(x, curve[1], error, capsize=2, markerfacecolor="none", **look)
        ax.set(xlabel="training, in minutes" if panel == "minutes" else experiment.cost)
        ax.set_ylabel("log-likelihood a held-out row (nats)")
        if panel == "meeting":
            ax.set(xlabel="epoch", ylabel="mean meeting time (sweeps)", yscale="log")
        style.tidy(ax)
    axes[0].set_title(f"{experiment.title}, one run each", fontsize=10)
    style.legend_below(figure, axes, ncols=1 + len(panels))
    figure.savefig(path, dpi=120)


def report(args: argparse.Namespace) -> None:
    """Draw and tabulate every run that there is."""
    experiment, script = EXPERIMENTS[args.experiment], f"mnist_rbm_{args.experiment}"
    runs, kept = gather(args.out, script, experiment.methods), args.out / f"{script}.json"
    if runs:
        made = {"runs": numbers(runs, experiment.methods)}
        kept.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    elif not kept.exists():
        raise SystemExit(f"no runs in {args.out / 'raw'}: run some first, without --draw")
    draw(json.loads(kept.read_text(encoding="utf-8"))["runs"], experiment, kept.with_suffix(".png"))
    print(f"wrote {args.out / script}.png" + (f" and {kept}" if runs else f" of the numbers in {kept}"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    if not args.draw:
        data = images(args)
        for name in args.only:
            run(name, data, args)
    report(args)


if __name__ == "__main__":
    main()
