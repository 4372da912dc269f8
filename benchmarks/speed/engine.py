# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled pairs on trained machines: the engine, masked lockstep of the same pairs, and
a lower bound.

Each machine is trained until its pairs take some ten to thirty sweeps to meet; "16x16
heavy" until single pairs take more than a thousand. Larger ones learn scikit-learn's
digits, enlarged.

``python benchmarks/speed/engine.py`` prints mean meeting times by coupling.
"""

from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp.core import random
from ebmpp.coupling.accumulators import EnergyGradient
from ebmpp.coupling.engine import run_pairs
from ebmpp.coupling.slots import Window
from ebmpp.graph.energy import weighted_gradient
from ebmpp.moves.move import Move, coupled_sweep, draw_sweep, rows_equal
from ebmpp.moves.sweeps import CouplingLike, resolve_moves
from ebmpp.moves.target import Target

SLOTS = 64  # of the engine on a CPU, for many pairs
PAIRS = 1000
_WINDOW = Window(*(jnp.int32(n) for n in (1, 1, 1, 0)))  # k = m = lag = 1, no limit


class Recipe(NamedTuple):
    """Size of a machine, and how it is trained."""

    visible: int
    latent: int
    estimator: ebmpp.estimators.Estimator
    rate: float
    steps: int


MODELS = {
    "16x16": Recipe(16, 16, ebmpp.PCD(num_chains=500), 0.1, 400),
    "16x16 heavy": Recipe(16, 16, ebmpp.PCD(num_chains=500), 0.1, 2400),
    "200x100": Recipe(200, 100, ebmpp.CD(), 0.05, 300),
    "784x500": Recipe(784, 500, ebmpp.CD(), 0.05, 40),
}


def images(side: int) -> np.ndarray:
    """Return scikit-learn's digits, enlarged to ``side`` x ``side`` binary pixels."""
    pixels = np.kron(ebmpp.data.digits().reshape(-1, 8, 8), np.ones((4, 4)))[
        :, 2:30, 2:30
    ]
    grid = (np.arange(side) * 28 / side).astype(int)
    return (
        (pixels[:, grid][:, :, grid] > 0.5).astype(np.float32).reshape(-1, side * side)
    )


class Pairs:
    """Pairs of one machine, from rows of its data.

    :param name: a key of :data:`MODELS`.
    :param num: how many pairs.
    """

    def __init__(self, name: str, num: int = PAIRS) -> None:
        visible, latent, estimator, rate, steps = MODELS[name]
        self.graph = ebmpp.layered(
            v=ebmpp.Bernoulli(visible), h=ebmpp.Bernoulli(latent)
        )
        if visible == 16:
            rows = ebmpp.data.bars_and_stripes(4)
        else:
            rows = images(int(np.ceil(visible**0.5)))[:, :visible]
        fit = ebmpp.fit(
            self.graph,
            rows,
            rng_key=jax.random.key(0),
            estimator=estimator,
            optimizer=optax.sgd(rate),
            num_steps=steps,
            batch_size=min(100, len(rows)),
            progress_bar=False,
        )
        self.params = fit.params
        v = jnp.asarray(np.resize(rows, (num, visible)), jnp.float32)
        h = self.graph.conditional(self.params, {"v": v}, "h").sample(jax.random.key(1))
        self.start = {"v": v, "h": h.astype(jnp.float32)}
        self.key = random.key_pair(jax.random.key(2))
        self.moves = resolve_moves(self.graph, None)

    def engine(self) -> tuple[dict[str, Array], Array]:
        """Return the gradient's sum and meeting times."""
        return self._run(self.moves)

    def meeting_times(self, coupling: CouplingLike) -> np.ndarray:
        """Return the meeting times by another coupling."""
        return np.asarray(self._run(resolve_moves(self.graph, coupling))[1])

    def _run(self, moves: tuple[Move, ...]) -> tuple[dict[str, Array], Array]:
        target = Target(self.graph, self.params)
        outcome = run_pairs(
            target,
            moves,
            EnergyGradient(),
            None,
            self.start,
            self.start,
            self.key,
            _WINDOW,
        )
        return outcome.total, outcome.meeting_time

    def lockstep(self) -> tuple[dict[str, Array], Array]:
        """Return the same from a loop over all pairs until the last has met."""
        return lockstep(self.graph, self.moves, self.params, self.start, self.key)

    def bound(self) -> Array:
        """Compute the matrix products of as many pair-sweeps, and nothing else."""
        rows = jnp.zeros((2 * SLOTS, self.start["v"].shape[1]))
        return _products(self.params["v:h"], rows, max(1, self.num_sweeps // SLOTS))

    @cached_property
    def num_sweeps(self) -> int:
        """Coupled sweeps of all pairs until they meet."""
        return int((np.asarray(self.lockstep()[1]) - 1).sum())


@partial(jax.jit, static_argnums=(0, 1))
def lockstep(
    graph: ebmpp.FactorGraph,
    moves: tuple[Move, ...],
    params: dict,
    start: dict,
    key: Array,
) -> tuple[dict[str, Array], Array]:
    """Run all pairs together until the last has met; met pairs are masked."""
    num = len(start["v"])
    target = Target(graph, params)
    keys = random.fold_in(key, jnp.arange(num))
    x, _ = draw_sweep(target, start, moves, random.fold_in(keys, 1))
    z = {b: jnp.stack([x[b], start[b]]) for b in x}
    tau = jnp.where(jnp.stack([rows_equal(v) for v in z.values()]).all(0), 1, -1)
    total = weighted_gradient(graph, params, x, jnp.ones(num))

    def cond(carry: tuple) -> Array:
        return (carry[2] < 0).any()

    def body(carry: tuple) -> tuple:
        z, t, tau, total = carry
        z, *_ = coupled_sweep(target, z, moves, random.fold_in(keys, t + 1))
        met = jnp.stack([rows_equal(v) for v in z.values()]).all(0)
        tau = jnp.where((tau < 0) & met, t + 1, tau)
        weight = (tau < 0).astype(jnp.float32)
        both = {b: v.reshape(2 * num, *v.shape[2:]) for b, v in z.items()}
        step = weighted_gradient(
            graph, params, both, jnp.concatenate([weight, -weight])
        )
        return z, t + 1, tau, jax.tree.map(jnp.add, total, step)

    _, _, tau, total = lax.while_loop(cond, body, (z, jnp.int32(1), tau, total))
    return total, tau


@partial(jax.jit, static_argnums=2)
def _products(w: Array, rows: Array, count: int) -> Array:
    def body(_, v):
        return lax.optimization_barrier(lax.optimization_barrier(v @ w) @ w.T)

    return lax.fori_loop(0, count, body, rows)


def main() -> None:
    """Print mean meeting times, with standard errors, by machine and coupling."""
    for name in MODELS:
        pairs = Pairs(name)
        for coupling in ("maximal", ("maximal", "common")):
            tau = pairs.meeting_times(coupling)
            error = tau.std() / len(tau) ** 0.5
            print(f"{name:12} {coupling!s:23} {tau.mean():6.2f} +- {error:.2f}")


if __name__ == "__main__":
    main()
