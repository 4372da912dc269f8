# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factors of products of units of one block: lattices, spin glasses, triangles, clauses."""

from collections.abc import Callable, Iterable
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

from jaxtyping import Float, Integer
import networkx as nx
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    BatchShape,
    Edges,
    Numbers,
    checks,
    expand,
    full_precision,
    ranks_in_groups,
)
from ebmpp.families.family import Families
from ebmpp.graph.factors.factor import Factor, Scope
from ebmpp.graph.factors.lateral import Field, Numbered, Split, StatisticsAt, Tuples
from ebmpp.graph.factors.shifts import Shifted, find_shifts

_DENSE = 0.1  # share of all pairs from which a matrix product is faster than gathering neighbours
_MAX_UNROLLED_SLOTS = 8
_MAX_PADDING = 2.0  # slots of the neighbour table per neighbour


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Pairwise(Factor):
    """``-sum_e w_e <t_i, t_j>`` over pairs e = (i, j) of units of a block, with a weight per pair.

    The units are coloured and the block is drawn part by part, a lattice in two. Spin
    units make an Ising model, Categorical units a Potts model, Gaussian units a Markov
    random field. A Gaussian with learned variance takes part with x only.

    :param block: name of the block.
    :param edges: pairs of units by number in the flattened block or by index, or an
        undirected networkx graph over the units, whose edge attribute ``weight`` gives
        the initial weights. Params follow the order of the pairs, or of ``graph.edges``
        (**not** of the list that the graph was made of). The weights of parallel edges
        add up: a torus of side 2 has two bonds between its neighbours.
    :param shared: use one weight for all pairs, a scalar; repeated pairs count.
    :param init: initial weights, an array or a function of a jax key; by default from
        the scheme of :meth:`ebmpp.FactorGraph.init`.
    :param name: key of its params; ``"block:block"`` by default.
    :raises DeclarationError: for invalid pairs or edge attributes.

    **Example**

    >>> import networkx as nx
    >>> from ebmpp import Bias, FactorGraph, Pairwise, Spin
    >>> lattice = nx.grid_2d_graph(4, 4)
    >>> coupling = Pairwise("x", lattice, shared=True)
    >>> ising = FactorGraph({"x": Spin((4, 4))}, factors=[Bias("x"), coupling])
    >>> ising.layers
    (('x[0]',), ('x[1]',))
    """

    role = "lateral"
    always_affine = True
    is_pairwise = True
    shared: bool = False

    def __init__(
        self,
        block: str,
        edges: Any,
        *,
        shared: bool = False,
        init: Any = None,
        name: str | None = None,
    ) -> None:
        if isinstance(edges, nx.Graph) and init is None:
            init = edge_weights(f"Pairwise({block!r})", edges, shared)
        super().__init__(
            block, energy=_pairwise_energy, init=init, name=name, lateral={block: edges}
        )
        object.__setattr__(self, "shared", bool(shared))

    def _options(self) -> list[str]:
        pairs = f"<{self.lateral[0][1].shape[0]} pairs>"
        return [pairs, "shared=True"] if self.shared else [pairs]

    def evaluate(self, params: Array, *statistics: Array, families: Scope) -> Array:
        family = families[0]
        edges = self.edges({self.blocks[0]: family})[self.blocks[0]]
        units = family.interaction(statistics[0]).reshape(family.size, -1)
        return self.energy(self.pair_weights(params), units, edges)

    def default_name(self, blocks: tuple[str, ...]) -> str:
        return ":".join(2 * blocks)

    def pair_weights(self, params: Float[Array, "*#pairs"]) -> Float[Array, "edges"]:
        first, number = self.lateral[0][1].distinct
        weights = jnp.broadcast_to(params, len(number))
        if len(first) == len(number):
            return weights
        return jax.ops.segment_sum(weights, number, len(first))

    def init_params(self, rng_key: Array, families: Families) -> Array:
        shape = () if self.shared else self.lateral[0][1].shape[:1]
        return self.init_checked(rng_key, jnp.zeros(shape))

    def local(self, families: Families, split: Split) -> "Neighbours":
        edges = self.edges(families)[self.blocks[0]]
        is_even = self.shared and len(edges) == len(self.lateral[0][1].array)
        return Neighbours(self, split, edges, is_even)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Hyperedges(Factor):
    r"""``-sum_e w_e prod_{i in e} t_i`` over tuples e of units of a block, with a weight per tuple.

    Three-body couplings, p-spin models, and the triangles of a random graph whose units
    are its possible edges. Units that share a tuple interact: the block is coloured and
    drawn part by part. A product of one-hot statistics is 1 where all units of a tuple
    agree. Tuples of another length are another ``Hyperedges``; pairs are better a
    :class:`~ebmpp.Pairwise`.

    A clause of K-SAT is violated where all its literals are false. Of Bernoulli units
    this is a product of x for negated literals and 1 - x for others, so not-a or not-b
    or not-c is the tuple (a, b, c) with weight -penalty. A clause with other literals
    multiplies out to a tuple of each subset of these, or is one entry of a
    :class:`~ebmpp.Table`, which may be -inf.

    :func:`ebmpp.perfect_sample` couples Bernoulli and Binomial units from the past where
    the weights are at least 0.

    :param block: name of the block, whose statistics are bounded.
    :param tuples: integers ``(tuples, k)``, numbers of different units in the flattened
        block, or ``(tuples, k, axes)``, indices in a block of several axes.
    :param shared: use one weight for all tuples, a scalar; repeated tuples count.
    :param init: initial weights, an array or a function of a jax key; by default from
        the scheme of :meth:`ebmpp.FactorGraph.init`.
    :param name: key of its params; the block k times by default, as in "x:x:x".
    :raises DeclarationError: for invalid tuples or, on declaration of a graph, units
        that the block lacks or whose statistics are unbounded.

    **Example**

    >>> import itertools, networkx as nx
    >>> from ebmpp import Bernoulli, Bias, FactorGraph, Hyperedges
    >>> dyad = {pair: i for i, pair in enumerate(itertools.combinations(range(5), 2))}
    >>> triangles = [[dyad[p] for p in itertools.combinations(nodes, 2)]
    ...              for nodes in itertools.combinations(range(5), 3)]
    >>> FactorGraph({"x": Bernoulli(10)},
    ...             factors=[Bias("x"), Hyperedges("x", triangles, shared=True)]).factors
    (Bias('x'), Hyperedges('x', <10 tuples of 3>, shared=True))
    """

    tuples: Tuples
    shared: bool

    role = "lateral"
    always_affine = True

    def __init__(
        self,
        block: str,
        tuples: Any,
        *,
        shared: bool = False,
        init: Any = None,
        name: str | None = None,
    ) -> None:
        put = functools.partial(object.__setattr__, self)
        put("tuples", Tuples.read(f"Hyperedges({block!r}): tuples", tuples))
        put("shared", checks.flag("shared", shared))
        pairs = {block: self.tuples.pairs}
        super().__init__(
            block, energy=_product_energy, init=init, name=name, lateral=pairs
        )

    def default_name(self, blocks: tuple[str, ...]) -> str:
        return ":".join(blocks * self.tuples.shape[1])

    def _options(self) -> list[str]:
        count, arity = self.tuples.shape[:2]
        tuples = f"<{count} tuples of {arity}>"
        return [tuples, "shared=True"] if self.shared else [tuples]

    def init_params(self, rng_key: Array, families: Families) -> Array:
        scope = self.scope(families)
        if not np.isfinite(scope[0].statistic_bounds).all():
            raise checks.declaration_error(
                f"{self!r}: statistics", "bounded (others take Pairwise)", scope
            )
        count = len(self.tuples.numbers(f"{self!r}: tuples", scope))
        shape = () if self.shared else (count,)
        return self.init_checked(rng_key, jnp.zeros(shape))

    def evaluate(self, params: Array, *statistics: Array, families: Scope) -> Array:
        (family,) = families
        tuples = self.tuples.numbers("tuples", families)
        units = family.interaction(statistics[0]).reshape(family.size, -1)
        return self.energy(params, [units[column] for column in tuples.T])

    def is_increasing(self, families: Families) -> bool:
        (family,) = self.scope(families)
        return not family.stat_shape and bool(family.statistic_bounds[0] >= 0)

    def local(self, families: Families, split: Split) -> "Products":
        return Products(self, split, self.tuples.numbers("tuples", [split.family]))


