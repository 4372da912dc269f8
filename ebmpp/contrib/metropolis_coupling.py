# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled Metropolis chains of Taniguchi et al. (2023)."""

from collections.abc import Sequence

import numpy as np

from ebmpp.graph import FactorGraph
from ebmpp.kernels import CouplingState, MaximalCoupling
from ebmpp.moves import Layer, Target, metropolis_sweep
from ebmpp.moves.move import Move


class MetropolisCoupling(MaximalCoupling):
    """Pairs of Metropolis chains that share proposals, a kernel for :class:`numpyro.infer.MCMC`.

    For models of some ten units, and for comparison with published results.

    All free blocks are proposed at once, from a distribution that does not depend on the chain, so in larger
    models nearly every proposal is rejected. From one start the two chains of a pair are equal as soon as the
    first proposal is rejected, after one sweep: **estimates from such pairs are unbiased in name only**. The
    correction is carried by pairs so rare that a run never sees one. The diagnostics report the acceptance.

    :param graph: the declaration.
    :param proposal: "uniform", which Bernoulli, Spin and Categorical blocks have; or "initial", the
        distribution of initial values, which every family has.
    :param lag: sweeps by which the leading chain is ahead, at least 1.
    :param marginalize: blocks that are summed out of the acceptance ratio and drawn from their conditionals
        afterwards; no two of them interact.
    :param init: "uniform", or "local_mode": one sweep from a local mode.
    :raises ArgumentError: for a lag below 1, an unknown proposal, start or block, or if no block is left.
    :raises DeclarationError: for a uniform proposal of a block without a uniform distribution.
    :raises IntractableError: for blocks to sum out that interact.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), *End-to-end training of deep Boltzmann machines by
       unbiased contrastive divergence with local mode initialization*, Algorithms 3 and 4.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import MetropolisCoupling
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Spin(4), h=ebmpp.Spin(3))
    >>> pairs = MCMC(MetropolisCoupling(rbm, init="local_mode"), num_warmup=0, num_samples=30,
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
        metropolis_sweep(graph, (), proposal, self.marginalize)

    def _moves(self, target: Target) -> tuple[Move, ...]:
        clamped = tuple(target.clamped)
        summed = tuple(b for b in self.marginalize if b not in clamped)
        if set(summed) == set(target.free):  # nothing is left to propose: an exact draw
            return (Layer(summed, "maximal"),)
        return metropolis_sweep(target.graph, clamped, self.proposal, summed)

    def get_diagnostics_str(self, state: CouplingState) -> str:
        """Return the number of pairs that have met, their mean meeting time, and the acceptance."""
        proposals = 2 * state.t - self.lag  # the following chain made none in the first `lag` sweeps
        rate = np.asarray(state.accepted).mean() / np.asarray(proposals).mean()
        return f"{super().get_diagnostics_str(state)}, acceptance {rate:.2g}"
