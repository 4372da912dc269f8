# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The engine against cdtau, the C++ of Qiu, Zhang and Wang (2020): gradients by 1000 coupled pairs.

``python benchmarks/cdtau.py --source cdtau/src --include eigen3 xsimd/include`` compiles cdtau's sampler as
it stands, with OpenBLAS and OpenMP on all cores, and runs it beside the engine on the machines of
``engine.py`` from the same rows, interleaved in one process with a pause. It needs a C++ compiler, a checkout
of github.com/yixuan/cdtau, Eigen, OpenBLAS, and xsimd 7.1 (later ones are of another interface).

Both sum the visible and the latent units out in turn, and both draw every layer by a maximal coupling; cdtau
couples latents first (as ours does with ``--latents-first``), gives up a residual draw after ten trials, and
makes antithetic pairs, so meeting times differ somewhat, and a time a sweep of a pair is told too. It gives
each core pairs of its own, which ours does on a mesh alone: ``taskset -c 0 ... --threads 1`` has one core
each. Its cap on sweeps is one above its longest pair of five runs before (a larger one costs it time with
each pair); in how many runs a pair reached it is told.
"""

import argparse
import ctypes
import os
from pathlib import Path
import subprocess
import tempfile
from typing import NamedTuple

from engine import DEFAULT_SLOTS, MODELS, ONE, PAIRS, trained
import numpy as np
from peers import interleaved

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp.core import random
from ebmpp.coupling.accumulators import MarginalGradient
from ebmpp.coupling.engine import run_pairs
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target

_LONG = 1 << 14  # sweeps, of the run that finds the longest pair
_SHIM = """#pragma once
#include <Eigen/Dense>
#include <cstdlib>
#include <iostream>
namespace Rcpp { static std::ostream& Rcout = std::cout; }
namespace R {
inline double unif_rand() { std::abort(); }
inline double norm_rand() { std::abort(); }
}
"""
_REAL = np.ctypeslib.ndpointer(np.float32, flags="F_CONTIGUOUS")


def build(source: Path, include: list[Path], folder: Path) -> ctypes.CDLL:
    """cdtau's sampler as a library, in ``folder``; R is not needed for what is called."""
    (folder / "RcppEigen.h").write_text(_SHIM, encoding="utf-8")
    driver, made = Path(__file__).with_name("cdtau_driver.cpp"), folder / "cdtau.so"
    found = [f"-I{path}" for path in (folder, source, *include)]
    own = ["-DEIGEN_MAX_ALIGN_BYTES=64", "-DUSE_OPENBLAS", "-march=native"]  # of its own Makevars
    command = ["g++", "-std=c++14", "-O2", "-fopenmp", "-shared", "-fPIC", "-w", *own, *found, str(driver)]
    subprocess.run([*command, "-o", str(made), "-lopenblas"], check=True)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its pairs are the threads
    return ctypes.CDLL(str(made))


class Pairs(NamedTuple):
    """What cdtau made of one run."""

    gradient: np.ndarray
    mean: float
    longest: int


class Cdtau:
    """Its gradients of one machine.

    :param start: rows that pairs begin at.
    """

    def __init__(self, library: ctypes.CDLL, params: dict, start: np.ndarray, threads: int) -> None:
        as_column = lambda a: np.asfortranarray(np.asarray(a, np.float32))
        self.weights, self.bias, self.latent_bias = (as_column(params[b]) for b in ("v:h", "v", "h"))
        self.start, self.threads, self.seed = as_column(start.T), threads, 0
        self._run = library.run_pairs
        whole = ctypes.c_int
        self._run.argtypes = [whole, whole, *[_REAL] * 4, *[whole] * 4, _REAL, ctypes.POINTER(whole)]
        self._run.restype = ctypes.c_double

    def __call__(self, most: int) -> Pairs:
        """The sum over all pairs, each stopped after ``most`` sweeps; another draw each time."""
        made, longest = np.zeros_like(self.weights, order="F"), ctypes.c_int()
        self.seed += PAIRS
        shape, given = self.weights.shape, (self.weights, self.bias, self.latent_bias, self.start)
        counts = (self.start.shape[1], self.seed, self.threads, most)
        total = self._run(*shape, *given, *counts, made, ctypes.byref(longest))
        return Pairs(made, total / self.start.shape[1], longest.value)


