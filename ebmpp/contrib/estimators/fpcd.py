# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Persistent contrastive divergence with fast weights."""

import dataclasses
from typing import NamedTuple

from jaxtyping import PyTree

import jax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Params, Rows
from ebmpp.estimators.base import Batch, Estimate, Estimator, Repeats, split_chains
from ebmpp.estimators.phases import (
    PosteriorApproximation,
    carried_chains,
    check_posterior,
    complete_batch,
    cycle_chains,
    fresh_chains,
    sweep_chains,
    two_phases,
)
from ebmpp.graph import FactorGraph
from ebmpp.moves.target import Target


class FPCDState(NamedTuple):
    """State of :class:`FPCD`."""

    chains: Rows
    fast: Params

    @property
    def model_chains(self) -> Rows:
        """Chains under params plus fast weights."""
        return self.chains


@dataclasses.dataclass(frozen=True)
class FPCD(Estimator):
    """Persistent CD with fast weights, which drive the chains away from where they have been.

    For a :class:`~ebmpp.PCD` whose chains do not move, at a small rate of the params.
    Fast weights learn at ``rate`` from the same gradient and decay by the factor
    ``decay`` per step; the chains run under the sum of params and fast weights, so they
    mix fast while the params learn slowly. The negative phase is not one of the model,
    so the gradient is **biased** on purpose.

    :param k: sweeps per step.
    :param num_chains: number of persistent chains.
    :param rate: learning rate of the fast weights, at least 0; 0 is
        :class:`~ebmpp.PCD`.
    :param decay: factor of the fast weights per step, in [0, 1).
    :param posterior: see :class:`~ebmpp.CD`.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Tieleman, Hinton (2009), *Using fast weights to improve persistent contrastive
       divergence*.
    2. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from
       an RBM-derived process*, section 3.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import FPCD
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=FPCD(num_chains=20, rate=0.05), progress_bar=False)
    >>> fit.history.gradient_norm.shape
    (5,)
    """

    k: int = 1
    num_chains: int = 1000
    rate: float = 0.01
    decay: float = 0.95
    posterior: PosteriorApproximation | None = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "k", "num_chains")
        checks.number("FPCD: rate", self.rate, least=0)
        checks.number("FPCD: decay", self.decay, least=0, below=1)

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> FPCDState:
        """Draw initial states of every block; the fast weights are 0."""
        check_posterior(graph, "FPCD", self.posterior)
        chains = fresh_chains(graph, self.num_chains, key)
        return FPCDState(chains, jax.tree.map(jnp.zeros_like, params))

    def adopt(self, before: PyTree, fresh: FPCDState) -> FPCDState:
        """Continue the chains of another estimator, and the fast weights of another FPCD."""
        fast = before.fast if isinstance(before, FPCDState) else fresh.fast
        return FPCDState(cycle_chains(carried_chains(before), fresh.chains), fast)

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: FPCDState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        """Subtract the gradient at the chains from the data's.

        The chains move under params plus fast weights.
        """
        batch = complete_batch(
            graph, params, batch, self.k, random.fold_in(key, 9), self.posterior
        )
        target = Target(graph, jax.tree.map(jnp.add, params, state.fast))
        model, _ = sweep_chains(target, state.chains, self.k, key)
        gradient = two_phases(Target(graph, params), batch, model, self.posterior)
        fast = jax.tree.map(
            lambda f, g: self.decay * f - self.rate * g, state.fast, gradient
        )
        sweeps = self.k * self.num_chains / batch.num_rows
        return Estimate(gradient, FPCDState(model, fast), {}, sweeps)

    def repeats(self, state: FPCDState, count: int) -> Repeats:
        groups, size = split_chains(state.chains, count)
        states = tuple(FPCDState(chains, state.fast) for chains in groups)
        return Repeats(self, states, size)
