# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Metropolis proposals from a mixture of conditionals of the model.

Where the free blocks are two layers, each independent given the other, the conditional
of one at any value of the other is a product of its units' families. A mixture of these
conditionals, at a *pool* of values, can be drawn from and evaluated, and it resembles
the model where the pool does. The pool is data, a field of the
:class:`~ebmpp.moves.Target`, so another pool compiles nothing. Results are exact for
any pool that is independent of the chains' own draws.

The two chains of a pair get one proposal and one uniform, so they meet as soon as both
accept.
"""

from collections.abc import Iterable
import dataclasses

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Chains,
    Keys,
    PerRow,
    Rows,
    checks,
    full_precision,
    num_rows,
    random,
)
from ebmpp.errors import IntractableError, StateError
from ebmpp.families.family import draw_rows, num_words
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.move import (
    Drawn,
    Layer,
    Move,
    both_as_rows,
    one_chain,
    refuse_interacting,
    refuse_observed,
    rows_agree,
)
from ebmpp.moves.target import Pool, Target

# Cost in Gibbs sweeps of processor time on bars and stripes 16x16: a sweep with a pool
# of 100 costs 4.4, of 300 7.7, of 1500 13.7, with 100 of 1500 7.4; an exact draw costs
# 42, 66, 166 and 103, and 972 without a pool. A pool of 30 lacks modes, and some pairs
# took a thousand sweeps. Digits 64x16, pool of 100: 2.4; 20 against 37.
_COMPONENTS = 300


def read_blocks(
    graph: FactorGraph, blocks: tuple[str, ...], marginalize: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the blocks on which the acceptance of proposed ``blocks`` depends."""
    around = (*blocks, *graph.neighbours((*blocks, *marginalize)))
    return tuple(b for b in dict.fromkeys(around) if b not in marginalize)


def accept_proposals(
    z: Chains,
    proposals: Blocks,
    log_ratio: Array,
    log_u: Array,
    trial: Trial,
) -> Attempt:
    """Accept or reject proposals in both chains, by one uniform and log-ratios ``(2, rows)``.

    :param proposals: ``(2, rows, *shape)`` or, where both chains have one proposal,
        ``(rows, *shape)``.
    """
    accept = log_u[None] < log_ratio
    accept = accept.at[1].set(jnp.where(trial.same, accept[0], accept[1]))
    new = {
        b: where_rows(accept, jnp.broadcast_to(v, z[b].shape), z[b])
        for b, v in proposals.items()
    }
    together = {}
    for b in proposals:
        # both accept the proposal, or both stay where they agreed
        agree = rows_agree(trial.flags, (b,), len(trial.keys))
        together[b] = accept.all(0) | (agree & ~accept.any(0)) | trial.same
    broken = jnp.isnan(log_ratio).any(0)
    num_accepted = accept.sum(0, dtype=jnp.int32)
    return Attempt.final(
        one_chain(new, 0), one_chain(new, 1), broken, together, num_accepted
    )


