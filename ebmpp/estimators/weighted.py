# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Persistent contrastive divergence whose chains have Jarzynski's weights."""

import dataclasses
from functools import partial
from typing import NamedTuple

from jaxtyping import Float, Int32, PyTree
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.annealing import Path, particles, reference, systems
from ebmpp.annealing.log_partition import MIN_ANCESTRY, MIN_SHARE
from ebmpp.core import Eta, Key, Params, Rows, checks, random, sharding
from ebmpp.estimators import phases
from ebmpp.estimators.base import (
    Batch,
    Columns,
    Estimate,
    StepMetrics,
    shapes,
)
from ebmpp.graph import FactorGraph

# fewer islands make the watchers' standard error too noisy
_ISLANDS = 10
# error above which log Z is unknown and the watchers start again
_MAX_ERROR = 0.2
# share of steps without a log Z above which a run warns
_UNKNOWN_SHARE = 0.1
# share of steps that resample above which the weights follow the noise of the gradient
_RESAMPLED_SHARE = 0.5


class WeightedState(NamedTuple):
    """State of :class:`WeightedPCD`.

    :param eta0: natural parameters of the reference from which the chains started.
    :param params: params of the last step, whose distribution the chains, one system,
        represent.
    :param watchers: ten systems, which never enter the gradient.
    :param variance: of log Z since the watchers started, by the evenness of their
        weights at each step; infinite if they started badly.
    :param rest: number of steps before they may start again.
    """

    eta0: Eta
    params: Params
    chains: systems.Systems
    watchers: systems.Systems | None
    variance: Float[Array, ""]
    rest: Int32[Array, ""]


class WeightedMetrics(StepMetrics):
    """Metrics of :class:`WeightedPCD`; the last three need watchers.

    :param effective_sample_size: before resampling.
    :param resampled: 1 or 0.
    :param log_partition: nan where its error is large.
    """

    effective_sample_size: Array
    resampled: Array
    log_partition: Array | None = None
    log_partition_error: Array | None = None
    log_likelihood: Array | None = None


