# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The estimators of the four papers and those beyond them on one machine and one data set, in one table.

A restricted Boltzmann machine on MNIST (784x100 by default), batches of 100 rows binarised once, 100 chains
or pairs, one rate that falls linearly to nothing; a dear method takes fewer steps (``share``), so that no run
takes many times as long as another. The mean log-likelihood of a held-out row has its log Z from a particle
system (:func:`ebmpp.smc`), which is too small on average, so the likelihood is **too large** on average, and
clearly so where few particles are effective. Seconds are of training, compiling left out.

``python benchmarks/trainers.py`` takes MNIST from EBMPP_DATA_DIR; ``--data digits`` needs no download. Each
run is kept in ``raw/`` of the output folder; ``--draw`` makes picture and table of those again.
"""

import argparse
from collections.abc import Sequence
import json
from pathlib import Path
import time
from typing import Any, NamedTuple
import warnings

import bands
import datasets
import numpy as np

import jax
import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, ParticleUCD, Spin, TemperedPCD, WeightedPCD
from ebmpp.contrib import CSDCP, FPCD, SDCP, LocalModeUCD
from ebmpp.diagnostics import style
from ebmpp.estimators import Centered, Estimator


class Trainer(NamedTuple):
    """An estimator, and how far it goes."""

    label: str
    estimator: Estimator
    share: float = 1.0
    """Steps, of those that are asked for."""
    rate: float = 1.0
    """Times the rate that is asked for."""
    spins: bool = False


#: A unit of 0 and 1 is (1 + spin) / 2: a spin's weights are a quarter as large.
TRAINERS = {
    "cd": Trainer("CD-1", CD(k=1)),
    "pcd": Trainer("PCD-1", PCD(num_chains=100)),
    "fpcd": Trainer("FPCD-1", FPCD(num_chains=100, rate=0.01)),
    "tempered": Trainer("TemperedPCD, 5 temperatures", TemperedPCD(num_chains=100, num_temperatures=5), 0.3),
    "centered": Trainer("centered PCD-1", Centered(PCD(num_chains=100))),
    "sdcp": Trainer("S-DCP, d = 3, K' = 4", SDCP(d=3, k=4)),
    "csdcp": Trainer("CS-DCP, d = 3, K' = 4", CSDCP(d=3, k=4)),
    "weighted": Trainer("WeightedPCD, 1000 chains", WeightedPCD(num_chains=1000, num_watchers=0), 0.5),
    "ucd": Trainer("UCD, adaptive, 100 pairs", UCD(num_pairs=100), 0.1),
    "particles": Trainer("ParticleUCD, 200 particles", ParticleUCD(num_particles=200), 0.05),
    "lmi": Trainer("UCD-LMI, 100 pairs", LocalModeUCD(num_pairs=100), 0.3, 0.25, spins=True),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(TRAINERS), default=list(TRAINERS))
    datasets.option(parser, "mnist")
    add("--rows", type=int, help="images at most, those held out included; default: all")
    add("--latent", type=int, default=100)
    add("--steps", type=int, default=4000)
    add("--batch-size", type=int, default=100)
    add("--rate", type=float, default=0.05)
    add("--particles", type=int, default=500, help="of the evaluation, a multiple of 10")
    add("--sweeps", type=int, default=4, help="of the evaluation, at each rung")
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw what there is")
    args = parser.parse_args(argv)
    if min(args.latent, args.steps, args.batch_size, args.sweeps) < 1 or not args.rate > 0:
        parser.error("--latent, --steps, --batch-size, --sweeps and --rate are positive")
    return args


def images(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and held out, one in six, binarised once."""
    rng = np.random.default_rng(0)
    grey = datasets.shuffled(args.data, 0, args.rows)
    rows = (rng.random(grey.shape, np.float32) < grey).astype(np.float32)
    cut = len(rows) // 6
    return rows[cut:], rows[:cut]


