# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The metropolised Gibbs move: units that leave their values as often as their conditionals allow."""

from collections.abc import Iterable, Sequence
import dataclasses
from typing import Any

from jaxtyping import Float, Real

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random, sharding
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Blocks, Chains, Draws, Eta, Keys, Natural, Rows, Words
from ebmpp.errors import ArgumentError, IntractableError
from ebmpp.families import Categorical
from ebmpp.families.family import Family
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.moves import gibbs
from ebmpp.moves.couplings import Attempt, Trial, where_rows
from ebmpp.moves.layer import Layer
from ebmpp.moves.move import Drawn, Move, flat
from ebmpp.moves.target import Target

#: Of a unit's next value, in the order of its family's states.
_Chances = Float[Array, "*units states"]


@dataclasses.dataclass(frozen=True)
class Metropolized(Layer):
    """Blocks of one layer, whose units each propose a value that they do not have.

    Where :class:`~ebmpp.moves.Layer` draws a unit's value from its conditional p, often the one that it has,
    this draws another from ``p_i / (1 - p_x)`` and takes it with probability
    ``min(1, (1 - p_x) / (1 - p_i))``: a binary unit flips with probability ``min(1, p_other / p_x)``. The law
    stays as it is. A single unit visited so gives averages of no more variance than by its conditional,
    whatever is averaged (Peskun 1973); of sweeps, in which the units of a layer move at once, that need not
    be so. A unit whose values are nearly equally probable is turned over each time, so in models that hardly
    couple their units let plain draws stand between: they also bring the two chains of a pair together.

    :param blocks: blocks that do not interact, of units of finitely many values.
    :param kind: "common", which makes each unit's values equal in both chains as often as can be.

    **References**

    1. Liu (1996), *Peskun's theorem and a modified discrete-state Gibbs sampler*.
    2. Breuleux, Bengio, Vincent (2011), section 3: fewer transitions of a state to itself.
    3. Peskun (1973), *Optimum Monte-Carlo sampling using Markov chains*.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.moves import Metropolized
    >>> graph = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> kernel = ebmpp.BlockedGibbs(graph, moves=(Metropolized(("h",)), Metropolized(("v",))))
    """

    def check(self, graph: FactorGraph) -> None:
        """Check blocks and kind.

        :raises ArgumentError: for another kind than "common".
        :raises IntractableError: for blocks that interact, or whose units have infinitely many values.
        """
        super().check(graph)
        if self.kind != "common":
            raise ArgumentError(
                f'Metropolized: kind={self.kind!r} is unknown: it has "common" alone, Layer has the others'
            )
        for b in self.blocks:
            if not _is_finite(graph.families[b]):
                raise IntractableError(
                    f"Metropolized: block {b!r} ({graph.families[b]!r}) has infinitely many values, and to "
                    "draw another than the present one takes all of them: draw it by Layer"
                )

    def reads(self, graph: FactorGraph) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().reads(graph), *self.blocks)))

    def draw(self, target: Target, x: Rows, keys: Keys) -> Drawn:
        def new(eta: Eta, view: gibbs.Families, part: Any) -> Blocks:
            own = keys if part is None else random.fold_in(keys, 0, part)
            now = self._present(target.graph, x, part)
            words = self._words(view, own)
            return {b: _draw(view.families[b], words[b], e, now[b]) for b, e in eta.items()}

        return gibbs.visit(target, x, self.blocks, new), jnp.zeros(len(keys), jnp.int32)

    def attempt(self, target: Target, focused: Any, z: Chains, trial: Trial) -> Attempt:
        graph, rows = target.graph, len(trial.keys)
        view, present = self.view(graph, trial.part), self._present(graph, flat(z), trial.part)
        now = {b: v.reshape(2, rows, *v.shape[1:]) for b, v in present.items()}
        words, every = self._words(view, trial.keys), jnp.ones(rows, bool)
        made = {b: _couple(view.families[b], words[b], e, now[b]) for b, e in focused.items()}
        made = {b: (x, where_rows(trial.same, x, y)) for b, (x, y) in made.items()}
        own = lambda both, i: {b: both[b][i] for b in self.blocks}
        new = lambda i: gibbs.hold(
            target.keep, own(z, i), self.put(graph, own(z, i), trial.part, own(made, i))
        )
        inside = [view.families[b].in_domain(e).reshape(2, rows, -1).all((0, 2)) for b, e in focused.items()]
        together = dict.fromkeys(self.blocks, trial.same)
        return Attempt(new(0), new(1), every, every, ~jnp.stack(inside).all(0), together)

    def _words(self, view: gibbs.Families, keys: Keys) -> dict[str, Words]:
        each = {b: view.families[b].size * Categorical.num_couple_words for b in self.blocks}
        words, made, start = random.words(keys, sum(each.values())), {}, 0
        for b, count in each.items():
            own = words[:, start : start + count]
            made[b] = own.reshape(len(keys), *view.families[b].shape, Categorical.num_couple_words)
            start += count
        return made

    def _present(self, graph: FactorGraph, x: Rows, part: Any) -> Rows:
        """The values that are to be left; a part's own, which no other part changes."""
        block = self.blocks[0]
        if block not in graph.splits:
            return {b: x[b] for b in self.blocks}
        split = graph.splits[block]
        return {block: split.take(energy.to_units(x[block], split.family), part).T}