@dataclasses.dataclass(frozen=True)
class Mixture(Move[None]):
    """Proposal of ``blocks`` from the target's pool, accepted with ``marginalize`` summed out.

    For models in which pairs of Gibbs chains stay in separate modes, and a single draw
    can hit a mode.

    Proposals are drawn from the conditionals ``p(blocks | marginalize = h_c)``, with
    ``c`` uniform over the pool. Acceptance falls with the dimension, and with a pool
    that lacks modes of the model.

    :param blocks: all free blocks but ``marginalize``, no two of which interact.
    :param marginalize: the other free blocks, which are summed out; no two of them
        interact either.
    :param components: a proposal is drawn from this many components of the pool, spread
        evenly over it from a random first one, or from all of a smaller pool. It is
        exact too, and faster, since all components are evaluated at each state.

    **References**

    1. Tierney (1994), *Markov chains for exploring posterior distributions*, for
       independence chains.
    2. Wang, O'Leary, Jacob (2021), *Maximal couplings of the Metropolis-Hastings
       algorithm*.
    """

    blocks: tuple[str, ...]
    marginalize: tuple[str, ...]
    components: int = _COMPONENTS
    proposes = 1

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        return read_blocks(graph, self.blocks, self.marginalize)

    def check(self, graph: FactorGraph) -> None:
        """Refuse a mixture of no component, and blocks that interact."""
        checks.count("Mixture: components", self.components)
        refuse_interacting(graph, self.blocks, "proposed from a mixture")
        refuse_interacting(graph, self.marginalize, "summed out")

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        part, proposal, log_u = self._propose(target, keys)

        def score(x):
            log_target = self._log_target(target, x)
            return log_target - self._log_mixture(target, part, x)

        accept = log_u < score({**x, **proposal}) - score(x)
        drawn = {b: where_rows(accept, v, x[b]) for b, v in proposal.items()}
        return drawn, accept.astype(jnp.int32)

    def attempt(
        self,
        target: Target,
        focused: None,
        z: Chains,
        trial: Trial,
    ) -> Attempt:
        rows = len(trial.keys)
        part, proposal, log_u = self._propose(target, trial.keys)
        # all blocks are proposed, summed out or clamped, so both chains have one score
        # of a proposal
        proposed = one_chain(z, 0) | proposal
        states = {b: jnp.concatenate([v, proposed[b][None]]) for b, v in z.items()}
        log_target = self._log_target(target, both_as_rows(states)).reshape(3, rows)

        def log_mixture(x):
            return self._log_mixture(target, part, x)

        score = log_target - jax.vmap(log_mixture)({b: states[b] for b in self.blocks})
        return accept_proposals(z, proposal, score[2] - score[:2], log_u, trial)

    def _propose(self, target: Target, keys: Keys) -> tuple[Pool, Blocks, Array]:
        """Return the components of each row's proposal, the proposals, and log-uniforms."""
        refuse_observed((*self.blocks, *self.marginalize), target.keep)
        pool = target.pool
        if pool is None:
            raise StateError(
                f"pool must have values of {self.marginalize} for {self}, got None. Pass "
                'them as in unbiased_expectation(..., coupling="mixture", pool={"v": rows}).'
            )
        families = {b: target.graph.families[b] for b in self.blocks}
        count = num_words(families)
        words = random.words(keys, count + 3)

        def number(word, below):
            return (word % jnp.uint32(below)).astype(jnp.int32)

        size = len(pool.log_normalizer)
        used = min(self.components, size)
        component = number(words[:, count], used)
        part = pool
        if used < size:
            first = number(words[:, count + 2], size)
            at = (first[:, None] + jnp.arange(used) * (size // used)) % size
            component = jnp.take_along_axis(at, component[:, None], axis=1)[:, 0]
            part = jax.tree.map(lambda a: a[at], pool)
        eta = {b: pool.eta[b][component] for b in self.blocks}
        proposal = draw_rows(families, eta, words[:, :count])
        return part, proposal, jnp.log(random.uniform(words[:, count + 1]))

    def _log_target(self, target: Target, x: Rows) -> PerRow:
        """Return the log density of each row, up to a constant and the base measures."""
        others = {b: v for b, v in x.items() if b not in self.marginalize}

        def log_prob_at(t):
            return energy.log_marginal(target.graph, target.params, t, self.marginalize)

        return jax.vmap(log_prob_at)(target.graph.statistics(others))

    @full_precision
    def _log_mixture(self, target: Target, part: Pool, x: Rows) -> PerRow:
        """Return the log density of the proposals, up to a constant and the base measures.

        :param part: components that all rows share, or with an axis of rows before that
            of components.
        """
        statistics = target.graph.statistics({b: x[b] for b in self.blocks})
        logs = -part.log_normalizer
        for b, t in statistics.items():
            t = t.reshape(len(t), -1)
            eta = part.eta[b].reshape(*part.log_normalizer.shape, -1)
            is_shared = eta.ndim == 2
            logs = logs + (t @ eta.T if is_shared else jnp.einsum("rd,rcd->rc", t, eta))
        return jax.nn.logsumexp(logs, axis=-1)


def make_pool(target: Target, move: Mixture, rows: Rows) -> Pool:
    """Return the conditionals from which a move proposes.

    :param rows: values of the blocks that the move sums out, ``(components, *shape)``
        each.
    """
    graph = target.graph
    count = num_rows(rows)
    around = {b: rows[b] for b in move.marginalize} | target.clamped_rows(count)
    eta = energy.natural_rows(graph, target.params, around, move.blocks)
    per_unit = [graph.families[b].log_normalizer(e) for b, e in eta.items()]
    log_normalizers = [units.reshape(count, -1).sum(-1) for units in per_unit]
    return Pool({b: eta[b] for b in move.blocks}, jnp.stack(log_normalizers).sum(0))


def mixture_sweep(graph: FactorGraph, clamped: Iterable[str] = ()) -> tuple[Move, ...]:
    """Return a :class:`Mixture` move of the smaller layer, and draws of both layers.

    :param clamped: names of clamped blocks.
    :raises IntractableError: unless the free blocks are two layers, each independent
        given the other.
    """
    layers = schedule(graph, clamped)
    inside = [b for layer in layers for b in layer if b in graph.splits]
    if inside or len(layers) != 2:
        raise checks.error(
            "mixture: free blocks",
            "in two layers, each independent given the other",
            f"units of block {inside[0]!r} that interact" if inside else layers,
            IntractableError,
            "Use coupling=None or a kind for every layer.",
        )

    def num_units(layer):
        return sum(graph.families[b].size for b in layer)

    small, large = sorted(layers, key=num_units)
    draws = [Layer(blocks, "maximal") for blocks in (large, small, large)]
    return Mixture(small, large), *draws
