# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Lattices and large networks: Gibbs sweeps against the same by hand in JAX and against THRML.

``python benchmarks/lattice.py`` prints the minimum of interleaved repeats on an Ising torus of 64x64 units
and 100 chains (target: no slower than the loop by hand, faster than THRML, which is left out where it is not
installed); then declaration, first call and a sweep of larger and stranger networks. ``--mcmc`` times draws
of that torus and of Boltzmann machines inside NumPyro's ``MCMC``, which keeps them. ``--coupled`` adds pairs
of coupled chains that run until they meet, ``--clusters`` single units against clusters at the critical
coupling: how often a sweep's draw is a new one, per sweep and per second, and when pairs meet.
"""

import argparse
from functools import partial
import time
from typing import Any
import warnings

from arviz_stats.base import array_stats
from handwritten import interleaved
import networkx as nx
import numpy as np
from numpyro.infer import MCMC

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, FactorGraph, Spin
from ebmpp.core import random
from ebmpp.errors import UnmetError
from ebmpp.moves import cluster_sweep
from ebmpp.moves.layer import gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target

try:
    import thrml
    from thrml.models import IsingEBM, IsingSamplingProgram
except ImportError:
    thrml = None

SIDE, CHAINS, SWEEPS, COUPLING = 64, 100, 10, 0.4
CRITICAL = 0.5 * np.log(1 + np.sqrt(2))
MIXED, BLOCK = 32, 100  # chains whose autocorrelation is measured, and sweeps a call


def torus(side: int) -> nx.Graph:
    """A square lattice without edges."""
    return nx.grid_2d_graph(side, side, periodic=True)


@partial(jax.jit, static_argnums=(0, 4))
def ours(graph: FactorGraph, params: dict, x: Array, pair: Array, num: int) -> Array:
    """Sweeps that follow from the declaration."""
    rows = random.fold_in(pair, jnp.arange(len(x)))
    target, moves = Target(graph, params), gibbs_sweep(graph)
    one = lambda i, x: draw_sweep(target, x, moves, random.fold_in(rows, i))[0]
    return jax.lax.fori_loop(0, num, one, {"x": x})["x"]


def by_hand(lattice: nx.Graph) -> Any:
    """The checkerboard loop that one writes: neighbours by index, a uniform a unit."""
    number = {node: i for i, node in enumerate(lattice.nodes)}
    around = np.array([[number[m] for m in lattice[n]] for n in lattice.nodes])
    color = np.array([(a + b) % 2 for a, b in lattice.nodes])
    units = [np.flatnonzero(color == c) for c in range(2)]

    @jax.jit
    def run(coupling: Array, x: Array, key: Array) -> Array:
        def sweep(i: Array, x: Array) -> Array:
            for c, at in enumerate(units):
                field = coupling * x[:, around[at]].sum(-1)
                u = jax.random.uniform(jax.random.fold_in(key, 2 * i + c), field.shape)
                x = x.at[:, at].set(jnp.where(u < jax.nn.sigmoid(2 * field), 1.0, -1.0))
            return x

        return jax.lax.fori_loop(0, SWEEPS, sweep, x)

    return run


def by_thrml(lattice: nx.Graph) -> Any:
    """The same model as THRML's users write it, a chain a lane of ``vmap``."""
    nodes = {node: thrml.SpinNode() for node in lattice.nodes}
    edges = [(nodes[a], nodes[b]) for a, b in lattice.edges]
    every = list(nodes.values())
    model = IsingEBM(every, edges, jnp.zeros(len(every)), jnp.full(len(edges), COUPLING), jnp.array(1.0))
    blocks = [thrml.Block([nodes[n] for n in lattice.nodes if sum(n) % 2 == c]) for c in range(2)]
    program = IsingSamplingProgram(model, blocks, clamped_blocks=[])
    schedule = thrml.SamplingSchedule(n_warmup=SWEEPS - 1, n_samples=1, steps_per_sample=1)

    @jax.jit
    def run(x: Array, keys: Array) -> Any:
        start = [
            x[:, np.array([i for i, n in enumerate(lattice.nodes) if sum(n) % 2 == c])] for c in range(2)
        ]
        one = lambda key, *s: thrml.sample_states(key, program, schedule, list(s), [], [thrml.Block(every)])
        return jax.vmap(one)(keys, *start)

    return run


