# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Indirect sampling likelihood by the number of samples, for five samplers of one model.

One restricted Boltzmann machine, trained by PCD; from it one chain each of Gibbs,
rates-FPCD, rates-herding, sample penalisation and parallel tempering, from uniform
starts. The curves show how likely held-out rows are under a kernel density of the first
samples. Step sizes (and the decay of the penalisation) are chosen by the measure on
validation rows at ``--tune`` samples, as in the paper. rates-FPCD, herding and
penalisation are therefore shown at their best, and do not sample the model. The measure
prefers samples at modes, where all of herding's are. "training rows" are what good
samples can reach.

A sample costs one sweep, for parallel tempering 2 sweeps of each temperature, for
herding a search.

``python benchmarks/papers/mixing.py`` takes minutes on scikit-learn's digits;
``--data mnist --hidden 500 --samples 200000`` is the paper's setting. The trained
params are stored in ``raw/`` of the output folder.

**References**

1. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from an
   RBM-derived process*, section 5, figure 2.
"""

import argparse
from collections.abc import Sequence
from functools import partial
import time
from typing import Any, NamedTuple

import datasets
import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row, rounded

import jax
from jax import Array, lax
import optax

import ebmpp
from ebmpp import PCD, Bernoulli, BlockedGibbs, FactorGraph, ParallelTempering
from ebmpp.contrib import RatesFPCD, RatesHerding, SamplePenalization, data_statistics
from ebmpp.contrib.sample_quality import indirect_likelihood

_PART = 1000  # samples between two readings of the clock


class Sampler(NamedTuple):
    """A sampler and the options to choose from."""

    label: str
    kernel: Any
    options: tuple[dict[str, Any], ...] = ({},)
    share: float = 1.0
    """Share of the samples: an expensive sampler makes fewer."""
    rated: bool = False
    """True if the kernel takes the rates of the data."""


_BY_RATE = tuple({"rate": r} for r in (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1))
_BY_DECAY = tuple(r | {"decay": d} for d in (0.9, 0.99) for r in _BY_RATE)
SAMPLERS = {
    "gibbs": Sampler("Gibbs", BlockedGibbs),
    "fpcd": Sampler("rates-FPCD", RatesFPCD, _BY_RATE, rated=True),
    "herding": Sampler("rates-herding", RatesHerding, _BY_RATE, rated=True),
    "penalization": Sampler("sample penalisation", SamplePenalization, _BY_DECAY),
    "tempering": Sampler(
        "parallel tempering", ParallelTempering, ({"num_temperatures": 10},), share=0.1
    ),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__, SAMPLERS)
    options(parser)
    add = parser.add_argument
    add("--samples", type=int, default=10_000)
    add("--tune", type=int, default=1000, help="samples by which step sizes are chosen")
    args = records.parse(
        parser, argv, "hidden", "steps", "rate", "samples", "tune", "most_rows"
    )
    args.tune = min(args.tune, args.samples)
    args.records = Records(args.out, "mixing", datasets.tag(args.data), args.name)
    return args


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of data and training."""
    add = parser.add_argument
    datasets.option(parser, "digits")
    add("--hidden", type=int, default=100, help="latent units")
    add("--steps", type=int, default=5000, help="of training")
    add(
        "--rate",
        type=float,
        default=0.05,
        help="first rate of training; it decays along a cosine",
    )
    add(
        "--most-rows",
        type=int,
        default=2000,
        help="held-out and validation rows at most",
    )


