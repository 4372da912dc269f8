# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Contrastive divergence, plain, persistent and with fast weights: of fixed length, hence biased."""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Params, Rows, State
from ebmpp.estimators.base import Batch, Estimate, Estimator, Repeats, split_chains
from ebmpp.estimators.phases import (
    Posterior,
    as_many,
    carried_chains,
    check_posterior,
    complete_batch,
    fresh_chains,
    sample_latents,
    sweep_chains,
    two_phases,
)
from ebmpp.graph import FactorGraph
from ebmpp.moves.layer import gibbs_sweep
from ebmpp.moves.move import Move
from ebmpp.moves.sweeps import as_moves, resolve_moves
from ebmpp.moves.target import Target

Moves = Move | Sequence[Move] | None


def _moves(graph: FactorGraph, given: Moves) -> tuple[Move, ...]:
    return gibbs_sweep(graph) if given is None else resolve_moves(graph, given, exact=False)


@dataclasses.dataclass(frozen=True)
class CD(Estimator):
    """CD-k: chains of k sweeps from the data rows.

    For a first look, since no step is cheaper; it follows no likelihood. Biased, and the more so the slower
    the chain mixes.

    Missing entries are drawn first, by k sweeps of them and the latents given what is known.

    :param k: sweeps, at least 1.
    :param posterior: a stand-in for the exact posterior where that is not one layer: :class:`MeanField`.
    :param moves: of a sweep, in place of Gibbs draws of all layers: those of
        :func:`~ebmpp.moves.langevin_sweep`, say. Moves that leave a bias are taken too.
    :raises ArgumentError: for another k.

    **References**

    1. Hinton (2002); Qiu et al. (2020), eq. 3.
    """

    k: int = 1
    posterior: Posterior | None = None
    moves: Moves = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "k")
        object.__setattr__(self, "moves", as_moves(f"{type(self).__name__}: moves", self.moves))

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> tuple:
        """Nothing is carried."""
        check_posterior(graph, "CD", self.posterior)
        _moves(graph, self.moves)
        return ()

    def estimate(self, graph: FactorGraph, params: Params, state: tuple, batch: Batch, key: Key) -> Estimate:
        """Data minus their k-sweep reconstructions."""
        batch = complete_batch(graph, params, batch, self.k, random.fold_in(key, 9), self.posterior)
        start = sample_latents(graph, params, batch, random.fold_in(key, 0))
        target, moves = Target(graph, params), _moves(graph, self.moves)
        model, told = sweep_chains(target, start, self.k, random.fold_in(key, 1), moves)
        options = {"weights": batch.weights, "posterior": self.posterior}
        return Estimate(two_phases(graph, params, batch, model, **options), state, told, self.k)


@dataclasses.dataclass(frozen=True)
class PCD(Estimator):
    """Persistent CD: chains that go on from step to step while the params move.

    For large machines and long runs, at the price of :class:`CD`: with a rate that falls, and inside
    :class:`Centered`, it goes far. Biased where the chains mix more slowly than the params move.

    Missing entries are drawn as in :class:`CD`.

    :param k: sweeps a step, at least 1.
    :param num_chains: persistent chains.
    :param posterior: a stand-in for the exact posterior where that is not one layer: :class:`MeanField`.
    :param moves: of a sweep, in place of Gibbs draws of all layers: those of
        :func:`~ebmpp.moves.langevin_sweep`, say. Moves that leave a bias are taken too.
    :raises ArgumentError: for a k or num_chains that is not a positive int.

    **References**

    1. Tieleman (2008), *Training restricted Boltzmann machines using approximations to the likelihood
       gradient*.
    """

    k: int = 1
    num_chains: int = 1000
    posterior: Posterior | None = None
    moves: Moves = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "k", "num_chains")
        object.__setattr__(self, "moves", as_moves(f"{type(self).__name__}: moves", self.moves))

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> State:
        """Chains at initial draws of every block."""
        check_posterior(graph, "PCD", self.posterior)
        _moves(graph, self.moves)
        return fresh_chains(graph, self.num_chains, key)

    def adopt(self, before: Any, fresh: State) -> State:
        """Go on with the chains of another estimator, in turn where there were fewer."""
        return as_many(carried_chains(before), fresh)

    def estimate(self, graph: FactorGraph, params: Params, state: Any, batch: Batch, key: Key) -> Estimate:
        """Data minus the chains, k sweeps on."""
        batch = complete_batch(graph, params, batch, self.k, random.fold_in(key, 9), self.posterior)
        model, told = sweep_chains(Target(graph, params), state, self.k, key, _moves(graph, self.moves))
        gradient = two_phases(graph, params, batch, model, posterior=self.posterior)
        return Estimate(gradient, model, told, self.k * self.num_chains / len(batch.weights))

    def repeats(self, state: Any, count: int) -> Repeats:
        """Groups of the chains."""
        groups = split_chains(state, count)
        return Repeats(self, groups, len(next(iter(groups[0].values()))))