def against_peers(repeats: int) -> None:
    """The torus."""
    lattice = torus(SIDE)
    graph = FactorGraph.from_networkx(lattice, family=Spin, shared=True, bias=False)
    x = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, (CHAINS, SIDE**2)), 1.0, -1.0)
    params, key = {"x:x": jnp.asarray(COUPLING)}, jax.random.key(1)
    pair, hand = random.key_pair(key), by_hand(lattice)
    tasks = {
        "ours": lambda: ours(graph, params, x, pair, SWEEPS),
        "by hand": lambda: hand(params["x:x"], x, key),
    }
    if thrml is not None:
        peer, keys, states = by_thrml(lattice), jax.random.split(key, CHAINS), x > 0
        tasks["THRML"] = lambda: peer(states, keys)
    print(f"Ising {SIDE}x{SIDE}, {CHAINS} chains, {SWEEPS} sweeps")
    print(f"{'':10} {'ms':>8} {'ours / it':>10} {'first s':>8}")
    found = interleaved(tasks, repeats)
    for name, (first, best) in found.items():
        print(f"{name:10} {1e3 * best:8.1f} {found['ours'][1] / best:10.2f} {first:8.2f}")


def networks() -> dict[str, tuple[Any, int]]:
    """Larger and stranger networks, and chains on each."""
    return {
        "torus 256x256": (lambda: torus(256), 10),
        "Barabasi-Albert, 100,000 nodes, 3 edges each": (
            lambda: nx.barabasi_albert_graph(100_000, 3, seed=0),
            10,
        ),
        "complete, 128 nodes": (lambda: nx.complete_graph(128), 100),
        "complete, 784 nodes": (lambda: nx.complete_graph(784), 100),
    }


def large() -> None:
    """Declaration, first call and a sweep."""
    print(
        f"\n{'network':46} {'parts':>6} {'chains':>6} {'declare s':>10} {'first call s':>13} {'sweep ms':>9}"
    )
    for name, (make, chains) in networks().items():
        network = make()
        begin = time.perf_counter()
        graph = FactorGraph.from_networkx(network, family=Spin)
        declared = time.perf_counter() - begin
        params = jax.tree.map(lambda a: 0.01 * jnp.ones_like(a), graph.init(jax.random.key(0)))
        x, pair = jnp.ones((chains, len(network))), random.key_pair(jax.random.key(1))
        call = lambda graph=graph, params=params, x=x, pair=pair: ours(graph, params, x, pair, SWEEPS)
        first, best = interleaved({"ours": call}, 3)["ours"]
        parts = len(graph.layers)
        print(f"{name:46} {parts:6d} {chains:6d} {declared:10.2f} {first:13.2f} {1e3 * best / SWEEPS:9.2f}")


def within_mcmc(repeats: int) -> None:
    """Draws of vectorized chains, all of them kept."""
    lattice = FactorGraph.from_networkx(torus(SIDE), family=Spin, shared=True, bias=False)
    small, large = (ebmpp.layered(v=Bernoulli(v), h=Bernoulli(h)) for v, h in ((64, 32), (784, 500)))
    cases: dict[str, tuple[Any, int]] = {
        "torus 64x64": (ebmpp.BlockedGibbs(lattice), 200),
        "784x500": (ebmpp.BlockedGibbs(large), 100),
        "64x32": (ebmpp.BlockedGibbs(small), 1000),
        "64x32, coupled pairs": (ebmpp.MaximalCoupling(small), 1000),
    }
    print(f"\nMCMC, {CHAINS} vectorized chains\n{'kernel':22} {'a draw, ms':>10} {'first s':>8}")
    for name, (kernel, draws) in cases.items():
        mcmc = MCMC(
            kernel,
            num_warmup=0,
            num_samples=draws,
            num_chains=CHAINS,
            chain_method="vectorized",
            progress_bar=False,
        )
        params = kernel.graph.init(jax.random.key(0))
        params = {"x:x": jnp.asarray(COUPLING)} if kernel.graph is lattice else params

        def run(mcmc: MCMC = mcmc, params: Any = params) -> Any:
            mcmc.run(jax.random.key(1), params)
            return mcmc.last_state

        first, best = interleaved({name: run}, repeats)[name]
        print(f"{name:22} {1e3 * best / draws:10.3f} {first:8.2f}", flush=True)


def coupled() -> None:
    """Pairs on the torus, from random spins, by coupling."""
    graph = FactorGraph.from_networkx(torus(SIDE), family=Spin, shared=True, bias=False)
    print(f"\n{'coupling constant':18} {'coupling':>9} {'met':>5} {'mean tau':>9} {'max':>6} {'s':>7}")
    for constant in (0.1, 0.2, 0.3, 0.36):
        for kind in ("maximal", "common"):
            begin = time.perf_counter()
            found = ebmpp.unbiased_expectation(
                graph,
                {"x:x": jnp.asarray(constant)},
                _magnetization,
                rng_key=jax.random.key(0),
                num_pairs=CHAINS,
                coupling=kind,
                max_sweeps=3000,
            )
            tau = found.meeting_time[found.met]
            told = f"{tau.mean():9.1f} {tau.max():6.0f}" if len(tau) else f"{'':9} {'':6}"
            took = time.perf_counter() - begin
            print(f"{constant:18.2f} {kind:>9} {int(found.met.sum()):5d} {told} {took:7.1f}")


