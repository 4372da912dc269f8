# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Metropolis moves of Taniguchi et al. (2023), which propose regardless of the state."""

from collections.abc import Iterable, Sequence
import dataclasses

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, omit, random, sharding
from ebmpp.core.types import Blocks, Chains, Keys, Rows
from ebmpp.errors import ArgumentError, DeclarationError
from ebmpp.families import Family
from ebmpp.families.family import num_words, split_words
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.kernels import MaximalCoupling
from ebmpp.moves import Layer, Target
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.gibbs import keep_observed
from ebmpp.moves.mixture import accept_proposals
from ebmpp.moves.move import (
    Drawn,
    Move,
    both_as_rows,
    refuse_interacting,
    refuse_observed,
)

#: Distributions to propose from: uniform, or each family's distribution of initial
#: values.
PROPOSALS = ("uniform", "initial")


@dataclasses.dataclass(frozen=True)
class Metropolis(Move[None]):
    """Joint proposal of ``blocks`` from a fixed distribution, accepted by the energy.

    For models of some ten units. The target is the joint distribution given the other
    blocks or, with ``marginalize``, its marginal with those blocks summed out in closed
    form.

    :param blocks: blocks that are proposed.
    :param proposal: "uniform", or "initial": each family's distribution of initial
        values.
    :param marginalize: blocks that are summed out; no two of them interact.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), Algorithms 3 and 4; eqs. 20 to 26 for
       the marginals.
    2. Wang, O'Leary, Jacob (2021), *Maximal couplings of the Metropolis-Hastings
       algorithm*.
    """

    blocks: tuple[str, ...]
    proposal: str = "uniform"
    marginalize: tuple[str, ...] = ()
    proposes = 1

    def check(self, graph: FactorGraph) -> None:
        """Check proposal and blocks.

        :raises ArgumentError: for an unknown proposal.
        :raises DeclarationError: for a block without a uniform distribution.
        :raises IntractableError: for blocks that cannot be summed out together.
        """
        checks.choice("proposal", self.proposal, PROPOSALS)
        refuse_interacting(graph, self.marginalize, "summed out")
        for b in self.blocks if self.proposal == "uniform" else ():
            if not _is_uniform(graph.families[b]):
                raise DeclarationError(
                    f"block {b!r} ({graph.families[b]!r}) has no uniform distribution. Use "
                    'proposal="initial", the distribution of its initial values.'
                )

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        """See :class:`~ebmpp.moves.Move`."""
        proposal, log_u = self._propose(target, keys)
        proposed = keep_observed(target.keep, x, proposal)
        ratio = self._score(target, {**x, **proposed}) - self._score(target, x)
        accept = log_u < ratio
        drawn = {b: where_rows(accept, v, x[b]) for b, v in proposed.items()}
        return drawn, accept.astype(jnp.int32)

    def attempt(
        self,
        target: Target,
        focused: None,
        z: Chains,
        trial: Trial,
    ) -> Attempt:
        """See :class:`~ebmpp.moves.Move`."""
        proposal, log_u = self._propose(target, trial.keys)
        # other blocks and observed units may differ, so each chain has its own score of
        # a proposal
        both = {b: jnp.stack([v, v]) for b, v in proposal.items()}
        both = keep_observed(target.keep, z, both)
        states = {b: jnp.concatenate([v, both.get(b, v)]) for b, v in z.items()}
        score = self._score(target, both_as_rows(states)).reshape(4, -1)
        ratio = score[2:] - score[:2]
        choice = jnp.where(log_u[None] < ratio, 0, -1)
        return accept_proposals(z, both, choice, jnp.isnan(ratio).any(0), trial)

    def _propose(self, target: Target, keys: Keys) -> tuple[Blocks, Array]:
        refuse_observed(self.marginalize, target.keep)
        families = {b: target.graph.families[b] for b in self.blocks}
        count = num_words(families)
        words = random.words(keys, count + 1)
        parts = split_words(families, words[:, :count])
        proposal = {b: family.initial(parts[b]) for b, family in families.items()}
        return proposal, jnp.log(random.uniform(words[:, count]))

    def _score(self, target: Target, x: Rows) -> Array:
        """Return the log of target over proposal of each row, up to a constant."""
        graph = target.graph
        params = target.params

        def score(t):
            families = graph.families
            slopes = [(families[b].default_eta() * t[b]).sum() for b in self.blocks]
            return energy.log_marginal(graph, params, t, self.marginalize) - sum(slopes)

        rest = omit(x, self.marginalize)
        return jax.vmap(score)(graph.statistics(rest))


