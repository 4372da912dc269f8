# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Boltzmann machines on images under plain gradient steps: the experiments of ``mnist_methods.py``.

- ``dc``: Upadhya, Sastry (2017), figure 3, and figure 4 with ``--data omniglot``. 784x500, batches of 200,
  rate 0.01: CD, PCD and the centered gradient with 24 sweeps a batch, S-DCP and CS-DCP with 6 inner steps of
  4, and the control that decides what of their gain is six steps for one: CD-4 with six steps a batch.
- ``spectral``: their figure 5. Batches of 1000; CD-24 under spectral descent, at several rates, beside them.
- ``rates``, ``inner``, ``batches``, ``starts``: figures 6a, 6b, 7a and 7b (with table 1).
- ``ucd``: Qiu, Zhang, Wang (2020), figures 4, 10 and 11 and table 3. 784x1000, batches of 1000, rate 0.1,
  1000 chains: CD-1 to CD-30, PCD, UCD as published (k = lag = 1, stopped at 100 sweeps and so biased), UCD
  with an adaptive lag, and PCD first and then UCD from its chains at a tenth of the rate.

Images are binarised once at random; one in six is held out. The mean log-likelihood of a row comes from
annealed importance sampling along the way, with its standard error; a forward estimate is too large on
average, so a value is to be believed as far as its effective sample size says. Costs are told in seconds of
training (compiling left out) and in sweeps of a chain.

``python benchmarks/mnist_rbm.py dc --epochs 4`` reads MNIST from ``EBMPP_DATA_DIR``; ``--data`` takes others.
``--latent 100 --rows 7200 --name small`` is a small version. Every run is kept in a file of its own as it
goes (``raw/`` in the output folder) and can be drawn at any time with ``--draw``.
"""

import argparse
from collections.abc import Sequence
import json
import math
from pathlib import Path
from typing import Any

import bands
import datasets
from following import Watch, a_step, costs, gather, raw
from mnist_methods import EXPERIMENTS, Experiment, Method
import numpy as np
import xarray as xr

import jax

import ebmpp
from ebmpp import Bernoulli
from ebmpp.diagnostics import style


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("experiment", choices=tuple(EXPERIMENTS))
    add("--only", nargs="+", help="methods to run")
    datasets.option(parser, "mnist")
    add("--rows", type=int, help="images at most, those held out included; default: all")
    add("--latent", type=int, help="default: the paper's")
    add("--batch-size", type=int, help="default: the paper's; methods with one of their own keep it")
    add("--rate", type=float, help="likewise")
    add("--epochs", type=float, default=4.0)
    add("--points", type=int, default=8, help="values of the log-likelihood along a run, after the first")
    add("--particles", type=int, default=100)
    add("--temperatures", type=int, default=1000)
    add("--seconds", type=float, default=math.inf, help="for one run")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--name", default="", help="of this version, put at the end of the names of its files")
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
    args.script = "_".join(filter(None, ["mnist_rbm", args.experiment, args.name]))
    return args


def images(args: argparse.Namespace, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and held out, one in six, binarised once."""
    rng = np.random.default_rng(seed)
    grey = datasets.read(args.data)
    grey = grey[rng.permutation(len(grey))[: args.rows]]
    rows = (rng.random(grey.shape, np.float32) < grey).astype(np.float32)
    cut = len(rows) // 6
    return rows[cut:], rows[:cut]


