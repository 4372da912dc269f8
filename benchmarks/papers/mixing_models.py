# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Samples of models trained by CD, PCD (SML) and FPCD, and of herding: Gibbs against rates-FPCD.

``models``: one machine per trainer, all from the same rows, batches and rates. From
each a chain of Gibbs, of rates-FPCD whose fast weights do not decay, and of rates-FPCD
with a decay of 0.95. Step sizes and the number k of sweeps per sample are chosen by the
measure on validation rows at ``--tune`` samples, as in the paper. The measure is that
of ``mixing.py``, by the number of samples. Herding as a trainer has no model to sample:
its samples are the states that it visits while it learns.

``bound``: rates-FPCD climbs a lower bound on the log-likelihood of the training rows,
with the latents as the first model infers them, and can therefore make better samples
than the model. On bars and stripes 3x3, a model of four latent units by CD-1, bound and
likelihood are exact at every sample.

``python benchmarks/papers/mixing_models.py models`` takes minutes on scikit-learn's
digits.

**References**

1. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from an
   RBM-derived process*, sections 4 and 5, figure 3.
2. Welling (2009), *Herding dynamical weights to learn*.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import datasets
import mixing
import numpy as np
import pictures
from pictures import style
import records
from records import Records, Row

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, Bernoulli, BlockedGibbs, FactorGraph, exact
from ebmpp.contrib import FPCD, Herding, RatesFPCD, data_statistics
from ebmpp.estimators import Estimator

MODELS: dict[str, tuple[str, Estimator]] = {
    "cd": ("CD-1", CD(k=1)),
    "pcd": ("PCD-1 (SML)", PCD(k=1, num_chains=100)),
    "fpcd": ("FPCD-1", FPCD(k=1, num_chains=100, rate=0.01)),
}
_HERDING = "herding"
#: label and decay of the fast weights, None for Gibbs
SAMPLERS = {
    "gibbs": ("Gibbs", None),
    "fpcd": ("rates-FPCD, decay 1", 1.0),
    "decayed": ("rates-FPCD, decay 0.95", 0.95),
}
# of the bound
_DECAYS = (1.0, 0.95)
_SLOW = 0.002


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = records.parser(__doc__, seeds=(0, 1, 2), draws=False)
    add = parser.add_argument
    add("experiment", nargs="?", choices=("models", "bound"), default="models")
    mixing.options(parser)
    add("--samples", type=int, default=5000)
    add(
        "--tune",
        type=int,
        default=500,
        help="samples by which step sizes and k are chosen",
    )
    add(
        "--try-k",
        type=int,
        nargs="+",
        default=[1, 5, 20],
        help="sweeps per sample, to choose from",
    )
    add(
        "--try-rates",
        type=float,
        nargs="+",
        default=[0.001, 0.01, 0.1],
        help="step sizes, likewise",
    )
    args = records.parse(
        parser, argv, "hidden", "steps", "rate", "samples", "tune", "most_rows"
    )
    args.tune = min(args.tune, args.samples)
    name = (
        "bound" if args.experiment == "bound" else f"models_{datasets.tag(args.data)}"
    )
    args.records = Records(args.out, "mixing", name, args.name)
    return args


def trained(
    estimator: Estimator,
    graph: FactorGraph,
    rows: Any,
    args: argparse.Namespace,
    factor: float = 1.0,
) -> dict[str, Array]:
    """Return the params of a model."""
    return ebmpp.fit(
        graph,
        rows,
        estimator=estimator,
        optimizer=mixing.cosine_sgd(args, factor),
        num_steps=args.steps,
        rng_key=jax.random.key(0),
        progress_bar=False,
    ).params


# -- models --------------------------------------------------------------------------


