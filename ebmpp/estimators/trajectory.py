# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Parallel trajectory tempering: persistent chains that swap states with frozen models of the run."""

import dataclasses
from functools import partial
from typing import NamedTuple

from jaxtyping import Float, Int32

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.annealing import Path, particles, reference
from ebmpp.core import Blocks, Eta, Key, Keys, Params, Rows, checks, random, sharding
from ebmpp.core.backend import full_precision
from ebmpp.estimators import phases
from ebmpp.estimators.base import Batch, Estimate, Estimator
from ebmpp.graph import FactorGraph, energy
from ebmpp.moves import couplings, swaps


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
    def coldest(self) -> Rows:
        """Chains of the current model."""
        return {b: v[:, -1] for b, v in self.chains.items()}


@dataclasses.dataclass(frozen=True)
class PTT(Estimator):
    """Parallel trajectory tempering: persistent chains that swap states with models of earlier steps.

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
    posterior: phases.Posterior | None = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_chains", "k", "reservoir")
        checks.set_counts(self, "num_models", least=2)
        checks.number("PTT: acceptance", self.acceptance, above=0, below=1)

    def init(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> PTTState:
        """Draw all chains and the reservoir by a particle system; all models of the ladder are the first."""
        phases.check_posterior(graph, "PTT", self.posterior)
        eta0 = reference.base_rates(graph, data)
        size = self.num_models + self.reservoir
        system = particles.start_systems(
            Path.line(graph, eta0, params), key, 1, self.num_chains * size
        )
        draws = random.as_key(random.fold_in(key, 2))
        index = jax.random.categorical(
            draws, system.log_weights[0], shape=(self.num_chains, size)
        )
        x = sharding.rows({b: v[index] for b, v in system.x.items()})
        chains = {b: v[:, : self.num_models] for b, v in x.items()}
        reservoir = {b: v[:, self.num_models :] for b, v in x.items()}
        models = jax.tree.map(lambda a: jnp.stack([a] * self.num_models), params)
        collected = jax.tree.map(jnp.zeros_like, reservoir)
        zero = jnp.zeros((), jnp.int32)
        return PTTState(eta0, models, chains, reservoir, collected, zero, zero)

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: PTTState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        """Subtract the gradient at the chains of the current model, swept and swapped, from the data's."""
        complete = phases.complete_batch(
            graph, params, batch, self.k, random.fold_in(key, 9), self.posterior
        )
        knots = jax.tree.map(
            lambda a, b: jnp.concatenate([a[:1], a, b[None]]), state.models, params
        )
        count = self.num_models + 2
        path = Path(
            graph, state.eta0, jnp.ones(count).at[0].set(0.0), knots, jnp.int32(count)
        )
        state, rates = self._moved(path, state, random.fold_in(key, 0))
        negative = _gradient(path, params, state.coldest)
        positive = phases.positive_gradient(graph, params, complete, self.posterior)
        is_due = (rates[-1] < self.acceptance) & (state.age >= self.reservoir)
        state = lax.cond(
            is_due, partial(self._frozen, params), lambda state: state, state
        )
        metrics = {"swap_acceptance": rates[-1], "swap_acceptance_min": rates.min()}
        gradient = jax.tree.map(
            lambda p, n: p - batch.weights.sum() * n, positive, negative
        )
        # a swap costs as much
        sweeps = 2 * self.k * self.num_chains * self.num_models / len(batch.weights)
        return Estimate(
            gradient, state, metrics | {"num_frozen": state.num_frozen}, sweeps
        )

    def _moved(self, path: Path, state: PTTState, key: Key) -> tuple[PTTState, Array]:
        """Sweep and swap k times, and collect draws of the lowest model; return the last acceptance rates."""

        def move(
            number: Array, carry: tuple[Rows, Rows, Array]
        ) -> tuple[Rows, Rows, Array]:
            chains, reservoir, _ = carry
            keys = phases.row_keys(random.fold_in(key, number), self.num_chains)
            words = random.words(random.fold_in(keys, 0), 1)
            slot = (words % jnp.uint32(self.reservoir)).astype(jnp.int32)
            x = {
                b: jnp.concatenate([swaps.take(reservoir[b], slot), v], 1)
                for b, v in chains.items()
            }
            x, rates = climb(path, x, random.fold_in(keys, 1))
            put = jax.vmap(lambda v, at, new: v.at[at[0]].set(new[0]))
            reservoir = {b: put(v, slot, x[b]) for b, v in reservoir.items()}
            return {b: v[:, 1:] for b, v in x.items()}, reservoir, rates

        start = state.chains, state.reservoir, jnp.zeros(self.num_models)
        chains, reservoir, rates = lax.fori_loop(0, self.k, move, start)
        slot = state.age % self.reservoir
        collected = {
            b: v.at[:, slot].set(chains[b][:, 0]) for b, v in state.collected.items()
        }
        state = state._replace(
            chains=chains, reservoir=reservoir, collected=collected, age=state.age + 1
        )
        return state, rates

    def _frozen(self, params: Params, state: PTTState) -> PTTState:
        """Freeze the current params; draws that one chain has collected go to the reservoirs of several."""
        slots = jnp.arange(self.reservoir)
        rows = (jnp.arange(self.num_chains)[:, None] + slots + 1) % self.num_chains
        return state._replace(
            models=jax.tree.map(
                lambda a, b: jnp.concatenate([a[1:], b[None]]), state.models, params
            ),
            chains={
                b: jnp.concatenate([v[:, 1:], v[:, -1:]], 1)
                for b, v in state.chains.items()
            },
            reservoir={b: v[rows, slots] for b, v in state.collected.items()},
            age=jnp.zeros_like(state.age),
            num_frozen=state.num_frozen + 1,
        )


