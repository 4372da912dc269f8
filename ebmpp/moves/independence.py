# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Metropolis moves whose proposals do not depend on the state of the chain.

:class:`Metropolis` proposes from a fixed distribution. :class:`Mixture` proposes from a mixture of
conditionals of the model. Where the free blocks are two layers, each independent given the other, the
conditional of one at any value of the other is a product of its units' families. A mixture of these
conditionals, at a *pool* of values, can be drawn from and evaluated, and it resembles the model where the
pool does. The pool is data, a field of the :class:`~ebmpp.moves.Target`, so another pool compiles nothing.
Results are exact for any pool that is independent of the chains' own draws.

The two chains of a pair get one proposal and one uniform, so they meet as soon as both accept.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random, sharding
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Blocks, Chains, Eta, Keep, Keys, Params, PerRow, Rows
from ebmpp.errors import ArgumentError, DeclarationError, IntractableError, StateError
from ebmpp.families.family import Family
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.gibbs import draw_rows, hold, num_words, split_words
from ebmpp.moves.move import Drawn, Layer, Move, agree, flat, refuse_interacting
from ebmpp.moves.target import Pool, Target

#: Distributions to propose from: uniform, or each family's distribution of initial values.
PROPOSALS = ("uniform", "initial")

# Cost in Gibbs sweeps of processor time on bars and stripes 16x16: a sweep with a pool of 100 costs 4.4, of
# 300 7.7, of 1500 13.7, with 100 of 1500 7.4; an exact draw costs 42, 66, 166 and 103, and 972 without a
# pool. A pool of 30 lacks modes, and some pairs took a thousand sweeps. Digits 64x16, pool of 100: 2.4; 20
# against 37.
_COMPONENTS = 300


class _Independence(Move):
    """Base of both moves; a subclass defines how it proposes and scores."""

    marginalize: tuple[str, ...]
    proposes = 1

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        """See :class:`~ebmpp.moves.Move`."""
        around = (*self.blocks, *graph.neighbours((*self.blocks, *self.marginalize)))
        return tuple(b for b in dict.fromkeys(around) if b not in self.marginalize)

    def _log_target(self, target: Target, x: Rows) -> PerRow:
        """Return the log density of each row, up to a constant and the base measures."""
        statistics = target.graph.statistics({b: v for b, v in x.items() if b not in self.marginalize})
        log_prob_at = lambda t: energy.log_marginal(target.graph, target.params, t, self.marginalize)
        return jax.vmap(log_prob_at)(statistics)

    def _accept(self, z: Chains, proposals: Blocks, log_ratio: Array, log_u: Array, trial: Trial) -> Attempt:
        """Accept or reject in both chains.

        :param proposals: ``(2, rows, *shape)`` or, where both chains have one proposal, ``(rows, *shape)``.
        :param log_ratio: of each chain, ``(2, rows)``.
        """
        rows = len(trial.keys)
        accept = log_u[None] < log_ratio
        accept = accept.at[1].set(jnp.where(trial.same, accept[0], accept[1]))
        take = lambda i, b: proposals[b][i] if proposals[b].ndim == z[b].ndim else proposals[b]
        x, y = ({b: where_rows(accept[i], take(i, b), z[b][i]) for b in self.blocks} for i in range(2))
        done = jnp.ones(rows, bool)
        # both accept the proposal, or both stay where they agreed
        stay = {b: agree(trial.flags, (b,), rows) & ~accept.any(0) for b in self.blocks}
        together = {b: accept.all(0) | stay[b] | trial.same for b in self.blocks}
        broken = jnp.isnan(log_ratio).any(0)
        return Attempt(x, y, done, done, broken, together, accept.sum(0, dtype=jnp.int32))


