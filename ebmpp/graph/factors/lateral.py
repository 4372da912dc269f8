# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Interacting units of one block: the declared pairs, and parts of units that do not interact.

The units of a part are drawn jointly given the other parts. Arrays of a part have the
units first and the rows last: the values of a neighbour are then contiguous, and a
sweep of a 64x64 lattice takes a fifth of the time that it takes with the rows first
(100 chains, two cores).
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any, Protocol

from jaxtyping import Bool, Float, Integer, Shaped
import networkx as nx
import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.core import HashableArray, Numbers, checks, expand
from ebmpp.core.backend import barrier_pays
from ebmpp.core.groups import UNROLLED, Edges, positions_by_group, ranks_in_groups
from ebmpp.errors import DeclarationError
from ebmpp.families.family import Family

#: Statistics of units of the block by their numbers: ``(*numbers, rows, *stat_shape)``.
StatisticsAt = Callable[[Any], Array]
#: Numbers of units, one row per tuple.
Numbered = Integer[np.ndarray, "tuples positions"]
#: Natural parameters of the units of a part.
Field = Float[Array, "units rows ..."]


def check_network(name: str, graph: nx.Graph) -> None:
    """Check that a networkx graph is undirected."""
    if graph.is_directed():
        raise checks.declaration_error(
            name,
            "undirected",
            graph,
            hint="Add up the weights of both directions in an nx.Graph; "
            "graph.to_undirected() keeps one of them.",
        )


