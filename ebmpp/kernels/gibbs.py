# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Kernels of one sweep per step: blocked Gibbs and Swendsen-Wang."""

from typing import Any, NamedTuple

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.core import Blocks
from ebmpp.graph import FactorGraph
from ebmpp.graph.declaration import schedule
from ebmpp.kernels.base import (
    InitParams,
    RowKernel,
    all_still,
    describe_acceptance,
    describe_still,
)
from ebmpp.moves import Move, Target, cluster_sweep, sweeps
from ebmpp.moves.move import draw_sweep, num_proposals
from ebmpp.moves.sweeps import MovesLike


class GibbsState(NamedTuple):
    """State of :class:`BlockedGibbs`.

    - **z** - the free blocks, each of shape ``(*batch, *shape)``.
    - **i** - sweeps since the initial state.
    - **acceptance** - share of accepted proposals, shape ``(*batch,)``, 1 before the
      first; None where no move makes proposals.
    - **rng_key** - the run's key; sweep ``i`` draws from the key and ``i``, so it does
      not change.
    - **still** - by block, True while no sweep has changed ``z``.
    """

    z: Blocks
    i: Array
    acceptance: Array | None
    rng_key: Array
    still: Blocks


class BlockedGibbs(RowKernel[GibbsState]):
    """Gibbs sweeps over the layers of a graph, a kernel for :class:`numpyro.infer.MCMC`.

    The first choice for any graph; :class:`ParallelTempering` where chains stay in one
    mode.

    Params are the first argument of ``mcmc.run``, clamped blocks its keyword arguments.
    Clamped values may have leading axes: with ``v`` of shape ``(N, 784)``, every chain
    holds N rows, one posterior of the free blocks each, with draws of shape
    ``(N, *shape)``. A row draws from its own key, so row 0 is the chain that ``v[0]``
    alone would give. An :class:`~ebmpp.Observed` block is clamped at its known units
    only. Params with a leading axis of parameter sets run a chain of each set in one
    program, with draws ``(sets, *batch, *shape)``: set i is the chain with the key
    ``jax.random.fold_in(key, i)``, up to rounding.

    All of NumPyro's chain methods run the same chains from the same random words, up to
    the rounding of matrix products.

    :param init: "uniform", or "local_mode": one sweep from a local mode.
    :param moves: moves of a sweep in place of draws of all layers, such as
        :func:`~ebmpp.moves.cluster_sweep` returns, or custom ones. Moves that are not
        ``exact`` **sample another distribution**.
    :raises ArgumentError: for anything but moves, or an unknown ``init``; in a run, for
        moves that do not change all free blocks and no other.

    **References**

    1. Geman, Geman (1984), *Stochastic relaxation, Gibbs distributions, and the
       Bayesian restoration of images*.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> params = rbm.init(jax.random.key(0))
    >>> mcmc = MCMC(ebmpp.BlockedGibbs(rbm), num_warmup=5, num_samples=20, num_chains=2,
    ...             chain_method="vectorized", progress_bar=False)
    >>> mcmc.run(jax.random.key(1), params)
    >>> {b: x.shape for b, x in mcmc.get_samples(group_by_chain=True).items()}
    {'h': (2, 20, 3), 'v': (2, 20, 4)}
    >>> mcmc.run(jax.random.key(1), params, v=jax.numpy.ones(4))
    >>> list(mcmc.get_samples())
    ['h']
    """

    _as_rows = True
    _takes_sets = True

    def __init__(
        self, graph: FactorGraph, init: str = "uniform", moves: MovesLike = None
    ) -> None:
        super().__init__(graph, init)
        self.moves: Any = sweeps.as_moves(f"{type(self).__name__}: moves", moves)

    def _moves(self, target: Target) -> tuple[Move, ...]:
        return sweeps.resolve_moves(
            target.graph, self.moves, target.clamped, exact=False
        )

    def _init_one(
        self, rng_key: Array, target: Target, init_params: InitParams
    ) -> GibbsState:
        z = target.from_rows(self._start(target, rng_key, init_params))
        proposes = num_proposals(self._moves(target))
        acceptance = jnp.ones(target.batch) if proposes else None
        return GibbsState(z, jnp.int32(0), acceptance, rng_key, all_still(z))

    def _sample_one(self, state: GibbsState, target: Target) -> GibbsState:
        moves = self._moves(target)
        i = state.i + 1
        mean = state.acceptance
        # uint32 does not depend on x64, and wraps where int32 would become negative
        keys = target.keys(state.rng_key, i.astype(jnp.uint32))
        x, accepted = draw_sweep(target, target.to_rows(state.z), moves, keys)
        if mean is not None:
            share = accepted.reshape(target.batch) / num_proposals(moves)
            mean = (mean + (share - mean) / i.astype(share.dtype)).astype(mean.dtype)
        return state._replace(z=target.from_rows(x), i=i, acceptance=mean)

    def get_diagnostics_str(self, state: GibbsState) -> str:
        """Return numbers of sweeps, layers and units, acceptance, and unmoved blocks."""
        units = sum(self.graph.sizes(state.z))
        clamped = [b for b in self.graph.families if b not in state.z]
        layers = schedule(self.graph, clamped)
        parts = sum(self.graph.num_parts(layer[0]) for layer in layers)
        name = "layer" if parts == 1 else "layers"
        text = f"{int(np.max(state.i))} sweeps, {parts} {name}, {units} free units"
        return text + describe_acceptance(state) + describe_still(state, state.i)


class SwendsenWang(BlockedGibbs):
    """Cluster updates of blocks whose units interact: a kernel for :class:`numpyro.infer.MCMC`.

    For lattices near a critical coupling or above it, in which
    :class:`~ebmpp.BlockedGibbs` flips regions unit by unit. The other blocks are drawn
    layer by layer. Params, clamped blocks and state are as with
    :class:`~ebmpp.BlockedGibbs`. Coupled, the sweep is
    ``MaximalCoupling(graph, coupling=cluster_sweep(graph))``.

    :param init: "uniform", or "local_mode": one sweep from a local mode.
    :raises IntractableError: if no units of one block interact, or not in a way that
        makes clusters.

    **Example**

    >>> import jax, networkx as nx, ebmpp
    >>> from numpyro.infer import MCMC
    >>> grid = nx.grid_2d_graph(6, 6)
    >>> lattice = ebmpp.FactorGraph.from_networkx(grid, ebmpp.Spin, shared=True, bias=False)
    >>> mcmc = MCMC(ebmpp.SwendsenWang(lattice), num_warmup=5, num_samples=20, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), {"x:x": jax.numpy.asarray(0.44)})
    >>> mcmc.get_samples()["x"].shape
    (20, 36)
    """

    def __init__(self, graph: FactorGraph, init: str = "uniform") -> None:
        super().__init__(graph, init)
        self.moves = cluster_sweep
        cluster_sweep(graph)  # refuses graphs without clusters
