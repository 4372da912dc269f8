# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The engine against masked lockstep and against the bound of its matrix products.

``python benchmarks/engine.py`` trains an RBM of each size until its pairs take some ten to thirty sweeps to
meet, then runs 1000 pairs (k = lag = 1) with the engine and with a lockstep loop that draws the same pairs,
all in one process, interleaved, minimum of several. "bound" is the time of four products a pair-sweep,
nothing else. "16x16 heavy" has been trained until single pairs take more than a thousand sweeps.
``--pairs 100`` runs fewer, and ``--slots 64`` not as many at once as suit them.
MNIST is used where ``EBMPP_DATA_DIR`` has it, else scikit-learn's digits, enlarged.
"""

import argparse
from functools import partial
from typing import NamedTuple

from handwritten import interleaved
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp.core import random
from ebmpp.coupling.accumulators import EnergyGradient, Function
from ebmpp.coupling.engine import Window, run_pairs
from ebmpp.graph.energy import weighted_gradient
from ebmpp.moves.move import Move, coupled_sweep, draw_sweep, equal
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target

DEFAULT_SLOTS = 64  # on a CPU, of many pairs

PAIRS = 1000
ONE = Window(*(jnp.int32(n) for n in (1, 1, 1, 0)))


def images(side: int) -> np.ndarray:
    """Binary images of side x side pixels."""
    try:
        pixels = ebmpp.data.mnist()[:20000].reshape(-1, 28, 28)
    except FileNotFoundError:
        pixels = np.kron(ebmpp.data.digits().reshape(-1, 8, 8), np.ones((4, 4)))[:, 2:30, 2:30]
    step = 28 / side
    grid = (np.arange(side) * step).astype(int)
    return (pixels[:, grid][:, :, grid] > 0.5).astype(np.float32).reshape(-1, side * side)


class Recipe(NamedTuple):
    """How a model is trained before it is measured."""

    visible: int
    hidden: int
    estimator: object
    rate: float
    steps: int


MODELS = {
    "16x16": Recipe(16, 16, ebmpp.PCD(num_chains=500), 0.1, 400),
    "16x16 heavy": Recipe(16, 16, ebmpp.PCD(num_chains=500), 0.1, 2400),
    "200x100": Recipe(200, 100, ebmpp.CD(), 0.05, 600),
    "784x500": Recipe(784, 500, ebmpp.CD(), 0.05, 110),
    "784x1000": Recipe(784, 1000, ebmpp.CD(), 0.05, 120),
}


def trained(recipe: Recipe) -> tuple[ebmpp.FactorGraph, dict, Array]:
    """An RBM, its params, and rows to start pairs from."""
    visible, hidden, estimator, rate, steps = recipe
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(visible), h=ebmpp.Bernoulli(hidden))
    if visible == 16:
        rows = ebmpp.data.bars_and_stripes(4)
    else:
        rows = images(int(np.ceil(visible**0.5)))[:, :visible]
    fit = ebmpp.fit(
        rbm,
        rows,
        rng_key=jax.random.key(0),
        estimator=estimator,
        optimizer=optax.sgd(rate),
        num_steps=steps,
        batch_size=min(100, len(rows)),
        progress_bar=False,
    )
    return rbm, fit.params, jnp.asarray(np.resize(rows, (PAIRS, visible)), jnp.float32)


@partial(jax.jit, static_argnums=(0, 1))
def lockstep(
    rbm: ebmpp.FactorGraph, moves: tuple[Move, ...], params: dict, start: dict, pair: Array
) -> tuple[dict, Array]:
    """All pairs together until the last has met, finished ones masked."""
    pairs = len(start["v"])
    keys = random.fold_in(pair, jnp.arange(pairs))
    x, _ = draw_sweep(Target(rbm, params), start, moves, random.fold_in(keys, 1))
    z = {b: jnp.stack([x[b], start[b]]) for b in x}
    tau = jnp.where(jnp.stack([equal(v) for v in z.values()]).all(0), 1, -1)
    total = weighted_gradient(rbm, params, x, jnp.ones(pairs))

    def going(carry: tuple) -> Array:
        return (carry[2] < 0).any()

    def one(carry: tuple) -> tuple:
        z, t, tau, total = carry
        z, *_ = coupled_sweep(Target(rbm, params), z, moves, random.fold_in(keys, t + 1))
        met = jnp.stack([equal(v) for v in z.values()]).all(0)
        tau = jnp.where((tau < 0) & met, t + 1, tau)
        weight = (tau < 0).astype(jnp.float32)
        both = {b: v.reshape(2 * pairs, *v.shape[2:]) for b, v in z.items()}
        step = weighted_gradient(rbm, params, both, jnp.concatenate([weight, -weight]))
        return z, t + 1, tau, jax.tree.map(jnp.add, total, step)

    _, _, tau, total = lax.while_loop(going, one, (z, jnp.int32(1), tau, total))
    return total, tau


@partial(jax.jit, static_argnums=2)
def products(w: Array, rows: Array, count: int) -> Array:
    """``count`` times two products of 2 x slots rows: what that many sweeps of the slots cost at least."""

    def one(_: int, v: Array) -> Array:
        return lax.optimization_barrier(lax.optimization_barrier(v @ w) @ w.T)

    return lax.fori_loop(0, count, one, rows)


def gradient(x: dict) -> dict:
    """Minus the energy's gradient at one state, as a user writes it: a number a param."""
    return {**x, "v:h": jnp.outer(x["v"], x["h"])}