def metropolized_sweep(
    graph: FactorGraph, clamped: Iterable[str] = (), blocks: str | Sequence[str] | None = None
) -> tuple[Move, ...]:
    """All free blocks, layer after layer: some by :class:`Metropolized`, the others by :class:`Layer`.

    Not all of them at once: where turning every unit over leaves the energy as it is, as of spins without
    biases, layers that all move so swing between two halves of the states for ever. A pair of chains needs
    plain draws of the same blocks, too: ``coupling=(*metropolized_sweep(graph), *gibbs_sweep(graph))``.

    :param clamped: blocks that are held.
    :param blocks: moved by :class:`Metropolized`; by default the visible ones of finitely many values.
    :raises ArgumentError: for blocks that the graph has not.
    :raises IntractableError: for blocks of infinitely many values.

    **Example**

    >>> import ebmpp
    >>> from ebmpp.moves import metropolized_sweep
    >>> metropolized_sweep(ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3)))
    (Metropolized(blocks=('v',), kind='common'), Layer(blocks=('h',), kind='common'))
    """
    if blocks is None:
        chosen = tuple(b for b in graph.visible if _is_finite(graph.families[b]))
    else:
        chosen = (blocks,) if isinstance(blocks, str) else tuple(blocks)
        checks.names("block", chosen, graph.families)

    def of(layer: tuple[str, ...]) -> list[Move]:
        some = tuple(b for b in layer if b in chosen)
        rest = tuple(b for b in layer if b not in chosen)
        return [made(some) for made, some in ((Metropolized, some), (Layer, rest)) if some]

    made = tuple(move for layer in schedule(graph, clamped) for move in of(layer))
    for move in made:
        move.check(graph)
    return made


def _is_finite(family: Family) -> bool:
    with sharding.at_once():  # a kernel asks while it is traced
        return family.states() is not None


def _draw(family: Family, words: Words, eta: Natural, now: Draws) -> Draws:
    chances = _chances(family, eta, now)
    return _values(family, random.inverse_cdf(random.uniform(words[..., 0]), chances))


def _couple(family: Family, words: Words, eta: Natural, now: Real[Array, "2 *units"]) -> tuple[Draws, Draws]:
    """The next values of both chains, of natural parameters ``(2, rows, ...)``."""
    log = jnp.log(_chances(family, eta, now))
    x, y = Categorical(family.shape, log.shape[-1]).couple(words, log[0], log[1])
    return _values(family, x), _values(family, y)


@full_precision
def _chances(family: Family, eta: Natural, now: Draws) -> _Chances:
    """Of each state to come: min(p_i / (1 - p_x), p_i / (1 - p_i)), and what is left for the present one."""
    states = _states(family)
    statistics = family.statistics(states).reshape(len(states), -1)
    logits = eta.reshape(*now.shape, -1) @ statistics.T + family.log_base_measure(states)
    weights = jnp.exp(logits - lax.stop_gradient(logits.max(-1, keepdims=True)))
    # the sum of all others, by additions: 1 - p would lose the digits of what is nearly sure
    others = _before(weights) + jnp.flip(_before(jnp.flip(weights, -1)), -1)
    here = now[..., None] == states
    leave = jnp.where(here, others, 0).sum(-1, keepdims=True)
    # without others of any weight the unit stays: min(...) would be 0 / 0
    odds = jnp.where(leave > 0, weights / jnp.maximum(leave, others), 0)
    moved = jnp.where(here, 0, odds)
    return jnp.where(here, jnp.maximum(1 - moved.sum(-1, keepdims=True), 0), moved)


def _before(weights: Float[Array, "... states"]) -> Float[Array, "... states"]:
    """The sum of the weights before each."""
    none = jnp.zeros_like(weights[..., :1])
    return jnp.concatenate([none, jnp.cumsum(weights[..., :-1], -1)], -1)


def _states(family: Family) -> Draws:
    states = family.states()
    if states is None:
        raise IntractableError(f"{family!r} has infinitely many values")
    return states


def _values(family: Family, index: Array) -> Draws:
    return _states(family)[index].astype(family.dtype)