@dataclasses.dataclass(frozen=True)
class WeightedPCD(phases.BiasedEstimator):
    """Persistent CD with weights that correct for the movement of the params.

    For runs on which :class:`PCD` drifts away and unbiased steps are too expensive. It
    also estimates the likelihood.

    When the params move from p to q, a chain's weight is multiplied by the ratio of its
    unnormalised densities. If fewer than half of the chains are effective they are
    resampled; then all are swept. **Consistent** in the number of chains, **not
    unbiased**, at the cost of :class:`PCD`. The weights also follow the noise of the
    gradient that they make: where steps are large for the number of chains, most steps
    resample, and the gradient is no better than that of :class:`PCD`, of which the run
    warns.

    The history has ``effective_sample_size`` before resampling, ``resampled`` (1 or 0),
    and estimates by a second population of ten islands that never enters the gradient:
    ``log_partition`` with ``log_partition_error``, and for complete rows and one layer
    of latents the batch's ``log_likelihood``. Where its error exceeds 0.2, or its
    particles do not forget their ancestors during its start (sharp models, see
    :func:`ebmpp.smc`; the error is then inf), both estimates are nan, and it starts
    again along the line from independent units, at most as often as doubles its cost.

    :param num_chains: weighted persistent chains, at least 2.
    :param k: sweeps per step.
    :param num_watchers: size of the second population, a multiple of 10, at least 20,
        or 0 for none.
    :param posterior: see :class:`CD`.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Carbone, Hua, Coste, Vanden-Eijnden (2023), *Efficient training of energy-based
       models using Jarzynski equality*, Algorithm 1.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> estimator = ebmpp.WeightedPCD(num_chains=50, num_watchers=50)
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), estimator=estimator, num_steps=5,
    ...                 rng_key=jax.random.key(0), progress_bar=False)
    >>> exactly = ebmpp.exact.log_partition(rbm, fit.params)
    >>> bool(abs(fit.history.log_partition[-1] - exactly) < 0.1)
    True
    """

    num_chains: int = 1000
    k: int = 1
    num_watchers: int = 1000
    posterior: phases.PosteriorApproximation | None = None

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_chains", least=2)
        checks.set_counts(self, "k")
        checks.set_counts(self, "num_watchers", least=0)
        if self.num_watchers % _ISLANDS != 0 or self.num_watchers == _ISLANDS:
            raise checks.error(
                "WeightedPCD: num_watchers",
                f"a multiple of {_ISLANDS}, at least {2 * _ISLANDS}, or 0",
                self.num_watchers,
            )

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> WeightedState:
        """Run particle systems from the data's base rates to the first params."""
        self.check(graph)
        eta0 = reference.base_rates(graph, data)
        start = partial(particles.start_systems, Path.line(graph, eta0, params))
        chains = _place(start(random.fold_in(key, 0), 1, self.num_chains))
        watchers = None
        variance = jnp.zeros(())
        if self.num_watchers:
            size = self.num_watchers // _ISLANDS
            watchers = _place(start(random.fold_in(key, 1), _ISLANDS, size))
            variance = _first_variance(watchers)
        # a step may be given the params' own memory
        copies = jax.tree.map(jnp.array, params)
        return WeightedState(eta0, copies, chains, watchers, variance, jnp.int32(0))

    def adopt(self, before: PyTree, fresh: WeightedState) -> WeightedState:
        """Continue the weighted chains of another WeightedPCD of the same shapes."""
        return before if shapes(before) == shapes(fresh) else fresh

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: WeightedState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        """Subtract the gradient at the weighted chains from the data's."""
        complete = self.complete(graph, params, batch, key)
        path = Path.through(graph, state.eta0, [state.params, params])
        chains = self._follow(path, state.chains, random.fold_in(key, 0))
        weight = batch.weights.sum()
        negative = systems.energy_gradient(path, params, chains)
        negative = jax.tree.map(lambda g: g[0] * weight, negative)
        positive = phases.positive_gradient(graph, params, complete, self.posterior)
        gradient = jax.tree.map(jnp.subtract, positive, negative)
        metrics = WeightedMetrics(
            effective_sample_size=chains.min_ess[0],
            resampled=jnp.sign(chains.offspring_variance[0]),
        )
        sweeps = jnp.asarray(2 * self.k * self.num_chains / batch.num_rows)
        state = state._replace(params=params, chains=chains)
        if state.watchers is None:
            return Estimate(gradient, state, metrics, sweeps)
        watchers = self._follow(path, state.watchers, random.fold_in(key, 1))
        watchers, variance, rungs = self._watch(
            graph, state, watchers, random.fold_in(key, 2)
        )
        rest = jnp.maximum(state.rest - 1, rungs)
        state = state._replace(watchers=watchers, variance=variance, rest=rest)
        per_rung = self.k * self.num_watchers / batch.num_rows
        sweeps += rungs.astype(sweeps.dtype) * per_rung
        log_z, error = _log_z(watchers, variance)
        log_z += phases.reference_log_partition(graph, state.eta0)
        log_z = jnp.where(error <= _MAX_ERROR, log_z, jnp.nan)
        metrics = dataclasses.replace(
            metrics,
            log_partition=log_z,
            log_partition_error=error,
            log_likelihood=phases.batch_log_likelihood(graph, params, batch, log_z),
        )
        return Estimate(gradient, state, metrics, sweeps)

    def _watch(
        self,
        graph: FactorGraph,
        state: WeightedState,
        watchers: systems.Systems,
        key: Key,
    ) -> tuple[systems.Systems, Array, Array]:
        """Replace watchers if their error has become large.

        Fresh ones then rest for as many steps as they ran rungs, so that they cost at
        most twice as much on average.

        :return: watchers, the variance of their log Z, and the number of rungs that
            fresh ones ran.
        """
        share = watchers.min_cess.mean()
        added = (1 / share - 1) / watchers.log_weights.size
        is_poor = share < MIN_SHARE  # too few weights are effective
        variance = state.variance + jnp.where(is_poor, jnp.inf, added)
        line = Path.line(graph, state.eta0, state.params)
        size = self.num_watchers // _ISLANDS

        def restart():
            fresh, rungs = particles.fresh_systems(line, key, _ISLANDS, size, self.k)
            return _place(fresh), _first_variance(fresh), rungs

        _, error = _log_z(watchers, variance)
        is_due = ~(error <= _MAX_ERROR) & (state.rest <= 0)
        return lax.cond(is_due, restart, lambda: (watchers, variance, jnp.int32(0)))

    def _follow(self, path: Path, system: systems.Systems, key: Key) -> systems.Systems:
        """Reweight to the new params, resample, sweep. Counters start at zero."""
        islands, num = system.log_weights.shape
        zero = jnp.zeros(islands)
        system = system._replace(
            offspring_variance=zero, min_ess=zero + num, min_cess=zero + 1
        )
        keys = random.fold_in(key, jnp.arange(islands))
        system = systems.run_rungs(
            path, jnp.arange(3.0), 2, 3, _place(system), keys, self.k
        )
        return _place(system)

    def diagnose(self, history: Columns) -> str | None:
        """Report that most steps resampled, or that log Z is unknown at many of them."""

        def mean(values):
            return np.mean(values) if len(values) else 0.0

        resampled = mean(history["resampled"])
        unknown = mean(~(history.get("log_partition_error", np.zeros(0)) <= _MAX_ERROR))
        messages = []
        if resampled >= _RESAMPLED_SHARE:
            messages.append(
                f"WeightedPCD resampled its chains at {resampled:.0%} of the steps: the "
                "weights follow the noise of the gradient that they make, which is "
                "then no better than PCD's. Take more chains, or smaller steps. "
                "log_partition comes from chains that never enter the gradient."
            )
        if unknown > _UNKNOWN_SHARE:
            messages.append(
                "the standard error of WeightedPCD's log_partition is above "
                f"{_MAX_ERROR} at {unknown:.0%} of the steps, where the history has "
                "nan. Raise num_watchers, or use ebmpp.smc or ebmpp.bracket."
            )
        return " ".join(messages) or None


@jax.jit
def _place(system: systems.Systems) -> systems.Systems:
    """Shard the chains and replicate the rest, as a step does.

    The first step is then the same program as later ones.
    """
    rest = sharding.replicate(system._replace(x={}))
    return rest._replace(x=sharding.rows(system.x))


@jax.jit
def _first_variance(watchers: systems.Systems) -> Array:
    """Return 0, or inf where watchers that have just started did not forget their ancestors."""
    ancestry = systems.relative_ancestry(watchers).mean()
    # the dtype of later ones: one program
    return jnp.where(ancestry < MIN_ANCESTRY, jnp.inf, jnp.zeros(()))


def _log_z(watchers: systems.Systems, variance: Array) -> tuple[Array, Array]:
    """Return log Z relative to the reference, and its error.

    The error is by islands, or by weights if that is larger.
    """
    value, error = systems.pooled(systems.total_log_z(watchers))
    return value, jnp.maximum(error, jnp.sqrt(variance))