def run(name: str, seed: int, data: tuple[np.ndarray, np.ndarray], args: argparse.Namespace) -> None:
    """One training run, kept as it goes."""
    train, held_out = data
    method = EXPERIMENTS[args.experiment].methods[name]
    batch, rate = method.batch_size or args.batch_size, method.rate or args.rate
    rbm = ebmpp.layered(v=Bernoulli(train.shape[1]), h=Bernoulli(args.latent))
    batches = max(1, round(args.epochs * len(train) / batch))
    stages = method.stages(rbm, batches, rate)
    steps = sum(stage.num_steps for stage in stages)
    key, (deviation, bias) = jax.random.key(seed), method.start
    params = rbm.init(key, train, scheme={"weight": "gaussian", "bias": bias})
    params = {**params, "v:h": params["v:h"] * (deviation / 0.01)}
    known = {"epochs_a_step": batch / len(train) / method.updates, "rate": rate, "batch_size": batch}
    watch = Watch(
        raw(args.out, args.script, name, seed),
        rbm,
        {"log_likelihood": train[: len(held_out)], "held_out": held_out},
        train,
        particles=args.particles,
        temperatures=args.temperatures,
        seed=seed,
        known=known | {"data": datasets.tag(args.data), "visible": train.shape[1], "latent": args.latent},
        seconds=args.seconds,
    )
    ended = watch.train(
        train,
        steps,
        params=params,
        schedule=stages,
        batch_size=batch,
        monitor_every=max(1, steps // args.points),
        rng_key=key,
    )
    last = watch.points[-1]
    told = f"{title(name, args)}, seed {seed}: {last['held_out']:.2f} a held-out row at step {last['step']}"
    told += f" +- {last['standard_error']:.2g}, {last['effective']:.0f} particles effective"
    print(f"{told}, {last['seconds']:.0f} s ({ended})", flush=True)


# -- the report ------------------------------------------------------------------------------------


def title(name: str, args: argparse.Namespace) -> str:
    """Of a method, with its panel's."""
    experiment = EXPERIMENTS[args.experiment]
    method = experiment.methods[name]
    return ": ".join(filter(None, [experiment.panels[method.panel], method.label]))


def numbers(label: str, seed: int, made: xr.Dataset, method: Method) -> dict[str, Any]:
    """A run in a few numbers, and its curve."""
    best, last = int(np.nanargmax(made["held_out"].values)), made.isel(point=-1)
    epochs = made["step"].values * made.attrs["epochs_a_step"]
    row = {
        "method": label,
        "seed": seed,
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
        "batches": int(last["step"]) // method.updates,
        "ms_a_batch": float(f"{1e3 * a_step(made) * method.updates:.4g}"),
        "sweeps_a_batch": method.sweeps,
        "curve": [
            [round(float(x), digits) for x, digits in zip(point, (3, 2, 3, 1), strict=True)]
            for point in zip(
                epochs, *(made[n].values for n in ("held_out", "standard_error", "seconds")), strict=True
            )
        ],
    }
    if "meeting_time_mean" in made:
        row["meeting_time_mean_last"] = round(float(made["meeting_time_mean"][-20:].mean()), 1)
        row["meeting_time_max"] = int(np.nanmax(made["meeting_time_max"]))
        row["sweeps_a_batch"] = round(float(made["sweeps"].mean()), 1)
        row["discarded_a_sweep"] = round(float(2 * (made["trials"] - 1).mean()), 2)
        tau, rejected = made["meeting_time_mean"].values, 2 * (made["trials"].values - 1)
        some = np.unique(np.linspace(0, len(tau) - 1, 200).astype(int))
        each = made.attrs["epochs_a_step"]
        row["meeting_times"] = [[round(float(i * each), 3), round(float(tau[i]), 1)] for i in some]
        row["discarded"] = [[round(float(i * each), 3), round(float(rejected[i]), 2)] for i in some]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Likelihoods: medians over seeds, and their range."""
    lines = [f"{'method':<52}{'seeds':>6}{'held out, last':>16}{'range':>22}{'best':>9}"]
    for label in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == label]
        last, best = ([row[f"held_out_{which}"] for row in own] for which in ("last", "best"))
        reach = f"{min(last):.2f} to {max(last):.2f}"
        lines.append(f"{label:<52}{len(own):>6}{np.median(last):>16.2f}{reach:>22}{np.median(best):>9.2f}")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], experiment: Experiment, path: Path) -> None:
    """Held-out log-likelihoods against the epoch, and the minutes where these are known; meeting times and
    discarded draws.

    :param rows: as :func:`numbers` makes them, and as they are kept.
    """
    import matplotlib
    from matplotlib import ticker

    matplotlib.use("agg")

    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["method"], []).append(row)
    split = len(experiment.panels) > 1
    panels = [*experiment.panels] + ["minutes"] * (not split and len(rows[0]["curve"][0]) > 2)
    panels += [name for name in ("meeting_times", "discarded") if any(name in row for row in rows)]
    figure, axes = style.grid(len(panels), (5.2, 3.8), ncols=2)
    shown: dict[str, dict[str, Any]] = {}
    for method, own in grouped.items():
        panel, _, label = method.partition(": ") if split else ("", "", method)
        look = shown.setdefault(label, style.look(len(shown)) | {"marker": style.marker(len(shown))})
        look = look | {"label": label, "markersize": 4, "linewidth": 1.4, "markerfacecolor": "none"}
        for ax, name in zip(axes, panels, strict=True):
            if name in ("meeting_times", "discarded"):
                x, values = _curves(own, name, 0, 1)
                look = look | {"marker": "none"}
            elif name in (panel, "minutes"):
                x, values = _curves(own, "curve", 0, 1)
                x = x * _minutes(own) if name == "minutes" else x
            else:
                continue
            if values:
                bands.band(ax, x, values, **look)
    for ax, name in zip(axes, panels, strict=True):
        ax.set(xlabel="minutes of training, at its fastest run's pace" if name == "minutes" else "epoch")
        ax.set_ylabel("log-likelihood a held-out row (nats)")
        if name == "meeting_times":
            ax.set(ylabel="mean meeting time (sweeps)", yscale="log")
            ax.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1.0, 0.4)))
        elif name == "discarded":
            ax.set(ylabel="discarded draws a coupled sweep")
        elif split:
            ax.set_title(name, fontsize=10)
        style.tidy(ax)
    seeds = len({row.get("seed", 0) for row in rows})
    figure.suptitle(f"{experiment.title}: {bands.over(seeds)}", fontsize=10)
    style.legend_below(figure, axes, ncols=min(3, 1 + len(panels)))
    figure.savefig(path, dpi=120)


def _minutes(own: list[dict[str, Any]]) -> float:
    """Of an epoch, by the fastest run: a busy machine stops some."""
    return min(row["ms_a_batch"] * row["batches"] / row["epochs"] for row in own) / 60_000


def _curves(own: list[dict[str, Any]], name: str, x: int, y: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Columns of the runs that have them, the first of the longest."""
    made = sorted((np.array(row[name], float) for row in own if name in row), key=len)
    return (made[-1][:, x], [one[:, y] for one in made]) if made else (np.zeros(0), [])


def report(args: argparse.Namespace) -> None:
    """Draw and tabulate every run that there is."""
    experiment, kept = EXPERIMENTS[args.experiment], args.out / f"{args.script}.json"
    runs = gather(args.out, args.script, experiment.methods)
    if runs:
        rows = [
            numbers(title(name, args), seed, one, experiment.methods[name])
            for name, own in runs.items()
            for seed, one in own.items()
        ]
        known = next(iter(next(iter(runs.values())).values())).attrs
        made = {"as_printed": experiment.printed, "data": known["data"], "runs": rows}
        made |= {"size": f"{known['visible']}x{known['latent']}"}
        made |= {"batch_size": args.batch_size, "rate": args.rate}
        kept.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        printed = {m.label: m.minutes for m in experiment.methods.values() if m.minutes is not None}
        print(table(rows), costs(rows, printed), sep="\n\n")
        print(f"the paper: {experiment.printed}")
    elif not kept.exists():
        raise SystemExit(f"no runs in {args.out / 'raw'}: run some first, without --draw")
    made = json.loads(kept.read_text(encoding="utf-8"))
    size = made.get("size", f"784x{experiment.latent}")
    told = experiment.title.replace(f"784x{experiment.latent}", f"{size} on {made.get('data', 'mnist')}")
    if made.get("batch_size", experiment.batch_size) != experiment.batch_size:
        told = told.replace(f"batches of {experiment.batch_size}", f"batches of {made['batch_size']}")
    experiment = experiment._replace(title=told)
    draw(made["runs"], experiment, kept.with_suffix(".png"))
    print(f"wrote {kept.with_suffix('.png')}" + (f" and {kept}" if runs else f" of the numbers in {kept}"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    for seed in [] if args.draw else args.seeds:
        data = images(args, seed)
        for name in args.only:
            run(name, seed, data, args)
    report(args)


if __name__ == "__main__":
    main()
