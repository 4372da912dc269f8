# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A graph bound to its surroundings: params and fixed blocks that are functions of other variables.

Inside a larger model a graph is a part of a posterior: its params may be data, arguments of the model, or
the present values of other variables (a likelihood's field, whose noise scale is being sampled). Binding
evaluates them; what follows is moves of the bound graph, of one state a row or of pairs of them.
Params may differ from row to row, and in a pair of chains from one to the other.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Rows
from ebmpp.errors import ParameterError
from ebmpp.graph import FactorGraph, energy, parts, states
from ebmpp.graph.factors.lateral import each_part
from ebmpp.moves import gibbs
from ebmpp.moves.couplings import Trial, where_rows
from ebmpp.moves.layer import Layer
from ebmpp.moves.move import agree, compare, couple_focused

#: log of a weight beside the energy, row by row: a function of all blocks as rows.
LogWeight = Callable[[Rows], Array]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A graph with the params and the fixed blocks of this moment.

    :param graph: the declaration.
    :param params: by factor; a leaf may have the leading axes ``rows`` where ``axes`` says 0.
    :param axes: a pytree like ``params`` of 0 (differs by row) and None (the same for all).
    :param clamped: fixed blocks, ``(rows, *shape)``.
    :param layers: of a sweep, in order.
    :param log_weight: of a state, where the target is more than the energy; None if it is not.
    :param weighted: the blocks that ``log_weight`` reads.
    """

    graph: FactorGraph
    params: dict[str, Any]
    axes: dict[str, Any]
    clamped: dict[str, Array]
    layers: tuple[tuple[str, ...], ...]
    log_weight: LogWeight | None = None
    weighted: tuple[str, ...] = ()

    def map(self, fn: Callable[..., Any], *rows: Any) -> Any:
        """``fn(params, *rows)``, row by row where params differ by row, and at once where they do not."""
        if all(axis is None for axis in jax.tree.leaves(self.axes, is_leaf=lambda a: a is None)):
            return fn(self.params, *rows)

        def one(params: Any, *row: Any) -> Any:
            made = fn(params, *jax.tree.map(lambda a: a[None], row))
            return jax.tree.map(lambda a: a[0], made)

        return jax.vmap(one, in_axes=(self.axes, *(0,) * len(rows)))(self.params, *rows)

    def natural(self, x: Rows, blocks: Sequence[str], part: Any = 0) -> dict[str, Array]:
        """Natural parameters of ``blocks``, or of a part, ``(rows, *shape, *stat_shape)``."""

        def at(params: Any, x: Rows) -> dict[str, Array]:
            if blocks[0] not in self.graph.splits:
                return energy.natural_rows(self.graph, params, x, blocks)
            around = parts.surround(self.graph, params, x, blocks[0])
            units = parts.to_units(x[blocks[0]], self.graph.families[blocks[0]])
            return {blocks[0]: parts.natural_part(self.graph, params, x, units, blocks[0], around, part)}

        return self.map(at, dict(x))

    def steps(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """The layers with the number of their first part and how many parts they have."""
        counts = [gibbs.num_parts(self.graph, layer) for layer in self.layers]
        starts = itertools.accumulate(counts, initial=0)
        return list(zip(starts, counts, self.layers, strict=False))


def bind_params(
    graph: FactorGraph, params: Mapping[str, Any], batch: tuple[int, ...], check: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Params with rows first where they have the axes ``batch``, and which have.

    :raises ParameterError: for a wrong name, or a shape that is neither the factor's own nor one a row.
    """
    states.check_factors(graph.param_shapes, params)
    made, axes, rows = {}, {}, math.prod(batch)
    for name, tree in graph.param_shapes.items():
        wanted, structure = jax.tree.flatten(tree)
        given, found_structure = jax.tree.flatten(jax.tree.map(jnp.asarray, params[name]))
        if structure != found_structure:
            raise ParameterError(f"factor {name!r}: params are {found_structure}, expected {structure}")
        found = [_axis(name, leaf, s.shape, batch) for leaf, s in zip(given, wanted, strict=True)]
        each = [
            leaf if axis is None else leaf.reshape(rows, *s.shape)
            for leaf, axis, s in zip(given, found, wanted, strict=True)
        ]
        made[name] = jax.tree.unflatten(structure, each)
        axes[name] = jax.tree.unflatten(structure, found)
    if check:
        states.check_finite(made)
    return made, axes


def _axis(name: str, leaf: Array, shape: tuple[int, ...], batch: tuple[int, ...]) -> int | None:
    if leaf.shape == shape:
        return None
    if batch and leaf.shape == batch + shape:
        return 0
    more = f", or {batch + shape} where they differ by row" if batch else ""
    raise ParameterError(f"factor {name!r}: params have shape {leaf.shape}, expected {shape}{more}")


# -- one chain a row -------------------------------------------------------------------------------


def move(bound: Bound, x: Rows, pairs: Array, fraction: float = 1.0) -> tuple[dict[str, Array], Array]:
    """One sweep of every row, and how many Metropolis proposals each row took.

    :param x: every block, ``(rows, *shape)``.
    :param pairs: key pairs, ``(rows, 2)``.
    :param fraction: of a layer's units that are proposed at a time, where there is a ``log_weight``.
    """
    carry = dict(x), jnp.zeros(len(pairs), jnp.int32)
    for start, count, layer in bound.steps():

        def step(part: Any, carry: tuple, start: int = start, layer: tuple[str, ...] = layer) -> tuple:
            x, taken = carry
            keys = random.fold_in(pairs, start + part)
            draw = lambda params, x, k: gibbs.draw_part(bound.graph, params, x, layer, part, k)
            drawn = bound.map(draw, x, keys)
            if bound.log_weight is None or set(layer).isdisjoint(bound.weighted):
                return x | drawn, taken
            words = _choice_words(bound.graph, layer, keys)
            proposed = x | _some(bound.graph, words, x, drawn, fraction)
            took = _log_uniform(words) < bound.log_weight(proposed) - bound.log_weight(x)
            return {b: where_rows(took, proposed[b], v) for b, v in x.items()}, taken + took

        # part by part: visits of several parts are not reversible, so one acceptance for all would be wrong
        carry = each_part(count, step, carry)
    return carry


def num_proposals(bound: Bound) -> int:
    """Metropolis proposals of one sweep of a row."""
    if bound.log_weight is None:
        return 0
    return sum(count for _, count, layer in bound.steps() if set(layer) & set(bound.weighted))


def _choice_words(graph: FactorGraph, layer: Sequence[str], keys: Array) -> Array:
    """Words beside those of the draw itself: one a unit, and one for the row."""
    size = sum(graph.families[b].size for b in layer)
    return random.words(random.fold_in(keys, 0, 1 << 31), size + 1)


def _log_uniform(words: Array) -> Array:
    return jnp.log(random.uniform(words[:, -1]))


def _some(graph: FactorGraph, words: Array, x: Rows, drawn: Rows, fraction: float) -> dict[str, Array]:
    """``drawn`` at a random ``fraction`` of the units, chosen without looking at the state."""
    if fraction >= 1:
        return dict(drawn)
    made, start = {}, 0
    for b, value in drawn.items():
        family = graph.families[b]
        chosen = random.uniform(words[:, start : start + family.size]) < fraction
        made[b] = jnp.where(chosen.reshape(-1, *family.shape), value, x[b])
        start += family.size
    return made


# -- pairs of chains -------------------------------------------------------------------------------


def couple(
    bounds: tuple[Bound, Bound], z: Rows, pairs: Array, kinds: Sequence[str], fraction: float = 1.0
) -> tuple[dict[str, Array], Array]:
    """One coupled sweep of both chains of every row, each under its own params.

    :param bounds: the surroundings of the leading and of the following chain.
    :param z: both chains, ``(2, rows, *shape)`` a block.
    :param kinds: a coupling for each of ``bounds[0].layers``.
    :return: both chains, and which rows are broken (see :class:`~ebmpp.moves.couplings.Attempt`).
    """
    graph, alike = bounds[0].graph, jnp.broadcast_to(_same_params(bounds), len(pairs))
    carry = dict(z), jnp.zeros(len(pairs), bool)
    for (start, count, layer), kind in zip(bounds[0].steps(), kinds, strict=True):

        def step(part: Any, carry: tuple, start: int = start, move: Layer = Layer(layer, kind)) -> tuple:
            z, broken = carry
            each = [
                bound.natural({b: v[i] for b, v in z.items()}, move.blocks, part)
                for i, bound in enumerate(bounds)
            ]
            focused = {b: jnp.stack([each[0][b], each[1][b]]) for b in move.blocks}
            same = alike & agree(compare(graph, z), move.reads(graph), len(pairs))
            draw = Trial(pairs, jnp.ones(len(pairs), bool), same, part)
            made = couple_focused(graph, focused, z, move, start + part, {}, draw)
            new = z | {b: jnp.stack([made.x[b], made.y[b]]) for b in move.blocks}
            keys = random.fold_in(pairs, start + part)
            return _accepted(bounds, move.blocks, z, new, keys, fraction), broken | made.broken

        carry = each_part(count, step, carry)
    return carry


def _accepted(
    bounds: tuple[Bound, Bound], layer: Sequence[str], z: Rows, new: Rows, keys: Array, fraction: float
) -> dict[str, Array]:
    """Metropolis acceptance of both chains with one uniform, where there is a weight beside the energy."""
    if bounds[0].log_weight is None or set(layer).isdisjoint(bounds[0].weighted):
        return dict(new)
    words, chains = _choice_words(bounds[0].graph, layer, keys), []
    for i, bound in enumerate(bounds):
        now, then = ({b: v[i] for b, v in a.items()} for a in (z, new))
        proposed = now | _some(bound.graph, words, now, {b: then[b] for b in layer}, fraction)
        took = _log_uniform(words) < bound.log_weight(proposed) - bound.log_weight(now)
        chains.append({b: where_rows(took, proposed[b], v) for b, v in now.items()})
    return {b: jnp.stack([chains[0][b], chains[1][b]]) for b in z}


def _same_params(bounds: tuple[Bound, Bound]) -> Array:
    """Whether the two chains have equal params and fixed blocks, row by row or for all rows."""
    flags = [jnp.ones((), bool)]
    first, second = (jax.tree.leaves(bound.params) for bound in bounds)
    axes = jax.tree.leaves(bounds[0].axes, is_leaf=lambda a: a is None)
    for a, b, axis in zip(first, second, axes, strict=True):
        equal = a == b
        flags.append(equal.all() if axis is None else equal.reshape(len(equal), -1).all(-1))
    for b, value in bounds[0].clamped.items():
        equal = value == bounds[1].clamped[b]
        flags.append(equal.reshape(len(equal), -1).all(-1))
    return jnp.stack(jnp.broadcast_arrays(*flags)).all(0)
