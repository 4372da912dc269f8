# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled blocked Gibbs: every chain is a pair that meets exactly and stays together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp import couplings, sweeps
from ebmpp.graph import FactorGraph
from ebmpp.kernels.base import Conditions, RowKernel


class CouplingState(NamedTuple):
    """The state of :class:`MaximalCoupling`.

    - **z** - the leading chain: a dict of the free blocks, each ``(*batch, *shape)``.
    - **y** - the chain that follows it, ``lag`` sweeps behind; equal to ``z`` once they have met.
    - **t** - sweeps that the leading chain has done.
    - **met** - whether the pair has met, shape ``(*batch,)``.
    - **meeting_time** - the first t with ``z == y``, shape ``(*batch,)``; where unmet, the present ``t``, so
      that ``(meeting_time, met)`` is a right-censored pair.
    - **rng_key** - the run's key; sweep ``t`` draws from the key and ``t``, so it does not change.
    """

    z: dict[str, Array]
    y: dict[str, Array]
    t: Array
    met: Array
    meeting_time: Array
    rng_key: Array


class MaximalCoupling(RowKernel):
    """Pairs of blocked Gibbs chains, coupled layer by layer: a kernel for :class:`numpyro.infer.MCMC`.

    The draws are those of the leading chain, each pair a chain of NumPyro's; use ``num_warmup=0`` and many
    chains with ``chain_method="vectorized"``. :func:`~ebmpp.to_datatree` adds a group ``meeting``. Params
    and clamped blocks are passed as to :class:`BlockedGibbs`; ``init_params`` is where both chains of a
    pair start (initial draws otherwise).

    :param graph: the declaration.
    :param lag: sweeps that the leading chain is ahead, at least 1.
    :param coupling: a kind for every layer, or one a layer; see :func:`ebmpp.couplings.resolve`.
    :raises ValueError: for a lag below 1 or an unknown coupling.

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

    def __init__(self, graph: FactorGraph, lag: int = 1, coupling: str | Sequence[str] | None = None) -> None:
        super().__init__(graph)
        if not isinstance(lag, int) or lag < 1:
            raise ValueError(f"lag is an int of at least 1, not {lag!r}")
        if coupling is None or isinstance(coupling, str):
            couplings.resolve(coupling, graph.layers)
        self.lag = lag
        self.coupling = coupling if coupling is None or isinstance(coupling, str) else tuple(coupling)

    def __repr__(self) -> str:
        return f"MaximalCoupling({self.graph!r}, lag={self.lag}, coupling={self.coupling!r})"

    def _init_one(self, rng_key: Array, conditions: Conditions, init_params: dict | None) -> CouplingState:
        couplings.resolve(self.coupling, conditions.layers)
        z = conditions.initial(rng_key, init_params)
        y = conditions.to_rows(z)

        def ahead(t: Array, x: dict[str, Array]) -> dict[str, Array]:
            pairs = conditions.pairs(rng_key, t + 1)
            return sweeps.sweep_rows(conditions.graph, conditions.params, x, conditions.layers, pairs)

        x = lax.fori_loop(jnp.uint32(0), jnp.uint32(self.lag), ahead, y)
        met = _equal(conditions, x, y).reshape(conditions.batch)
        t = jnp.full((), self.lag, jnp.int32)
        time = jnp.broadcast_to(t, met.shape)
        return CouplingState(conditions.from_rows(x), conditions.from_rows(y), t, met, time, rng_key)

    def _sample_one(self, state: CouplingState, conditions: Conditions) -> CouplingState:
        kinds = couplings.resolve(self.coupling, conditions.layers)
        pairs = conditions.pairs(state.rng_key, (state.t + 1).astype(jnp.uint32))
        x, y = conditions.to_rows(state.z), conditions.to_rows(state.y)
        graph, params = conditions.graph, conditions.params
        x, y, broken = couplings.coupled_sweep(graph, params, x, y, conditions.layers, kinds, pairs)
        t = state.t + 1
        met = state.met | (_equal(conditions, x, y) & ~broken).reshape(conditions.batch)
        time = jnp.where(state.met, state.meeting_time, t)
        x, y = _poison(x, broken), _poison(y, broken)
        return CouplingState(conditions.from_rows(x), conditions.from_rows(y), t, met, time, state.rng_key)

    def get_diagnostics_str(self, state: CouplingState) -> str:
        """How many pairs have met, and their mean meeting time so far."""
        met, time = np.asarray(state.met), np.asarray(state.meeting_time)
        mean = f", mean meeting time {time[met].mean():.3g}" if met.any() else ""
        return f"{int(met.sum())} of {met.size} pairs met{mean}"


def _equal(conditions: Conditions, x: dict[str, Array], y: dict[str, Array]) -> Array:
    same = jnp.ones(conditions.num_rows, bool)
    for b in conditions.free:
        same &= (x[b] == y[b]).reshape(conditions.num_rows, -1).all(-1)
    return same


def _poison(x: dict[str, Array], broken: Array) -> dict[str, Array]:
    """What no unit can be, where a log-ratio was not a number: better than a wrong draw."""

    def mark(v: Array) -> Array:
        wrong = jnp.nan if jnp.issubdtype(v.dtype, jnp.floating) else -1
        return jnp.where(broken.reshape(-1, *(1,) * (v.ndim - 1)), wrong, v)

    return {b: mark(v) for b, v in x.items()}
