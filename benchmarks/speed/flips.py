# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Spin flips per nanosecond of Ising tori, by loops of ``BlockedGibbs`` in a user's ``jit``.

``python benchmarks/speed/flips.py`` prints the best of six loops for four sizes. Loops
start from chains that have made one loop.
"""

from pathlib import Path
import sys
import time

import networkx as nx

import jax
from jax import lax
import jax.numpy as jnp

sys.path[:0] = [str(Path(__file__).parents[2])]
import ebmpp  # noqa: E402

SIZES = ((64, 100), (256, 64), (256, 1), (1024, 8))  # side and chains
FLIPS = 2e8  # per loop


def flips_per_nanosecond(side: int, chains: int) -> float:
    """Return the spins that are drawn per nanosecond of wall time."""
    lattice = nx.grid_2d_graph(side, side, periodic=True)
    graph = ebmpp.FactorGraph.from_networkx(
        lattice, family=ebmpp.Spin, shared=True, bias=False
    )
    params = {"x:x": jnp.float32(0.4)}
    kernel = ebmpp.BlockedGibbs(graph)
    keys = jax.random.split(jax.random.key(0), chains)
    state = kernel.init(keys, 0, None, (params,), {})
    sweeps = max(4, int(FLIPS / (side**2 * chains)))

    @jax.jit
    def loop(state):
        def sweep(_, state):
            return kernel.sample(state, (params,), {})

        return lax.fori_loop(0, sweeps, sweep, state)

    state = jax.block_until_ready(loop(state))
    times = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(loop(state))
        times.append(time.perf_counter() - start)
    return sweeps * side**2 * chains / min(times) / 1e9


if __name__ == "__main__":
    for side, chains in SIZES:
        rate = flips_per_nanosecond(side, chains)
        print(f"{side}x{side}, {chains} chains: {rate:.2f} per nanosecond", flush=True)