@partial(jax.jit, static_argnums=(0, 1))
def follow(graph: FactorGraph, made: tuple, params: dict, x: Array, pair: Array) -> tuple:
    """The last states, and every chain's squared magnetisation and energy a spin after every sweep."""
    rows, target = random.fold_in(pair, jnp.arange(len(x))), Target(graph, params)

    def one(x: Array, i: Array) -> tuple[Array, tuple[Array, Array]]:
        x = draw_sweep(target, {"x": x}, made, random.fold_in(rows, i))[0]["x"]
        return x, (x.mean(-1) ** 2, graph.energy({"x:x": jnp.ones(())}, {"x": x}) / x.shape[-1])

    return jax.lax.scan(one, x, jnp.arange(BLOCK))


def autocorrelation(graph: FactorGraph, made: tuple, params: dict, seconds: float) -> str:
    """Sweeps that are worth one independent draw, and independent draws a second."""
    x, pair = jnp.ones((MIXED, graph.families["x"].size)), random.key_pair(jax.random.key(2))
    begin, seen, took = time.perf_counter(), [], []
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        x, values = jax.block_until_ready(follow(graph, made, params, x, random.fold_in(pair, len(seen))))
        took.append(time.perf_counter() - start)
        seen.append(np.asarray(values))
    kept = len(seen) // 4  # the rest is the warm-up, and the compilation
    sweep = min(took[kept:]) / BLOCK
    told = f"{1e3 * sweep:9.2f} {BLOCK * (len(seen) - kept):7d}"
    for values in np.concatenate(seen[kept:], axis=1):
        ess = float(array_stats.ess(values.astype(float), chain_axis=1, draw_axis=0))
        told += f" {values.size / ess:9.1f} {ess / (sweep * len(values)):9.2f}"
    return told


def meetings(graph: FactorGraph, made: tuple, params: dict) -> str:
    """Pairs from random spins."""
    begin = time.perf_counter()
    try:
        found = ebmpp.unbiased_expectation(
            graph,
            params,
            _magnetization,
            rng_key=jax.random.key(0),
            num_pairs=CHAINS,
            coupling=made,
            max_sweeps=2000,
            unmet="drop",
        )
    except UnmetError:
        return "   0"
    tau = found.meeting_time[found.met]
    return f"{len(tau):4d} {tau.mean():7.1f} {tau.max():7.0f} {time.perf_counter() - begin:6.1f}"


def clusters(seconds: float) -> None:
    """Single units against clusters."""
    print(
        f"Ising, {MIXED} chains: sweeps that are worth one independent draw (tau), and such draws a second, "
        f"of the squared magnetisation and of the energy; {CHAINS} pairs from random spins, 2000 sweeps"
    )
    head = f"{'side':>4} {'coupling':>8} {'':8} {'sweep ms':>9} {'sweeps':>7} {'m2: tau':>9} {'a second':>9}"
    print(f"{head} {'e: tau':>9} {'a second':>9} {'met':>4} {'mean':>7} {'last':>7} {'s':>6}")
    for side, coupling in ((32, CRITICAL), (64, CRITICAL), (64, 0.3)):
        graph = FactorGraph.from_networkx(torus(side), family=Spin, shared=True, bias=False)
        params = {"x:x": jnp.asarray(coupling)}
        for name, made in (("Gibbs", resolve_moves(graph, None)), ("clusters", cluster_sweep(graph))):
            told = autocorrelation(graph, made, params, seconds)
            print(f"{side:4} {coupling:8.4f} {name:8} {told} {meetings(graph, made, params)}", flush=True)


def _magnetization(x: dict[str, Array]) -> Array:
    return x["x"].mean()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--mcmc", action="store_true", help="only draws inside NumPyro's MCMC")
    parser.add_argument("--coupled", action="store_true", help="pairs that run until they meet, too")
    parser.add_argument("--clusters", action="store_true", help="only single units against clusters")
    parser.add_argument("--seconds", type=float, default=60.0, help="a kernel, with --clusters")
    args = parser.parse_args()
    if args.clusters:
        warnings.simplefilter("ignore")  # pairs that did not meet are told
        clusters(args.seconds)
        return
    if args.mcmc:
        within_mcmc(args.repeats)
        return
    against_peers(args.repeats)
    large()
    if args.coupled:
        coupled()


if __name__ == "__main__":
    main()
