# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of pairwise models to and from networkx graphs and dimod's binary quadratic models.

Biases and weights are derivatives of the energy, so no factor's form is assumed.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
import importlib
from typing import Any, NamedTuple

from jaxtyping import Float, Integer
import networkx as nx
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Params, checks
from ebmpp.errors import DeclarationError, IntractableError
from ebmpp.families import Bernoulli, Family, Spin
from ebmpp.graph import energy
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Bias, Factor, Pairwise
from ebmpp.graph.factors.lateral import check_network
from ebmpp.graph.factors.pairwise import attribute, edge_weights

_BATCH_SIZE = 256  # rows of second derivatives computed at once
_TOLERANCE = 1e-5  # relative, of second derivatives, which must be constant

#: A family, or a function of the number of units that returns one, such as a class.
FamilyLike = Callable[[int], Family] | Family
#: Families by dimod's type of variables.
_VARTYPES: dict[str, type[Family]] = {"SPIN": Spin, "BINARY": Bernoulli}


class Terms(NamedTuple):
    """``E(x) = offset - linear . x - sum_p weights[p] x[i_p] x[j_p]``, with x the units of all blocks."""

    offset: float
    linear: Float[np.ndarray, "units"]
    pairs: Integer[np.ndarray, "pairs 2"]
    weights: Float[np.ndarray, "pairs"]


def terms(graph: Declaration, params: Params) -> Terms:
    """Return biases and weights of a pairwise energy: of all pairs in blocks, nonzero ones between blocks."""
    for b, family in graph.families.items():
        if family.stat_shape:
            raise checks.error(
                f"block {b!r}", "of one statistic per unit, as Spin is", family
            )
    total = sum(f.size for f in graph.families.values())
    zero = jnp.zeros(total, jnp.result_type(float))

    def energy_at(flat):
        return energy.energy(graph, params, _blocks(graph, flat))

    value, slope = jax.jit(jax.value_and_grad(energy_at))(zero)
    weights: dict[tuple[int, int], float] = {}
    for factor in graph.factors:
        pairs = _pairs(graph, factor)
        values = (
            factor.weights(params[factor.name])
            if type(factor) is Pairwise
            else np.zeros(len(pairs))
        )
        _add(weights, pairs, np.asarray(values))
    # factors whose second derivatives are not their params
    others = [f for f in graph.factors if f.interacts and type(f) is not Pairwise]
    if others:
        hessian = _second_derivatives(graph, params, others, total)
        i, j = np.nonzero(np.triu(hessian, 1))
        _add(weights, zip(i.tolist(), j.tolist(), strict=True), -hessian[i, j])
    pairs = np.array(list(weights), np.int64).reshape(-1, 2)
    return Terms(
        float(value), -np.asarray(slope), pairs, np.array(list(weights.values()), float)
    )


def _blocks(graph: Declaration, flat: Float[Array, "units"]) -> dict[str, Array]:
    start = graph.unit_offsets
    return {
        b: flat[start[b] : start[b] + f.size].reshape(f.shape)
        for b, f in graph.families.items()
    }


def _add(
    weights: dict[tuple[int, int], float],
    pairs: Iterable[tuple[int, int]],
    values: np.ndarray,
) -> None:
    for pair, value in zip(pairs, values.tolist(), strict=True):
        weights[pair] = weights.get(pair, 0.0) + value


def _pairs(graph: Declaration, factor: Factor) -> list[tuple[int, int]]:
    """Return the pairs that one factor declares within blocks, the smaller number first."""
    start = graph.unit_offsets
    edges = factor.edges(graph.families)
    return [
        tuple(pair)
        for b, e in edges.items()
        for pair in (start[b] + np.sort(e, axis=1)).tolist()
    ]


def _second_derivatives(
    graph: Declaration, params: Params, factors: list[Factor], total: int
) -> np.ndarray:
    """Return the Hessian of some factors, ``(units, units)``, which must be constant."""

    def eta(flat):
        return energy.contributed(graph, factors, params, _blocks(graph, flat))

    def slope(flat):
        return -jnp.concatenate([eta(flat)[b].reshape(-1) for b in graph.families])

    def row(x, i):
        return jax.jvp(slope, (x,), ((jnp.arange(total) == i).astype(x.dtype),))[1]

    def rows(x):
        return jax.lax.map(
            lambda i: row(x, i), jnp.arange(total), batch_size=_BATCH_SIZE
        )

    points = np.zeros(total), np.random.default_rng(0).uniform(0.3, 1, total)
    here, there = map(
        np.asarray, map(jax.jit(rows), (jnp.asarray(p, float) for p in points))
    )
    if np.abs(here - there).max() > _TOLERANCE * (
        np.abs(here).max() + np.abs(there).max()
    ):
        raise IntractableError(
            f"the energy of {graph!r} must be one of pairs; three units or more interact"
        )
    return here


