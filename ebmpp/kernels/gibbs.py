# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocked Gibbs: layer by layer, all units of a layer at once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.graph import FactorGraph
from ebmpp.graph.declaration import schedule
from ebmpp.kernels.base import RowKernel
from ebmpp.moves import Target, sweeps
from ebmpp.moves.move import Move, draw_sweep


class GibbsState(NamedTuple):
    """The state of :class:`BlockedGibbs`.

    - **z** - a dict of the free blocks, each of shape ``(*batch, *shape)``.
    - **i** - sweeps done since the initial state.
    - **acceptance** - the share of proposals taken so far, shape ``(*batch,)``, 1 before any; None where no
      move makes one.
    - **rng_key** - the run's key; sweep ``i`` draws from the key and ``i``, so it does not change.
    """

    z: dict[str, Array]
    i: Array
    acceptance: Array | None
    rng_key: Array


class BlockedGibbs(RowKernel[GibbsState]):
    """Gibbs sweeps over the layers of a graph, a kernel for :class:`numpyro.infer.MCMC`.

    Params are the first argument of ``mcmc.run``, clamped blocks its keyword arguments. Clamped
    values may have leading axes: with ``v`` of shape ``(N, 784)``, every chain holds N rows, one
    posterior of the free blocks each, with draws of shape ``(N, *shape)``. A row draws from its own
    key, so row 0 is the chain that ``v[0]`` alone would give.

    All of NumPyro's chain methods run the same chains from the same random words. How many rows a
    matrix product has may change its rounding, though, so values of real-valued blocks agree to
    rounding, and values of discrete blocks are equal except where a uniform falls within a rounding
    error of its threshold.

    An :class:`~ebmpp.Observed` block is clamped at its known units only: the others are sampled.

    :param graph: the declaration.
    :param init: "uniform", or "local_mode": one sweep from the local mode that a search finds.
    :param moves: of a sweep, in place of draws of all layers: such as those of
        :func:`~ebmpp.moves.langevin_sweep`, or of one's own. Moves that are not ``exact`` **sample another
        law**.
    :raises ArgumentError: for what is no move, or another ``init``; in a run, for moves that do not change
        all free blocks and no other.

    **References**

    1. Geman, Geman (1984), *Stochastic relaxation, Gibbs distributions, and the Bayesian restoration
       of images*.

    **Example**

    >>> import jax
    >>> from numpyro.infer import MCMC
    >>> from ebmpp import Bernoulli, BlockedGibbs, layered
    >>> rbm = layered(v=Bernoulli(4), h=Bernoulli(3))
    >>> params = rbm.init(jax.random.key(0))
    >>> mcmc = MCMC(BlockedGibbs(rbm), num_warmup=5, num_samples=20, num_chains=2,
    ...             chain_method="vectorized", progress_bar=False)
    >>> mcmc.run(jax.random.key(1), params)
    >>> {b: x.shape for b, x in mcmc.get_samples(group_by_chain=True).items()}
    {'h': (2, 20, 3), 'v': (2, 20, 4)}
    >>> mcmc.run(jax.random.key(1), params, v=jax.numpy.ones(4))
    >>> list(mcmc.get_samples())
    ['h']
    """

    def __init__(
        self, graph: FactorGraph, init: str = "uniform", moves: Move | Sequence[Move] | None = None
    ) -> None:
        super().__init__(graph, init)
        self.moves = sweeps.as_moves(f"{type(self).__name__}: moves", moves)

    def _options(self) -> dict[str, Any]:
        return super()._options() | ({} if self.moves is None else {"moves": self.moves})

    def _moves(self, target: Target) -> tuple[Move, ...]:
        return sweeps.resolve_moves(target.graph, self.moves, target.clamped, exact=False)

    @property
    def _proposes(self) -> bool:
        """Whether there is an acceptance to be told."""
        return any(move.proposes for move in self.moves or ())

    def _init_one(self, rng_key: Array, target: Target, init_params: dict | None) -> GibbsState:
        z = target.from_rows(self._start(target, rng_key, init_params))
        every = jnp.ones(target.batch, jnp.result_type(float)) if self._proposes else None
        return GibbsState(z, jnp.zeros((), jnp.int32), every, rng_key)

    def _sample_one(self, state: GibbsState, target: Target) -> GibbsState:
        moves, i, mean = self._moves(target), state.i + 1, state.acceptance
        # uint32 needs no care for x64, and wraps where int32 would go negative
        keys = target.keys(state.rng_key, i.astype(jnp.uint32))
        x, taken = draw_sweep(target, target.to_rows(state.z), moves, keys)
        if mean is not None:
            proposals = sum(move.proposes for move in moves)
            share = taken.reshape(target.batch) / proposals if proposals else jnp.ones(target.batch)
            mean = (mean + (share - mean) / i.astype(share.dtype)).astype(mean.dtype)
        return GibbsState(target.from_rows(x), i, mean, state.rng_key)

    def get_diagnostics_str(self, state: GibbsState) -> str:
        """Sweeps done, layers and free units, for the progress bar; and acceptance where there is such."""
        units = sum(self.graph.families[b].size for b in state.z)
        clamped = [b for b in self.graph.families if b not in state.z]
        layers = len(schedule(self.graph, clamped))
        told = f"{int(np.max(state.i))} sweeps, {layers} layers, {units} free units"
        mean = state.acceptance
        return told if mean is None else f"{told}, acceptance {np.asarray(mean).mean():.2g}"