def edge_weights(name: str, graph: nx.Graph, shared: bool) -> np.ndarray | None:
    """Return the weights of a graph's edges, None if no edge has one."""
    items = [(edge, weight) for *edge, weight in graph.edges(data="weight")]
    weights = attribute(f"{name}: weight", items)
    if weights is not None and shared:
        raise checks.declaration_error(
            f"{name}: shared", "False where edges have weights", shared
        )
    return weights


def attribute(
    name: str, items: Iterable[tuple[Any, Any]], shape: BatchShape = ()
) -> Float[np.ndarray, "items ..."] | None:
    """Stack an attribute, given by node or edge, None if no item has it."""
    items = list(items)
    if all(value is None for _, value in items):
        return None
    rows = []
    for item, value in items:
        try:
            row = np.asarray(value, float).reshape(shape)
        except (TypeError, ValueError):
            row = None
        if value is None or row is None:
            raise checks.declaration_error(
                f"{name} of {item!r}",
                f"a number, or numbers of shape {shape}, where others have one",
                value,
            )
        rows.append(row)
    return np.array(rows)


def is_dense(size: int, edges: np.ndarray) -> bool:
    """Return True if so many pairs interact that a matrix product is faster than gathers."""
    return len(edges) > _DENSE * size * (size - 1) / 2


