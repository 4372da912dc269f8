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

from ebmpp.core import expand
from ebmpp.graph.factors.lateral import Split
from ebmpp.graph.factors.pairwise import Neighbours, Pairwise

_MAX_SHIFTS = 16  # per part; a periodic cubic lattice has 11, a triangular one 14


@dataclasses.dataclass(frozen=True, eq=False)
class Shifted:
    """Sums over neighbours as sums of slices of packed parts, which are rings."""

    path: Neighbours
    slots: np.ndarray
    """Numbers of a part, of the part of its neighbours and of places to these."""
    pairs: np.ndarray
    """Pair of each unit of the part by slot; the number of pairs where there is none."""

    def field(self, prepared: Array, parts: list[Array], part: Any) -> Array:
        """Return natural parameters of the units of ``part``, ``(rows, units, ...)``."""
        family = self.path.split.family
        width = self.pairs.shape[1]
        ends, shifts = np.divmod(self.slots, width)
        reach = np.minimum(shifts, width - shifts).max()
        rings = [jnp.pad(p, ((0, 0), (reach, reach)), "wrap") for p in parts]
        # XLA would copy each slice of a concatenation
        rings = lax.optimization_barrier(rings)
        near = ends // len(parts) == part
        pairs = self.pairs[near]
        factor = self.path.factor
        count = len(self.path.edges)
        is_shared = isinstance(factor, Pairwise) and factor.shared
        if is_shared and len(factor.lateral[0][1].array) == count:
            weights = jnp.where(pairs < count, prepared[0], 0)
        else:  # a loop with gathers would not be vectorised
            weights = lax.optimization_barrier(prepared[pairs])
        starts = (shifts[near] + reach) % width
        total: Any = 0.0
        for other, start, weight in zip(ends[near] % len(parts), starts, weights):
            units = rings[other][:, start : start + width]
            t = family.interaction(family.statistics(units))
            total = total + expand(weight[None], target=t) * t
        return total


def find_shifts(path: object) -> Shifted | None:
    """Return the slices of a fast path.

    :return: None if there are too many, or if parts do not pack.
    """
    if type(path) is not Neighbours or path.dense:
        return None
    split = path.split
    size = split.family.size
    count = split.num_parts
    packs = split.unrolled and (split.place == np.arange(size) // count).all()
    has_same_shape = split.family.interaction_shape == split.family.statistic_shape
    if not packs or size % count or not has_same_shape:
        return None
    width = size // count
    unit, other = np.concatenate([path.edges, path.edges[:, ::-1]]).T
    shift = (split.place[other] - split.place[unit]) % width
    ends = split.colors[unit] * count + split.colors[other]
    slots, slot = np.unique(ends * width + shift, return_inverse=True)
    if len(slots) > _MAX_SHIFTS * count:
        return None
    pairs = np.full((len(slots), width), len(path.edges))
    pairs[slot, split.place[unit]] = np.arange(len(unit)) % len(path.edges)
    return Shifted(path, slots, pairs)


def pack(split: Split, values: Array) -> list[Array]:
    """Return values of the units, ``(size, rows, ...)``, by part, with the rows first."""
    count = split.num_parts
    runs = values.reshape(-1, count, *values.shape[1:])
    cases = jnp.moveaxis(runs, (1, 2), (0, 1))
    return [_choose(cases, units % count) for units in split.units]


def unpack(split: Split, parts: list[Array]) -> Array:
    """Undo :func:`pack` for values without further axes."""
    owners = split.colors.reshape(-1, split.num_parts)
    runs = jnp.stack([_choose(parts, owner) for owner in owners.T], 2)
    return runs.reshape(len(runs), -1).T


def _choose(cases: Any, numbers: np.ndarray) -> Array:
    """Return the case of each unit, the second axis."""
    which = expand(numbers.astype(np.int32)[None], target=cases[0])
    return lax.select_n(jnp.broadcast_to(which, cases[0].shape), *cases)
