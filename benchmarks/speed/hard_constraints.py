# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Models with impossible states: log Z of lattices against transfer matrices, and sweeps.

The hard-core gas and the colourings by three colours of free 8x8 and 5x5 lattices are
summed exactly, row by row. Sweeps of a table are timed beside sweeps of a ``Pairwise``
factor on a 32x32 lattice.

``python benchmarks/speed/hard_constraints.py``
"""

import itertools
import time

import networkx as nx
import numpy as np

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Categorical, FactorGraph, Pairwise, Table
from ebmpp.core import random
from ebmpp.moves import Target, gibbs, gibbs_sweep
from ebmpp.moves.move import draw_sweep

EXCLUSION = np.array([[0.0, 0.0], [0.0, -np.inf]])
DIFFERENT = np.where(np.eye(3) > 0, -np.inf, 0.0)
KEY = jax.random.key(0)


def log_z_by_rows(table: np.ndarray, side: int) -> float:
    """Return log Z of a free lattice by the transfer matrix of its rows."""
    rows = np.array(list(itertools.product(range(len(table)), repeat=side)))
    within = table[rows[:, :-1], rows[:, 1:]].sum(1)
    rows = rows[within > -np.inf]
    between = np.exp(table[rows[:, None], rows[None]].sum(-1))
    vector = np.ones(len(rows))
    for _ in range(side - 1):
        vector = between @ vector
    return float(np.log(vector.sum()))


def estimate(name: str, family: ebmpp.Family, table: np.ndarray) -> None:
    side = family.shape[0]
    lattice = nx.grid_2d_graph(side, side)
    factor = Table("x", units=lattice, log_weights=table)
    graph = FactorGraph({"x": family}, factors=[factor])
    params = graph.init(KEY)
    exact = log_z_by_rows(table, side)
    print(f"{name} {side}x{side}: exact {exact:.4f}")
    for seed in range(3):
        key = jax.random.key(seed)
        start = time.perf_counter()
        sides = ebmpp.bracket(graph, params, rng_key=key, num_temperatures=1000)
        seconds = time.perf_counter() - start
        system = ebmpp.smc(graph, params, rng_key=key)
        print(
            f"  seed {seed}: {sides!r} in {seconds:.1f} s; smc "
            f"{system.log_partition:.4f} +- {system.standard_error:.2g}"
        )


def time_sweep(graph: FactorGraph, params: dict, rows: int = 100) -> float:
    """Return the milliseconds of a sweep of some chains, the least of five runs."""
    keys = random.fold_in(random.key_pair(KEY), np.arange(rows))
    moves = gibbs_sweep(graph)
    target = Target(graph, params)

    @jax.jit
    def run(x):
        def body(i, x):
            return draw_sweep(target, x, moves, random.fold_in(keys, i))[0]

        return jax.lax.fori_loop(0, 50, body, x)

    x = gibbs.initial_rows(graph, ["x"], keys)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        times.append(time.perf_counter() - start)
    return min(times[1:]) / 50 * 1e3


def main() -> None:
    """Print all figures."""
    estimate("hard-core gas", Bernoulli((8, 8)), EXCLUSION)
    estimate("3-colourings", Categorical((5, 5), 3), DIFFERENT)
    lattice = nx.grid_2d_graph(32, 32)
    family = Categorical((32, 32), 3)
    table = Table("x", units=lattice, log_weights=DIFFERENT)
    colouring = FactorGraph({"x": family}, factors=[table])
    potts = FactorGraph({"x": family}, factors=[Pairwise("x", lattice, shared=True)])
    print(f"sweep by Table: {time_sweep(colouring, colouring.init(KEY)):.2f} ms")
    print(f"sweep by Pairwise: {time_sweep(potts, {'x:x': jnp.array(-8.0)}):.2f} ms")


if __name__ == "__main__":
    main()
