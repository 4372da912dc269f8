# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factors over other blocks with the energy of a given factor."""

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.core.groups import induced_edges
from ebmpp.core.types import HashableArray, Params
from ebmpp.families import Family
from ebmpp.graph.factors import Factor
from ebmpp.graph.graph import FactorGraph

#: A graph and its params.
WithParams = tuple[FactorGraph, Params]


@dataclasses.dataclass(frozen=True)
class Part:
    """Assembly of a block's statistics from the statistics of other blocks."""

    family: Family
    """Family of the block."""
    pieces: tuple[tuple[str, HashableArray | None], ...]
    """Names of the other blocks, and the numbers of the block's units that each holds; None for all units."""
    fixed: HashableArray | None = None
    """Statistics of the units in no piece."""

    def assemble(self, statistics: Mapping[str, Array]) -> Array:
        """Return the block's statistics."""
        if len(self.pieces) == 1 and self.pieces[0][1] is None:
            return statistics[self.pieces[0][0]]
        shape = self.family.statistic_shape
        block = (
            jnp.zeros(shape) if self.fixed is None else jnp.asarray(self.fixed.array)
        )
        units = (self.family.size, *self.family.stat_shape)
        block = block.reshape(units)
        for name, places in self.pieces:
            at = slice(None) if places is None else places.array
            block = block.at[at].set(statistics[name].reshape(-1, *units[1:]))
        return block.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Initial:
    """Initial params of a factor without a scheme, hashable."""

    factor: Factor
    families: tuple[tuple[str, Family], ...]

    def __call__(self, rng_key: Array) -> Any:
        """Return the params."""
        return self.factor.init_params(rng_key, dict(self.families))


@dataclasses.dataclass(frozen=True)
class Rewired:
    """Energy of a factor at assembled statistics, times a scale, plus a constant."""

    factor: Factor
    parts: tuple[Part, ...]
    scope: tuple[str, ...]
    offset: float = 0.0
    scale: float = 1.0

    @property
    def is_affine(self) -> bool:
        """True if the factor's energy is: statistics are assembled linearly."""
        return self.factor.is_affine

    def __call__(self, params: Any, *statistics: Array) -> Array:
        """Return the energy of one state."""
        blocks = dict(zip(self.scope, statistics, strict=True))
        inputs = (part.assemble(blocks) for part in self.parts)
        families = tuple(part.family for part in self.parts)
        energy = self.factor.evaluate(params, *inputs, families=families)
        return self.scale * energy + self.offset


def rewire(
    factor: Factor,
    parts: Mapping[str, Part],
    anchor: str,
    offset: float = 0.0,
    scale: float = 1.0,
) -> Factor:
    """Return a factor over other blocks with the same name and params.

    :param parts: assembly of the statistics of each of its blocks.
    :param anchor: block of a factor that would be left without any, whose energy is a
        constant.
    :param offset: added to the energy.
    :param scale: multiplies the energy.
    """
    assemblies = tuple(parts[b] for b in factor.blocks)
    if (
        not offset
        and scale == 1
        and all(parts[b].pieces == ((b, None),) for b in factor.blocks)
    ):
        return factor
    scope = tuple(
        dict.fromkeys(name for part in assemblies for name, _ in part.pieces)
    ) or (anchor,)
    init = Initial(factor, tuple((b, parts[b].family) for b in factor.blocks))
    energy = Rewired(factor, assemblies, scope, offset, scale)
    lateral = _lateral(factor, parts)
    return Factor(*scope, energy=energy, init=init, name=factor.name, lateral=lateral)


def _lateral(factor: Factor, parts: Mapping[str, Part]) -> dict[str, np.ndarray]:
    """Return the pairs of units that share a piece, by their numbers in it."""
    lateral = {}
    for block, edges in factor.edges(
        {b: parts[b].family for b in factor.blocks}
    ).items():
        for name, places in parts[block].pieces:
            units = (
                np.arange(parts[block].family.size)
                if places is None
                else places.array.ravel()
            )
            if len(inside := induced_edges(edges, units, parts[block].family.size)):
                lateral[name] = inside
    return lateral


def unchanged(block: str, family: Family) -> Part:
    """Return the assembly of an unchanged block."""
    return Part(family, ((block, None),))


def with_blocks(
    graph: FactorGraph,
    remaining: Mapping[str, Family],
    factors: Iterable[Factor],
    parts: Mapping[str, Part],
) -> FactorGraph:
    """Return a graph of the remaining blocks, all visible if no visible block remains."""
    seen = {name for b in graph.visible if b in parts for name, _ in parts[b].pieces}
    visible = {b: f for b, f in remaining.items() if b in seen} or dict(remaining)
    latent = {b: f for b, f in remaining.items() if b not in visible}

    def pick(names, places):
        return names if places is None else tuple(names[i] for i in places.array)

    pieces = [
        (names, *piece)
        for b, names in graph.labels.items()
        if b in parts
        for piece in parts[b].pieces
    ]
    labels = {name: pick(names, places) for names, name, places in pieces}
    return FactorGraph(visible, latent, factors, labels=labels)
