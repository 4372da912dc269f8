# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The conditionals of all units of a layer at once, from as many evaluations as a unit has values.

A layer holds units that do not interact, so all of them are set to their k-th value in one evaluation
of the model's terms, and what each unit's conditional needs is the sum of the elements that read it
(:mod:`ebmpp.traced.dependence.terms`).
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.traced.dependence import Terms
from ebmpp.traced.posterior import Posterior
from ebmpp.traced.sequential import OneByOne

Sites = Mapping[str, Array]
_UNROLLED = 4  # layers that are compiled one by one; more share one program, padded to the largest
#: Columns of a table that are gone through one by one.
COLUMNS = 16
_PADDING = 4  # places that padding may take, for one that is taken


@dataclasses.dataclass(frozen=True)
class Layer:
    """Units that do not interact, and where their elements are.

    Arrays are those of one layer, or of one of many, equally padded, which a scan passes.
    """

    number: Any
    units: Any
    """Their numbers; the number of all units where there is none."""
    places: dict[int, Any]
    """Of each term: its elements that read the units, ``(units, most)``; its size where there is none."""
    ragged: dict[int, tuple[Any, Any]]
    """Of terms of which few units read many elements: elements, and positions among ``units``."""


jax.tree_util.register_dataclass(Layer, ["number", "units", "places", "ragged"], [])


