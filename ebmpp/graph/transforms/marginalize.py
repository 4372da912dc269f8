# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A block summed out of a graph, where what remains is a factor graph again.

With h summed out the energy is ``E(t, 0) - sum_j A(eta_j(t))``. The first term is multi-affine as it was;
the log-normalisers are not affine in the neighbours' statistics in general. But any function of a unit of
finitely many values is affine in statistics that tell them apart (for a unit in {0, 1},
``f(t) = (1 - t) f(0) + t f(1)``), and so is a quadratic function of a Gaussian unit of statistics x and
x**2. So where unit j of h depends on one unit at most of each neighbouring block, A is tabulated at a
few values of each (nodes), and the table contracted with the statistics: exact, and multi-affine.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
from functools import partial
import itertools
import math
from typing import Any, overload

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import sharding
from ebmpp.core.types import Params
from ebmpp.errors import DeclarationError, IntractableError
from ebmpp.families import Family
from ebmpp.graph import energy, states
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Factor
from ebmpp.graph.factors.lateral import Constant
from ebmpp.graph.graph import FactorGraph
from ebmpp.graph.initialization import random_statistics
from ebmpp.graph.transforms.rewire import WithParams, whole, with_blocks

_MOST_ENTRIES = 2**20  # of a table: a unit of h at a joint state of its neighbours
_TOLERANCE = 1e-3  # relative, in float32
_TRIED = 64  # random states
_CANDIDATES = (0.0, 1.0, -1.0, 2.0, 3.0, 0.5)  # nodes of families without a list of values


Blocks = str | Iterable[str]


@overload
def marginalize(graph: FactorGraph, blocks: Blocks, *, name: str | None = None) -> FactorGraph: ...
@overload
def marginalize(
    graph: FactorGraph, blocks: Blocks, *, params: Params, name: str | None = None
) -> WithParams: ...
def marginalize(
    graph: FactorGraph, blocks: Blocks, *, params: Params | None = None, name: str | None = None
) -> FactorGraph | WithParams:
    """The law of the other blocks, exactly, as a graph of its own: ``blocks`` summed out one by one.

    All factors of a block that is summed out become one factor over its neighbours, named after the block.
    Its params are theirs, in a dict: nothing is copied, and training moves them as before.

    A graph of the rest exists where each unit of the block depends on one unit at most of each neighbour
    (blocks of one unit, or pairs such as ``sum_i w_i v_i h_i``), and the neighbours' units take few
    values, or are Gaussian with ``variance="learned"`` beside a Gaussian block. Otherwise units of one
    block would interact in it. :func:`~ebmpp.graph.split` makes such blocks of a large one, at the price of
    a table that doubles with every unit of two values; ``graph.free_energy`` and ``graph.marginal`` sum out
    any layer without a table, and give the density alone.

    Where no visible block is left the others become visible, for a graph needs one. Training starts from the
    params that come with the graph; its own ``init`` knows no scheme for the new factor.

    :param graph: the declaration.
    :param blocks: a name, or several in the order in which they are summed out.
    :param params: of ``graph``.
    :param name: of the new factor, where one block is summed out.
    :return: the graph of the rest, and its params if some were given.
    :raises StateError: for an unknown block.
    :raises IntractableError: where the rest is no such graph, or the table is too large.
    :raises DeclarationError: where no block is left, or another factor has the name.

    **Example**

    >>> import ebmpp
    >>> clique = ebmpp.FactorGraph({"a": ebmpp.Spin(1), "b": ebmpp.Spin(1)}, {"h": ebmpp.Bernoulli(50)},
    ...                            [ebmpp.Bias("h"), ebmpp.Bilinear("a", "h"), ebmpp.Bilinear("b", "h")])
    >>> ebmpp.marginalize(clique, "h")
    FactorGraph(visible={'a': Spin(1), 'b': Spin(1)}, latent={}, factors=[Factor('a', 'b', name='h')])
    """
    listed = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    states.check_names(listed, graph.families)
    if name is not None and len(listed) != 1:
        raise DeclarationError("marginalize: name is that of one factor; give it with one block")
    for block in listed:
        absorbed = [f.name for f in graph.factors if block in f.blocks]
        given = None if params is None else states.named(graph, params)
        with sharding.at_once():
            graph = _without(graph, block, block if name is None else name)
        if given is not None:
            params = {n: v for n, v in given.items() if n not in absorbed}
            params[graph.factors[-1].name] = {n: given[n] for n in absorbed}
    return graph if params is None else (graph, params)


