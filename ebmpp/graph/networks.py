# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of pairwise models to and from networkx graphs and dimod's binary quadratic models.

Biases and weights are derivatives of the energy, so no factor's form is assumed.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
import importlib
import itertools
from typing import Any, NamedTuple, TypeVar

from jaxtyping import Float, PyTree
import networkx as nx
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import Blocks, Edges, Params, checks
from ebmpp.errors import IntractableError
from ebmpp.families import Bernoulli, Family, Spin
from ebmpp.graph import energy
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Bias, Factor, Pairwise
from ebmpp.graph.factors.lateral import check_network
from ebmpp.graph.factors.pairwise import attribute, edge_weights

_TOLERANCE = 1e-5  # relative, of second derivatives, which must be constant

#: A family, or a function of the number of units that returns one, such as a class.
FamilyLike = Callable[[int], Family] | Family
#: Families by dimod's type of variables.
_VARTYPES: dict[str, type[Family]] = {"SPIN": Spin, "BINARY": Bernoulli}


D = TypeVar("D", bound=Declaration)


class Terms(NamedTuple):
    """``E(x) = offset - linear . x - sum_ij weights_ij x[i] x[j]`` of the units x."""

    offset: float
    linear: Float[np.ndarray, "units"]
    pairs: Edges
    """Each once, the smaller number first."""
    weights: Float[np.ndarray, "edges"]


def terms(graph: Declaration, params: Params) -> Terms:
    """Return biases and weights of a pairwise energy; pairs between blocks if not 0."""
    for b, family in graph.families.items():
        if family.stat_shape:
            raise checks.error(
                f"block {b!r}", "of one statistic per unit, as Spin is", family
            )
    if graph.evaluated:
        raise IntractableError(
            f"the energy of {graph!r} must be one of pairs of units, and has factors with "
            "affine=False or impossible values. Declare the pairs by Pairwise."
        )
    zero = jnp.zeros(graph.num_units)

    def energy_at(flat):
        return energy.energy(graph, params, _blocks(graph, flat))

    value, slope = jax.jit(jax.value_and_grad(energy_at))(zero)
    pairs = []
    weights = []
    differentiated = []
    for factor in graph.factors:
        pairs.append(_pairs(graph, factor))
        weights.append(np.zeros(len(pairs[-1])))  # so that declared pairs are listed
        if factor.has_pair_weights:
            weights[-1] = np.asarray(factor.pair_weights(params[factor.name]))
        elif factor.interacts:
            differentiated.append(factor)
    if differentiated:
        hessian = np.triu(_second_derivatives(graph, params, differentiated), 1)
        pairs.append(np.argwhere(hessian))
        weights.append(-hessian[hessian != 0])
    distinct, number = np.unique(np.concatenate(pairs), axis=0, return_inverse=True)
    total = np.bincount(number.ravel(), np.concatenate(weights), len(distinct))
    return Terms(float(value), -np.asarray(slope), distinct, total)


def _blocks(graph: Declaration, flat: Float[Array, "units"]) -> Blocks:
    start = graph.unit_offsets
    return {
        b: flat[start[b] : start[b] + f.size].reshape(f.shape)
        for b, f in graph.families.items()
    }


def _pairs(graph: Declaration, factor: Factor) -> Edges:
    """Return the pairs that one factor declares within blocks, the smaller number first."""
    start = graph.unit_offsets
    edges = factor.edges(graph.families).items()
    parts = [start[block] + np.sort(pairs, axis=1) for block, pairs in edges]
    return np.concatenate([np.empty((0, 2), np.int64), *parts])


def _second_derivatives(
    graph: Declaration, params: Params, factors: list[Factor]
) -> Float[np.ndarray, "units units"]:
    """Return the Hessian of some factors, which must be constant."""

    def slope_at(flat):
        eta = energy.contributed(graph, factors, params, _blocks(graph, flat))
        return -jnp.concatenate([eta[b].reshape(-1) for b in graph.families])

    hessian_at = jax.jit(jax.jacfwd(slope_at))
    elsewhere = np.random.default_rng(0).uniform(0.3, 1, graph.num_units)
    hessian = np.asarray(hessian_at(jnp.zeros(graph.num_units)))
    other = np.asarray(hessian_at(jnp.asarray(elsewhere, float)))
    scale = np.abs(hessian).max() + np.abs(other).max()
    if np.abs(hessian - other).max() > _TOLERANCE * scale:
        raise IntractableError(
            f"the energy of {graph!r} must be one of pairs; three units or more interact"
        )
    return hessian


def names(graph: Declaration) -> list[Hashable]:
    """Return labels or numbers of the units, paired with their block if there are several."""
    result: list[Hashable] = []
    for b, family in graph.families.items():
        labels: Iterable[Hashable]
        if b in graph.labels:
            labels = graph.labels[b]
        elif len(family.shape) == 1:
            labels = range(family.size)
        else:
            labels = np.ndindex(family.shape)
        is_only = len(graph.families) == 1
        result += labels if is_only else ((b, label) for label in labels)
    return result


def unit_network(graph: Declaration, params: Params) -> nx.Graph:
    """See :meth:`ebmpp.FactorGraph.to_networkx`."""
    model = terms(graph, params)
    nodes = names(graph)
    network = nx.Graph()
    blocks = [b for b, family in graph.families.items() for _ in range(family.size)]
    for node, block, bias in zip(nodes, blocks, model.linear.tolist(), strict=True):
        network.add_node(node, block=block, bias=bias)
    for (i, j), weight in zip(model.pairs, model.weights.tolist(), strict=True):
        network.add_edge(nodes[i], nodes[j], weight=weight)
    return network


