# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditionals of all units of a layer at once, from as many evaluations as a unit has values.

A layer holds units that do not interact, so all of them are set to their k-th value in
one evaluation of the model's terms. The conditional of a unit follows from the sum of
the elements that read it (:mod:`ebmpp.dependence.terms`). Forests have such sums
for pairs of units as well.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import Numbers, positions_by_group, ranks_in_groups
from ebmpp.dependence.program import SlotValues
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.traced.block import SiteValues
from ebmpp.traced.sweep.conditionals import (
    MOST_COLUMNS,
    ChainInputs,
    Conditionals,
    Visit,
    Visited,
    is_range,
)
from ebmpp.traced.sweep.posterior import ModelDensity

_MOST_PADDING = 4  # padded entries of a table per entry in use
# layers that are compiled separately; more share one program, padded to the largest
_MOST_UNROLLED = 4
# elements of terms up to which three layers and more share one: that compiles in .6 of
# the time, and sweeps as fast up to 2,000 elements (1.5 times the time at 7,000)
_FEW_ELEMENTS = 2000


class ElementsByReader(NamedTuple):
    """Elements of terms that read each of some readers: units, or pairs of units.

    Arrays are of one layer; or of several, padded equally and stacked, for a scan.
    """

    tables: dict[int, Numbers]
    """By term, its elements that read each reader, ``(readers, most)``; padded by its size."""
    ragged: dict[int, tuple[Numbers, Numbers]]
    """By term of which few readers read many elements: elements, and their readers."""

    @property
    def slots(self) -> list[int]:
        """Terms that are read."""
        return [*self.tables, *self.ragged]

    def sums(self, terms: Mapping[int, Array], count: int) -> Array:
        """Return the sum of the elements that each of ``count`` readers reads."""
        total = jnp.zeros(count)
        for slot, table in self.tables.items():
            total += _sum_at(terms[slot].ravel(), table)
        for slot, (elements, positions) in self.ragged.items():
            picked = terms[slot].ravel().at[elements].get(mode="fill", fill_value=0)
            total = total.at[positions].add(picked, mode="drop")
        return total


def place(
    slot: int,
    padding: int,
    reads: Sequence[ElementsByReader],
    sizes: Sequence[int],
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    stacked: bool = False,
) -> None:
    """Record the elements of a term that layers read: a table, or a list if that is smaller.

    :param reads: of each layer.
    :param sizes: number of readers of each layer.
    :param pairs: by layer, elements and the positions of the readers that read them.
    :param stacked: True if all layers must have the same sizes.
    """
    widths = [np.bincount(positions).max(initial=0) for _, positions in pairs]
    lengths = [len(elements) for elements, _ in pairs]
    padded = max(widths) * sum(sizes)
    is_ragged = padded > _MOST_PADDING * sum(lengths) + sum(sizes)
    for layer, size, (elements, positions), width in zip(reads, sizes, pairs, widths):
        if not stacked and not len(elements):
            continue
        if is_ragged:
            length = max(lengths) if stacked else len(elements)
            rows = _pad(elements, length, padding), _pad(positions, length, size)
            layer.ragged[slot] = rows
            continue
        columns = max(widths) if stacked else width
        layer.tables[slot] = np.full((size, columns), padding, np.int32)
        layer.tables[slot][positions, ranks_in_groups(positions)] = elements


def _pad(numbers: np.ndarray, length: int, value: int) -> np.ndarray:
    missing = length - len(numbers)
    return np.pad(numbers, (0, missing), constant_values=value).astype(np.int32)


def _sum_at(values: Array, table: Numbers) -> Array:
    """Return the sums of the values at each row of a table."""
    is_all = is_range(table, len(values))

    def pick(columns):
        if is_all:
            return values.reshape(table.shape)[:, columns]
        return values.at[table[:, columns]].get(mode="fill", fill_value=0)

    if table.shape[1] > MOST_COLUMNS:
        return pick(slice(None)).sum(1)
    # column by column: XLA on CPU sums a short last axis twenty times slower
    return sum(map(pick, range(table.shape[1])), jnp.zeros(()))