class Pairs(HashableArray):
    """Pairs of units of one block as they were declared, by number or index, with repetitions."""

    @classmethod
    def read(cls, block: str, pairs: Any) -> "Pairs":
        """Convert an array, a list or a networkx graph over the units."""
        if isinstance(pairs, Pairs):
            return pairs
        name = f"lateral pairs of block {block!r}"
        if isinstance(pairs, nx.Graph):
            check_network(name, pairs)
            pairs = list(pairs.edges())
        checks.refuse_mask(name, pairs, DeclarationError)
        try:
            array = np.asarray(pairs)
        except ValueError:  # ragged
            array = np.empty(0, object)
        if isinstance(pairs, list | tuple | np.ndarray) and not len(pairs):
            array = np.empty((0, 2), np.int64)
        if (
            array.ndim not in (2, 3)
            or array.shape[1:2] != (2,)
            or array.dtype.kind not in "iu"
        ):
            raise checks.declaration_error(
                name,
                "pairs of unit numbers, pairs of indices of units, or a networkx graph over these",
                pairs,
            )
        return cls.copy(array.astype(np.int64))

    @property
    def _ends(self) -> Integer[np.ndarray, "pairs 2 axes"]:
        return self.array if self.array.ndim == 3 else self.array[..., None]

    @functools.lru_cache(maxsize=64)  # noqa: B019 - its few objects live as long as the program
    def edges(self, factor: str, block: str, family: Family) -> Edges:
        """Return the distinct pairs by unit numbers in the flattened block."""

        def error(wrong):
            return checks.declaration_error(
                f"{factor}: lateral pairs of block {block!r}",
                f"pairs of different units of {family!r}",
                wrong[:1].tolist(),
            )

        ends = self._ends
        shape = family.shape if self.array.ndim == 3 else (family.size,)
        if ends.shape[2] != len(shape):
            raise error(self.array)
        is_outside = ((ends < 0) | (ends >= shape)).any((1, 2))
        if is_outside.any():
            raise error(self.array[is_outside])
        units = np.ravel_multi_index(tuple(np.moveaxis(ends, -1, 0)), shape)
        is_loop = units[:, 0] == units[:, 1]
        if is_loop.any():
            raise error(units[is_loop])
        first, number = self.distinct
        return units if len(first) == len(number) else units[first]

    @functools.cached_property
    def distinct(
        self,
    ) -> tuple[Integer[np.ndarray, "edges"], Integer[np.ndarray, "pairs"]]:
        """Places of the distinct pairs as they appear, and the number of each declared pair."""
        ends = self._ends - self._ends.min((0, 1), initial=0)
        widths = ends.max((0, 1), initial=0) + 1
        units = (ends * (np.cumprod(widths) // widths)).sum(-1)
        pairs = units.min(1) * widths.prod() + units.max(1)  # exact in 64 bits
        if (pairs[1:] > pairs[:-1]).all():  # tenths of a second faster for a million
            return np.arange(len(pairs)), np.arange(len(pairs))
        _, first, number = np.unique(pairs, return_index=True, return_inverse=True)
        order = np.argsort(first)
        return first[order], np.argsort(order)[number]


class Tuples(HashableArray):
    """Tuples of units as declared, ``(tuples, positions)`` by number or ``(..., axes)``."""

    @classmethod
    def read(cls, name: str, units: Any, num_blocks: int = 1) -> "Tuples":
        """Convert tuples of one block or one unit of each; or the edges of a networkx graph."""
        checks.refuse_mask(name, units, DeclarationError)
        listed = units.edges if isinstance(units, nx.Graph) else units
        try:
            array = np.array(list(listed))
        except (TypeError, ValueError):  # no list, or ragged
            array = np.empty(0, object)
        is_list = array.ndim in (2, 3) and array.size and array.dtype.kind in "iu"
        if not is_list or num_blocks not in (1, np.size(array, 1)):
            raise checks.declaration_error(
                name, "tuples of unit numbers or indices, one unit of each block", units
            )
        return cls.copy(array.astype(np.int64))

    @property
    def pairs(self) -> Integer[np.ndarray, "pairs 2 ..."]:
        """Pairs of units that share a tuple of one block."""
        columns = itertools.combinations(range(self.shape[1]), 2)
        pairs = (self.array[:, pair] for pair in columns)
        return np.concatenate([self.array[:0, :2], *pairs])

    def numbers(self, name: str, scope: Sequence[Family]) -> Numbered:
        """Return the numbers of the units, given the family of all positions or of each.

        :raises DeclarationError: for a unit that a block lacks.
        """
        columns = []
        try:
            places = np.moveaxis(self.array.reshape(*self.shape[:2], -1), 1, 0)
            for family, index in zip(itertools.cycle(scope), places):
                is_index = index.shape[1] == len(family.shape)
                shape = family.shape if is_index else (family.size,)
                columns.append(np.ravel_multi_index(tuple(index.T), shape))
        except ValueError as error:
            expected = f"tuples of units of {scope}"
            raise checks.declaration_error(name, expected, str(error)) from None
        return np.stack(columns, 1)


class Local(Protocol):
    """Contribution of a factor to the natural parameters of one part, cheaper than by autodiff."""

    def prepare(self, params: Any) -> Any:
        """Return what all parts share, a function of the params."""

    def field(self, prepared: Any, statistics_at: StatisticsAt, part: Any) -> Field:
        """Return natural parameters of the units of ``part``."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A block in parts of units that do not interact; ``colors`` is the part of each unit."""

    block: str
    family: Family
    colors: Integer[np.ndarray, "size"]

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return int(self.colors.max()) + 1

    @functools.cached_property
    def units(self) -> tuple[np.ndarray, ...]:
        """Unit numbers of each part."""
        return tuple(positions_by_group(self.colors, self.num_parts))

    @functools.cached_property
    def place(self) -> Integer[np.ndarray, "size"]:
        """Position of each unit in its part."""
        return ranks_in_groups(self.colors)

    @property
    def unrolled(self) -> bool:
        """True if parts are Python ints, so that each keeps its own size."""
        return self.num_parts <= UNROLLED

    @functools.cached_property
    def table(self) -> Integer[np.ndarray, "parts most_units"]:
        """Unit numbers of each part, padded with the size of the block."""
        return self.padded(self.units, self.family.size)

    def padded(self, arrays: Sequence[Numbers], fill: Any) -> np.ndarray:
        """Stack arrays ``(units, ...)``, one per part, to ``(parts, most units, ...)``."""
        most = max(map(len, arrays))
        shape = (len(arrays), most, *np.shape(arrays[0])[1:])
        stacked = np.full(shape, fill, arrays[0].dtype)
        for row, array in zip(stacked, arrays):
            row[: len(array)] = array
        return stacked

    def at(self, part: Any) -> Any:
        """Return the unit numbers of a part, padded unless parts are unrolled."""
        return self.units[part] if self.unrolled else jnp.asarray(self.table)[part]

    def part_family(self, part: Any) -> Family:
        """Return the family of a part."""
        width = len(self.units[part]) if self.unrolled else self.table.shape[1]
        return dataclasses.replace(self.family, shape=(width,))

    def mask(self, part: Any) -> Bool[Array, "units"] | None:
        """Return False at the padding of :meth:`at`; None if there is none."""
        return None if self.unrolled else self.at(part) < self.family.size

    def take(
        self, values: Shaped[Numbers, "size ..."], part: Any
    ) -> Shaped[Array, "units ..."]:
        """Return ``values``, which may be packed, at the units of a part."""
        if isinstance(values, list):
            return values[part]
        return jnp.take(values, self.at(part), axis=0, mode="clip")

    def put(self, values: Any, part: Any, new: Array) -> Any:
        """Return ``values``, ``(size, ...)`` or packed, with ``new`` at a part."""
        if isinstance(values, list):
            new = new.astype(values[part].dtype)
            return [*values[:part], new, *values[part + 1 :]]
        values = jnp.asarray(values)
        new = new.astype(values.dtype)
        if self.unrolled and barrier_pays(new.size):
            # a gather per unit, half the time of a scatter
            is_here = expand(self.colors == part, target=new)
            spread = jnp.take(new, self.place, axis=0, mode="clip")
            return jnp.where(is_here, spread, values)
        # padding is dropped; it repeats one number, so indices are unique only without
        # it
        places = values.at[self.at(part)]
        return places.set(new, mode="drop", unique_indices=self.unrolled)


def part_name(block: str, part: int) -> str:
    """Return the name of a part, as in :attr:`ebmpp.FactorGraph.layers`."""
    return f"{block}[{part}]"