def climb(path: Path, x: Rows, keys: Keys) -> tuple[Blocks, Float[Array, "pairs"]]:
    """From the lowest pair of neighbouring models up, move the upper one by a sweep, then swap both.

    A swap is accepted with the Metropolis ratio of the product of all models, which it
    leaves invariant.

    :param path: its last knots are the models.
    :param x: kept blocks, ``(rows, models, *shape)``.
    :return: the states, and the mean acceptance probability of each pair.
    """
    count = next(iter(x.values())).shape[1]
    first = len(path.betas) - count
    log_u = jnp.log(random.uniform(random.words(random.fold_in(keys, 0, 1), count - 1)))

    def move(i: Array, carry: tuple[Blocks, Array]) -> tuple[Blocks, Array]:
        x, rates = carry
        low, high = (path.at((first + i + n).astype(log_u.dtype)) for n in range(2))
        here, there = ({b: v[:, i + n] for b, v in x.items()} for n in range(2))
        there = path.sweep(high, there, None, random.fold_in(keys, i))

        def gain(x):
            return path.gain(
                low, high, path.slope(low.params, x), path.slope(high.params, x)
            )

        ratio = gain(here) - gain(there)

        def select(a, b):
            return couplings.where_rows(log_u[:, i] < ratio, a, b)

        x = {b: v.at[:, i].set(select(there[b], here[b])) for b, v in x.items()}
        x = {b: v.at[:, i + 1].set(select(here[b], there[b])) for b, v in x.items()}
        return x, rates.at[i].set(jnp.exp(jnp.minimum(ratio, 0)).mean())

    return lax.fori_loop(0, count - 1, move, (dict(x), jnp.zeros(count - 1)))


@full_precision
def _gradient(path: Path, params: Params, x: Rows) -> Params:
    """Return the mean of dE/dparams over rows, the other blocks summed out."""
    return jax.grad(lambda p: -energy.summed_out(path.graph, p, x, path.summed).mean())(
        params
    )
