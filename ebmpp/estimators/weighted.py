# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Persistent contrastive divergence whose chains have Jarzynski's weights."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.annealing import systems
from ebmpp.annealing.particles import start_systems
from ebmpp.annealing.path import Path
from ebmpp.annealing.reference import base_rates
from ebmpp.annealing.systems import Systems
from ebmpp.core import checks, random, sharding
from ebmpp.core.types import Eta, Key, Params, Rows
from ebmpp.errors import ArgumentError
from ebmpp.estimators import phases
from ebmpp.estimators.base import Batch, Estimate, Estimator, shapes
from ebmpp.graph import FactorGraph

_ISLANDS = 10  # of the watchers: fewer make the standard error too noisy
_OFTEN = 0.5  # share of steps that resample above which the weights follow the noise of the gradient


class WeightedState(NamedTuple):
    """State of :class:`WeightedPCD`.

    :param eta0: natural parameters of the reference from which the chains started.
    :param params: params of the last step, whose distribution the chains, one system, represent.
    :param watchers: ten systems, which never enter the gradient.
    """

    eta0: Eta
    params: Params
    chains: Systems
    watchers: Systems | None


@dataclasses.dataclass(frozen=True)
class WeightedPCD(Estimator):
    """Persistent CD with weights that correct for the movement of the params, and a likelihood estimate.

    For runs on which :class:`PCD` drifts away and unbiased steps are too expensive.

    When the params move from p to q, a chain's weight is multiplied by the ratio of its unnormalised
    densities. If fewer than half of the chains are effective they are resampled; then all are swept.
    **Consistent** in the number of chains, **not unbiased**, at the cost of :class:`PCD`. The weights also
    follow the noise of the gradient that they make: where steps are large for the number of chains, most
    steps resample, and the gradient is no better than that of :class:`PCD`, of which the run warns.

    The history has ``effective_sample_size`` before resampling, ``resampled`` (1 or 0), and estimates by a
    second population that never enters the gradient: ``log_partition`` with ``log_partition_error``, from ten
    islands, and for complete rows and one layer of latents the batch's ``log_likelihood``. Given the params
    it is a particle system along the run's own path, unbiased for Z.

    :param num_chains: weighted persistent chains, at least 2.
    :param k: sweeps per step.
    :param num_watchers: size of the second population, a multiple of 10, at least 20, or 0 for none.
    :param posterior: see :class:`CD`.
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
    posterior: phases.Posterior | None = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_chains", least=2)
        checks.set_counts(self, "k")
        checks.set_counts(self, "num_watchers", least=0)
        if self.num_watchers % _ISLANDS or self.num_watchers == _ISLANDS:
            raise ArgumentError(
                f"WeightedPCD: num_watchers must be a multiple of {_ISLANDS}, at least {2 * _ISLANDS}, or 0, "
                f"got {self.num_watchers}."
            )

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> WeightedState:
        """Run particle systems from the data's base rates to the first params."""
        phases.check_posterior(graph, "WeightedPCD", self.posterior)
        eta0 = base_rates(graph, data)
        begin = lambda i, islands, num: _placed(
            start_systems(graph, params, eta0, random.fold_in(key, i), islands, num)
        )
        size = self.num_watchers // _ISLANDS
        watchers = begin(1, _ISLANDS, size) if size else None
        copies = jax.tree.map(jnp.array, params)  # a step may be given the params' own memory
        return WeightedState(eta0, copies, begin(0, 1, self.num_chains), watchers)

    def adopt(self, before: Any, fresh: WeightedState) -> WeightedState:
        """Continue the weighted chains of another WeightedPCD of the same shapes."""
        return before if shapes(before) == shapes(fresh) else fresh

    def estimate(
        self, graph: FactorGraph, params: Params, state: WeightedState, batch: Batch, key: Key
    ) -> Estimate:
        """Subtract the gradient at the weighted chains, moved to these params, from the data's."""
        complete = phases.complete_batch(graph, params, batch, self.k, random.fold_in(key, 9), self.posterior)
        path = Path.through(graph, state.eta0, [state.params, params])
        chains = self._follow(path, state.chains, random.fold_in(key, 0))
        negative = systems.energy_gradient(path, params, chains)
        negative = jax.tree.map(lambda g: g[0] * batch.weights.sum(), negative)
        positive = phases.positive_gradient(graph, params, complete, self.posterior)
        metrics = {"effective_sample_size": chains.min_ess[0], "resampled": chains.resampled[0]}
        watchers = state.watchers
        if watchers is not None:
            watchers = self._follow(path, watchers, random.fold_in(key, 1))
            metrics |= _likelihood(graph, params, state.eta0, batch, systems.total_log_z(watchers))
        gradient = jax.tree.map(jnp.subtract, positive, negative)
        sweeps = 2 * self.k * self.num_chains / len(batch.weights)
        return Estimate(gradient, WeightedState(state.eta0, params, chains, watchers), metrics, sweeps)

    def _follow(self, path: Path, system: Systems, key: Key) -> Systems:
        """Reweight to the new params, resample, sweep. Counters start at zero."""
        islands, num = system.log_weights.shape
        zero = jnp.zeros(islands)
        system = system._replace(resampled=zero, min_ess=zero + num, min_cess=zero + 1)
        keys = random.fold_in(key, jnp.arange(islands))
        return _placed(systems.climb(path, jnp.arange(3.0), 2, 3, _placed(system), keys, self.k))

    def diagnose(self, history: Mapping[str, np.ndarray]) -> str | None:
        """Report that most steps resampled."""
        share = float(np.mean(history["resampled"])) if len(history["resampled"]) else 0.0
        if share < _OFTEN:
            return None
        return (
            f"WeightedPCD resampled its chains at {share:.0%} of the steps: the weights follow the noise of "
            "the gradient that they make, which is then no better than PCD's. Take more chains, or smaller "
            "steps. log_partition comes from chains that never enter the gradient, and stays valid."
        )


@jax.jit
def _placed(system: Systems) -> Systems:
    """Shard the chains and replicate the rest, as a step does, so that the first step is the same program."""
    return sharding.everywhere(system._replace(x={}))._replace(x=sharding.rows(system.x))


def _likelihood(
    graph: FactorGraph, params: Params, eta0: Eta, batch: Batch, log_z: systems.PerIsland
) -> dict[str, Array]:
    """Return log Z by islands with its error, and the mean of log p of the batch's rows."""
    value, error = systems.pooled(log_z)
    value = value + sum(f.log_normalizer(eta0[b]).sum() for b, f in graph.families.items())
    metrics = {"log_partition": value, "log_partition_error": error}
    return metrics | phases.batch_log_likelihood(graph, params, batch, value)
