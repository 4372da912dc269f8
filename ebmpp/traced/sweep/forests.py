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

import functools
from typing import NamedTuple, cast

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import SiteArrays, induced_edges, positions_by_group, random
from ebmpp.dependence.program import SlotValues
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.errors import StateError
from ebmpp.moves import forests
from ebmpp.traced.block import SiteValues
from ebmpp.traced.model import Inputs
from ebmpp.traced.sweep.conditionals import Choice, Conditionals
from ebmpp.traced.sweep.layers import ElementsByReader, Layered, place
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

    number: int
    units: np.ndarray
    forest: forests.Forest
    single: ElementsByReader
    double: ElementsByReader


class ForestLayers(Layered):
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
        super().__init__(posterior, terms, colors)
        self.units = units
        self._compiled_tables = jax.jit(self._all_tables)

    def make_layers(self, terms: SumOfTerms) -> list[ForestLayer]:
        groups = positions_by_group(self.colors, self.num_layers)
        return [_make_layer(terms, *layer) for layer in enumerate(groups)]

    def draw_layer(self, number: int, logits: ForestTables, keys: Array) -> Choice:
        """Draw a layer jointly; a tree without a possible state keeps its values."""
        layer = self.layers[number]
        uniforms = random.uniforms(keys, len(layer.units))
        drawn = forests.draw(layer.forest, *logits, uniforms)
        return drawn, _is_possible(layer, logits, drawn)

    def couple_layer(
        self,
        number: int,
        p: ForestTables,
        q: ForestTables,
        words: Array,
    ) -> list[Choice]:
        """Draw a layer of two chains, the conditionals of backward draws coupled maximally."""
        layer = self.layers[number]
        both = map(jnp.stack, zip(p, q))
        drawn = forests.draw_pair(layer.forest, *both, random.uniform(words))
        return [
            (new, _is_possible(layer, tables, new))
            for tables, new in zip((p, q), drawn)
        ]

    def _single(
        self, inputs: Inputs, guarded: bool = False
    ) -> tuple[forests.Forest, Array, Array]:
        """Return the only forest, and its tables."""
        (layer,) = self.layers
        tables = self.log_weights(layer, *self._chain(inputs), guarded)
        return layer.forest, *tables

    def log_sum(self, inputs: Inputs) -> Array:
        """Return the log density with the units of a single forest summed out."""
        return self.constant(inputs) + forests.log_sum(*self._single(inputs, True))

    def constant(self, inputs: Inputs) -> Array:
        """Return the part of the log density that depends on no unit."""
        return self.terms.expand(self.posterior.inputs(inputs), guarded=True)[0]

    def log_sums_by_tree(self, inputs: Inputs) -> Array:
        """Return log sums of the trees of a single forest, without :meth:`constant`."""
        return forests.log_sums_by_tree(*self._single(inputs, True))

    def marginals(self, inputs: Inputs) -> tuple[Array, Array]:
        """Return probabilities of the units of a single forest, and of the ends of edges."""
        return forests.marginals(*self._single(inputs))

    def most_probable(self, inputs: Inputs) -> SiteArrays:
        """Return the most probable sites of a single forest."""
        best, _ = forests.most_probable(*self._single(inputs))
        sites, _ = self._chain(inputs)
        everywhere = jnp.ones(best.shape, bool)
        return self.put(sites, np.arange(self.size), best, everywhere)

    def check_tables(self, inputs: Inputs) -> None:
        """Raise a StateError if tables imply other conditionals than the ones of units."""
        numbers, conditionals, tables = self._compiled_tables(inputs)
        for layer, (unary, pairwise) in zip(self.layers, tables):
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

    def _all_tables(self, inputs: Inputs) -> tuple[Array, Array, list[ForestTables]]:
        chain = self._chain(inputs)
        tables = [self.log_weights(layer, *chain) for layer in self.layers]
        return self.numbers(inputs[0]), self.table(inputs), tables

    def log_weights(
        self,
        layer: ForestLayer,
        sites: SiteValues,
        inputs: SlotValues,
        guarded: bool = False,
    ) -> ForestTables:
        """Return sums of elements that read one unit, and of elements that read an edge."""
        side = jnp.asarray(layer.forest.depth % 2)
        _, coefficients = self.terms.expand(inputs, guarded)
        # of infinite terms, whose derivative would be 0 * inf
        fixed = lax.stop_gradient(coefficients)
        everywhere = jnp.ones(len(layer.units), bool)

        def sums(reads, count, even, odd):
            """Return sums with the units of each side at the values of these numbers."""
            numbers = jnp.where(side == 0, even, odd)
            moved = self.put(sites, layer.units, numbers, everywhere)
            at = self.posterior.inputs_at(moved, inputs)
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


def _make_layer(terms: SumOfTerms, number: int, units: np.ndarray) -> ForestLayer:
    """Return the layer of some units; its edges begin on the even side."""
    count = len(units)
    position = np.full(terms.sets.size, -1)
    position[units] = np.arange(count)
    edges = cast(np.ndarray, terms.edges)
    edges = induced_edges(edges, units, terms.sets.size)
    first, second = edges.T
    codes = first * count + second  # in order, as the edges are
    begins_even = forests.Forest(count, edges).depth[first] % 2 == 0
    edges = np.where(begins_even[:, None], edges, edges[:, ::-1])
    single = ElementsByReader({}, {})
    double = ElementsByReader({}, {})
    for slot, mask in terms.live.items():
        element, unit = terms.elements(slot)
        inside = position[unit] >= 0
        element = element[inside]
        unit = position[unit[inside]]
        alone = np.bincount(element)[element] == 1
        pairs = element[alone], unit[alone]
        place(slot, mask.size, [single], [count], [pairs])
        first, second = unit[~alone].reshape(-1, 2).T
        edge = np.searchsorted(codes, first * count + second)
        pairs = element[~alone][::2], edge
        place(slot, mask.size, [double], [len(edges)], [pairs])
    forest = forests.Forest(count, edges)
    return ForestLayer(number, units, forest, single, double)


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
    is_wrong_tree = blank.at[layer.forest.trees].max(wrong)
    return ~is_wrong_tree[layer.forest.trees]
