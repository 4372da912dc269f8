# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Boltzmann machines on images under plain gradient steps: the experiments of ``mnist_methods.py``.

- ``dc``: Upadhya, Sastry (2017), figure 3, and figure 4 with ``--data omniglot``.
  784x500, batches of 200, rate 0.01: CD, PCD and the centered gradient with 24 sweeps
  per batch, S-DCP and CS-DCP with 6 inner steps of 4, and a control: CD-4 with six
  steps per batch.
- ``spectral``: their figure 5. Batches of 1000; CD-24 under spectral descent at several
  rates.
- ``rates``, ``inner``, ``batches``, ``starts``: their figures 6a, 6b, 7a and 7b, and
  table 1.
- ``ucd``: Qiu, Zhang, Wang (2020), figures 4, 10 and 11 and table 3. 784x1000, batches
  of 1000, rate 0.1, 1000 chains: CD-1 to CD-30, PCD, UCD as published (k = lag = 1,
  stopped at 100 sweeps and therefore biased), UCD with an adaptive lag, and PCD
  followed by UCD from its chains at a tenth of the rate.

Images are binarised once at random; one in six is held out. The mean log-likelihood per
row comes from annealed importance sampling with its standard error. It is too large on
average, and clearly so where few particles are effective. Costs are seconds of
training, without compilation, and sweeps of a chain.