class UnitLayer(NamedTuple):
    """Units that do not interact, and the elements that read them.

    Arrays are of one layer; or of all of them, padded equally and stacked, for a scan.
    """

    number: ArrayLike
    units: Numbers
    """Numbers of the units; padded by the number of all units."""
    reads: ElementsByReader


class Layered(Conditionals):
    """Conditionals of units in layers, from the terms of the log density.

    :param posterior: the log density.
    :param terms: its terms.
    :param colors: the layer of each unit.
    """

    def __init__(
        self, posterior: ModelDensity, terms: SumOfTerms, colors: np.ndarray
    ) -> None:
        super().__init__(posterior, colors)
        self.terms = terms
        #: the layers, or all of them stacked where there are many
        self.layers = self.make_layers(terms)

    @abstractmethod
    def make_layers(self, terms: SumOfTerms) -> list[Any]:
        """Return the layers, tuples with ``number`` and ``units``."""

    @abstractmethod
    def log_weights(self, layer: Any, sites: SiteValues, inputs: SlotValues) -> Any:
        """Return log weights of the states of a layer, given all other units."""

    def visit(
        self,
        fn: Visit,
        chains: Sequence[ChainInputs],
        carry: Array,
        backward: bool = False,
    ) -> Visited:
        inputs = [chain[1] for chain in chains]

        def at_layer(state, layer):
            sites, carry = state
            weights = [self.log_weights(layer, *chain) for chain in zip(sites, inputs)]
            choices, carry = fn(layer.number, layer.units, weights, carry)
            sites = [
                self.put(x, layer.units, *choice) for x, choice in zip(sites, choices)
            ]
            return (sites, carry), None

        state = [dict(sites) for sites, _ in chains], carry
        if len(self.layers) < self.num_layers:
            return lax.scan(at_layer, state, self.layers[0], reverse=backward)[0]
        for layer in reversed(self.layers) if backward else self.layers:
            state, _ = at_layer(state, layer)
        return state


class UnitLayers(Layered):
    """Conditionals of units in layers that do not interact."""

    def make_layers(self, terms: SumOfTerms) -> list[UnitLayer]:
        num_elements = sum(mask.size for mask in terms.live.values())
        most = 2 if num_elements <= _FEW_ELEMENTS else _MOST_UNROLLED
        stacked = self.num_layers > most
        groups = positions_by_group(self.colors, self.num_layers)
        most = max(map(len, groups)) if stacked else 0
        layers = [
            UnitLayer(
                np.int32(number),
                _pad(units, max(most, len(units)), self.size),
                ElementsByReader({}, {}),
            )
            for number, units in enumerate(groups)
        ]
        reads = [layer.reads for layer in layers]
        sizes = [len(layer.units) for layer in layers]
        position = ranks_in_groups(self.colors)  # of a unit in its layer
        for slot, mask in terms.live.items():
            element, unit = terms.elements(slot)
            pairs = [
                (element[p], position[unit[p]])
                for p in positions_by_group(self.colors[unit], self.num_layers)
            ]
            place(slot, mask.size, reads, sizes, pairs, stacked)
        if stacked:
            return [jax.tree.map(lambda *a: np.stack(a), *layers)]
        return layers

    def log_weights(
        self, layer: UnitLayer, sites: SiteValues, inputs: SlotValues
    ) -> Array:
        """Return log probabilities of a layer's units up to constants, ``(units, values)``."""
        present = self.posterior.inputs_at(sites, inputs)
        coefficients = self.terms.coefficients(present)
        masks = self.by_site(self.colors == layer.number)

        def sums_at(k):
            """Return the part of the log density of each unit, all at their k-th value."""
            moved = {}
            for name, mask in masks.items():
                values = self.posterior.values[name].table
                table = jnp.asarray(values, sites[name].dtype)
                value = table[jnp.minimum(k, len(table) - 1)]
                moved[name] = jnp.where(mask, value, sites[name])
            at = self.posterior.inputs_at(moved, inputs)
            terms = self.terms.evaluate(at, layer.reads.slots)
            terms = self.terms.multiply(coefficients, terms)
            return layer.reads.sums(terms, len(layer.units))

        logits = jax.vmap(sums_at)(jnp.arange(self.num_values))
        return jnp.where(self.valid(layer.units), logits.T, -jnp.inf)
