# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled blocked Gibbs, and coupled Metropolis."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ebmpp.graph import FactorGraph
from ebmpp.kernels.coupled import CoupledKernel, CouplingState
from ebmpp.moves import couplings, sweeps
from ebmpp.moves.layer import Layer
from ebmpp.moves.move import Move
from ebmpp.moves.target import Target


class MaximalCoupling(CoupledKernel):
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
        super().__init__(graph, lag, init)
        if coupling is None or isinstance(coupling, str):
            couplings.resolve(coupling, graph.block_layers)
        single = (coupling,) if isinstance(coupling, Move) else coupling
        self.coupling = single if single is None or isinstance(single, str) else tuple(single)

    def _options(self) -> dict[str, Any]:
        named = {} if self.coupling is None else {"coupling": self.coupling}
        return super()._options() | named

    def target(self, model_args: tuple, model_kwargs: dict[str, Any] | None, check: bool) -> Target:
        made = super().target(model_args, model_kwargs, check)
        if check and not isinstance(self.coupling, str):
            sweeps.check_params(made, self.coupling or ())
        return made

    def _moves(self, target: Target) -> tuple[Move, ...]:
        return sweeps.resolve_moves(target.graph, self.coupling, target.clamped)


class MetropolisCoupling(CoupledKernel):
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
        super().__init__(graph, lag, init)
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