def _is_uniform(family: Family) -> bool:
    """Return True if the distribution of initial values is uniform."""
    with sharding.eager():  # also called while a kernel is traced
        states = family.states()
    if states is None:
        return False
    unit = dataclasses.replace(family, shape=(1,))
    with sharding.eager():
        values = jnp.asarray(states)[:, None]
        terms = unit.default_eta()[None] * unit.statistics(values)
        inner = terms.reshape(len(states), -1).sum(-1)
        log_probs = np.asarray(inner + unit.log_base_measure(values)[:, 0])
    return float(np.ptp(log_probs)) < 1e-6


def metropolis_sweep(
    graph: FactorGraph,
    clamped: Iterable[str] = (),
    proposal: str = "uniform",
    marginalize: str | Sequence[str] = (),
) -> tuple[Move, ...]:
    """Return a :class:`Metropolis` move of free blocks, and a draw of those it sums out.

    :param graph: the declaration.
    :param clamped: names of clamped blocks.
    :param proposal: "uniform" or "initial", see :class:`Metropolis`.
    :param marginalize: blocks that are summed out of the acceptance ratio.
    :raises ArgumentError: for an unknown proposal or block, or if no block is left to
        propose.
    :raises DeclarationError: for a block without a uniform distribution.
    :raises IntractableError: for blocks that cannot be summed out together.
    """
    checks.instance("metropolis_sweep: graph", graph, FactorGraph)
    marginalize = (marginalize,) if isinstance(marginalize, str) else tuple(marginalize)
    free = tuple(b for layer in schedule(graph, clamped) for b in layer)
    unknown = [b for b in marginalize if b not in free]
    blocks = tuple(b for b in free if b not in marginalize)
    if unknown or not blocks:
        raise ArgumentError(
            f"marginalize must name some of the free blocks {free} and leave at least "
            f"one, got {marginalize}."
        )
    move = Metropolis(blocks, proposal, marginalize)
    move.check(graph)
    return (move, Layer(marginalize, "maximal")) if marginalize else (move,)


class MetropolisCoupling(MaximalCoupling):
    """Pairs of Metropolis chains that share proposals, a kernel for :class:`numpyro.infer.MCMC`.

    For models of some ten units, and for comparison with published results.

    All free blocks are proposed at once, from a distribution that does not depend on
    the chain, so in larger models nearly every proposal is rejected. From one start the
    two chains of a pair are equal as soon as the first proposal is rejected, after one
    sweep: **estimates from such pairs are unbiased in name only**. The correction is
    carried by pairs so rare that a run never sees one. The diagnostics report the
    acceptance.

    :param graph: the declaration.
    :param proposal: "uniform", which Bernoulli, Spin and Categorical blocks have; or
        "initial", the distribution of initial values, which every family has.
    :param lag: sweeps by which the leading chain is ahead, at least 1.
    :param marginalize: blocks that are summed out of the acceptance ratio and drawn
        from their conditionals afterwards; no two of them interact.
    :param init: "uniform", or "local_mode": one sweep from a local mode.
    :raises ArgumentError: for a lag below 1, an unknown proposal, start or block, or if
        no block is left.
    :raises DeclarationError: for a uniform proposal of a block without a uniform
        distribution.
    :raises IntractableError: for blocks to sum out that interact.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), *End-to-end training of deep Boltzmann
       machines by unbiased contrastive divergence with local mode initialization*,
       Algorithms 3 and 4.

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
        self.marginalize = (
            (marginalize,) if isinstance(marginalize, str) else tuple(marginalize)
        )
        metropolis_sweep(graph, (), proposal, self.marginalize)

    def _moves(self, target: Target) -> tuple[Move, ...]:
        clamped = tuple(target.clamped)
        summed = tuple(b for b in self.marginalize if b not in clamped)
        if set(summed) == set(target.free):  # nothing is left to propose: an exact draw
            return (Layer(summed, "maximal"),)
        return metropolis_sweep(target.graph, clamped, self.proposal, summed)