@dataclasses.dataclass(frozen=True)
class Metropolis(_Independence):
    """Joint proposal of ``blocks`` from a fixed distribution, accepted by the energy.

    For models of some ten units. The target is the joint distribution given the other blocks or, with
    ``marginalize``, its marginal with those blocks summed out in closed form.

    :param blocks: blocks that are proposed.
    :param proposal: "uniform", or "initial": each family's distribution of initial values.
    :param marginalize: blocks that are summed out; no two of them interact.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), Algorithms 3 and 4; eqs. 20 to 26 for the marginals.
    2. Wang, O'Leary, Jacob (2021), *Maximal couplings of the Metropolis-Hastings algorithm*.
    """

    blocks: tuple[str, ...]
    proposal: str = "uniform"
    marginalize: tuple[str, ...] = ()

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
        proposed = hold(target.keep, x, proposal)
        ratio = self._score(target, {**x, **proposed}) - self._score(target, x)
        accept = log_u < ratio
        return {b: where_rows(accept, v, x[b]) for b, v in proposed.items()}, accept.astype(jnp.int32)

    def attempt(self, target: Target, focused: Any, z: Chains, trial: Trial) -> Attempt:
        """See :class:`~ebmpp.moves.Move`."""
        rows = len(trial.keys)
        proposal, log_u = self._propose(target, trial.keys)
        # other blocks and observed units may differ, so each chain has its own score of a proposal
        now = flat(z)
        both = hold(target.keep, z, {b: jnp.stack([v, v]) for b, v in proposal.items()})
        then = flat(both)
        stacked = {b: jnp.concatenate([v, then.get(b, v)]) for b, v in now.items()}
        score = self._score(target, stacked)
        ratio = (score[2 * rows :] - score[: 2 * rows]).reshape(2, rows)
        return self._accept(z, both, ratio, log_u, trial)

    def _propose(self, target: Target, keys: Keys) -> tuple[dict[str, Array], Array]:
        refuse_observed(self.marginalize, target.keep)
        graph = target.graph
        count = num_words(graph, self.blocks)
        words = random.words(keys, count + 1)
        parts = split_words(graph, self.blocks, words[:, :count])
        proposal = {b: graph.families[b].initial(parts[b]) for b in self.blocks}
        return proposal, jnp.log(random.uniform(words[:, count]))

    def _score(self, target: Target, x: Rows) -> Array:
        """Return the log of target over proposal, row by row, up to a constant; base measures cancel."""
        graph, params = target.graph, target.params

        def score(t: Mapping[str, Array]) -> Array:
            reference = sum((graph.families[b].default_eta() * t[b]).sum() for b in self.blocks)
            return energy.log_marginal(graph, params, t, self.marginalize) - reference

        rest = {b: v for b, v in x.items() if b not in self.marginalize}
        return jax.vmap(score)(graph.statistics(rest))


def refuse_observed(marginalize: tuple[str, ...], keep: Keep) -> None:
    """Refuse blocks with observed units: a sum over a block runs over all its values.

    :raises IntractableError: if there is one.
    """
    for b in marginalize:
        if b in keep:
            raise IntractableError(f"marginalize must not name blocks with observed units, got {b!r}.")


def _is_uniform(family: Family) -> bool:
    """Return True if the distribution of initial values is uniform."""
    with sharding.at_once():  # also called while a kernel is traced
        states = family.states()
    if states is None:
        return False
    unit = dataclasses.replace(family, shape=(1,))
    with sharding.at_once():
        values = jnp.asarray(states)[:, None]
        inner = (unit.default_eta()[None] * unit.statistics(values)).reshape(len(states), -1).sum(-1)
        return float(np.ptp(np.asarray(inner + unit.log_base_measure(values)[:, 0]))) < 1e-6


