# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factors of listed log weights: conditional probability tables, clauses, Potts models."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Float
import numpy as np

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import (
    Natural,
    checks,
    full_precision,
    ranks_in_groups,
)
from ebmpp.errors import DeclarationError
from ebmpp.families.family import Families, Family
from ebmpp.graph.factors.evaluation import Values, values_of
from ebmpp.graph.factors.factor import Factor, FactorParams, Scope
from ebmpp.graph.factors.lateral import (
    Field,
    Numbered,
    Split,
    StatisticsAt,
    Tuples,
)
from ebmpp.graph.factors.pairwise import is_dense
from ebmpp.graph.factors.zeros import unwrap

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

    units: Tuples | None

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
            units = Tuples.read(f"{who} units", units, arity)
            if arity == 1:
                arity = units.shape[1]
                lateral = {blocks[0]: units.pairs}
        if log_weights is not None:
            log_weights = _read_weights(f"{who} log_weights", log_weights, arity)
        super().__init__(
            *blocks, energy=_energy, init=log_weights, name=name, lateral=lateral
        )
        object.__setattr__(self, "units", units)

    def default_name(self, blocks: tuple[str, ...]) -> str:
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

    def tuples(self, families: Families) -> Numbered:
        """Return the numbers of the units of each tuple.

        :raises DeclarationError: for a unit that a block lacks, or blocks that cannot
            be joined unit by unit.
        """
        scope = self.scope(families)
        name = f"{self!r}: units"
        if self.units is not None:
            return self.units.numbers(name, scope)
        sizes = {family.size for family in scope}
        if len(sizes - {1}) > 1:
            expected = "tuples of units where blocks differ in size"
            raise checks.declaration_error(name, expected, scope)
        columns = np.broadcast_arrays(*(np.arange(f.size) for f in scope))
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
        by_block = dict(zip(self.blocks, map(_shares, families, statistics)))
        units = [by_block[b][column] for b, column in zip(self.positions, tuples.T)]
        return self.energy(self.tables(params), units)

    def local(self, families: Families, split: Split) -> "Lookups | None":
        if len(self.blocks) > 1:
            return None
        return Lookups(self, split, self.tuples(families))


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Coupling(Table):
    r"""``-sum_e t_i^T J_e t_j`` over pairs e = (i, j) of Categorical units, a matrix per pair.

    The Potts model of direct coupling analysis, whose categories are the amino acids of
    a site. It is a :class:`~ebmpp.Table` of pairs whose gradient takes a matrix product.
    ``J_e[a, b]`` is the log weight of category a at the first unit and b at the second;
    of Bernoulli and Spin units, of their two values in order.

    Sums over rows or columns of a matrix act like biases, so params are determined up
    to a gauge: see :func:`ebmpp.graph.zero_sum_gauge`.

    :param block: name of the block.
    :param edges: pairs of units by number in the flattened block or by index, or a
        networkx graph over the units. Each listed pair has its own matrix.
    :param init: initial matrices ``(pairs, K, K)``; 0 by default. A single one
        ``(K, K)`` is shared by all pairs, and -inf makes a pair of values impossible.
    :param name: key of its params; ``"block:block"`` by default.
    :raises DeclarationError: for invalid pairs or matrices, or (on declaration of a
        graph) a block other than Bernoulli, Spin and Categorical.

    **References**

    1. Morcos et al. (2011), *Direct-coupling analysis of residue coevolution captures
       native contacts across many protein families*, equation 1.

    **Example**

    >>> import jax
    >>> from ebmpp import Bias, Categorical, Coupling, FactorGraph
    >>> potts = FactorGraph({"s": Categorical(4, 21)},
    ...                     factors=[Bias("s"), Coupling("s", [(0, 1), (0, 2), (1, 3)])])
    >>> potts.init(jax.random.key(0))["s:s"].shape
    (3, 21, 21)
    """

    is_pairwise = True
    always_affine = True
    init_name = "init"

    def __init__(
        self,
        block: str,
        edges: Any,
        *,
        init: ArrayLike | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(block, units=edges, log_weights=init, name=name)
        if len(self.positions) != 2:
            raise checks.declaration_error(
                f"Coupling({block!r}): edges", "pairs", edges
            )

    def default_name(self, blocks: tuple[str, ...]) -> str:
        return ":".join(2 * blocks)

    def _options(self) -> list[str]:
        return [f"<{self.lateral[0][1].shape[0]} pairs>"]

    def evaluate(
        self, params: FactorParams, *statistics: Array, families: Scope
    ) -> Array:
        edges = self.tuples(dict(zip(self.blocks, families)))
        tables = self.tables(params)
        units = _shares(families[0], statistics[0])
        first, second = edges.T
        if is_dense(len(units), edges):
            # a fifth of the time of a product per pair, for the gradient of 50 sites
            shape = 2 * units.shape[:1] + tables.shape[1:]
            matrix = jnp.zeros(shape, tables.dtype).at[first, second].add(tables)
            return -jnp.einsum("ijab,ia,jb", matrix, units, units)
        fields = (units[first, None] @ tables)[:, 0]
        return -(fields * units[second]).sum()


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
    tuples: Numbered

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
