# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How soon samplers cover the data: indirect sampling likelihood against the number of samples.

One restricted Boltzmann machine, trained by PCD; from it one chain each of plain Gibbs, rates-FPCD,
rates-herding, sample penalisation and parallel tempering, from uniform starts. The curves tell how likely
held-out digits are under a kernel density of the first samples. Step sizes (and the decay of the
penalisation) are chosen by the value on validation rows at ``--tune`` samples, as in the paper, which chose
them by the measure itself: rates-FPCD and its kin are shown at their best, and do not sample the model. Gibbs
and parallel tempering do. The measure likes samples at modes better than draws, which scatter about them:
herding's are all at modes. "training rows" are what good samples can reach.

A sample costs one sweep, but for parallel tempering, where it costs 2 sweeps of each temperature, and
herding, where it is a search: the seconds a sample are told.

``python benchmarks/mixing.py`` takes minutes on scikit-learn's digits; ``--data mnist --hidden 500
--samples 200000`` is the paper's setting, and needs EBMPP_DATA_DIR. Trained params and curves are kept in
``raw/`` of the output folder; ``--draw`` draws them again.

**References**

1. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from an RBM-derived process*,
   section 5, figure 2.
"""

import argparse
from collections.abc import Sequence
from functools import partial
import json
import math
from pathlib import Path
import time
from typing import Any, NamedTuple

import datasets
import numpy as np

import jax
from jax import Array, lax
import optax

import ebmpp
from ebmpp import PCD, Bernoulli, BlockedGibbs, FactorGraph, ParallelTempering
from ebmpp.contrib import data_statistics
from ebmpp.contrib.sample_quality import indirect_likelihood
from ebmpp.diagnostics import style
from ebmpp.kernels import RatesFPCD, RatesHerding, SamplePenalization

RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
DECAYS = (0.9, 0.99)
_PART = 1000  # samples between two looks at the clock


class Sampler(NamedTuple):
    """A sampler, and what is tried of it."""

    label: str
    tried: tuple[dict[str, Any], ...] = ({},)
    share: float = 1.0  # of the samples asked for: what takes long makes fewer
    rated: bool = False  # whether it takes the rates


_BY_RATE = tuple({"rate": r} for r in RATES)
SAMPLERS = {
    "gibbs": Sampler("Gibbs"),
    "fpcd": Sampler("rates-FPCD", _BY_RATE, rated=True),
    "herding": Sampler("rates-herding", _BY_RATE, rated=True),
    "penalization": Sampler("sample penalisation", tuple(r | {"decay": d} for d in DECAYS for r in _BY_RATE)),
    "tempering": Sampler("parallel tempering", ({"num_temperatures": 10},), share=0.1),
}
KERNELS = {
    "gibbs": BlockedGibbs,
    "fpcd": RatesFPCD,
    "herding": RatesHerding,
    "penalization": SamplePenalization,
    "tempering": ParallelTempering,
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    datasets.option(parser, "digits")
    add("--hidden", type=int, default=100)
    add("--steps", type=int, default=5000, help="of PCD")
    add("--rate", type=float, default=0.05, help="first rate of PCD; it decays along a cosine")
    add("--samples", type=int, default=10_000, help="at least 2")
    add("--tune", type=int, default=1000, help="samples by which step sizes are chosen")
    add("--rows", type=int, default=2000, help="held-out rows at most")
    add("--seeds", type=int, nargs="+", default=[0], help="of the chains; the model stays")
    add("--only", nargs="+", choices=tuple(SAMPLERS), default=list(SAMPLERS))
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw what there is")
    args = parser.parse_args(argv)
    if min(args.hidden, args.steps, args.samples - 1, args.tune - 1, args.rows) < 1 or not args.rate > 0:
        parser.error("--hidden, --steps, --rate and --rows are positive, --samples and --tune at least 2")
    args.tune = min(args.tune, args.samples)
    return args


def load(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Binary rows: to train on, to choose on, and held out."""
    if args.data == "mnist":  # the 60,000 training images
        rows = ebmpp.data.binarize(ebmpp.data.mnist())
        parts = {"train": rows[:50_000], "validation": rows[50_000:55_000], "held_out": rows[55_000:]}
        return parts | {name: parts[name][: args.rows] for name in ("validation", "held_out")}
    rows = ebmpp.data.binarize(datasets.shuffled(args.data, 0))
    part = round(len(rows) / 6)
    parts = {"train": rows[2 * part :], "validation": rows[part : 2 * part], "held_out": rows[:part]}
    if args.data == "digits":  # the division of the figures in README.md
        parts = {"train": rows[:1197], "validation": rows[1197:1497], "held_out": rows[1497:]}
    return parts | {name: parts[name][: args.rows] for name in ("validation", "held_out")}


