# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""First calls in a fresh process with an empty compile cache.

``python benchmarks/speed/first_call.py`` prints the time to import the package, to
declare a machine of a new size, and for each machine the first step of ``fit`` by
coupled pairs, its compilation included, beside the median of later steps. Each machine
has a process of its own, ``--cores 1`` pins it to one core.

``--beside-nuts`` prints the CPU seconds, imports not included, of five first calls on a
64-16 machine and of NumPyro's NUTS on eight schools, without and with an empty
compilation cache. Every call has a process of its own, in turns; runs are short, so
that compilation dominates.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import cache, partial
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import xarray  # noqa: F401 - a history needs it, and its import is no part of a step

import jax
import optax

sys.path[:0] = [str(Path(__file__).parents[2])]
from benchmarks.speed.engine import images  # noqa: E402
import ebmpp  # noqa: E402
from ebmpp import Bernoulli, Binomial, Categorical, Gaussian, Poisson, Spin  # noqa: E402

MODELS: dict[str, Callable[[], ebmpp.FactorGraph]] = {
    "64-16": lambda: ebmpp.layered(v=Bernoulli(64), h=Bernoulli(16)),
    "784-500": lambda: ebmpp.layered(v=Bernoulli(784), h=Bernoulli(500)),
    "784-500-500-200": lambda: ebmpp.layered(
        v=Bernoulli(784), a=Bernoulli(500), b=Bernoulli(500), c=Bernoulli(200)
    ),
    "spins 784-500": lambda: ebmpp.layered(v=Spin(784), h=Spin(500)),
    "categories 196x4-100": lambda: ebmpp.layered(
        v=Categorical(196, 4), h=Bernoulli(100)
    ),
    "binomials 196-100": lambda: ebmpp.layered(v=Binomial(196, 5), h=Bernoulli(100)),
    "counts 196-50": lambda: ebmpp.layered(v=Poisson(196), h=Bernoulli(50)),
    "Gaussians 784-200": lambda: ebmpp.layered(v=Gaussian(784), h=Bernoulli(200)),
}
SCHOOLS = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
SCALES = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
_IMPORTS = ("jax", "numpyro, networkx, optax", "ebmpp", "ebmpp, ebmpp.diagnostics")


def rows_for(family: ebmpp.Family) -> np.ndarray:
    """Return images as values of the family."""
    ink = images(round(family.size**0.5))[:5000]
    grey = (ink + np.roll(ink, 1, axis=1) + np.roll(ink, 2, axis=1)) / 3
    if isinstance(family, Spin):
        return 2 * ink - 1
    if isinstance(family, Gaussian):
        return (grey - grey.mean(0)) / (grey.std(0) + 0.1)
    return ink if isinstance(family, Bernoulli) else np.round(3 * grey).astype(np.int32)


def measure(name: str, steps: int) -> None:
    """Print the first step's time and the median of later ones, in milliseconds."""
    graph = MODELS[name]()
    times = {}
    rows = rows_for(graph.families["v"])
    start = time.perf_counter()

    def record(progress: ebmpp.training.Progress) -> None:
        jax.block_until_ready(progress.params)
        times[progress.step] = time.perf_counter()

    ebmpp.fit(
        graph,
        rows,
        rng_key=jax.random.key(0),
        estimator=ebmpp.UCD(num_pairs=100),
        optimizer=optax.sgd(0.02),
        num_steps=steps,
        batch_size=100,
        callbacks=[record],
        monitor_every=1,
        progress_bar=False,
    )
    later = np.diff([times[step] for step in sorted(times) if step])
    print(1e3 * (times[1] - start), 1e3 * np.median(later))


def run_nuts() -> None:
    """Sample eight schools, centred, by NumPyro's NUTS."""

    def schools():
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", len(SCHOOLS)):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, SCALES), obs=SCHOOLS)

    options = {"num_warmup": 500, "num_samples": 500, "progress_bar": False}
    mcmc = MCMC(NUTS(schools), **options)
    mcmc.run(jax.random.key(0))
    jax.block_until_ready(mcmc.get_samples())


@cache
def digits() -> np.ndarray:
    """Return binary digits, read and scikit-learn imported before a call is timed."""
    return ebmpp.data.binarize(ebmpp.data.digits())


def run_step(estimator: ebmpp.estimators.Estimator) -> None:
    """Take one step of ``fit``."""
    ebmpp.fit(
        MODELS["64-16"](),
        digits(),
        estimator=estimator,
        optimizer=optax.adam(0.01),
        num_steps=1,
        batch_size=100,
        rng_key=jax.random.key(0),
        progress_bar=False,
    )