def of_a_function(recipe: Recipe, repeats: int) -> None:
    """The mean of :func:`gradient` by sums over blocks of pairs, and the engine's own gradient."""
    rbm, params, v = trained(recipe)
    h = rbm.conditional(params, {"v": v}, "h").sample(jax.random.key(1)).astype(jnp.float32)
    start, pair, target = {"v": v, "h": h}, random.key_pair(jax.random.key(2)), Target(rbm, params)
    moves, state = resolve_moves(rbm, None), tuple((b, a.shape[1:], str(a.dtype)) for b, a in start.items())
    sums = Function(gradient, state).in_blocks(PAIRS)
    run = lambda of: run_pairs(target, moves, of, DEFAULT_SLOTS, start, start, pair, ONE)
    found = interleaved(
        {
            "lockstep, the energy's gradient": lambda: lockstep(rbm, moves, params, start, pair),
            "engine, the energy's gradient": lambda: run(EnergyGradient()),
            "engine, a function of as many numbers": lambda: run(sums).total,
        },
        repeats,
    )
    print(f"{sums.size()} numbers of a state, {'a row a pair' if sums.per_job else 'in blocks'}")
    for name, (first, best) in found.items():
        ratio = next(iter(found.values()))[1] / best
        print(f"{name:38} {1e3 * best:8.1f} ms, lockstep over it {ratio:5.1f}, first call {first:5.1f} s")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--function", action="store_true", help="only a mean of as many numbers as params")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--coupling", default=None, help="of every layer; the default one unless given")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="at most as many as by default")
    parser.add_argument("--slots", type=int, help="pairs at once; as many as suit unless given")
    args = parser.parse_args()
    if args.function:
        of_a_function(MODELS["200x100"], args.repeats)
        return
    print(
        f"{'model':12} {'tau mean':>8} {'max':>5} {'engine ms':>10} {'lockstep ms':>12} "
        f"{'ratio':>6} {'of bound':>9} {'compile s':>10}"
    )
    for name in args.models:
        rbm, params, v = trained(MODELS[name])
        measure(name, rbm, params, v[: args.pairs], args)


def measure(name: str, rbm: ebmpp.FactorGraph, params: dict, v: Array, options: argparse.Namespace) -> None:
    """One row of the table."""
    h = rbm.conditional(params, {"v": v}, "h").sample(jax.random.key(1)).astype(jnp.float32)
    start, pair = {"v": v, "h": h}, random.key_pair(jax.random.key(2))
    moves = resolve_moves(rbm, options.coupling)
    target = Target(rbm, params)
    engine = lambda: run_pairs(target, moves, EnergyGradient(), options.slots, start, start, pair, ONE)
    tau, check = np.asarray(engine().meeting_time), np.asarray(lockstep(rbm, moves, params, start, pair)[1])
    agree = (tau == check).mean()
    pair_sweeps = int((tau - 1).sum())
    rows = jnp.zeros((2 * DEFAULT_SLOTS, v.shape[1]))
    count = max(1, pair_sweeps // DEFAULT_SLOTS)
    found = interleaved(
        {
            "engine": engine,
            "lockstep": lambda: lockstep(rbm, moves, params, start, pair),
            "bound": lambda: products(params["v:h"], rows, count),
        },
        options.repeats,
    )
    run_pairs.clear_cache()
    compiled = interleaved({"engine": engine}, 1)["engine"][0] - found["engine"][1]
    ours, theirs, bound = (found[name][1] for name in ("engine", "lockstep", "bound"))
    print(
        f"{name:12} {tau.mean():8.1f} {tau.max():5d} {1e3 * ours:10.1f} {1e3 * theirs:12.1f} "
        f"{theirs / ours:6.1f} {bound / ours:9.2f} {compiled:10.1f}"
        + ("" if agree == 1 else f"  ({agree:.1%} of tau agree)"),
        flush=True,
    )


if __name__ == "__main__":
    main()
