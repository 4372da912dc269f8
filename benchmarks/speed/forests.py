# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Joint draws of chains beside a hand-written scan and dynamax, and sweeps of a
critical Ising torus.

Run ``python benchmarks/speed/forests.py chains``, ``chains 1000000 forest`` for one
length and one way, whose peak memory is then that of the process, or ``torus 64`` for a
side of 64. Times are the least of several calls; CPU times of the process are too
coarse for calls of a millisecond.
"""

from collections.abc import Sequence
import importlib
import importlib.util
import resource
import sys
import time
from typing import Any

import networkx as nx
import numpy as np
from numpyro.diagnostics import effective_sample_size

import jax
from jax import Array, lax
import jax.numpy as jnp

import ebmpp
from ebmpp.core import random
from ebmpp.moves import Target, cluster_sweep, forest_sweep, gibbs_sweep
from ebmpp.moves.forests import Forest, draw
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.move import draw_sweep

STATES = 5
CHAINS = 20
CRITICAL = float(np.log1p(np.sqrt(2)) / 2)


def by_hand(unary: Array, transitions: Array, u: Array) -> Array:
    """Filter forward and sample backward, one unit at a time."""

    def forward(message: Array, logs: Array) -> tuple[Array, Array]:
        message = jax.nn.logsumexp(message[:, None] + transitions, axis=0) + logs
        return message, message

    def backward(state: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        state = pick(inputs[0] + transitions[:, state], inputs[1])
        return state, state

    def pick(logs, u):
        return (jnp.cumsum(jax.nn.softmax(logs)) <= u).sum().clip(0, STATES - 1)

    messages = jnp.concatenate([unary[:1], lax.scan(forward, unary[0], unary[1:])[1]])
    last = pick(messages[-1], u[-1])
    rest = lax.scan(backward, last, (messages[:-1], u[:-1]), reverse=True)[1]
    return jnp.append(rest, last)


def least_times(fn: Any, *args: Any, repeats: int = 20) -> tuple[float, float, float]:
    """Return seconds of the first call, and the least wall and CPU times of the others."""
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    first = time.perf_counter() - start
    times = []

    def clocks():
        return np.array([time.perf_counter(), time.process_time()])

    for _ in range(repeats):
        started = clocks()
        jax.block_until_ready(fn(*args))
        times.append(clocks() - started)
    return first, *np.min(times, 0)


def chains(
    lengths: Sequence[int] = (100, 1000, 10_000, 100_000, 1_000_000), only: str = ""
) -> None:
    """Print times of one joint draw of a chain of five states, with transitions that
    all steps share."""
    rivals = {"forest": None, "by hand": jax.jit(by_hand)}
    if importlib.util.find_spec("dynamax") is not None:
        dynamax = importlib.import_module("dynamax.hidden_markov_model")
        start = jnp.full(STATES, 1 / STATES)
        key = jax.random.key(0)
        for name in ("hmm_posterior_sample", "parallel_hmm_posterior_sample"):
            fn = getattr(dynamax, name)
            rivals[name] = jax.jit(
                lambda a, b, _, fn=fn: fn(key, start, jax.nn.softmax(b), a)
            )
    for length in lengths:
        rng = np.random.default_rng(0)
        tables = [
            rng.normal(size=s).astype(np.float32)
            for s in ((length, STATES), (STATES, STATES))
        ]
        u = rng.random(length, np.float32)
        for name, fn in rivals.items():
            if (
                name != only
                if only
                else name.startswith("parallel") and length > 10_000
            ):
                continue  # the parallel form compiles for minutes
            before = peak_memory()
            if fn is None:
                forest = Forest(
                    length, np.stack([np.arange(length - 1), np.arange(1, length)], 1)
                )

                def repeat(table, n=length - 1):
                    return jnp.broadcast_to(table, (n, *table.shape))

                fn = jax.jit(
                    lambda a, b, u, f=forest, repeat=repeat: draw(f, a, repeat(b), u)
                )
            first, least, cpu = least_times(
                fn, *tables, u, repeats=20 if length < 1_000_000 else 5
            )
            times = (
                f"{1e3 * least:.2f} ms, CPU {1e3 * cpu:.2f}, first call {first:.1f} s"
            )
            peak = f"peak memory {before:.2f} to {peak_memory():.2f} GB"
            print(f"{length:>7} steps, {name}: {times}, {peak}", flush=True)


def peak_memory() -> float:
    """Return the peak memory of this process in gigabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def torus(side: int, num_sweeps: int = 8000) -> None:
    """Print autocorrelation times of a critical torus in sweeps, from chains that
    clusters have mixed."""
    lattice = nx.convert_node_labels_to_integers(
        nx.grid_2d_graph(side, side, periodic=True)
    )
    graph = ebmpp.FactorGraph.from_networkx(
        lattice, ebmpp.Spin, shared=True, bias=False
    )
    target = Target(graph, {"x:x": jnp.asarray(CRITICAL)})
    keys = random.fold_in(np.array([0, 1], np.uint32), jnp.arange(CHAINS))
    x = initial_rows(graph, ["x"], keys)
    edges = np.array(lattice.edges)

    def run(x: Any, moves: Any, count: int, first: int) -> tuple[Any, Any]:
        def step(x: Any, number: Array) -> tuple[Any, tuple[Array, Array]]:
            x, _ = draw_sweep(target, x, moves, random.fold_in(keys, number))
            spins = x["x"].T
            return x, (
                (spins[edges[:, 0]] * spins[edges[:, 1]]).mean(0),
                spins.mean(0) ** 2,
            )

        return jax.jit(lambda x: lax.scan(step, x, first + jnp.arange(count)))(x)

    x, _ = run(x, cluster_sweep(graph), 200, 0)
    sweeps = {
        "checkerboard": gibbs_sweep,
        "forests": forest_sweep,
        "clusters": cluster_sweep,
    }
    for name, sweep in sweeps.items():
        moves = sweep(graph)
        _, least, _ = least_times(
            jax.jit(lambda x, moves=moves: draw_sweep(target, x, moves, keys)[0]), x
        )
        count = num_sweeps // 8 if name == "clusters" else num_sweeps
        _, (energy, square) = run(x, moves, count, 1000)
        taus = [
            count * CHAINS / effective_sample_size(np.asarray(v).T)
            for v in (energy, square)
        ]
        sizes = f"tau of energy {taus[0]:.1f}, of m^2 {taus[1]:.1f} sweeps"
        rates = " and ".join(f"{CHAINS / (tau * least):.1f}" for tau in taus)
        times = (
            f"{1e3 * least:.2f} ms per sweep of {CHAINS} chains, {rates} effective "
            "draws per second"
        )
        print(f"{name}: {sizes}; {times}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "torus":
        torus(int(sys.argv[2]))
    elif len(sys.argv) > 2:
        chains([int(sys.argv[2])], " ".join(sys.argv[3:]))
    else:
        chains()