def of_networkx(
    cls: type[D],
    graph: nx.Graph,
    family: FamilyLike,
    block: str,
    shared: bool,
    bias: bool,
) -> D:
    """See :meth:`ebmpp.FactorGraph.from_networkx`."""
    checks.instance("from_networkx: graph", graph, nx.Graph, "a networkx graph")
    check_network("from_networkx: graph", graph)
    units = checks.instance(
        "from_networkx: family",
        family(len(graph)) if callable(family) else family,
        Family,
        "a family, or a class of families such as Spin",
    )
    if units.size != len(graph):
        raise checks.declaration_error(
            "from_networkx: family", f"of {len(graph)} units, one per node", units
        )
    weights = edge_weights("from_networkx", graph, shared)
    biases = attribute(
        "from_networkx: bias",
        graph.nodes(data="bias"),
        units.stat_shape,
    )
    factors: list[Factor] = []
    if bias:
        start = None if biases is None else biases.reshape(units.statistic_shape)
        factors.append(Bias(block, init=start))
    if graph.number_of_edges():
        number = {node: i for i, node in enumerate(graph.nodes)}
        pairs = np.array([(number[a], number[b]) for a, b in graph.edges()], np.int64)
        factors.append(Pairwise(block, pairs, shared=shared, init=weights))
    return cls({block: units}, factors=factors, labels={block: graph.nodes})


def to_bqm(graph: Declaration, params: Params) -> Any:
    """See :meth:`ebmpp.FactorGraph.to_bqm`."""
    families = graph.families.values()
    vartypes = [
        name
        for name, kind in _VARTYPES.items()
        if all(f.is_two_valued and f.statistic_bounds == kind.bounds for f in families)
    ]
    if not vartypes:
        raise checks.error(
            "to_bqm: blocks", "all Spin or all Bernoulli", dict(graph.families)
        )
    model = terms(graph, params)
    variables = names(graph)
    dimod = importlib.import_module("dimod")  # an extra
    linear = dict(zip(variables, (-model.linear).tolist(), strict=True))
    pairs = zip(model.pairs, (-model.weights).tolist(), strict=True)
    quadratic = {(variables[i], variables[j]): weight for (i, j), weight in pairs}
    return dimod.BinaryQuadraticModel(linear, quadratic, model.offset, vartypes[0])


def of_bqm(cls: type[D], bqm: PyTree, block: str) -> D:
    """See :meth:`ebmpp.FactorGraph.from_bqm`."""
    is_ising = (
        isinstance(bqm, tuple)
        and len(bqm) == 2
        and all(isinstance(part, Mapping) for part in bqm)
    )
    if is_ising:
        return _of_terms(cls, block, "from_bqm: bqm", "SPIN", *bqm)
    vartype = getattr(getattr(bqm, "vartype", None), "name", "")
    if vartype not in _VARTYPES:
        raise checks.error(
            "from_bqm: bqm",
            f"a dimod.BinaryQuadraticModel of {list(_VARTYPES)} variables, or two "
            "dicts (h, J) of spins",
            bqm,
        )
    return _of_terms(cls, block, "from_bqm: bqm", vartype, bqm.linear, bqm.quadratic)


def of_qubo(cls: type[D], q: Mapping | ArrayLike, block: str) -> D:
    """See :meth:`ebmpp.FactorGraph.from_qubo`."""
    if not isinstance(q, Mapping):
        matrix = np.asarray(checks.numbers("from_qubo: q", q))
        if matrix.ndim != 2 or len(matrix) != matrix.shape[1]:
            expected = "a dict {(i, j): value} or a square matrix"
            raise checks.error("from_qubo: q", expected, q)
        is_term = (matrix != 0) | np.eye(len(matrix), dtype=bool)
        pairs = map(tuple, np.argwhere(is_term).tolist())
        q = {pair: matrix[pair] for pair in pairs}
    return _of_terms(cls, block, "from_qubo: q", "BINARY", {}, q)


def _of_terms(
    cls: type[D],
    block: str,
    name: str,
    vartype: str,
    linear: Mapping[Hashable, float],
    quadratic: Mapping[tuple[Hashable, Hashable], float],
) -> D:
    """Declare the energy ``sum_a linear[a] x_a + sum_ab quadratic[a, b] x_a x_b``."""
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in quadratic):
        raise checks.error(name, "a dict by pairs of variables", quadratic)
    variables = list(dict.fromkeys([*linear, *itertools.chain(*quadratic)]))
    if not variables:
        hint = "The one sample of an empty model is empty."
        raise checks.error(name, "of one variable or more", quadratic, hint=hint)
    number = {v: i for i, v in enumerate(variables)}
    biases = np.zeros(len(variables))
    for v, value in linear.items():
        biases[number[v]] -= checks.number(f"{name}[{v!r}]", value)
    weights: dict[tuple[int, int], float] = defaultdict(float)
    for pair, value in quadratic.items():
        i, j = sorted(number[v] for v in pair)
        value = checks.number(f"{name}[{pair}]", value)
        if i != j:  # (a, b) and (b, a) add up
            weights[i, j] -= value
        elif vartype == "BINARY":
            # the square of a bit is the bit; that of a spin is constant
            biases[i] -= value
    family = _VARTYPES[vartype](len(variables))
    factors: list[Factor] = [Bias(block, init=biases)]
    if weights:
        pairs = np.array(list(weights))
        factors.append(Pairwise(block, pairs, init=np.array(list(weights.values()))))
    return cls({block: family}, factors=factors, labels={block: variables})
