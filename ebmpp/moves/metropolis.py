# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The Metropolis move: all blocks proposed at once, without regard to where the chain is."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random, sharding
from ebmpp.core.types import Chains, Keep, Keys, Rows
from ebmpp.errors import ArgumentError, DeclarationError, IntractableError, clash
from ebmpp.families.family import Family
from ebmpp.graph import FactorGraph, energy
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.gibbs import hold, num_words, split_words
from ebmpp.moves.move import Drawn, Move, agree, flat
from ebmpp.moves.target import Target

#: Laws to propose from: uniform, or each family's law of initial values, which every family has.
PROPOSALS = ("uniform", "initial")


@dataclasses.dataclass(frozen=True)
class Metropolis(Move):
    """``blocks`` proposed together, and accepted by the energy.

    For models of some ten units.

    The two chains of a pair get one proposal and one uniform, and meet when both accept (or, from the same
    state, when the leading chain stays). The target is the joint law given the other blocks or, with
    ``marginalize``, what is left of it when those blocks are summed out in closed form.

    :param blocks: what is proposed.
    :param proposal: "uniform", or "initial": each family's law of initial values, which every family has.
    :param marginalize: blocks that are summed out; no two of them interact.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), Algorithms 3 and 4; eqs. 20 to 26 for the marginals.
    2. Wang, O'Leary, Jacob (2021), *Maximal couplings of the Metropolis-Hastings algorithm*.
    """

    blocks: tuple[str, ...]
    proposal: str = "uniform"
    marginalize: tuple[str, ...] = ()
    proposes = 1

    def check(self, graph: FactorGraph) -> None:
        """Check proposal and blocks.

        :raises ArgumentError: for an unknown proposal.
        :raises DeclarationError: for a block without a uniform law.
        :raises IntractableError: for two blocks that cannot be summed out together.
        """
        if self.proposal not in PROPOSALS:
            raise ArgumentError(f"proposal {self.proposal!r} is unknown; choose among {PROPOSALS}")
        for a, b in graph.interacting(self.marginalize):
            raise IntractableError(f"{clash(a, b)}, so they cannot be summed out together")
        for b in self.blocks if self.proposal == "uniform" else ():
            if not _is_uniform(graph.families[b]):
                raise DeclarationError(
                    f"block {b!r} ({graph.families[b]!r}) has no uniform law to propose from; "
                    'proposal="initial" takes the law of its initial values instead'
                )

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        around = (*self.blocks, *graph.neighbours((*self.blocks, *self.marginalize)))
        return tuple(b for b in dict.fromkeys(around) if b not in self.marginalize)

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        proposal, log_u = self._propose(target, keys)
        proposed = hold(target.keep, x, proposal)
        ratio = self._score(target, {**x, **proposed}) - self._score(target, x)
        took = log_u < ratio
        return {b: where_rows(took, v, x[b]) for b, v in proposed.items()}, took.astype(jnp.int32)

    def attempt(self, target: Target, focused: Any, z: Chains, trial: Trial) -> Attempt:
        rows = len(trial.keys)
        proposal, log_u = self._propose(target, trial.keys)
        # Blocks and units that are not proposed may differ, so each chain has its own score of a proposal.
        now = flat(z)
        then = flat(hold(target.keep, z, {b: jnp.stack([v, v]) for b, v in proposal.items()}))
        stacked = {b: jnp.concatenate([v, then.get(b, v)]) for b, v in now.items()}
        score = self._score(target, stacked)
        ratio = (score[2 * rows :] - score[: 2 * rows]).reshape(2, rows)
        took = log_u[None] < ratio
        took = took.at[1].set(jnp.where(trial.same, took[0], took[1]))
        chosen = {b: where_rows(took.reshape(-1), then[b], now[b]) for b in self.blocks}
        x, y = ({b: v[i * rows : (i + 1) * rows] for b, v in chosen.items()} for i in range(2))
        every = jnp.ones(rows, bool)
        # both take the one proposal, or both stay where they are one already
        stay = {b: agree(trial.flags, (b,), rows) & ~took.any(0) for b in self.blocks}
        together = {b: took.all(0) | stay[b] | trial.same for b in self.blocks}
        return Attempt(x, y, every, every, jnp.isnan(ratio).any(0), together, took.sum(0, dtype=jnp.int32))

    def _propose(self, target: Target, keys: Keys) -> tuple[dict[str, Array], Array]:
        refuse_held(self.marginalize, target.keep)
        graph = target.graph
        count = num_words(graph, self.blocks)
        words = random.words(keys, count + 1)
        parts = split_words(graph, self.blocks, words[:, :count])
        proposal = {b: graph.families[b].initial(parts[b]) for b in self.blocks}
        return proposal, jnp.log(random.uniform(words[:, count]))

    def _score(self, target: Target, x: Rows) -> Array:
        """Log of target over proposal, row by row, up to a constant; the base measures cancel."""
        graph, params = target.graph, target.params

        def one(t: Mapping[str, Array]) -> Array:
            reference = sum((graph.families[b].default_eta() * t[b]).sum() for b in self.blocks)
            return energy.log_marginal(graph, params, t, self.marginalize) - reference

        kept = {b: v for b, v in x.items() if b not in self.marginalize}
        return jax.vmap(one)(graph.statistics(kept))


def refuse_held(marginalize: tuple[str, ...], keep: Keep) -> None:
    """:raises IntractableError: the sum over a block runs over all its values, the observed ones too."""
    for b in marginalize:
        if b in keep:
            raise IntractableError(
                f"block {b!r} has observed units, so it cannot be summed out: leave it out of marginalize"
            )


def _is_uniform(family: Family) -> bool:
    """Whether the law of initial values gives every value of a unit the same probability."""
    with sharding.at_once():  # a kernel asks while it is traced
        states = family.states()
    if states is None:
        return False
    unit = dataclasses.replace(family, shape=(1,))
    with sharding.at_once():
        values = jnp.asarray(states)[:, None]
        inner = (unit.default_eta()[None] * unit.statistics(values)).reshape(len(states), -1).sum(-1)
        return float(np.ptp(np.asarray(inner + unit.log_base_measure(values)[:, 0]))) < 1e-6
