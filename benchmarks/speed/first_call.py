# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""First calls in a fresh process with an empty compile cache.

``python benchmarks/speed/first_call.py`` prints the time to import the package, to
declare a machine of a new size, and for each machine the first step of ``fit`` by
coupled pairs, its compilation included, beside the median of later steps. Each machine
has a process of its own, ``--cores 1`` pins it to one core.
"""

import argparse
from collections.abc import Callable, Sequence
import os
from pathlib import Path
import subprocess
import sys
import time

import numpy as np
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
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
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
