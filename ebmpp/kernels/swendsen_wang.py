# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Cluster sampling of blocks whose units interact."""

from ebmpp.graph import FactorGraph
from ebmpp.kernels.gibbs import BlockedGibbs
from ebmpp.moves import Move, Target, sweeps


class SwendsenWang(BlockedGibbs):
    """Blocks whose units interact, cluster by cluster: a kernel for :class:`numpyro.infer.MCMC`.

    For lattices whose regions :class:`~ebmpp.BlockedGibbs` turns unit by unit, near a critical coupling or
    above it. The other blocks are drawn layer by layer. Params and clamped blocks are passed as to
    :class:`~ebmpp.BlockedGibbs`; the state is the same. Pairs of such chains are
    ``MaximalCoupling(graph, coupling=cluster_sweep(graph))``.

    :param graph: the declaration; see :class:`~ebmpp.moves.Clusters` for what makes clusters.
    :param init: see :class:`~ebmpp.kernels.RowKernel`.
    :raises IntractableError: for a graph in which no units of one block interact, or not in a way that makes
        clusters.

    **References**

    1. Swendsen, Wang (1987), *Nonuniversal critical dynamics in Monte Carlo simulations*.

    **Example**

    >>> import jax, networkx as nx
    >>> from numpyro.infer import MCMC
    >>> from ebmpp import FactorGraph, Spin
    >>> from ebmpp.kernels import SwendsenWang
    >>> lattice = FactorGraph.from_networkx(nx.grid_2d_graph(6, 6), Spin, shared=True, bias=False)
    >>> mcmc = MCMC(SwendsenWang(lattice), num_warmup=5, num_samples=20, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), {"x:x": jax.numpy.asarray(0.44)})
    >>> mcmc.get_samples()["x"].shape
    (20, 36)
    """

    def __init__(self, graph: FactorGraph, init: str = "uniform") -> None:
        super().__init__(graph, init)
        sweeps.cluster_sweep(graph)

    def _moves(self, target: Target) -> tuple[Move, ...]:
        return sweeps.cluster_sweep(target.graph, target.clamped)