def metropolis_sweep(
    graph: FactorGraph,
    clamped: Iterable[str] = (),
    proposal: str = "uniform",
    marginalize: str | Sequence[str] = (),
) -> tuple[Move, ...]:
    """Return a :class:`Metropolis` move of the free blocks, and a draw of the blocks that it sums out.

    :param graph: the declaration.
    :param clamped: names of clamped blocks.
    :param proposal: "uniform" or "initial", see :class:`Metropolis`.
    :param marginalize: blocks that are summed out of the acceptance ratio.
    :raises ArgumentError: for an unknown proposal or block, or if no block is left to propose.
    :raises DeclarationError: for a block without a uniform distribution.
    :raises IntractableError: for blocks that cannot be summed out together.
    """
    checks.instance("metropolis_sweep: graph", graph, FactorGraph, "a FactorGraph")
    marginalize = (marginalize,) if isinstance(marginalize, str) else tuple(marginalize)
    free = tuple(b for layer in schedule(graph, clamped) for b in layer)
    unknown = [b for b in marginalize if b not in free]
    blocks = tuple(b for b in free if b not in marginalize)
    if unknown or not blocks:
        raise ArgumentError(
            f"marginalize must name some of the free blocks {free} and leave at least one, got {marginalize}."
        )
    move = Metropolis(blocks, proposal, marginalize)
    move.check(graph)
    return (move, Layer(marginalize, "maximal")) if marginalize else (move,)


