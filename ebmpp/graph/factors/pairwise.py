# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The factor that joins units of one block: lattices, lateral weights, spin glasses."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any, NamedTuple

from jaxtyping import Float, Integer
import networkx as nx
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Numbers, checks
from ebmpp.core.precision import full_precision
from ebmpp.errors import DeclarationError
from ebmpp.families import Family
from ebmpp.graph.factors.factor import Factor
from ebmpp.graph.factors.lateral import Split, StatisticsAt

_DENSE = 0.1  # share of all pairs from which a matrix product is faster than looking neighbours up
_ONE_BY_ONE = 8  # slots
_WASTE = 2.0  # slots of the neighbour table over the neighbours that there are


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Pairwise(Factor):
    """``-sum_e w_e <t_i, t_j>`` over pairs e = (i, j) of units of one block; ``w`` has one entry a pair.

    The units are coloured, and the block is drawn part by part: a lattice in two. For Spin units it is the
    Ising model, for Categorical ones the Potts model, for Gaussian ones a Markov random field. A Gaussian of
    learned variance takes part with x alone.

    :param block: the block's name.
    :param edges: pairs of units, by their numbers in the flattened block or by their indices; or a networkx
        graph over the units, undirected and of one edge a pair, whose ``weight`` is where the weights start.
    :param shared: one weight for all pairs; ``w`` is then a scalar.
    :param init: where the weights start, an array or a function of a jax key; zeros, or what the scheme of
        :meth:`ebmpp.FactorGraph.init` says, unless given.
    :param name: the key of its params; ``"block:block"`` unless given.
    :raises DeclarationError: for what are not pairs of units.

    **Example**

    >>> import networkx as nx
    >>> from ebmpp import Bias, FactorGraph, Pairwise, Spin
    >>> lattice = nx.grid_2d_graph(4, 4)
    >>> ising = FactorGraph({"x": Spin((4, 4))}, factors=[Bias("x"), Pairwise("x", lattice, shared=True)])
    >>> ising.layers
    (('x[0]',), ('x[1]',))
    """

    role = "lateral"
    shared: bool = False

    def __init__(
        self, block: str, edges: Any, *, shared: bool = False, init: Any = None, name: str | None = None
    ) -> None:
        name = f"{block}:{block}" if name is None else name
        if isinstance(edges, nx.Graph) and init is None:
            init = edge_weights(f"Pairwise({block!r})", edges, shared)
        super().__init__(block, energy=_pairwise_energy, init=init, name=name, lateral={block: edges})
        object.__setattr__(self, "shared", bool(shared))

    def __repr__(self) -> str:
        block, pairs = self.lateral[0]
        shared = ", shared=True" if self.shared else ""
        named = "" if self.name == f"{block}:{block}" else f", name={self.name!r}"
        return f"Pairwise({block!r}, <{pairs.shape[0]} pairs>{shared}{named})"

    def name_over(self, blocks: tuple[str, ...]) -> str:
        return f"{blocks[0]}:{blocks[0]}"

    def evaluate(self, params: Array, *statistics: Array, families: tuple[Family, ...]) -> Array:
        family = families[0]
        edges = self.edges({self.blocks[0]: family})[self.blocks[0]]
        each = family.interaction(statistics[0]).reshape(family.size, -1)
        return self.energy(self.weights(params), each, edges)

    def weights(self, params: Float[Array, "*#pairs"]) -> Float[Array, "pairs"]:
        """One weight a pair."""
        return jnp.broadcast_to(params, self.lateral[0][1].shape[0])

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Array:
        shape = () if self.shared else (self.lateral[0][1].shape[0],)
        if self.init is None:
            return jnp.zeros(shape)
        made = super().init_params(rng_key, families)
        if jnp.shape(made) != shape:
            raise DeclarationError(f"{self!r}: init has shape {jnp.shape(made)}, expected {shape}")
        return made

    def local(self, families: Mapping[str, Family], split: Split) -> "Neighbours":
        return Neighbours(self, split, self.edges(families)[self.blocks[0]])