def _matrix(weights: Array, edges: np.ndarray, size: int) -> Array:
    # In bounds: checking two million indices cost XLA eight seconds when it compiled
    # the gradient.
    at = jnp.zeros((size, size), weights.dtype).at[tuple(edges.T)]
    return at.set(weights, mode="promise_in_bounds", unique_indices=True)


def _pairwise_energy(weights: Array, units: Array, edges: np.ndarray) -> Array:
    if is_dense(len(units), edges):
        return -jnp.vdot(units, _matrix(weights, edges, len(units)) @ units)
    first, second = edges.T
    return -jnp.vdot(weights, (units[first] * units[second]).sum(-1))


def _product_energy(weights: Array, units: list[Array]) -> Array:
    return -(weights * functools.reduce(operator.mul, units).sum(-1)).sum()


class Adjacency(NamedTuple):
    """Neighbours of units: a table of a few slots per unit, and a list of further ones."""

    other: Integer[Numbers, "units slots"]
    """Number of the neighbour."""
    pair: Integer[Numbers, "units slots"]
    """Number of the pair; the number of pairs in empty slots."""
    to: Integer[Numbers, "more"]
    """Listed neighbours: position of the unit in its part."""
    more_other: Integer[Numbers, "more"]
    more_pair: Integer[Numbers, "more"]


def table(size: int, edges: Edges) -> Adjacency:
    """Return the neighbours of all units of a block, whose position is their number."""
    unit, other = np.concatenate([edges, edges[:, ::-1]]).T
    return tabulate(size, unit, other, np.tile(np.arange(len(edges)), 2), len(edges))


def tabulate(
    size: int, unit: np.ndarray, other: np.ndarray, pair: np.ndarray, empty: int
) -> Adjacency:
    """Return a list of neighbours as a table; ``empty`` is the pair of empty slots."""
    order = np.lexsort((other, unit))
    unit, other, pair = (a[order] for a in (unit, other, pair))
    rank = ranks_in_groups(unit)
    most = int(rank.max(initial=-1)) + 1
    mean = len(unit) / size
    # not so many that most of the table would be padding
    is_even = most <= _MAX_PADDING * mean + 4
    slots = most if is_even else max(1, round(_MAX_PADDING * mean))
    others = np.zeros((size, slots), np.int64)
    pairs = np.full((size, slots), empty)
    inside = rank < slots
    others[unit[inside], rank[inside]] = other[inside]
    pairs[unit[inside], rank[inside]] = pair[inside]
    return Adjacency(others, pairs, unit[~inside], other[~inside], pair[~inside])


