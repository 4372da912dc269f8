# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Tables of log weights of a forest of units given all others, from the energy of the graph.

With the statistics of its units at 0, natural parameters give the weights of units, and
mixed derivatives the weights of pairs. The units above and below a unit differ in their
half, depth // 2 modulo 2, so two products of the Hessian per statistic give the
derivatives between all units and the ones above them.
"""

from collections.abc import Iterable, Mapping
import functools

from jaxtyping import Float, Int32
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import sharding
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Blocks, UnitMasks, Params, Rows
from ebmpp.errors import IntractableError
from ebmpp.families import Family
from ebmpp.graph import Factor, FactorGraph, energy
from ebmpp.graph.factors.lateral import Local, Split
from ebmpp.moves.forests.layers import UnitsByBlock, interactions
from ebmpp.moves.forests.structure import Forest


class ForestTables:
    """Units of a graph that make a forest, numbered block after block, and their log weights."""

    def __init__(self, graph: FactorGraph, units: UnitsByBlock) -> None:
        self.graph = graph
        self.units = units
        self.families = {b: graph.families[b] for b in units}

        def inside(f):
            return [b for b in (*f.blocks, *(b for b, _ in f.lateral)) if b in units]

        #: factors over the blocks, and those in which several units of the forest may
        #: interact
        self._factors = [f for f in graph.factors if inside(f)]
        self._inner_factors = [f for f in graph.factors if len(inside(f)) > 1]
        self.forest = _induced(graph, units)
        lengths = [len(u) for u in units.values()]
        #: places of each block's units in the forest
        ends = np.cumsum([0, *lengths])
        self.places = {b: slice(*ends[i : i + 2]) for i, b in enumerate(units)}
        #: half of each unit of a block, -1 outside of the forest
        self._half = {b: np.full(f.size, -1) for b, f in self.families.items()}
        for b, place in self.places.items():
            self._half[b][units[b]] = self.forest.depth[place] // 2 % 2
        #: value, log base measure and statistics of the states of each unit; of all if
        #: there is one block
        self._values, self._log_base, self._statistics = _state_tables(
            self.families, lengths
        )

    @functools.cached_property
    def complete(self) -> frozenset[str]:
        """Blocks all of whose units are in the forest."""
        return frozenset(b for b, h in self._half.items() if (h >= 0).all())

    @functools.cached_property
    def _fast(self) -> tuple[tuple[Factor, Split, Local], ...]:
        """Factors with a fast path to natural parameters of part 0, a block's units in the forest."""
        splits = {
            b: Split(b, f, (self._half[b] < 0).astype(np.int64))
            for b, f in self.families.items()
        }
        pairs = (
            (f, splits[b]) for f in self._factors for b, _ in f.lateral if b in splits
        )
        fast = ((f, s, f.local({s.block: s.family}, s)) for f, s in pairs)
        return tuple((f, s, local) for f, s, local in fast if local is not None)

    def weights(self, params: Params, x: Rows, keep: UnitMasks) -> tuple[Array, Array]:
        """Return unary log weights ``(rows, units, states)`` and pairwise ones, ``(edges, states, states)``.

        An observed unit is allowed its value only. Pairwise weights have rows if other
        units change them.
        """

        def is_constant(factor):
            return factor.is_pairwise or self.complete >= set(factor.blocks)

        t = self._zeroed(x, self._inner_factors)
        if all(map(is_constant, self._inner_factors)):
            return self._unary(params, x, keep), self._mixed(
                params, {b: v[0] for b, v in t.items()}
            )
        return self._unary(params, x, keep), jax.vmap(lambda t: self._mixed(params, t))(
            t
        )

    def _unary(
        self, params: Params, x: Rows, keep: UnitMasks
    ) -> Float[Array, "rows units states"]:
        t = self._zeroed(x, self._factors)
        fast = {f.name for f, *_ in self._fast}
        rest = [f for f in self._factors if f.name not in fast]
        eta = self._join(
            jax.vmap(
                lambda t: energy.contributed(self.graph, rest, params, t, self.units)
            )(t)
        )
        for factor, split, local in self._fast:
            by_unit = energy.to_units(t[split.block], split.family)
            field = local.field(
                local.prepare(params[factor.name]), by_unit.__getitem__, 0
            )
            field = jnp.moveaxis(field, 0, 1).reshape(len(eta), len(field), -1)
            eta = eta.at[:, self.places[split.block], : field.shape[-1]].add(field)
        logs = (eta[:, :, None] * self._statistics[None]).sum(-1) + self._log_base[None]
        if self.units.keys().isdisjoint(keep):
            return logs
        held = {b: jnp.broadcast_to(keep.get(b, False), x[b].shape) for b in self.units}
        is_held = self._join(held)[..., :1]
        value = self._join({b: x[b] for b in self.units})[..., :1]
        return jnp.where((is_held > 0) & (value != self._values[None]), -jnp.inf, logs)

    @full_precision
    def _mixed(self, params: Params, t: Blocks) -> Float[Array, "edges states states"]:
        def slope(v):
            return energy.contributed(
                self.graph, self._inner_factors, params, t | v, self.units
            )

        point = {b: t[b] for b in self.units}

        def product(half: Array, entry: Array) -> Array:
            """Return the derivatives in one statistic of the units of a half."""

            def one_hot(b):
                return jnp.arange(point[b].size // len(self._half[b])) == entry

            mask = {
                b: (h == half)[:, None] & one_hot(b)[None]
                for b, h in self._half.items()
            }
            tangent = {
                b: v.reshape(point[b].shape).astype(point[b].dtype)
                for b, v in mask.items()
            }
            return self._join(
                {b: v[None] for b, v in jax.jvp(slope, (point,), (tangent,))[1].items()}
            )[0]

        entries = jnp.arange(self._statistics.shape[-1])
        hessian = jax.vmap(jax.vmap(product, (None, 0)), (0, None))(
            jnp.arange(2), entries
        )
        a, b = self.forest.edges.T
        depth = self.forest.depth
        upper, lower = np.where(depth[a] < depth[b], (a, b), (b, a))
        # (edges, upper statistics, lower statistics)
        mixed = hessian[depth[upper] // 2 % 2, :, lower]
        mixed = jnp.where((upper == a)[:, None, None], mixed, jnp.swapaxes(mixed, 1, 2))
        table = jnp.asarray(self._statistics)

        def at(units):
            return table if len(table) == 1 else table[units]

        return at(a) @ mixed @ at(b).swapaxes(1, 2)

    def put(self, x: Rows, states: Int32[Array, "rows units"]) -> Blocks:
        """Return the blocks with the units of the forest in ``states``."""
        values = jnp.take_along_axis(self._values[None], states[..., None], -1)[..., 0]
        new = {}
        for b, place in self.places.items():
            flat = (
                x[b]
                .reshape(len(x[b]), -1)
                .at[:, self.units[b]]
                .set(values[:, place].astype(x[b].dtype))
            )
            new[b] = flat.reshape(x[b].shape)
        return new

    def _zeroed(self, x: Rows, factors: Iterable[Factor]) -> Blocks:
        """Return statistics of the blocks of some factors and of the forest, whose units are at 0."""
        scope = dict.fromkeys((*self.units, *(b for f in factors for b in f.blocks)))
        t = self.graph.statistics({b: x[b] for b in scope})
        for b, family in self.families.items():
            outside = (self._half[b] < 0).reshape(
                1, *family.shape, *(1,) * len(family.stat_shape)
            )
            t[b] = jnp.where(outside, t[b], 0.0)
        return t

    def _join(self, values: Mapping[str, Array]) -> Float[Array, "rows units entries"]:
        """Return values of the units of the forest, of all their entries, padded with 0."""
        size = self._statistics.shape[-1]
        floats = jnp.result_type(float)
        by_unit = {
            b: v.reshape(len(v), self.families[b].size, -1).astype(floats)
            for b, v in values.items()
        }

        def pad(v):
            return jnp.pad(v, [(0, 0), (0, 0), (0, size - v.shape[-1])])

        return jnp.concatenate(
            [pad(v[:, self.units[b]]) for b, v in by_unit.items()], 1
        )


def _induced(graph: FactorGraph, units: UnitsByBlock) -> Forest:
    """Return the forest that some units make, numbered block after block."""
    edges, dense = interactions(graph, tuple(units))
    starts = np.cumsum([0, *(graph.families[b].size for b in units)])
    inside = np.concatenate(
        [start + u for start, u in zip(starts, units.values(), strict=False)]
    )
    try:
        if dense:
            raise ValueError("two share a factor, in which all their units interact.")
        return Forest(len(inside), induced_edges(edges, inside, starts[-1]))
    except ValueError as error:
        raise IntractableError(
            f"units of blocks {list(units)} must make a forest: {error}"
        ) from error


def _state_tables(
    families: Mapping[str, Family], lengths: list[int]
) -> tuple[np.ndarray, ...]:
    """Return values, log base measures and statistics of the states of units, padded."""
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
    return table[..., 0], table[..., 1], table[..., 2:]
