# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The mixture move: a layer proposed from a mixture of its own conditionals, the other layer summed out.

Where the free blocks are two layers, each independent given the other, the conditional of one at any value of
the other is a product of its units' families. A mixture of such conditionals, at a *pool* of values, can be
drawn from and evaluated, and where the pool looks like the model so does the mixture: an independence
Metropolis step from it forgets where the chain was. The two chains of a pair get one proposal and one
uniform, so they meet as soon as both accept.

The pool is data: a field of the :class:`~ebmpp.moves.target.Target`, so that another one compiles nothing.
What is made with it is exact whatever the pool, if that is independent of the chains' own draws.
"""

from collections.abc import Iterable
import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Blocks, Chains, Eta, Keys, Params, PerRow, Rows
from ebmpp.errors import ArgumentError, IntractableError, StateError, clash
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.gibbs import draw_rows, num_words
from ebmpp.moves.layer import Layer
from ebmpp.moves.metropolis import refuse_held
from ebmpp.moves.move import Drawn, Move, agree, flat
from ebmpp.moves.target import Pool, Target

# In Gibbs sweeps of processor time, on bars and stripes 16x16: a sweep with a pool of 100 costs 4.4, of 300
# 7.7, of 1500 13.7, with 100 of 1500 7.4; an exact draw is worth 42, 66, 166 and 103, and 972 without a pool.
# One of 30 lacks modes, and some pairs took a thousand sweeps. Digits 64x16, pool of 100: 2.4; 20 for 37.
_COMPONENTS = 300


@dataclasses.dataclass(frozen=True)
class Mixture(Move):
    """``blocks`` proposed from the target's pool, and accepted with ``marginalize`` summed out.

    For pairs that Gibbs moves leave apart, where one draw can hit a mode.

    It is drawn from the conditionals ``p(blocks | marginalize = h_c)``, with ``c`` uniform over the pool.
    Acceptance falls as one draw of the mixture gets less likely to hit where the chains are: with the
    dimension, and with a pool that lacks modes of the model.

    :param blocks: what is proposed: all free blocks but ``marginalize``, no two of which interact.
    :param marginalize: the other free blocks, which are summed out; no two of them interact either.
    :param components: a proposal is from so many components of the pool, spread evenly over it from one that
        is chosen by chance, or from all of a smaller pool: exact too, and quicker, since all of them are
        evaluated at each state.

    **References**

    1. Tierney (1994), *Markov chains for exploring posterior distributions*, for independence chains.
    2. Wang, O'Leary, Jacob (2021), *Maximal couplings of the Metropolis-Hastings algorithm*.
    """

    blocks: tuple[str, ...]
    marginalize: tuple[str, ...]
    components: int = _COMPONENTS
    proposes = 1

    def check(self, graph: FactorGraph) -> None:
        """Check the blocks.

        :raises ArgumentError: for no blocks to propose, or none to sum out, or no components.
        :raises IntractableError: for two blocks that interact and are proposed, or summed out, together; or
            for one whose units interact.
        """
        checks.count("Mixture: components", self.components)
        if not self.blocks or not self.marginalize:
            raise ArgumentError(f"{self} takes at least one block to propose, and one to sum out")
        for blocks, what in ((self.blocks, "proposed"), (self.marginalize, "summed out")):
            for a, b in graph.interacting(blocks):
                raise IntractableError(
                    f"{clash(a, b)}, so they cannot be {what} together: mixture proposals need the free "
                    "blocks in two layers, each independent given the other"
                )

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        around = (*self.blocks, *graph.neighbours((*self.blocks, *self.marginalize)))
        return tuple(b for b in dict.fromkeys(around) if b not in self.marginalize)

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        part, proposal, log_u = self._propose(target, keys)
        score = lambda x: self._log_target(target, x) - self._log_mixture(target, part, x)
        took = log_u < score({**x, **proposal}) - score(x)
        return {b: where_rows(took, v, x[b]) for b, v in proposal.items()}, took.astype(jnp.int32)

    def attempt(self, target: Target, focused: Any, z: Chains, trial: Trial) -> Attempt:
        rows, now = len(trial.keys), flat(z)
        part, proposal, log_u = self._propose(target, trial.keys)
        # All that is not summed out is proposed or held, so both chains have one score of a proposal.
        held = {b: v[:rows] for b, v in now.items()}
        stacked = {b: jnp.concatenate([v, (held | proposal)[b]]) for b, v in now.items()}
        log_target = self._log_target(target, stacked).reshape(3, rows)
        each = {b: stacked[b].reshape(3, rows, *stacked[b].shape[1:]) for b in self.blocks}
        mixture = jax.vmap(lambda x: self._log_mixture(target, part, x))(each)
        score = log_target - mixture
        ratio = score[2] - score[:2]
        took = log_u[None] < ratio
        took = took.at[1].set(jnp.where(trial.same, took[0], took[1]))
        x, y = ({b: where_rows(took[i], proposal[b], z[b][i]) for b in self.blocks} for i in range(2))
        every = jnp.ones(rows, bool)
        # both take the one proposal, or both stay where they are one already
        stay = {b: agree(trial.flags, (b,), rows) & ~took.any(0) for b in self.blocks}
        together = {b: took.all(0) | stay[b] | trial.same for b in self.blocks}
        return Attempt(x, y, every, every, jnp.isnan(ratio).any(0), together, took.sum(0, dtype=jnp.int32))

    def _propose(self, target: Target, keys: Keys) -> tuple[Pool, Blocks, Array]:
        """The components that each row's proposal is from, the proposals, and log-uniforms."""
        refuse_held((*self.blocks, *self.marginalize), target.keep)
        pool, graph = _pool_of(target, self), target.graph
        size, count = len(pool.log_normalizer), num_words(graph, self.blocks)
        words = random.words(keys, count + 3)
        number = lambda word, below: (word % jnp.uint32(below)).astype(jnp.int32)
        few = min(self.components, size)
        spread = jnp.arange(few) * (size // few)
        chosen = number(words[:, count], few)
        if few < size:
            at = (number(words[:, count + 2], size)[:, None] + spread) % size
            component = jnp.take_along_axis(at, chosen[:, None], axis=1)[:, 0]
            part = Pool({b: pool.eta[b][at] for b in self.blocks}, pool.log_normalizer[at])
        else:
            component, part = chosen, pool
        eta = {b: pool.eta[b][component] for b in self.blocks}
        proposal = draw_rows(graph, self.blocks, eta, words[:, :count])
        return part, proposal, jnp.log(random.uniform(words[:, count + 1]))

    def _log_target(self, target: Target, x: Rows) -> PerRow:
        """Log of the target's density, row by row, up to a constant and the base measures."""
        statistics = target.graph.statistics({b: v for b, v in x.items() if b not in self.marginalize})
        one = lambda t: energy.log_marginal(target.graph, target.params, t, self.marginalize)
        return jax.vmap(one)(statistics)

    @full_precision
    def _log_mixture(self, target: Target, part: Pool, x: Rows) -> PerRow:
        """Log of the proposal's density, likewise.

        :param part: components that all rows share, or with an axis of rows before that of components.
        """
        statistics = target.graph.statistics({b: x[b] for b in self.blocks})
        inner = -part.log_normalizer
        for b, t in statistics.items():
            t = t.reshape(len(t), -1)
            if part.log_normalizer.ndim == 1:
                inner = inner + t @ part.eta[b].reshape(len(part.log_normalizer), -1).T
            else:
                eta = part.eta[b].reshape(*part.log_normalizer.shape, -1)
                inner = inner + jnp.einsum("rd,rcd->rc", t, eta)
        return jax.nn.logsumexp(inner, axis=-1)


def make_pool(graph: FactorGraph, params: Params, move: Mixture, rows: Rows, clamped: Blocks) -> Pool:
    """The conditionals that a move proposes from.

    :param rows: values of the blocks that the move sums out, ``(components, *shape)`` each.
    :param clamped: what is held, in one row.
    """
    count = len(next(iter(rows.values())))
    held = {b: jnp.broadcast_to(v, (count, *v.shape[1:])) for b, v in clamped.items()}
    eta = energy.natural_rows(graph, params, {b: rows[b] for b in move.marginalize} | held, move.blocks)
    return Pool({b: eta[b] for b in move.blocks}, _log_normalizer(graph, eta))


def _log_normalizer(graph: FactorGraph, eta: Eta) -> PerRow:
    each = [graph.families[b].log_normalizer(e) for b, e in eta.items()]
    return jnp.stack([a.reshape(len(a), -1).sum(-1) for a in each]).sum(0)


def _pool_of(target: Target, move: Mixture) -> Pool:
    """:raises StateError: for a target without one."""
    if target.pool is None:
        raise StateError(
            f"{move} proposes from a pool of values of {move.marginalize}, and none is given: "
            'unbiased_expectation(..., coupling="mixture", pool={"v": rows}) takes one, and '
            'UCD(coupling="mixture") makes its own'
        )
    return target.pool


def mixture_sweep(graph: FactorGraph, clamped: Iterable[str] = ()) -> tuple[Move, ...]:
    """A :class:`Mixture` move, a draw of what it sums out, and then draws of all layers.

    Proposed is the layer of fewer units.

    :param clamped: blocks that are held.
    :raises IntractableError: for a graph whose free blocks are not two layers, each independent given the
        other.
    """
    layers = schedule(graph, clamped)
    inside = [b for layer in layers for b in layer if b in graph.splits]
    if inside or len(layers) != 2:
        told = f"units of block {inside[0]!r} interact" if inside else f"here they are {_told(layers)}"
        raise IntractableError(
            "mixture proposals need the free blocks in two layers, each independent given the other, and "
            f"{told}; coupling=None, a kind for every layer, takes any graph"
        )
    size = lambda layer: sum(graph.families[b].size for b in layer)
    kept, summed = sorted(layers, key=size)
    move = Mixture(kept, summed)
    move.check(graph)
    return (move, Layer(summed, "maximal"), *(Layer(layer, "maximal") for layer in (kept, summed)))


def _told(layers: Iterable[tuple[str, ...]]) -> str:
    each = [" and ".join(map(repr, layer)) for layer in layers]
    return f"{len(each)}: {'; '.join(each)}" if each else "none"
