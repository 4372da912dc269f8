# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Particle systems where log Z is known, and on a machine where nothing is: parts of exact_gradients.py.

- ``smc``: against annealed importance sampling at as many particle-sweeps, on the models of bracket.py
  (random ones, and machines that learned bars and stripes): error of log Z, and how often the truth lies
  within two of the stated standard errors.
- ``mnist``: a trained 784x500 machine (``--model``, as ``models/rbm.py --recipe likelihood`` saves it): log Z
  by particle systems and by annealing, an unbiased gradient with its acceptance and its seconds, and further
  steps by ``ParticleUCD`` at a small rate, with the held-out likelihood before and after.
"""

import argparse
from collections.abc import Callable
import json
from pathlib import Path
import time
from typing import Any
import warnings

from bracket import KINDS, TRAINED, model
import numpy as np

import jax
import optax

import ebmpp
from ebmpp import FactorGraph, ParticleUCD, exact

_OF_A_KIND = 3  # models
_CHAINS = 100  # of annealing
_PAIRS = 8  # of particle systems


def options(parser: argparse.ArgumentParser) -> None:
    """Those of a large machine."""
    add = parser.add_argument
    add("--model", type=Path, help="of mnist: a saved machine")
    add("--particles", type=int, default=300, help="of mnist: of each system")
    add("--judges", type=int, default=2500, help="of mnist: particles that tell log Z")
    add("--sweeps", type=int, default=8, help="of mnist: at each rung")
    add("--evenness", type=float, default=0.98, help="of mnist: of each rung")
    add("--steps", type=int, default=100, help="of mnist")
    add("--rate", type=float, default=0.001, help="of mnist")


def _quietly(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # errors, spreads and effective sizes are told
        return call(*args, **options)


# -- log Z -----------------------------------------------------------------------------------------


def _both(graph: FactorGraph, params: Any, key: jax.Array) -> tuple[Any, Any]:
    """Particle systems, and annealing of as many particle-sweeps: the pilot's rungs are paid for too."""
    one = _quietly(ebmpp.smc, graph, params, rng_key=key, num_particles=1000, evenness=0.98)
    rungs = {
        "num_particles": _CHAINS,
        "num_temperatures": max(2, round(1.1 * one.num_rungs * 1000 / _CHAINS)),
    }
    return one, _quietly(ebmpp.ais, graph, params, rng_key=key, **rungs)


def _told(errors: list[tuple[float, float]]) -> dict[str, float]:
    """Of errors and stated errors: how far off, how far it says, how often within two."""
    error, stated = np.array(errors).T
    return {
        "rmse": float(np.sqrt((error**2).mean())),
        "stated": float(np.sqrt((stated**2).mean())),
        "within_two": int((np.abs(error) < 2 * stated).sum()),
        "of": len(error),
    }