def load(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return binary rows: for training, for validation, and held out."""
    if args.data == "mnist":  # of the 60,000 training images the last are held out
        rows = ebmpp.data.binarize(ebmpp.data.mnist())[::-1]
        cuts = (5_000, 10_000)
    else:
        rows = ebmpp.data.binarize(datasets.shuffled(args.data, 0, args.rows))
        part = round(len(rows) / 6)
        cuts = part, 2 * part
    held_out, validation, train = np.split(rows, cuts)
    return {
        "train": train,
        "validation": validation[: args.most_rows],
        "held_out": held_out[: args.most_rows],
    }


def cosine_sgd(
    args: argparse.Namespace, factor: float = 1.0
) -> optax.GradientTransformation:
    """Return gradient descent at the falling rate."""
    return optax.sgd(
        optax.cosine_decay_schedule(factor * args.rate, args.steps, alpha=0.02)
    )


def trained(
    args: argparse.Namespace, rows: np.ndarray
) -> tuple[FactorGraph, dict[str, Array]]:
    """Return the model, trained once."""
    rbm = ebmpp.layered(v=Bernoulli(rows.shape[1]), h=Bernoulli(args.hidden))
    path = (
        args.out / "raw" / f"{args.records.stem}-model-{args.hidden}-{args.steps}.npz"
    )
    if path.exists():
        return rbm, {name: jax.numpy.asarray(a) for name, a in np.load(path).items()}
    fit = ebmpp.fit(
        rbm,
        rows,
        estimator=PCD(num_chains=100),
        optimizer=cosine_sgd(args),
        num_steps=args.steps,
        rng_key=jax.random.key(0),
        progress_bar=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **fit.params)
    return rbm, fit.params


@partial(jax.jit, static_argnums=(0, 3, 4))
def draw_samples(
    kernel: Any, state: Any, model_args: tuple, count: int, thin: int = 1
) -> tuple[Any, Array]:
    """Return the last state and visible units after every ``thin`` calls of the kernel."""

    def step(state: Any, _: None) -> tuple[Any, Array]:
        state = lax.fori_loop(
            0, thin, lambda _, s: kernel.sample(s, model_args, {}), state
        )
        return state, state.z["v"].astype(bool)

    return lax.scan(step, state, length=count)


def chain(
    kernel: Any, model_args: tuple, count: int, seed: int
) -> tuple[np.ndarray, float]:
    """Return samples of one chain, and seconds per sample after the first part, which compiles."""
    warmup = 127 if isinstance(kernel, ParallelTempering) else 0
    state = kernel.init(jax.random.key(seed), warmup, None, model_args, {})
    if warmup:
        state, _ = draw_samples(kernel, state, model_args, warmup)
    size = min(_PART, -(-count // 2))
    parts = []
    start = 0.0
    for index in range(-(-count // size)):
        if index == 1:
            start = time.monotonic()
        state, samples = draw_samples(kernel, state, model_args, size)
        parts.append(np.asarray(samples))
    seconds = (time.monotonic() - start) / (size * (len(parts) - 1))
    return np.concatenate(parts)[:count], seconds


def score(samples: np.ndarray, rows: np.ndarray) -> float:
    """Return the measure on one half of validation rows, with the bandwidth chosen by the other."""
    half = len(rows) // 2
    result = indirect_likelihood(
        samples, rows[:half], validation=rows[half:], num_samples=[len(samples)]
    )
    return float(result.value[-1])


def measure(samples: np.ndarray, rows: dict[str, np.ndarray]) -> Row:
    """Return the measure on held-out rows by the number of samples: 10, 20, 50, 100 and so on."""
    counts = [m * 10**p for p in range(1, 7) for m in (1, 2, 5)]
    counts = [n for n in counts if n < len(samples)] + [len(samples)]
    result = indirect_likelihood(
        samples, rows["held_out"], validation=rows["validation"], num_samples=counts
    )
    return {
        "samples": result.num_samples.tolist(),
        "value": np.round(result.value, 3).tolist(),
        "standard_error": np.round(result.standard_error, 3).tolist(),
    }


def run(
    name: str, graph: FactorGraph, params: dict, rows: dict, args: argparse.Namespace
) -> None:
    """Choose a sampler's options, then store its curves."""
    sampler = SAMPLERS[name]
    model_args = (
        (params, data_statistics(graph, params, rows["train"]))
        if sampler.rated
        else (params,)
    )
    best = sampler.options[0]
    most = max(100, int(sampler.share * args.samples))
    if len(sampler.options) > 1:
        tuned = (
            chain(sampler.kernel(graph, **o), model_args, args.tune, 1000)[0]
            for o in sampler.options
        )
        best = sampler.options[
            int(np.argmax([score(samples, rows["validation"]) for samples in tuned]))
        ]
    for seed in args.seeds:
        samples, seconds = chain(sampler.kernel(graph, **best), model_args, most, seed)
        row = {
            "method": sampler.label,
            "seed": seed,
            "options": best,
            "seconds_a_sample": rounded(seconds),
        }
        row |= measure(samples, rows)
        args.records.save(name, seed, row)
        print(
            f"{sampler.label} {best}: {row['value'][-1]:.2f} from {most}, {seconds:.3g} s each",
            flush=True,
        )


def draw(result: Row, args: argparse.Namespace) -> None:
    """Draw curves against the number of samples and against seconds."""
    figure, axes = style.grid(2, (4.8, 3.8))
    for index, sampler in enumerate(SAMPLERS.values()):
        runs = [row for row in result["runs"] if row["method"] == sampler.label]
        look = style.look(index) | {"linewidth": 1.4, "label": sampler.label}
        if runs:
            samples = np.array(runs[0]["samples"])
            seconds = samples * min(row["seconds_a_sample"] for row in runs)
            for ax, x in zip(axes, (samples, seconds), strict=True):
                pictures.band(ax, x, [row["value"] for row in runs], **look)
    for ax, text in zip(axes, ("samples", "seconds of sampling"), strict=True):
        label = "training rows as samples"
        ax.axhline(result["training_rows"], color=style.INK, linewidth=0.8, label=label)
        ax.set(
            xscale="log",
            xlabel=text,
            ylabel="indirect sampling likelihood\nper held-out row (nats)",
        )
    pictures.save(
        figure,
        axes,
        args.records.summary.with_suffix(".png"),
        pictures.over(len(args.seeds)),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    known = {}
    if not args.draw:
        rows = load(args)
        graph, params = trained(args, rows["train"])
        for name in args.only:
            run(name, graph, params, rows, args)
        known = {
            "hidden": args.hidden,
            "training_rows": measure(rows["train"], rows)["value"][-1],
        }
    draw(args.records.summarize(SAMPLERS, **known), args)


if __name__ == "__main__":
    main()