class Conditionals:
    """Laws of units given everything else, by layers.

    :param posterior: the model.
    :param terms: its terms; None where every unit is a layer by itself.
    :param colors: the layer of each unit.
    """

    def __init__(self, posterior: Posterior, terms: Terms | None, colors: np.ndarray) -> None:
        self.posterior, self.terms, self.colors = posterior, terms, colors
        self.num_layers = int(colors.max(initial=-1)) + 1
        sizes = {name: math.prod(posterior.shapes[name]) for name in sorted(posterior.sites)}
        ends = np.cumsum([0, *sizes.values()])
        self.spans = dict(zip(sizes, zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True), strict=True))
        self.size = int(ends[-1])
        self.num_values = max(len(v.table) for v in posterior.values.values())
        self._layers = [] if terms is None else self._make(terms)
        self._one_by_one = OneByOne(posterior, self.spans) if terms is None else None

    # -- layers ----------------------------------------------------------------------------------

    def _make(self, terms: Terms) -> list[Layer]:
        """Layers as they are, or all of them stacked."""
        units = _by_color(self.colors, self.num_layers)
        apart = self.num_layers <= _UNROLLED
        made = [Layer(np.int32(i), _narrow(u), {}, {}) for i, u in enumerate(units)]
        if not apart:
            made = [_pad(layer, max(map(len, units)), self.size) for layer in made]
        position = np.zeros(self.size, np.int64)  # of a unit in its layer
        for layer in units:
            position[layer] = np.arange(len(layer))
        for slot, at in terms.live.items():
            element, unit = terms.elements(slot)
            parts = _by_color(self.colors[unit], self.num_layers)
            _place(slot, at.size, made, [(element[p], position[unit[p]]) for p in parts], apart)
        return made if apart else [jax.tree.map(lambda *a: np.stack(a), *made)]

    def walk(self, fn: Callable[[Layer, Any], Any], carry: Any, backward: bool = False) -> Any:
        """``fn(layer, carry)``, layer by layer, the last one first where it goes backward."""
        if self.terms is None:
            one = lambda u: Layer(u, u[None], {}, {})
            unit = lambda u: self.size - 1 - u if backward else u
            return lax.fori_loop(0, self.size, lambda u, carry: fn(one(unit(u)), carry), carry)
        if self.num_layers > _UNROLLED:
            step = lambda carry, layer: (fn(layer, carry), None)
            return lax.scan(step, carry, self._layers[0], reverse=backward)[0]
        for layer in reversed(self._layers) if backward else self._layers:
            carry = fn(layer, carry)
        return carry

    # -- laws ------------------------------------------------------------------------------------

    def sweep(
        self,
        sites: Sites,
        given: Mapping[int, Any],
        draw: Callable[[Layer, Array], tuple],
        backward: bool = False,
    ) -> tuple:
        """All layers, one after the other.

        :param sites: the block's own sites.
        :param given: values of the program's inputs; those of the sites are not looked at.
        :param draw: of a layer and its log probabilities up to a constant, ``(units, values)``, the number of
            each unit's value, and whether it may be taken.
        :param backward: the last layer first.
        :return: the sites, and how many units kept their value because it might not.
        """

        if self._one_by_one is not None:
            of_unit = lambda unit, logits: draw(Layer(unit, unit[None], {}, {}), logits)
            return self._one_by_one.sweep(sites, given, of_unit, backward)

        def one(layer: Layer, carry: tuple) -> tuple:
            sites, kept = carry
            chosen, sound = draw(layer, self.logits(layer, sites, given))
            inside = layer.units < self.size
            return self.put(layer, sites, chosen, sound), kept + (inside & ~sound).sum(dtype=jnp.int32)

        return self.walk(one, (dict(sites), jnp.zeros((), jnp.int32)), backward)

    def table(self, sites: Sites, given: Mapping[int, Any]) -> Array:
        """Of every unit its log probabilities given all others, up to a constant, ``(units, values)``."""
        place = lambda layer, made: made.at[layer.units].set(self.logits(layer, sites, given), mode="drop")
        return self.walk(place, jnp.zeros((self.size, self.num_values)))

    def logits(self, layer: Layer, sites: Sites, given: Mapping[int, Any]) -> Array:
        """Log probabilities of the layer's units, up to a constant each, ``(units, values)``."""
        slopes = {} if self.terms is None else self._slopes(self.terms, sites, given)
        one = lambda k: self._contributions(layer, sites, given, slopes, k)
        each = jax.vmap(one)(jnp.arange(self.num_values))
        return jnp.where(self._valid(layer), each.T, -jnp.inf)

    def _slopes(self, terms: Terms, sites: Sites, given: Mapping[int, Any]) -> dict[int, Array]:
        now = {**given} | {self.posterior.program.own[name]: self._cast(name, v) for name, v in sites.items()}
        return terms.coefficients(now, terms.evaluate(now, terms.live))

    def _contributions(
        self, layer: Layer, sites: Sites, given: Mapping[int, Any], slopes: Mapping[int, Array], k: Array
    ) -> Array:
        """With all of a layer's units at their k-th value: what each of them adds to the log density."""
        here = self.posterior.program.own
        moved = {}
        for name, mask in self._masks(layer).items():
            table = jnp.asarray(self._table(name, "table"), sites[name].dtype)
            at = table[jnp.minimum(k, len(table) - 1)]
            whole = isinstance(mask, np.ndarray) and mask.all()
            moved[name] = jnp.broadcast_to(at, mask.shape) if whole else jnp.where(mask, at, sites[name])
        values = {**given} | {here[name]: self._cast(name, v) for name, v in moved.items()}
        if self.terms is None:
            return self.posterior.program.run(values, [self.posterior.program.output]).popitem()[1][None]
        slots = [*layer.places, *layer.ragged]
        found = self.terms.weigh(slopes, self.terms.evaluate(values, slots))
        weighed = {slot: v.ravel() for slot, v in found.items()}
        made = jnp.zeros(layer.units.shape)
        for slot, places in layer.places.items():
            made = made + _sum_at(weighed[slot], places)
        for slot, (elements, positions) in layer.ragged.items():
            picked = weighed[slot].at[elements].get(mode="fill", fill_value=0)
            made = made.at[positions].add(picked, mode="drop")
        return made

    def _cast(self, name: str, value: Array) -> Array:
        program = self.posterior.program
        return value.astype(program.dtypes[program.own[name]])

    def _masks(self, layer: Layer) -> dict[str, Any]:
        """By site: which units are the layer's."""
        made = {}
        for name, (start, stop) in self.spans.items():
            made[name] = (self.colors[start:stop] == layer.number).reshape(self.posterior.shapes[name])
        return made

    def _table(self, name: str, which: str) -> np.ndarray:
        values = self.posterior.values[name]
        return values.table if which == "table" else values.valid

    def _valid(self, layer: Layer) -> Any:
        """Which values the layer's units can take, ``(units or 1, values)``."""
        sites = {name: self._table(name, "valid") for name in self.spans}
        if all(v.shape[0] == self.num_values and v.all() for v in sites.values()):
            return np.ones((1, self.num_values), bool)
        rows = []
        for name, valid in sites.items():
            wide = np.zeros((self.num_values, *self.posterior.shapes[name]), bool)
            wide[: len(valid)] = valid
            rows.append(wide.reshape(self.num_values, -1).T)
        rows.append(np.ones((1, self.num_values), bool))  # of no unit
        return jnp.asarray(np.concatenate(rows))[layer.units]

    def numbers(self, sites: Sites) -> np.ndarray:
        """Of every unit the number of its value."""
        each = []
        for name in self.spans:
            table, valid = self.posterior.values[name]
            each.append(((np.asarray(sites[name]) == table) & valid).argmax(0).ravel())
        return np.concatenate(each)

    def put(self, layer: Layer, sites: Sites, chosen: Array, sound: Array) -> dict[str, Array]:
        """Sites with the values that were chosen for a layer, where they are sound."""
        whole = isinstance(layer.units, np.ndarray) and np.array_equal(layer.units, np.arange(self.size))
        spread = lambda a: a if whole else jnp.zeros(self.size, a.dtype).at[layer.units].set(a, mode="drop")
        number, taken, made = spread(chosen), spread(sound), {}
        for name, (start, stop) in self.spans.items():
            shape = self.posterior.shapes[name]
            table = jnp.asarray(self._table(name, "table"), sites[name].dtype)
            index = number[start:stop].reshape(shape)
            if math.prod(table.shape[1:]) == 1:
                value = table.ravel()[index]
            else:
                value = jnp.take_along_axis(table, index[None], 0)[0]
            made[name] = jnp.where(taken[start:stop].reshape(shape), value, sites[name])
        return made