def smc(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Errors and coverage of both, a row a kind."""
    made = []
    for kind in (*KINDS, *TRAINED):
        errors: dict[str, list[tuple[float, float]]] = {"smc": [], "ais": []}
        rungs, started = [], time.process_time()
        for seed in range(_OF_A_KIND):
            graph, params = model(kind, seed)
            truth = float(exact.log_partition(graph, params))
            for repeat in range(args.repeats):
                key = jax.random.fold_in(jax.random.key(seed), repeat)
                for way, found in zip(errors, _both(graph, params, key), strict=True):
                    errors[way].append((found.log_partition - truth, found.standard_error))
                    rungs += [found.num_rungs] if way == "smc" else []
        row = {"kind": kind, "models": _OF_A_KIND, "rungs": float(np.mean(rungs))}
        row |= {way: _told(each) for way, each in errors.items()}
        made.append(row | {"processor": time.process_time() - started})
        print(json.dumps(made[-1]), flush=True)
    return made


# -- a large machine -------------------------------------------------------------------------------


def _rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows that ``models/rbm.py --data mnist --binarize bernoulli`` trains on and holds out."""
    grey = ebmpp.data.mnist()
    grey = grey[np.random.default_rng(seed).permutation(len(grey))]
    cut = -(-len(grey) // 6)
    first, second = jax.random.split(jax.random.key(seed + 5))
    draw = lambda rows, key: ebmpp.data.binarize(rows, "bernoulli", rng_key=key)
    return draw(grey[cut:], first), draw(grey[:cut], second)


def _judge(graph: FactorGraph, params: Any, rows: tuple, args: argparse.Namespace) -> dict[str, float]:
    started, (train, held_out) = time.monotonic(), rows
    sizes = {"num_particles": args.judges, "num_sweeps": args.sweeps, "evenness": args.evenness}
    made = _quietly(ebmpp.smc, graph, params, rng_key=jax.random.key(5), data=train, **sizes)
    return {
        "held_out": made.average_log_likelihood(held_out).value,
        "train": made.average_log_likelihood(train[: len(held_out)]).value,
        "log_partition": made.log_partition,
        "standard_error": made.standard_error,
        "spread": float(made.log_z.std(ddof=1)),
        "rungs": made.num_rungs,
        "distinct_ancestors": made.distinct_ancestors,
        "seconds": time.monotonic() - started,
    }


def _annealed(graph: FactorGraph, params: Any, rows: tuple, sweeps: int) -> dict[str, Any]:
    """Annealing of as many particle-sweeps."""
    started = time.monotonic()
    ladder = {"num_particles": _CHAINS, "num_temperatures": round(sweeps / _CHAINS), "data": rows[0]}
    made = _quietly(ebmpp.ais, graph, params, rng_key=jax.random.key(0), ladder="sigmoid", **ladder)
    return {
        "temperatures": ladder["num_temperatures"],
        "log_partition": made.log_partition,
        "standard_error": made.standard_error,
        "effective": made.effective_sample_size,
        "seconds": time.monotonic() - started,
    }


def _expected(graph: FactorGraph, params: Any, rows: tuple, args: argparse.Namespace) -> dict[str, Any]:
    """Unbiased means by pairs of systems: of the pixels and the latent units."""
    each = lambda x: {"v": x["v"], "h": x["h"]}
    sizes = {"num_particles": args.particles, "num_sweeps": args.sweeps, "evenness": args.evenness}
    call = lambda key, num: _quietly(
        ebmpp.particle_expectation,
        graph,
        params,
        each,
        rng_key=jax.random.key(key),
        num_pairs=num,
        data=rows[0],
        **sizes,
    )
    call(5, 1)  # compiles
    started, used = time.monotonic(), time.process_time()
    made = call(6, _PAIRS)
    return {
        "acceptance": made.acceptance,
        "meeting_time": made.meeting_time.tolist(),
        "seconds_a_pair": (time.monotonic() - started) / _PAIRS,
        "processor_a_pair": (time.process_time() - used) / _PAIRS,
        "sweeps_a_pair": float(np.mean(made.cost)),
    }


def _further(
    graph: FactorGraph, params: Any, rows: tuple, args: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    """Steps by particle systems."""
    started = time.monotonic()
    sizes = {"num_particles": args.particles, "num_sweeps": args.sweeps, "evenness": args.evenness}
    fit = ebmpp.fit(
        graph,
        rows[0],
        estimator=ParticleUCD(max_rungs=512, **sizes),
        optimizer=optax.sgd(args.rate),
        num_steps=args.steps,
        batch_size=1000,
        rng_key=jax.random.key(7),
        params=params,
    )
    history = fit.history
    return fit.params, {
        "count": args.steps,
        "rate": args.rate,
        "seconds": time.monotonic() - started,
        "acceptance": float(history.acceptance.mean()),
        "meeting_time_mean": float(history.meeting_time_mean.mean()),
        "meeting_time_max": int(history.meeting_time_max.max()),
        "longest_stay": int(history.longest_stay.max()),
        "rungs": float(history.num_rungs.mean()),
    }


def mnist(args: argparse.Namespace) -> dict[str, Any]:
    """An unbiased gradient of a large machine, and further steps by it."""
    graph, params = ebmpp.load(args.model)
    rows = _rows(args.first)
    told: dict[str, Any] = {n: getattr(args, n) for n in ("particles", "judges", "sweeps", "evenness")}

    def tell(name: str, made: dict[str, Any]) -> None:
        told[name] = made
        print(name, json.dumps(made), flush=True)

    tell("before", _judge(graph, params, rows, args))
    tell("annealed", _annealed(graph, params, rows, args.judges * args.sweeps * told["before"]["rungs"]))
    tell("expectation", _expected(graph, params, rows, args))
    if args.steps:
        params, made = _further(graph, params, rows, args)
        tell("steps", made)
        tell("after", _judge(graph, params, rows, args))
    return told