def names(graph: Declaration) -> list[Hashable]:
    """Return labels or numbers of the units, with their block's name if there are several blocks."""
    result: list[Hashable] = []
    for b, family in graph.families.items():
        plain = (
            range(family.size) if len(family.shape) == 1 else np.ndindex(family.shape)
        )
        labels = graph.labels.get(b, tuple(plain))
        result += (
            labels if len(graph.families) == 1 else [(b, label) for label in labels]
        )
    return result


def unit_network(graph: Declaration, params: Params) -> nx.Graph:
    """See :meth:`ebmpp.FactorGraph.to_networkx`."""
    model = terms(graph, params)
    nodes = names(graph)
    network = nx.Graph()
    blocks = [b for b, family in graph.families.items() for _ in range(family.size)]
    for node, block, bias in zip(nodes, blocks, model.linear.tolist(), strict=True):
        network.add_node(node, block=block, bias=bias)
    for (i, j), weight in zip(
        model.pairs.tolist(), model.weights.tolist(), strict=True
    ):
        network.add_edge(nodes[i], nodes[j], weight=weight)
    return network


def declare(
    graph: nx.Graph, family: FamilyLike, block: str, shared: bool, bias: bool
) -> tuple[Family, list[Factor]]:
    """Return a block with one unit per node, and its factors; see :meth:`ebmpp.FactorGraph.from_networkx`."""
    checks.instance("from_networkx: graph", graph, nx.Graph, "a networkx graph")
    check_network("from_networkx: graph", graph)
    units = (
        family
        if isinstance(family, Family) or not callable(family)
        else family(len(graph))
    )
    checks.instance(
        "from_networkx: family",
        units,
        Family,
        "a family, or a class of families such as Spin",
    )
    if units.size != len(graph):
        raise checks.error(
            "from_networkx: family",
            f"of {len(graph)} units, one per node",
            units,
            DeclarationError,
        )
    number = {node: i for i, node in enumerate(graph.nodes)}
    edges = np.array(
        [(number[a], number[b]) for a, b in graph.edges()], np.int64
    ).reshape(-1, 2)
    weights = edge_weights("from_networkx", graph, shared)
    biases = attribute(
        "from_networkx: bias",
        [b for _, b in graph.nodes(data="bias")],
        units.stat_shape,
    )
    start = None if biases is None else biases.reshape(units.statistic_shape)
    joined = [Pairwise(block, edges, shared=shared, init=weights)] if len(edges) else []
    return units, [Bias(block, init=start)] * bias + joined


def to_bqm(graph: Declaration, params: Params) -> Any:
    """See :meth:`ebmpp.FactorGraph.to_bqm`."""
    kinds = {type(f) for f in graph.families.values()}
    vartypes = [name for name, kind in _VARTYPES.items() if kinds == {kind}]
    if not vartypes:
        raise checks.error(
            "to_bqm: blocks", "all Spin or all Bernoulli", dict(graph.families)
        )
    model = terms(graph, params)
    variables = names(graph)
    dimod = importlib.import_module("dimod")  # an extra
    linear = dict(zip(variables, (-model.linear).tolist(), strict=True))
    edges = ((variables[i], variables[j]) for i, j in model.pairs.tolist())
    quadratic = dict(zip(edges, (-model.weights).tolist(), strict=True))
    return dimod.BinaryQuadraticModel(linear, quadratic, model.offset, vartypes[0])


def of_bqm(bqm: Any, block: str) -> tuple[Family, list[Factor], list[Hashable]]:
    """Return a block, its factors and its units' labels; see :meth:`ebmpp.FactorGraph.from_bqm`."""
    is_pair = (
        isinstance(bqm, tuple)
        and len(bqm) == 2
        and all(isinstance(part, Mapping) for part in bqm)
    )
    vartype = "SPIN" if is_pair else getattr(getattr(bqm, "vartype", None), "name", "")
    if vartype not in _VARTYPES:
        raise checks.error(
            "from_bqm: bqm",
            f"a dimod.BinaryQuadraticModel of {list(_VARTYPES)} variables, or two "
            "dicts (h, J) of spins",
            bqm,
        )
    linear, quadratic = bqm if is_pair else (bqm.linear, bqm.quadratic)
    variables = list(dict.fromkeys([*linear, *(v for pair in quadratic for v in pair)]))
    number = {v: i for i, v in enumerate(variables)}
    biases = -np.array([linear.get(v, 0.0) for v in variables], float)
    weights: dict[tuple[int, int], float] = {}
    # as dimod reads them: (a, b) and (b, a) add up
    for (
        a,
        b,
    ), value in quadratic.items():
        i, j = sorted((number[a], number[b]))
        if i != j:
            weights[i, j] = weights.get((i, j), 0.0) - float(value)
        elif (
            vartype == "BINARY"
        ):  # the square of a bit is the bit, that of a spin a constant
            biases[i] -= float(value)
    family = _VARTYPES[vartype](len(variables))
    factors: list[Factor] = [Bias(block, init=biases)]
    if weights:
        factors.append(
            Pairwise(
                block, np.array(list(weights)), init=np.array(list(weights.values()))
            )
        )
    return family, factors, variables