@dataclasses.dataclass(frozen=True, eq=False)
class Neighbours:
    """The :class:`~ebmpp.graph.factors.lateral.Local` of a :class:`Pairwise` factor.

    Autodiff over the whole block gives the same values by scatters: a sweep of a 64x64
    torus then takes 50 times as long, and one of a complete graph of 128 units 22 times
    (100 chains).
    """

    factor: Factor
    split: Split
    edges: np.ndarray
    shared: bool = False
    """True if all pairs have one weight."""

    @functools.cached_property
    def dense(self) -> bool:
        """True if a matrix product is faster than gathering neighbours."""
        return is_dense(self.split.family.size, self.edges)

    @functools.cached_property
    def shifted(self) -> Shifted | None:
        """Slices of packed parts in place of gathers; None where these do not pay."""
        return None if self.dense else find_shifts(self.split, self.edges, self.shared)

    def prepare(self, params: Array) -> Array:
        """Return the arranged weights of the pairs."""
        return self.arrange(self.factor.pair_weights(params))

    def arrange(self, weights: Array) -> Array:
        """Return a symmetric matrix of weights, or one weight per pair and a final 0."""
        if self.dense:
            upper = _matrix(weights, self.edges, self.split.family.size)
            return upper + upper.T
        return jnp.append(weights, jnp.zeros((), weights.dtype))

    @full_precision
    def field(self, prepared: Array, statistics_at: StatisticsAt, part: Any) -> Field:
        """Return natural parameters of the units of ``part``."""
        family = self.split.family
        read = functools.partial(self._read, statistics_at)
        if self.dense:
            weights = self.split.take(prepared, part)
            total = jnp.tensordot(weights, read(np.arange(family.size)), 1)
        else:
            table = self._table_of(part)
            total = _weighted_sum(prepared, table, read)
            if table.to.shape[-1]:
                units = read(table.more_other)
                terms = expand(prepared[table.more_pair], target=units) * units
                total = total.at[table.to].add(terms, mode="drop")
        extra = len(family.interaction_shape) - len(family.shape)
        shape = total.shape[: total.ndim - extra] + family.stat_shape
        # 0 for statistics that do not interact
        _, pullback = jax.vjp(family.interaction, jnp.zeros(shape, total.dtype))
        return pullback(total)[0]

    def _read(self, statistics_at: StatisticsAt, numbers: Any) -> Array:
        return self.split.family.interaction(statistics_at(numbers))

    def _table_of(self, part: int | Array) -> Adjacency:
        if self.split.unrolled:
            return self._tables[part]
        return jax.tree.map(lambda a: jnp.asarray(a)[part], self._stacked)

    @functools.cached_property
    def _stacked(self) -> Adjacency:
        """The tables of all parts, padded to one shape and stacked."""
        slots = max(t.other.shape[1] for t in self._tables)
        empty = len(self.edges)

        def widen(a, fill):
            return np.pad(a, [(0, 0), (0, slots - a.shape[1])], constant_values=fill)

        wide = [
            t._replace(other=widen(t.other, 0), pair=widen(t.pair, empty))
            for t in self._tables
        ]
        fills = (0, empty, self.split.table.shape[1], 0, empty)
        return Adjacency(*map(self.split.padded, zip(*wide), fills))

    def _list(self) -> Adjacency:
        return table(self.split.family.size, self.edges)

    @functools.cached_property
    def _tables(self) -> list[Adjacency]:
        block = self._list()
        place = self.split.place
        tables = []
        for number, units in enumerate(self.split.units):
            is_more = self.split.colors[block.to] == number
            tables.append(
                Adjacency(
                    block.other[units],
                    block.pair[units],
                    place[block.to[is_more]],
                    block.more_other[is_more],
                    block.more_pair[is_more],
                )
            )
        return tables


@dataclasses.dataclass(frozen=True, eq=False)
class Products(Neighbours):
    """The :class:`~ebmpp.graph.factors.lateral.Local` of :class:`Hyperedges`.

    The other units of a tuple act as one neighbour, whose statistic is their product;
    ``edges`` are the tuples.
    """

    dense = False
    shifted = None

    def prepare(self, params: Array) -> Array:
        return self.arrange(jnp.broadcast_to(params, len(self.edges)))

    @functools.cached_property
    def _others(self) -> Numbered:
        """Units of the neighbours, ``(k - 1, neighbours)``, which omit the first place first."""
        tuples = self.edges
        others = [np.delete(tuples, place, 1) for place in range(tuples.shape[1])]
        return np.concatenate(others).T

    def _list(self) -> Adjacency:
        count = len(self.edges)
        other = np.arange(self.edges.size)
        size = self.split.family.size
        return tabulate(size, self.edges.T.ravel(), other, other % count, count)

    def _read(self, statistics_at: StatisticsAt, numbers: Any) -> Array:
        others = jnp.asarray(self._others)[:, numbers]
        units = map(functools.partial(super()._read, statistics_at), others)
        return functools.reduce(operator.mul, units)


def _weighted_sum(
    weights: Array, table: Adjacency, read: Callable[[Any], Array]
) -> Array:
    """Sum weights times neighbours over the slots.

    Few slots are unrolled: XLA fuses them into one loop, in a fifth of the time of a
    product for each unit.
    """
    if table.other.shape[1] > _MAX_UNROLLED_SLOTS:
        return jnp.einsum("ud,ud...->u...", weights[table.pair], read(table.other))
    total: Any = 0.0
    for other, pair in zip(table.other.T, table.pair.T):
        units = read(other)
        total = total + expand(weights[pair], target=units) * units
    return total
