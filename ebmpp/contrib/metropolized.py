# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Metropolis moves of single units: Metropolised Gibbs, and Gibbs with gradients."""

from collections.abc import Iterable, Sequence
import dataclasses

from jaxtyping import Float, Real

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random, sharding
from ebmpp.core.backend import full_precision
from ebmpp.core.rows import expand
from ebmpp.core.types import Blocks, Chains, Draws, Eta, Keys, Natural, Rows, Words
from ebmpp.errors import ArgumentError, IntractableError
from ebmpp.families import Categorical
from ebmpp.families.family import Families, Family, num_words, split_words
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.moves import Informed, gibbs
from ebmpp.moves.couplings import Attempt, PartIndex, Trial, where_rows
from ebmpp.moves.gradients.informed import States, values_of
from ebmpp.moves.move import Drawn, Layer, Move, both_as_rows
from ebmpp.moves.target import Target

#: Probabilities of a unit's next value, in the order of its family's states.
_Probabilities = Float[Array, "*units states"]


@dataclasses.dataclass(frozen=True)
class Metropolized(Layer):
    """Move of the blocks of one layer, in which each unit proposes a value other than its own.

    :class:`~ebmpp.moves.Layer` draws a value of each unit from its conditional p, which
    often gives its present value x. This move proposes another value i with probability
    ``p_i / (1 - p_x)`` and accepts it with probability
    ``min(1, (1 - p_x) / (1 - p_i))``: a binary unit flips with probability
    ``min(1, p_other / p_x)``. The model's distribution is invariant. For a single unit,
    averages have at most the variance of those by its conditional (Peskun 1973); for
    sweeps, in which the units of a layer move at once, this need not hold. A unit with
    nearly equally probable values flips every time, so in weakly coupled models
    alternate with plain draws, which also let the two chains of a pair meet.

    :param blocks: blocks that do not interact, of units of finitely many values.
    :param kind: "common": each unit's values are equal in both chains with the largest
        probability.

    **References**

    1. Liu (1996), *Peskun's theorem and a modified discrete-state Gibbs sampler*.
    2. Breuleux, Bengio, Vincent (2011), section 3: fewer transitions of a state to
       itself.
    3. Peskun (1973), *Optimum Monte-Carlo sampling using Markov chains*.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import Metropolized
    >>> graph = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> kernel = ebmpp.BlockedGibbs(graph, moves=(Metropolized(("h",)), Metropolized(("v",))))
    """

    def check(self, graph: FactorGraph) -> None:
        """Check blocks and kind.

        :raises ArgumentError: if the kind is not "common".
        :raises IntractableError: for blocks that interact, or whose units have
            infinitely many values.
        """
        super().check(graph)
        if self.kind != "common":
            raise ArgumentError(
                f'Metropolized: kind must be "common", got {self.kind!r}. Layer has '
                "the other couplings."
            )
        for b in self.blocks:
            if not _is_finite(graph.families[b]):
                raise IntractableError(
                    f"Metropolized: blocks must have finitely many values, got {b!r}, "
                    f"which is {graph.families[b]!r}. Use Layer for it."
                )

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        """See :class:`~ebmpp.moves.Move`."""
        return tuple(dict.fromkeys((*super().reads(graph), *self.blocks)))

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        """See :class:`~ebmpp.moves.Move`."""

        def new(natural, families, part):
            eta = natural()
            now = self._present(target.graph, x, part)
            part_keys = keys if part is None else random.fold_in(keys, 0, part)
            words = self._words(families, part_keys)
            return {b: _draw(families[b], words[b], e, now[b]) for b, e in eta.items()}

        drawn = gibbs.visit(target, x, self.blocks, new)
        return drawn, jnp.zeros(len(keys), jnp.int32)

    def attempt(
        self,
        target: Target,
        focused: Eta,
        z: Chains,
        trial: Trial,
    ) -> Attempt:
        """See :class:`~ebmpp.moves.Move`."""
        graph = target.graph
        rows = len(trial.keys)
        families = self.families(graph, trial.part)
        words = self._words(families, trial.keys)
        present = self._present(graph, both_as_rows(z), trial.part)
        drawn = {}
        is_inside = []
        for b, eta in focused.items():
            now = present[b].reshape(2, rows, *present[b].shape[1:])
            x, y = _couple(families[b], words[b], eta, now)
            drawn[b] = (x, where_rows(trial.same, x, y))
            inside = families[b].in_domain(eta)
            is_inside.append(inside.reshape(2, rows, -1).all((0, 2)))

        def new(chain):
            x = {b: z[b][chain] for b in self.blocks}
            of_part = {b: both[chain] for b, both in drawn.items()}
            values = self.put(graph, x, trial.part, of_part)
            return gibbs.keep_observed(target.keep, x, values)

        broken = ~jnp.stack(is_inside).all(0)
        together = dict.fromkeys(self.blocks, trial.same)
        return Attempt.final(new(0), new(1), broken, together)

    def _words(self, families: Families, keys: Keys) -> Blocks:
        """Return as many words per unit as a coupled categorical draw takes."""
        pairs = {b: Categorical(families[b].shape, 2) for b in self.blocks}
        words = random.words(keys, num_words(pairs, coupled=True))
        return split_words(pairs, words, coupled=True)

    def _present(self, graph: FactorGraph, x: Rows, part: PartIndex | None) -> Rows:
        """Return the present values of the units that move."""
        block = self.blocks[0]
        if block not in graph.splits:
            return {b: x[b] for b in self.blocks}
        split = graph.splits[block]
        return {block: split.take(energy.to_units(x[block], split.family), part).T}


