# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Discrete units drawn jointly, by layers that are induced forests of the units that interact.

The log density is a sum of elements, and within a forest each of them reads one unit or
the two ends of an edge. The two sides of a forest, units at even and odd depth, take
their values a and b all at once, so K^2 evaluations of the terms give the tables of all
edges, whatever their number, and K the tables of all units. Tables are sums of
elements, never differences of log densities, so impossible states remain -inf.

**References**

1. Hamze, de Freitas (2004), *From fields to trees*.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple, cast

import numpy as np
from scipy import sparse

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.groups import induced_edges
from ebmpp.core.types import SiteArrays
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.errors import StateError
from ebmpp.moves import forests
from ebmpp.traced.block import Coupled, SiteValues
from ebmpp.traced.model import Context, DrawnSites, Inputs
from ebmpp.traced.sweep.conditionals import (
    C,
    ChainInputs,
    Conditionals,
    Visit,
    Visited,
    tempered,
)
from ebmpp.traced.sweep.layers import ElementsByReader, place
from ebmpp.traced.sweep.posterior import ModelDensity

_MOST_AT_ONCE = 2**16  # states of edges that are evaluated in parallel
_TOLERANCE = 1e-3  # of conditionals that are compared


class ForestTables(NamedTuple):
    """Log weights of the states of a layer."""

    unary: Array
    """Of the units, ``(units, values)``."""
    pairwise: Array
    """Of the edges, ``(edges, values, values)``."""


class ForestLayer(NamedTuple):
    """Units that form a forest, and the elements that read them."""

    units: np.ndarray
    forest: forests.Forest
    trees: np.ndarray
    """The tree of each unit."""
    single: ElementsByReader
    double: ElementsByReader


