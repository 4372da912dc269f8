# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Kernels of coupled chains: every chain of NumPyro's is a pair that meets exactly."""

from functools import partial
from typing import NamedTuple

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Blocks, Rows, checks
from ebmpp.coupling.expectation import Coupling
from ebmpp.graph import FactorGraph
from ebmpp.kernels.base import (
    InitParams,
    Kwargs,
    RowKernel,
    all_still,
    describe_acceptance,
    describe_still,
)
from ebmpp.moves import Pool, Target, couplings, sweeps
from ebmpp.moves.move import (
    Move,
    block_flags,
    coupled_sweep,
    draw_sweep,
    num_proposals,
    rows_agree,
    split_chains,
    stack_chains,
    with_invalid,
)
from ebmpp.moves.tempering import states_of


class CouplingState(NamedTuple):
    """State of a coupled kernel.

    - **z** - the leading chain: the free blocks, each ``(*batch, *shape)``.
    - **y** - the following chain, ``lag`` sweeps behind; equal to ``z`` once they have
      met.
    - **t** - sweeps of the leading chain.
    - **met** - True where the pair has met, shape ``(*batch,)``.
    - **meeting_time** - the first t with ``z == y``, shape ``(*batch,)``; the present
      ``t`` where unmet, so that ``(meeting_time, met)`` is a right-censored pair.
    - **rng_key** - the run's key; sweep ``t`` draws from the key and ``t``, so it does
      not change.
    - **distance** - L1 distance of ``z`` and ``y`` (for categories the number that
      differ), ``(*batch,)``.
    - **acceptance** - share of the two chains' Metropolis proposals that were accepted,
      shape ``(*batch,)``; None where no move makes proposals.

    With :func:`~ebmpp.moves.tempered`, ``z``, ``y`` and ``distance`` are of the coldest
    replicas, and ``met`` and ``meeting_time`` of all replicas together.
    Otherwise these are None:

    - **replicas** - of the leading chain, from hot to cold, each block
      ``(*batch, num, *shape)``.
    - **followers** - of the following chain.

    - **still** - by block, True while no sweep has changed ``z``.
    """

    z: Blocks
    y: Blocks
    t: Array
    met: Array
    meeting_time: Array
    rng_key: Array
    distance: Array
    acceptance: Array | None
    replicas: Blocks | None = None
    followers: Blocks | None = None
    still: Blocks | None = None


