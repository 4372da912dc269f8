# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Samples of models by CD, PCD (SML) and FPCD, and what herding visits: Gibbs against rates-FPCD.

One machine by each way to train, all from the same rows, batches and rates. From each a chain of plain Gibbs,
of rates-FPCD whose fast weights do not decay, and of the same with a decay of 0.95; step sizes and the number
k of sweeps a sample are chosen as the paper chooses them: by the measure itself, on validation rows, at
``--tune`` samples. The measure is the indirect sampling likelihood of ``mixing.py``, by the number of samples
and by sweeps. Herding as a trainer has no model to sample: its samples are the states that it visits while it
learns. A second picture has states of the last model beside the means of their pixels under the params that
moved, which are grey.

``bound``: rates-FPCD climbs a lower bound on the log-likelihood of the training rows, with the latents as the
first model fills them in, and so can make samples better than the model's own. On bars and stripes 3x3, a
model of four latent units by CD-1, bound and likelihood are exact at every sample, by decay.

``python benchmarks/mixing_models.py models`` takes minutes on scikit-learn's digits; ``--data mnist`` and
``--data bag_of_words`` read files.

**References**

1. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from an RBM-derived process*,
   sections 4 and 5, figure 3.
2. Welling (2009), *Herding dynamical weights to learn*.
"""

import argparse
from collections.abc import Sequence
from functools import partial
import json
from pathlib import Path
from typing import Any

import bands
import datasets
import mixing
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, Bernoulli, BlockedGibbs, FactorGraph, exact
from ebmpp.contrib import FPCD, Herding, data_statistics
from ebmpp.contrib.sample_quality import indirect_likelihood
from ebmpp.diagnostics import style
from ebmpp.estimators import Estimator
from ebmpp.kernels import RatesFPCD

MODELS: dict[str, tuple[str, Estimator]] = {
    "cd": ("CD-1", CD(k=1)),
    "pcd": ("PCD-1 (SML)", PCD(k=1, num_chains=100)),
    "fpcd": ("FPCD-1", FPCD(k=1, num_chains=100, rate=0.01)),
}
_HERDING = "visited by herding while it learns"
#: by name, with the decay of fast weights where there are any
SAMPLERS = {
    "gibbs": ("Gibbs", None),
    "fpcd": ("rates-FPCD, decay 1", 1.0),
    "decayed": ("rates-FPCD, decay 0.95", 0.95),
}
_DECAYS, _SLOW = (1.0, 0.95), 0.002  # of the machine whose bound is told


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("experiment", nargs="?", choices=("models", "bound"), default="models")
    datasets.option(parser, "digits")
    add("--hidden", type=int, default=100)
    add("--steps", type=int, default=5000, help="of training")
    add(
        "--rate",
        type=float,
        default=0.05,
        help="first rate of training, decays along a cosine; six times that for the small machine",
    )
    add("--samples", type=int, default=5000)
    add("--tune", type=int, default=500, help="samples by which step sizes and k are chosen")
    add("--try-k", type=int, nargs="+", default=[1, 5, 20], help="sweeps a sample, to choose from")
    add("--try-rates", type=float, nargs="+", default=[0.001, 0.01, 0.1], help="step sizes, likewise")
    add("--rows", type=int, default=2000, help="held-out rows at most")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the chains; the models stay")
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw what there is")
    args = parser.parse_args(argv)
    if min(args.hidden, args.steps, args.samples - 1, args.tune - 1, args.rows) < 1 or not args.rate > 0:
        parser.error("--hidden, --steps, --rate and --rows are positive, --samples and --tune at least 2")
    args.tune = min(args.tune, args.samples)
    tag = datasets.tag(args.data)
    args.kept = args.out / f"mixing_{'bound' if args.experiment == 'bound' else f'models_{tag}'}.json"
    return args


# -- models ----------------------------------------------------------------------------------------


def trained(
    estimator: Estimator, graph: FactorGraph, rows: np.ndarray, args: argparse.Namespace, seed: int = 0
) -> ebmpp.Fit:
    """A model. Herding's steps have a constant size, and it makes as many as samples are asked for."""
    herds = isinstance(estimator, Herding)
    falls = optax.cosine_decay_schedule(args.rate, args.steps, alpha=0.02)
    return ebmpp.fit(
        graph,
        rows,
        estimator=estimator,
        optimizer=optax.sgd(1.0 if herds else falls),
        num_steps=args.samples if herds else args.steps,
        rng_key=jax.random.key(seed),
        progress_bar=False,
    )


