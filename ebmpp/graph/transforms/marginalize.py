# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exact marginalisation of a block where the rest is a factor graph again.

With h summed out, the energy is ``E(t, 0) - sum_j A(eta_j(t))``. Its first term stays
multi-affine. A log-normaliser is not affine in the neighbours' statistics in general,
but any function of a unit with finitely many values is affine in statistics that
separate the values (for a unit in {0, 1}, ``f(t) = (1 - t) f(0) + t f(1)``), and a
quadratic function of a Gaussian unit is affine in x and x**2. So if unit j of h depends
on at most one unit of each neighbouring block, A is tabulated at a few values of each
(nodes) and contracted with the statistics, exactly.
"""

from collections.abc import Iterable
import dataclasses
from functools import partial
import itertools
import math
from typing import Any, overload

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import HashableArray, Params, checks, omit, select, sharding
from ebmpp.errors import IntractableError
from ebmpp.families import Family
from ebmpp.graph import energy, states
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Factor
from ebmpp.graph.factors.probe import (
    generic_statistics,
    random_statistics,
    with_noise,
)
from ebmpp.graph.graph import FactorGraph
from ebmpp.graph.transforms.rewire import WithParams, unchanged, with_blocks

_MAX_ENTRIES = 2**20  # of a table: a unit of h at a joint state of its neighbours
_TOLERANCE = 1e-3  # relative, in float32
_STATES = 64
# nodes of families without a list of values
_CANDIDATES = (0.0, 1.0, -1.0, 2.0, 3.0, 0.5)

Blocks = str | Iterable[str]


@overload
def marginalize(graph: FactorGraph, blocks: Blocks) -> FactorGraph: ...
@overload
def marginalize(
    graph: FactorGraph, blocks: Blocks, *, params: Params
) -> WithParams: ...
def marginalize(
    graph: FactorGraph, blocks: Blocks, *, params: Params | None = None
) -> FactorGraph | WithParams:
    """Return the exact marginal distribution of the other blocks as a graph.

    Blocks are summed out sequentially. All factors of a summed block become one factor
    over its neighbours, named after the block. Its params are theirs, in a dict:
    nothing is copied, and training updates them as before.

    Each unit of the block must depend on at most one unit of each neighbour, and the
    neighbours' units must take few values, or be Gaussian with ``variance="learned"``
    beside a Gaussian block. :func:`ebmpp.contrib.graphs.split` cuts a large block into
    such blocks; a table doubles with every binary unit. ``graph.free_energy`` and
    ``graph.log_marginal`` need no table, and return the density only.

    If no visible block is left, the others become visible. Start training from the
    returned params; the new graph's own ``init`` has no scheme for the new factor.

    :param blocks: a name, or several in the order in which they are summed out.
    :param params: of ``graph``.
    :return: the graph of the rest, and its params if ``params`` is given.
    :raises StateError: for an unknown block.
    :raises IntractableError: if the rest is no such graph, or the table is too large.
    :raises DeclarationError: if no block is left, or another factor has the name.

    **Example**

    >>> import ebmpp
    >>> spins = {"a": ebmpp.Spin(1), "b": ebmpp.Spin(1)}
    >>> factors = [ebmpp.Bias("h"), ebmpp.Bilinear("a", "h"), ebmpp.Bilinear("b", "h")]
    >>> clique = ebmpp.FactorGraph(spins, {"h": ebmpp.Bernoulli(50)}, factors)
    >>> ebmpp.marginalize(clique, "h").factors
    (Factor('a', 'b', name='h'),)
    """
    names = states.check_names(blocks, graph.families)
    if set(names) == set(graph.families):
        expected = "names that leave a block"
        raise checks.declaration_error("marginalize: blocks", expected, names)
    for block in names:
        absorbed = [f.name for f in graph.touching([block])]
        current = None if params is None else states.ordered_params(graph, params)
        with sharding.eager():
            graph = _without(graph, block)
        if current is not None:
            params = omit(current, absorbed)
            params[graph.factors[-1].name] = select(current, absorbed)
    return graph if params is None else (graph, params)


def _without(graph: FactorGraph, block: str) -> FactorGraph:
    if block in graph.evaluated:
        raise IntractableError(
            f"marginalize: block {block!r} is in a factor with affine=False or impossible "
            "values, so it has no sum in closed form."
        )
    rest = omit(graph.families, [block])
    near = graph.neighbours([block])
    factors = graph.touching([block])
    local = Declaration(select(graph.families, (*near, block)), factors=factors)
    touched = _touched(local, block, near).items()
    tables = tuple(_Nodes.choose(b, local.families[b], units) for b, units in touched)
    entries = graph.families[block].size * math.prod(t.count for t in tables)
    if entries > _MAX_ENTRIES:
        raise checks.error(
            f"marginalize: entries of the table of block {block!r} over values of "
            f"{[t.block for t in tables]}",
            f"at most {_MAX_ENTRIES}",
            entries,
            IntractableError,
            "graph.free_energy and graph.log_marginal need no table.",
        )
    summed = SummedOut(local, block, near, tables)
    _verify(summed)
    factor = Factor(
        *(near or tuple(rest)[:1]), energy=summed, init=_InitialOfAll(local), name=block
    )
    parts = unchanged(rest)
    others = [f for f in graph.factors if f not in factors]
    return with_blocks(graph, rest, [*others, factor], parts)


@dataclasses.dataclass(frozen=True)
class _InitialOfAll:
    """Initial params of the absorbed factors."""

    local: Declaration

    def __call__(self, rng_key: Array) -> Params:
        factors = self.local.factors
        keys = jax.random.split(rng_key, len(factors))
        return {
            f.name: f.init_params(key, self.local.families)
            for f, key in zip(factors, keys, strict=True)
        }


@dataclasses.dataclass(frozen=True)
class _Nodes:
    """Values of a neighbour's unit that determine a function of it, and their weights.

    The function must be affine in the statistics; if these separate all values of a
    unit, every function is.
    """

    block: str
    table: HashableArray
    """Statistics of the nodes, ``(nodes, statistics)``."""
    weights: HashableArray
    """``(1 + statistics, nodes)``: the nodes' weights are ``[1, t] @ weights``."""
    units: HashableArray
    """The unit of this block that each unit of the summed block depends on."""
    complete: bool
    """True if every function of a unit is determined."""

    @property
    def count(self) -> int:
        """Number of nodes."""
        return self.table.shape[0]

    @classmethod
    def choose(cls, block: str, family: Family, units: np.ndarray) -> "_Nodes":
        """Choose nodes: all values of the family, or one more than it has statistics."""
        values = family.states()
        table = None if values is None else _statistics(family, values)
        complete = table is not None and _rank(table) == len(table)
        if not complete:
            table = np.empty((0, math.prod(family.stat_shape)))
            for value in _CANDIDATES:
                if bool(family.in_support(jnp.full(family.shape, value)).all()):
                    longer = np.concatenate([table, _statistics(family, [value])])
                    table = longer if _rank(longer) == len(longer) else table
        # the least-norm solution of [1, table] @ weights = identity, without its
        # rounding
        weights = np.round(np.linalg.pinv(np.insert(table, 0, 1.0, axis=1)), 12)
        floats = jnp.result_type(float)
        return cls(
            block,
            table=HashableArray.copy(table.astype(floats)),
            weights=HashableArray.copy(weights.astype(floats)),
            units=HashableArray.copy(units),
            complete=complete,
        )

    def at(self, node: Array, family: Family) -> Array:
        """Return statistics of the block with every unit at a node."""
        unit = jnp.asarray(self.table.array)[node].reshape(family.stat_shape)
        return jnp.broadcast_to(unit, family.statistic_shape)

    def __call__(self, statistics: Array) -> Array:
        """Return the nodes' weights for each summed unit, ``(units, nodes)``."""
        t = statistics.reshape(-1, self.table.shape[1])[self.units.array]
        weights = jnp.asarray(self.weights.array)
        return weights[0] + t @ weights[1:]