class MaximalCoupling(RowKernel[CouplingState]):
    """Pairs of blocked Gibbs chains, coupled by layers: a kernel for ``numpyro.infer.MCMC``.

    For meeting times in ArviZ and bounds on mixing; for an expectation use
    :func:`~ebmpp.unbiased_expectation`.

    Draws come from the leading chains, one pair per chain of NumPyro's; use
    ``num_warmup=0`` and many chains with ``chain_method="vectorized"``.
    :func:`~ebmpp.to_datatree` adds a group ``meeting``. Params and clamped blocks are
    passed as to :class:`BlockedGibbs`. Both chains of a pair have the same start.

    :param lag: sweeps by which the leading chain is ahead, at least 1. A kernel cannot
        run a pilot; 1 gives the shortest runs and the same draws, and a lag near the
        largest meeting time a sharper :func:`~ebmpp.tv_upper_bound`.
    :param coupling: "maximal" (the default), "maximal_independent", "common",
        "reflection" or "independent" for every layer, or a sequence of these, one per
        layer; "mixture"; :func:`~ebmpp.moves.tempered` for pairs of tempered ensembles;
        or moves: see :func:`ebmpp.moves.resolve_moves`. For "mixture" pass a
        pool beside the params: ``mcmc.run(key, params, pool=mixture_pool(...))``, see
        :func:`ebmpp.coupling.mixture_pool`.
    :param init: "uniform", or "local_mode": one sweep from a local mode.
    :raises ArgumentError: for a lag below 1, or an unknown coupling or start.

    **References**

    1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, Algorithms 1, 3 and
       4.
    2. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with
       L-lag couplings*.

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

    #: draws, and what bounds and suggestions are made of
    default_fields = ("z", "distance")
    _as_rows = True

    def __init__(
        self,
        graph: FactorGraph,
        lag: int = 1,
        coupling: Coupling = None,
        init: str = "uniform",
    ) -> None:
        super().__init__(graph, init)
        name = type(self).__name__
        self.lag = checks.count(f"{name}: lag", lag)
        if coupling is None or (isinstance(coupling, str) and coupling != "mixture"):
            couplings.resolve(coupling, graph.block_layers)
        else:
            coupling = sweeps.as_coupling(f"{name}: coupling", coupling)
        self.coupling = coupling

    def target(self, model_args: tuple, model_kwargs: Kwargs, check: bool) -> Target:
        """Return the target of model arguments; a ``pool`` is that of mixture proposals."""
        kwargs = dict(model_kwargs or {})
        pool = None if "pool" in self.graph.families else kwargs.pop("pool", None)
        target = super().target(model_args, kwargs, check)
        name = type(self).__name__
        if pool is not None:  # rows would become a pool again at each step
            checks.instance(f"{name}: pool", pool, Pool, "a pool of mixture_pool")
        key = jnp.zeros(2, jnp.uint32)
        return sweeps.with_pool(name, target, self._moves(target), pool, key)

    def _moves(self, target: Target) -> tuple[Move, ...]:
        return sweeps.resolve_moves(target.graph, self.coupling, target.clamped)

    def _init_one(
        self, rng_key: Array, target: Target, init_params: InitParams
    ) -> CouplingState:
        moves = self._moves(target)
        target = states_of(self.coupling, target)
        start = self._start(target, rng_key, init_params)

        def sweep(t, carry):
            x, total = carry
            x, accepted = draw_sweep(target, x, moves, target.keys(rng_key, t + 1))
            return x, total + accepted

        zero = jnp.zeros(target.num_rows, jnp.int32)
        lag = jnp.uint32(self.lag)
        x, accepted = lax.fori_loop(jnp.uint32(0), lag, sweep, (start, zero))
        z = stack_chains(x, start)
        t = jnp.int32(self.lag)
        proposals = num_proposals(moves)
        acceptance = accepted / (proposals * self.lag) if proposals else None
        met = rows_agree(block_flags(target, z), target.free, target.num_rows)
        time = jnp.full_like(zero, self.lag)
        return _state(target, z, t, rng_key, met, time, acceptance)

    def _sample_one(self, state: CouplingState, target: Target) -> CouplingState:
        moves = self._moves(target)
        target = states_of(self.coupling, target)
        keys = target.keys(state.rng_key, (state.t + 1).astype(jnp.uint32))
        x = target.to_rows(state.z if state.replicas is None else state.replicas)
        y = target.to_rows(state.y if state.followers is None else state.followers)
        z, together, broken, accepted = coupled_sweep(
            target, stack_chains(x, y), moves, keys
        )
        # broken rows get a value that no unit can have, rather than a wrong draw
        z = with_invalid(broken[None], z)
        t = state.t + 1
        have_met = state.met.reshape(-1)
        met = have_met | (together & ~broken)
        time = jnp.where(have_met, state.meeting_time.reshape(-1), t)
        mean = state.acceptance
        if mean is not None:
            share = accepted.reshape(mean.shape) / (2 * num_proposals(moves))
            # of t sweeps of one chain, t - lag of the other
            total = (2 * t - self.lag).astype(mean.dtype)
            mean += (share - mean) * 2 / total
        return _state(target, z, t, state.rng_key, met, time, mean)

    def get_diagnostics_str(self, state: CouplingState) -> str:
        return describe_meetings(state) + describe_acceptance(state)


def describe_meetings(state: PyTree) -> str:
    """Describe meeting times, blocks in which unmet pairs differ, and unmoved blocks."""
    have_met = np.asarray(state.met)
    times = np.asarray(state.meeting_time)
    text = f"{int(have_met.sum())} of {have_met.size} pairs met"
    if have_met.any():
        text += f", mean meeting time {times[have_met].mean():.3g}"
    differ = [b for b, v in state.z.items() if np.any(v != state.y[b])]
    if differ:
        text += f", others differ in {differ}"
    return text + describe_still(state, state.t)


def _state(
    target: Target,
    z: Blocks,
    t: Array,
    rng_key: Array,
    met: Array,
    time: Array,
    acceptance: Array | None,
) -> CouplingState:
    """Return the state at t, of the coldest replicas where there are replicas."""
    model = target.model
    chains = split_chains(z)
    replicas = None, None
    if target is not model:
        replicas = map(target.from_rows, chains)
    chains = [target.coldest(x) for x in chains]
    values = met, time, _distance(model, *chains), acceptance
    met, time, distance, acceptance = jax.tree.map(
        partial(jnp.reshape, shape=target.batch), values
    )
    x, y = (model.from_rows(x) for x in chains)
    values = met, time, rng_key, distance, acceptance
    return CouplingState(x, y, t, *values, *replicas, all_still(x))


def _distance(target: Target, x: Rows, y: Rows) -> Array:
    """Return the L1 distance of the two chains of each row; categories differ or not."""
    total = jnp.zeros(target.num_rows)
    for b in target.free:
        gap = jnp.abs(x[b] - y[b])
        gap = gap != 0 if jnp.issubdtype(gap.dtype, jnp.integer) else gap
        total += gap.reshape(target.num_rows, -1).sum(-1).astype(total.dtype)
    return total
