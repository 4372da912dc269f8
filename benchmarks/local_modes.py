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
from ebmpp.estimators import Estimator, LocalModeUCD, MeanField
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
    color: str = "0.5"


VARIANTS = {
    "lmi": Variant("UCD-LMI", LocalModeUCD(), color="#2b6cb0"),
    "biased": Variant("without the correction", Uncorrected(), color="#E69F00"),
    "bernoulli": Variant("without units of -1 and 1", LocalModeUCD(), spins=False, color="#c05621"),
    "whole": Variant("without summing out", LocalModeUCD(marginalize=()), color="#6b46c1"),
    "gaussian": Variant("without orthogonal weights", LocalModeUCD(), scheme="gaussian", color="#2f855a"),
    "ucd": Variant(
        "UCD, coupled Gibbs chains",
        UCD(start="persistent", target_cost=100.0, marginalize="layers"),
        scheme="gaussian",
        color="#1a202c",
    ),
    "pcd": Variant(
        "PCD, mean field", PCD(num_chains=100, posterior=MeanField(10)), scheme="gaussian", color="#d53f8c"
    ),
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
    """Exact log-likelihood of held-out rows along training, a line a seed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    named = set()
    for made in runs:
        variant = VARIANTS[made["variant"]]
        label = None if variant.label in named else variant.label
        named.add(variant.label)
        ax.plot(made["step"], made["held_out"], color=variant.color, linewidth=1.3, label=label)
    ax.axhline(baseline, color="0.5", linestyle="--", linewidth=1, label="independent pixels")
    lowest = max(1.8 * baseline, ax.get_ylim()[0])
    ax.set(xlabel="step", ylabel="exact log-likelihood a held-out row", ylim=(lowest, None))
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def independent_pixels(rows: np.ndarray) -> float:
    """What each pixel's own rate gives: a model must beat it."""
    rate = (rows[300:].sum(0) + 1) / (len(rows) - 300 + 2)
    held_out = rows[:300]
    return float((held_out * np.log(rate) + (1 - held_out) * np.log1p(-rate)).sum(1).mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    baseline = independent_pixels(images(args))
    runs = [run(name, seed, args) for name in args.only for seed in args.seeds]
    stem = "local_modes" + ("" if args.data == "digits" else f"_{datasets.tag(args.data)}")
    draw(runs, baseline, args.out / f"{stem}.png")
    made = {"independent_pixels": round(baseline, 3), "steps": args.steps, "runs": runs}
    (args.out / f"{stem}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"independent pixels {baseline:.2f}\nwrote {stem}.png and {stem}.json in {args.out}")


if __name__ == "__main__":
    main()
