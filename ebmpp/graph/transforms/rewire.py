# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factors over other blocks with the energy of a given factor."""

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.core import HashableArray, Params, induced_edges, omit
from ebmpp.families import Family
from ebmpp.families.family import Families
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
    """Names of other blocks, and the numbers of the units that each holds, None for all."""
    fixed: HashableArray | None = None
    """Statistics of the units in no piece."""

    def assemble(self, statistics: Mapping[str, Array]) -> Array:
        """Return the block's statistics."""
        if len(self.pieces) == 1 and self.pieces[0][1] is None:
            return statistics[self.pieces[0][0]]
        stat_shape = self.family.stat_shape
        if self.fixed is None:
            block = jnp.zeros((self.family.size, *stat_shape))
        else:
            block = jnp.asarray(self.fixed.array).reshape(-1, *stat_shape)
        for name, places in self.pieces:
            units = slice(None) if places is None else places.array
            block = block.at[units].set(statistics[name].reshape(-1, *stat_shape))
        return block.reshape(self.family.statistic_shape)


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
    def is_always_affine(self) -> bool:
        """True if the factor's energy is: statistics are assembled linearly."""
        return self.factor.is_always_affine

    @property
    def has_zeros(self) -> bool:
        """True if the factor has states of probability zero."""
        return self.factor.has_zeros

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
    are_same = all(parts[b].pieces == ((b, None),) for b in factor.blocks)
    if are_same and not offset and scale == 1:
        return factor
    assemblies = tuple(parts[b] for b in factor.blocks)
    names = dict.fromkeys(name for part in assemblies for name, _ in part.pieces)
    scope = tuple(names) or (anchor,)
    init = Initial(factor, tuple((b, parts[b].family) for b in factor.blocks))
    energy = Rewired(factor, assemblies, scope, offset, scale)
    lateral = _lateral(factor, parts)
    return Factor(
        *scope,
        energy=energy,
        init=init,
        name=factor.name,
        lateral=lateral,
        affine=factor.affine or not names,
    )


def _lateral(factor: Factor, parts: Mapping[str, Part]) -> dict[str, np.ndarray]:
    """Return the pairs of units that share a piece, by their numbers in it."""
    lateral = {}
    families = {b: parts[b].family for b in factor.blocks}
    for block, edges in factor.edges(families).items():
        size = families[block].size
        for name, places in parts[block].pieces:
            units = np.arange(size) if places is None else places.array.ravel()
            inside = induced_edges(edges, units, size)
            if len(inside):
                lateral[name] = inside
    return lateral


def unchanged(families: Families) -> dict[str, Part]:
    """Return the assemblies of unchanged blocks."""
    return {b: Part(family, ((b, None),)) for b, family in families.items()}


def with_blocks(
    graph: FactorGraph,
    remaining: Families,
    factors: Iterable[Factor],
    parts: Mapping[str, Part],
) -> FactorGraph:
    """Return a graph of the remaining blocks, all visible if no visible block remains."""
    seen = {name for b in graph.visible if b in parts for name, _ in parts[b].pieces}
    visible = {b: f for b, f in remaining.items() if b in seen} or dict(remaining)
    latent = omit(remaining, visible)
    labels = {}
    for b, names in graph.labels.items():
        for name, places in parts[b].pieces if b in parts else ():
            labels[name] = names
            if places is not None:
                labels[name] = tuple(names[i] for i in places.array)
    return FactorGraph(visible, latent, factors, labels=labels)
