# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The factor of listed log weights: conditional probability tables, clauses, evidence."""

import dataclasses
import functools
import itertools
from typing import Any

from jaxtyping import Float, Integer
import networkx as nx
import numpy as np

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import (
    HashableArray,
    Natural,
    checks,
    full_precision,
    ranks_in_groups,
)
from ebmpp.errors import DeclarationError
from ebmpp.families.family import Families, Family
from ebmpp.graph.factors.evaluation import Values, values_of
from ebmpp.graph.factors.factor import Factor, FactorParams, Scope
from ebmpp.graph.factors.lateral import Field, Split, StatisticsAt
from ebmpp.graph.factors.zeros import unwrap

#: Numbers of units, one row per tuple.
Tuples = Integer[np.ndarray, "tuples positions"]
#: Log weights with an axis of values per position; one table may stand for all.
Tables = Float[Array, "#tuples ..."]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Table(Factor):
    """``-sum_j w_j[values of tuple j]`` over tuples of units: a log weight per joint value.

    Colourings, clauses, conditional probability tables and evidence are tables. A log
    weight of -inf makes a joint value **impossible**. Such an entry is part of the
    declaration: its param is 0 and without effect.

    Values are counted in the order of the family: 0 and 1 for Bernoulli, -1 and +1 for
    Spin, 0 to K - 1 for Categorical units.

    :param blocks: names of the blocks. Several blocks are joined unit by unit, and a
        block of one unit with all units of the others.
    :param units: tuples of units, one row each, by number in the flattened block or by
        index in a block of several axes: of any number of units of a single block, or
        of one unit of each block. The edges of a networkx graph over units are pairs.
    :param log_weights: initial log weights, with an axis of values for each unit of a
        tuple. One table is shared by all tuples; with a leading axis of tuples each has
        its own. Default: a table of zeros for each.
    :param name: key of its params; the blocks joined by ":", then ":table", by default.
    :raises DeclarationError: for invalid units or log weights, or (on declaration of a
        graph) blocks other than Bernoulli, Spin and Categorical.

    **Example**

    >>> import jax, numpy as np, ebmpp
    >>> from ebmpp import Bernoulli, FactorGraph, Table
    >>> rain = Table("rain", log_weights=np.log([0.8, 0.2]))
    >>> wet = Table("rain", "wet", log_weights=[[0.0, -np.inf], [np.log(0.1), np.log(0.9)]])
    >>> graph = FactorGraph({"rain": Bernoulli(1), "wet": Bernoulli(1)}, factors=[rain, wet])
    >>> params = graph.init(jax.random.key(0))
    >>> print(ebmpp.exact.moments(graph, params)["wet"])
    [0.18]
    """

    units: HashableArray | None

    always_affine = True
    init_name = "log_weights"

    def __init__(
        self,
        *blocks: str,
        units: Any = None,
        log_weights: ArrayLike | None = None,
        name: str | None = None,
    ) -> None:
        who = f"Table{blocks}:"
        arity = len(blocks)
        lateral = {}
        if units is not None:
            units = _read_units(f"{who} units", units, arity)
            if arity == 1:
                arity = units.shape[1]
                pairs = itertools.combinations(range(arity), 2)
                listed = [units[:, pair] for pair in pairs]
                lateral = {blocks[0]: np.concatenate(listed)} if listed else {}
        if log_weights is not None:
            log_weights = _read_weights(f"{who} log_weights", log_weights, arity)
        super().__init__(
            *blocks, energy=_energy, init=log_weights, name=name, lateral=lateral
        )
        stored = None if units is None else HashableArray.copy(units)
        object.__setattr__(self, "units", stored)

    @classmethod
    def default_name(cls, blocks: tuple[str, ...]) -> str:
        return ":".join((*blocks, "table"))

    def _options(self) -> list[str]:
        return [] if self.units is None else [f"units=<{self.units.shape[0]} tuples>"]

    @functools.cached_property
    def zeros(self) -> np.ndarray:
        """Mask of the impossible entries of the log weights."""
        return np.isneginf(0.0 if self.init is None else self.init.unflatten())

    @property
    def has_zeros(self) -> bool:
        return bool(self.zeros.any())

    @property
    def shared(self) -> bool:
        """True if one table stands for all tuples."""
        return self.init is not None and self.zeros.ndim == len(self.positions)

    @property
    def positions(self) -> tuple[str, ...]:
        """Block of each unit of a tuple."""
        if self.units is None or len(self.blocks) > 1:
            return self.blocks
        return self.blocks * self.units.shape[1]

    def tuples(self, families: Families) -> Tuples:
        """Return the numbers of the units of each tuple.

        :raises DeclarationError: for a unit that a block lacks, or blocks that cannot
            be joined unit by unit.
        """
        scope = [families[b] for b in self.positions]

        def numbers(family, index):
            is_index = index.shape[1] == len(family.shape)
            shape = family.shape if is_index else (family.size,)
            return np.ravel_multi_index(tuple(index.T), shape)

        try:
            if self.units is None:
                columns = np.broadcast_arrays(*(np.arange(f.size) for f in scope))
            else:
                indices = np.moveaxis(self.units.array, 1, 0)
                columns = list(map(numbers, scope, indices))
        except ValueError as error:
            raise checks.declaration_error(
                f"{self!r}: units", f"tuples of units of {scope}", str(error)
            ) from None
        return np.stack(columns, 1)

    def init_params(self, rng_key: Array, families: Families) -> Array:
        shape = [] if self.shared else [len(self.tuples(families))]
        for block in self.positions:
            values = values_of(families[block])
            if values is None:
                raise checks.declaration_error(
                    f"{self!r}: block {block!r}",
                    "Bernoulli, Spin or Categorical, which have any distribution over "
                    "their values",
                    families[block],
                )
            shape.append(len(values.statistics))
        weights = self.init_checked(rng_key, jnp.zeros(tuple(shape)))
        return self.effective_params(weights)

    def effective_params(self, params: FactorParams) -> Array:
        return jnp.where(self.zeros, 0, params) if self.has_zeros else params

    def tables(self, params: FactorParams) -> Tables:
        """Return the log weights with a leading axis of tuples, and barriers at zeros."""
        weights, height = unwrap(params)
        weights = jnp.where(self.zeros, -height, weights)
        return weights[None] if self.shared else weights

    def evaluate(
        self, params: FactorParams, *statistics: Array, families: Scope
    ) -> Array:
        tuples = self.tuples(dict(zip(self.blocks, families)))
        shares = dict(zip(self.blocks, map(_shares, families, statistics)))
        units = [shares[b][column] for b, column in zip(self.positions, tuples.T)]
        return self.energy(self.tables(params), units)

    def local(self, families: Families, split: Split) -> "Lookups | None":
        if len(self.blocks) > 1:
            return None
        return Lookups(self, split, self.tuples(families))


