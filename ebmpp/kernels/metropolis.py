# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled Metropolis."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ebmpp.graph import FactorGraph
from ebmpp.kernels.coupling import CouplingState, MaximalCoupling
from ebmpp.moves import Layer, Move, Target, sweeps


class MetropolisCoupling(MaximalCoupling):
    """Pairs of Metropolis chains that share proposals, a kernel for :class:`numpyro.infer.MCMC`.

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

    >>> import jax
    >>> from numpyro.infer import MCMC
    >>> from ebmpp import Spin, layered
    >>> from ebmpp.kernels import MetropolisCoupling
    >>> rbm = layered(v=Spin(4), h=Spin(3))
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
