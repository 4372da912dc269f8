# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Neighbours at constant shifts, as on lattices: slices in place of gathers.

A block is packed where each run of as many units as parts has one unit of each part. On
a lattice whose sites are numbered row by row, all neighbours in one direction of a
packed part are then the same number of places away, but at the boundary.
"""

import dataclasses
from typing import Any

import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Edges, expand
from ebmpp.graph.factors.lateral import Split

_MAX_SHIFTS = 16  # per part; a periodic cubic lattice has 11, a triangular one 14


@dataclasses.dataclass(frozen=True, eq=False)
class Shifted:
    """Sums over neighbours as sums of slices of packed parts, which are rings."""

    split: Split
    slots: np.ndarray
    """Numbers of a part, of the part of its neighbours and of places to these."""
    pairs: np.ndarray
    """Pair of each unit of the part by slot; the number of pairs where there is none."""
    shared: bool
    """True if all pairs have one weight."""

    def spread(self, weights: Array) -> Array:
        """Return the weights by slot, of one per pair and a final 0."""
        if self.shared:
            return jnp.where(self.pairs < len(weights) - 1, weights[0], 0)
        return weights[self.pairs]

    def field(self, weights: Array, parts: list[Array], part: int) -> Array:
        """Return natural parameters of the units of ``part``, ``(rows, units, ...)``."""
        family = self.split.family
        width = parts[0].shape[1]
        ends, shifts = np.divmod(self.slots, width)
        reach = np.minimum(shifts, width - shifts).max()
        rings = [jnp.pad(p, ((0, 0), (reach, reach)), "wrap") for p in parts]
        # XLA would copy each slice of a concatenation
        rings = lax.optimization_barrier(rings)
        starts = (shifts + reach) % width
        total: Any = 0.0
        for slot in np.flatnonzero(ends // len(parts) == part):
            ring = rings[ends[slot] % len(parts)]
            units = ring[:, starts[slot] : starts[slot] + width]
            t = family.interaction(family.statistics(units))
            total = total + expand(weights[slot][None], target=t) * t
        return total


def find_shifts(split: Split, edges: Edges, shared: bool) -> Shifted | None:
    """Return the slices of pairs with a weight each, or with one weight.

    :return: None if there are too many, or if parts do not pack.
    """
    size = split.family.size
    count = split.num_parts
    packs = split.unrolled and (split.place == np.arange(size) // count).all()
    has_same_shape = split.family.interaction_shape == split.family.statistic_shape
    if not packs or size % count or not has_same_shape:
        return None
    width = size // count
    unit, other = np.concatenate([edges, edges[:, ::-1]]).T
    shift = (split.place[other] - split.place[unit]) % width
    ends = split.colors[unit] * count + split.colors[other]
    slots, slot = np.unique(ends * width + shift, return_inverse=True)
    if len(slots) > _MAX_SHIFTS * count:
        return None
    pairs = np.full((len(slots), width), len(edges))
    pairs[slot, split.place[unit]] = np.arange(len(unit)) % len(edges)
    return Shifted(split, slots, pairs, shared)


def pack(split: Split, values: Array) -> list[Array]:
    """Return values of the units, ``(size, rows, ...)``, by part, with the rows first."""
    count = split.num_parts
    rows = jnp.swapaxes(values, 0, 1)
    runs = rows.reshape(len(rows), -1, count, *rows.shape[2:])
    cases = jnp.moveaxis(runs, 2, 0)
    return [_choose(cases, units % count) for units in split.units]


def unpack(split: Split, parts: list[Array]) -> Array:
    """Undo :func:`pack` for values without further axes."""
    owners = split.colors.reshape(-1, split.num_parts)
    runs = _choose([part[..., None] for part in parts], owners)
    return runs.reshape(len(runs), -1).T


def _choose(cases: Any, numbers: np.ndarray) -> Array:
    """Return the case of each unit, the second axis."""
    values = cases[0]
    for number, case in enumerate(cases[1:], 1):
        values = jnp.where(expand(numbers[None] == number, target=case), case, values)
    return values
