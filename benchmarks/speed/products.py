# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sweeps of Hyperedges and Coupling beside Pairwise, Table and a Factor written by hand.

The units of the first models are the 120 dyads of 16 nodes, with 1,680 two-stars
(pairs) and 560 triangles; those of the others are 20 sites of 21 categories, all 190
pairs coupled. Each time is the least CPU time of interleaved runs: of a sweep of 100
chains, or of a gradient of 1,000 rows.

``python benchmarks/speed/products.py``
"""

from collections.abc import Callable
import itertools
import time

import numpy as np

import jax

import ebmpp
from ebmpp import (
    Bernoulli,
    Categorical,
    Coupling,
    Factor,
    FactorGraph,
    Hyperedges,
    Pairwise,
    Table,
)
from ebmpp.core import random
from ebmpp.graph import energy
from ebmpp.moves import Target, gibbs, gibbs_sweep
from ebmpp.moves.move import draw_sweep

KEY = jax.random.key(0)
CHAINS = 100
SWEEPS = 50
ROWS = 1000


def sweeps(family: ebmpp.Family, factor: Factor) -> Callable[[], jax.Array]:
    """Return a function that runs some sweeps of all chains."""
    graph = FactorGraph({"x": family}, factors=[factor])
    keys = random.fold_in(random.key_pair(KEY), np.arange(CHAINS))
    moves = gibbs_sweep(graph)
    target = Target(graph, graph.init(KEY))

    @jax.jit
    def run(x):
        def body(i, x):
            return draw_sweep(target, x, moves, random.fold_in(keys, i))[0]

        return jax.lax.fori_loop(0, SWEEPS, body, x)

    x = gibbs.initial_rows(graph, ["x"], keys)
    return lambda: jax.block_until_ready(run(x))


def gradients(family: ebmpp.Family, factor: Factor) -> Callable[[], jax.Array]:
    """Return a function that computes a gradient in the params."""
    graph = FactorGraph({"x": family}, factors=[factor])
    keys = random.fold_in(random.key_pair(KEY), np.arange(ROWS))
    x = gibbs.initial_rows(graph, ["x"], keys)

    @jax.jit
    def run(params):
        return energy.weighted_gradient(graph, params, x, np.full(ROWS, 1 / ROWS))

    params = graph.init(KEY)
    return lambda: jax.block_until_ready(run(params))


def compare(
    what: str, runs: dict[str, Callable[[], jax.Array]], terms: int, count: int
) -> None:
    """Print times of interleaved runs, each of ``count`` sweeps or gradients."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(10):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    for name, listed in times.items():
        least = min(listed[1:]) / count
        rows = CHAINS if count > 1 else ROWS
        nanoseconds = 1e9 * least / terms / rows
        print(
            f"{what:20} {name:12} {1e3 * least:8.3f} ms {nanoseconds:8.2f} ns per term and row"
        )


def dyads(nodes: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the number of pairs of nodes, and their two-stars and triangles."""
    number = {p: i for i, p in enumerate(itertools.combinations(range(nodes), 2))}
    pairs = itertools.combinations(number, 2)
    stars = [[number[a], number[b]] for a, b in pairs if set(a) & set(b)]
    triangles = [
        [number[p] for p in itertools.combinations(corners, 2)]
        for corners in itertools.combinations(range(nodes), 3)
    ]
    return len(number), np.array(stars), np.array(triangles)


def main() -> None:
    """Print all figures."""
    size, stars, triangles = dyads(16)
    family = Bernoulli(size)
    pairs = {
        "Pairwise": sweeps(family, Pairwise("x", stars, shared=True)),
        "Hyperedges": sweeps(family, Hyperedges("x", stars, shared=True)),
    }
    compare("sweep, two-stars", pairs, len(stars), SWEEPS)

    def by_hand(w, t):
        return -(w * t[triangles].prod(-1)).sum()

    hand = Factor("x", energy=by_hand, init=np.zeros(()), lateral={"x": stars})
    corners = {
        "Hyperedges": sweeps(family, Hyperedges("x", triangles, shared=True)),
        "Factor": sweeps(family, hand),
    }
    compare("sweep, triangles", corners, len(triangles), SWEEPS)

    edges = list(itertools.combinations(range(20), 2))
    sites = Categorical(20, 21)
    potts = [Coupling("x", edges), Table("x", units=edges), Pairwise("x", edges)]
    for what, make, count in [("sweep", sweeps, SWEEPS), ("gradient", gradients, 1)]:
        runs = {type(factor).__name__: make(sites, factor) for factor in potts}
        compare(f"{what}, 20 sites", runs, len(edges), count)


if __name__ == "__main__":
    main()
