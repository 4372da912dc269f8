# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exact gradients: what they cost, and what training by them reaches.

- ``bars``: bars and stripes 4x4, 16 latent units, all 32 rows a step, the exact log-likelihood every hundred
  steps (best possible: -108.13). Coupled particle systems (unbiased from the first step to the last),
  weighted persistent chains, and beside them PCD, CD and UCD by pairs of Gibbs chains, over seeds.
- ``draws``: sweeps of one chain for the worth of one exact draw. Two machines of one run, at about -113 and
  at about -109.8: the variance of the negative phase, summed over coordinates, times its cost in sweeps, over
  the variance of one exact draw (which has its latents summed out too).
- ``mixture``: the same for pairs of Gibbs chains with and without a shared mixture proposal, on bars and
  stripes and on digits 64x16; a sweep with a proposal counts as many plain ones as it takes time.
- ``smc`` and ``mnist``: see particle_systems.py.

``python benchmarks/exact_gradients.py bars --seeds 20`` keeps each run in a file of its own (``raw/`` in the
output folder); ``table`` prints and keeps what there is. Seconds are those of the wall, and of the processor
in brackets: on a busy machine the second tell more.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
from functools import partial
import json
from pathlib import Path
import time
from typing import Any, NamedTuple

from bars_and_stripes import BEST, ROWS
import numpy as np
import particle_systems

import jax
from jax import Array
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Bernoulli, ParticleUCD, WeightedPCD, exact
from ebmpp.core import random
from ebmpp.estimators import Batch, Estimator

GRAPH = ebmpp.layered(v=Bernoulli(16), h=Bernoulli(16))
_LOOK = 100


class Method(NamedTuple):
    """What is trained, and how."""

    label: str
    estimator: Estimator
    steps: int
    rate: float
    falls: bool = False
    """Whether the rate falls to a fiftieth, linearly."""
    seconds: float = 420.0
    """Of the processor, after which a run ends."""


PARTICLES = ParticleUCD(num_particles=500, path="training", evenness=0.9)
WINDOW = dataclasses.replace(PARTICLES, k=1, m=3)  # corrections of pairs that meet late weigh less
METHODS = {
    "particles": Method("ParticleUCD, 500 particles", PARTICLES, 12_000, 0.2, True),
    "window": Method("the same, k = 1 and m = 3", WINDOW, 12_000, 0.2, True),
    "weighted": Method("WeightedPCD, 1000 chains", WeightedPCD(num_watchers=0), 20_000, 0.2, True),
    "pcd": Method("PCD-1, 1000 chains", PCD(), 20_000, 0.2, True),
    "cd": Method("CD-1", CD(), 20_000, 0.2, True),
    "ucd": Method("UCD by Gibbs pairs, adaptive", UCD(num_pairs=100), 12_000, 0.2, True),
}


def total(params: Any) -> Array:
    """The exact log-likelihood of all rows."""
    return exact.log_likelihood(GRAPH, params, ROWS).sum()


def train(name: str, seed: int, seconds: float | None = None) -> dict[str, Any]:
    """One run in numbers: its curve, seconds, meeting times, and the last params."""
    method = METHODS[name]
    most = method.seconds if seconds is None else seconds
    rate = optax.linear_schedule(method.rate, method.rate / 50, method.steps) if method.falls else method.rate
    started, used = time.monotonic(), time.process_time()
    params: dict[str, Any] = {}

    def watch(progress: Any) -> bool:
        params.update(progress.params)
        return time.process_time() - used > most

    fit = ebmpp.fit(
        GRAPH,
        ROWS,
        estimator=method.estimator,
        optimizer=optax.sgd(rate),
        num_steps=method.steps,
        rng_key=jax.random.key(seed),
        monitors={"total": total},
        monitor_every=_LOOK,
        callbacks=[watch],
        progress_bar=False,
    )
    curve = fit.history.total.values
    made = {
        "method": name,
        "seed": seed,
        "seconds": time.monotonic() - started,
        "processor": time.process_time() - used,
        "steps": fit.history.sizes["step"],
        "curve": curve.round(2).tolist(),
        "last": float(curve[-1]),
        "best": float(curve.max()),
        "fall": float((np.maximum.accumulate(curve) - curve).max()),
    }
    for metric in ("meeting_time_mean", "meeting_time_max", "acceptance", "num_rungs"):
        if metric in fit.history:
            made[metric] = float(fit.history[metric].mean())
    if "meeting_time_max" in fit.history:
        made["meeting_time_max"] = int(fit.history.meeting_time_max.max())
    return made