class _Clock:
    """A callback of ``fit``: seconds a step, from the first look on, before which everything is compiled."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, float]] = []

    def __call__(self, progress: Any) -> None:
        jax.block_until_ready(progress.params)
        self.looks.append((progress.step, time.monotonic()))

    @property
    def a_step(self) -> float:
        """Seconds."""
        (first, begun), (last, ended) = [look for look in self.looks if look[0] > 0][:: len(self.looks) - 2]
        return (ended - begun) / (last - first)


def run(name: str, seed: int, rows: tuple[np.ndarray, np.ndarray], args: argparse.Namespace) -> None:
    """One training run in numbers, kept."""
    trainer, (train, held_out) = TRAINERS[name], rows
    family, steps = Spin if trainer.spins else Bernoulli, max(10, round(trainer.share * args.steps))
    if trainer.spins:
        train, held_out = 2 * train - 1, 2 * held_out - 1
    rbm = ebmpp.layered(v=family(train.shape[1]), h=family(args.latent))
    clock = _Clock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of weights that resample too often: the table has it
        fit = ebmpp.fit(
            rbm,
            train,
            estimator=trainer.estimator,
            optimizer=optax.sgd(optax.linear_schedule(trainer.rate * args.rate, 0.0, steps)),
            num_steps=steps,
            batch_size=args.batch_size,
            rng_key=jax.random.key(seed),
            monitor_every=max(1, steps // 10),
            callbacks=[clock],
            progress_bar=False,
        )
        key = jax.random.fold_in(jax.random.key(seed), 1)
        system = ebmpp.smc(
            rbm, fit.params, rng_key=key, num_particles=args.particles, num_sweeps=args.sweeps, data=train
        )
    value = lambda rows: round(system.average_log_likelihood(rows).value, 3)
    made = {
        "method": trainer.label,
        "seed": seed,
        "steps": steps,
        "seconds": float(f"{clock.a_step * steps:.3g}"),
        "ms_a_step": float(f"{1e3 * clock.a_step:.3g}"),
        "held_out": value(held_out),
        "train": value(train[: len(held_out)]),
        "standard_error": round(system.standard_error, 3),
        "effective": round(float(system.effective_sample_size), 1),
        "rungs": int(system.num_rungs),
    }
    for metric in ("meeting_time_mean", "acceptance", "resampled", "corrected"):
        if metric in fit.history:
            made[metric] = round(float(fit.history[metric].mean()), 3)
    print(json.dumps(made), flush=True)
    path = raw(args, name, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made), encoding="utf-8")


def raw(args: argparse.Namespace, name: str, seed: int | str) -> Path:
    """Where a run is kept."""
    return args.out / "raw" / f"{stem(args)}-{name}-{seed}.json"


def stem(args: argparse.Namespace) -> str:
    """What files are named by."""
    return "trainers" if args.data == "mnist" else f"trainers_{datasets.tag(args.data)}"


# -- the report ------------------------------------------------------------------------------------


def table(runs: list[dict[str, Any]]) -> str:
    """A line a method: medians over seeds, and the range of the likelihoods."""
    lines = [f"{'method':<30}{'seeds':>6}{'steps':>7}{'seconds':>9}{'held out':>10}{'range':>20}{'error':>8}"]
    for method in dict.fromkeys(made["method"] for made in runs):
        own = [made for made in runs if made["method"] == method]
        median = lambda name, own=own: float(np.median([made[name] for made in own]))
        values = [made["held_out"] for made in own]
        lines.append(
            f"{method:<30}{len(own):>6}{own[0]['steps']:>7}{median('seconds'):>9.1f}"
            f"{median('held_out'):>10.2f}{f'{min(values):.2f} to {max(values):.2f}':>20}"
            f"{median('standard_error'):>8.2f}"
        )
    return "\n".join(lines)


def draw(made: dict[str, Any], path: Path) -> None:
    """Held-out likelihood against what training cost.

    :param made: as it is kept.
    """
    import matplotlib

    matplotlib.use("agg")

    figure, axes = style.grid(1, (8.6, 4.6))
    ax, runs = axes[0], made["runs"]
    for index, method in enumerate(dict.fromkeys(one["method"] for one in runs)):
        own = [one for one in runs if one["method"] == method]
        look = {"color": style.look(index)["color"], "marker": style.marker(index), "linestyle": "none"}
        look["markerfacecolor"] = "white" if index < len(style.COLORS) else look["color"]
        seconds, value, error = (
            np.array([one[n] for one in own], float) for n in ("seconds", "held_out", "standard_error")
        )
        ax.errorbar(seconds, value, 2 * error, capsize=2, markersize=7, label=method, **look)
    ax.set(xscale="log", xlabel="seconds of training")
    ax.set_ylabel("log-likelihood a held-out row, by smc (nats)")
    seeds = len({one["seed"] for one in runs})
    told = f"{made['data']}, {made['size']}: a mark a seed ({bands.over(seeds)}), bars two standard errors"
    ax.set_title(told.replace("medians, and the range over ", ""), fontsize=9)
    ticks = [t * 10**p for p in range(6) for t in (1, 2, 5)]
    seconds = [one["seconds"] for one in runs]
    ticks = [t for t in ticks if min(seconds) / 2 < t < 2 * max(seconds)]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    style.tidy(ax, legend=True)
    figure.savefig(path, dpi=120)


def report(args: argparse.Namespace) -> None:
    """Draw and tabulate every run that there is."""
    kept, runs = args.out / f"{stem(args)}.json", []
    for name in TRAINERS:
        own = sorted((args.out / "raw").glob(raw(args, name, "*").name))
        runs += [json.loads(path.read_text(encoding="utf-8")) for path in own]
    if runs:
        pixels = 64 if args.data == "digits" else 784
        made = {"data": datasets.tag(args.data), "size": f"{pixels}x{args.latent}", "runs": runs}
        kept.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    elif not kept.exists():
        raise SystemExit(f"no runs in {args.out / 'raw'}: run some first, without --draw")
    made = json.loads(kept.read_text(encoding="utf-8"))
    draw(made, kept.with_suffix(".png"))
    print(table(made["runs"]))


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    if not args.draw:
        rows = images(args)
        for seed in args.seeds:
            for name in args.only:
                run(name, seed, rows, args)
    report(args)


if __name__ == "__main__":
    main()
