# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Local informed moves: units of any energy are proposed from one gradient of it.

The gradient of the energy in the units' statistics gives the natural parameters
:math:`\eta_i(x)` of every unit to first order, and with them a proposal
:math:`q_i(x'_i \mid x)` of each unit. All units are proposed at once and accepted with
the probability :math:`\min(1, \alpha)`,

.. math::

    \log \alpha = E(x) - E(x') + \sum_i \left[\log q_i(x_i \mid x')
        - \log q_i(x'_i \mid x)\right].

Base measures are part of E here. With heat baths of all units as proposals
:math:`\log \alpha = 0` where the units do not interact: blocked Gibbs is the special
case.
"""

from collections.abc import Callable, Iterable
import dataclasses
from functools import partial
import math
from typing import Any, NamedTuple

from jaxtyping import Bool, Float

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Chains,
    Counts,
    Keys,
    PerRow,
    RowMask,
    Rows,
    checks,
    full_precision,
    random,
    select,
    sharding,
)
from ebmpp.families import Bernoulli, Categorical, Family
from ebmpp.families.family import Families
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.moves import couplings, gibbs
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.gradients.density import check_blocks, local_density, surroundings
from ebmpp.moves.gradients.hamiltonian import Hamiltonian
from ebmpp.moves.move import (
    Drawn,
    Layer,
    Move,
    as_chains,
    both_as_rows,
    final_attempt,
    one_chain,
    rows_agree,
    rows_equal,
    stack_chains,
    with_invalid,
)
from ebmpp.moves.target import Target

#: Numbers for each value of a unit.
PerValue = Float[Array, "*units values"]
#: True at the present value of each unit.
Here = Bool[Array, "*units values"]
#: From the first-order increase of the log density at each value, and the step size, to
#: log-probabilities of a unit's next value.
Rule = Callable[[PerValue, Here, Any], PerValue]

#: Gain of the values that observed units do not take; their probability is exactly 0.
_NEVER = -1e30


def heat_bath(gain: PerValue, here: Here, share: Any) -> PerValue:
    """Return log-probabilities of heat baths that are each made with probability ``share``."""
    return _thinned(gain, here, jnp.log(share), jnp.log1p(-share))


def dlmc(gain: PerValue, here: Here, time: Any) -> PerValue:
    """Return log-probabilities of discrete Langevin dynamics after ``time``, interpolated."""
    rate = time * jnp.exp(0.5 * gain - jax.nn.log_softmax(gain))
    return _thinned(gain, here, jax.nn.log1mexp(rate), -rate)


def dmala(gain: PerValue, here: Here, step_size: Any) -> PerValue:
    """Return log-probabilities of a discrete Langevin proposal."""
    penalty = jnp.where(here, 0.0, 0.5 / step_size)
    return jax.nn.log_softmax(0.5 * gain - penalty)


def _thinned(gain: PerValue, here: Here, log_made: Any, log_left: Any) -> PerValue:
    """Return log-probabilities of heat baths whose changes are made or left."""
    log_probs = jax.nn.log_softmax(gain)
    stays = jnp.where(here, log_probs, log_probs + log_left)
    stay = jax.nn.logsumexp(stays, -1, keepdims=True)
    return jnp.where(here, stay, log_probs + log_made)


#: Rules, their default step sizes and the largest ones. Figures are in
#: benchmarks/speed/informed_moves.py.
RULES: dict[str, tuple[Rule, float, float]] = {
    "dmala": (dmala, 0.4, math.inf),
    "dlmc": (dlmc, 0.3, math.inf),
    "heat_bath": (heat_bath, 0.4, 1.0),
}


class States(NamedTuple):
    """Rows of the moved blocks, evaluated."""

    x: Blocks
    here: Blocks
    """True at the value of each unit, ``(rows, *shape, values)``."""
    score: PerRow
    """Unnormalised log density of the blocks given the others."""
    logits: Blocks
    """Log-probabilities of the values of each unit in the next proposal."""


#: States after some steps, numbers of accepted proposals, and rows with a nan.
_Walk = tuple[States, Counts, RowMask]


@dataclasses.dataclass(frozen=True)
class Informed(Move[None]):
    r"""Steps that propose finite units of any energy from its gradient, and accept or reject.

    One gradient of the energy gives the gain :math:`d_{ik}` in log density to first
    order if unit i takes its value k. Rules, with the probability that a bit flips:

    ============== ==================================================== ================
    rule           probability                                          ``step_size``
    ============== ==================================================== ================
    ``dmala``      :math:`\sigma(d / 2 - 1 / (2 a))`                    a, above 0
    ``dlmc``       :math:`\sigma(d) (1 - e^{-2 a \cosh(d / 2)})`         a, above 0
    ``heat_bath``  :math:`a \sigma(d)`; a = 1 redraws every unit         a, at most 1
    ============== ==================================================== ================

    The two chains of a pair are coupled maximally unit by unit, and share the uniform
    that accepts. A proposal of infinite energy is rejected. Where an energy is nan the
    row gets values that no unit can have, and a pair is reported as broken.

    :param blocks: blocks of finitely many values, moved given the others.
    :param step_size: None for the rule's default. Pairs meet soonest where 0.5 to 0.8
        of the proposals are accepted. Runs report the share; change the size between
        runs, since one that follows its own chains does not keep their distribution.
    :param num_steps: steps of one move, with a gradient each.
    :raises ArgumentError: for an unknown rule, or a number out of range.

    **References**

    1. Zhang, Liu, Liu (2022), *A Langevin-like sampler for discrete distributions*:
       ``dmala``.
    2. Sun, Dai, Dai, Zhou, Schuurmans (2023), *Discrete Langevin sampler via
       Wasserstein gradient flow*: ``dlmc``, equation 19.
    3. Zanella (2020), *Informed proposals for local MCMC in discrete spaces*.
    """

    blocks: tuple[str, ...]
    rule: str = "dmala"
    step_size: float | None = None
    num_steps: int = 10

    def __post_init__(self) -> None:
        checks.choice("Informed: rule", self.rule, RULES)
        checks.set_counts(self, "num_steps")
        _, default, most = RULES[self.rule]
        size = default if self.step_size is None else self.step_size
        checks.number("Informed: step_size", size, above=0, most=most)
        object.__setattr__(self, "step_size", size)

    @property
    def proposes(self) -> int:
        return self.num_steps

    def check(self, graph: FactorGraph) -> None:
        """Refuse unknown blocks, and units of infinitely many values."""
        hint = "Move it by Layer or, if real-valued, by Hamiltonian."
        check_blocks(self, graph, is_finite, "of finitely many values", hint)

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        states, count, broken = self._walk(target, x, keys)
        return with_invalid(broken, states.x), count

    def attempt(
        self, target: Target, focused: None, z: Chains, trial: Trial
    ) -> Attempt:
        around = target.graph.neighbours(self.blocks)
        # rows whose chains have one density
        shared = trial.same | rows_agree(trial.flags, around, len(trial.keys))
        states, *flat = self._walk(target.twice(), both_as_rows(z), trial.keys, shared)
        count, broken = (a.reshape(2, -1) for a in flat)
        new = as_chains(states.x)
        return final_attempt(new, trial, broken.any(0), count.sum(0))

    def _walk(
        self, target: Target, x: Rows, keys: Keys, shared: RowMask | None = None
    ) -> _Walk:
        """Make all steps.

        :param shared: rows whose two chains, stacked in ``x``, have one density; None
            for single chains.
        """
        graph = target.graph

        def step(i, walk):
            old, count, broken = walk
            step_keys = random.fold_in(keys, i)
            log_u = jnp.log(random.uniforms(random.fold_in(step_keys, 0, 1), 1)[:, 0])
            families, eta = self.proposals(graph, old)
            if shared is None:
                drawn = gibbs.draw(families, eta, step_keys)
            else:
                equal = [rows_equal(v) for v in as_chains(old.x).values()]
                same = shared & jnp.stack(equal).all(0)
                etas = as_chains(eta)
                pair = couplings.attempt(
                    families,
                    "common",
                    (one_chain(etas, 0), one_chain(etas, 1)),
                    Trial(step_keys, same, same),
                )
                drawn = both_as_rows(stack_chains(pair.x, pair.y))
                log_u = jnp.tile(log_u, 2)
            new = self.evaluate(target, x, self.values(graph, old.x, drawn))
            ratio = log_ratio(old, new)
            accept = log_u < ratio
            if shared is not None:  # scores of equal states may differ in rounding
                both = jnp.tile(accept[: len(keys)], 2)
                accept = jnp.where(jnp.tile(same, 2), both, accept)
            states = jax.tree.map(partial(where_rows, accept), new, old)
            return states, count + accept, broken | jnp.isnan(ratio)

        start = self.evaluate(target, x, x)
        zero = jnp.zeros(len(start.score), jnp.int32)
        steps = jnp.uint32(self.num_steps)
        return lax.fori_loop(jnp.uint32(0), steps, step, (start, zero, zero > 0))

    def evaluate(self, target: Target, x: Rows, new: Rows) -> States:
        """Evaluate rows ``x`` with new values of the blocks."""
        graph = target.graph
        new = select(new, self.blocks)
        fn = jax.vmap(jax.value_and_grad(local_density(target, self.blocks)))
        around = surroundings(target, x, self.blocks)
        score, fields = fn(graph.statistics(new), *around)
        score += jax.vmap(partial(energy.log_base_measure, graph))(new)
        here = {}
        logits = {}
        for b, v in new.items():
            family = graph.families[b]
            here[b] = v[..., None] == values_of(family)
            weights = _log_weights(family, fields[b])
            gain = weights - jnp.where(here[b], weights, 0).sum(-1, keepdims=True)
            if b in target.keep:
                is_kept = target.keep[b][..., None]
                gain = jnp.where(is_kept & ~here[b], _NEVER, gain)
            logits[b] = self.log_probs(gain, here[b])
        return States(new, here, score, logits)

    def log_probs(self, gain: PerValue, here: Here) -> PerValue:
        """Return log-probabilities of the next values of units, given first-order gains."""
        rule, *_ = RULES[self.rule]
        return rule(gain, here, self.step_size)

    def proposals(self, graph: FactorGraph, states: States) -> tuple[Families, Blocks]:
        """Return families of numbers of values, and their natural parameters."""
        families: dict[str, Family] = {}
        eta = dict(states.logits)
        for b, v in eta.items():
            shape = graph.families[b].shape
            families[b] = Categorical(shape, v.shape[-1])
            if v.shape[-1] == 2:  # one word per unit in place of three
                families[b] = Bernoulli(shape)
                eta[b] = v[..., 1] - v[..., 0]
        return families, eta

    def values(self, graph: FactorGraph, x: Rows, drawn: Rows) -> Blocks:
        """Return values of the blocks from numbers that are drawn at states ``x``."""
        values = {b: values_of(graph.families[b]) for b in x}
        return {
            b: values[b][drawn[b].astype(jnp.int32)].astype(v.dtype)
            for b, v in x.items()
        }


def log_ratio(old: States, new: States) -> PerRow:
    """Return the log of the acceptance ratio."""

    def log_proposal(states, other):
        total = 0
        for b, v in states.logits.items():
            terms = jnp.where(other.here[b], v, 0)
            total += terms.reshape(len(v), -1).sum(-1)
        return total

    ratio = new.score - old.score + log_proposal(new, old) - log_proposal(old, new)
    # an impossible state has no fields
    return jnp.where(new.score == -jnp.inf, -jnp.inf, ratio)


@full_precision
def _log_weights(family: Family, fields: Array) -> PerValue:
    """Return log weights of the values of each unit at natural parameters."""
    values = values_of(family)
    statistics = family.statistics(values).reshape(len(values), -1)
    units = fields.shape[: fields.ndim - len(family.stat_shape)]
    products = fields.reshape(*units, -1) @ statistics.T
    return products + family.log_base_measure(values)


def is_finite(family: Family) -> bool:
    """Return True if units have finitely many values."""
    with sharding.eager():  # also called while a kernel is traced
        return family.states() is not None


def values_of(family: Family) -> Array:
    """Return the values of a unit of finitely many."""
    with sharding.eager():
        return jnp.asarray(family.states())


def informed_sweep(
    graph: FactorGraph,
    clamped: Iterable[str] = (),
    rule: str | None = None,
    step_size: float | None = None,
    num_steps: int | None = None,
) -> tuple[Move, ...]:
    """Return gradient-based moves of some blocks, and draws of the other layers.

    Finite units that interact within their block or are in a factor with
    ``affine=False``, or else units of the visible blocks, move by :class:`Informed`;
    real numbers and angles without a conditional in closed form move by
    :class:`Hamiltonian`. All others are drawn exactly.

    :param graph: the declaration.
    :param clamped: names of clamped blocks.
    :param rule: of finite units: "dmala", "dlmc" or "heat_bath"; see :class:`Informed`.
        None: one heat bath of all units, then "dmala".
    :param step_size: of finite units, that of the rule, without a unit (None: 0.4, for
        "dlmc" 0.3; see :class:`Informed`). Of real-valued ones, that of the leapfrog
        integrator, in the units of the blocks (None: 0.2; see :class:`Hamiltonian`).
        Where both move, one number does not fit both, so it must be None.
    :param num_steps: steps of a move, with a gradient each. None: of finite units 10,
        or 1 where other layers are drawn in turn; of real-valued ones 8.
    :return: moves, for the arguments ``moves`` and ``coupling``; the latter also takes
        the function itself.
    :raises ArgumentError: for an unknown rule, a number out of range, or a step size
        where finite and real-valued units move.
    :raises IntractableError: for real-valued blocks of other supports.

    **Example**

    >>> import networkx as nx, ebmpp
    >>> from ebmpp.moves import informed_sweep
    >>> lattice = ebmpp.FactorGraph.from_networkx(nx.grid_2d_graph(4, 4), ebmpp.Spin, shared=True)
    >>> kernel = ebmpp.BlockedGibbs(lattice, moves=informed_sweep(lattice))
    >>> informed_sweep(lattice, rule="dlmc")
    (Informed(blocks=('x',), rule='dlmc', step_size=0.3, num_steps=10),)
    """
    checks.instance("informed_sweep: graph", graph, FactorGraph)
    num_steps = checks.optional_count("informed_sweep: num_steps", num_steps)
    held = set(clamped)
    free = [b for b in graph.families if b not in held]
    real = tuple(b for b in free if b in graph.nonconjugate)
    finite = tuple(
        b
        for b in free
        if b in (graph.splits or graph.visible) and is_finite(graph.families[b])
    )
    layers = schedule(graph, (*held, *finite, *real))
    moves: list[Move] = []
    if finite:
        # Pairs of an RBM 64x20 on digits met after 51 sweeps by heat baths of all units
        # given the latents, and 146 by dmala; with the latents summed out after 252 to
        # 378 steps of any rule. Beside a network's residual after 69 and 111 sweeps.
        if rule is None:
            moves.append(Informed(finite, "heat_bath", 1.0, 1))
        steps = num_steps or (1 if layers else 10)
        moves.append(Informed(finite, rule or "dmala", step_size, steps))
    if finite and real and step_size is not None:
        raise checks.error(
            "informed_sweep: step_size",
            f"None where finite {finite} and real-valued {real} both move",
            step_size,
            hint="Give moves of your own: Informed, Hamiltonian and Layer.",
        )
    if real:
        size = Hamiltonian.step_size if step_size is None else step_size
        moves.append(Hamiltonian(real, size, num_steps or Hamiltonian.num_steps))
    for move in moves:
        move.check(graph)
    return (*moves, *(Layer(layer, "maximal") for layer in layers))
