# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditionals of all units of a layer at once, from as many evaluations as a unit has values.

A layer holds units that do not interact, so all of them are set to their k-th value in one evaluation of the
model's terms. The conditional of a unit follows from the sum of the elements that read it
(:mod:`ebmpp.traced.dependence.terms`).
"""

from collections.abc import Mapping, Sequence
import copy
import dataclasses
import math
from typing import Any, cast

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.traced.block import Sites
from ebmpp.traced.dependence import Terms
from ebmpp.traced.sweep.conditionals import MOST_COLUMNS, Chain, Conditionals, Visit
from ebmpp.traced.sweep.posterior import Posterior

_MOST_UNROLLED = 4  # layers that are compiled separately; more share one program, padded to the largest
_MOST_PADDING = 4  # padded entries of a table per entry in use


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Units that do not interact, and the elements that read them.

    Arrays are of one layer; or of all of them, padded equally and stacked, for a scan.
    """

    number: Any
    units: Any
    """Numbers of the units; padded by the number of all units."""
    tables: dict[int, Any]
    """By term, its elements that read each unit, ``(units, most)``; padded by the term's size."""
    ragged: dict[int, tuple[Any, Any]]
    """By term of which few units read many elements: elements, and positions among ``units``."""


jax.tree_util.register_dataclass(_Layer, ["number", "units", "tables", "ragged"], [])


class Layers(Conditionals):
    """Conditionals of units in layers, from the terms of the log density.

    :param posterior: the log density.
    :param terms: its terms.
    :param colors: the layer of each unit.
    """

    def __init__(self, posterior: Posterior, terms: Terms, colors: np.ndarray) -> None:
        super().__init__(posterior, colors)
        self.terms, self._layers = terms, self._make_layers(terms)

    def relaxed(self) -> "Layers":
        """Return the conditionals as :meth:`Conditionals.relaxed` does."""
        result = cast(Layers, super().relaxed())
        result.terms = copy.copy(self.terms)
        result.terms.program = result.posterior.program
        return result

    def _make_layers(self, terms: Terms) -> list[_Layer]:
        """Return the layers, or all of them stacked where there are many."""
        units, stacked = _by_color(self.colors, self.num_layers), self.num_layers > _MOST_UNROLLED
        most = max(map(len, units)) if stacked else 0
        pad = lambda u: np.pad(u, (0, max(0, most - len(u))), constant_values=self.size)
        layers = [_Layer(np.int32(i), _narrow(pad(u)), {}, {}) for i, u in enumerate(units)]
        position = np.zeros(self.size, np.int64)  # of a unit in its layer
        for members in units:
            position[members] = np.arange(len(members))
        for slot, mask in terms.live.items():
            element, unit = terms.elements(slot)
            parts = _by_color(self.colors[unit], self.num_layers)
            _place(slot, mask.size, layers, [(element[p], position[unit[p]]) for p in parts], stacked)
        return [jax.tree.map(lambda *a: np.stack(a), *layers)] if stacked else layers

    def visit(
        self, fn: Visit, chains: Sequence[Chain], carry: Any, backward: bool = False
    ) -> tuple[list[dict[str, Array]], Any]:
        """Visit all layers; see :meth:`Conditionals.visit`."""
        inputs = [chain[1] for chain in chains]

        def at_layer(state: tuple, layer: _Layer) -> tuple[tuple, None]:
            sites, carry = state
            logits = [self._logits(layer, *chain) for chain in zip(sites, inputs, strict=True)]
            picked, carry = fn(layer.number, layer.units, logits, carry)
            return ([self._put(layer, x, *c) for x, c in zip(sites, picked, strict=True)], carry), None

        state: tuple = [dict(sites) for sites, _ in chains], carry
        if self.num_layers > _MOST_UNROLLED:
            return lax.scan(at_layer, state, self._layers[0], reverse=backward)[0]
        for layer in reversed(self._layers) if backward else self._layers:
            state, _ = at_layer(state, layer)
        return state

    def _logits(self, layer: _Layer, sites: Sites, inputs: Mapping[int, Any]) -> Array:
        """Return log probabilities of a layer's units, each up to a constant, ``(units, values)``."""
        coefficients = self.terms.coefficients({**inputs, **self.posterior.site_inputs(sites)})
        sums_at = lambda k: self._sums_at(k, layer, (sites, inputs), coefficients)
        logits = jax.vmap(sums_at)(jnp.arange(self.num_values))
        return jnp.where(self._valid(layer), logits.T, -jnp.inf)

    def _sums_at(self, k: Array, layer: _Layer, chain: Chain, coefficients: Mapping[int, Array]) -> Array:
        """Return the part of the log density of each of a layer's units, all at their k-th value."""
        sites, inputs = chain
        moved = {}
        for name, (start, stop) in self.spans.items():
            mask = (self.colors[start:stop] == layer.number).reshape(self.posterior.shapes[name])
            table = jnp.asarray(self.posterior.values[name].table, sites[name].dtype)
            at = table[jnp.minimum(k, len(table) - 1)]
            is_whole = isinstance(mask, np.ndarray) and mask.all()
            moved[name] = jnp.broadcast_to(at, mask.shape) if is_whole else jnp.where(mask, at, sites[name])
        values = {**inputs, **self.posterior.site_inputs(moved)}
        terms = self.terms.multiply(coefficients, self.terms.evaluate(values, [*layer.tables, *layer.ragged]))
        total = jnp.zeros(layer.units.shape)
        for slot, table in layer.tables.items():
            total = total + _sum_at(terms[slot].ravel(), table)
        for slot, (elements, positions) in layer.ragged.items():
            picked = terms[slot].ravel().at[elements].get(mode="fill", fill_value=0)
            total = total.at[positions].add(picked, mode="drop")
        return total

    def _valid(self, layer: _Layer) -> Any:
        """Return a mask of the values that the layer's units can take, ``(units or 1, values)``."""
        masks = {name: self.posterior.values[name].valid for name in self.spans}
        if all(len(v) == self.num_values and v.all() for v in masks.values()):
            return np.ones((1, self.num_values), bool)
        by_unit = lambda v, shape: np.broadcast_to(v, (len(v), *shape)).reshape(len(v), -1).T
        rows = [by_unit(v, self.posterior.shapes[name]) for name, v in masks.items()]
        rows = [np.pad(row, ((0, 0), (0, self.num_values - row.shape[1]))) for row in rows]
        rows.append(np.ones((1, self.num_values), bool))  # of the padding of a layer
        return jnp.asarray(np.concatenate(rows))[layer.units]

    def _put(self, layer: _Layer, sites: Sites, numbers: Array, accepted: Array) -> dict[str, Array]:
        """Return the sites with the values of a layer, by number, where accepted."""
        is_all = isinstance(layer.units, np.ndarray) and np.array_equal(layer.units, np.arange(self.size))
        spread = lambda a: a if is_all else jnp.zeros(self.size, a.dtype).at[layer.units].set(a, mode="drop")
        spread_numbers, mask, result = spread(numbers), spread(accepted), {}
        for name, (start, stop) in self.spans.items():
            shape = self.posterior.shapes[name]
            table = jnp.asarray(self.posterior.values[name].table, sites[name].dtype)
            index = spread_numbers[start:stop].reshape(shape)
            is_shared = math.prod(table.shape[1:]) == 1
            value = table.ravel()[index] if is_shared else jnp.take_along_axis(table, index[None], 0)[0]
            result[name] = jnp.where(mask[start:stop].reshape(shape), value, sites[name])
        return result