def _read_units(
    name: str, units: Any, num_blocks: int
) -> Integer[np.ndarray, "tuples positions axes"]:
    """Convert tuples of numbers or indices, or the edges of a networkx graph."""
    checks.refuse_mask(name, units, DeclarationError)
    listed = units.edges if isinstance(units, nx.Graph) else units
    try:
        array = np.array(list(listed))
    except (TypeError, ValueError):  # no list, or ragged
        array = np.empty(0, object)
    if array.ndim == 2:
        array = array[..., None]
    is_list = array.ndim == 3 and array.size and array.dtype.kind in "iu"
    if not is_list or num_blocks not in (1, np.size(array, 1)):
        raise checks.declaration_error(
            name, "tuples of unit numbers or indices, one unit of each block", units
        )
    return array.astype(np.int64)


def _read_weights(name: str, values: ArrayLike, arity: int) -> np.ndarray:
    array = np.asarray(checks.numbers(name, values, DeclarationError), float)
    if array.ndim not in (arity, arity + 1) or not (array < np.inf).all():
        raise checks.declaration_error(
            name, f"finite or -inf, with {arity} axes or one more of tuples", array
        )
    return array


def _shares(family: Family, statistics: Natural) -> Float[Array, "units values"]:
    """Return 1 at the value of each unit and 0 at others, affine in the statistics."""
    t = statistics.reshape(family.size, -1)
    if family.stat_shape:
        return t
    low, high = family.statistic_bounds
    share = (t - low) / (high - low)
    return jnp.concatenate([1 - share, share], 1)


def _energy(tables: Tables, units: list[Float[Array, "tuples values"]]) -> Array:
    for share in reversed(units):  # of the last position first
        axes = (len(share), *[1] * (tables.ndim - 2), share.shape[1])
        tables = (tables * share.reshape(axes)).sum(-1)
    return -tables.sum()


@dataclasses.dataclass(frozen=True, eq=False)
class Lookups:
    """The :class:`~ebmpp.graph.factors.lateral.Local` of a :class:`Table` over one block.

    The values of the other units of a tuple count rows of a table. A sweep of a 32x32
    lattice of three colours takes less time than that of a Pairwise factor.
    """

    factor: Table
    split: Split
    tuples: Tuples

    @full_precision
    def prepare(self, params: FactorParams) -> Natural:
        """Return the natural parameters of a unit at each position; the last row is 0."""
        tables = self.factor.tables(params)
        family = self.split.family
        solve = jnp.asarray(self._values.solve.T, tables.dtype)
        shape = (-1, *family.stat_shape)
        axes = range(1, tables.ndim)
        rows = [(jnp.moveaxis(tables, i, -1) @ solve).reshape(shape) for i in axes]
        return jnp.concatenate([*rows, jnp.zeros((1, *family.stat_shape))])

    def field(self, prepared: Natural, statistics_at: StatisticsAt, part: Any) -> Field:
        """Return natural parameters of the units of ``part``."""
        family = self.split.family
        t = statistics_at(np.arange(family.size))
        low, high = family.statistic_bounds
        values = t.argmax(-1) if family.stat_shape else 2 * t > low + high
        values = values.astype(jnp.int32)
        units = self.split.at(part)
        start, other = (jnp.asarray(a)[units] for a in self._slots)
        num_values = len(self._values.statistics)
        counts: Any = 0
        for position in range(other.shape[-1]):
            counts = num_values * counts + values[other[..., position]]
        rows = jnp.take(prepared, start[..., None] + counts, axis=0, mode="clip")
        return rows.sum(1)

    @property
    def _values(self) -> Values:
        values = values_of(self.split.family)
        assert values is not None  # checked with the initial params
        return values

    @functools.cached_property
    def _slots(self) -> tuple[np.ndarray, np.ndarray]:
        """First rows of the tables of each unit, and the other units of their tuples.

        A last unit stands for padding; empty slots start at the last row.
        """
        count, arity = self.tuples.shape
        unit = self.tuples.ravel()
        number, place = np.divmod(np.arange(len(unit)), arity)
        if self.factor.shared:
            number = 0 * number
            count = 1
        height = len(self._values.statistics) ** (arity - 1)
        rank = ranks_in_groups(unit)
        shape = (self.split.family.size + 1, rank.max() + 1)
        start = np.full(shape, arity * count * height)
        start[unit, rank] = (place * count + number) * height
        other = np.zeros((*shape, arity - 1), np.int64)
        others = [np.delete(self.tuples, i, 1) for i in range(arity)]
        other[unit, rank] = np.stack(others, 1).reshape(len(unit), -1)
        return start, other
