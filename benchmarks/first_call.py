# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The first step of ``fit`` by ``UCD``, all its compiling included, and the steps after it.

``python benchmarks/first_call.py`` trains each machine a few steps by 100 pairs, each time in a process of
its own without a cache of compiled programs: as the library compiles coupled pairs, which is by XLA's older
emitters of kernels for some units, and by the usual ones, which ``XLA_FLAGS`` asks for. ``--cores 1`` pins
each to one core. MNIST is used where ``EBMPP_DATA_DIR`` has it, else scikit-learn's digits, enlarged. What
imports take is told before that, and how long a machine of a new size takes to declare.
"""

import argparse
from collections.abc import Callable
import os
from pathlib import Path
import subprocess
import sys
import time

from engine import images
import numpy as np
import xarray  # noqa: F401  a history needs it, and its import is no part of a step

import jax
import optax

import ebmpp
from ebmpp import Bernoulli, Binomial, Categorical, Gaussian, Poisson, Spin
from ebmpp.core import compile as programs

_USUAL = "--xla_cpu_use_fusion_emitters=true"

MODELS: dict[str, Callable[[], ebmpp.FactorGraph]] = {
    "64-16": lambda: ebmpp.layered(v=Bernoulli(64), h=Bernoulli(16)),
    "784-500": lambda: ebmpp.layered(v=Bernoulli(784), h=Bernoulli(500)),
    "784-500-500-200": lambda: ebmpp.layered(
        v=Bernoulli(784), a=Bernoulli(500), b=Bernoulli(500), c=Bernoulli(200)
    ),
    "spins 784-500": lambda: ebmpp.layered(v=Spin(784), h=Spin(500)),
    "categories 196x4-100": lambda: ebmpp.layered(v=Categorical(196, 4), h=Bernoulli(100)),
    "binomials 196-100": lambda: ebmpp.layered(v=Binomial(196, 5), h=Bernoulli(100)),
    "counts 196-50": lambda: ebmpp.layered(v=Poisson(196), h=Bernoulli(50)),
    "Gaussians 784-200": lambda: ebmpp.layered(v=Gaussian(784), h=Bernoulli(200)),
}


def rows_of(family: ebmpp.Family) -> np.ndarray:
    """Rows of images for a visible block; grey where its units have more than two values."""
    ink = images(round(family.size**0.5))[:5000]
    grey = (ink + np.roll(ink, 1, axis=1) + np.roll(ink, 2, axis=1)) / 3
    if isinstance(family, Spin):
        return 2 * ink - 1
    if isinstance(family, Gaussian):
        return (grey - grey.mean(0)) / (grey.std(0) + 0.1)
    if isinstance(family, Bernoulli):
        return ink
    return np.round(3 * grey).astype(np.int32)


def one(name: str, steps: int) -> None:
    """Times of one machine: of the first step, and the median of those after it, in milliseconds."""
    graph = MODELS[name]()
    rows, begin, times = rows_of(graph.families["v"]), time.perf_counter(), {}

    def told(progress: ebmpp.training.Progress) -> None:
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
        callbacks=[told],
        monitor_every=1,
        progress_bar=False,
    )
    print(1e3 * (times[1] - begin), 1e3 * np.median(np.diff([times[step] for step in sorted(times) if step])))


def imports(repeats: int) -> None:
    """Seconds that a process takes to import each, the least of several."""
    for what in ("jax", "numpyro, networkx, optax", "ebmpp", "ebmpp, ebmpp.diagnostics"):
        took = []
        for _ in range(repeats):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {what}"], check=True)
            took.append(time.perf_counter() - begin)
        print(f"import {what}: {min(took):.2f} s", flush=True)


def declared() -> None:
    """How long Boltzmann machines take to declare: the first of a process, and the median of later ones."""
    took = []
    for width in range(500, 511):
        begin = time.perf_counter()
        ebmpp.layered(v=Bernoulli(width + 284), h=Bernoulli(width))
        took.append(time.perf_counter() - begin)
    print(f"declared: the first in {took[0]:.2f} s, those after it in {1e3 * np.median(took[1:]):.1f} ms")


def measured(name: str, steps: int, flags: str, cores: int | None) -> tuple[float, float]:
    """Of a process of its own."""
    prefix = [] if cores is None else ["taskset", "-c", ",".join(map(str, range(cores)))]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [*prefix, sys.executable, str(Path(__file__)), "--one", name, "--steps", str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, rest = map(float, done.stdout.split()[-2:])
    return first, rest


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cores", type=int, help="of each process; all by default")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.steps)
        return
    imports(options.repeats)
    declared()
    if not programs._is_known("xla_cpu_use_fusion_emitters", False):
        parser.error(
            f"the XLA of jax {jax.__version__} has the usual emitters alone: there is nothing to compare"
        )
    print("model; first step, s: ours, usual emitters, ratio; a later one, ms: ours, usual, ratio")
    for name in options.models:
        runs = [
            [measured(name, options.steps, flags, options.cores) for flags in ("", _USUAL)]
            for _ in range(options.repeats)
        ]
        (first, usual_first), (rest, usual) = np.min(runs, axis=0).T
        print(
            f"{name:22} {first / 1e3:6.1f} {usual_first / 1e3:6.1f} {first / usual_first:6.2f} "
            f"{rest:9.2f} {usual:9.2f} {rest / usual:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