def _narrow(a: np.ndarray) -> np.ndarray:
    return np.asarray(a, np.int32)


def _pad(layer: Layer, count: int, size: int) -> Layer:
    units = np.pad(layer.units, (0, count - len(layer.units)), constant_values=size)
    return dataclasses.replace(layer, units=units)


def _by_color(colors: np.ndarray, count: int) -> list[np.ndarray]:
    """Positions of each color, in order."""
    order = np.argsort(colors, kind="stable")
    return np.split(order, np.cumsum(np.bincount(colors, minlength=count))[:-1])


def _place(slot: int, none: int, layers: list[Layer], reads: list[tuple], apart: bool) -> None:
    """Put down where a term's elements are that layers read: as a table, or one by one where that is smaller.

    :param none: the number of no element.
    :param reads: by layer, elements and the positions of the units that read them.
    :param apart: whether layers may differ in their sizes.
    """
    counts = [int(np.bincount(positions).max(initial=0)) for _, positions in reads]
    width = max(len(elements) for elements, _ in reads)
    total, most = sum(len(elements) for elements, _ in reads), max(counts)
    units = sum(len(layer.units) for layer in layers)
    ragged = most * units > _PADDING * total + units
    for layer, (elements, positions), count in zip(layers, reads, counts, strict=True):
        if apart and not len(elements):
            continue
        if not ragged:
            layer.places[slot] = _table(elements, positions, len(layer.units), count if apart else most, none)
            continue
        spare = (0, 0 if apart else width - len(elements))
        filled = lambda a, fill, spare=spare: _narrow(np.pad(a, spare, constant_values=fill))
        layer.ragged[slot] = filled(elements, none), filled(positions, len(layer.units))


def _table(elements: np.ndarray, positions: np.ndarray, count: int, most: int, none: int) -> np.ndarray:
    """Elements as rows of a table, a row a position; ``none`` where there are fewer than ``most``."""
    order = np.argsort(positions, kind="stable")
    elements, positions = elements[order], positions[order]
    many = np.bincount(positions, minlength=count)
    column = np.arange(len(positions)) - np.repeat(np.cumsum(many) - many, many)
    made = np.full((count, most), none, np.int32)
    made[positions, column] = elements
    return made


def _sum_at(values: Array, places: Any) -> Array:
    """Sums of the values at each row of places."""
    whole = isinstance(places, np.ndarray) and np.array_equal(places.ravel(), np.arange(len(values)))
    if places.shape[1] > COLUMNS:
        picked = values.reshape(places.shape) if whole else values.at[places].get(mode="fill", fill_value=0)
        return picked.sum(1)
    # column by column: XLA on CPU sums a short last axis twenty times slower
    column = lambda j: values.reshape(places.shape)[:, j]
    pick = lambda j: values.at[places[:, j]].get(mode="fill", fill_value=0)
    return sum(((column if whole else pick)(j) for j in range(places.shape[1])), jnp.zeros(()))
