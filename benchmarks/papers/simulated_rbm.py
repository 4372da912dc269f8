# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rows simulated from a known 200x20 Boltzmann machine, fitted with 100 latent units.

The true model has weights and biases N(0, 1); its 1000 rows are exact draws by
enumeration of its 2**20 latent states. Every method takes plain gradient steps at rate
0.2 from all rows and the same start. The fitted model is too large to sum, so log p(v)
comes from annealed importance sampling, with its standard error. A forward estimate of
log Z is too small on average, so the log-likelihood is **too large** where chains miss
a mode. The true model's own log-likelihood is exact. No model has a larger expected
one, so a held-out value above it by more than its errors means a wrong log Z.

``python benchmarks/papers/simulated_rbm.py`` runs every method in some minutes. A run
ends with its steps, with a gradient that is not finite, or at the first value after
``--seconds``.

**References**

1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, section 6.2, figures 3,
   7, 8 and 9, table 2.
"""

import argparse
from collections.abc import Sequence
import functools
import math

from following import Watch, by_method, costs, coupling_numbers
import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row, rounded

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, Stage

METHODS = {
    "ucd": ("UCD, adaptive, 1000 pairs", UCD(num_pairs=1000)),
    "ucd_few": ("UCD, adaptive, 100 pairs", UCD(num_pairs=100)),
    "published": (
        "UCD, k = lag = 1, stopped at 100 sweeps (biased)",
        UCD(num_pairs=1000, k=1, lag=1, max_sweeps=100, allow_unmet=True),
    ),
    **{f"cd{k}": (f"CD-{k}", CD(k=k)) for k in (1, 2, 5, 10)},
    "pcd": ("PCD-1, 1000 chains", PCD(k=1, num_chains=1000)),
    "pcd_ucd": ("PCD, then UCD at a tenth of the rate", UCD(num_pairs=1000)),
}
#: seconds of table 2; UCD is the published one
PRINTED = {
    "CD-1": 16.52,
    "CD-2": 24.44,
    "CD-5": 48.54,
    "CD-10": 89.09,
    METHODS["pcd"][0]: 16.18,
}
PRINTED |= {METHODS["published"][0]: 28.47}
_FIRST = 500  # steps of PCD before UCD, as in figure 9; half of all at most
_TICKS = (-48, -50, -52, -54, -56, -58, -60, -65, -70, -80, -100, -150, -300)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__, METHODS)
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add(
        "--points",
        type=int,
        default=10,
        help="values of the log-likelihood along a run, after the first",
    )
    add("--rate", type=float, default=0.2)
    add("--rows", type=int, default=1000)
    add("--visible", type=int, default=200)
    add("--latent", type=int, default=100, help="of the fitted model")
    add(
        "--truth",
        type=int,
        default=20,
        help="latent units of the true model, whose states are enumerated",
    )
    add("--particles", type=int, default=100)
    add("--temperatures", type=int, default=3000)
    add("--seconds", type=float, default=math.inf, help="for one run")
    args = records.parse(parser, argv, "steps", "points", "rows", "rate")
    args.records = Records(args.out, "simulated_rbm", args.name)
    return args


@functools.cache  # a new transformation would compile again
def sgd(rate: float) -> optax.GradientTransformation:
    """Return plain gradient descent."""
    return optax.sgd(rate)


def stages(method: str, steps: int, rate: float) -> list[Stage]:
    """Return the stages of a run."""
    estimator = METHODS[method][1]
    optimizer = sgd(rate)
    if method != "pcd_ucd" or steps == 1:
        return [Stage(num_steps=steps, estimator=estimator, optimizer=optimizer)]
    first = min(_FIRST, steps // 2)
    return [
        Stage(num_steps=first, estimator=METHODS["pcd"][1], optimizer=optimizer),
        Stage(num_steps=steps - first, estimator=estimator, optimizer=sgd(rate / 10)),
    ]


def simulate(
    args: argparse.Namespace, seed: int = 0
) -> tuple[dict[str, jax.Array], dict[str, float]]:
    """Return training and held-out rows of the true model, and its exact log-likelihood
    per row of both."""
    truth = ebmpp.layered(v=Bernoulli(args.visible), h=Bernoulli(args.truth))
    weights, draws = jax.random.split(jax.random.key(seed))
    generator = np.random.default_rng(seed)

    def normal(a):
        return jnp.asarray(generator.normal(size=a.shape), jnp.float32)

    params = jax.tree.map(normal, truth.init(weights))
    sample = ebmpp.perfect_sample(
        truth, params, 2 * args.rows, rng_key=draws, method="enumerate"
    )["v"]
    rows = {"log_likelihood": sample[: args.rows], "held_out": sample[args.rows :]}
    log_z = ebmpp.exact.log_partition(truth, params)

    def mean(v):
        return float((-truth.free_energy(params, {"v": v}) - log_z).mean())

    return rows, {name: round(mean(v), 2) for name, v in rows.items()}


def run(
    method: str, seed: int, rows: dict[str, jax.Array], args: argparse.Namespace
) -> None:
    """Train once and store the run."""
    label, estimator = METHODS[method]
    watch = Watch(
        ebmpp.layered(v=Bernoulli(args.visible), h=Bernoulli(args.latent)),
        rows,
        rows["log_likelihood"],
        particles=args.particles,
        temperatures=args.temperatures,
        seed=seed,
        seconds=args.seconds,
    )
    history, ended = watch.train(
        rows["log_likelihood"],
        args.steps,
        rng_key=jax.random.key(seed),
        schedule=stages(method, args.steps, args.rate),
        batch_size=args.rows,
        monitor_every=max(1, args.steps // args.points),
    )
    curve = watch.column("log_likelihood")
    last = watch.points[-1]
    row: Row = {
        "method": label,
        "seed": seed,
        "steps": last["step"],
        "ended": ended,
        "best": round(float(np.nanmax(curve)), 2),
        "best_at": watch.points[int(np.nanargmax(curve))]["step"],
        "last": round(last["log_likelihood"], 2),
        "last_held_out": round(last["held_out"], 2),
        "last_standard_error": round(last["standard_error"], 3),
        "last_effective_particles": round(last["effective"], 1),
        "seconds": round(last["seconds"], 1),
        "ms_a_batch": rounded(1e3 * watch.seconds_per_step),
        "sweeps_a_batch": getattr(estimator, "k", None),
        "curve": {
            n: watch.column(n).round(3).tolist()
            for n in ("step", "seconds", "log_likelihood", "held_out", "standard_error")
        },
    }
    args.records.save(method, seed, row | coupling_numbers(history))
    print(
        f"{label}, seed {seed}: {last['log_likelihood']:.2f} +- "
        f"{last['standard_error']:.2g} per row at step {last['step']}, "
        f"{last['effective']:.0f} of {args.particles} particles effective, "
        f"{last['seconds']:.0f} s ({ended})",
        flush=True,
    )


# -- the report ----------------------------------------------------------------------


def draw(rows: list[Row], truth: dict[str, float], args: argparse.Namespace) -> None:
    """Draw log-likelihoods per row by step and by time, meeting times and discarded
    draws by step."""
    coupled = {"sweeps_to_meet": "sweeps to meet, after the lag, mean"}
    coupled |= {"discarded": "discarded draws per coupled sweep"}
    coupled = {
        name: text for name, text in coupled.items() if any(name in row for row in rows)
    }
    panels = [("log_likelihood", "step"), ("held_out", "step"), ("held_out", "seconds")]
    figure, axes = style.grid(3 + len(coupled), (5.0, 3.6), ncols=3)
    for index, (label, runs) in enumerate(by_method(rows).items()):
        look = style.look(index) | {"linewidth": 1.4, "label": label}
        for ax, (name, x) in zip(axes, panels, strict=False):
            longest = max((row["curve"][x] for row in runs), key=len)
            pictures.band(ax, longest, [row["curve"][name] for row in runs], **look)
        for ax, name in zip(axes[3:], coupled, strict=True):
            if subset := [row for row in runs if name in row]:
                size = max(len(row[name]) for row in subset)
                steps = (
                    max(row["steps"] for row in subset) * (np.arange(size) + 0.5) / size
                )
                pictures.band(ax, steps, [row[name] for row in subset], **look)
    for ax, (name, x) in zip(axes, panels, strict=False):
        values = np.concatenate([row["curve"][name] for row in rows])
        best = max(np.nanmax(values), truth[name])
        pictures.likelihoods(ax, best, np.nanmin(values), _TICKS, "")
        ax.axhline(truth[name], color=style.INK, linewidth=0.8, label="the true model")
        ax.set_ylabel(
            f"log-likelihood per {'held-out' if name == 'held_out' else 'training'} row (nats)"
        )
        ax.set_xlabel("step" if x == "step" else "seconds of training")
    for ax, text in zip(axes[3:], coupled.values(), strict=True):
        ax.set(xlabel="step", ylabel=text, ylim=(0, None))
    title = f"1,000 rows of a known 200x20 machine, 100 units: {pictures.over(len(args.seeds))}"
    pictures.save(figure, axes, args.records.summary.with_suffix(".png"), title)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    rows, truth = simulate(args)
    for seed in [] if args.draw else args.seeds:
        for method in args.only:
            run(method, seed, rows, args)
    result = args.records.summarize(METHODS, truth=truth)
    print(costs(result["runs"], PRINTED))
    draw(result["runs"], result["truth"], args)


if __name__ == "__main__":
    main()
