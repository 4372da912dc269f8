# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local modes, ablated: the exact log-likelihood of a small deep machine on digits.

A 64-12-12 deep Boltzmann machine on the 8x8 digits of scikit-learn, small enough that the log-likelihood of
held-out rows is exact. UCD-LMI as published, and without its units of -1 and 1, its summed-out layers, or its
orthogonal start, and with no correction at all (every proposal is refused, so that every pair meets at once:
the "biased gradient" of the paper's table); next to it UCD with coupled Gibbs chains, whose gradients are
unbiased in fact, and PCD with a mean-field posterior. The share of pairs that made a correction, and of
proposals that were accepted, are told.

The paper's ablation is in Frechet distances of images from models of 6272 units a layer; this one says what
each part does to the likelihood.

**References**

1. Taniguchi et al. (2023), *End-to-end training of deep Boltzmann machines by unbiased contrastive divergence
   with local mode initialization*, table 2.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
import time
from typing import Any, NamedTuple

import datasets
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, UCD, Bernoulli, Spin
from ebmpp.contrib import LocalModeUCD
from ebmpp.diagnostics import style
from ebmpp.estimators import Estimator, MeanField, TargetCost
from ebmpp.estimators.pairs import Phase
from ebmpp.moves import Metropolis, Move
from ebmpp.moves.target import Target
from ebmpp.training import monitors

#: a Bernoulli unit is (1 + spin) / 2, so that its weights are four times as large and take 16 times the rate
_BERNOULLI_RATE = 16


@dataclasses.dataclass(frozen=True)
class Refused(Metropolis):
    """A proposal that no chain takes."""

    def _propose(self, target: Target, keys: Array) -> tuple[dict[str, Array], Array]:
        proposal, log_u = super()._propose(target, keys)
        return proposal, jnp.full_like(log_u, jnp.inf)


@dataclasses.dataclass(frozen=True, repr=False)
class Uncorrected(LocalModeUCD):
    """UCD-LMI whose pairs, of the model and of the posterior, meet at once: the gradient at their starts."""

    def _phase(self, target: Target, start: Any, moves: tuple[Move, ...], *rest: Any) -> Phase:
        return super()._phase(target, start, tuple(Refused(move.blocks) for move in moves), *rest)


class Variant(NamedTuple):
    """What is trained."""

    label: str
    estimator: Estimator
    spins: bool = True
    scheme: str = "orthogonal"


VARIANTS = {
    "lmi": Variant("UCD-LMI", LocalModeUCD()),
    "biased": Variant("without the correction", Uncorrected()),
    "bernoulli": Variant("without units of -1 and 1", LocalModeUCD(), spins=False),
    "whole": Variant("without summing out", LocalModeUCD(marginalize=())),
    "gaussian": Variant("without orthogonal weights", LocalModeUCD(), scheme="gaussian"),
    "ucd": Variant(
        "UCD, coupled Gibbs chains",
        UCD(start="persistent", length=TargetCost(100.0), marginalize="layers"),
        scheme="gaussian",
    ),
    "pcd": Variant("PCD, mean field", PCD(num_chains=100, posterior=MeanField(10)), scheme="gaussian"),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    add(
        "--sides",
        type=int,
        nargs=2,
        default=(12, 12),
        help="units of the latent layers; the first is enumerated",
    )
    datasets.option(parser, "digits")
    add("--rows", type=int, help="images at most, the 300 held out included; default: all")
    add("--steps", type=int, default=3000)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--rate", type=float, default=0.01, help="first rate for spins; it decays along a cosine")
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw the runs that there are")
    args = parser.parse_args(argv)
    if min(args.steps, *args.sides) < 1 or not args.rate > 0:
        parser.error("--steps, --sides and --rate are positive")
    return args


def images(args: argparse.Namespace) -> np.ndarray:
    """Rows of two levels, of which the first 300 are held out."""
    return ebmpp.data.binarize(datasets.shuffled(args.data, 0, args.rows))


def run(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One training run in numbers."""
    variant = VARIANTS[name]
    rows = images(args)
    rows, family = (2 * rows - 1, Spin) if variant.spins else (rows, Bernoulli)
    dbm = ebmpp.layered(v=family(rows.shape[1]), h1=family(args.sides[0]), h2=family(args.sides[1]))
    rate = args.rate * (1 if variant.spins else _BERNOULLI_RATE)
    begin = time.monotonic()
    fit = ebmpp.fit(
        dbm,
        rows[300:],
        estimator=variant.estimator,
        optimizer=optax.sgd(optax.cosine_decay_schedule(rate, args.steps, alpha=0.02)),
        num_steps=args.steps,
        scheme=variant.scheme,
        rng_key=jax.random.key(seed),
        monitors={"held_out": monitors.log_likelihood(dbm, rows[:300])},
        monitor_every=max(1, args.steps // 20),
        progress_bar=False,
    )
    made = {"variant": name, "seed": seed, "seconds": round(time.monotonic() - begin, 1)}
    made["step"] = fit.history.monitor_step.values.tolist()
    made["held_out"] = np.round(fit.history.held_out.values.astype(float), 3).tolist()
    for metric in ("corrected", "posterior_corrected", "acceptance", "meeting_time_mean"):
        if metric in fit.history:
            made[metric] = float(fit.history[metric].mean())
    told = {k: round(v, 4) for k, v in made.items() if isinstance(v, float)}
    print(f"{variant.label}, seed {seed}: {made['held_out'][-1]:.2f}  {told}", flush=True)
    return made


def draw(runs: list[dict[str, Any]], baseline: float, path: Path) -> None:
    """Exact log-likelihood of held-out rows along training: a panel a variant, a line a seed."""
    import matplotlib

    matplotlib.use("agg")

    names = [name for name in VARIANTS if any(made["variant"] == name for made in runs)]
    values = np.concatenate([made["held_out"] for made in runs])
    low, high = np.nanmin(values), np.nanmax(values)
    top = high + 1.5
    ticks = [t for t in (-20, -22, -25, -30, -50, -100, -300, -1000) if low < t < top]
    figure, axes = style.grid(len(names), (3.3, 2.5), ncols=3)
    for index, (ax, name) in enumerate(zip(axes, names, strict=True)):
        own = [made for made in runs if made["variant"] == name]
        for number, made in enumerate(own):
            look = style.look(number) | {"linewidth": 1.3, "label": f"seed {made['seed']}"}
            ax.plot(made["step"], made["held_out"], **look)
        ax.axhline(baseline, color=style.INK, linewidth=0.8, label=f"independent pixels, {baseline:.1f}")
        seconds = np.median([made["seconds"] for made in own])
        ax.set_title(f"{VARIANTS[name].label}\n{seconds:.0f} s a run", fontsize=9)
        style.tidy(ax)
        style.below(ax, top, ticks)
        ax.set_ylim(top - 1.3 * (top - low), top - 0.6 * (top - high))
        ax.set_xlabel("step")
        if index % 3 == 0:
            ax.set_ylabel("held-out row, exact (nats)")
    style.legend_below(figure, axes, ncols=4)
    figure.savefig(path, dpi=120)


def independent_pixels(rows: np.ndarray) -> float:
    """What each pixel's own rate gives: a model must beat it."""
    rate = (rows[300:].sum(0) + 1) / (len(rows) - 300 + 2)
    held_out = rows[:300]
    return float((held_out * np.log(rate) + (1 - held_out) * np.log1p(-rate)).sum(1).mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    stem = "local_modes" + ("" if args.data == "digits" else f"_{datasets.tag(args.data)}")
    kept = args.out / f"{stem}.json"
    if args.draw:
        made = json.loads(kept.read_text(encoding="utf-8"))
        draw(made["runs"], made["independent_pixels"], kept.with_suffix(".png"))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    baseline = independent_pixels(images(args))
    runs = [run(name, seed, args) for name in args.only for seed in args.seeds]
    draw(runs, baseline, kept.with_suffix(".png"))
    made = {"independent_pixels": round(baseline, 3), "steps": args.steps, "runs": runs}
    kept.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"independent pixels {baseline:.2f}\nwrote {kept.stem}.png and {kept.name} in {args.out}")


if __name__ == "__main__":
    main()
