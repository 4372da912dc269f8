# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Independence proposals from a mixture of products of the units' families.

A component has natural parameters for every unit that is proposed, given a state of the
model. Where these units do not interact, the component is the conditional given the
other blocks; elsewhere it is the product of the conditionals of all units, each given
all others, or its approximation by one gradient of the energy (the *informed* mixture).
A mixture of these, at a *pool* of states, can be drawn from and evaluated, and it
resembles the model where the pool does. The pool is data, a field of the
:class:`~ebmpp.moves.Target`, so another pool compiles nothing. Results are exact for
any pool that is independent of the chains' own draws.

The two chains of a pair get one set of proposals and one choice between them, so they
meet as soon as both accept the same one.
"""

from collections.abc import Iterable
import dataclasses
from functools import partial
import itertools
from typing import NamedTuple

from jaxtyping import Integer

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Chains,
    Keys,
    Natural,
    PerRow,
    RowMask,
    Rows,
    Scalar,
    at_index,
    checks,
    expand,
    full_precision,
    num_rows,
    omit,
    random,
    select,
)
from ebmpp.errors import IntractableError, StateError
from ebmpp.families.family import draw_rows, num_words
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.moves.couplings import Attempt, Trial, where_rows, where_states
from ebmpp.moves.gradients import informed_sweep
from ebmpp.moves.move import (
    Drawn,
    Layer,
    Move,
    both_as_rows,
    one_chain,
    refuse_interacting,
    refuse_observed,
    rows_agree,
    with_invalid,
)
from ebmpp.moves.target import Pool, Target

# Cost in Gibbs sweeps of processor time on bars and stripes 16x16: a sweep with a pool
# of 100 costs 4.4, of 300 7.7, of 1500 13.7, with 100 of 1500 7.4; an exact draw costs
# 42, 66, 166 and 103, and 972 without a pool. A pool of 30 lacks modes, and some pairs
# took a thousand sweeps. Digits 64x16, pool of 100: 2.4; 20 against 37.
_COMPONENTS = 300
TRIES = 16  # proposals per move where the proposed units interact
LOCAL_STEPS = 4  # of local moves by gradients
# units up to which components are conditionals of each unit given all others, with an
# evaluation for each of its values; else one gradient approximates all. Under a tanh
# network of 64 units at scale 2.0, pairs met after 2.7 and 6.9 sweeps.
_EVALUATED = 256
_CERTAIN = 10.0  # in place of infinite natural parameters


def accept_proposals(
    z: Chains,
    proposals: Blocks,
    choice: Integer[Array, "2 rows"],
    broken: RowMask,
    trial: Trial,
) -> Attempt:
    """Move both chains to the proposals of their choice.

    :param proposals: ``(2, rows, *shape)`` each.
    :param choice: number of the proposal that a chain accepts, -1 to stay. Both chains
        have the same value if they accept one number.
    """
    choice = choice.at[1].set(jnp.where(trial.same, choice[0], choice[1]))
    accept = choice >= 0
    new = where_states(accept, proposals, select(z, proposals))
    is_one = choice[0] == choice[1]
    together = {}
    for b in proposals:
        # both accept one proposal, or both stay where they agreed
        agree = rows_agree(trial.flags, (b,), len(trial.keys))
        together[b] = (is_one & (accept[0] | agree)) | trial.same
    num_accepted = accept.sum(0, dtype=jnp.int32)
    return Attempt.final(
        one_chain(new, 0), one_chain(new, 1), broken, together, num_accepted
    )


class _Proposed(NamedTuple):
    """Proposals of one move, and what decides between them.

    :param values: ``(tries, rows, *shape)`` for each block.
    :param part: the components that they were drawn from.
    :param words: of the choice: one per row for one try, otherwise ``tries + 1``.
    """

    values: Blocks
    part: Pool
    words: Array


@dataclasses.dataclass(frozen=True)
class Mixture(Move[None]):
    r"""Proposals of ``blocks`` from the target's pool, accepted with ``marginalize`` summed out.

    For models in which pairs of Gibbs chains stay in separate modes, and a single draw
    can hit a mode. With C components of natural parameters
    :math:`\eta^{(c)} = -\partial E / \partial t` at states of the pool, proposals come
    from

    .. math::

        q(x) = \frac{1}{C} \sum_c \prod_i p(x_i; \eta_i^{(c)}).

    One proposal is accepted or rejected (Metropolis and Hastings). Of several, K, one
    replaces the state x, or none does, with probabilities in proportion to the weights
    :math:`\pi / q` of the K proposals and of x (iterated sampling-importance
    resampling).

    Acceptance falls with the dimension, and with a pool that lacks modes of the model:
    a chain in one of these stays there for about :math:`\pi(x) / (K q(x))` moves.

    :param blocks: all free blocks but ``marginalize``. Where they interact, given
        ``marginalize``, components have the conditional of each unit given all others.
    :param marginalize: the other free blocks, which are summed out; no two of them
        interact.
    :param components: proposals are drawn from this many components of the pool, spread
        evenly over it from a random first one, or from all of a smaller pool. It is
        exact too, and faster, since all components are evaluated at each state.
    :param tries: number of proposals per move, K, which are evaluated together.

    **References**

    1. Tierney (1994), *Markov chains for exploring posterior distributions*, for
       independence chains.
    2. Andrieu, Lee, Vihola (2018), *Uniform ergodicity of the iterated conditional SMC
       and geometric ergodicity of particle Gibbs samplers*, section 3, for several
       proposals.
    3. Wang, O'Leary, Jacob (2021), *Maximal couplings of the Metropolis-Hastings
       algorithm*.
    """

    blocks: tuple[str, ...]
    marginalize: tuple[str, ...] = ()
    components: int = _COMPONENTS
    tries: int = 1
    proposes = 1
    uses_pool = True

    def check(self, graph: FactorGraph) -> None:
        """Refuse a mixture of no component, and blocks that cannot be summed out."""
        checks.count("Mixture: components", self.components)
        checks.count("Mixture: tries", self.tries)
        refuse_interacting(graph, self.marginalize, "summed out")

    def is_informed(self, graph: FactorGraph) -> bool:
        """Return True if the proposed units interact, so that components are not conditionals."""
        return bool(graph.interacting(self.blocks))

    def pool_blocks(self, graph: FactorGraph) -> tuple[str, ...]:
        """Return the blocks whose values in a state of the pool make its component."""
        proposed = self.blocks if self.is_informed(graph) else ()
        return (*proposed, *self.marginalize)

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        z = at_index(x, None)
        proposals, choice, broken = self._resample(target, z, keys)
        accept = choice[0] >= 0
        drawn = {b: where_rows(accept, v[0], x[b]) for b, v in proposals.items()}
        return with_invalid(broken, drawn), accept.astype(jnp.int32)

    def attempt(
        self,
        target: Target,
        focused: None,
        z: Chains,
        trial: Trial,
    ) -> Attempt:
        proposals, choice, broken = self._resample(target, z, trial.keys)
        return accept_proposals(z, proposals, choice, broken, trial)

    def _resample(
        self, target: Target, z: Chains, keys: Keys
    ) -> tuple[Blocks, Integer[Array, "chains rows"], RowMask]:
        """Choose among a state and its proposals, for one chain or two of every row.

        :return: the chosen proposal of each chain; its number, -1 to stay; and rows
            with a weight that is nan.
        """
        proposed = self.propose(target, keys)
        now, new = self.log_weights(target, z, proposed)
        choice = self._choose(now, new, proposed.words)
        index = jnp.maximum(choice, 0), jnp.arange(len(keys))
        values = at_index(proposed.values, index)
        return values, choice, jnp.isnan(now).any(0) | jnp.isnan(new).any(0)

    def propose(self, target: Target, keys: Keys) -> _Proposed:
        """Return each row's proposals."""
        refuse_observed((*self.blocks, *self.marginalize), target.keep)
        pool = target.pool
        if pool is None:
            names = self.pool_blocks(target.graph)
            raise StateError(
                f"pool must have values of {names} for {self}, got None. Pass "
                'them as in unbiased_expectation(..., coupling="mixture", pool={"v": rows}).'
            )
        families = select(target.graph.families, self.blocks)
        tries = self.tries
        count = num_words(families)
        num_drawn = tries * count
        num_choice = 1 if tries == 1 else tries + 1
        words = random.words(keys, num_drawn + tries + num_choice + 1)

        def number(word, below):
            return (word % jnp.uint32(below)).astype(jnp.int32)

        size = len(pool.log_normalizer)
        used = min(self.components, size)
        component = number(words[:, num_drawn : num_drawn + tries], used)
        part = pool
        if used < size:
            first = number(words[:, -1], size)
            at = (first[:, None] + jnp.arange(used) * (size // used)) % size
            component = jnp.take_along_axis(at, component, axis=1)
            part = at_index(pool, at)
        # tries first
        component = component.T.ravel()
        drawn = words[:, :num_drawn].reshape(len(keys), tries, count)
        drawn = jnp.swapaxes(drawn, 0, 1).reshape(-1, count)
        eta = {b: pool.eta[b][component] for b in self.blocks}
        values = {
            b: v.reshape(tries, len(keys), *v.shape[1:])
            for b, v in draw_rows(families, eta, drawn).items()
        }
        return _Proposed(values, part, words[:, num_drawn + tries : -1])

    def _choose(
        self, now: Array, new: Array, words: Array
    ) -> Integer[Array, "chains rows"]:
        """Return the number of the proposal that replaces each state, -1 to keep it.

        :param now: log weights of the chains' states, ``(chains, rows)``.
        :param new: log weights of the proposals, ``(tries, rows)``.
        """
        if self.tries == 1:
            log_u = jnp.log(random.uniform(words[:, 0]))
            return jnp.where(log_u[None] < new - now, 0, -1)
        gumbels = -jnp.log(-jnp.log(random.open_uniform(words.T)))
        new = new + gumbels[1:]
        is_new = new.max(0)[None] > now + gumbels[:1]
        return jnp.where(is_new, new.argmax(0), -1)

    def log_weights(
        self, target: Target, z: Chains, proposed: _Proposed
    ) -> tuple[Array, Array]:
        """Return the logs of target over proposal, ``(chains, rows)`` and ``(tries, rows)``."""
        num_chains, rows = jax.tree.leaves(z)[0].shape[:2]
        states = {}
        for b, v in z.items():
            # all blocks are proposed, summed out or clamped, so both chains have one
            # weight of a proposal
            same = jnp.broadcast_to(v[:1], (self.tries, *v.shape[1:]))
            states[b] = jnp.concatenate([v, proposed.values.get(b, same)])

        def log_target(t):
            return energy.log_marginal(target.graph, target.params, t, self.marginalize)

        def log_mixture(x):
            return self._log_mixture(target, proposed.part, x)

        # up to constants and the base measures
        flat = both_as_rows(states)
        others = omit(flat, self.marginalize)
        weights = jax.vmap(log_target)(target.graph.statistics(others))
        weights = weights.reshape(-1, rows)
        weights -= jax.vmap(log_mixture)(select(states, self.blocks))
        return weights[:num_chains], weights[num_chains:]

    @full_precision
    def _log_mixture(self, target: Target, part: Pool, x: Rows) -> PerRow:
        """Return the log density of the proposals, up to a constant and the base measures.

        :param part: components that all rows share, or with an axis of rows before that
            of components.
        """
        statistics = target.graph.statistics(select(x, self.blocks))
        logs = -part.log_normalizer
        for b, t in statistics.items():
            t = t.reshape(len(t), -1)
            eta = part.eta[b].reshape(*part.log_normalizer.shape, -1)
            is_shared = eta.ndim == 2
            logs = logs + (t @ eta.T if is_shared else jnp.einsum("rd,rcd->rc", t, eta))
        return jax.nn.logsumexp(logs, axis=-1)


@partial(jax.jit, static_argnames="move")
def largest_weight(target: Target, move: Mixture, x: Rows, keys: Keys) -> Scalar:
    r"""Return the largest weight :math:`\pi / q` of states and proposals, over the proposals' mean.

    A chain in a state of weight w that it lacks stays there for about w / tries moves.
    """
    z = at_index(x, None)
    now, new = move.log_weights(target, z, move.propose(target, keys))
    mean = jax.nn.logsumexp(new) - jnp.log(new.size)
    return jnp.exp(jnp.maximum(now.max(), new.max()) - mean)


def make_pool(target: Target, move: Mixture, rows: Rows) -> Pool:
    """Return the components that a move proposes from.

    :param rows: values of the blocks of :meth:`Mixture.pool_blocks`, ``(components, *shape)``
        each.
    """
    graph = target.graph
    count = num_rows(rows)
    states = select(rows, move.pool_blocks(graph)) | target.clamped_rows(count)
    if move.is_informed(graph):
        eta = {b: _fields(target, states, b) for b in move.blocks}
    else:
        eta = energy.natural_rows(graph, target.params, states, move.blocks)
        eta = select(eta, move.blocks)
    per_unit = [graph.families[b].log_normalizer(e) for b, e in eta.items()]
    log_normalizers = [units.reshape(count, -1).sum(-1) for units in per_unit]
    return Pool(eta, jnp.stack(log_normalizers).sum(0))


def _fields(target: Target, states: Rows, block: str) -> Natural:
    """Return natural parameters of each unit of a block given all else, or to first order."""
    graph = target.graph
    family = graph.families[block]
    if block in graph.nonconjugate or family.size > _EVALUATED:
        eta = energy.fields(graph, target.params, states)[block]
    else:
        eta = energy.natural_rows(graph, target.params, states, (block,))[block]
    # any proposal is exact; impossible values, given all else, are possible in others
    eta = jnp.nan_to_num(eta, posinf=_CERTAIN, neginf=-_CERTAIN)
    is_valid = family.in_domain(eta).reshape(len(eta), *family.shape, -1).all(-1)
    return jnp.where(expand(is_valid, eta), eta, family.default_eta())


def has_costly_sweeps(graph: FactorGraph) -> bool:
    """Return True if Gibbs sweeps need more evaluations of an energy than proposals of a mixture.

    Under a tanh network of 64 units at scale 1.5, pairs met after 44 Gibbs sweeps of 64
    evaluations on average, and after 1.6 sweeps with 16 proposals each; at scale 1.0
    after 4.0 and 1.1.
    """
    blocks = {b for f in graph.factors if not f.affine for b in f.blocks}
    is_large = any(graph.num_parts(b) > TRIES for b in blocks)
    return is_large or bool(graph.nonconjugate)


def mixture_sweep(graph: FactorGraph, clamped: Iterable[str] = ()) -> tuple[Move, ...]:
    """Return a :class:`Mixture` move of all layers but the largest, and draws of all layers.

    The largest layer of units that do not interact is summed out. Where the others do
    not interact either, as in an RBM, the move makes one proposal from conditionals.
    Elsewhere local moves precede it, and it makes 16 proposals.

    :param clamped: names of clamped blocks.
    :raises IntractableError: if no two of the free units interact, so that a sweep
        draws them exactly.
    """
    clamped = tuple(clamped)
    layers = schedule(graph, clamped)

    def num_units(layer):
        is_split = layer[0] in graph.splits
        return 0 if is_split else sum(graph.sizes(layer))

    *others, summed = sorted(layers, key=num_units)
    if not num_units(summed):
        others.append(summed)
        summed = ()
    if not others:
        raise checks.error(
            "mixture: free blocks",
            "several layers, or a block whose units interact",
            layers,
            IntractableError,
            "Use coupling=None, which draws them exactly.",
        )
    move = Mixture(tuple(itertools.chain(*others)), summed)
    drawn = [Layer(blocks, "maximal") for blocks in (summed, *others) if blocks]
    if not move.is_informed(graph):
        return move, *drawn, drawn[0]
    last = drawn[:1] if summed else []
    local = drawn[len(last) :]
    if has_costly_sweeps(graph):
        local = informed_sweep(graph, (*clamped, *summed), num_steps=LOCAL_STEPS)
    # chains that start in a mode which the pool lacks reach it before they can jump
    return *local, dataclasses.replace(move, tries=TRIES), *last
