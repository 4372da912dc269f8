# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditionals of discrete units given everything else, and draws from them layer by layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import Numbers, SiteArrays, random, select
from ebmpp.dependence.program import SlotValues
from ebmpp.families import Categorical
from ebmpp.traced.block import Coupled, SiteValues
from ebmpp.traced.model import DrawnSites, Inputs
from ebmpp.traced.sweep.posterior import ModelDensity

#: Columns of a table up to which these are processed one at a time.
MOST_COLUMNS = 16
#: A chain's discrete sites, and values of the program's inputs, of which the sites' are
#: ignored.
ChainInputs = tuple[SiteValues, SlotValues]
#: Values of a layer's units, by number, and a mask of those to take.
Choice = tuple[Array, Numbers]
#: From a layer's number, its units, each chain's log weights and a carry to each
#: chain's choice, and the carry. Log weights are ``(units, values)``, or the tables of
#: a forest.
Visit = Callable[
    [ArrayLike, Numbers, Sequence[Any], Array], tuple[Sequence[Choice], Array]
]
#: The sites of each chain after a visit of all layers, and the carry.
Visited = tuple[list[SiteArrays], Array]


class Conditionals(ABC):
    """Conditionals of discrete units given everything else, in layers by ``colors``."""

    #: passes over all layers in a draw
    num_passes = 1

    def __init__(self, posterior: ModelDensity, colors: np.ndarray) -> None:
        self.posterior = posterior
        self.colors = colors
        self.num_layers = int(colors.max(initial=-1)) + 1
        #: the conditionals of single units, where layers are drawn jointly
        self.units: Conditionals = self
        #: by site, the range of the numbers of its units
        self.spans: dict[str, tuple[int, int]] = {}
        self.size = 0
        for name, slot in posterior.program.sites.items():
            start = self.size
            self.size += posterior.program.size(slot)
            self.spans[name] = (start, self.size)
        self.num_values = posterior.num_values

    @abstractmethod
    def visit(
        self,
        fn: Visit,
        chains: Sequence[ChainInputs],
        carry: Array,
        backward: bool = False,
    ) -> Visited:
        """Visit all layers in order, each given the values of those before; return sites and carry.

        :param fn: chooses values; the last unit numbers of a layer may be padding,
            ``size``.
        :param backward: the last layer first.
        """

    def valid(self, units: Numbers) -> Numbers:
        """Return a mask of the values that some units can take, ``(units or 1, values)``."""
        rows = np.zeros((self.size + 1, self.num_values), bool)
        rows[self.size] = True  # the padding of a layer
        for name, (start, stop) in self.spans.items():
            mask = self.posterior.values[name].valid
            count = len(mask)
            mask = np.broadcast_to(mask, (count, *self.posterior.shapes[name]))
            rows[start:stop, :count] = mask.reshape(count, -1).T
        if rows.all():
            return rows[:1]
        return jnp.asarray(rows)[units]

    def by_site(self, rows: Numbers) -> dict[str, Any]:
        """Split an array with a row for each unit into ``(*shape, ...)`` for each site."""
        result = {}
        for name, (start, stop) in self.spans.items():
            shape = self.posterior.shapes[name] + rows.shape[1:]
            result[name] = rows[start:stop].reshape(shape)
        return result

    def values_by_site(self, table: Array) -> SiteArrays:
        """Split numbers of all values, ``(units, values)``, into ``(*shape, K)`` for each site."""
        values = self.posterior.values
        split = self.by_site(table).items()
        return {site: rows[..., : len(values[site].table)] for site, rows in split}

    def put(
        self,
        sites: SiteValues,
        units: Numbers,
        numbers: Array,
        accepted: Numbers,
    ) -> SiteArrays:
        """Return the sites with the values of some units, by number, where accepted."""
        if not is_range(units, self.size):
            blank = jnp.zeros(self.size, numbers.dtype)
            numbers = blank.at[units].set(numbers, mode="drop")
            accepted = blank.astype(bool).at[units].set(accepted, mode="drop")
        masks = self.by_site(accepted)
        result = {}
        for name, index in self.by_site(numbers).items():
            table = jnp.asarray(self.posterior.values[name].table, sites[name].dtype)
            if len(table) < self.num_values:
                index = jnp.minimum(index, len(table) - 1)
            if table.size == len(table):
                value = table.ravel()[index]
            else:
                value = jnp.take_along_axis(table, index[None], 0)[0]
            result[name] = jnp.where(masks[name], value, sites[name])
        return result

    def numbers(self, values: SiteValues) -> Array:
        """Return the values of all units by number."""
        numbers = []
        for name in self.spans:
            table, valid = self.posterior.values[name]
            matches = (values[name] == table) & valid
            numbers.append(matches.argmax(0).ravel())
        return jnp.concatenate(numbers)

    def _chain(self, inputs: Inputs) -> ChainInputs:
        return select(inputs[0], self.spans), self.posterior.inputs(inputs)

    def move(
        self,
        inputs: Inputs,
        keys: Array,
        beta: Array | None = None,
        backward: bool = False,
    ) -> DrawnSites:
        """Draw all layers in order; see :class:`~ebmpp.traced.sweep.BlockSweep`."""

        def draw(number, units, weights, rejected):
            (weights,) = _tempered(weights, beta)
            # a hash takes some 25 ms to compile
            is_single = self.num_layers * self.num_passes == 1
            layer_keys = keys if is_single else random.fold_in(keys, number)
            drawn, valid = self.draw_layer(number, weights, layer_keys)
            is_rejected = (units < self.size) & ~valid
            rejected += is_rejected.sum(dtype=jnp.int32)
            return [(drawn, valid)], rejected

        chains = [self._chain(inputs)]
        (sites,), rejected = self.visit(draw, chains, jnp.int32(0), backward)
        return sites, rejected

    def draw_layer(self, number: Any, logits: Any, keys: Array) -> Choice:
        """Draw the units of a layer, and return a mask of conditionals not degenerate."""
        return self.choose(logits, random.uniforms(keys, len(logits)))

    def choose(self, logits: Array, uniforms: Array) -> Choice:
        """Return the values of units at uniforms, by inversion; see :meth:`draw_layer`."""
        if logits.shape[1] > MOST_COLUMNS:
            drawn = random.inverse_cdf(uniforms, jax.nn.softmax(logits, -1))
            return drawn, jnp.isfinite(logits.max(-1))
        # the same column by column: XLA on CPU is five times slower along a short last
        # axis
        columns = [logits[:, k] for k in range(logits.shape[1])]
        top = functools.reduce(jnp.maximum, columns)
        weights = [jnp.exp(column - top) for column in columns]
        cumulated = list(itertools.accumulate(weights))
        threshold = uniforms * cumulated[-1]
        drawn = jnp.zeros(len(top), jnp.int32)
        for total in cumulated[:-1]:
            drawn += (total <= threshold).astype(jnp.int32)
        return drawn, jnp.isfinite(top)

    def couple(self, first: Inputs, second: Inputs, keys: Array) -> Coupled:
        """Draw all layers of two chains, coupled maximally."""

        def draw(number, units, weights, broken):
            words = random.words(random.fold_in(keys, number), 3 * len(units))
            choices = self.couple_layer(number, *weights, words.reshape(-1, 3))
            (_, valid_x), (_, valid_y) = choices
            return choices, broken | ~(valid_x & valid_y).all()

        chains = [self._chain(first), self._chain(second)]
        (x, y), broken = self.visit(draw, chains, jnp.bool_(False))
        return x, y, broken

    def couple_layer(
        self,
        number: Any,
        p: Any,
        q: Any,
        words: Array,
    ) -> list[Choice]:
        """Draw the units of a layer in two chains, with masks of valid conditionals."""
        family = Categorical(1, max(2, p.shape[-1]))
        valid = jnp.isfinite(p.max(-1)) & jnp.isfinite(q.max(-1))
        return [(numbers, valid) for numbers in family.couple(words, p, q)]

    def table(self, inputs: Inputs) -> Array:
        """Return log probabilities of every unit given all others, ``(units, values)``."""
        return self.begin(inputs, list(self.spans), jnp.zeros(self.size))[1]

    def begin(
        self, inputs: Inputs, held: Sequence[str], uniforms: Array
    ) -> tuple[SiteArrays, Array]:
        """Draw all units in order, except units of the sites ``held``.

        :param uniforms: one for each unit.
        :return: the sites, and log probabilities of every unit given all others,
            ``(units, values)``.
        """
        is_free = np.zeros(self.size + 1, bool)
        for site, (start, stop) in self.spans.items():
            is_free[start:stop] = site not in held

        def record(number, units, logits, table):
            (rows,) = logits
            count, columns = rows.shape
            table = table.at[units, :columns].set(rows, mode="drop")
            choice = jnp.zeros(count, jnp.int32), jnp.zeros(count, bool)
            if is_free.any():
                levels = uniforms.at[units].get(mode="clip")
                drawn, valid = self.choose(rows, levels)
                choice = drawn, valid & jnp.asarray(is_free)[units]
            return [choice], table

        table = jnp.full((self.size, self.num_values), -jnp.inf)
        (sites,), table = self.units.visit(record, [self._chain(inputs)], table)
        return sites, table

    def walk(self, inputs: Inputs, keys: Array) -> tuple[SiteArrays, Array]:
        """Set units to random possible values, and return the change that conditionals imply."""
        present = self.numbers(inputs[0])

        def jump(number, units, logits, change):
            (rows,) = logits
            is_possible = jnp.isfinite(rows)
            uniforms = random.uniforms(random.fold_in(keys, number), rows.size)
            uniforms = uniforms.reshape(rows.shape)
            before = present.at[units].get(mode="clip")
            after = jnp.where(is_possible, uniforms, -1).argmax(1)
            moves = (units < self.size) & (after != before) & is_possible.any(1)
            # in the first of several passes
            moves &= number < self.units.num_layers

            def at(numbers):
                return jnp.take_along_axis(rows, numbers[:, None], 1)[:, 0]

            change += jnp.where(moves, at(after) - at(before), 0).sum()
            return [(after, moves)], change

        chains = [self._chain(inputs)]
        (sites,), change = self.units.visit(jump, chains, jnp.zeros(()))
        return sites, change


def _tempered(weights: PyTree, beta: Array | None) -> PyTree:
    """Return log weights times ``beta``, where -inf stays -inf; themselves without a ``beta``."""
    if beta is None:
        return weights
    return jax.tree.map(lambda a: jnp.where(jnp.isneginf(a), a, beta * a), weights)


def is_range(numbers: Numbers, size: int) -> bool:
    """Return True if numbers on the host are 0 to ``size - 1`` in order."""
    if not isinstance(numbers, np.ndarray):
        return False
    return np.array_equal(numbers.ravel(), np.arange(size))