# -- mixtures --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mixture(_Independence):
    """Proposal of ``blocks`` from the target's pool, accepted with ``marginalize`` summed out.

    For models in which pairs of Gibbs chains stay in separate modes, and a single draw can hit a mode.

    Proposals are drawn from the conditionals ``p(blocks | marginalize = h_c)``, with ``c`` uniform over the
    pool. Acceptance falls with the dimension, and with a pool that lacks modes of the model.

    :param blocks: all free blocks but ``marginalize``, no two of which interact.
    :param marginalize: the other free blocks, which are summed out; no two of them interact either.
    :param components: a proposal is drawn from this many components of the pool, spread evenly over it from a
        random first one, or from all of a smaller pool. It is exact too, and faster, since all components
        are evaluated at each state.

    **References**

    1. Tierney (1994), *Markov chains for exploring posterior distributions*, for independence chains.
    2. Wang, O'Leary, Jacob (2021), *Maximal couplings of the Metropolis-Hastings algorithm*.
    """

    blocks: tuple[str, ...]
    marginalize: tuple[str, ...]
    components: int = _COMPONENTS

    def check(self, graph: FactorGraph) -> None:
        """Check the blocks.

        :raises ArgumentError: if there is no block to propose or to sum out, or no component.
        :raises IntractableError: if blocks that are proposed, or summed out, together interact, or the units
            of one do.
        """
        checks.count("Mixture: components", self.components)
        if not self.blocks or not self.marginalize:
            raise ArgumentError(f"Mixture: blocks and marginalize must name at least one block, got {self}.")
        refuse_interacting(graph, self.blocks, "proposed from a mixture")
        refuse_interacting(graph, self.marginalize, "summed out")

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        """See :class:`~ebmpp.moves.Move`."""
        part, proposal, log_u = self._propose(target, keys)
        score = lambda x: self._log_target(target, x) - self._log_mixture(target, part, x)
        accept = log_u < score({**x, **proposal}) - score(x)
        return {b: where_rows(accept, v, x[b]) for b, v in proposal.items()}, accept.astype(jnp.int32)

    def attempt(self, target: Target, focused: Any, z: Chains, trial: Trial) -> Attempt:
        """See :class:`~ebmpp.moves.Move`."""
        rows, now = len(trial.keys), flat(z)
        part, proposal, log_u = self._propose(target, trial.keys)
        # all blocks are proposed, summed out or clamped, so both chains have one score of a proposal
        clamped = {b: v[:rows] for b, v in now.items()}
        stacked = {b: jnp.concatenate([v, (clamped | proposal)[b]]) for b, v in now.items()}
        log_target = self._log_target(target, stacked).reshape(3, rows)
        states = {b: stacked[b].reshape(3, rows, *stacked[b].shape[1:]) for b in self.blocks}
        mixture = jax.vmap(lambda x: self._log_mixture(target, part, x))(states)
        score = log_target - mixture
        return self._accept(z, proposal, score[2] - score[:2], log_u, trial)

    def _propose(self, target: Target, keys: Keys) -> tuple[Pool, Blocks, Array]:
        """Return the components of each row's proposal, the proposals, and log-uniforms."""
        refuse_observed((*self.blocks, *self.marginalize), target.keep)
        pool, graph = self._pool(target), target.graph
        size, count = len(pool.log_normalizer), num_words(graph, self.blocks)
        words = random.words(keys, count + 3)
        number = lambda word, below: (word % jnp.uint32(below)).astype(jnp.int32)
        used = min(self.components, size)
        spread = jnp.arange(used) * (size // used)
        position = number(words[:, count], used)
        if used < size:
            at = (number(words[:, count + 2], size)[:, None] + spread) % size
            component = jnp.take_along_axis(at, position[:, None], axis=1)[:, 0]
            part = Pool({b: pool.eta[b][at] for b in self.blocks}, pool.log_normalizer[at])
        else:
            component, part = position, pool
        eta = {b: pool.eta[b][component] for b in self.blocks}
        proposal = draw_rows(graph, self.blocks, eta, words[:, :count])
        return part, proposal, jnp.log(random.uniform(words[:, count + 1]))

    @full_precision
    def _log_mixture(self, target: Target, part: Pool, x: Rows) -> PerRow:
        """Return the log density of the proposals, up to a constant and the base measures.

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

    def _pool(self, target: Target) -> Pool:
        """Return the target's pool.

        :raises StateError: if it has none.
        """
        if target.pool is None:
            raise StateError(
                f"pool must be given with {self}: values of {self.marginalize}, as in "
                'unbiased_expectation(..., coupling="mixture", pool={"v": rows}).'
            )
        return target.pool


def make_pool(graph: FactorGraph, params: Params, move: Mixture, rows: Rows, clamped: Blocks) -> Pool:
    """Return the conditionals from which a move proposes.

    :param rows: values of the blocks that the move sums out, ``(components, *shape)`` each.
    :param clamped: clamped blocks, in one row.
    """
    count = len(next(iter(rows.values())))
    held = {b: jnp.broadcast_to(v, (count, *v.shape[1:])) for b, v in clamped.items()}
    eta = energy.natural_rows(graph, params, {b: rows[b] for b in move.marginalize} | held, move.blocks)
    return Pool({b: eta[b] for b in move.blocks}, _log_normalizer(graph, eta))


def _log_normalizer(graph: FactorGraph, eta: Eta) -> PerRow:
    parts = [graph.families[b].log_normalizer(e) for b, e in eta.items()]
    return jnp.stack([a.reshape(len(a), -1).sum(-1) for a in parts]).sum(0)


def mixture_sweep(graph: FactorGraph, clamped: Iterable[str] = ()) -> tuple[Move, ...]:
    """Return a :class:`Mixture` move of the smaller layer, a draw of the other, and draws of both layers.

    :param graph: the declaration.
    :param clamped: names of clamped blocks.
    :raises IntractableError: unless the free blocks are two layers, each independent given the other.
    """
    layers = schedule(graph, clamped)
    inside = [b for layer in layers for b in layer if b in graph.splits]
    if inside or len(layers) != 2:
        reason = f"units of block {inside[0]!r} interact" if inside else f"they are {layers}"
        raise IntractableError(
            "mixture proposals need the free blocks in two layers, each independent given the other, and "
            f"{reason}. Use coupling=None or a kind for every layer."
        )
    small, large = sorted(layers, key=lambda layer: sum(graph.families[b].size for b in layer))
    move = Mixture(small, large)
    move.check(graph)
    return move, Layer(large, "maximal"), Layer(small, "maximal"), Layer(large, "maximal")
