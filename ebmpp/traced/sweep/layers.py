# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditionals of all units of a layer at once, from as many evaluations as a unit has values.

A layer holds units that do not interact, so all of them are set to their k-th value in
one evaluation of the model's terms. The conditional of a unit follows from the sum of
the elements that read it (:mod:`ebmpp.dependence.terms`). Forests have such sums
for pairs of units as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core.groups import positions_by_group, ranks_in_groups
from ebmpp.dependence.terms import SumOfTerms
from ebmpp.traced.block import SiteValues
from ebmpp.traced.sweep.conditionals import (
    MOST_COLUMNS,
    ChainInputs,
    Conditionals,
    Visit,
    Visited,
)
from ebmpp.traced.sweep.posterior import ModelDensity

_MOST_PADDING = 4  # padded entries of a table per entry in use
# layers that are compiled separately; more share one program, padded to the largest
_MOST_UNROLLED = 4


class ElementsByReader(NamedTuple):
    """Elements of terms that read each of some readers: units, or pairs of units.

    Arrays are of one layer; or of several, padded equally and stacked, for a scan.
    """

    tables: dict[int, Any]
    """By term, its elements that read each reader, ``(readers, most)``; padded by the term's size."""
    ragged: dict[int, tuple[Any, Any]]
    """By term of which few readers read many elements: elements, and positions among the readers."""

    @property
    def slots(self) -> list[int]:
        """Terms that are read."""
        return [*self.tables, *self.ragged]

    def sums(self, terms: Mapping[int, Array], count: int) -> Array:
        """Return the sum of the elements that each of ``count`` readers reads."""
        total = jnp.zeros(count)
        for slot, table in self.tables.items():
            total = total + _sum_at(terms[slot].ravel(), table)
        for slot, (elements, positions) in self.ragged.items():
            picked = terms[slot].ravel().at[elements].get(mode="fill", fill_value=0)
            total = total.at[positions].add(picked, mode="drop")
        return total


def place(
    slot: int,
    padding: int,
    reads: Sequence[ElementsByReader],
    sizes: Sequence[int],
    pairs: list[tuple],
    stacked: bool,
) -> None:
    """Record the elements of a term that layers read: as a table, or as a list where that is smaller.

    :param reads: of each layer.
    :param sizes: number of readers of each layer.
    :param pairs: by layer, elements and the positions of the readers that read them.
    :param stacked: True if all layers must have the same sizes.
    """
    counts = [int(np.bincount(positions).max(initial=0)) for _, positions in pairs]
    width = max(len(elements) for elements, _ in pairs)
    total = sum(len(elements) for elements, _ in pairs)
    most = max(counts)
    ragged = most * sum(sizes) > _MOST_PADDING * total + sum(sizes)
    for layer, size, (elements, positions), count in zip(
        reads, sizes, pairs, counts, strict=True
    ):
        if not stacked and not len(elements):
            continue
        if not ragged:
            table = layer.tables[slot] = np.full(
                (size, most if stacked else count), padding, np.int32
            )
            table[positions, ranks_in_groups(positions)] = elements
            continue
        spare = (0, width - len(elements) if stacked else 0)

        def fill(a, value, spare=spare):
            return np.pad(a, spare, constant_values=value).astype(np.int32)

        layer.ragged[slot] = fill(elements, padding), fill(positions, size)


def _sum_at(values: Array, table: Any) -> Array:
    """Return the sums of the values at each row of a table."""
    is_all = isinstance(table, np.ndarray) and np.array_equal(
        table.ravel(), np.arange(len(values))
    )
    if table.shape[1] > MOST_COLUMNS:
        picked = (
            values.reshape(table.shape)
            if is_all
            else values.at[table].get(mode="fill", fill_value=0)
        )
        return picked.sum(1)

    # column by column: XLA on CPU sums a short last axis twenty times slower
    def column(j):
        return values.reshape(table.shape)[:, j]

    def pick(j):
        return values.at[table[:, j]].get(mode="fill", fill_value=0)

    return sum(
        ((column if is_all else pick)(j) for j in range(table.shape[1])), jnp.zeros(())
    )


