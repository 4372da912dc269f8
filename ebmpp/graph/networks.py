# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units with their biases and weights: as a networkx graph, as dimod's binary quadratic model, and back.

Nothing here knows a factor's form: an energy of pairs has its weights in its derivatives.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
import importlib
from typing import Any, NamedTuple

from jaxtyping import Float, Integer
import networkx as nx
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Params, checks
from ebmpp.errors import ArgumentError, DeclarationError, IntractableError
from ebmpp.families import Bernoulli, Family, Spin
from ebmpp.graph import energy
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Bias, Factor, Pairwise
from ebmpp.graph.factors.lateral import check_network
from ebmpp.graph.factors.pairwise import attribute, edge_weights

_ENTRIES = 2**24  # of second derivatives in flight
_TOLERANCE = 1e-5  # of a second derivative, relative to the largest: it must be the same everywhere

#: Variables' types in dimod, by family.
_VARTYPES: dict[str, type[Family]] = {"SPIN": Spin, "BINARY": Bernoulli}


class Terms(NamedTuple):
    """``E(x) = offset - linear . x - sum_p weights[p] x[i_p] x[j_p]``, x all units of all blocks in a row."""

    offset: float
    linear: Float[np.ndarray, "units"]
    pairs: Integer[np.ndarray, "pairs 2"]
    weights: Float[np.ndarray, "pairs"]


def terms(graph: Declaration, params: Params) -> Terms:
    """The biases and weights of an energy of single units and pairs.

    Pairs of two blocks whose weight is 0 are left out, those that a factor declares within a block are not.

    :raises ArgumentError: for units of several statistics each.
    :raises IntractableError: for an energy in which three units or more interact.
    """
    for b, family in graph.families.items():
        if family.stat_shape:
            raise ArgumentError(
                f"units of block {b!r} ({family!r}) have several statistics each, so a pair of them has no "
                "one weight; accepted are units of one statistic, such as Spin or Bernoulli"
            )
    total = sum(f.size for f in graph.families.values())
    zero = jnp.zeros(total, jnp.result_type(float))
    value, slope = jax.jit(jax.value_and_grad(partial(_energy, graph, params)))(zero)
    found = dict.fromkeys(_declared(graph), 0.0)
    for first, rows in _second_derivatives(graph, params, total):
        i, j = np.nonzero(np.triu(rows, first + 1))
        found.update(
            zip(zip((i + first).tolist(), j.tolist(), strict=True), rows[i, j].tolist(), strict=True)
        )
    pairs = np.array(list(found), np.int64).reshape(-1, 2)
    return Terms(float(value), -np.asarray(slope), pairs, -np.array(list(found.values()), float))


def _energy(graph: Declaration, params: Params, flat: Float[Array, "units"]) -> Float[Array, ""]:
    start = _starts(graph)
    take = lambda b, f: flat[start[b] : start[b] + f.size].reshape(f.shape)
    return energy.energy(graph, params, {b: take(b, f) for b, f in graph.families.items()})


def _starts(graph: Declaration) -> dict[str, int]:
    """The number of each block's first unit."""
    sizes = [f.size for f in graph.families.values()]
    return dict(zip(graph.families, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))


def _declared(graph: Declaration) -> list[tuple[int, int]]:
    """The pairs that factors declare within a block, the smaller number first."""
    start, made = _starts(graph), []
    for factor in graph.factors:
        for b, edges in factor.edges(graph.families).items():
            made += map(tuple, (start[b] + np.sort(edges, axis=1)).tolist())
    return made