def edge_weights(what: str, graph: nx.Graph, shared: bool) -> np.ndarray | None:
    """The weight of each edge, None where none has one.

    :raises DeclarationError: where some have, or all share one; and for one that is no number.
    """
    found = [((a, b), w) for a, b, w in graph.edges(data="weight") if w is not None]
    weights = [attribute(f"{what}: edge {edge}", "weight", w) for edge, w in found]
    if weights and (shared or len(weights) < graph.number_of_edges()):
        raise DeclarationError(
            f"{what}: {len(weights)} of {graph.number_of_edges()} edges have a weight; give each one its "
            "own and shared=False, or none"
        )
    return np.array(weights) if weights else None


def attribute(whose: str, name: str, given: Any, shape: tuple[int, ...] = ()) -> Float[np.ndarray, "..."]:
    """A number of a node or an edge, or several.

    :raises DeclarationError: for anything else.
    """
    try:
        made = np.asarray(given, float)
    except (TypeError, ValueError):
        made = None
    if made is None or made.size != math.prod(shape):
        wanted = f"an array of shape {shape}" if shape else "one number"
        raise DeclarationError(
            f"{whose} has {name} {checks.tell(given)}, expected {wanted}; give each one that as its "
            f"{name!r}, or leave it away at all of them"
        )
    return made.reshape(shape)


def _is_dense(size: int, edges: np.ndarray) -> bool:
    return len(edges) > _DENSE * size * (size - 1) / 2


def _matrix(weights: Array, edges: np.ndarray, size: int) -> Array:
    # They are inside: XLA asked two million of them while it compiled the gradient, for eight seconds.
    at = jnp.zeros((size, size), weights.dtype).at[edges[:, 0], edges[:, 1]]
    return at.set(weights, mode="promise_in_bounds", unique_indices=True)


def _pairwise_energy(weights: Array, each: Array, edges: np.ndarray) -> Array:
    if _is_dense(len(each), edges):
        return -jnp.vdot(each, _matrix(weights, edges, len(each)) @ each)
    return -jnp.vdot(weights, (each[edges[:, 0]] * each[edges[:, 1]]).sum(-1))


class Adjacency(NamedTuple):
    """Neighbours of units, as many a unit as most have, and one by one what is left."""

    other: Integer[Numbers, "units slots"]
    """A neighbour's number."""
    pair: Integer[Numbers, "units slots"]
    """The number of the pair; that past the last one in empty slots."""
    to: Integer[Numbers, "more"]
    """The place in its part of a unit that has more neighbours than slots."""
    more_other: Integer[Numbers, "more"]
    more_pair: Integer[Numbers, "more"]


def table(size: int, edges: Integer[np.ndarray, "edges 2"]) -> Adjacency:
    """The neighbours of all units of a block; the place of a unit is its number."""
    empty = len(edges)
    unit = np.concatenate([edges[:, 0], edges[:, 1]])
    other = np.concatenate([edges[:, 1], edges[:, 0]])
    pair = np.tile(np.arange(empty), 2)
    order = np.lexsort((other, unit))
    unit, other, pair = unit[order], other[order], pair[order]
    degree = np.bincount(unit, minlength=size)
    rank = np.arange(len(unit)) - (np.cumsum(degree) - degree)[unit]
    slots = _slots(degree)
    made = np.zeros((size, slots), np.int64), np.full((size, slots), empty)
    inside = rank < slots
    made[0][unit[inside], rank[inside]] = other[inside]
    made[1][unit[inside], rank[inside]] = pair[inside]
    return Adjacency(*made, unit[~inside], other[~inside], pair[~inside])


def _slots(degree: np.ndarray) -> int:
    """As many as the most neighbours, unless most of the table would then be empty."""
    most, mean = int(degree.max()), float(degree.mean())
    return most if most <= _WASTE * mean + 4 else max(1, round(_WASTE * mean))


