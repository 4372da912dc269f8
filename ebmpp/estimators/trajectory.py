# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Parallel trajectory tempering: chains that swap states with frozen models of the run."""

import dataclasses
from functools import partial
from typing import NamedTuple

from jaxtyping import Float, Int32

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.annealing import Path, particles, reference
from ebmpp.annealing.path import Rung
from ebmpp.core import (
    Eta,
    Key,
    Keys,
    Params,
    PerRow,
    Rows,
    checks,
    full_precision,
    random,
    sharding,
)
from ebmpp.estimators import phases
from ebmpp.estimators.base import Batch, Estimate, StepMetrics
from ebmpp.graph import FactorGraph, energy
from ebmpp.moves import couplings


class PTTState(NamedTuple):
    """State of :class:`PTT`; blocks that are summed out of the swaps are left out.

    :param models: params of the reservoir and of the frozen models,
        ``(num_models, ...)``, the oldest first.
    :param chains: of the frozen models and of the current one,
        ``(num_chains, num_models, *shape)``.
    :param reservoir: draws of the oldest model, ``(num_chains, reservoir, *shape)``.
    :param collected: draws of the lowest frozen model, for the next reservoir.
    :param age: steps since a model was frozen.
    """

    eta0: Eta
    models: Params
    chains: Rows
    reservoir: Rows
    collected: Rows
    age: Int32[Array, ""]
    num_frozen: Int32[Array, ""]

    @property
    def model_chains(self) -> Rows:
        """Chains of the current model."""
        return _states_of(self.chains, -1)


class PTTMetrics(StepMetrics):
    """Metrics of :class:`PTT`.

    :param swap_acceptance: between the current model and the last frozen one.
    :param swap_acceptance_min: of all neighbours.
    """

    swap_acceptance: Array
    swap_acceptance_min: Array
    num_frozen: Array


@dataclasses.dataclass(frozen=True)
class PTT(phases.BiasedEstimator):
    """Parallel trajectory tempering: chains that swap states with models of earlier steps.

    For runs on which the chains of :class:`PCD` freeze, at a few times its cost. A
    ladder of models leads from a reservoir of draws of an old model over frozen params
    of the run to the current ones. Each step moves all chains by a Gibbs sweep and
    swaps the states of neighbours, from the reservoir up, accepted by the exact ratio
    of their densities. When swaps between the current model and the last frozen one are
    accepted too seldom, the current params are frozen, the oldest model leaves the
    ladder, and the draws of the lowest frozen model, collected since the last time,
    become the reservoir.

    **Biased** like :class:`PCD`, since the params move; a mode that appears after the
    reservoir was drawn is reached by Gibbs sweeps alone. The history has
    ``swap_acceptance`` between the current model and the last frozen one (near 0 where
    params move faster than the ladder follows), ``swap_acceptance_min`` of all
    neighbours, and ``num_frozen``.

    :param num_chains: chains of each model of the ladder.
    :param k: sweeps and rounds of swaps per step.
    :param num_models: models of the ladder above the reservoir, with the current one;
        at least 2.
    :param acceptance: the current params are frozen when swaps are accepted less often,
        in (0, 1).
    :param reservoir: draws in the reservoir per chain; as many steps at least lie
        between frozen models.
    :param posterior: see :class:`CD`.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Bereux, Decelle, Furtlehner, Seoane (2026), *Parallel trajectory tempering*,
       arXiv:2607.27077. The defaults are theirs, but for their 2,000 chains.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.PTT(num_chains=50), progress_bar=False)
    >>> fit.history.num_frozen.values.tolist()
    [0, 0, 0, 0, 0]
    """

    num_chains: int = 1000
    k: int = 1
    num_models: int = 2
    acceptance: float = 0.25
    reservoir: int = 10
    posterior: phases.PosteriorApproximation | None = None

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_chains", "k", "reservoir")
        checks.set_counts(self, "num_models", least=2)
        checks.number("PTT: acceptance", self.acceptance, above=0, below=1)

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> PTTState:
        """Draw all chains and the reservoir by a particle system.

        All models of the ladder are the first one.
        """
        self.check(graph)
        eta0 = reference.base_rates(graph, data)
        size = self.num_models + self.reservoir
        path = Path.line(graph, eta0, params)
        system = particles.start_systems(path, key, 1, self.num_chains * size)
        index = jax.random.categorical(
            random.as_key(random.fold_in(key, 2)),
            system.log_weights[0],
            shape=(self.num_chains, size),
        )
        x = sharding.rows({b: v[index] for b, v in system.x.items()})
        reservoir = {b: v[:, self.num_models :] for b, v in x.items()}
        return PTTState(
            eta0=eta0,
            models=jax.tree.map(lambda a: jnp.stack([a] * self.num_models), params),
            chains={b: v[:, : self.num_models] for b, v in x.items()},
            reservoir=reservoir,
            collected=jax.tree.map(jnp.zeros_like, reservoir),
            age=jnp.int32(0),
            num_frozen=jnp.int32(0),
        )

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: PTTState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        """Subtract the gradient at the current model's swapped chains from the data's."""
        complete = self.complete(graph, params, batch, key)
        knots = jax.tree.map(
            lambda a, b: jnp.concatenate([a[:1], a, b[None]]), state.models, params
        )
        count = self.num_models + 2
        betas = jnp.ones(count).at[0].set(0.0)
        path = Path(graph, state.eta0, betas, knots, jnp.int32(count))
        state, rates = self._move(path, state, random.fold_in(key, 0))
        negative = _mean_gradient(path, params, state.model_chains)
        positive = phases.positive_gradient(graph, params, complete, self.posterior)
        weight = batch.weights.sum()
        gradient = jax.tree.map(lambda p, n: p - weight * n, positive, negative)
        is_due = (rates[-1] < self.acceptance) & (state.age >= self.reservoir)
        freeze = partial(self._freeze, params)
        state = lax.cond(is_due, freeze, lambda state: state, state)
        metrics = PTTMetrics(
            swap_acceptance=rates[-1],
            swap_acceptance_min=rates.min(),
            num_frozen=state.num_frozen,
        )
        # a swap costs as much as a sweep
        sweeps = 2 * self.k * self.num_chains * self.num_models / batch.num_rows
        return Estimate(gradient, state, metrics, sweeps)

    def _move(
        self, path: Path, state: PTTState, key: Key
    ) -> tuple[PTTState, Float[Array, "num_models"]]:
        """Sweep and swap k times; return also the last acceptance rates.

        Draws of the lowest model are collected.
        """
        rows = jnp.arange(self.num_chains)

        def move_once(number, carry):
            chains, reservoir, _ = carry
            keys = phases.row_keys(random.fold_in(key, number), self.num_chains)
            words = random.words(random.fold_in(keys, 0), 1)[:, 0]
            slot = (words % jnp.uint32(self.reservoir)).astype(jnp.int32)
            x = {}
            for b, v in chains.items():
                drawn = reservoir[b][rows, slot]
                x[b] = jnp.concatenate([drawn[:, None], v], 1)
            x, rates = sweep_and_swap(path, x, random.fold_in(keys, 1))
            chains = {b: v[:, 1:] for b, v in x.items()}
            reservoir = {
                b: v.at[rows, slot].set(x[b][:, 0]) for b, v in reservoir.items()
            }
            return chains, reservoir, rates

        start = (state.chains, state.reservoir, jnp.zeros(self.num_models))
        chains, reservoir, rates = lax.fori_loop(0, self.k, move_once, start)
        slot = state.age % self.reservoir
        collected = {
            b: v.at[:, slot].set(chains[b][:, 0]) for b, v in state.collected.items()
        }
        state = state._replace(
            chains=chains, reservoir=reservoir, collected=collected, age=state.age + 1
        )
        return state, rates

    def _freeze(self, params: Params, state: PTTState) -> PTTState:
        """Freeze the current params.

        Draws that one chain has collected go to the reservoirs of several.
        """
        slots = jnp.arange(self.reservoir)
        rows = (jnp.arange(self.num_chains)[:, None] + slots + 1) % self.num_chains
        models = jax.tree.map(
            lambda a, b: jnp.concatenate([a[1:], b[None]]), state.models, params
        )
        chains = {
            b: jnp.concatenate([v[:, 1:], v[:, -1:]], 1)
            for b, v in state.chains.items()
        }
        return state._replace(
            models=models,
            chains=chains,
            reservoir={b: v[rows, slots] for b, v in state.collected.items()},
            age=jnp.zeros_like(state.age),
            num_frozen=state.num_frozen + 1,
        )