def _second_derivatives(
    graph: Declaration, params: Params, total: int
) -> Iterator[tuple[int, Float[np.ndarray, "rows units"]]]:
    """Some rows at a time, after the number of the first.

    :raises IntractableError: where they are not the same everywhere.
    """
    slope = jax.grad(partial(_energy, graph, params))
    at = jnp.stack([jnp.zeros(total), jnp.asarray(np.random.default_rng(0).uniform(0.3, 1, total))])
    at = at.astype(jnp.result_type(float))

    @jax.jit
    def some(first: Array) -> Array:
        which = first + jnp.arange(together)
        one = lambda x, i: jax.jvp(slope, (x,), ((jnp.arange(total) == i).astype(x.dtype),))[1]
        return jax.vmap(lambda x: jax.vmap(lambda i: one(x, i))(which))(at)

    together = min(total, max(1, _ENTRIES // total))
    for first in range(0, total, together):
        here, there = np.asarray(some(jnp.asarray(first)))[:, : total - first]
        if np.abs(here - there).max() > _TOLERANCE * (np.abs(here).max() + np.abs(there).max()):
            raise IntractableError(
                f"three units or more interact in the energy of {graph!r}, and a network of units, or a "
                "binary quadratic model, has weights of pairs alone"
            )
        yield first, here


def names(graph: Declaration) -> list[Hashable]:
    """The units' names, in order: the block's labels, or numbers; of several blocks with the block's name."""
    made: list[Hashable] = []
    for b, family in graph.families.items():
        plain = range(family.size) if len(family.shape) == 1 else np.ndindex(family.shape)
        own = graph.labels.get(b, tuple(plain))
        made += own if len(graph.families) == 1 else [(b, name) for name in own]
    return made


# -- networkx --------------------------------------------------------------------------------------


def unit_network(graph: Declaration, params: Params) -> nx.Graph:
    """See :meth:`ebmpp.FactorGraph.to_networkx`."""
    found, named, made = terms(graph, params), names(graph), nx.Graph()
    blocks = [b for b, family in graph.families.items() for _ in range(family.size)]
    for name, block, bias in zip(named, blocks, found.linear.tolist(), strict=True):
        made.add_node(name, block=block, bias=bias)
    for (i, j), weight in zip(found.pairs.tolist(), found.weights.tolist(), strict=True):
        made.add_edge(named[i], named[j], weight=weight)
    return made


def declare(
    graph: nx.Graph, family: Callable[[int], Family] | Family, block: str, shared: bool, bias: bool
) -> tuple[Family, list[Factor]]:
    """A block of a unit a node, and its factors: see :meth:`ebmpp.FactorGraph.from_networkx`.

    :raises DeclarationError: for a graph that is directed, has parallel edges, loops or no node, or a family
        of another number of units.
    """
    wanted = "a networkx graph (pairs in an array are for Pairwise(block, pairs))"
    checks.instance("from_networkx: graph", graph, nx.Graph, wanted)
    check_network("from_networkx", graph)
    if not len(graph):
        raise DeclarationError("from_networkx: the graph has no node; give one a unit")
    if not isinstance(family, Family):
        checks.function("from_networkx: family", family, "the number of nodes (such as Spin), or a family")
    made = family if isinstance(family, Family) else family(len(graph))
    checks.instance("from_networkx: family", made, Family, "a class of families such as Spin, or a family")
    if made.size != len(graph):
        raise DeclarationError(
            f"from_networkx: the graph has {len(graph)} nodes, and {made!r} {made.size} units"
        )
    number = {node: i for i, node in enumerate(graph.nodes)}
    edges = np.array([(number[a], number[b]) for a, b in graph.edges], np.int64).reshape(-1, 2)
    init = edge_weights("from_networkx", graph, shared)
    joined = [Pairwise(block, edges, shared=shared, init=init)] if len(edges) else []
    return made, [Bias(block, init=_node_biases(graph, made))] * bias + joined


def _node_biases(graph: nx.Graph, family: Family) -> np.ndarray | None:
    """The bias of each node, None where none has one.

    :raises DeclarationError: where some have, and for one that is not of a unit's shape.
    """
    biases = [b for _, b in graph.nodes(data="bias") if b is not None]
    if biases and len(biases) < len(graph):
        raise DeclarationError(
            f"from_networkx: {len(biases)} of {len(graph)} nodes have a bias; give each one its own, or none"
        )
    if not biases:
        return None
    shape, of = family.stat_shape, lambda node: f"from_networkx: node {node!r} (a unit of {family!r})"
    each = [attribute(of(node), "bias", b, shape) for node, b in graph.nodes(data="bias")]
    return np.array(each).reshape(family.statistic_shape)


# -- dimod -----------------------------------------------------------------------------------------


def to_bqm(graph: Declaration, params: Params) -> Any:
    """See :meth:`ebmpp.FactorGraph.to_bqm`."""
    kinds = {type(f) for f in graph.families.values()}
    found = [name for name, kind in _VARTYPES.items() if kinds == {kind}]
    if not found:
        raise ArgumentError(
            "to_bqm: the variables of a binary quadratic model are all spins or all binary; the families "
            f"are {dict(graph.families)}"
        )
    made, named = terms(graph, params), names(graph)
    try:
        dimod = importlib.import_module("dimod")
    except ImportError as error:
        raise ImportError("to_bqm needs dimod: pip install dimod, or ebmpp[dimod]") from error
    linear = dict(zip(named, (-made.linear).tolist(), strict=True))
    edges = ((named[i], named[j]) for i, j in made.pairs.tolist())
    quadratic = dict(zip(edges, (-made.weights).tolist(), strict=True))
    return dimod.BinaryQuadraticModel(linear, quadratic, made.offset, found[0])


def of_bqm(bqm: Any, block: str) -> tuple[Family, list[Factor], list[Hashable]]:
    """A block, its factors, and its units' names: see :meth:`ebmpp.FactorGraph.from_bqm`.

    :raises ArgumentError: for what is no such model.
    """
    if isinstance(bqm, tuple) and len(bqm) == 2 and all(isinstance(part, Mapping) for part in bqm):
        linear, quadratic, kind = *bqm, "SPIN"
    else:
        try:
            linear, quadratic, kind = bqm.linear, bqm.quadratic, bqm.vartype.name
        except AttributeError:
            raise ArgumentError(
                "from_bqm takes a dimod.BinaryQuadraticModel, or two dicts (h, J) of spins; got "
                f"{checks.tell(bqm)}"
            ) from None
    if kind not in _VARTYPES:
        raise ArgumentError(
            f"from_bqm: the variables are of type {kind!r}, and {list(_VARTYPES)} are accepted"
        )
    variables = list(dict.fromkeys([*linear, *(v for pair in quadratic for v in pair)]))
    if not variables:
        raise ArgumentError("from_bqm: the model has no variable")
    number = {v: i for i, v in enumerate(variables)}
    biases = -np.array([linear.get(v, 0.0) for v in variables], float)
    edges = np.array([(number[a], number[b]) for a, b in quadratic], np.int64).reshape(-1, 2)
    factors: list[Factor] = [Bias(block, init=biases)]
    if len(edges):
        factors.append(Pairwise(block, edges, init=-np.array(list(quadratic.values()), float)))
    return _VARTYPES[kind](len(variables)), factors, variables