class Neighbours:
    """What a :class:`Pairwise` factor adds to natural parameters: a
    :class:`~ebmpp.graph.factors.lateral.Local`.

    Autodiff gives the same over the whole block, and scatters what this looks up: a sweep of a 64x64 torus
    then takes 50 times as long, and one of 128 units that are all joined 22 times (100 chains).
    """

    def __init__(self, factor: Pairwise, split: Split, edges: np.ndarray) -> None:
        self.factor, self.split, self.edges = factor, split, edges
        self.dense = _is_dense(split.family.size, edges)

    def prepare(self, params: Array) -> Array:
        """The weights: a symmetric matrix, or one a pair and a last one of 0."""
        weights = self.factor.weights(params)
        if self.dense:
            upper = _matrix(weights, self.edges, self.split.family.size)
            return upper + upper.T
        return jnp.append(weights, jnp.zeros((), weights.dtype))

    @full_precision
    def field(self, prepared: Array, at: StatisticsAt, part: Any) -> Float[Array, "units rows ..."]:
        """Natural parameters of the units of ``part``."""
        family = self.split.family
        read = lambda numbers: family.interaction(at(numbers))
        if self.dense:
            around = read(np.arange(family.size))
            made = jnp.tensordot(self.split.take(prepared, part), around, 1)
        else:
            table = self._at(part)
            made = _looked_up(prepared, table, read)
            if table.to.shape[-1]:
                more = prepared[table.more_pair]
                each = read(table.more_other)
                made = made.at[table.to].add(more.reshape(-1, *(1,) * (each.ndim - 1)) * each, mode="drop")
        return _to_statistics(family, made)

    def _at(self, part: Any) -> Adjacency:
        if self.split.unrolled:
            return self._tables[part]
        return Adjacency(*(jnp.asarray(a)[part] for a in self._stacked))

    @functools.cached_property
    def _stacked(self) -> Adjacency:
        """All parts in one array each."""
        slots, empty = max(t.other.shape[1] for t in self._tables), len(self.edges)
        widen = lambda a, fill: np.pad(a, [(0, 0), (0, slots - a.shape[1])], constant_values=fill)
        wide = (t._replace(other=widen(t.other, 0), pair=widen(t.pair, empty)) for t in self._tables)
        fills = (0, empty, self.split.table.shape[1], 0, empty)
        return Adjacency(*map(self.split.padded, zip(*wide, strict=True), fills))

    @functools.cached_property
    def _tables(self) -> list[Adjacency]:
        whole = table(self.split.family.size, self.edges)
        place, made = self.split.place, []
        for number, units in enumerate(self.split.units):
            more = self.split.colors[whole.to] == number
            rest = place[whole.to[more]], whole.more_other[more], whole.more_pair[more]
            made.append(Adjacency(whole.other[units], whole.pair[units], *rest))
        return made


def _looked_up(weights: Array, table: Adjacency, read: Callable[[Any], Array]) -> Array:
    """The sum over the slots of weights times neighbours: one by one where they are few, which XLA makes one
    loop of, a fifth of the time of a product for each unit.
    """
    if table.other.shape[1] > _ONE_BY_ONE:
        return jnp.einsum("ud,ud...->u...", weights[table.pair], read(table.other))
    made: Any = 0.0
    for other, pair in zip(table.other.T, table.pair.T, strict=True):
        each = read(other)
        made = made + weights[pair].reshape(-1, *(1,) * (each.ndim - 1)) * each
    return made


def _to_statistics(family: Family, field: Array) -> Array:
    """Natural parameters of what interacts as natural parameters of all statistics."""
    own = len(family.interaction_shape) - len(family.shape)
    zero = jnp.zeros(field.shape[: field.ndim - own] + family.stat_shape, field.dtype)
    return jax.vjp(family.interaction, zero)[1](field)[0]