def _statistics(family: Family, values: Any) -> np.ndarray:
    statistics = np.asarray(family.statistics(jnp.asarray(values)), float)
    return statistics.reshape(len(values), -1)


def _rank(table: np.ndarray) -> int:
    return np.linalg.matrix_rank(np.insert(table, 0, 1.0, axis=1))


@dataclasses.dataclass(frozen=True)
class SummedOut:
    """Energy of the neighbours of a block that is summed out."""

    local: Declaration
    """The block's factors and their blocks."""
    block: str
    around: tuple[str, ...]
    """The neighbours."""
    tables: tuple[_Nodes, ...]

    # one program; a declaration would compile each operation
    @partial(jax.jit, static_argnums=0)
    def __call__(self, params: Params, *statistics: Array) -> Array:
        """Return the energy of one state of the neighbours."""
        # a block without neighbours has an anchor
        stats = dict(zip(self.around, statistics, strict=False))
        at_zero, _ = energy.affine(self.local, params, stats, (self.block,))
        # (units, joint nodes), the last neighbour's nodes fastest
        value = self._tabulated(params).T
        for nodes in reversed(self.tables):
            value = value.reshape(len(value), -1, nodes.count)
            value = jnp.einsum("uan,un->ua", value, nodes(stats[nodes.block]))
        return -(at_zero + value.sum())

    def _tabulated(self, params: Params) -> Array:
        """Return A of each unit at the neighbours' joint nodes, ``(joint nodes, units)``."""
        families = self.local.families
        counts = tuple(t.count for t in self.tables)
        joint = np.array(list(itertools.product(*map(range, counts))), np.int32)
        rest = energy.zero_statistics(self.local, self.around)

        def log_normalizer_at(nodes: Array) -> Array:
            stats = dict(rest)
            for node, table in zip(nodes, self.tables, strict=True):
                stats[table.block] = table.at(node, families[table.block])
            eta = energy.natural(self.local, params, stats, (self.block,))
            return families[self.block].log_normalizer(eta[self.block]).ravel()

        joint = joint.reshape(math.prod(counts), len(counts))
        return jax.vmap(log_normalizer_at)(jnp.asarray(joint))


