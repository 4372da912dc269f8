# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Persistent contrastive divergence whose chains carry Jarzynski's weights."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random, sharding
from ebmpp.core.types import Eta, Key, Params, Rows
from ebmpp.errors import ArgumentError
from ebmpp.estimators.base import Batch, Estimate, Estimator
from ebmpp.estimators.phases import (
    Posterior,
    batch_log_likelihood,
    check_posterior,
    complete_batch,
    positive_gradient,
)
from ebmpp.graph import FactorGraph
from ebmpp.sampling import annealing_path, system_values, systems
from ebmpp.sampling.particles import start_systems
from ebmpp.sampling.path import Path
from ebmpp.sampling.systems import Systems

_ISLANDS = 10  # of the watchers: of fewer a standard error is a guess
_OFTEN = 0.5  # of the steps: where more resample, the weights follow the noise of the gradient


class WeightedState(NamedTuple):
    """What :class:`WeightedPCD` carries."""

    eta0: Eta
    """Of the reference from which the chains came."""
    params: Params
    """Of the last step, whose law the weighted chains have."""
    chains: Systems
    """One system."""
    watchers: Systems | None
    """Ten, which never enter the gradient."""


@dataclasses.dataclass(frozen=True)
class WeightedPCD(Estimator):
    """Persistent CD with weights that make up for the params' having moved, and an honest likelihood.

    For runs that :class:`PCD` would lose, where unbiased steps are too dear.

    When the params move from p to q, a chain's weight grows by the ratio of its unnormalised densities; where
    fewer than half of the chains are effective they are resampled, and then all are swept. So the weighted
    chains stay the model's own as there are more of them: **consistent, not unbiased**, at the price of
    :class:`PCD`, which drifts away where chains mix slowly. They begin as a particle system at the first
    params.

    The weights also follow the noise of the very gradient that they make. Where steps are large for so many
    chains, most steps resample, and the gradient is then no better than that of :class:`PCD`: the run warns.

    The history has ``effective_sample_size`` before resampling, ``resampled`` (1 or 0), and what a second
    population that never enters the gradient says: ``log_partition`` with ``log_partition_error``, from ten
    islands, and in one layer, where no entries are missing, ``log_likelihood`` of the batch. Given the params
    it is a particle system along the run's own path, unbiased for Z.

    :param num_chains: weighted persistent chains, at least 2.
    :param k: sweeps a step.
    :param num_watchers: of the second population, a multiple of 10, or 0 for none.
    :param posterior: a stand-in for the exact posterior where that is not one layer: :class:`MeanField`.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Carbone, Hua, Coste, Vanden-Eijnden (2023), *Efficient training of energy-based models using Jarzynski
       equality*, Algorithm 1.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.WeightedPCD(num_chains=50, num_watchers=50), progress_bar=False)
    >>> exactly = ebmpp.exact.log_partition(rbm, fit.params)
    >>> bool(abs(fit.history.log_partition[-1] - exactly) < 0.1)
    True
    """

    num_chains: int = 1000
    k: int = 1
    num_watchers: int = 1000
    posterior: Posterior | None = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_chains", least=2)
        checks.set_counts(self, "k")
        checks.set_counts(self, "num_watchers", least=0)
        if self.num_watchers % _ISLANDS or self.num_watchers == _ISLANDS:
            raise ArgumentError(
                f"WeightedPCD: num_watchers is a multiple of {_ISLANDS}, at least {2 * _ISLANDS}, or 0; got "
                f"{self.num_watchers}"
            )

    # -- the state -------------------------------------------------------------------------------

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> WeightedState:
        """Particle systems at the first params, from the data's base rates."""
        check_posterior(graph, "WeightedPCD", self.posterior)
        eta0 = annealing_path.base_rates(graph, data)
        begin = lambda i, islands, num: _placed(
            start_systems(graph, params, eta0, random.fold_in(key, i), islands, num)
        )
        each = self.num_watchers // _ISLANDS
        watchers = begin(1, _ISLANDS, each) if each else None
        # copies: a step may be given the params' own memory
        own = jax.tree.map(jnp.array, params)
        return WeightedState(eta0, own, begin(0, 1, self.num_chains), watchers)

    def adopt(self, before: Any, fresh: WeightedState) -> WeightedState:
        """Go on with the weighted chains of another WeightedPCD of as many."""
        shapes = lambda state: jax.tree.map(jnp.shape, state)
        return before if isinstance(before, WeightedState) and shapes(before) == shapes(fresh) else fresh

    # -- a step ----------------------------------------------------------------------------------

    def estimate(
        self, graph: FactorGraph, params: Params, state: WeightedState, batch: Batch, key: Key
    ) -> Estimate:
        """Data minus the weighted chains, which have followed the params."""
        whole = complete_batch(graph, params, batch, self.k, random.fold_in(key, 9), self.posterior)
        path = Path.through(graph, state.eta0, [state.params, params])
        chains = self._follow(path, state.chains, random.fold_in(key, 0))
        negative = system_values.energy_gradient(path, params, chains)
        negative = jax.tree.map(lambda g: g[0] * batch.weights.sum(), negative)
        positive = positive_gradient(graph, params, whole, self.posterior)
        metrics = {"effective_sample_size": chains.least[0], "resampled": chains.resampled[0]}
        watchers = state.watchers
        if watchers is not None:
            watchers = self._follow(path, watchers, random.fold_in(key, 1))
            metrics |= _told(graph, params, state.eta0, batch, systems.total_log_z(watchers))
        gradient = jax.tree.map(jnp.subtract, positive, negative)
        sweeps = 2 * self.k * self.num_chains / len(batch.weights)
        return Estimate(gradient, WeightedState(state.eta0, params, chains, watchers), metrics, sweeps)

    def _follow(self, path: Path, made: Systems, key: Key) -> Systems:
        """Weigh from the params before to these, resample, sweep; counts are those of this step."""
        islands, num = made.log_weights.shape
        none = jnp.zeros(islands)
        made = made._replace(resampled=none, least=none + num, even=none + 1)
        keys = random.fold_in(key, jnp.arange(islands))
        return _placed(systems.climb(path, jnp.arange(3.0), 2, 3, _placed(made), keys, self.k))

    def caution(self, told: Mapping[str, np.ndarray]) -> str | None:
        """That most steps resampled."""
        share = float(np.mean(told["resampled"])) if len(told["resampled"]) else 0.0
        if share < _OFTEN:
            return None
        return (
            f"WeightedPCD resampled its chains at {share:.0%} of the steps: the weights follow the noise of "
            "the gradient that they make, which is then no better than PCD's. Take more chains, or smaller "
            "steps; log_partition is that of chains that never enter the gradient, with its error"
        )


@jax.jit
def _placed(made: Systems) -> Systems:
    """On many devices, chains cut over them and all else whole, before the first step as after each: a step
    that finds its state elsewhere is another program.
    """
    return sharding.everywhere(made._replace(x={}))._replace(x=sharding.rows(made.x))


def _told(
    graph: FactorGraph, params: Params, eta0: Eta, batch: Batch, log_z: systems.PerIsland
) -> dict[str, Array]:
    """log Z by islands and its error, and the mean of log p of the batch's rows."""
    value, error = systems.pooled(log_z)
    value = value + sum(f.log_normalizer(eta0[b]).sum() for b, f in graph.families.items())
    told = {"log_partition": value, "log_partition_error": error}
    return told | batch_log_likelihood(graph, params, batch, value)