def chain(
    name: str, graph: FactorGraph, options: dict, model: tuple, count: int, seed: int
) -> np.ndarray:
    """Return samples of one chain."""
    if name == "gibbs":
        kernel = BlockedGibbs(graph)
        model = model[:1]
        thin = options["k"]
    else:
        kernel = RatesFPCD(graph, **options)
        thin = 1
    state = kernel.init(jax.random.key(seed), 0, None, model, {})
    return np.asarray(mixing.draw_samples(kernel, state, model, count, thin)[1])


def choose(
    name: str, graph: FactorGraph, model: tuple, rows: dict, args: argparse.Namespace
) -> dict:
    """Return the options with the best measure on validation rows."""
    decay = SAMPLERS[name][1]
    options: list[dict[str, Any]] = [{"k": k} for k in args.try_k]
    if decay is not None:
        options = [
            {"rate": rate, "decay": decay} | choice
            for rate in args.try_rates
            for choice in options
        ]
    samples = (chain(name, graph, choice, model, args.tune, 1000) for choice in options)
    return options[
        int(np.argmax([mixing.score(s, rows["validation"]) for s in samples]))
    ]


def visited(
    graph: FactorGraph, rows: np.ndarray, seed: int, args: argparse.Namespace
) -> np.ndarray:
    """Return the states that herding visits: steps of constant size, as many as samples."""
    fit = ebmpp.fit(
        graph,
        rows,
        estimator=Herding(num_chains=1, num_kept=args.samples),
        optimizer=optax.sgd(1.0),
        num_steps=args.samples,
        rng_key=jax.random.key(seed),
        progress_bar=False,
    )
    return np.asarray(fit.estimator_state.visited()["v"])


def models(args: argparse.Namespace) -> Row:
    """Return the curves of every model and sampler."""
    rows = mixing.load(args)
    graph = ebmpp.layered(v=Bernoulli(rows["train"].shape[1]), h=Bernoulli(args.hidden))
    runs: list[Row] = []

    def add(label: str, sampler: str, options: dict, samples: list[np.ndarray]) -> None:
        curves = [mixing.measure(s, rows) for s in samples]
        runs.append(
            {"model": label, "sampler": sampler, "options": options, "curves": curves}
        )
        print(
            f"{label}, {sampler} {options}: {[c['value'][-1] for c in curves]}",
            flush=True,
        )

    for label, estimator in MODELS.values():
        params = trained(estimator, graph, rows["train"], args)
        model = params, data_statistics(graph, params, rows["train"])
        for name, (sampler, _) in SAMPLERS.items():
            best = choose(name, graph, model, rows, args)
            add(
                label,
                sampler,
                best,
                [chain(name, graph, best, model, args.samples, s) for s in args.seeds],
            )
    add(
        _HERDING,
        _HERDING,
        {},
        [visited(graph, rows["train"], seed, args) for seed in args.seeds],
    )
    ceiling = mixing.measure(rows["train"], rows)["value"][-1]
    return {
        "hidden": args.hidden,
        "steps": args.steps,
        "training_rows": ceiling,
        "runs": runs,
    }


def draw_models(result: Row, args: argparse.Namespace) -> None:
    """Draw curves by samples, a panel per model."""
    labels = [label for label, _ in MODELS.values()]
    figure, axes = style.grid(len(labels), (4.2, 3.6))
    for ax, label in zip(axes, labels, strict=True):
        for index, run in enumerate(
            r for r in result["runs"] if r["model"] in (label, _HERDING)
        ):
            look = style.look(index) | {"label": run["sampler"], "linewidth": 1.3}
            pictures.band(
                ax,
                run["curves"][0]["samples"],
                [c["value"] for c in run["curves"]],
                **look,
            )
        text = "training rows as samples"
        ax.axhline(result["training_rows"], color=style.INK, linewidth=0.8, label=text)
        ax.set(
            xscale="log",
            xlabel="samples",
            ylabel="indirect sampling likelihood\nper held-out row (nats)",
        )
        ax.set_title(f"model by {label}", fontsize=9)
    title = (
        f"{args.hidden} latent units on {datasets.tag(args.data)}: "
        f"{pictures.over(len(args.seeds))} of chains"
    )
    pictures.save(figure, axes, args.records.summary.with_suffix(".png"), title)