def _touched(
    local: Declaration, block: str, near: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Return the unit of each neighbour that every unit of the block depends on, if any.

    Derivatives are taken at random params and states, where an existing one is nonzero
    with probability one.
    """
    if not near:
        return {}
    generator = np.random.default_rng(0)
    families = local.families
    params = with_noise(_InitialOfAll(local)(jax.random.key(0)), generator)
    stats = generic_statistics(select(families, near), generator)

    def natural_at(stats):
        return energy.natural(local, params, stats, (block,))[block]

    slopes = jax.jit(jax.jacrev(natural_at))(stats)
    touched = {}
    for b in near:
        width = math.prod(families[b].stat_shape)
        shape = (families[block].size, -1, families[b].size, width)
        depends = (np.asarray(slopes[b]).reshape(shape) != 0).any((1, 3))
        most = int(depends.sum(1).max())
        if most > 1:
            raise checks.error(
                f"marginalize: number of units of block {b!r} that one of {block!r} "
                "depends on",
                "at most 1",
                most,
                IntractableError,
                "Use graph.free_energy or graph.log_marginal, or split the blocks "
                "(ebmpp.contrib.graphs.split).",
            )
        if depends.any():
            touched[b] = depends.argmax(1)
    return touched


def _verify(summed: SummedOut) -> None:
    """Refuse an energy that is not affine at random states between the nodes of a neighbour."""
    doubtful = [t.block for t in summed.tables if not t.complete]
    if not doubtful:
        return
    families = summed.local.families
    stats = random_statistics(families, summed.around, _STATES)

    def exact_at(params, t):
        return -energy.log_marginal(summed.local, params, t, (summed.block,))

    def tabulated_at(t):
        return summed(params, *(t[b] for b in summed.around))

    exactly = jax.jit(jax.vmap(exact_at, (None, 0)))
    generator = np.random.default_rng(1)
    start = _InitialOfAll(summed.local)(jax.random.key(0))
    # until one is in the family's domain
    for scale in np.repeat([1.0, 0.5, 0.25, 0.1], 8):
        params = with_noise(start, generator, scale)
        exact = exactly(params, stats)
        if jnp.isfinite(exact).all():
            break
    error = jnp.abs(jax.vmap(tabulated_at)(stats) - exact)
    if not error.max() <= _TOLERANCE * jnp.abs(exact).max():
        raise checks.error(
            f"marginalize: energy without block {summed.block!r}",
            "affine in the statistics of its neighbours",
            select(families, doubtful),
            IntractableError,
            "Use graph.free_energy or graph.log_marginal; of Gaussians beside Gaussians "
            "variance='learned'.",
        )