def metropolized_sweep(
    graph: FactorGraph,
    clamped: Iterable[str] = (),
    blocks: str | Sequence[str] | None = None,
) -> tuple[Move, ...]:
    """Return moves of all free layers: some by :class:`Metropolized`, the others by :class:`Layer`.

    Do not move all blocks so: where flipping every unit leaves the energy unchanged, as
    for spins without biases, the chain would alternate between two halves of the states
    forever. A pair of chains also needs plain draws of the same blocks:
    ``coupling=(*metropolized_sweep(graph), *gibbs_sweep(graph))``.

    :param graph: the declaration.
    :param clamped: names of clamped blocks.
    :param blocks: blocks moved by :class:`Metropolized`; default: visible ones with
        finitely many values.
    :raises ArgumentError: for unknown blocks.
    :raises IntractableError: for blocks with infinitely many values.

    **Example**

    >>> import ebmpp
    >>> from ebmpp.contrib import metropolized_sweep
    >>> metropolized_sweep(ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3)))
    (Metropolized(blocks=('v',), kind='common'), Layer(blocks=('h',), kind='common'))
    """
    if blocks is None:
        proposing = tuple(b for b in graph.visible if _is_finite(graph.families[b]))
    else:
        proposing = checks.names("block", blocks, graph.families)

    moves: list[Move] = []
    for layer in schedule(graph, clamped):
        inside = tuple(b for b in layer if b in proposing)
        outside = tuple(b for b in layer if b not in proposing)
        if inside:
            moves.append(Metropolized(inside))
        if outside:
            moves.append(Layer(outside))
    for move in moves:
        move.check(graph)
    return tuple(moves)