def _narrow(a: np.ndarray) -> np.ndarray:
    return np.asarray(a, np.int32)


def _by_color(colors: np.ndarray, count: int) -> list[np.ndarray]:
    """Return the positions of each color, in order."""
    order = np.argsort(colors, kind="stable")
    return np.split(order, np.cumsum(np.bincount(colors, minlength=count))[:-1])


def _place(slot: int, padding: int, layers: list[_Layer], reads: list[tuple], stacked: bool) -> None:
    """Record the elements of a term that layers read: as a table, or as a list where that is smaller.

    :param reads: by layer, elements and the positions of the units that read them.
    :param stacked: True if all layers must have the same sizes.
    """
    counts = [int(np.bincount(positions).max(initial=0)) for _, positions in reads]
    width = max(len(elements) for elements, _ in reads)
    total, most = sum(len(elements) for elements, _ in reads), max(counts)
    units = sum(len(layer.units) for layer in layers)
    ragged = most * units > _MOST_PADDING * total + units
    for layer, (elements, positions), count in zip(layers, reads, counts, strict=True):
        if not stacked and not len(elements):
            continue
        if not ragged:
            columns = most if stacked else count
            layer.tables[slot] = _table(elements, positions, len(layer.units), columns, padding)
            continue
        spare = (0, width - len(elements) if stacked else 0)
        fill = lambda a, value, spare=spare: _narrow(np.pad(a, spare, constant_values=value))
        layer.ragged[slot] = fill(elements, padding), fill(positions, len(layer.units))


def _table(elements: np.ndarray, positions: np.ndarray, count: int, most: int, padding: int) -> np.ndarray:
    """Return elements as a table with one padded row per position."""
    order = np.argsort(positions, kind="stable")
    elements, positions = elements[order], positions[order]
    counts = np.bincount(positions, minlength=count)
    column = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((count, most), padding, np.int32)
    table[positions, column] = elements
    return table


def _sum_at(values: Array, table: Any) -> Array:
    """Return the sums of the values at each row of a table."""
    is_all = isinstance(table, np.ndarray) and np.array_equal(table.ravel(), np.arange(len(values)))
    if table.shape[1] > MOST_COLUMNS:
        picked = values.reshape(table.shape) if is_all else values.at[table].get(mode="fill", fill_value=0)
        return picked.sum(1)
    # column by column: XLA on CPU sums a short last axis twenty times slower
    column = lambda j: values.reshape(table.shape)[:, j]
    pick = lambda j: values.at[table[:, j]].get(mode="fill", fill_value=0)
    return sum(((column if is_all else pick)(j) for j in range(table.shape[1])), jnp.zeros(()))
