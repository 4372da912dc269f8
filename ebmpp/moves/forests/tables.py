# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tables of log weights of a forest of units given all others, from the energy of the graph.

With the statistics of its units at 0, natural parameters give the weights of units, and
mixed derivatives the weights of pairs. The units above and below a unit differ in their
half, depth // 2 modulo 2, so two products of the Hessian per statistic give the
derivatives between all units and the ones above them.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import NamedTuple

from jaxtyping import Bool, Float, Int32
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Params,
    Rows,
    UnitMasks,
    at_index,
    expand,
    full_precision,
    induced_edges,
    select,
    sharding,
)
from ebmpp.errors import IntractableError
from ebmpp.families.family import Families
from ebmpp.graph import Factor, FactorGraph, energy
from ebmpp.graph.factors.lateral import Split
from ebmpp.graph.factors.pairwise import Neighbours
from ebmpp.moves.forests.layers import UnitsByBlock, interactions
from ebmpp.moves.forests.structure import Forest


class FastFactor(NamedTuple):
    """A factor with a fast path to natural parameters; part 0 is a block's units in the forest."""

    factor: Factor
    split: Split
    local: Neighbours


class StateTable(NamedTuple):
    """Values, log base measures and statistics of units, padded; one row for one block."""

    values: Float[np.ndarray, "units states"]
    log_base: Float[np.ndarray, "units states"]
    statistics: Float[np.ndarray, "units states entries"]


class ForestTables:
    """Units of a graph that make a forest, numbered block after block, and their log weights."""

    def __init__(self, graph: FactorGraph, units: UnitsByBlock) -> None:
        self.graph = graph
        self.units = units
        self.families = select(graph.families, units)
        self.forest = _induced(graph, units)
        lengths = [len(u) for u in units.values()]
        self._states = _state_table(self.families, lengths)
        #: places of each block's units in the forest
        self.places: dict[str, slice] = {}
        #: half of each unit of a block, -1 outside of the forest
        self._half: dict[str, np.ndarray] = {}
        for end, (b, numbers) in zip(np.cumsum(lengths), units.items(), strict=True):
            self.places[b] = slice(end - len(numbers), end)
            self._half[b] = np.full(self.families[b].size, -1)
            self._half[b][numbers] = _half_of(self.forest.depth[self.places[b]])

        def count(factor):
            blocks = (*factor.blocks, *(b for b, _ in factor.lateral))
            return sum(b in units for b in blocks)

        #: factors over the blocks, and those in which several units of the forest may
        #: interact
        self._factors = [f for f in graph.factors if count(f)]
        self._inner_factors = [f for f in graph.factors if count(f) > 1]

    @property
    def _is_constant(self) -> bool:
        """True if units outside of the forest do not change any pairwise weights."""
        return all(
            f.is_pairwise or self.complete.issuperset(f.blocks)
            for f in self._inner_factors
        )

    @cached_property
    def complete(self) -> frozenset[str]:
        """Blocks all of whose units are in the forest."""
        return frozenset(b for b, h in self._half.items() if (h >= 0).all())

    @cached_property
    def _fast(self) -> list[FastFactor]:
        result = []
        for factor in self._factors:
            for b in (b for b, _ in factor.lateral if b in self.units):
                outside = (self._half[b] < 0).astype(np.int64)
                split = Split(b, self.families[b], outside)
                local = factor.local({b: split.family}, split)
                if isinstance(local, Neighbours):  # others may read states, not zeros
                    result.append(FastFactor(factor, split, local))
        return result

    def weights(self, params: Params, x: Rows, keep: UnitMasks) -> tuple[Array, Array]:
        """Return log weights: ``(rows, units, states)`` and ``(edges, states, states)``.

        An observed unit is allowed its value only. Pairwise weights have rows if other
        units change them.
        """
        eta = self._natural(params, self._zeroed(x, self._factors))
        _, log_base, statistics = self._states
        unary = (eta[:, :, None] * statistics[None]).sum(-1) + log_base[None]
        if not self.units.keys().isdisjoint(keep):
            unary = jnp.where(self._is_allowed(x, keep), unary, -jnp.inf)
        t = self._zeroed(x, self._inner_factors)
        if self._is_constant:
            first = at_index(t, 0)
            return unary, self._pairwise(params, first)
        return unary, jax.vmap(partial(self._pairwise, params))(t)

    def _natural(self, params: Params, t: Blocks) -> Float[Array, "rows units entries"]:
        """Return natural parameters of the units, at statistics ``t`` of the blocks."""
        fast = {term.factor.name for term in self._fast}
        slow = [f for f in self._factors if f.name not in fast]

        def slow_at(t):
            return energy.contributed(self.graph, slow, params, t, self.units)

        eta = self._join(jax.vmap(slow_at)(t))
        for factor, split, local in self._fast:
            by_unit = energy.to_units(t[split.block], split.family)
            prepared = local.prepare(params[factor.name])
            field = local.field(prepared, by_unit.__getitem__, 0)
            field = jnp.moveaxis(field, 0, 1).reshape(len(eta), len(field), -1)
            entries = slice(field.shape[-1])
            eta = eta.at[:, self.places[split.block], entries].add(field)
        return eta

    def _is_allowed(self, x: Rows, keep: UnitMasks) -> Bool[Array, "rows units states"]:
        """Return False for the states of observed units that differ from their values."""
        held = {b: jnp.broadcast_to(keep.get(b, False), x[b].shape) for b in self.units}
        is_held = self._join(held)[..., :1] > 0
        value = self._join(select(x, self.units))[..., :1]
        return ~(is_held & (value != self._states.values[None]))

    @full_precision
    def _pairwise(
        self, params: Params, t: Blocks
    ) -> Float[Array, "edges states states"]:
        """Return log weights of the ends of edges, at statistics ``t`` of one row."""
        hessian = self._hessian(params, t)
        depth = self.forest.depth
        a, b = self.forest.edges.T
        is_upper = depth[a] < depth[b]
        upper = np.where(is_upper, a, b)
        lower = np.where(is_upper, b, a)
        # (edges, upper statistics, lower statistics)
        mixed = hessian[_half_of(depth[upper]), :, lower]
        mixed = jnp.where(is_upper[:, None, None], mixed, jnp.swapaxes(mixed, 1, 2))
        table = jnp.asarray(self._states.statistics)
        of_a, of_b = (table, table) if len(table) == 1 else (table[a], table[b])
        return of_a @ mixed @ of_b.swapaxes(1, 2)

    def _hessian(
        self, params: Params, t: Blocks
    ) -> Float[Array, "halves entries units entries"]:
        """Return derivatives of all natural parameters in each statistic of the units of a half."""
        point = select(t, self.units)

        def natural_at(v):
            return energy.contributed(
                self.graph, self._inner_factors, params, t | v, self.units
            )

        def product(half, entry):
            tangent = {}  # 1 at one entry of the statistics of a half's units
            for b, half_of_unit in self._half.items():
                is_half = (half_of_unit == half)[:, None]
                t = point[b].reshape(len(half_of_unit), -1)
                is_entry = jnp.arange(t.shape[1]) == entry
                mask = (is_half & is_entry).astype(t.dtype)
                tangent[b] = mask.reshape(point[b].shape)
            _, slope = jax.jvp(natural_at, (point,), (tangent,))
            return self._join(at_index(slope, None))[0]

        entries = jnp.arange(self._states.statistics.shape[-1])
        of_half = jax.vmap(product, (None, 0))
        return jax.vmap(of_half, (0, None))(jnp.arange(2), entries)

    def put(self, x: Rows, states: Int32[Array, "rows units"]) -> Blocks:
        """Return the blocks with the units of the forest in ``states``."""
        table = self._states.values[None]
        values = jnp.take_along_axis(table, states[..., None], -1)[..., 0]
        new = {}
        for b, place in self.places.items():
            by_unit = x[b].reshape(len(x[b]), -1)
            drawn = values[:, place].astype(by_unit.dtype)
            new[b] = by_unit.at[:, self.units[b]].set(drawn).reshape(x[b].shape)
        return new

    def _zeroed(self, x: Rows, factors: Iterable[Factor]) -> Blocks:
        """Return statistics of blocks, with the forest's units at 0."""
        blocks = [b for factor in factors for b in factor.blocks]
        scope = dict.fromkeys((*self.units, *blocks))
        t = self.graph.statistics(select(x, scope))
        for b, family in self.families.items():
            is_outside = jnp.asarray(self._half[b] < 0).reshape(1, *family.shape)
            t[b] = jnp.where(expand(is_outside, t[b]), t[b], 0.0)
        return t

    def _join(self, values: Mapping[str, Array]) -> Float[Array, "rows units entries"]:
        """Return values of the units of the forest, of all their entries, padded with 0."""
        size = self._states.statistics.shape[-1]
        joined = []
        for b, v in values.items():
            by_unit = v.reshape(len(v), self.families[b].size, -1)
            inside = by_unit.astype(jnp.result_type(float))[:, self.units[b]]
            padding = [(0, 0), (0, 0), (0, size - inside.shape[-1])]
            joined.append(jnp.pad(inside, padding))
        return jnp.concatenate(joined, 1)


