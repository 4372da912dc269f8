# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Meeting times of pairs under random tanh networks and an RBM as a black box: proposals
from the informed mixture, with K tries per move, beside local informed moves and Gibbs.

Run ``python benchmarks/speed/informed_mixture.py 64 1.5 1 4 16 informed gibbs``: units,
scale, and ways, which are numbers of tries, "informed" (10 steps per sweep) or "gibbs";
``rbm`` in place of units and scale takes 64x20 trained on digits. Both chains of a pair
start from independent units. Times are sweeps beyond the lag, of 40 pairs; the last
number is CPU seconds, compilation included.
"""

import dataclasses
import sys
import time
from typing import Any

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import Bernoulli, Factor, FactorGraph
from ebmpp.core import random
from ebmpp.moves import Target, informed_sweep, mixture_sweep
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.move import draw_sweep

PAIRS = 40
COMPONENTS = 1000
LIMIT = 1000  # sweeps
WARMUP = 60  # sweeps of the pool from independent units


def network(params: Any, v: Array) -> Array:
    s = jnp.tanh((2 * v - 1) @ params["A"])
    return -(v @ params["b"] + jnp.tanh(s @ params["B"]) @ params["u"])


def free_energy(params: Any, v: Array) -> Array:
    hidden = jax.nn.softplus(v @ params["v:h"] + params["h"])
    return -(v @ params["v"] + hidden.sum())


def random_network(units: int, scale: float) -> FactorGraph:
    hidden = units if units <= 64 else units // 2
    draw = np.random.default_rng(5).standard_normal
    params = {
        "A": scale * draw((units, hidden)) / np.sqrt(units),
        "B": draw((hidden, hidden // 2)) / np.sqrt(hidden),
        "u": scale * draw(hidden // 2),
        "b": 0.3 * draw(units),
    }
    return declare(units, network, params)


def declare(units: int, energy: Any, params: Any) -> FactorGraph:
    factor = Factor("v", energy=energy, init=params, affine=False)
    return FactorGraph({"v": Bernoulli(units)}, factors=[factor])


def trained_rbm() -> FactorGraph:
    rbm = ebmpp.layered(v=Bernoulli(64), h=Bernoulli(20))
    rate = optax.linear_schedule(0.05, 0.0, 3000)
    fit = ebmpp.fit(
        rbm,
        (ebmpp.data.digits() > 0.5).reshape(-1, 64).astype(np.float32),
        estimator=ebmpp.PCD(num_chains=200),
        optimizer=optax.sgd(rate),
        num_steps=3000,
        batch_size=100,
        rng_key=jax.random.key(0),
        progress_bar=False,
    )
    return declare(64, free_energy, fit.params)


def past_states(graph: FactorGraph, params: Any) -> dict[str, Array]:
    """Return states of independent chains, by the local moves of the sweep."""
    moves = mixture_sweep(graph)[:-1]
    keys = random.fold_in(np.array([0, 9], np.uint32), np.arange(COMPONENTS))

    def step(i, x):
        return draw_sweep(target, x, moves, random.fold_in(keys, i))[0]

    target = Target(graph, params)
    start = initial_rows(graph, graph.families, random.fold_in(keys, 0))
    return jax.jit(lambda x: lax.fori_loop(1, WARMUP, step, x))(start)


def main() -> None:
    name, *ways = sys.argv[1:]
    if name == "rbm":
        graph = trained_rbm()
    else:
        scale, *ways = ways
        graph = random_network(int(name), float(scale))
    params = graph.init(jax.random.key(0))
    pool = past_states(graph, params)
    for way in ways:
        began = time.process_time()
        coupling = {"gibbs": None, "informed": informed_sweep}.get(way)
        if way.isdecimal():
            *local, move = mixture_sweep(graph)
            move = dataclasses.replace(move, components=COMPONENTS, tries=int(way))
            coupling = (*local, move)
        estimate = ebmpp.unbiased_expectation(
            graph,
            params,
            lambda x: x["v"].mean(),
            rng_key=jax.random.key(1),
            num_pairs=PAIRS,
            coupling=coupling,
            pool=pool if way.isdecimal() else None,
            independent_starts=True,
            k=1,
            max_sweeps=LIMIT,
            unmet="drop",
        )
        late = estimate.meeting_time[estimate.met] - estimate.lag
        print(
            f"{name} {way}: mean {late.mean():.1f}, longest {late.max():.0f}, "
            f"{estimate.num_unmet} unmet, acceptance {estimate.acceptance:.3f}, "
            f"largest weight {estimate.largest_weight:.3g}, "
            f"{time.process_time() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
