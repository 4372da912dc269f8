# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Persistent contrastive divergence with tempered chains."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Float

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Params, Rows
from ebmpp.estimators.base import Batch, Estimate, Estimator, Repeats, split_chains
from ebmpp.estimators.phases import (
    Posterior,
    check_posterior,
    complete_batch,
    fresh_chains,
    row_keys,
    two_phases,
)
from ebmpp.graph import FactorGraph
from ebmpp.moves.target import Target
from ebmpp.moves.tempering import equalized, replicate, tempered_params, tempered_sweep


class TemperedState(NamedTuple):
    """What :class:`TemperedPCD` carries."""

    chains: Rows
    """``(num_chains, num_temperatures, *shape)`` a block, from hot to cold."""
    betas: Float[Array, "temperatures"]
    """Inverse temperatures, from 0 to 1."""

    @property
    def coldest(self) -> Rows:
        """The chains of the model itself, for another estimator to go on with."""
        return {b: v[:, -1] for b, v in self.chains.items()}


@dataclasses.dataclass(frozen=True)
class TemperedPCD(Estimator):
    """Persistent CD whose chains are replicas from hot to cold that swap states; the coldest are the model's.

    For models whose modes plain persistent chains do not leave. Replica r has the factors of one block, and
    beta_r times the others. A step is k times: all layers and a swap of even neighbours, all layers and a
    swap of odd ones. The ladder follows the model as it is trained: at each step a tenth of the way to where
    all neighbours' swaps would be refused equally often. Biased like :class:`PCD`, since the params move.

    :param k: tempered sweeps a step, at least 1; each costs ``2 * num_temperatures`` plain ones.
    :param num_chains: persistent ensembles of replicas.
    :param num_temperatures: replicas in each, at least 2.
    :param posterior: a stand-in for the exact posterior where that is not one layer: :class:`MeanField`.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Desjardins, Courville, Bengio, Vincent, Delalleau (2010), *Tempered Markov chain Monte Carlo for
       training of restricted Boltzmann machines*.
    2. Syed, Bouchard-Cote, Deligiannidis, Doucet (2022), *Non-reversible parallel tempering*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.TemperedPCD(num_chains=10, num_temperatures=4), progress_bar=False)
    >>> fit.estimator_state.betas.shape
    (4,)
    """

    k: int = 1
    num_chains: int = 100
    num_temperatures: int = 10
    posterior: Posterior | None = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "k", "num_chains")
        checks.set_counts(self, "num_temperatures", least=2)

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> TemperedState:
        """Replicas at initial draws of every block, temperatures in equal steps of beta."""
        check_posterior(graph, "TemperedPCD", self.posterior)
        replicas = replicate(graph, self.num_temperatures)
        chains = fresh_chains(replicas, self.num_chains, key)
        return TemperedState(chains, jnp.linspace(0.0, 1.0, self.num_temperatures))

    def estimate(
        self, graph: FactorGraph, params: Params, state: TemperedState, batch: Batch, key: Key
    ) -> Estimate:
        """Data minus the coldest replicas, k tempered sweeps on."""
        batch = complete_batch(graph, params, batch, self.k, random.fold_in(key, 9), self.posterior)
        chains, rejection = self._sweeps(graph, params, state, key)
        state = TemperedState(chains, state.betas)
        gradient = two_phases(graph, params, batch, state.coldest, posterior=self.posterior)
        betas = state.betas + 0.1 * (equalized(state.betas, rejection) - state.betas)
        metrics = {"swap_rejection_mean": rejection.mean(), "swap_rejection_max": rejection.max()}
        sweeps = self.k * self.num_chains * self.num_temperatures / len(batch.weights)
        return Estimate(gradient, TemperedState(chains, betas), metrics, sweeps)

    def repeats(self, state: TemperedState, count: int) -> Repeats:
        """Groups of the ensembles, at the same temperatures."""
        groups = split_chains(state.chains, count)
        each = len(next(iter(groups[0].values())))
        states = tuple(TemperedState(chains, state.betas) for chains in groups)
        return Repeats(dataclasses.replace(self, num_chains=each), states, each)

    def _sweeps(
        self, graph: FactorGraph, params: Params, state: TemperedState, key: Key
    ) -> tuple[Rows, Array]:
        """Chains after k sweeps, and how often the swaps of each pair of neighbours are refused."""
        replicas = replicate(graph, self.num_temperatures)
        sweep = tempered_sweep(graph)
        target = Target(replicas, tempered_params(graph, params, state.betas))

        def half(x: Rows, i: Array) -> tuple[Rows, Array]:
            keys = row_keys(random.fold_in(key, i), self.num_chains)
            x, _, log_ratio = sweep.half(target, x, keys, i % 2)
            return x, 1 - jnp.exp(jnp.minimum(0.0, log_ratio)).mean(0)

        chains, refused = lax.scan(half, dict(state.chains), jnp.arange(2 * self.k))
        return chains, refused.mean(0)