@dataclasses.dataclass(frozen=True)
class GibbsWithGradients(Informed):
    r"""Steps that set one unit to one value, in proportion to the root of its gain.

    Unit i takes the value k with probability proportional to :math:`e^{a d_{ik}}`, where
    :math:`d_{ik}` is the gain in log density to first order, and a = 1/2 unless
    ``step_size`` says otherwise. Present values are among the choices, so the move is
    lazy: chains that always flip one unit never meet from states an odd number of flips
    apart. For comparison: pairs of :class:`ebmpp.moves.Informed` meet many times sooner.

    **References**

    1. Grathwohl, Swersky, Hashemi, Duvenaud, Maddison (2021), *Oops I took a gradient:
       scalable sampling for discrete distributions*.

    **Example**

    >>> import networkx as nx, ebmpp
    >>> from ebmpp.contrib import GibbsWithGradients
    >>> lattice = ebmpp.FactorGraph.from_networkx(nx.path_graph(3), ebmpp.Spin)
    >>> kernel = ebmpp.BlockedGibbs(lattice, moves=GibbsWithGradients(("x",), num_steps=3))
    """

    step_size: float | None = 0.5

    def log_probs(self, gain: Array, here: Array) -> Array:
        """Return unnormalised log-probabilities of setting a unit to each of its values."""
        return jnp.asarray(self.step_size) * gain

    def evaluate(self, target: Target, x: Rows, new: Rows) -> States:
        """Return states whose score includes the normaliser of the choice."""
        states = super().evaluate(target, x, new)
        log_total = jax.nn.logsumexp(_joined(states.logits), -1)
        return states._replace(score=states.score - log_total)

    def proposals(self, graph: FactorGraph, states: States) -> tuple[Families, Blocks]:
        """Return one distribution of all pairs of a unit and a value."""
        eta = _joined(states.logits)[:, None]
        return {"": Categorical(1, eta.shape[-1])}, {"": eta}

    def values(self, graph: FactorGraph, x: Rows, drawn: Rows) -> Blocks:
        """Return states with one unit set."""
        result = {}
        start = 0
        for b, v in x.items():
            values = values_of(graph.families[b]).astype(v.dtype)
            unit, value = jnp.divmod(drawn[""] - start, len(values))
            is_set = (jnp.arange(v[0].size) == unit).reshape(v.shape)
            result[b] = jnp.where(is_set, expand(values[value][:, 0], v), v)
            start += v[0].size * len(values)
        return result


def _is_finite(family: Family) -> bool:
    with sharding.eager():  # also called while a kernel is traced
        return family.states() is not None


def _draw(
    family: Family,
    words: Words,
    eta: Natural,
    now: Draws,
) -> Draws:
    probabilities = _probabilities(family, eta, now)
    index = random.inverse_cdf(random.uniform(words[..., 0]), probabilities)
    return _values(family, index)


def _couple(
    family: Family,
    words: Words,
    eta: Natural,
    now: Real[Array, "2 *units"],
) -> tuple[Draws, Draws]:
    """Return the next values of both chains, from natural parameters ``(2, rows, ...)``."""
    logits = jnp.log(_probabilities(family, eta, now))
    categorical = Categorical(family.shape, logits.shape[-1])
    x, y = categorical.couple(words, logits[0], logits[1])
    return _values(family, x), _values(family, y)


@full_precision
def _probabilities(family: Family, eta: Natural, now: Draws) -> _Probabilities:
    """Return min(p_i / (1 - p_x), p_i / (1 - p_i)) of other states, the rest at the present."""
    states = _states(family)
    statistics = family.statistics(states).reshape(len(states), -1)
    logits = eta.reshape(*now.shape, -1) @ statistics.T
    logits = logits + family.log_base_measure(states)
    top = lax.stop_gradient(logits.max(-1, keepdims=True))
    weights = jnp.exp(logits - top)
    # the sum of the others, by additions: 1 - p would lose digits where p is near 1
    after = jnp.flip(_before(jnp.flip(weights, -1)), -1)
    others = _before(weights) + after
    here = now[..., None] == states
    leave = jnp.where(here, others, 0).sum(-1, keepdims=True)
    # where no other state has any weight the unit stays; min(...) would be 0 / 0
    odds = jnp.where(leave > 0, weights / jnp.maximum(leave, others), 0)
    moved = jnp.where(here, 0, odds)
    stay = jnp.maximum(1 - moved.sum(-1, keepdims=True), 0)
    return jnp.where(here, stay, moved)


def _before(weights: Float[Array, "... states"]) -> Float[Array, "... states"]:
    """Return the sum of the weights before each."""
    zero = jnp.zeros_like(weights[..., :1])
    return jnp.concatenate([zero, jnp.cumsum(weights[..., :-1], -1)], -1)


def _states(family: Family) -> Draws:
    states = family.states()
    if states is None:
        raise IntractableError(f"{family!r} has infinitely many values")
    return states


def _values(family: Family, index: Array) -> Draws:
    return _states(family)[index].astype(family.dtype)


def _joined(logits: Rows) -> Array:
    return jnp.concatenate([v.reshape(len(v), -1) for v in logits.values()], -1)