def _without(graph: FactorGraph, block: str, name: str) -> FactorGraph:
    rest = {b: f for b, f in graph.families.items() if b != block}
    if not rest:
        raise DeclarationError(
            f"marginalize: {block!r} is the last block; graph.marginal(params, {{}}, {block!r}) is the "
            "number that would remain"
        )
    around = graph.neighbours([block])
    factors = [f for f in graph.factors if block in f.blocks]
    local = Declaration({b: graph.families[b] for b in (*around, block)}, factors=factors)
    touched = _touched(local, block, around)
    tables = tuple(_Nodes.of(b, local.families[b], units) for b, units in touched.items())
    entries = graph.families[block].size * math.prod(t.count for t in tables)
    if entries > _MOST_ENTRIES:
        raise IntractableError(
            f"marginalize: summing out {block!r} takes a table of {entries:.3g} entries over the joint "
            f"values of {[t.block for t in tables]}, and {_MOST_ENTRIES} is the most; graph.free_energy and "
            "graph.marginal need none, and blocked Gibbs sampling keeps the block"
        )
    summed = SummedOut(local, block, around, tables)
    _verify(summed)
    scope = around or (next(iter(rest)),)
    made = Factor(*scope, energy=summed, init=_InitialOfAll(local), name=name)
    parts = {b: whole(b, f) for b, f in rest.items()}
    return with_blocks(graph, rest, [f for f in graph.factors if f not in factors] + [made], parts)


@dataclasses.dataclass(frozen=True)
class _InitialOfAll:
    """Initial params of the factors that became one."""

    local: Declaration

    def __call__(self, rng_key: Array) -> Params:
        keys = jax.random.split(rng_key, len(self.local.factors))
        each = zip(self.local.factors, keys, strict=True)
        return {f.name: f.init_params(key, self.local.families) for f, key in each}


@dataclasses.dataclass(frozen=True)
class _Nodes:
    """Values of a neighbour's unit that determine a function of it, and the weights they get at statistics.

    The function must be affine in the statistics; for a unit whose statistics tell all its values apart
    every function is.
    """

    block: str
    table: Constant
    """The nodes' statistics, ``(nodes, statistics)``."""
    weights: Constant
    """``(1 + statistics, nodes)``: the nodes' weights are ``[1, t] @ weights``."""
    units: Constant
    """For each unit of the block that is summed out, which unit of this one it depends on."""
    every: bool
    """Whether every function of a unit will do."""

    @property
    def count(self) -> int:
        """How many nodes."""
        return self.table.shape[0]

    @classmethod
    def of(cls, block: str, family: Family, units: np.ndarray) -> "_Nodes":
        """Nodes of a family: all its values, or as many as it has statistics, and one more."""
        listed = family.states()
        table = None if listed is None else _statistics(family, listed)
        every = table is not None and _rank(table) == len(table)
        if not every:
            table = np.empty((0, math.prod(family.stat_shape)))
            for value in _CANDIDATES:
                if bool(family.in_support(jnp.full(family.shape, value)).all()):
                    longer = np.concatenate([table, _statistics(family, [value])])
                    table = longer if _rank(longer) == len(longer) else table
        ones = np.ones((len(table), 1))
        # the least-norm solution of [1, table] @ weights = identity, without its rounding
        weights = np.round(np.linalg.pinv(np.concatenate([ones, table], 1)), 12)
        nodes = (Constant.of(a.astype(jnp.result_type(float))) for a in (table, weights))
        return cls(block, *nodes, Constant.of(units), every)

    def at(self, node: Array, family: Family) -> Array:
        """Statistics of the block with every unit at a node."""
        one = jnp.asarray(self.table.array)[node].reshape(family.stat_shape)
        return jnp.broadcast_to(one, family.statistic_shape)

    def __call__(self, statistics: Array) -> Array:
        """The nodes' weights for each unit that is summed out, ``(units, nodes)``."""
        own = statistics.reshape(-1, self.table.shape[1])[self.units.array]
        weights = jnp.asarray(self.weights.array)
        return weights[0] + own @ weights[1:]


def _statistics(family: Family, values: Any) -> np.ndarray:
    return np.asarray(family.statistics(jnp.asarray(values)), float).reshape(len(values), -1)


def _rank(table: np.ndarray) -> int:
    return np.linalg.matrix_rank(np.concatenate([np.ones((len(table), 1)), table], 1))