@partial(jax.jit, static_argnums=(0, 3, 4))
def _run(kernel: Any, state: Any, model_args: tuple, count: int, every: int) -> tuple[Any, Array]:
    """States, one of every so many steps."""

    def one(state: Any, _: None) -> tuple[Any, Array]:
        step = lambda _, s: kernel.sample(s, model_args, {})
        state = lax.fori_loop(0, every, step, state) if every > 1 else step(0, state)
        return state, state.z["v"].astype(bool)

    return lax.scan(one, state, length=count)


def chain(name: str, graph: FactorGraph, options: dict, model: tuple, count: int, seed: int) -> np.ndarray:
    """Samples of one chain."""
    if name == "gibbs":
        kernel, model, every = BlockedGibbs(graph), model[:1], options["k"]
    else:
        kernel, every = RatesFPCD(graph, **options), 1
    state = kernel.init(jax.random.key(seed), 0, None, model, {})
    return np.asarray(_run(kernel, state, model, count, every)[1])


def tried(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Options of a sampler to choose from."""
    decay = SAMPLERS[name][1]
    if decay is None:
        return [{"k": k} for k in args.try_k]
    return [{"rate": rate, "k": k, "decay": decay} for rate in args.try_rates for k in args.try_k]


def choose(name: str, graph: FactorGraph, model: tuple, rows: dict, args: argparse.Namespace) -> dict:
    """What is best on validation rows, one half of which chooses the bandwidth."""
    half, scores, several = len(rows["validation"]) // 2, [], tried(name, args)
    for options in several:
        drawn = chain(name, graph, options, model, args.tune, 1000)
        parts = rows["validation"][:half], rows["validation"][half:]
        found = indirect_likelihood(drawn, parts[0], validation=parts[1], num_samples=[len(drawn)])
        scores.append(float(found.value[-1]))
    return several[int(np.argmax(scores))]


def models(args: argparse.Namespace) -> dict[str, Any]:
    """Every model and sampler in numbers."""
    rows = mixing.load(args)
    graph = ebmpp.layered(v=Bernoulli(rows["train"].shape[1]), h=Bernoulli(args.hidden))
    runs: list[dict[str, Any]] = []
    for label, estimator in MODELS.values():
        params = trained(estimator, graph, rows["train"], args).params
        model = params, data_statistics(graph, params, rows["train"])
        for name, (sampler, _) in SAMPLERS.items():
            best = choose(name, graph, model, rows, args)
            drawn = [chain(name, graph, best, model, args.samples, seed) for seed in args.seeds]
            curves = [mixing.measure(one, rows) for one in drawn]
            runs.append({"model": label, "sampler": sampler, "options": best, "curves": curves})
            told = ", ".join(f"{c['value'][-1]:.2f}" for c in curves)
            print(f"{label}, {sampler} {best}: {told} from {args.samples}", flush=True)
    herding = Herding(num_chains=1, num_kept=args.samples)
    fits = [trained(herding, graph, rows["train"], args, seed) for seed in args.seeds]
    visited = [np.asarray(fit.estimator_state.visited()["v"]) for fit in fits]
    curves = [mixing.measure(one, rows) for one in visited]
    runs.append({"model": _HERDING, "sampler": _HERDING, "options": {}, "curves": curves})
    print(_HERDING, [curve["value"][-1] for curve in curves], flush=True)
    grey = moving_means(graph, model, runs[-2]["options"] | {"decay": 1.0})
    made = {"data": datasets.tag(args.data), "hidden": args.hidden, "steps": args.steps}
    made |= {"training_rows": mixing.measure(rows["train"], rows)["value"][-1], "runs": runs}
    draw_means(grey, args.kept.with_name(f"{args.kept.stem}_grey.png"))
    return made


def moving_means(graph: FactorGraph, model: tuple, options: dict[str, Any]) -> dict[str, np.ndarray]:
    """Thirty states, twenty samples apart, and their pixels' means under the params that drew them."""
    kernel = RatesFPCD(graph, **options)
    state = kernel.init(jax.random.key(0), 0, None, model, {})
    made: dict[str, list] = {"states": [], "means": []}
    for _ in range(30):
        state, _ = _run(kernel, state, model, 19, 1)
        moved = jax.tree.map(jnp.add, model[0], state.fast)
        state, _ = _run(kernel, state, model, 1, 1)
        made["states"].append(np.asarray(state.z["v"], float))
        made["means"].append(np.asarray(graph.mean(moved, {"h": state.z["h"]}, "v")))
    return {name: np.stack(values) for name, values in made.items()}


# -- the bound -------------------------------------------------------------------------------------


def bound(args: argparse.Namespace) -> dict[str, Any]:
    """The bound and the likelihood of the params that sampling moves, by decay and seed."""
    rows = jnp.asarray(ebmpp.data.bars_and_stripes(3))
    graph = ebmpp.layered(v=Bernoulli(9), h=Bernoulli(4))
    few = argparse.Namespace(**vars(args) | {"rate": 6 * args.rate})
    params = trained(CD(k=1), graph, rows, few).params  # biased, so that there is something to gain
    mean = data_statistics(graph, params, rows)
    likelihood = jax.jit(lambda p: exact.log_likelihood(graph, p, rows).mean())
    first = likelihood(params)
    linear = lambda p: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, p, mean)))
    # E log p(v, h) of the rows, their latents as the first model fills them in, and the entropy of these
    entropy = first - (linear(params) - exact.log_partition(graph, params))

    @partial(jax.jit, static_argnums=0)
    def follow(kernel: RatesFPCD, state: Any) -> tuple[Array, Array]:
        def one(state: Any, _: None) -> tuple[Any, tuple[Array, Array]]:
            state = lax.fori_loop(0, every, lambda _, s: kernel.sample(s, (params, mean), {}), state)
            moved = jax.tree.map(jnp.add, params, state.fast)
            lower = linear(moved) - exact.log_partition(graph, moved) + entropy
            return state, (lower, exact.log_likelihood(graph, moved, rows).mean())

        return lax.scan(one, state, length=args.samples // every)[1]

    every, runs = max(1, args.samples // 100), []
    for decay in _DECAYS:
        for seed in args.seeds:
            kernel = RatesFPCD(graph, rate=_SLOW, decay=decay)
            state = kernel.init(jax.random.key(seed), 0, None, (params, mean), {})
            lower, value = follow(kernel, state)
            known = {"decay": decay, "seed": seed, "samples": [every * (i + 1) for i in range(len(lower))]}
            known |= {
                n: np.round(np.asarray(v, float), 4).tolist() for n, v in (("bound", lower), ("value", value))
            }
            runs.append(known)
            last = {name: known[name][-1] for name in ("bound", "value")}
            print(f"decay {decay:g}, seed {seed}: {last}", flush=True)
    return {"before": round(float(first), 4), "rate": _SLOW, "runs": runs}


# -- the report ------------------------------------------------------------------------------------


def draw(made: dict[str, Any], path: Path) -> None:
    """A panel a model: curves by samples; the last panel by sweeps, of the last model."""
    import matplotlib

    matplotlib.use("agg")

    labels = list(dict.fromkeys(run["model"] for run in made["runs"] if run["model"] != _HERDING))
    herding = [run for run in made["runs"] if run["model"] == _HERDING]
    figure, axes = style.grid(len(labels) + 1, (4.6, 3.6), ncols=2)
    for panel, ax in enumerate(axes):
        label = labels[min(panel, len(labels) - 1)]
        by_sweeps = panel == len(labels)
        own = [run for run in made["runs"] if run["model"] == label] + ([] if by_sweeps else herding)
        for index, run in enumerate(own):
            samples = np.array(run["curves"][0]["samples"]) * (run["options"].get("k", 1) if by_sweeps else 1)
            look = style.look(index) | {"marker": style.marker(index), "markersize": 4, "linewidth": 1.3}
            values = [np.array(curve["value"]) for curve in run["curves"]]
            bands.band(ax, samples, values, label=run["sampler"], markerfacecolor="none", **look)
        ax.axhline(made["training_rows"], color=style.INK, linewidth=0.8, label="training rows as samples")
        ax.set(xscale="log", xlabel="sweeps" if by_sweeps else "samples")
        ax.set_ylabel("indirect sampling likelihood\nof a held-out row (nats)", fontsize=9)
        ks = ", ".join(str(run["options"]["k"]) for run in own if "k" in run["options"])
        ax.set_title(f"a model by {label}; k chosen: {ks}", fontsize=9)
        style.tidy(ax)
    seeds = len(made["runs"][0]["curves"])
    size = f"{made['hidden']} latent units on {made['data']}, {made['steps']:,} steps"
    figure.suptitle(f"{size}: {bands.over(seeds)} of chains", fontsize=9)
    style.legend_below(figure, axes, ncols=3)
    figure.savefig(path, dpi=120)


def draw_means(grey: dict[str, np.ndarray], path: Path) -> None:
    """States, and the means of their pixels; nothing where rows are no images."""
    import matplotlib

    matplotlib.use("agg")

    side = round(grey["states"].shape[1] ** 0.5)
    if side * side != grey["states"].shape[1]:
        return
    figure, axes = style.grid(2, (7.6, 1.75), ncols=1)
    told = {"states": "states of rates-FPCD, 20 samples apart", "means": "their pixels' means, params moved"}
    for ax, (name, label) in zip(axes, told.items(), strict=True):
        ebmpp.plots.plot_units(grey[name], (side, side), ncols=15, ax=ax)
        ax.set_title(label, fontsize=8, loc="left", pad=2)
    figure.savefig(path, dpi=110)


def draw_bound(made: dict[str, Any], path: Path) -> None:
    """Bound and likelihood against the number of samples, a panel a decay."""
    import matplotlib

    matplotlib.use("agg")

    figure, axes = style.grid(len(_DECAYS), (4.6, 3.5))
    for ax, decay in zip(axes, _DECAYS, strict=True):
        own = [run for run in made["runs"] if run["decay"] == decay]
        for index, (name, label) in enumerate({"bound": "lower bound", "value": "log-likelihood"}.items()):
            values = [np.array(run[name]) for run in own]
            bands.band(ax, own[0]["samples"], values, label=label, linewidth=1.4, **style.look(index))
        ax.axhline(made["before"], color=style.INK, linewidth=0.8, label="before sampling")
        ax.set(xlabel="samples", ylabel="a training row, exact (nats)", title=f"decay {decay:g}")
        ax.title.set_fontsize(9)
        style.tidy(ax)
    seeds = len({run["seed"] for run in made["runs"]})
    told = f"bars and stripes 3x3, 9x4 units by CD-1, rates-FPCD at {made['rate']:g}: {bands.over(seeds)}"
    figure.suptitle(told, fontsize=9)
    style.legend_below(figure, axes, ncols=3)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        made = {"models": models, "bound": bound}[args.experiment](args)
        args.kept.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    elif not args.kept.exists():
        raise SystemExit(f"there is no {args.kept}: run some first, without --draw")
    made = json.loads(args.kept.read_text(encoding="utf-8"))
    {"models": draw, "bound": draw_bound}[args.experiment](made, args.kept.with_suffix(".png"))
    print(f"wrote {args.kept} and {args.kept.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