def run_on_model(call: Callable) -> None:
    """Call a function of a graph, its params and a key."""
    graph = MODELS["64-16"]()
    key = jax.random.key(0)
    call(graph, graph.init(key, digits()), rng_key=key)


def visible_units(x: dict) -> jax.Array:
    return x["v"]


FIRST_CALLS: dict[str, Callable[[], None]] = {
    "NUTS, eight schools": run_nuts,
    "UCD": lambda: run_step(ebmpp.UCD(num_pairs=50)),
    "ParticleUCD": lambda: run_step(ebmpp.ParticleUCD(num_particles=100)),
    "PCD": lambda: run_step(ebmpp.PCD(num_chains=100)),
    "smc": lambda: run_on_model(partial(ebmpp.smc, num_particles=200)),
    "unbiased_expectation": lambda: run_on_model(
        partial(ebmpp.unbiased_expectation, fn=visible_units, num_pairs=100)
    ),
}


def measure_first_call(name: str, directory: str | None) -> None:
    """Print the CPU seconds of a call, with its programs stored in a directory."""
    if directory:
        ebmpp.enable_compilation_cache(directory)
    digits()
    start = time.process_time()
    FIRST_CALLS[name]()
    print(time.process_time() - start)


def print_beside_nuts(repeats: int) -> None:
    """Print CPU seconds of first calls, minima over processes, and their ratios to NUTS."""
    seconds = {}
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    for _ in range(repeats):
        for name in FIRST_CALLS:
            for stores in (False, True):
                command = [sys.executable, __file__, "--first-call", name]
                with tempfile.TemporaryDirectory() as empty:
                    command += ["--store", empty] if stores else []
                    done = subprocess.run(
                        command,
                        env=environment,
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                seconds.setdefault((name, stores), []).append(
                    float(done.stdout.split()[-1])
                )
    least = {key: min(values) for key, values in seconds.items()}
    nuts = least[next(iter(FIRST_CALLS)), False]
    print(f"{'CPU-seconds, of NUTS':22} {'no cache':>12} {'empty cache':>14}")
    for name in FIRST_CALLS:
        cells = [least[name, stores] for stores in (False, True)]
        print(f"{name:22}", *(f"{c:6.1f} ({c / nuts:.2f})" for c in cells))


def subprocess_times(name: str, steps: int, cores: int | None) -> tuple[float, float]:
    """Run :func:`measure` in a process that neither reads nor writes a compile cache."""
    prefix = (
        [] if cores is None else ["taskset", "-c", ",".join(map(str, range(cores)))]
    )
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [
        *prefix,
        sys.executable,
        __file__,
        "--measure",
        name,
        "--steps",
        str(steps),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    first, later = map(float, done.stdout.split()[-2:])
    return first, later


def print_imports(repeats: int) -> None:
    """Print seconds per import, the minimum over processes."""
    for what in _IMPORTS:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {what}"], check=True)
            times.append(time.perf_counter() - start)
        print(f"import {what}: {min(times):.2f} s", flush=True)


def print_declarations() -> None:
    """Print the time to declare machines of new sizes: the first of the process, and later ones."""
    times = []
    for width in range(500, 511):
        start = time.perf_counter()
        ebmpp.layered(v=Bernoulli(width + 284), h=Bernoulli(width))
        times.append(time.perf_counter() - start)
    print(
        f"declare: the first in {times[0]:.2f} s, later ones in {1e3 * np.median(times[1:]):.1f} ms"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), choices=list(MODELS)
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cores", type=int, help="cores of each process; default: all")
    parser.add_argument("--beside-nuts", action="store_true")
    for option in ("--measure", "--first-call", "--store"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.first_call:
        measure_first_call(args.first_call, args.store)
        return
    if args.beside_nuts:
        print_beside_nuts(args.repeats)
        return
    if args.measure:
        measure(args.measure, args.steps)
        return
    print_imports(args.repeats)
    print_declarations()
    print(f"{'UCD, 100 pairs':22} {'first step, s':>14} {'later step, ms':>15}")
    for name in args.models:
        runs = [
            subprocess_times(name, args.steps, args.cores) for _ in range(args.repeats)
        ]
        first, later = np.min(runs, axis=0)
        print(f"{name:22} {first / 1e3:14.1f} {later:15.2f}", flush=True)


if __name__ == "__main__":
    main()
