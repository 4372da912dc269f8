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
from ebmpp.coupling.pools import with_pool
from ebmpp.errors import ArgumentError
from ebmpp.graph import FactorGraph, energy
from ebmpp.kernels.base import Kwargs, RowKernel, is_batched
from ebmpp.moves import Layer, Target, couplings, sweeps
from ebmpp.moves.move import Move, agree, compare, coupled_sweep, draw_sweep
from ebmpp.moves.target import Pool


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

    Under :class:`TemperingCoupling` ``z``, ``y``, ``distance`` and ``energies`` are of the coldest replicas,
    and ``met`` and ``meeting_time`` of all of them together. Under other kernels these are None:

    - **replicas** - of the leading chain, from hot to cold, each block ``(*batch, num, *shape)``.
    - **followers** - of the chain that follows it.
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
    replicas: dict[str, Array] | None = None
    followers: dict[str, Array] | None = None


class MaximalCoupling(RowKernel[CouplingState]):
    """Pairs of blocked Gibbs chains, coupled layer by layer: a kernel for :class:`numpyro.infer.MCMC`.

    For meeting times in ArviZ, and bounds on mixing; for an expectation alone,
    :func:`~ebmpp.unbiased_expectation`.

    The draws are those of the leading chain, each pair a chain of NumPyro's; use ``num_warmup=0`` and many
    chains with ``chain_method="vectorized"``. :func:`~ebmpp.to_datatree` adds a group ``meeting``. Params
    and clamped blocks are passed as to :class:`BlockedGibbs`; ``init_params`` is where both chains of a
    pair start (initial draws otherwise).

    :param graph: the declaration.
    :param lag: sweeps that the leading chain is ahead, at least 1.
    :param coupling: "maximal" (the default), "maximal_independent", "common", "reflection" or "independent"
        for every layer, or a sequence of these, one a layer; "mixture", or moves: see
        :func:`ebmpp.moves.sweeps.resolve_moves`. For "mixture" a pool is passed beside the params:
        ``mcmc.run(key, params, pool=mixture_pool(...))``, see :func:`ebmpp.coupling.mixture_pool`.
    :param init: "uniform", or "local_mode": one sweep from the local mode that a search finds.
    :raises ArgumentError: for a lag below 1, or an unknown coupling or start.

    **References**

    1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, Algorithms 1, 3 and 4.
    2. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with L-lag couplings*.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> pairs = MCMC(ebmpp.MaximalCoupling(rbm), num_warmup=0, num_samples=30, num_chains=5,
    ...              chain_method="vectorized", progress_bar=False)
    >>> pairs.run(jax.random.key(1), rbm.init(jax.random.key(0)))
    >>> pairs.last_state.met.tolist()
    [True, True, True, True, True]
    """

    _as_rows = True

    def __init__(
        self,
        graph: FactorGraph,
        lag: int = 1,
        coupling: str | Sequence[str] | Move | Sequence[Move] | None = None,
        init: str = "uniform",
    ) -> None:
        super().__init__(graph, init)
        self.lag = checks.count(f"{type(self).__name__}: lag", lag)
        if coupling is None or (isinstance(coupling, str) and coupling != "mixture"):
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

    def target(self, model_args: tuple, model_kwargs: Kwargs, check: bool) -> Target:
        """What model arguments ask for; a ``pool`` among them is that of mixture proposals."""
        given = dict(model_kwargs or {})
        pool = None if "pool" in self.graph.families else given.pop("pool", None)
        made = super().target(model_args, given, check)
        if pool is not None and not isinstance(pool, Pool):
            raise ArgumentError(
                f"{type(self).__name__}: pool is what ebmpp.coupling.mixture_pool makes, once a run, not "
                f"{checks.tell(pool)}"
            )
        return with_pool(type(self).__name__, made, self._moves(made), pool, jnp.zeros(2, jnp.uint32))

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
        return self._state(target, z, t, rng_key, unmet, jnp.zeros_like(taken), taken, together, unmet)

    def _sample_one(self, state: CouplingState, target: Target) -> CouplingState:
        made = self._moves(target)
        keys = target.keys(state.rng_key, (state.t + 1).astype(jnp.uint32))
        x, y = target.to_rows(state.z), target.to_rows(state.y)
        z = {b: jnp.stack([x[b], y[b]]) for b in x}
        z, together, broken, taken = coupled_sweep(target, z, made, keys)
        flat = lambda a: a.reshape(target.num_rows)
        met, time, before = flat(state.met), flat(state.meeting_time), flat(state.accepted)
        t, taken = state.t + 1, before + taken
        return self._state(target, z, t, state.rng_key, met, time, taken, together, broken)

    def _state(
        self, target: Target, z: dict[str, Array], t: Array, rng_key: Array, *rows: Array
    ) -> CouplingState:
        """The state at t.

        :param rows: which had met before, and when; their proposals taken; which are together, or broken.
        """
        met, time, accepted, together, broken = rows
        graph, now = target.graph, met | (together & ~broken)
        energies = lambda t: energy.energy(graph, target.params, t)
        z = {b: _poison(v, broken) for b, v in z.items()}
        shaped = lambda a: a.reshape(target.batch)
        x, y = (target.from_rows({b: v[i] for b, v in z.items()}) for i in range(2))
        times = shaped(now), shaped(jnp.where(met, time, t)), rng_key
        each = jax.vmap(jax.vmap(energies))(graph.statistics(z)).reshape(2, *target.batch)
        each = each.T if is_batched(rng_key) else each  # the axis of chains comes first
        return CouplingState(x, y, t, *times, shaped(_distance(target, z)), each, shaped(accepted))

    def get_diagnostics_str(self, state: CouplingState) -> str:
        """How many pairs have met, and their mean meeting time so far."""
        met, time = np.asarray(state.met), np.asarray(state.meeting_time)
        mean = f", mean meeting time {time[met].mean():.3g}" if met.any() else ""
        return f"{int(met.sum())} of {met.size} pairs met{mean}"