def bars(args: argparse.Namespace) -> None:
    """Runs that are not there yet."""
    folder = args.out / "raw" / "exact_gradients"
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(args.first, args.first + args.seeds):
        for name in args.only or METHODS:
            file = folder / f"{name}_{seed}.json"
            if not file.exists():
                made = train(name, seed, args.seconds)
                file.write_text(json.dumps(made) + "\n", encoding="utf-8")
                print(f"{name} {seed}: {made['last']:.1f}, {made['seconds']:.0f} s", flush=True)


def _gathered(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, method in METHODS.items():
        files = sorted((args.out / "raw" / "exact_gradients").glob(f"{name}_*.json"))
        runs = [json.loads(f.read_text(encoding="utf-8")) for f in files]
        if not runs:
            continue
        of = lambda key, runs=runs: np.array([r[key] for r in runs])
        row = {
            "method": method.label,
            "seeds": len(runs),
            "steps": int(np.median(of("steps"))),
            "last": [float(np.quantile(of("last"), q).round(2)) for q in (0.5, 0, 1)],
            "best": float(np.median(of("best")).round(2)),
            "largest_fall": float(of("fall").max().round(2)),
            "seconds": float(np.median(of("seconds")).round(1)),
            "processor": float(np.median(of("processor")).round(1)),
        }
        if "meeting_time_mean" in runs[0]:
            row["meeting_time_mean"] = float(of("meeting_time_mean").mean().round(3))
            row["meeting_time_max"] = int(of("meeting_time_max").max())
        rows.append(row)
    return rows


# -- the worth of one exact draw -------------------------------------------------------------------


class Machine(NamedTuple):
    """A machine along a run, and the path that the run had to it."""

    total: float
    params: Any
    state: Any


def machines() -> list[Machine]:
    """Of one run by particle systems, at about -113 and at about -109.8."""
    found: list[Machine] = []
    wanted = [-113.1, -109.85]

    def watch(progress: Any) -> bool:
        value = float(total(progress.params))
        if wanted and value >= wanted[0]:
            wanted.pop(0)
            own = jax.tree.map(jnp.array, (progress.params, progress.estimator_state))
            found.append(Machine(value, *own))
        return not wanted

    rate = optax.linear_schedule(0.2, 0.004, 12_000)
    options = {"rng_key": jax.random.key(1), "num_steps": 20_000, "progress_bar": False}
    ebmpp.fit(
        GRAPH,
        ROWS,
        estimator=PARTICLES,
        optimizer=optax.sgd(rate),
        callbacks=[watch],
        monitor_every=200,
        **options,
    )
    return found


def exact_variance(params: Any) -> float:
    """The trace of the covariance of one exact draw's energy gradient, the latents summed out."""
    states = jnp.asarray((np.arange(2**16)[:, None] >> np.arange(16)) & 1, jnp.float32)
    energy = lambda p, v: GRAPH.free_energy(p, {"v": v})
    p = jax.nn.softmax(-jax.vmap(lambda v: energy(params, v))(states))
    each = jax.vmap(lambda v: jax.grad(energy)(params, v))(states)
    flat = np.concatenate([np.asarray(g, float).reshape(len(p), -1) for g in jax.tree.leaves(each)], 1)
    p = np.asarray(p, float)
    return float((p @ flat**2 - (p @ flat) ** 2).sum())


def spread(
    estimator: Estimator,
    params: Any,
    state: Any,
    repeats: int,
    cost: Callable[[Any, Any], float],
    warm: int = 0,
) -> dict[str, float]:
    """Variance of a step's gradient over repeats at one state (the positive phase is exact), and its cost.

    :param cost: sweeps of one chain, from a step's metrics and the state after it.
    :param warm: steps that come before, for lengths that follow the times to meet.
    """
    batch = Batch.of({"v": jnp.asarray(ROWS)})
    step = jax.jit(lambda s, key: estimator.estimate(GRAPH, params, s, batch, key))
    for i in range(warm):
        state = step(state, random.key_pair(jax.random.key(i))).state
    gradients, costs, told, started = [], [], [], time.monotonic()
    for i in range(repeats):
        made = step(state, random.key_pair(jax.random.key(1000 + i)))
        gradients.append(np.concatenate([np.ravel(g) for g in jax.tree.leaves(made.gradient)]))
        metrics = {n: float(v) for n, v in made.metrics.items()}
        costs.append(cost(metrics, made.state))
        told.append(metrics)
    kept = [n for n in ("meeting_time_mean", "acceptance", "num_rungs", "lag") if n in told[0]]
    mean = {n: float(np.mean([t[n] for t in told])) for n in kept}
    # of a trace over many coordinates: by halves of the repeats
    halves = [np.var(gradients[i::2], 0, ddof=1).sum() for i in (0, 1)]
    seconds = (time.monotonic() - started) / repeats
    return {
        "variance": float(np.var(gradients, 0, ddof=1).sum()),
        "variance_of_halves": [float(h) for h in halves],
        "sweeps": float(np.mean(costs)),
        "seconds": seconds,
        **mean,
    }


def draws(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Sweeps for the worth of one exact draw, at two machines."""
    made = []
    for machine in machines():
        one = exact_variance(machine.params)
        ways: dict[str, dict[str, float]] = {}
        for num in (500, 1000):
            estimator = PARTICLES.__class__(
                num_particles=num, path="training", evenness=0.9, refit_every=10**9
            )
            state = machine.state._replace(even=jnp.ones(()), seen=jnp.ones((), jnp.int32))
            sweeps = lambda m, s, num=num: num * m["num_rungs"] * (1 + max(1, m["meeting_time_mean"]))
            ways[f"particles, {num}"] = spread(estimator, machine.params, state, args.repeats, sweeps, warm=1)
        for label, kind in (("Gibbs pairs, m = 2 lag", {}), ("Gibbs pairs, m = k", {"m": 0})):
            if machine.total > -112 and not args.long:
                continue  # pairs take thousands of sweeps: minutes a step
            estimator = UCD(num_pairs=50, marginalize=("h",), **kind)
            state = estimator.init(
                GRAPH, machine.params, {"v": jnp.asarray(ROWS)}, 32, random.key_pair(jax.random.key(0))
            )
            sweeps = lambda m, s: 50 * m["sweeps"]
            ways[label] = spread(estimator, machine.params, state, args.repeats // 2, sweeps, warm=60)
        for way in ways.values():
            way["sweeps_for_a_draw"] = way["variance"] * way["sweeps"] / one
        made.append({"total": machine.total, "variance_of_a_draw": one, "ways": ways})
        print(json.dumps(made[-1], indent=1), flush=True)
    return made


# -- mixture proposals -----------------------------------------------------------------------------

_POOL = 300
_WINDOWS = (100, 1100)  # sweeps of pairs whose times are compared
_PAIRS = 400


def learned(kind: str) -> tuple[ebmpp.FactorGraph, Any, np.ndarray]:
    """A machine that learned by PCD, and its rows: bars and stripes 16x16, or digits 64x16."""
    if kind == "bars":
        graph, rows, steps = GRAPH, ROWS, 3500
    else:
        graph = ebmpp.layered(v=Bernoulli(64), h=Bernoulli(16))
        rows, steps = np.asarray(ebmpp.data.binarize(ebmpp.data.digits())), 4000
    options = {"optimizer": optax.sgd(0.1), "rng_key": jax.random.key(0), "progress_bar": False}
    size = {"estimator": PCD(num_chains=500), "num_steps": steps, "batch_size": min(200, len(rows))}
    return graph, ebmpp.fit(graph, rows, **size, **options).params, rows


def sweep_seconds(expect: Callable[..., Any], rows: Array) -> float:
    """Of the processor, for a sweep of a pair: what a longer window adds; the minimum of three."""
    least = []
    for last in _WINDOWS:
        times = []
        for seed in range(4):
            used = time.process_time()
            key = jax.random.key(seed)
            made = expect(lambda x: x["v"][0], rng_key=key, num_pairs=64, k=1, m=last, init={"v": rows[:64]})
            jax.block_until_ready(made.value)
            times.append(time.process_time() - used)
        least.append(min(times[1:]))
    return (least[1] - least[0]) / (_WINDOWS[1] - _WINDOWS[0]) / 64


def mixture(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Pairs of Gibbs chains, with a pool and without: sweeps for the worth of one exact draw."""
    made = []
    for kind in ("bars", "digits"):
        graph, params, data = learned(kind)
        weights = lambda x, p=params: jnp.outer(x["v"], jax.nn.sigmoid(p["h"] + x["v"] @ p["v:h"]))
        num = max(_POOL, _PAIRS)
        rows = jnp.asarray(data[np.random.default_rng(0).permutation(np.arange(num) % len(data))])
        exactly = ebmpp.perfect_sample(graph, params, jax.random.key(9), 20_000, method="enumerate")
        one = np.asarray(jax.vmap(weights)(exactly)).reshape(20_000, -1).var(0, ddof=1).sum()
        told = {"machine": kind, "log_likelihood": float(exact.log_likelihood(graph, params, data).mean())}
        plain = 0.0
        for label, chosen in (
            ("Gibbs pairs", {}),
            ("and a mixture", {"coupling": "mixture", "pool": {"v": rows[:_POOL]}}),
        ):
            expect = partial(ebmpp.unbiased_expectation, graph, params, **chosen)
            seconds = sweep_seconds(expect, rows)
            plain = plain or seconds
            start = {"num_pairs": _PAIRS, "init": {"v": rows[:_PAIRS]}}
            first = expect(weights, rng_key=jax.random.key(4), **start)
            tau = first.meeting_time - first.lag
            lag = max(1, int(np.quantile(tau, 0.95)))
            costs = []
            for seed in range(args.seeds):
                key = jax.random.key(10 + seed)
                found = expect(weights, rng_key=key, k=lag, m=2 * lag, lag=lag, **start)
                variance = float((np.asarray(found.standard_error) ** 2).sum()) * _PAIRS
                costs.append(variance * found.cost.mean() * seconds / plain / one)
            row = {"pairs": label, "mean_after_lag": float(tau.mean()), "max_after_lag": int(tau.max())}
            row |= {"lag": lag, "sweep": seconds / plain, "sweeps_for_a_draw": float(np.mean(costs))}
            row |= {"error": float(np.std(costs, ddof=1) / len(costs) ** 0.5)}
            row |= {"acceptance": found.acceptance} if chosen else {}
            made.append(told | row)
            print(json.dumps(made[-1]), flush=True)
    return made


# -- the report ------------------------------------------------------------------------------------


def table(args: argparse.Namespace) -> dict[str, Any]:
    """What there is of runs on bars and stripes."""
    rows = _gathered(args)
    for r in rows:
        low, high = r["last"][1:]
        told = f"{r['method']:32} {r['seeds']:2} seeds, {r['steps']} steps"
        told += f": last {r['last'][0]} ({low} to {high})"
        told += f", best {r['best']}, largest fall {r['largest_fall']}, {r['seconds']} s ({r['processor']})"
        if "meeting_time_mean" in r:
            told += f", tau {r['meeting_time_mean']}, at most {r['meeting_time_max']}"
        print(told)
    return {"best": BEST, "rows": rows}


def main(argv: Sequence[str] | None = None) -> None:
    """One of the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"bars": bars, "draws": draws, "mixture": mixture, "table": table}
    parts |= {"smc": particle_systems.smc, "mnist": particle_systems.mnist}
    add = parser.add_argument
    add("part", choices=parts)
    add("--seeds", type=int, default=20)
    add("--first", type=int, default=0)
    add("--only", nargs="+", choices=tuple(METHODS))
    add("--seconds", type=float, help="of the processor, after which a run of bars ends (420)")
    add("--repeats", type=int, default=60)
    add("--long", action="store_true", help="Gibbs pairs at the better machine too: hours")
    particle_systems.options(parser)
    add("--out", type=Path, default=Path("benchmarks/report"))
    args = parser.parse_args(argv)
    made = parts[args.part](args)
    if made is not None:
        name = "bars" if args.part == "table" else args.part
        file = args.out / "exact_gradients.json"
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.write_text(json.dumps(before | {name: made}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
