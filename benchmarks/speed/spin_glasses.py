# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Ground states of many spin glasses by one call, against exact ones.

Couplings of +1 and -1 on a free lattice of 8x8 spins. Parallel tempering and local
search take the params of all glasses, with a leading axis. CPU seconds are those of a
fresh process without a cache of programs, and of a second search in that process. The
exact least energies are found afterwards, row by row: after each row the least energy
for each of its states is known.

``python benchmarks/speed/spin_glasses.py [--glasses 100] [--seeds 1 2 3]``
"""

import argparse
from collections.abc import Sequence
import itertools
import os
import subprocess
import sys
import time

import networkx as nx
import numpy as np
from numpyro.infer import MCMC

import jax
import jax.numpy as jnp

import ebmpp

SIDE = 8
BETA = 1.5
LATTICE = nx.grid_2d_graph(SIDE, SIDE)


def random_couplings(seed: int, glasses: int) -> np.ndarray:
    """Return couplings of the lattice's edges, ``(glasses, edges)``."""
    shape = glasses, LATTICE.number_of_edges()
    return np.random.default_rng(seed).choice([-1.0, 1.0], shape).astype(np.float32)


def search(couplings: np.ndarray, seed: int, options: argparse.Namespace) -> np.ndarray:
    """Return the least energies that a search finds, ``(glasses,)``."""
    glass = ebmpp.FactorGraph.from_networkx(LATTICE, family=ebmpp.Spin, bias=False)
    params = {"x:x": jnp.asarray(BETA * couplings)}
    mcmc = MCMC(
        ebmpp.ParallelTempering(glass, num_temperatures=options.temperatures),
        num_warmup=options.sweeps,
        num_samples=options.sweeps,
        thinning=2,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), params)
    draws = jnp.moveaxis(mcmc.get_samples()["x"], 1, 0)  # (glasses, draws, spins)
    modes = ebmpp.local_search(
        glass, params, rng_key=jax.random.key(seed + 1), init={"x": draws}
    )
    energies = jax.vmap(glass.energy)(params, modes.state) / BETA
    return np.asarray(energies).min(1)


def least_energies(couplings: np.ndarray) -> np.ndarray:
    """Return exact least energies, ``(glasses,)``, by elimination of row after row."""
    rows = np.array(list(itertools.product([-1, 1], repeat=SIDE)))
    by_edge = dict(zip(LATTICE.edges, couplings.T, strict=True))
    least = np.zeros((len(couplings), len(rows)))
    for i in range(SIDE):
        if i:
            across = np.stack([by_edge[(i - 1, j), (i, j)] for j in range(SIDE)], -1)
            between = (across[:, None] * rows) @ rows.T
            least = (least[:, :, None] - between).min(1)
        for j in range(SIDE - 1):
            bond = by_edge[(i, j), (i, j + 1)]
            least = least - bond[:, None] * (rows[:, j] * rows[:, j + 1])
    return least.min(1)


def measure(options: argparse.Namespace) -> None:
    """Print CPU seconds of two searches, and how many ground states each finds."""
    (seed,) = options.seeds
    imports = time.process_time()
    for turn in range(2):
        start = time.process_time()
        couplings = random_couplings(seed + 1000 * turn, options.glasses)
        energies = search(couplings, seed, options)
        seconds = time.process_time() - start
        exact = least_energies(couplings)
        assert (energies > exact - 1e-3).all(), "a state below the exact least energy"
        share = np.count_nonzero(energies < exact + 1e-3)
        print(
            f"seed {seed}, search {turn + 1}: {share} of {len(exact)} ground states, "
            f"{seconds:.2f} CPU-seconds, and {imports:.2f} of imports",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every seed in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--glasses", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--temperatures", type=int, default=8)
    parser.add_argument("--sweeps", type=int, default=250)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        measure(options)
        return
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    for seed in options.seeds:
        command = [sys.executable, __file__, "--measure", "--seeds", str(seed)]
        for name in ("glasses", "temperatures", "sweeps"):
            command += [f"--{name}", str(getattr(options, name))]
        subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