class ForestLayers(Conditionals):
    """Joint draws of layers of units, and sums over all states of a single one.

    :param posterior: the log density.
    :param terms: its terms, without products in the tail.
    :param colors: the layer of each unit.
    :param units: the conditionals of single units.
    """

    def __init__(
        self,
        posterior: ModelDensity,
        terms: SumOfTerms,
        colors: np.ndarray,
        units: Conditionals,
    ) -> None:
        super().__init__(posterior, colors)
        self.terms = terms
        self.units = units
        edges = cast(np.ndarray, terms.edges)
        self._compiled_tables = jax.jit(self._all_tables)
        self.layers = [
            _make_layer(terms, np.flatnonzero(colors == c), edges)
            for c in range(self.num_layers)
        ]

    def visit(
        self,
        fn: Visit[C],
        chains: Sequence[ChainInputs],
        carry: C,
        backward: bool = False,
    ) -> Visited[C]:
        return self.units.visit(fn, chains, carry, backward)

    def move(
        self,
        inputs: Inputs,
        keys: Array,
        beta: Array | None = None,
        backward: bool = False,
    ) -> DrawnSites:
        """Draw each layer jointly; a tree without a possible state keeps its values."""
        sites, slots = self._chain(*inputs)
        rejected = jnp.zeros((), jnp.int32)
        numbers = range(self.num_layers)
        for number in reversed(numbers) if backward else numbers:
            layer = self.layers[number]
            tables = self._tables(layer, (sites, slots))
            tables = ForestTables(*(tempered(table, beta) for table in tables))
            words = random.words(random.fold_in(keys, number), len(layer.units))
            drawn = forests.draw(layer.forest, *tables, random.uniform(words))
            valid = _is_possible(layer, tables, drawn)
            sites = self.put(sites, layer.units, drawn, valid)
            rejected += (~valid).sum(dtype=jnp.int32)
        return sites, rejected

    def couple(self, first: Inputs, second: Inputs, keys: Array) -> Coupled:
        """Draw each layer of two chains, the conditionals of backward draws coupled maximally."""
        x, x_inputs = self._chain(*first)
        y, y_inputs = self._chain(*second)
        broken = jnp.zeros((), bool)
        for number, layer in enumerate(self.layers):
            p = self._tables(layer, (x, x_inputs))
            q = self._tables(layer, (y, y_inputs))
            both = map(jnp.stack, zip(p, q, strict=True))
            words = random.words(random.fold_in(keys, number), 3 * len(layer.units))
            uniforms = random.uniform(words).reshape(-1, 3)
            new_x, new_y = forests.draw_pair(layer.forest, *both, uniforms)
            valid_x = _is_possible(layer, p, new_x)
            valid_y = _is_possible(layer, q, new_y)
            x = self.put(x, layer.units, new_x, valid_x)
            y = self.put(y, layer.units, new_y, valid_y)
            broken |= ~(valid_x & valid_y).all()
        return dict(x), dict(y), broken

    def log_sum(self, values: SiteValues, context: Context) -> Array:
        """Return the log density with the units of a single forest summed out."""
        (layer,) = self.layers
        chain = self._chain(values, context)
        constant, _ = self.terms.expand(chain[1], guarded=True)
        tables = self._tables(layer, chain, guarded=True)
        return constant + forests.log_sum(layer.forest, *tables)

    def marginals(self, values: SiteValues, context: Context) -> tuple[Array, Array]:
        """Return probabilities of the units of a single forest, and of the ends of edges."""
        (layer,) = self.layers
        tables = self._tables(layer, self._chain(values, context))
        return forests.marginals(layer.forest, *tables)

    def most_probable(self, values: SiteValues, context: Context) -> SiteArrays:
        """Return the most probable sites of a single forest."""
        (layer,) = self.layers
        chain = self._chain(values, context)
        tables = self._tables(layer, chain)
        best, _ = forests.most_probable(layer.forest, *tables)
        everywhere = jnp.ones(best.shape, bool)
        return self.put(chain[0], layer.units, best, everywhere)

    def check_tables(self, values: SiteValues, context: Context) -> None:
        """Raise a StateError if tables imply other conditionals than the ones of units."""
        numbers, conditionals, tables = self._compiled_tables(values, context)
        for layer, (unary, pairwise) in zip(self.layers, tables, strict=True):
            a, b = layer.forest.edges.T
            present = numbers[layer.units]
            edge = np.arange(len(pairwise))
            given_b = pairwise[edge, :, present[b]]
            given_a = pairwise[edge, present[a]]
            implied = jax.nn.log_softmax(
                unary.at[a].add(given_b).at[b].add(given_a), -1
            )
            expected = jax.nn.log_softmax(conditionals[layer.units], -1)
            is_close = np.isclose(
                implied, expected, _TOLERANCE, _TOLERANCE, equal_nan=True
            )
            wrong = ~np.all(is_close, 1)
            if not wrong.any():
                continue
            both = layer.forest.edges[wrong[a] & wrong[b]]
            kind = "pairwise" if len(both) else "unary"
            units = both[0] if len(both) else np.flatnonzero(wrong)[:1]
            names = " and ".join(map(self._unit_name, layer.units[units]))
            raise StateError(
                f"the {kind} table of {names} in a joint draw must follow from the "
                "traced log density. Draw by joint='units', and report the model"
            )

    def _unit_name(self, unit: int) -> str:
        spans = self.spans.items()
        return next(
            f"{name}[{unit - start}]" for name, (start, stop) in spans if unit < stop
        )

    def _all_tables(
        self, values: SiteValues, context: Context
    ) -> tuple[Array, Array, list[ForestTables]]:
        chain = self._chain(values, context)
        tables = [self._tables(layer, chain) for layer in self.layers]
        return self.numbers(values), self.table(values, context), tables

    def _tables(
        self, layer: ForestLayer, chain: ChainInputs, guarded: bool = False
    ) -> ForestTables:
        """Return sums of elements that read one unit, and of elements that read an edge."""
        sites, inputs = chain
        side = jnp.asarray(layer.forest.depth % 2)
        _, coefficients = self.terms.expand(inputs, guarded)
        # of infinite terms, whose derivative would be 0 * inf
        fixed = lax.stop_gradient(coefficients)
        everywhere = jnp.ones(len(layer.units), bool)

        def sums(reads: ElementsByReader, count: int, even: Array, odd: Array) -> Array:
            """Return sums with the units of each side at the values of these numbers."""
            numbers = jnp.where(side == 0, even, odd)
            moved = self.put(sites, layer.units, numbers, everywhere)
            at = {**inputs, **self.posterior.site_inputs(moved)}
            terms = self.terms.evaluate(at, reads.slots, guarded)
            clean = {
                slot: jnp.where(jnp.isfinite(term), coefficients[slot], fixed[slot])
                for slot, term in terms.items()
            }
            return reads.sums(self.terms.multiply(clean, terms), count)

        def row(even):
            sums_at = functools.partial(sums, layer.double, num_edges, even)
            return jax.vmap(sums_at)(numbers)

        numbers = jnp.arange(self.num_values)
        num_units = len(layer.units)
        single = jax.vmap(lambda k: sums(layer.single, num_units, k, k))(numbers)
        unary = jnp.where(self.valid(layer.units), single.T, -jnp.inf)
        num_edges = len(layer.forest.edges)
        if not num_edges:
            return ForestTables(unary, jnp.zeros((0, self.num_values, self.num_values)))
        is_small = num_edges * self.num_values**2 <= _MOST_AT_ONCE
        pairs = jax.vmap(row)(numbers) if is_small else lax.map(row, numbers)
        return ForestTables(unary, jnp.moveaxis(pairs, -1, 0))


