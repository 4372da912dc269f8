# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Time per Gibbs sweep of energies written as functions, against declared pairs.

    python benchmarks/speed/any_energy.py [--rounds 7] [--chains 100]

Models of one table take turns in one process, and the minimum of the rounds is printed,
with the evaluations of the energy per sweep and the seconds of the first call.
"""

import argparse
from collections.abc import Callable
import itertools
import time

import networkx as nx
import numpy as np

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Categorical, Factor, FactorGraph, Family, Pairwise, Spin
from ebmpp.core import random
from ebmpp.moves import gibbs_sweep
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target

SWEEPS = 10


def torus(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return the energy of an Ising torus, or of a Potts torus for one-hot units."""
    return -weight * sum((x * jnp.roll(x, 1, axis)).sum() for axis in (0, 1))


def comparisons(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return the same for spins, by comparisons."""
    return -weight * sum(
        jnp.where(x == jnp.roll(x, 1, axis), 1.0, -1.0).sum() for axis in (0, 1)
    )


def all_pairs(weights: jax.Array, x: jax.Array) -> jax.Array:
    """Return the energy of all pairs of units."""
    first, second = np.triu_indices(x.size, 1)
    return -jnp.vdot(weights, x[first] * x[second])


def windows(params: dict, x: jax.Array) -> jax.Array:
    """Return the energy of a network of windows of 5x5 pixels."""
    image = jax.lax.conv_general_dilated(x[None, None], params["k"], (1, 1), "VALID")
    return jnp.tensordot(jnp.tanh(image[0]), params["v"], (0, 0)).sum()


def dense(params: dict, x: jax.Array) -> jax.Array:
    """Return the energy of a network with one hidden layer."""
    return jnp.tanh(x.ravel() @ params["k"] + params["b"]) @ params["v"]


def torus_pairs(side: int) -> np.ndarray:
    """Return the pairs of neighbours by number."""
    graph = nx.grid_2d_graph(side, side, periodic=True)
    return np.array([(side * a + b, side * c + d) for (a, b), (c, d) in graph.edges])


def case(
    family: Family, kind: str, energy: Callable, init: object, pairs: np.ndarray
) -> FactorGraph:
    """Return a graph of one block whose units interact."""
    options = {"affine": False} if kind == "any energy" else {"lateral": {"x": pairs}}
    factor = Factor("x", energy=energy, init=init, name="w", **options)
    if kind == "Pairwise":
        shared = np.ndim(init) == 0
        factor = Pairwise("x", pairs, shared=shared, init=init, name="w")
    return FactorGraph({"x": family}, factors=[factor])


def tables() -> dict[str, dict[str, FactorGraph]]:
    """Return graphs to compare, by table and name."""
    bonds = torus_pairs(64)
    ising = {
        kind: case(Spin((64, 64)), kind, torus, 0.3, bonds)
        for kind in ("Pairwise", "any energy", "lateral")
    }
    ising["by comparisons"] = case(
        Spin((64, 64)), "any energy", comparisons, 0.3, bonds
    )
    bonds = torus_pairs(32)
    potts = {
        kind: case(Categorical((32, 32), 3), kind, torus, 0.3, bonds)
        for kind in ("Pairwise", "any energy", "lateral")
    }
    pairs = np.array(list(itertools.combinations(range(128), 2)))
    weights = np.random.default_rng(0).normal(size=len(pairs)) / 20
    glass = {
        kind: case(Bernoulli(128), kind, all_pairs, weights, pairs)
        for kind in ("Pairwise", "any energy", "lateral")
    }
    generator = np.random.default_rng(1)
    window = {"k": generator.normal(size=(8, 1, 5, 5)), "v": generator.normal(size=8)}
    layer = {
        "k": generator.normal(size=(784, 128)) / 10,
        "b": np.zeros(128),
        "v": generator.normal(size=128),
    }
    images = Bernoulli((28, 28))
    networks = {
        "8 filters of 5x5": case(images, "any energy", windows, window, pairs),
        "128 hidden units": case(images, "any energy", dense, layer, pairs),
    }
    return {
        "Ising torus 64x64": ising,
        "Potts torus 32x32, 3 values": potts,
        "all pairs of 128 bits": glass,
        "networks over 28x28 bits": networks,
    }


def sweeps(graph: FactorGraph, chains: int) -> Callable[[], object]:
    """Return a compiled call of ten sweeps."""
    moves = gibbs_sweep(graph)

    @jax.jit
    def run(target, x, keys):
        def step(i, x):
            return draw_sweep(target, x, moves, random.fold_in(keys, i))[0]

        return jax.lax.fori_loop(0, SWEEPS, step, x)

    numbers = jnp.arange(chains, dtype=jnp.uint32)
    keys = random.fold_in(random.key_pair(jax.random.key(0)), numbers)
    target = Target(graph, graph.init(jax.random.key(1)))
    x = initial_rows(graph, ["x"], keys)
    return lambda: jax.block_until_ready(run(target, x, keys))


def main() -> None:
    """Print the time per sweep of each graph and its ratio to the first of its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chains", type=int, default=100)
    options = parser.parse_args()
    for title, graphs in tables().items():
        print(f"\n{title}, {options.chains} chains")
        calls = {name: sweeps(g, options.chains) for name, g in graphs.items()}
        times = {name: [] for name in calls}
        first = {}
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            first[name] = time.perf_counter() - start
        for _ in range(options.rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(1e3 * (time.perf_counter() - start) / SWEEPS)
        best = {name: min(values) for name, values in times.items()}
        for name, value in best.items():
            ratio = value / next(iter(best.values()))
            split = graphs[name].splits["x"]
            path = type(split.fast_paths[0]).__name__
            count = split.evaluations(split.inner_factors[0])
            print(
                f"{name:18s} {value:9.3f} ms per sweep {ratio:8.2f}  {path:10s} "
                f"{count:5d} evaluations  {first[name]:5.1f} s"
            )


if __name__ == "__main__":
    main()