class UnitLayer(NamedTuple):
    """Units that do not interact, and the elements that read them.

    Arrays are of one layer; or of all of them, padded equally and stacked, for a scan.
    """

    number: Any
    units: Any
    """Numbers of the units; padded by the number of all units."""
    reads: ElementsByReader


class UnitLayers(Conditionals):
    """Conditionals of units in layers, from the terms of the log density.

    :param posterior: the log density.
    :param terms: its terms.
    :param colors: the layer of each unit.
    """

    def __init__(
        self, posterior: ModelDensity, terms: SumOfTerms, colors: np.ndarray
    ) -> None:
        super().__init__(posterior, colors)
        self._layers = self._make_layers(terms)
        self.terms = terms

    def _make_layers(self, terms: SumOfTerms) -> list[UnitLayer]:
        """Return the layers, or all of them stacked where there are many."""
        units = positions_by_group(self.colors, self.num_layers)
        stacked = self.num_layers > _MOST_UNROLLED
        most = max(map(len, units)) if stacked else 0

        def pad(u):
            return np.pad(u, (0, max(0, most - len(u))), constant_values=self.size)

        layers = [
            UnitLayer(np.int32(i), pad(u).astype(np.int32), ElementsByReader({}, {}))
            for i, u in enumerate(units)
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
        return [jax.tree.map(lambda *a: np.stack(a), *layers)] if stacked else layers

    def visit(
        self,
        fn: Visit,
        chains: Sequence[ChainInputs],
        carry: Any,
        backward: bool = False,
    ) -> Visited:
        inputs = [chain[1] for chain in chains]

        def at_layer(state: tuple, layer: UnitLayer) -> tuple[tuple, None]:
            sites, carry = state
            logits = [
                self._logits(layer, *chain) for chain in zip(sites, inputs, strict=True)
            ]
            picked, carry = fn(layer.number, layer.units, logits, carry)
            return (
                [
                    self.put(x, layer.units, *c)
                    for x, c in zip(sites, picked, strict=True)
                ],
                carry,
            ), None

        state: tuple = [dict(sites) for sites, _ in chains], carry
        if self.num_layers > _MOST_UNROLLED:
            return lax.scan(at_layer, state, self._layers[0], reverse=backward)[0]
        for layer in reversed(self._layers) if backward else self._layers:
            state, _ = at_layer(state, layer)
        return state

    def _logits(
        self, layer: UnitLayer, sites: SiteValues, inputs: Mapping[int, Any]
    ) -> Array:
        """Return log probabilities of a layer's units, each up to a constant, ``(units, values)``."""
        coefficients = self.terms.coefficients(
            {**inputs, **self.posterior.site_inputs(sites)}
        )

        def sums_at(k: Array) -> Array:
            """Return the part of the log density of each unit, all at their k-th value."""
            moved = {}
            for name, (start, stop) in self.spans.items():
                mask = (self.colors[start:stop] == layer.number).reshape(
                    self.posterior.shapes[name]
                )
                table = jnp.asarray(
                    self.posterior.values[name].table, sites[name].dtype
                )
                at = table[jnp.minimum(k, len(table) - 1)]
                is_all = isinstance(mask, np.ndarray) and mask.all()
                moved[name] = (
                    jnp.broadcast_to(at, mask.shape)
                    if is_all
                    else jnp.where(mask, at, sites[name])
                )
            values = {**inputs, **self.posterior.site_inputs(moved)}
            terms = self.terms.multiply(
                coefficients, self.terms.evaluate(values, layer.reads.slots)
            )
            return layer.reads.sums(terms, len(layer.units))

        logits = jax.vmap(sums_at)(jnp.arange(self.num_values))
        return jnp.where(self.valid(layer.units), logits.T, -jnp.inf)