@dataclasses.dataclass(frozen=True)
class SummedOut:
    """The energy of the neighbours with a block summed out."""

    local: Declaration
    """The block's factors, and their blocks."""
    block: str
    around: tuple[str, ...]
    tables: tuple[_Nodes, ...]

    @property
    def family(self) -> Family:
        """The block's."""
        return self.local.families[self.block]

    @partial(jax.jit, static_argnums=0)  # one program, where a declaration would compile each operation
    def __call__(self, params: Params, *statistics: Array) -> Array:
        stats = dict(zip(self.around, statistics, strict=False))  # a block without neighbours has an anchor
        at_zero, _ = energy.affine(self.local, params, stats, (self.block,))
        value = self._tabulated(params).T  # (units, joint nodes), the last neighbour's nodes fastest
        for nodes in reversed(self.tables):
            value = value.reshape(len(value), value.shape[1] // nodes.count, nodes.count)
            value = jnp.einsum("uan,un->ua", value, nodes(stats[nodes.block]))
        return -(at_zero + value.sum())

    def exactly(self, params: Params, stats: Mapping[str, Array]) -> Array:
        """The energy without nodes."""
        return -energy.log_marginal(self.local, params, stats, (self.block,))

    def _tabulated(self, params: Params) -> Array:
        """A of each unit at the neighbours' joint nodes, ``(joint nodes, units)``."""
        families = self.local.families
        counts = tuple(t.count for t in self.tables)
        joint = np.array(list(itertools.product(*map(range, counts))), np.int32)
        rest = {b: jnp.zeros(families[b].statistic_shape) for b in self.around}

        def one(nodes: Array) -> Array:
            at = {t.block: t.at(nodes[i], families[t.block]) for i, t in enumerate(self.tables)}
            eta = energy.natural(self.local, params, {**rest, **at}, (self.block,))[self.block]
            return self.family.log_normalizer(eta).ravel()

        return jax.vmap(one)(jnp.asarray(joint.reshape(math.prod(counts), len(counts))))


# -- what is looked at -----------------------------------------------------------------------------


def _touched(local: Declaration, block: str, around: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Which unit of each neighbour every unit of the block depends on; no entry where none does.

    By derivatives at random params and states: one that is there is not zero, with probability one.

    :raises IntractableError: for a unit that depends on two of one block.
    """
    if not around:
        return {}
    generator, families = np.random.default_rng(0), local.families
    params = next(_noisy(local, generator, 1.0))
    draw = lambda f: jnp.asarray(generator.uniform(0.1, 0.9, f.statistic_shape), jnp.result_type(float))
    stats = {b: draw(families[b]) for b in around}
    slopes = jax.jit(jax.jacrev(lambda t: energy.natural(local, params, t, (block,))[block]))(stats)
    found = {}
    for b in around:
        slope = np.asarray(slopes[b])
        width = math.prod(families[b].stat_shape)
        depends = (slope.reshape(families[block].size, -1, families[b].size, width) != 0).any((1, 3))
        many = np.flatnonzero(depends.sum(1) > 1)
        if len(many):
            raise IntractableError(
                f"marginalize: unit {int(many[0])} of block {block!r} depends on "
                f"{int(depends[many[0]].sum())} units of block {b!r}, which would interact in the new "
                "factor. Use graph.free_energy or graph.marginal for the density of the rest; for a "
                f"graph, split block {b!r} into its units first, where they are few (ebmpp.graph.split)"
            )
        if depends.any():
            found[b] = depends.argmax(1)
    return found


def _noisy(local: Declaration, generator: np.random.Generator, *scales: float) -> Iterator[Params]:
    start = {f.name: f.init_params(jax.random.key(0), local.families) for f in local.factors}
    for scale in scales:
        noise = lambda a, s=scale: jnp.asarray(s * generator.normal(size=a.shape), a.dtype)
        yield jax.tree.map(lambda a, noise=noise: a + noise(a), start)


def _verify(summed: SummedOut) -> None:
    """Try random states where a neighbour has values that are no nodes.

    :raises IntractableError: where the energy is not affine in its statistics.
    """
    doubtful = [t.block for t in summed.tables if not t.every]
    if not doubtful:
        return
    families = summed.local.families
    stats = random_statistics(families, summed.around, _TRIED)
    exactly = jax.jit(jax.vmap(summed.exactly, (None, 0)))
    scales = np.repeat([1.0, 0.5, 0.25, 0.1], 8)  # until one is in the family's domain
    for params in _noisy(summed.local, np.random.default_rng(1), *scales):
        exact = exactly(params, stats)
        if jnp.isfinite(exact).all():
            break
    tabulated = jax.vmap(lambda s: summed(params, *(s[b] for b in summed.around)))(stats)
    off = jnp.abs(tabulated - exact).max()
    if not off <= _TOLERANCE * jnp.abs(exact).max():
        kinds = {b: families[b] for b in doubtful}
        raise IntractableError(
            f"marginalize: with {summed.block!r} ({summed.family!r}) summed out, the energy is "
            f"not affine in the sufficient statistics of {kinds}: it would need statistics that these do "
            "not have. Use graph.free_energy or graph.marginal for the density of the rest (a Gaussian "
            "beside a Gaussian block can be of variance='learned', whose statistics are x and x**2)"
        )