class FPCDState(NamedTuple):
    """What :class:`FPCD` carries."""

    chains: Rows
    fast: Params


@dataclasses.dataclass(frozen=True)
class FPCD(Estimator):
    """Persistent CD with fast weights: the chains run under params that flee from where they have been.

    For a :class:`PCD` whose chains stay where they are, at a small rate of the params.

    Beside the params there are fast ones, which learn at ``rate`` from the same gradient and decay by
    ``decay`` a step; the chains see the sum of both. So they mix fast while the params themselves learn
    slowly. The negative phase is of no model that is kept, hence **biased**, and on purpose.

    :param k: sweeps a step, at least 1.
    :param num_chains: persistent chains.
    :param rate: learning rate of the fast weights, at least 0; 0 is :class:`PCD`.
    :param decay: what is left of the fast weights after a step, in [0, 1).
    :param posterior: a stand-in for the exact posterior where that is not one layer: :class:`MeanField`.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Tieleman, Hinton (2009), *Using fast weights to improve persistent contrastive divergence*.
    2. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from an RBM-derived
       process*, section 3.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.FPCD(num_chains=20, rate=0.05), progress_bar=False)
    >>> fit.history.gradient_norm.shape
    (5,)
    """

    k: int = 1
    num_chains: int = 1000
    rate: float = 0.01
    decay: float = 0.95
    posterior: Posterior | None = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "k", "num_chains")
        checks.number("FPCD: rate", self.rate, least=0)
        checks.number("FPCD: decay", self.decay, least=0, below=1)

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> FPCDState:
        """Chains at initial draws of every block, and fast weights of 0."""
        check_posterior(graph, "FPCD", self.posterior)
        chains = fresh_chains(graph, self.num_chains, key)
        return FPCDState(chains, jax.tree.map(jnp.zeros_like, params))

    def adopt(self, before: Any, fresh: FPCDState) -> FPCDState:
        """Go on with the chains of another estimator, and with the fast weights of another FPCD."""
        fast = before.fast if isinstance(before, FPCDState) else fresh.fast
        return FPCDState(as_many(carried_chains(before), fresh.chains), fast)

    def estimate(
        self, graph: FactorGraph, params: Params, state: FPCDState, batch: Batch, key: Key
    ) -> Estimate:
        """Data minus the chains, k sweeps on under the sum of params and fast weights."""
        batch = complete_batch(graph, params, batch, self.k, random.fold_in(key, 9), self.posterior)
        target = Target(graph, jax.tree.map(jnp.add, params, state.fast))
        model, _ = sweep_chains(target, state.chains, self.k, key)
        gradient = two_phases(graph, params, batch, model, posterior=self.posterior)
        fast = jax.tree.map(lambda f, g: self.decay * f - self.rate * g, state.fast, gradient)
        return Estimate(gradient, FPCDState(model, fast), {}, self.k * self.num_chains / len(batch.weights))

    def repeats(self, state: FPCDState, count: int) -> Repeats:
        """Groups of the chains, with the fast weights as they are."""
        groups = split_chains(state.chains, count)
        states = tuple(FPCDState(chains, state.fast) for chains in groups)
        return Repeats(self, states, len(next(iter(groups[0].values()))))
