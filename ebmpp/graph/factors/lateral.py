# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units of one block that interact: the pairs as they are declared, and the parts whose units do not.

The units of a part do not interact, so they are drawn together, given those of the other parts. A part's
arrays have the units first and the rows last: a neighbour's values are then contiguous, and a sweep of a
64x64 lattice takes a fifth of the time that it takes with the rows first (100 chains, two cores).
"""

from collections.abc import Callable, Iterable
import dataclasses
import functools
from typing import Any, Protocol, Self

from jaxtyping import Bool, Float, Integer, Shaped
import networkx as nx
import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core.loops import pays
from ebmpp.core.types import Numbers
from ebmpp.errors import DeclarationError
from ebmpp.families.family import Family

#: So many parts are unrolled; 128 of them would compile for half a minute.
UNROLLED = 4

#: Statistics of some units of the block, by their numbers: ``(*numbers, rows, *stat_shape)``.
StatisticsAt = Callable[[Any], Array]


def check_network(what: str, graph: nx.Graph) -> None:
    """That a networkx graph has one undirected edge a pair: an energy has no directions.

    :raises DeclarationError: for another.
    """
    if graph.is_directed():
        raise DeclarationError(
            f"{what}: {graph} is directed, and the energy of a pair of units has no direction; give "
            "graph.to_undirected()"
        )
    if graph.is_multigraph():
        raise DeclarationError(f"{what}: {graph} may have parallel edges; give networkx.Graph(graph)")


@dataclasses.dataclass(frozen=True)
class Constant:
    """An array that compares and hashes by value, so that a declaration can hold it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    data: bytes = dataclasses.field(repr=False)

    @classmethod
    def of(cls, array: Any) -> Self:
        """The array as it is now."""
        made = np.asarray(array)
        return cls(made.shape, made.dtype, made.tobytes())

    @property
    def array(self) -> np.ndarray:
        """The array."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Pairs(Constant):
    """Pairs of units of one block, as they were given: by number, or by index."""

    @classmethod
    def read(cls, block: str, given: Any) -> "Pairs":
        """Pairs from a networkx graph over the units, or an array or list of them.

        :raises DeclarationError: for what is neither, and for a graph that is directed or has parallel edges.
        """
        if isinstance(given, Pairs):
            return given
        if isinstance(given, nx.Graph):
            check_network(f"the lateral pairs of block {block!r}", given)
            given = list(given.edges())
        wanted = (
            f"the lateral pairs of block {block!r} are pairs of units (numbers, or indices such as (3, 5) in "
            "a block of two axes), or a networkx graph whose nodes are units"
        )
        try:
            array = np.asarray(given)
        except ValueError as error:
            raise DeclarationError(f"{wanted}: {error}") from None
        if array.shape == (0,):  # an empty list has no such shape or type
            array = np.empty((0, 2), np.int64)
        if array.ndim not in (2, 3) or array.shape[1] != 2 or array.dtype.kind not in "iu":
            raise DeclarationError(f"{wanted}; got an array of shape {array.shape} and type {array.dtype}")
        return cls.of(array.astype(np.int64))

    @functools.lru_cache(maxsize=64)
    def edges(self, factor: str, block: str, family: Family) -> Integer[np.ndarray, "edges 2"]:
        """Units by their numbers in the flattened block.

        :raises DeclarationError: for a unit that the block does not have, a pair of one unit, or one twice.
        """
        array, shape = self.array, family.shape
        if array.ndim == 3 and array.shape[2] != len(shape):
            raise DeclarationError(
                f"{factor}: units are given by {array.shape[2]} indices, and block {block!r} has shape "
                f"{shape}"
            )
        limit = np.asarray(shape if array.ndim == 3 else family.size)
        outside = (array < 0) | (array >= limit)
        if outside.any():
            wrong = array[np.argwhere(outside)[0, 0]].tolist()
            raise DeclarationError(
                f"{factor}: pair {wrong} names a unit that block {block!r} ({family!r}) does not have"
            )
        flat = np.ravel_multi_index(tuple(np.moveaxis(array, -1, 0)), shape) if array.ndim == 3 else array
        _check_simple(factor, block, flat)
        return flat


def _check_simple(factor: str, block: str, edges: np.ndarray) -> None:
    loops = edges[edges[:, 0] == edges[:, 1]]
    if len(loops):
        raise DeclarationError(
            f"{factor}: unit {int(loops[0, 0])} of block {block!r} is joined to itself; what a unit has on "
            f"its own belongs in Bias({block!r})"
        )
    low, high = np.minimum(*edges.T), np.maximum(*edges.T)
    number = low * (high.max(initial=0) + 1) + high  # of each pair; exact in 64 bits
    if (number[1:] > number[:-1]).all():
        return
    number = np.sort(number)
    again = np.flatnonzero(number[1:] == number[:-1])
    if len(again):
        a, b = divmod(int(number[again[0]]), int(high.max()) + 1)
        raise DeclarationError(
            f"{factor}: units {a} and {b} of block {block!r} are joined twice; once is enough"
        )


def each_part(count: int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """``step(part, carry)`` for every part, in order; parts are numbers of Python where they are few."""
    if count > UNROLLED:
        return lax.fori_loop(0, count, step, carry)
    for part in range(count):
        carry = step(part, carry)
    return carry


class Local(Protocol):
    """What a factor adds to the natural parameters of a part, quicker than by autodiff over the block."""

    def prepare(self, params: Any) -> Any:
        """What all parts have in common; depends on the params alone."""

    def field(self, prepared: Any, at: StatisticsAt, part: Any) -> Float[Array, "units rows ..."]:
        """Natural parameters of the units of ``part``."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A block whose units interact, in parts whose units do not.

    :param block: its name.
    :param family: its family.
    :param colors: the part of each unit.
    """

    block: str
    family: Family
    colors: Integer[np.ndarray, "size"]

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return int(self.colors.max()) + 1

    @functools.cached_property
    def units(self) -> tuple[np.ndarray, ...]:
        """The units of each part, by their numbers."""
        order = np.argsort(self.colors, kind="stable")
        return tuple(np.split(order, np.cumsum(np.bincount(self.colors))[:-1]))

    @functools.cached_property
    def place(self) -> Integer[np.ndarray, "size"]:
        """The place of each unit in its part."""
        place = np.zeros(self.family.size, np.int64)
        for units in self.units:
            place[units] = np.arange(len(units))
        return place

    @property
    def unrolled(self) -> bool:
        """Whether parts are counted in Python, so that each has its own size."""
        return self.num_parts <= UNROLLED

    @functools.cached_property
    def table(self) -> Integer[np.ndarray, "parts most_units"]:
        """The units of each part; past a part's end the size of the block."""
        return self.padded([u[:, None] for u in self.units], self.family.size)[..., 0]

    def padded(self, each: Iterable[Numbers], fill: Any) -> np.ndarray:
        """One array of a row a part, ``(parts, most units, ...)``, from arrays ``(units, ...)``."""
        each = list(each)
        most = max(map(len, each))
        fit = lambda a: np.pad(a, [(0, most - len(a)), *[(0, 0)] * (a.ndim - 1)], constant_values=fill)
        return np.stack([fit(a) for a in each])

    def at(self, part: Any) -> Any:
        """The units of a part: as many as it has where parts are unrolled, else as the largest has."""
        return self.units[part] if self.unrolled else jnp.asarray(self.table)[part]

    def part_family(self, part: Any) -> Family:
        """The family of a part."""
        width = len(self.units[part]) if self.unrolled else self.table.shape[1]
        return dataclasses.replace(self.family, shape=(width,))

    def real(self, part: Any) -> Bool[Array, "units"] | None:
        """Which of the units of :meth:`at` there are; None for all."""
        return None if self.unrolled else jnp.asarray(self.table)[part] < self.family.size

    def take(self, values: Shaped[Numbers, "size ..."], part: Any) -> Shaped[Array, "units ..."]:
        """``values`` of a part's units."""
        return jnp.take(values, self.at(part), axis=0, mode="clip")

    def put(
        self, values: Shaped[Numbers, "size *rest"], part: Any, new: Shaped[Array, "units *rest"]
    ) -> Shaped[Array, "size *rest"]:
        """``values`` with ``new`` at a part's units."""
        new = new.astype(values.dtype)
        if self.unrolled and pays(new.size):  # a look-up for each unit, half the time of a scatter
            here = (self.colors == part).reshape(-1, *(1,) * (new.ndim - 1))
            return jnp.where(here, jnp.take(new, self.place, axis=0, mode="clip"), jnp.asarray(values))
        # units past the end are dropped; they are all the same number, so indices are unique only without
        return jnp.asarray(values).at[self.at(part)].set(new, mode="drop", unique_indices=self.unrolled)

    def each(self, step: Callable[[Any, Any], Any], carry: Any) -> Any:
        """``step(part, carry)`` for every part, in order."""
        return each_part(self.num_parts, step, carry)


def part_name(block: str, part: int) -> str:
    """The name of a part, as in :attr:`ebmpp.FactorGraph.layers`."""
    return f"{block}[{part}]"
