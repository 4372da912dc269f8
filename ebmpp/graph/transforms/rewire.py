# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factors made of other factors: the same energy, its statistics put together from other blocks."""

from collections.abc import Hashable, Iterable, Mapping
import dataclasses
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Params
from ebmpp.families import Family
from ebmpp.graph.factors import Factor
from ebmpp.graph.factors.lateral import Constant
from ebmpp.graph.graph import FactorGraph

#: A graph and its params.
WithParams = tuple[FactorGraph, Params]


@dataclasses.dataclass(frozen=True)
class Part:
    """How the statistics of a block are put together."""

    family: Family
    """The block's."""
    pieces: tuple[tuple[str, Constant | None], ...]
    """Names of other blocks, and which of the block's units theirs are; None: all of them, as they are."""
    fixed: Constant | None = None
    """Statistics of the units that are in no piece."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the other blocks."""
        return tuple(name for name, _ in self.pieces)

    def assemble(self, statistics: Mapping[str, Array]) -> Array:
        """The block's statistics."""
        if len(self.pieces) == 1 and self.pieces[0][1] is None:
            return statistics[self.pieces[0][0]]
        shape = self.family.statistic_shape
        whole = jnp.zeros(shape) if self.fixed is None else jnp.asarray(self.fixed.array)
        units = (self.family.size, *self.family.stat_shape)
        whole = whole.reshape(units)
        for name, places in self.pieces:
            at = slice(None) if places is None else places.array
            whole = whole.at[at].set(statistics[name].reshape(-1, *units[1:]))
        return whole.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Initial:
    """A factor's initial params without a scheme; a value, as energies are."""

    factor: Factor
    families: tuple[tuple[str, Family], ...]

    def __call__(self, rng_key: Array) -> Any:
        return self.factor.init_params(rng_key, dict(self.families))


@dataclasses.dataclass(frozen=True)
class Rewired:
    """A factor's energy at statistics that are put together from those of ``scope``, plus a constant."""

    factor: Factor
    parts: tuple[Part, ...]
    scope: tuple[str, ...]
    offset: float = 0.0

    def __call__(self, params: Any, *statistics: Array) -> Array:
        around = dict(zip(self.scope, statistics, strict=True))
        inputs = (part.assemble(around) for part in self.parts)
        families = tuple(part.family for part in self.parts)
        return self.factor.evaluate(params, *inputs, families=families) + self.offset


def rewire(factor: Factor, parts: Mapping[str, Part], anchor: str, offset: float = 0.0) -> Factor:
    """The factor of the same name and params over other blocks.

    :param factor: as it was.
    :param parts: how the statistics of each of its blocks are put together.
    :param anchor: the block of a factor that is left without any: its energy is a constant.
    :param offset: added to the energy.
    """
    own = tuple(parts[b] for b in factor.blocks)
    if not offset and all(part.pieces == ((b, None),) for b, part in zip(factor.blocks, own, strict=True)):
        return factor
    scope = tuple(dict.fromkeys(name for part in own for name in part.names)) or (anchor,)
    init = Initial(factor, tuple((b, parts[b].family) for b in factor.blocks))
    energy, lateral = Rewired(factor, own, scope, offset), _lateral(factor, parts)
    return Factor(*scope, energy=energy, init=init, name=factor.name, lateral=lateral)


def _lateral(factor: Factor, parts: Mapping[str, Part]) -> dict[str, np.ndarray]:
    """The pairs of units that are in one piece together, by their numbers there."""
    made = {}
    for block, edges in factor.edges({b: parts[b].family for b in factor.blocks}).items():
        for name, places in parts[block].pieces:
            units = np.arange(parts[block].family.size) if places is None else places.array.ravel()
            number = np.full(parts[block].family.size, -1)
            number[units] = np.arange(len(units))
            inside = number[edges][(number[edges] >= 0).all(1)]
            if len(inside):
                made[name] = inside
    return made


def whole(block: str, family: Family) -> Part:
    """A block that stays as it is."""
    return Part(family, ((block, None),))


def labels_of(graph: FactorGraph, parts: Mapping[str, Part]) -> dict[str, tuple[Hashable, ...]]:
    """Names of the units that stay, by the block they are then in."""
    made = {}
    for block in (b for b in graph.labels if b in parts):
        names = graph.labels[block]
        for name, places in parts[block].pieces:
            made[name] = names if places is None else tuple(names[i] for i in places.array)
    return made


def renamed(factor: Factor, blocks: tuple[str, ...], name: str) -> Factor:
    """The same factor under other names, of whatever class it is."""
    made, new = object.__new__(type(factor)), dict(zip(factor.blocks, blocks, strict=True))
    lateral = tuple((new[b], pairs) for b, pairs in factor.lateral)
    for field, value in {**vars(factor), "blocks": blocks, "name": name, "lateral": lateral}.items():
        object.__setattr__(made, field, value)
    return made


def with_blocks(
    graph: FactorGraph, kept: Mapping[str, Family], factors: Iterable[Factor], parts: Mapping[str, Part]
) -> FactorGraph:
    """The graph of the blocks that are left; all visible where none of those is.

    :param kept: families by name, in order.
    :param parts: where the units of the graph's own blocks are now.
    """
    seen = {name for b in graph.visible if b in parts for name in parts[b].names}
    visible = {b: f for b, f in kept.items() if b in seen} or dict(kept)
    latent = {b: f for b, f in kept.items() if b not in visible}
    return FactorGraph(visible, latent, factors, labels=labels_of(graph, parts))


def mean_params(found: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The mean of the params that each factor was given."""
    mean = lambda *values: sum(values) / len(values)
    return {name: jax.tree.map(mean, *v) if len(v) > 1 else v[0] for name, v in found.items()}