def _half_of(depth: np.ndarray) -> np.ndarray:
    return depth // 2 % 2


def _induced(graph: FactorGraph, units: UnitsByBlock) -> Forest:
    """Return the forest that some units make, numbered block after block."""
    edges, conflicts = interactions(graph, tuple(units))
    sizes = graph.sizes(units)
    starts = np.cumsum(sizes) - sizes
    inside = np.concatenate(
        [start + u for start, u in zip(starts, units.values(), strict=True)]
    )
    try:
        if any(conflicts):
            raise ValueError("two share a factor, in which all their units interact.")
        return Forest(len(inside), induced_edges(edges, inside, sum(sizes)))
    except ValueError as error:
        raise IntractableError(
            f"units of blocks {list(units)} must make a forest: {error}"
        ) from error


def _state_table(families: Families, lengths: list[int]) -> StateTable:
    listed = []
    for block, family in families.items():
        with sharding.eager():
            states = family.states()
            if states is None:
                raise IntractableError(
                    f"block {block!r} must have finitely many values, got {family!r}."
                )
            columns = family.statistics(states).reshape(len(states), -1)
            listed.append(
                np.column_stack((states, family.log_base_measure(states), columns))
            )
    table = np.zeros((len(listed), *np.max([v.shape for v in listed], axis=0)))
    table[..., 1] = -np.inf
    for padded, values in zip(table, listed, strict=True):
        padded[: len(values), : values.shape[1]] = values
    table = table if len(listed) == 1 else np.repeat(table, lengths, axis=0)
    return StateTable(table[..., 0], table[..., 1], table[..., 2:])