``python benchmarks/papers/mnist_rbm.py dc --epochs 4`` reads MNIST from
``EBMPP_DATA_DIR``; ``--data`` takes others. ``--latent 100 --rows 7200 --name small``
is a small version.
"""

import argparse
from collections.abc import Sequence
import math
from typing import Any

import datasets
from following import Watch, by_method, costs, coupling_numbers, medians
from mnist_methods import EXPERIMENTS, Experiment
import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row, rounded

import jax

import ebmpp
from ebmpp import Bernoulli


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__)
    add = parser.add_argument
    add("experiment", choices=tuple(EXPERIMENTS))
    add("--only", nargs="+", help="methods to run")
    datasets.option(parser, "mnist")
    add("--latent", type=int, help="default: the paper's")
    add(
        "--batch-size",
        type=int,
        help="default: the paper's; methods with their own keep it",
    )
    add(
        "--rate",
        type=float,
        help="default: the paper's; methods with their own keep it",
    )
    add("--epochs", type=float, default=4.0)
    add(
        "--points",
        type=int,
        default=8,
        help="values of the log-likelihood along a run, after the first",
    )
    add("--particles", type=int, default=100)
    add("--temperatures", type=int, default=1000)
    add("--seconds", type=float, default=math.inf, help="for one run")
    args = records.parse(parser, argv, "epochs", "points")
    experiment = EXPERIMENTS[args.experiment]
    args.only = args.only or list(experiment.methods)
    if unknown := sorted(set(args.only) - set(experiment.methods)):
        parser.error(
            f"--only must name some of {list(experiment.methods)}, got {unknown}."
        )
    args.latent = args.latent or experiment.latent
    args.rate = args.rate or experiment.rate
    args.batch_size = args.batch_size or experiment.batch_size
    if min(args.latent, args.batch_size, args.rate) <= 0:
        parser.error("--latent, --batch-size and --rate must be positive.")
    args.records = Records(args.out, "mnist_rbm", args.experiment, args.name)
    return args


def run(
    name: str, seed: int, data: tuple[np.ndarray, np.ndarray], args: argparse.Namespace
) -> None:
    """Train once and store the run."""
    train, held_out = data
    experiment = EXPERIMENTS[args.experiment]
    method = experiment.methods[name]
    batch = method.batch_size or args.batch_size
    rate = method.rate or args.rate
    rbm = ebmpp.layered(v=Bernoulli(train.shape[1]), h=Bernoulli(args.latent))
    batches = max(1, round(args.epochs * len(train) / batch))
    stages = method.stages(rbm, batches, rate)
    steps = sum(stage.num_steps for stage in stages)
    key = jax.random.key(seed)
    deviation, bias = method.start
    params = rbm.init(key, train, scheme={"weight": "gaussian", "bias": bias})
    params = {**params, "v:h": params["v:h"] * (deviation / 0.01)}
    watch = Watch(
        rbm,
        {"log_likelihood": train[: len(held_out)], "held_out": held_out},
        train,
        particles=args.particles,
        temperatures=args.temperatures,
        seed=seed,
        seconds=args.seconds,
    )
    history, ended = watch.train(
        train,
        steps,
        params=params,
        schedule=stages,
        batch_size=batch,
        monitor_every=max(1, steps // args.points),
        rng_key=key,
    )
    label = ": ".join(filter(None, [experiment.panels[method.panel], method.label]))
    epochs = watch.column("step") * batch / len(train) / method.updates
    curve = watch.column("held_out")
    last = watch.points[-1]
    columns = np.transpose(
        [epochs, *map(watch.column, ("held_out", "standard_error", "seconds"))]
    )
    row: Row = {
        "method": label,
        "seed": seed,
        "rate": rate,
        "epochs": round(float(epochs[-1]), 2),
        "ended": ended,
        "held_out_best": round(float(np.nanmax(curve)), 2),
        "best_at_epoch": round(float(epochs[np.nanargmax(curve)]), 2),
        "held_out_last": round(last["held_out"], 2),
        "train_last": round(last["log_likelihood"], 2),
        "standard_error_last": round(last["standard_error"], 3),
        "effective_particles_last": round(last["effective"], 1),
        "seconds": round(last["seconds"], 1),
        "batches": last["step"] // method.updates,
        "ms_a_batch": rounded(1e3 * watch.seconds_per_step * method.updates, 4),
        "sweeps_a_batch": method.sweeps,
        "curve": columns.round(3).tolist(),
    }
    args.records.save(name, seed, row | coupling_numbers(history, 200))
    print(
        f"{label}, seed {seed}: {last['held_out']:.2f} per held-out row at step "
        f"{last['step']} +- {last['standard_error']:.2g}, {last['effective']:.0f} "
        f"particles effective, {last['seconds']:.0f} s ({ended})",
        flush=True,
    )


# -- the report ----------------------------------------------------------------------


def draw(
    rows: list[Row], experiment: Experiment, title: str, args: argparse.Namespace
) -> None:
    """Draw held-out log-likelihoods by epoch and by minutes, meeting times and discarded draws."""
    split = len(experiment.panels) > 1
    panels = [*experiment.panels] if split else ["", "minutes"]
    panels += [
        name
        for name in ("sweeps_to_meet", "discarded")
        if any(name in row for row in rows)
    ]
    figure, axes = style.grid(len(panels), (5.2, 3.8), ncols=2)
    looks: dict[str, dict[str, Any]] = {}
    for method, runs in by_method(rows).items():
        panel, _, label = method.partition(": ") if split else ("", "", method)
        look = looks.setdefault(
            label, style.look(len(looks)) | {"label": label, "linewidth": 1.4}
        )
        for ax, name in zip(axes, panels, strict=True):
            if name in ("sweeps_to_meet", "discarded"):
                if subset := [row for row in runs if name in row]:
                    size = max(len(row[name]) for row in subset)
                    epochs = (
                        max(row["epochs"] for row in subset)
                        * (np.arange(size) + 0.5)
                        / size
                    )
                    pictures.band(ax, epochs, [row[name] for row in subset], **look)
            elif name in (panel, "minutes"):
                x = np.array(max((row["curve"] for row in runs), key=len))[:, 0]
                if name == "minutes":  # per epoch, by the fastest run
                    x = (
                        x
                        * min(
                            r["ms_a_batch"] * r["batches"] / r["epochs"] for r in runs
                        )
                        / 60_000
                    )
                pictures.band(
                    ax, x, [np.array(row["curve"])[:, 1] for row in runs], **look
                )
    texts = {
        "sweeps_to_meet": "sweeps to meet, after the lag, mean",
        "discarded": "discarded draws per coupled sweep",
    }
    for ax, name in zip(axes, panels, strict=True):
        ax.set(
            xlabel="minutes of training, by the fastest run"
            if name == "minutes"
            else "epoch"
        )
        ax.set_ylabel(texts.get(name, "log-likelihood per held-out row (nats)"))
        if split and name in experiment.panels:
            ax.set_title(name, fontsize=10)
    seeds = len({row["seed"] for row in rows})
    path = args.records.summary.with_suffix(".png")
    pictures.save(figure, axes, path, f"{title}: {pictures.over(seeds)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    experiment = EXPERIMENTS[args.experiment]
    pixels = 0
    for seed in [] if args.draw else args.seeds:
        data = datasets.binary_split(args, seed)
        pixels = data[0].shape[1]
        for name in args.only:
            run(name, seed, data, args)
    title = f"{pixels}x{args.latent} on {datasets.tag(args.data)}, batches of {args.batch_size}"
    known = {"as_printed": experiment.printed, "title": title, "rate": args.rate}
    result = args.records.summarize(experiment.methods, **known)
    rows = result["runs"]
    printed = {m.label: m.minutes for m in experiment.methods.values() if m.minutes}
    print(medians(rows, "held_out_last"), costs(rows, printed), sep="\n\n")
    print(f"as printed: {experiment.printed}")
    draw(rows, experiment, result["title"], args)


if __name__ == "__main__":
    main()