def sweep_and_swap(
    path: Path, x: Rows, keys: Keys
) -> tuple[Rows, Float[Array, "neighbours"]]:
    """Move the upper model of each pair of neighbours by a sweep, then swap both.

    Pairs follow each other from the lowest one up. A swap is accepted with the
    Metropolis ratio of the product of all models, which it leaves invariant.

    :param path: its last knots are the models.
    :param x: kept blocks, ``(rows, models, *shape)``.
    :return: the states, and the mean acceptance probability of each pair.
    """
    num_models = next(iter(x.values())).shape[1]
    first = len(path.betas) - num_models
    log_u = jnp.log(random.uniforms(random.fold_in(keys, 0, 1), num_models - 1))

    def climb_once(i, carry):
        low = path.at((first + i).astype(log_u.dtype))
        high = path.at((first + i + 1).astype(log_u.dtype))
        x, rates = carry
        lower = _states_of(x, i)
        upper = _states_of(x, i + 1)
        upper = path.sweep(high, upper, None, random.fold_in(keys, i))
        log_ratio = _gain(path, low, high, lower) - _gain(path, low, high, upper)
        swap = partial(couplings.where_rows, log_u[:, i] < log_ratio)
        below = jax.tree.map(swap, upper, lower)
        above = jax.tree.map(swap, lower, upper)
        x = {
            b: v.at[:, i].set(below[b]).at[:, i + 1].set(above[b]) for b, v in x.items()
        }
        rate = jnp.exp(jnp.minimum(log_ratio, 0)).mean()
        return x, rates.at[i].set(rate)

    start = (dict(x), jnp.zeros(num_models - 1))
    return lax.fori_loop(0, num_models - 1, climb_once, start)


def _states_of(x: Rows, model: Array | int) -> Rows:
    """Return the states of one model."""
    return {b: v[:, model] for b, v in x.items()}


def _gain(path: Path, low: Rung, high: Rung, x: Rows) -> PerRow:
    """Return the log-ratio of the densities of ``high`` and ``low`` at rows."""
    here = path.evaluate(low.params, x)
    there = path.evaluate(high.params, x)
    return path.gain(low, high, here, there)


@full_precision
def _mean_gradient(path: Path, params: Params, x: Rows) -> Params:
    """Return the mean of dE/dparams over rows, the other blocks summed out."""
    return jax.grad(lambda p: -energy.summed_out(path.graph, p, x, path.summed).mean())(
        params
    )
