# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Contrastive divergence with chains of fixed length: plain, persistent, tempered."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Float, PyTree

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Key, Params, Rows, State, checks, random, sharding
from ebmpp.estimators import phases
from ebmpp.estimators.base import (
    Batch,
    Estimate,
    Repeats,
    StepMetrics,
    split_chains,
)
from ebmpp.graph import FactorGraph
from ebmpp.moves import Target
from ebmpp.moves.ensemble import Ensemble, equalize
from ebmpp.moves.sweeps import MovesLike, as_moves, resolve_moves
from ebmpp.moves.tempering import tempered_sweep


@dataclasses.dataclass(frozen=True)
class CD(phases.BiasedEstimator):
    """CD-k: chains of k sweeps from the data rows.

    For the cheapest step. It is biased, more so for chains that mix slowly, and follows
    no likelihood. Missing entries are first drawn by k sweeps, together with the
    latents, given the known ones.

    :param k: number of sweeps.
    :param posterior: such as :class:`~ebmpp.MeanField`, where the latents
        are not one layer.
    :param moves: moves of a sweep, such as :func:`~ebmpp.moves.cluster_sweep`; default:
        Gibbs draws of all layers. Biased moves are accepted.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Hinton (2002); Qiu et al. (2020), eq. 3.
    """

    k: int = 1
    posterior: phases.PosteriorApproximation | None = None
    moves: MovesLike = None

    def __post_init__(self) -> None:
        checks.set_counts(self, "k")
        object.__setattr__(self, "moves", as_moves("CD: moves", self.moves))

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> tuple:
        self.check(graph)
        resolve_moves(graph, self.moves, exact=False)
        return ()

    def estimate(
        self, graph: FactorGraph, params: Params, state: tuple, batch: Batch, key: Key
    ) -> Estimate:
        """Subtract the gradient at reconstructions after k sweeps from the one at the data."""
        batch = self.complete(graph, params, batch, key)
        start = phases.sample_latents(graph, params, batch, random.fold_in(key, 0))
        target = Target(graph, params)
        model, metrics = phases.sweep_chains(
            target, start, self.k, random.fold_in(key, 1), self.moves
        )
        gradient = phases.two_phases(
            target, batch, model, self.posterior, batch.weights
        )
        return Estimate(gradient, state, metrics, self.k)


@dataclasses.dataclass(frozen=True)
class PCD(phases.BiasedEstimator):
    """Persistent CD: chains that continue from step to step while the params move.

    For large machines and long runs, at the cost of :class:`CD`; works best with a
    decreasing rate and inside :class:`~ebmpp.Centered`. Biased where the
    chains mix more slowly than the params move. Missing entries are drawn as in
    :class:`CD`.

    :param k: sweeps per step.
    :param num_chains: number of persistent chains.
    :param posterior: see :class:`CD`, as for ``moves``.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Tieleman (2008), *Training restricted Boltzmann machines using approximations to
       the likelihood gradient*.
    """

    k: int = 1
    num_chains: int = 1000
    posterior: phases.PosteriorApproximation | None = None
    moves: MovesLike = None

    def __post_init__(self) -> None:
        checks.set_counts(self, "k", "num_chains")
        object.__setattr__(self, "moves", as_moves("PCD: moves", self.moves))

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> State:
        self.check(graph)
        resolve_moves(graph, self.moves, exact=False)
        return phases.fresh_chains(graph, self.num_chains, key)

    def adopt(self, before: PyTree, fresh: State) -> State:
        """Continue the chains of another estimator, repeated where they were fewer."""
        return phases.cycle_chains(phases.carried_chains(before), fresh)

    def estimate(
        self, graph: FactorGraph, params: Params, state: State, batch: Batch, key: Key
    ) -> Estimate:
        """Subtract the gradient at the chains, after k more sweeps, from the one at the data."""
        batch = self.complete(graph, params, batch, key)
        target = Target(graph, params)
        model, metrics = phases.sweep_chains(target, state, self.k, key, self.moves)
        gradient = phases.two_phases(target, batch, model, self.posterior)
        sweeps = self.k * self.num_chains / batch.num_rows
        return Estimate(gradient, model, metrics, sweeps)

    def repeats(self, state: State, count: int) -> Repeats:
        return Repeats(self, *split_chains(state, count))


