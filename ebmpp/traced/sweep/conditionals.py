# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditionals of discrete units given everything else, and draws from them layer by layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
import math
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.families import Categorical
from ebmpp.traced.block import Coupled, SiteValues
from ebmpp.traced.model import Context, DrawnSites, Inputs
from ebmpp.traced.sweep.posterior import ModelDensity

#: Columns of a table up to which these are processed one at a time.
MOST_COLUMNS = 16
#: A chain's discrete sites, and values of the program's inputs, of which the sites' are
#: ignored.
ChainInputs = tuple[SiteValues, Mapping[int, Any]]
#: From a layer's number, its units, each chain's log probabilities ``(units, values)``
#: and a carry to each chain's values by number, with a mask of those to take, and the
#: carry.
Visit = Callable[
    [Any, Any, Sequence[Array], Any], tuple[Sequence[tuple[Array, Array]], Any]
]
#: The sites of each chain after a visit of all layers, and the carry.
Visited = tuple[list[dict[str, Array]], Any]


class Conditionals(ABC):
    """Conditionals of discrete units given everything else; ``colors`` are the layers of the units."""

    terms: Any = None  # of the log density, where draws evaluate these

    def __init__(self, posterior: ModelDensity, colors: np.ndarray) -> None:
        self.posterior = posterior
        self.colors = colors
        self.num_layers = int(colors.max(initial=-1)) + 1
        sizes = {
            name: math.prod(posterior.shapes[name]) for name in sorted(posterior.sites)
        }
        ends = np.cumsum([0, *sizes.values()]).tolist()
        #: by site, the range of the numbers of its units
        self.spans = dict(
            zip(sizes, zip(ends[:-1], ends[1:], strict=True), strict=True)
        )
        self.size = ends[-1]
        self.num_values = max(len(v.table) for v in posterior.values.values())

    @abstractmethod
    def visit(
        self,
        fn: Visit,
        chains: Sequence[ChainInputs],
        carry: Any,
        backward: bool = False,
    ) -> Visited:
        """Visit all layers in order, each given the values of those before; return sites and carry.

        :param fn: chooses values; the last unit numbers of a layer may be padding,
            ``size``.
        :param backward: the last layer first.
        """

    def valid(self, units: Any) -> Any:
        """Return a mask of the values that some units can take, ``(units or 1, values)``."""
        masks = {name: self.posterior.values[name].valid for name in self.spans}
        if all(len(v) == self.num_values and v.all() for v in masks.values()):
            return np.ones((1, self.num_values), bool)

        def by_unit(v, shape):
            return np.broadcast_to(v, (len(v), *shape)).reshape(len(v), -1).T

        rows = [by_unit(v, self.posterior.shapes[name]) for name, v in masks.items()]
        rows = [
            np.pad(row, ((0, 0), (0, self.num_values - row.shape[1]))) for row in rows
        ]
        rows.append(np.ones((1, self.num_values), bool))  # of the padding of a layer
        return jnp.asarray(np.concatenate(rows))[units]

    def put(
        self, sites: SiteValues, units: Any, numbers: Array, accepted: Array
    ) -> dict[str, Array]:
        """Return the sites with the values of some units, by number, where accepted."""
        is_all = isinstance(units, np.ndarray) and np.array_equal(
            units, np.arange(self.size)
        )

        def spread(a):
            return (
                a
                if is_all
                else jnp.zeros(self.size, a.dtype).at[units].set(a, mode="drop")
            )

        spread_numbers = spread(numbers)
        mask = spread(accepted)
        result = {}
        for name, (start, stop) in self.spans.items():
            shape = self.posterior.shapes[name]
            table = jnp.asarray(self.posterior.values[name].table, sites[name].dtype)
            index = spread_numbers[start:stop].reshape(shape)
            index = (
                index
                if len(table) == self.num_values
                else jnp.minimum(index, len(table) - 1)
            )
            is_shared = math.prod(table.shape[1:]) == 1
            value = (
                table.ravel()[index]
                if is_shared
                else jnp.take_along_axis(table, index[None], 0)[0]
            )
            result[name] = jnp.where(
                mask[start:stop].reshape(shape), value, sites[name]
            )
        return result

    def numbers(self, values: SiteValues) -> Array:
        """Return the values of all units by number."""

        def number(name, v):
            return ((values[name] == v.table) & v.valid).argmax(0).ravel()

        return jnp.concatenate(
            [number(name, self.posterior.values[name]) for name in self.spans]
        )

    def _chain(self, values: SiteValues, context: Context) -> ChainInputs:
        return {name: values[name] for name in self.spans}, self.posterior.inputs(
            values, context
        )

    def move(
        self, inputs: Inputs, keys: Array, beta: Any = None, backward: bool = False
    ) -> DrawnSites:
        """Draw all layers in order; see :meth:`~ebmpp.traced.sweep.sweep.BlockSweep.__call__`."""

        def fn(
            number: Any, units: Any, logits: Sequence[Array], rejected: Array
        ) -> tuple:
            drawn, valid = _draw(random.fold_in(keys, number), logits[0], beta)
            return [(drawn, valid)], rejected + ((units < self.size) & ~valid).sum(
                dtype=jnp.int32
            )

        (sites,), rejected = self.visit(
            fn, [self._chain(*inputs)], jnp.zeros((), jnp.int32), backward
        )
        return sites, rejected

    def couple(self, first: Inputs, second: Inputs, keys: Array) -> Coupled:
        """Draw all layers of two chains, coupled maximally; also return if a conditional is degenerate."""
        family = Categorical(1, max(2, self.num_values))

        def fn(
            number: Any, units: Any, logits: Sequence[Array], broken: Array
        ) -> tuple:
            words = random.words(
                random.fold_in(keys, number), 3 * len(logits[0])
            ).reshape(-1, 3)
            valid = jnp.isfinite(logits[0].max(-1)) & jnp.isfinite(logits[1].max(-1))
            return [
                (drawn, valid) for drawn in family.couple(words, *logits)
            ], broken | ~valid.all()

        (x, y), broken = self.visit(
            fn, [self._chain(*first), self._chain(*second)], jnp.zeros((), bool)
        )
        return x, y, broken

    def table(self, values: SiteValues, context: Context) -> Array:
        """Return log probabilities of every unit given all others, up to a constant, ``(units, values)``."""

        def fn(number: Any, units: Any, logits: Sequence[Array], table: Array) -> tuple:
            count, columns = logits[0].shape
            rows = table.at[units, :columns].set(logits[0], mode="drop")
            return [(jnp.zeros(count, jnp.int32), jnp.zeros(count, bool))], rows

        table = jnp.full((self.size, self.num_values), -jnp.inf)
        return self.visit(fn, [self._chain(values, context)], table)[1]

    def walk(
        self, values: SiteValues, context: Context, keys: Array
    ) -> tuple[dict[str, Array], Array]:
        """Set units to random possible values; also return the change that the conditionals imply."""
        present = self.numbers(values)

        def fn(
            number: Any, units: Any, logits: Sequence[Array], change: Array
        ) -> tuple:
            (rows,) = logits
            before = present.at[units].get(mode="clip")
            uniforms = random.uniform(
                random.words(random.fold_in(keys, number), rows.size)
            )
            after = jnp.where(
                jnp.isfinite(rows), uniforms.reshape(rows.shape), -1
            ).argmax(1)
            moves = (units < self.size) & (after != before) & jnp.isfinite(rows).any(1)

            def at(numbers):
                return jnp.take_along_axis(rows, numbers[:, None], 1)[:, 0]

            change += jnp.where(moves, at(after) - at(before), 0).sum()
            return [(after, moves)], change

        (sites,), change = self.visit(fn, [self._chain(values, context)], jnp.zeros(()))
        return sites, change


def _draw(keys: Array, logits: Array, beta: Any) -> tuple[Array, Array]:
    """Return values of units, by number, and a mask of those whose conditional is not degenerate."""
    if beta is not None:
        logits = jnp.where(jnp.isneginf(logits), logits, beta * logits)
    uniforms = random.uniform(random.words(keys, len(logits)))
    if logits.shape[1] > MOST_COLUMNS:
        drawn = random.inverse_cdf(uniforms, jax.nn.softmax(logits, -1))
        return drawn, jnp.isfinite(logits.max(-1))
    # the same column by column: XLA on CPU is five times slower along a short last axis
    columns = [logits[:, k] for k in range(logits.shape[1])]
    top = functools.reduce(jnp.maximum, columns)
    cumulated = list(itertools.accumulate(jnp.exp(column - top) for column in columns))
    threshold = uniforms * cumulated[-1]
    drawn = sum(
        ((c <= threshold).astype(jnp.int32) for c in cumulated[:-1]),
        jnp.zeros(len(top), jnp.int32),
    )
    return drawn, jnp.isfinite(top)