def trained(args: argparse.Namespace, rows: np.ndarray) -> tuple[FactorGraph, dict[str, Array]]:
    """The model, trained once."""
    rbm = ebmpp.layered(v=Bernoulli(rows.shape[1]), h=Bernoulli(args.hidden))
    path = raw(args, "model").with_suffix(".npz")
    if path.exists():
        return rbm, {name: jax.numpy.asarray(a) for name, a in np.load(path).items()}
    begin = time.monotonic()
    fit = ebmpp.fit(
        rbm,
        rows,
        estimator=PCD(num_chains=100),
        optimizer=optax.sgd(optax.cosine_decay_schedule(args.rate, args.steps, alpha=0.02)),
        num_steps=args.steps,
        rng_key=jax.random.key(0),
        progress_bar=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **fit.params)
    print(f"trained in {time.monotonic() - begin:.0f} s", flush=True)
    return rbm, fit.params


@partial(jax.jit, static_argnums=(0, 3))
def _run(kernel: Any, state: Any, model_args: tuple, count: int) -> tuple[Any, Array]:
    def one(state: Any, _: None) -> tuple[Any, Array]:
        state = kernel.sample(state, model_args, {})
        return state, state.z["v"].astype(bool)

    return lax.scan(one, state, length=count)


def chain(kernel: Any, model_args: tuple, count: int, seed: int) -> tuple[np.ndarray, float]:
    """Samples of one chain, and seconds a sample after the first part, which compiles."""
    warmup = 127 if isinstance(kernel, ParallelTempering) else 0
    state = kernel.init(jax.random.key(seed), warmup, None, model_args, {})
    if warmup:
        state, _ = _run(kernel, state, model_args, warmup)
    size, made, begin = min(_PART, -(-count // 2)), [], 0.0
    for index in range(-(-count // size)):
        if index == 1:
            begin = time.monotonic()
        state, drawn = _run(kernel, state, model_args, size)
        made.append(np.asarray(drawn))
    each = (time.monotonic() - begin) / (size * (len(made) - 1))
    return np.concatenate(made)[:count], each


def counts_up_to(most: int) -> list[int]:
    """Numbers of samples: 10, 20, 50, 100 and so on, and the last."""
    listed = [m * 10**p for p in range(1, 7) for m in (1, 2, 5)]
    return [n for n in listed if n < most] + [most]


def run(name: str, graph: FactorGraph, params: dict, rows: dict, args: argparse.Namespace) -> dict[str, Any]:
    """One sampler: its options chosen, then its curves."""
    sampler = SAMPLERS[name]
    model_args = (params, data_statistics(graph, params, rows["train"])) if sampler.rated else (params,)
    best, scores = sampler.tried[0], []
    if len(sampler.tried) > 1:
        half = len(rows["validation"]) // 2  # one half for the bandwidth, one for the options
        for options in sampler.tried:
            drawn, _ = chain(KERNELS[name](graph, **options), model_args, args.tune, 1000)
            found = indirect_likelihood(
                drawn, rows["validation"][:half], validation=rows["validation"][half:]
            )
            scores.append(round(float(found.value[-1]), 2))
        best = sampler.tried[int(np.argmax(scores))]
    most = max(100, int(sampler.share * args.samples))
    made: dict[str, Any] = {"sampler": name, "options": best, "tried": scores, "curves": []}
    for seed in args.seeds:
        drawn, seconds = chain(KERNELS[name](graph, **best), model_args, most, seed)
        curve = measure(drawn, rows)
        curve |= {"seed": seed, "seconds_a_sample": float(f"{seconds:.3g}")}
        made["curves"].append(curve)
        if seed == args.seeds[0]:
            made["shown"] = drawn[np.linspace(0, min(most, 1000) - 1, 60).astype(int)].astype(int).tolist()
        print(
            f"{sampler.label} {best}: {curve['value'][-1]:.2f} from {most}, {seconds:.3g} s each", flush=True
        )
    raw(args, name).write_text(json.dumps(made), encoding="utf-8")
    return made


def measure(drawn: np.ndarray, rows: dict[str, np.ndarray]) -> dict[str, Any]:
    """A curve."""
    found = indirect_likelihood(
        drawn, rows["held_out"], validation=rows["validation"], num_samples=counts_up_to(len(drawn))
    )
    return {
        "samples": found.num_samples.tolist(),
        "value": np.round(found.value, 3).tolist(),
        "standard_error": np.round(found.standard_error, 3).tolist(),
        "beta": np.round(found.bandwidth, 4).tolist(),
        "at_edge": found.at_edge.tolist(),
    }


def raw(args: argparse.Namespace, name: str) -> Path:
    """Where a sampler's curves are kept."""
    return args.out / "raw" / f"mixing-{datasets.tag(args.data)}-{name}.json"


# -- the report ----------------------------------------------------------------------------------


def table(runs: list[dict[str, Any]], ceiling: float) -> str:
    """Means over seeds at some numbers of samples."""
    shown = [n for n in (10, 100, 1000, 10_000, 100_000, 200_000) if n <= max(_last(r) for r in runs)]
    shown = sorted({*shown, max(_last(r) for r in runs)})
    lines = [f"{'sampler':<22}{'s/sample':>10}" + "".join(f"{n:>10}" for n in shown)]
    for made in runs:
        cells = []
        for n in shown:
            at = [c["value"][c["samples"].index(n)] for c in made["curves"] if n in c["samples"]]
            cells.append(f"{np.mean(at):>10.2f}" if at else f"{'-':>10}")
        seconds = np.min([c["seconds_a_sample"] or np.nan for c in made["curves"]])
        lines.append(f"{SAMPLERS[made['sampler']].label:<22}{seconds:>10.2g}" + "".join(cells))
    return "\n".join([*lines, f"training rows: {ceiling:.2f}"])


def _last(made: dict[str, Any]) -> int:
    return made["curves"][0]["samples"][-1]


def draw(runs: list[dict[str, Any]], ceiling: float, path: Path) -> None:
    """Curves against the number of samples, and against what these cost in seconds.

    A band is from the lowest to the highest of several seeds; of one seed, two standard errors over rows.
    """
    import matplotlib

    matplotlib.use("agg")

    figure, axes = style.grid(2, (4.8, 3.8))
    several = False
    for made in runs:
        sampler, curves = SAMPLERS[made["sampler"]], made["curves"]
        look = style.look(list(SAMPLERS).index(made["sampler"]))
        samples, values = np.array(curves[0]["samples"]), np.array([c["value"] for c in curves])
        middle = values.mean(0)
        low, high = values.min(0), values.max(0)
        several |= len(curves) > 1
        if len(curves) == 1:
            error = 2 * np.array(curves[0]["standard_error"])
            low, high = middle - error, middle + error
        seconds = [c["seconds_a_sample"] for c in curves if c["seconds_a_sample"]]
        for ax, x in zip(axes, (samples, samples * min(seconds) if seconds else None), strict=True):
            if x is not None:
                ax.plot(x, middle, linewidth=1.4, label=sampler.label, **look)
                ax.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    band = "bands: lowest to highest seed" if several else "bands: two standard errors over rows, one seed"
    axes[0].set(xlabel="samples", title=band)
    axes[1].set(xlabel="seconds of sampling, at the fastest seed's rate")
    for ax in axes:
        ax.axhline(ceiling, color=style.INK, linewidth=0.8, label="training rows as samples")
        ax.set(xscale="log", ylabel="indirect sampling likelihood\nof a held-out row (nats)")
        ax.title.set_fontsize(9)
        style.tidy(ax)
    style.legend_below(figure, axes, ncols=3)
    figure.savefig(path, dpi=120)


def draw_samples(runs: list[dict[str, Any]], units: int, path: Path) -> None:
    """Sixty samples of the first thousand of each sampler, in their order; words side by side."""
    import matplotlib

    matplotlib.use("agg")

    side = math.isqrt(units)
    square = side * side == units
    shape, columns = ((side, side), 20) if square else ((1, units), 1)
    figure, axes = style.grid(len(runs), (7.0, 1.35), ncols=1)
    for ax, made in zip(axes, runs, strict=True):
        ebmpp.plots.plot_units(np.array(made["shown"], float), shape, ncols=columns, ax=ax)
        told = f"{SAMPLERS[made['sampler']].label}: states, 60 of the first 1000 in their order"
        ax.set_title(told, fontsize=8, loc="left", pad=2)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    tag = datasets.tag(args.data)
    name = "mixing" if args.data == "digits" else f"mixing_{tag}"
    kept, picture = args.out / f"{name}.json", args.out / f"mixing_{tag}.png"
    args.out.mkdir(parents=True, exist_ok=True)
    rows = None if args.draw else load(args)
    if rows is not None:
        graph, params = trained(args, rows["train"])
        for sampler in args.only:
            run(sampler, graph, params, rows, args)
    runs = [json.loads(raw(args, n).read_text()) for n in SAMPLERS if raw(args, n).exists()]
    if runs and rows is not None:
        ceiling = measure(rows["train"], rows)["value"][-1]
        told = [{k: v for k, v in made.items() if k != "shown"} for made in runs]
        made = {"data": tag, "hidden": args.hidden, "training_rows": ceiling, "runs": told}
        kept.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    elif not kept.exists():
        raise SystemExit(f"there is no {kept}: run some first, without --draw")
    if runs:
        units = len(runs[0]["shown"][0])
        draw_samples(runs, units, args.out / f"mixing_{tag}_samples.png")
    made = json.loads(kept.read_text(encoding="utf-8"))
    draw(made["runs"], made["training_rows"], picture)
    print(table(made["runs"], made["training_rows"]))


if __name__ == "__main__":
    main()
