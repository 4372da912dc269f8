# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exact gradients: what they cost, and what training by them reaches.

- ``bars``: bars and stripes 4x4, 16 latent units, all 32 rows a step, the exact log-likelihood every hundred
  steps (best possible: -108.13). Coupled particle systems (unbiased from the first step to the last),
  weighted persistent chains, and beside them PCD, CD and UCD by pairs of Gibbs chains, over seeds.
- ``draws``: sweeps of one chain for the worth of one exact draw. Two machines of one run, at about -113 and
  at about -109.7: the variance of the negative phase, summed over coordinates, times its cost in sweeps, over
  the variance of one exact draw (which has its latents summed out too).
- ``smc``: particle systems against annealed importance sampling at as many particle-sweeps, on random models
  that can be summed: error of log Z, and how often the truth lies within two of the stated standard errors.
- ``mnist``: a trained 784x500 machine (``--model``, as ``models/rbm.py --recipe likelihood`` saves it): log Z
  by particle systems, an unbiased gradient with its acceptance and its seconds, and further steps by
  ``ParticleUCD`` at a small rate, with the held-out likelihood before and after.

``python benchmarks/exact_gradients.py bars --seeds 20`` keeps each run in a file of its own (``raw/`` in the
output folder); ``table`` prints and keeps what there is. Seconds are those of the wall, and of the processor
in brackets: on a busy machine the second tell more.
"""

import argparse
from collections.abc import Callable, Sequence
import json
from pathlib import Path
import time
from typing import Any, NamedTuple
import warnings

from bars_and_stripes import BEST, ROWS
from bracket import KINDS, model
import numpy as np

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
    seconds: float = 600.0
    """Of the processor, after which a run ends."""


PARTICLES = ParticleUCD(num_particles=500, path="training", evenness=0.9)
METHODS = {
    "particles": Method("ParticleUCD, 500 particles", PARTICLES, 12_000, 0.2, True),
    "weighted": Method("WeightedPCD, 1000 chains", WeightedPCD(num_watchers=0), 20_000, 0.2, True),
    "pcd": Method("PCD-1, 1000 chains", PCD(), 20_000, 0.2, True),
    "cd": Method("CD-1", CD(), 20_000, 0.2, True),
    "ucd": Method("UCD by Gibbs pairs, adaptive", UCD(num_pairs=100), 12_000, 0.2, True),
}


def total(params: Any) -> Array:
    """The exact log-likelihood of all rows."""
    return exact.log_likelihood(GRAPH, params, ROWS).sum()


def train(name: str, seed: int) -> dict[str, Any]:
    """One run in numbers: its curve, seconds, meeting times, and the last params."""
    method = METHODS[name]
    rate = optax.linear_schedule(method.rate, method.rate / 50, method.steps) if method.falls else method.rate
    started, used = time.monotonic(), time.process_time()
    params: dict[str, Any] = {}

    def watch(progress: Any) -> bool:
        params.update(progress.params)
        return time.process_time() - used > method.seconds

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
                made = train(name, seed)
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
    """Of one run by particle systems, at about -113.1 and at about -109.7."""
    found: list[Machine] = []
    wanted = [-113.1, -109.7]

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


def draws(args: argparse.Namespace) -> None:
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
            after = 1 if not kind else 0

            def sweeps(m: Any, s: Any, after: int = after) -> float:
                tau = m["meeting_time_mean"]  # roughly: of the mean in place of the mean of each
                return 50 * (max(m["k"] + after * m["lag"], tau) + tau - m["lag"])

            ways[label] = spread(estimator, machine.params, state, args.repeats // 2, sweeps, warm=4)
        for way in ways.values():
            way["sweeps_for_a_draw"] = way["variance"] * way["sweeps"] / one
        made.append({"total": machine.total, "variance_of_a_draw": one, "ways": ways})
        print(json.dumps(made[-1], indent=1), flush=True)
    _keep(args, "draws", made)


# -- log Z -----------------------------------------------------------------------------------------


def smc(args: argparse.Namespace) -> None:
    """Errors and coverage of particle systems and of annealing, at as many particle-sweeps."""
    made = []
    for kind in KINDS:
        for seed in range(3):
            graph, params = model(kind, seed)
            truth = float(exact.log_partition(graph, params))
            rows: dict[str, list[tuple[float, float]]] = {"smc": [], "ais": []}
            for repeat in range(args.repeats):
                key = jax.random.fold_in(jax.random.key(seed), repeat)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    one = ebmpp.smc(graph, params, rng_key=key, num_particles=1000, evenness=0.98)
                    # the pilot's rungs are paid for too, and a pilot of annealing's reference by both
                    temperatures = max(2, round(1.1 * one.num_rungs * 1000 / 100))
                    other = ebmpp.ais(
                        graph, params, rng_key=key, num_particles=100, num_temperatures=temperatures
                    )
                rows["smc"].append((one.log_partition - truth, one.standard_error))
                rows["ais"].append((other.log_partition - truth, other.standard_error))
            row = {"kind": kind, "seed": seed, "rungs": one.num_rungs, "temperatures": temperatures}
            for way, each in rows.items():
                error, stated = np.array(each).T
                row[way] = {
                    "rmse": float(np.sqrt((error**2).mean())),
                    "stated": float(np.sqrt((stated**2).mean())),
                    "covered": float((np.abs(error) < 2 * stated).mean()),
                }
            made.append(row)
            print(json.dumps(row), flush=True)
    _keep(args, "smc", made)


# -- a large machine -------------------------------------------------------------------------------


def _rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows that ``models/rbm.py --data mnist --binarize bernoulli`` trains on and holds out."""
    grey = ebmpp.data.mnist()
    grey = grey[np.random.default_rng(seed).permutation(len(grey))]
    cut = -(-len(grey) // 6)
    first, second = jax.random.split(jax.random.key(seed + 5))
    draw = lambda rows, key: ebmpp.data.binarize(rows, "bernoulli", rng_key=key)
    return draw(grey[cut:], first), draw(grey[:cut], second)


def mnist(args: argparse.Namespace) -> None:
    """An unbiased gradient of a large machine, and further steps by it."""
    graph, params = ebmpp.load(args.model)
    train, held_out = _rows(args.first)

    def judge(params: Any) -> dict[str, float]:
        started = time.monotonic()
        made = ebmpp.smc(graph, params, rng_key=jax.random.key(5), num_particles=args.judges, data=train)
        told = {"held_out": made.average_log_likelihood(held_out).value, "rungs": made.num_rungs}
        told |= {"log_partition": made.log_partition, "standard_error": made.standard_error}
        return told | {"spread": float(made.log_z.std(ddof=1)), "seconds": time.monotonic() - started}

    told: dict[str, Any] = {"before": judge(params)}
    started, used = time.monotonic(), time.process_time()
    ink = lambda x: x["v"].sum()
    made = ebmpp.particle_expectation(
        graph, params, ink, rng_key=jax.random.key(6), num_particles=args.particles, num_pairs=4, data=train
    )
    pair = (time.monotonic() - started) / 4
    told["expectation"] = {"acceptance": made.acceptance, "meeting_time": made.meeting_time.tolist()}
    told["expectation"] |= {"seconds_a_pair": pair, "processor_a_pair": (time.process_time() - used) / 4}
    print(json.dumps(told, indent=1), flush=True)
    started = time.monotonic()
    fit = ebmpp.fit(
        graph,
        train,
        estimator=ParticleUCD(num_particles=args.particles),
        optimizer=optax.sgd(args.rate),
        num_steps=args.steps,
        batch_size=1000,
        rng_key=jax.random.key(7),
        params=params,
    )
    history = fit.history
    told["steps"] = {
        "count": args.steps,
        "rate": args.rate,
        "seconds": time.monotonic() - started,
        "acceptance": float(history.acceptance.mean()),
        "meeting_time_mean": float(history.meeting_time_mean.mean()),
        "meeting_time_max": int(history.meeting_time_max.max()),
        "rungs": float(history.num_rungs.mean()),
    }
    told["after"] = judge(fit.params)
    _keep(args, "mnist", told | {"particles": args.particles, "judges": args.judges})
    print(json.dumps(told, indent=1), flush=True)


# -- the report ------------------------------------------------------------------------------------


def _keep(args: argparse.Namespace, name: str, made: Any) -> None:
    file = args.out / "exact_gradients.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(before | {name: made}, indent=1) + "\n", encoding="utf-8")


def table(args: argparse.Namespace) -> None:
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
    _keep(args, "bars", {"best": BEST, "rows": rows})


def main(argv: Sequence[str] | None = None) -> None:
    """One of the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"bars": bars, "draws": draws, "smc": smc, "mnist": mnist, "table": table}
    add = parser.add_argument
    add("part", choices=parts)
    add("--seeds", type=int, default=20)
    add("--first", type=int, default=0)
    add("--only", nargs="+", choices=tuple(METHODS))
    add("--repeats", type=int, default=60)
    add("--long", action="store_true", help="Gibbs pairs at the better machine too: hours")
    add("--model", type=Path, help="of mnist: a saved machine")
    add("--particles", type=int, default=2000, help="of mnist: of each system")
    add("--judges", type=int, default=20_000, help="of mnist: particles that tell log Z")
    add("--steps", type=int, default=100, help="of mnist")
    add("--rate", type=float, default=0.001, help="of mnist")
    add("--out", type=Path, default=Path("benchmarks/report"))
    args = parser.parse_args(argv)
    parts[args.part](args)


if __name__ == "__main__":
    main()
