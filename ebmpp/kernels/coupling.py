# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled kernels: every chain is a pair that meets exactly and stays together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.graph import FactorGraph, energy
from ebmpp.kernels.base import RowKernel
from ebmpp.moves import Target, couplings, sweeps
from ebmpp.moves.move import Move, agree, compare, coupled_sweep, draw_sweep


class CouplingState(NamedTuple):
    """The state of a coupled kernel.

    - **z** - the leading chain: a dict of the free blocks, each ``(*batch, *shape)``.
    - **y** - the chain that follows it, ``lag`` sweeps behind; equal to ``z`` once they have met.
    - **t** - sweeps that the leading chain has done.
    - **met** - whether the pair has met, shape ``(*batch,)``.
    - **meeting_time** - the first t with ``z == y``, shape ``(*batch,)``; where unmet, the present ``t``, so
      that ``(meeting_time, met)`` is a right-censored pair.
    - **rng_key** - the run's key; sweep ``t`` draws from the key and ``t``, so it does not change.
    - **distance** - how far apart ``z`` and ``y`` are: the L1 distance of their values (for categories, how
      many differ), shape ``(*batch,)``.
    - **energies** - of ``z`` and of ``y``, shape ``(2, *batch)``.
    - **accepted** - Metropolis proposals that the two chains took so far, shape ``(*batch,)``.
    """

    z: dict[str, Array]
    y: dict[str, Array]
    t: Array
    met: Array
    meeting_time: Array
    rng_key: Array
    distance: Array
    energies: Array
    accepted: Array