def measure(name: str, library: ctypes.CDLL, threads: int, repeats: int, latents_first: bool) -> None:
    """One row of the table."""
    rbm, params, v = trained(MODELS[name])
    theirs = Cdtau(library, params, np.asarray(v), threads)
    most = max(theirs(_LONG).longest for _ in range(5)) + 1
    h = rbm.conditional(params, {"v": v}, "h").sample(jax.random.key(1)).astype(jnp.float32)
    start, target, moves = {"v": v, "h": h}, Target(rbm, params), resolve_moves(rbm, None)
    moves = moves[::-1] if latents_first else moves
    both, keys = MarginalGradient((("v",), ("h",))), iter(range(2, 10_000))

    def ours() -> ebmpp.coupling.engine.Outcome:
        key = random.key_pair(jax.random.key(next(keys)))  # another draw each time, as there
        made = run_pairs(target, moves, both, DEFAULT_SLOTS, start, start, key, ONE)
        return jax.block_until_ready(made)

    runs: dict[str, list] = {"ours": [], "theirs": []}
    tasks = {
        "ours": lambda: runs["ours"].append(ours()),
        "theirs": lambda: runs["theirs"].append(theirs(most)),
    }
    found = interleaved(tasks, repeats)
    sweeps = (
        np.mean([run.meeting_time for run in runs["ours"]]) - 1,
        np.mean([r.mean for r in runs["theirs"]]),
    )
    z = _difference([run.total["v:h"] for run in runs["ours"]], [run.gradient for run in runs["theirs"]])
    (_, least, median), (_, their_least, their_median) = found["ours"], found["theirs"]
    ratio = median / their_median
    columns = (
        f"{name:12} {sweeps[0]:6.1f} {sweeps[1]:6.1f}",
        f"{1e3 * least:8.1f} ({1e3 * median:7.1f}) {1e3 * their_least:8.1f} ({1e3 * their_median:7.1f})",
        f"{least / their_least:6.2f} {ratio:6.2f} {ratio * sweeps[1] / sweeps[0]:6.2f} {z:6.2f}",
        f"{sum(run.longest > most for run in runs['theirs'])} of {len(runs['theirs'])}",
    )
    print(*columns, flush=True)


def _difference(ours: list[Array], theirs: list[np.ndarray]) -> float:
    """The distance of the two mean gradients over what their spread over runs lets expect."""
    a, b = np.asarray(ours, float), -np.asarray(theirs, float)
    error = a.var(0, ddof=1) / len(a) + b.var(0, ddof=1) / len(b)
    return float(np.sqrt(((a.mean(0) - b.mean(0)) ** 2).sum() / error.sum()))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--source", type=Path, required=True, help="cdtau's folder src")
    add("--include", type=Path, nargs="*", default=[], help="folders of Eigen and of xsimd 7.1")
    add("--threads", type=int, default=os.cpu_count(), help="of cdtau")
    add("--repeats", type=int, default=15)
    add("--latents-first", action="store_true", help="ours in the order of cdtau")
    add("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    times = "ms: ours (median), cdtau (median)"
    print(
        "model, sweeps a pair: ours, cdtau;", times, "; ratio of least, of medians, of these a sweep; z; cut"
    )
    with tempfile.TemporaryDirectory() as folder:
        library = build(options.source, options.include, Path(folder))
        for name in options.models:
            measure(name, library, options.threads, options.repeats, options.latents_first)


if __name__ == "__main__":
    main()
