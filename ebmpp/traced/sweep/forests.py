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
from typing import Any, NamedTuple, cast

import numpy as np
from scipy import sparse

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.groups import induced_edges
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.errors import StateError
from ebmpp.moves import forests
from ebmpp.traced.block import Coupled, SiteValues
from ebmpp.traced.model import Context, DrawnSites, Inputs
from ebmpp.traced.sweep.conditionals import ChainInputs, Conditionals, Visit, Visited
from ebmpp.traced.sweep.layers import ElementsByReader, place
from ebmpp.traced.sweep.posterior import ModelDensity

_MOST_AT_ONCE = 2**16  # states of edges that are evaluated in parallel
_TOLERANCE = 1e-3  # of conditionals that are compared

#: Log weights of states of a layer's units ``(units, values)`` and edges ``(edges,
#: values, values)``.
ForestTables = tuple[Array, Array]


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
        fn: Visit,
        chains: Sequence[ChainInputs],
        carry: Any,
        backward: bool = False,
    ) -> Visited:
        return self.units.visit(fn, chains, carry, backward)

    def move(
        self, inputs: Inputs, keys: Array, beta: Any = None, backward: bool = False
    ) -> DrawnSites:
        """Draw all layers in order, each jointly; a tree without a possible state keeps its values."""
        sites, slots = self._chain(*inputs)
        rejected = jnp.zeros((), jnp.int32)
        for number in range(self.num_layers)[:: -1 if backward else 1]:
            layer = self.layers[number]
            tables = self._tables(layer, (sites, slots))
            if beta is not None:
                tables = jax.tree.map(
                    lambda a: jnp.where(jnp.isneginf(a), a, beta * a), tables
                )
            uniforms = random.uniform(
                random.words(random.fold_in(keys, number), len(layer.units))
            )
            drawn = forests.draw(layer.forest, *tables, uniforms)
            valid = _is_possible(layer, tables, drawn)
            sites = self.put(sites, layer.units, drawn, valid)
            rejected += (~valid).sum(dtype=jnp.int32)
        return sites, rejected

    def couple(self, first: Inputs, second: Inputs, keys: Array) -> Coupled:
        """Draw all layers of two chains jointly, the conditionals of each backward draw coupled maximally."""
        x, x_inputs = self._chain(*first)
        y, y_inputs = self._chain(*second)
        broken = jnp.zeros((), bool)
        for number, layer in enumerate(self.layers):
            pair = (
                self._tables(layer, (x, x_inputs)),
                self._tables(layer, (y, y_inputs)),
            )
            words = random.words(random.fold_in(keys, number), 3 * len(layer.units))
            uniforms = random.uniform(words).reshape(-1, 3)
            drawn = forests.draw_pair(
                layer.forest, *map(jnp.stack, zip(*pair, strict=True)), uniforms
            )
            valid = [
                _is_possible(layer, tables, new)
                for tables, new in zip(pair, drawn, strict=True)
            ]
            x, y = (
                self.put(z, layer.units, *c)
                for z, *c in zip((x, y), drawn, valid, strict=True)
            )
            broken |= ~jnp.stack(valid).all()
        return dict(x), dict(y), broken

    def log_sum(self, values: SiteValues, context: Context) -> Array:
        """Return the log density with the units of a single forest summed out; it has a gradient."""
        (layer,) = self.layers
        chain = self._chain(values, context)
        constant, _ = self.terms.expand(chain[1], guarded=True)
        return constant + forests.log_sum(
            layer.forest, *self._tables(layer, chain, guarded=True)
        )

    def marginals(self, values: SiteValues, context: Context) -> ForestTables:
        """Return probabilities of the values of the units of a single forest, and of the ends of edges."""
        (layer,) = self.layers
        return forests.marginals(
            layer.forest, *self._tables(layer, self._chain(values, context))
        )

    def most_probable(self, values: SiteValues, context: Context) -> dict[str, Array]:
        """Return the most probable sites of a single forest."""
        (layer,) = self.layers
        chain = self._chain(values, context)
        best, _ = forests.most_probable(layer.forest, *self._tables(layer, chain))
        return self.put(chain[0], layer.units, best, jnp.ones(best.shape, bool))

    def check_tables(self, values: SiteValues, context: Context) -> None:
        """Compare conditionals that tables imply with the ones of single units; raise a StateError."""
        numbers, conditionals, tables = self._compiled_tables(values, context)
        for layer, (unary, pairwise) in zip(self.layers, tables, strict=True):
            a, b = layer.forest.edges.T
            at = numbers[layer.units]
            edge = np.arange(len(pairwise))
            logits = (
                unary.at[a]
                .add(pairwise[edge, :, at[b]])
                .at[b]
                .add(pairwise[edge, at[a]])
            )
            pair = (
                jax.nn.log_softmax(v, -1) for v in (logits, conditionals[layer.units])
            )
            wrong = ~np.all(
                np.isclose(*pair, _TOLERANCE, _TOLERANCE, equal_nan=True), 1
            )
            both = layer.forest.edges[wrong[a] & wrong[b]]
            if wrong.any():
                kind, units = (
                    ("pairwise", both[0])
                    if len(both)
                    else ("unary", np.flatnonzero(wrong)[:1])
                )
                spans = [(site, *span) for site, span in self.spans.items()]

                def name(u):
                    return next(
                        f"{site}[{u - start}]" for site, start, end in spans if u < end
                    )

                raise StateError(
                    f"the {kind} table of "
                    f"{' and '.join(map(name, layer.units[units]))} in a joint draw "
                    "must follow from the traced log density. Draw by joint='units', "
                    "and report the model"
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
        """Return the sums of the elements that read a unit alone, and of elements that read a whole edge."""
        sites, inputs = chain
        side = jnp.asarray(layer.forest.depth % 2)
        coefficients = self.terms.expand(inputs, guarded)[1]
        # of infinite terms, whose derivative would be 0 * inf
        fixed = lax.stop_gradient(coefficients)
        numbers = jnp.arange(self.num_values)
        everywhere = jnp.ones(len(layer.units), bool)

        def sums(reads: ElementsByReader, count: int, a: Array, b: Array) -> Array:
            moved = self.put(sites, layer.units, jnp.where(side == 0, a, b), everywhere)
            at = {**inputs, **self.posterior.site_inputs(moved)}
            terms = self.terms.evaluate(at, reads.slots, guarded)
            clean = {
                i: jnp.where(jnp.isfinite(t), coefficients[i], fixed[i])
                for i, t in terms.items()
            }
            return reads.sums(self.terms.multiply(clean, terms), count)

        single = jax.vmap(lambda k: sums(layer.single, len(layer.units), k, k))(numbers)
        num_edges = len(layer.forest.edges)
        row = jax.vmap(lambda a, b: sums(layer.double, num_edges, a, b), (None, 0))
        is_small = num_edges * self.num_values**2 <= _MOST_AT_ONCE
        rows = (
            jax.vmap(row, (0, None))
            if is_small
            else lambda a, b: lax.map(lambda k: row(k, b), a)
        )
        pairs = (
            rows(numbers, numbers)
            if num_edges
            else jnp.zeros((*[self.num_values] * 2, 0))
        )
        return jnp.where(self.valid(layer.units), single.T, -jnp.inf), jnp.moveaxis(
            pairs, -1, 0
        )


def _make_layer(terms: SumOfTerms, units: np.ndarray, edges: np.ndarray) -> ForestLayer:
    """Return the layer of some units; its edges begin on the even side."""
    count = len(units)
    position = np.full(terms.sets.size, -1)
    edges = induced_edges(edges, units, terms.sets.size)
    position[units] = np.arange(count)
    depth = forests.Forest(count, edges).depth
    first, second = edges.T
    codes = first * count + second
    edges = np.where(depth[edges[:, :1]] % 2 == 0, edges, edges[:, ::-1])
    order = np.argsort(codes)
    adjacency = sparse.coo_array((np.ones(len(edges)), (first, second)), (count, count))
    _, trees = sparse.csgraph.connected_components(adjacency, directed=False)
    layer = ForestLayer(
        units,
        forests.Forest(count, edges),
        trees,
        ElementsByReader({}, {}),
        ElementsByReader({}, {}),
    )
    for slot, mask in terms.live.items():
        element, unit = terms.elements(slot)
        inside = position[unit] >= 0
        element = element[inside]
        unit = position[unit[inside]]
        alone = np.bincount(element, minlength=1)[element] == 1
        place(
            slot,
            mask.size,
            [layer.single],
            [count],
            [(element[alone], unit[alone])],
            False,
        )
        first, second = unit[~alone].reshape(-1, 2).T
        edge = order[np.searchsorted(codes, first * count + second, sorter=order)]
        place(
            slot,
            mask.size,
            [layer.double],
            [len(edges)],
            [(element[~alone][::2], edge)],
            False,
        )
    return layer


def _is_possible(layer: ForestLayer, tables: ForestTables, drawn: Array) -> Array:
    """Return a mask of the units in trees that have a possible state, which was drawn."""
    unary, pairwise = tables
    a, b = layer.forest.edges.T

    def is_wrong(at, table):
        return ~jnp.isfinite(at) | ~(table < jnp.inf).all(-1)

    wrong = is_wrong(jnp.take_along_axis(unary, drawn[:, None], 1)[:, 0], unary)
    by_edge = pairwise.reshape(len(a), unary.shape[1] ** 2)
    wrong = wrong.at[a].max(
        is_wrong(pairwise[np.arange(len(a)), drawn[a], drawn[b]], by_edge)
    )
    return ~jnp.zeros(len(wrong), bool).at[layer.trees].max(wrong)[layer.trees]