class MaximalCoupling(RowKernel[CouplingState]):
    """Pairs of blocked Gibbs chains, coupled layer by layer: a kernel for :class:`numpyro.infer.MCMC`.

    The draws are those of the leading chain, each pair a chain of NumPyro's; use ``num_warmup=0`` and many
    chains with ``chain_method="vectorized"``. :func:`~ebmpp.to_datatree` adds a group ``meeting``. Params
    and clamped blocks are passed as to :class:`BlockedGibbs`; ``init_params`` is where both chains of a
    pair start (initial draws otherwise).

    :param graph: the declaration.
    :param lag: sweeps that the leading chain is ahead, at least 1.
    :param coupling: a kind for every layer, or one a layer, or moves: see
        :func:`ebmpp.moves.sweeps.resolve_moves`.
    :param init: "uniform", or "local_mode": one sweep from the local mode that a search finds.
    :raises ArgumentError: for a lag below 1, or an unknown coupling or start.

    **References**

    1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, Algorithms 1, 3 and 4.
    2. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with L-lag couplings*.

    **Example**

    >>> import jax
    >>> from numpyro.infer import MCMC
    >>> from ebmpp import Bernoulli, MaximalCoupling, layered
    >>> rbm = layered(v=Bernoulli(4), h=Bernoulli(3))
    >>> pairs = MCMC(MaximalCoupling(rbm), num_warmup=0, num_samples=30, num_chains=5,
    ...              chain_method="vectorized", progress_bar=False)
    >>> pairs.run(jax.random.key(1), rbm.init(jax.random.key(0)))
    >>> pairs.last_state.met.tolist()
    [True, True, True, True, True]
    """

    def __init__(
        self,
        graph: FactorGraph,
        lag: int = 1,
        coupling: str | Sequence[str] | Move | Sequence[Move] | None = None,
        init: str = "uniform",
    ) -> None:
        super().__init__(graph, init)
        self.lag = checks.count(f"{type(self).__name__}: lag", lag)
        if coupling is None or isinstance(coupling, str):
            couplings.resolve(coupling, graph.block_layers)
        single = (coupling,) if isinstance(coupling, Move) else coupling
        self.coupling = single if single is None or isinstance(single, str) else tuple(single)

    def _options(self) -> dict[str, Any]:
        named = {} if self.coupling is None else {"coupling": self.coupling}
        return ({} if self.lag == 1 else {"lag": self.lag}) | super()._options() | named

    @property
    def default_fields(self) -> tuple[str, ...]:
        """What is collected without being asked for: draws, and what bounds and suggestions are made of."""
        return ("z", "distance", "energies")

    def _moves(self, target: Target) -> tuple[Move, ...]:
        return sweeps.resolve_moves(target.graph, self.coupling, target.clamped)

    def _init_one(self, rng_key: Array, target: Target, init_params: dict | None) -> CouplingState:
        made = self._moves(target)
        start = self._start(target, rng_key, init_params)

        def ahead(t: Array, carry: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
            x, taken = draw_sweep(target, carry[0], made, target.keys(rng_key, t + 1))
            return x, carry[1] + taken

        taken = jnp.zeros(target.num_rows, jnp.int32)
        x, taken = lax.fori_loop(jnp.uint32(0), jnp.uint32(self.lag), ahead, (start, taken))
        z = {b: jnp.stack([x[b], start[b]]) for b in x}
        t = jnp.full((), self.lag, jnp.int32)
        unmet = jnp.zeros(target.num_rows, bool)
        together = agree(compare(target, z), target.free, target.num_rows)
        return self._state(target, z, t, unmet, jnp.zeros_like(taken), rng_key, taken, together, unmet)

    def _sample_one(self, state: CouplingState, target: Target) -> CouplingState:
        made = self._moves(target)
        keys = target.keys(state.rng_key, (state.t + 1).astype(jnp.uint32))
        x, y = target.to_rows(state.z), target.to_rows(state.y)
        z = {b: jnp.stack([x[b], y[b]]) for b in x}
        z, together, broken, taken = coupled_sweep(target, z, made, keys)
        flat = lambda a: a.reshape(target.num_rows)
        met, time, before = flat(state.met), flat(state.meeting_time), flat(state.accepted)
        t, taken = state.t + 1, before + taken
        return self._state(target, z, t, met, time, state.rng_key, taken, together, broken)

    def _state(
        self,
        target: Target,
        z: dict[str, Array],
        t: Array,
        met: Array,
        time: Array,
        rng_key: Array,
        accepted: Array,
        together: Array,
        broken: Array,
        /,
    ) -> CouplingState:
        """The state at t, of rows that had ``met`` at ``time`` or had not."""
        now = met | (together & ~broken)
        z = {b: _poison(v, broken) for b, v in z.items()}
        shaped = lambda a: a.reshape(target.batch)
        return CouplingState(
            target.from_rows({b: v[0] for b, v in z.items()}),
            target.from_rows({b: v[1] for b, v in z.items()}),
            t,
            shaped(now),
            shaped(jnp.where(met, time, t)),
            rng_key,
            shaped(_distance(target, z)),
            _energies(target, z).reshape(2, *target.batch),
            shaped(accepted),
        )

    def get_diagnostics_str(self, state: CouplingState) -> str:
        """How many pairs have met, and their mean meeting time so far."""
        met, time = np.asarray(state.met), np.asarray(state.meeting_time)
        mean = f", mean meeting time {time[met].mean():.3g}" if met.any() else ""
        return f"{int(met.sum())} of {met.size} pairs met{mean}"


def _distance(target: Target, z: dict[str, Array]) -> Array:
    """L1 distance of the two chains of each row; categories have no order, so they differ or not."""
    total = jnp.zeros(target.num_rows, jnp.result_type(float))
    for b in target.free:
        gap = jnp.abs(z[b][0] - z[b][1])
        if jnp.issubdtype(gap.dtype, jnp.integer):
            gap = gap != 0
        total += gap.reshape(target.num_rows, -1).sum(-1).astype(total.dtype)
    return total


def _energies(target: Target, z: dict[str, Array]) -> Array:
    """Energies of both chains, ``(2, rows)``."""
    graph, params = target.graph, target.params
    return jax.vmap(jax.vmap(lambda t: energy.energy(graph, params, t)))(graph.statistics(z))


def _poison(v: Array, broken: Array) -> Array:
    """What no unit can be, where a log-ratio was not a number: better than a wrong draw."""
    wrong = jnp.nan if jnp.issubdtype(v.dtype, jnp.floating) else -1
    return jnp.where(broken.reshape(1, -1, *(1,) * (v.ndim - 2)), wrong, v)