# -- the bound -----------------------------------------------------------------------


def bound(args: argparse.Namespace) -> Row:
    """Return the bound and the likelihood of the params that sampling moves, by decay and seed."""
    rows = jnp.asarray(ebmpp.data.bars_and_stripes(3))
    graph = ebmpp.layered(v=Bernoulli(9), h=Bernoulli(4))
    # biased, so that the bound can rise
    params = trained(CD(k=1), graph, rows, args, 6.0)
    mean = data_statistics(graph, params, rows)
    first = exact.log_likelihood(graph, params, rows).mean()

    def linear(p):
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, p, mean)))

    # E log p(v, h) of the rows with the latents as the first model infers them, and the
    # entropy of these
    entropy = first - (linear(params) - exact.log_partition(graph, params))
    interval = max(1, args.samples // 100)
    runs = []

    @partial(jax.jit, static_argnums=0)
    def follow(kernel: RatesFPCD, state: Any) -> tuple[Array, Array]:
        def step(state: Any, _: None) -> tuple[Any, tuple[Array, Array]]:
            state = lax.fori_loop(
                0, interval, lambda _, s: kernel.sample(s, (params, mean), {}), state
            )
            moved = jax.tree.map(jnp.add, params, state.fast)
            lower = linear(moved) - exact.log_partition(graph, moved) + entropy
            return state, (lower, exact.log_likelihood(graph, moved, rows).mean())

        return lax.scan(step, state, length=args.samples // interval)[1]

    for decay in _DECAYS:
        for seed in args.seeds:
            kernel = RatesFPCD(graph, rate=_SLOW, decay=decay)
            state = kernel.init(jax.random.key(seed), 0, None, (params, mean), {})
            lower, value = (
                np.round(np.asarray(a, float), 4).tolist()
                for a in follow(kernel, state)
            )
            samples = [interval * (i + 1) for i in range(len(lower))]
            runs.append(
                {
                    "decay": decay,
                    "seed": seed,
                    "samples": samples,
                    "bound": lower,
                    "value": value,
                }
            )
            print(
                f"decay {decay:g}, seed {seed}: bound {lower[-1]}, likelihood {value[-1]}",
                flush=True,
            )
    return {"before": round(float(first), 4), "rate": _SLOW, "runs": runs}


def draw_bound(result: Row, args: argparse.Namespace) -> None:
    """Draw bound and likelihood against the number of samples, a panel per decay."""
    figure, axes = style.grid(len(_DECAYS), (4.6, 3.5))
    for ax, decay in zip(axes, _DECAYS, strict=True):
        choice = [run for run in result["runs"] if run["decay"] == decay]
        for index, (name, label) in enumerate(
            {"bound": "lower bound", "value": "log-likelihood"}.items()
        ):
            look = style.look(index) | {"label": label, "linewidth": 1.4}
            pictures.band(
                ax, choice[0]["samples"], [run[name] for run in choice], **look
            )
        ax.axhline(
            result["before"],
            color=style.INK,
            linewidth=0.8,
            label="the model's log-likelihood",
        )
        ax.set(xlabel="samples of rates-FPCD", ylabel="nats per training row, exact")
        ax.set_title(f"decay {decay:g}", fontsize=9)
    title = f"bars and stripes 3x3, rate {_SLOW:g}: {pictures.over(len(args.seeds))}"
    pictures.save(figure, axes, args.records.summary.with_suffix(".png"), title)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    run, draw = (
        (bound, draw_bound) if args.experiment == "bound" else (models, draw_models)
    )
    result = run(args)
    args.records.write(result)
    draw(result, args)


if __name__ == "__main__":
    main()