class MetropolisCoupling(MaximalCoupling):
    """Pairs of Metropolis chains that share proposals, a kernel for :class:`numpyro.infer.MCMC`.

    For models of some ten units, and to compare with what is published.

    Every free block is proposed at once, from a law that does not look at the chain, so nearly every
    proposal is refused in a model of more than some ten units. From one start the two chains of a pair are
    then equal as soon as the first proposal is refused, after one sweep: **the estimates made from such
    pairs are unbiased in name**. The correction is carried by pairs so rare that a run never sees one.
    The diagnostics tell how many proposals were accepted.

    :param graph: the declaration.
    :param proposal: "uniform", which Bernoulli, Spin and Categorical blocks have; or "initial", the law of
        initial values, which every family has.
    :param lag: sweeps that the leading chain is ahead, at least 1.
    :param marginalize: blocks (no two of which interact) that are summed out of the acceptance ratio, and
        drawn from their conditionals afterwards.
    :param init: "uniform", or "local_mode": one sweep from the local mode that a search finds.
    :raises ArgumentError: for a lag below 1, an unknown proposal or start, or a block to sum out that is not
        one or leaves none.
    :raises DeclarationError: for a uniform proposal of a block that has no uniform law.
    :raises IntractableError: for two blocks to sum out that interact.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), *End-to-end training of deep Boltzmann machines by
       unbiased contrastive divergence with local mode initialization*, Algorithms 3 and 4.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Spin(4), h=ebmpp.Spin(3))
    >>> pairs = MCMC(ebmpp.kernels.MetropolisCoupling(rbm, init="local_mode"), num_warmup=0, num_samples=30,
    ...              num_chains=5, chain_method="vectorized", progress_bar=False)
    >>> pairs.run(jax.random.key(1), rbm.init(jax.random.key(0)))
    >>> pairs.last_state.met.all().item()
    True
    """

    def __init__(
        self,
        graph: FactorGraph,
        proposal: str = "uniform",
        lag: int = 1,
        marginalize: Sequence[str] = (),
        init: str = "uniform",
    ) -> None:
        super().__init__(graph, lag, init=init)
        self.proposal = proposal
        self.marginalize = (marginalize,) if isinstance(marginalize, str) else tuple(marginalize)
        sweeps.metropolis_sweep(graph, (), proposal, self.marginalize)

    def _options(self) -> dict[str, Any]:
        named = {} if self.proposal == "uniform" else {"proposal": self.proposal}
        return named | super()._options() | ({"marginalize": self.marginalize} if self.marginalize else {})

    def _moves(self, target: Target) -> tuple[Move, ...]:
        clamped = tuple(target.clamped)
        summed = tuple(b for b in self.marginalize if b not in clamped)
        if set(summed) == set(target.free):  # nothing is left to propose: an exact draw
            return (Layer(summed, "maximal"),)
        return sweeps.metropolis_sweep(target.graph, clamped, self.proposal, summed)

    def get_diagnostics_str(self, state: CouplingState) -> str:
        """How many pairs have met, when, and how many proposals were accepted."""
        proposals = 2 * state.t - self.lag  # the following chain made none of the first `lag`
        rate = np.asarray(state.accepted).mean() / np.asarray(proposals).mean()
        return f"{super().get_diagnostics_str(state)}, acceptance {rate:.2g}"


def _distance(target: Target, z: dict[str, Array]) -> Array:
    """L1 distance of the two chains of each row; categories have no order, so they differ or not."""
    total = jnp.zeros(target.num_rows, jnp.result_type(float))
    for b in target.free:
        gap = jnp.abs(z[b][0] - z[b][1])
        if jnp.issubdtype(gap.dtype, jnp.integer):
            gap = gap != 0
        total += gap.reshape(target.num_rows, -1).sum(-1).astype(total.dtype)
    return total


def _poison(v: Array, broken: Array) -> Array:
    """What no unit can be, where a log-ratio was not a number: better than a wrong draw."""
    wrong = jnp.nan if jnp.issubdtype(v.dtype, jnp.floating) else -1
    return jnp.where(broken.reshape(1, -1, *(1,) * (v.ndim - 2)), wrong, v)