class TemperedMetrics(StepMetrics):
    """Metrics of :class:`TemperedPCD`: rejection rates of swaps, over all neighbours."""

    swap_rejection_mean: Array
    swap_rejection_max: Array


class TemperedState(NamedTuple):
    """State of :class:`TemperedPCD`.

    :param chains: ``(num_chains, num_temperatures, *shape)`` per block, from hot to
        cold.
    :param betas: inverse temperatures, from 0 to 1.
    """

    chains: Rows
    betas: Float[Array, "temperatures"]

    @property
    def model_chains(self) -> Rows:
        """Chains at temperature 1."""
        return {b: v[:, -1] for b, v in self.chains.items()}


@dataclasses.dataclass(frozen=True)
class TemperedPCD(phases.BiasedEstimator):
    """Persistent CD with parallel tempering: replicas from hot to cold swap states.

    For models whose modes plain persistent chains do not leave. The coldest replicas
    are the model's. Replica r has the factors of one block, and beta_r times the
    others. A step repeats k times: all layers and a swap of even neighbours, all layers
    and a swap of odd ones. Each step moves the temperatures a tenth of the way to where
    all neighbours' swaps would be rejected equally often. Biased like :class:`PCD`,
    since the params move.

    :param k: tempered sweeps per step; each costs ``2 * num_temperatures`` plain ones.
    :param num_chains: persistent ensembles of replicas.
    :param num_temperatures: replicas per ensemble, at least 2.
    :param posterior: see :class:`CD`.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Desjardins, Courville, Bengio, Vincent, Delalleau (2010), *Tempered Markov chain
       Monte Carlo for training of restricted Boltzmann machines*.
    2. Syed, Bouchard-Cote, Deligiannidis, Doucet (2022), *Non-reversible parallel
       tempering*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> estimator = ebmpp.TemperedPCD(num_chains=10, num_temperatures=4)
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), estimator=estimator, num_steps=5,
    ...                 rng_key=jax.random.key(0), progress_bar=False)
    >>> fit.estimator_state.betas.shape
    (4,)
    """

    k: int = 1
    num_chains: int = 100
    num_temperatures: int = 10
    posterior: phases.PosteriorApproximation | None = None

    def __post_init__(self) -> None:
        checks.set_counts(self, "k", "num_chains")
        checks.set_counts(self, "num_temperatures", least=2)

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> TemperedState:
        """Draw initial replicas of every block; the betas have equal steps."""
        self.check(graph)
        num = self.num_temperatures
        chains = phases.fresh_chains(graph, self.num_chains * num, key)
        chains = {
            b: v.reshape(self.num_chains, num, *v.shape[1:]) for b, v in chains.items()
        }
        return TemperedState(sharding.rows(chains), jnp.linspace(0.0, 1.0, num))

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: TemperedState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        """Subtract the gradient at the coldest replicas, after k sweeps, from the data's."""
        batch = self.complete(graph, params, batch, key)
        target = Target(graph, params)
        ensemble = Ensemble.at_betas(target, state.betas)

        def half(x, i):
            keys = phases.row_keys(random.fold_in(key, i), self.num_chains)
            x, _, log_ratio = tempered_sweep(graph).half(ensemble, x, keys, i % 2)
            return x, 1 - jnp.exp(jnp.minimum(0.0, log_ratio)).mean(0)

        chains, rejection = lax.scan(half, dict(state.chains), jnp.arange(2 * self.k))
        rejection = rejection.mean(0)
        change = equalize(state.betas, rejection) - state.betas
        state = TemperedState(chains, state.betas + 0.1 * change)
        gradient = phases.two_phases(target, batch, state.model_chains, self.posterior)
        metrics = TemperedMetrics(
            swap_rejection_mean=rejection.mean(), swap_rejection_max=rejection.max()
        )
        sweeps = self.k * self.num_chains * self.num_temperatures / batch.num_rows
        return Estimate(gradient, state, metrics, sweeps)

    def repeats(self, state: TemperedState, count: int) -> Repeats:
        groups, size = split_chains(state.chains, count)
        states = tuple(TemperedState(chains, state.betas) for chains in groups)
        return Repeats(dataclasses.replace(self, num_chains=size), states, size)