def _make_layer(terms: SumOfTerms, units: np.ndarray, edges: np.ndarray) -> ForestLayer:
    """Return the layer of some units; its edges begin on the even side."""
    count = len(units)
    position = np.full(terms.sets.size, -1)
    position[units] = np.arange(count)
    edges = induced_edges(edges, units, terms.sets.size)
    first, second = edges.T
    codes = first * count + second
    order = np.argsort(codes)
    begins_even = forests.Forest(count, edges).depth[first] % 2 == 0
    edges = np.where(begins_even[:, None], edges, edges[:, ::-1])
    ones = np.ones(len(edges))
    adjacency = sparse.coo_array((ones, (first, second)), (count, count))
    _, trees = sparse.csgraph.connected_components(adjacency, directed=False)
    single = ElementsByReader({}, {})
    double = ElementsByReader({}, {})
    for slot, mask in terms.live.items():
        element, unit = terms.elements(slot)
        inside = position[unit] >= 0
        element = element[inside]
        unit = position[unit[inside]]
        alone = np.bincount(element, minlength=1)[element] == 1
        pairs = element[alone], unit[alone]
        place(slot, mask.size, [single], [count], [pairs])
        first, second = unit[~alone].reshape(-1, 2).T
        edge = order[np.searchsorted(codes, first * count + second, sorter=order)]
        pairs = element[~alone][::2], edge
        place(slot, mask.size, [double], [len(edges)], [pairs])
    return ForestLayer(units, forests.Forest(count, edges), trees, single, double)


def _is_possible(layer: ForestLayer, tables: ForestTables, drawn: Array) -> Array:
    """Return a mask of the units in trees that have a possible state, which was drawn."""
    unary, pairwise = tables
    a, b = layer.forest.edges.T

    def is_wrong(at, table):
        return ~jnp.isfinite(at) | ~(table < jnp.inf).all(-1)

    at_units = jnp.take_along_axis(unary, drawn[:, None], 1)[:, 0]
    at_edges = pairwise[np.arange(len(a)), drawn[a], drawn[b]]
    states = pairwise.reshape(len(a), unary.shape[1] ** 2)
    wrong = is_wrong(at_units, unary)
    wrong = wrong.at[a].max(is_wrong(at_edges, states))
    blank = jnp.zeros(len(wrong), bool)
    is_wrong_tree = blank.at[layer.trees].max(wrong)
    return ~is_wrong_tree[layer.trees]
