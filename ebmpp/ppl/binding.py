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
from ebmpp.core.types import Rows, Schedule
from ebmpp.errors import ParameterError
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.graph.factors.lateral import each_part
from ebmpp.moves import Layer, Target, gibbs
from ebmpp.moves.couplings import Trial, where_rows
from ebmpp.moves.move import Drawn, Move, agree, compare, couple_focused, draw_sweep, offsets

#: log of a weight beside the energy, row by row: a function of all blocks as rows.
LogWeight = Callable[[Rows], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound(Target):
    """A graph with the params and the fixed blocks of this moment.

    :param axes: a pytree like ``params`` of 0 (a row first) and None (the same for all rows).
    :param order: the layers of a sweep.
    :param log_weight: of a state, where the target is more than the energy; None if it is not.
    :param weighted: the blocks that ``log_weight`` reads.
    """

    axes: dict[str, Any]
    order: Schedule
    log_weight: LogWeight | None = None
    weighted: tuple[str, ...] = ()

    @property
    def layers(self) -> Schedule:
        """In the order in which they are drawn here."""
        return self.order

    def map(self, fn: Callable[..., Any], *rows: Any) -> Any:
        """``fn(target, *rows)``, row by row where params differ by row, and at once where they do not."""
        if all(axis is None for axis in jax.tree.leaves(self.axes, is_leaf=lambda a: a is None)):
            return fn(self, *rows)

        def one(params: Any, *row: Any) -> Any:
            made = fn(dataclasses.replace(self, params=params), *jax.tree.map(lambda a: a[None], row))
            return jax.tree.map(lambda a: a[0], made)

        return jax.vmap(one, in_axes=(self.axes, *(0,) * len(rows)))(self.params, *rows)

    def moves(self, kinds: Sequence[str] = ()) -> list[tuple[int, Layer]]:
        """The layers as moves, each with the number of its first part."""
        made = list(map(Layer, self.layers, kinds or itertools.repeat("common")))
        return list(zip(offsets(self.graph, made), made, strict=False))


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
        all_of = zip(given, found, wanted, strict=True)
        each = [leaf if axis is None else leaf.reshape(rows, *s.shape) for leaf, axis, s in all_of]
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


def move(
    bound: Bound, x: Rows, keys: Array, fraction: float = 1.0, beta: Any = 1.0, backward: bool = False
) -> Drawn:
    """One sweep of every row, and how many Metropolis proposals each row took.

    :param x: every block, ``(rows, *shape)``.
    :param keys: of this sweep, ``(rows, 2)``; part i of all layers' draws from ``fold_in(keys, i)``.
    :param fraction: of a layer's units that are proposed at a time, where there is a ``log_weight``.
    :param beta: what the energy, and the ``log_weight``, are multiplied by.
    :param backward: the last part of the last layer first: the reversal of the sweep.
    """
    carry, order = (dict(x), jnp.zeros(len(keys), jnp.int32)), bound.moves()
    for start, layer in reversed(order) if backward else order:
        count = layer.num_parts(bound.graph)

        def step(
            part: Any, carry: Drawn, start: int = start, layer: Layer = layer, count: int = count
        ) -> Drawn:
            (x, taken), part = carry, count - 1 - part if backward else part
            own = random.fold_in(keys, start + part)
            drawn = bound.map(lambda target, x, own: _draw_part(target, x, layer, part, own, beta), x, own)
            x, took = _accept(bound, layer, x, drawn, own, fraction, beta)
            return x, taken + took

        # part by part: visits of several parts are not reversible, so one acceptance for all would be wrong
        carry = each_part(count, step, carry)
    return carry


def move_by(bound: Bound, moves: Sequence[Move], x: Rows, keys: Array) -> dict[str, Array]:
    """One sweep of every row by other moves than draws of layers; those of latents are drawn before.

    :param moves: of the blocks that are sites.
    """
    changed = {b for own in moves for b in own.blocks}
    first = [Layer(blocks) for blocks in bound.order if changed.isdisjoint(blocks)]
    return bound.map(lambda target, x, keys: draw_sweep(target, x, (*first, *moves), keys)[0], x, keys)


def log_density(bound: Bound, x: Rows) -> Array:
    """Minus the energy of every row, and the ``log_weight``: what a temperature divides."""
    one = lambda target, t: -energy.energy(target.graph, target.params, t)
    each = lambda target, x: jax.vmap(lambda t: one(target, t))(target.graph.statistics(x))
    made = bound.map(each, x)
    return made if bound.log_weight is None else made + bound.log_weight(x)


def _natural(target: Target, x: Rows, layer: Layer, part: Any) -> dict[str, Array]:
    """Natural parameters of a layer, or of a part, ``(rows, *shape, *stat_shape)``."""
    one = {b: v[None] for b, v in x.items()}
    focused = layer.focus(target, layer.prepare(target, one), one, part)
    return {b: e[0] for b, e in focused.items()}


def _draw_part(target: Target, x: Rows, layer: Layer, part: Any, keys: Array, beta: Any) -> dict[str, Array]:
    """A layer with new values of one part; all of them new where there is but one."""
    view, eta = layer.view(target.graph, part), _natural(target, x, layer, part)
    if not isinstance(beta, float) or beta != 1:
        eta = {b: beta * e for b, e in eta.items()}
    return layer.put(target.graph, x, part, gibbs.draw(view, layer.blocks, eta, keys))


def _accept(
    bound: Bound, layer: Layer, x: Rows, drawn: Rows, keys: Array, fraction: float, beta: Any = 1.0
) -> tuple[dict[str, Array], Array]:
    """Rows with what was drawn, by Metropolis where there is a weight beside the energy; and who took it."""
    if bound.log_weight is None or set(layer.blocks).isdisjoint(bound.weighted):
        return {**x, **drawn}, jnp.zeros(len(keys), bool)
    size = sum(bound.graph.families[b].size for b in layer.blocks)
    # words beside those of the draw itself: one a unit, and one for the row
    words = random.words(random.fold_in(keys, 0, 1 << 31), size + 1)
    proposed = {**x, **_some(bound.graph, words, x, drawn, fraction)}
    gain = beta * (bound.log_weight(proposed) - bound.log_weight(x))
    took = jnp.log(random.uniform(words[:, -1])) < gain
    return {b: where_rows(took, proposed[b], v) for b, v in x.items()}, took


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
    bounds: tuple[Bound, Bound], z: Rows, keys: Array, kinds: Sequence[str], fraction: float = 1.0
) -> tuple[dict[str, Array], Array]:
    """One coupled sweep of both chains of every row, each under its own params.

    :param bounds: the surroundings of the leading and of the following chain.
    :param z: both chains, ``(2, rows, *shape)`` a block.
    :param keys: of this sweep, ``(rows, 2)``.
    :param kinds: a coupling for each layer.
    :return: both chains, and which rows are broken (see :class:`~ebmpp.moves.couplings.Attempt`).
    """
    graph, alike = bounds[0].graph, jnp.broadcast_to(_same_params(bounds), len(keys))
    carry = dict(z), jnp.zeros(len(keys), bool)
    for start, layer in bounds[0].moves(kinds):

        def step(part: Any, carry: tuple, start: int = start, layer: Layer = layer) -> tuple:
            z, broken = carry
            chains = [{b: v[i] for b, v in z.items()} for i in range(2)]
            natural = lambda target, x: _natural(target, x, layer, part)
            each = [bound.map(natural, x) for bound, x in zip(bounds, chains, strict=True)]
            focused = {b: jnp.stack([each[0][b], each[1][b]]) for b in layer.blocks}
            same = alike & agree(compare(bounds[0], z), layer.reads(graph), len(keys))
            trial = Trial(keys, jnp.ones(len(keys), bool), same, part)
            made = couple_focused(bounds[0], focused, z, layer, start + part, trial)
            own = random.fold_in(keys, start + part)
            drawn = zip(bounds, chains, (made.x, made.y), strict=True)
            new = [_accept(bound, layer, x, y, own, fraction)[0] for bound, x, y in drawn]
            return {b: jnp.stack([new[0][b], new[1][b]]) for b in z}, broken | made.broken

        carry = each_part(layer.num_parts(graph), step, carry)
    return carry


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
