# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rearrangement of graphs: merged, stacked, split and renamed, with their params.

Functions return a new graph, and a pair with its params if ``params`` is given.
"""

from collections.abc import Hashable, Mapping, Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np

import jax
from jax import Array

from ebmpp.core import Params, checks, omit
from ebmpp.core.types import HashableArray
from ebmpp.errors import ArgumentError, DeclarationError
from ebmpp.families import Family
from ebmpp.families.family import Families
from ebmpp.graph import states
from ebmpp.graph.factors import Bias, Bilinear, Factor
from ebmpp.graph.graph import FactorGraph
from ebmpp.graph.transforms.rewire import (
    Part,
    WithParams,
    rewire,
    unchanged,
    with_blocks,
)

__all__ = ["merge", "rename", "split", "stack"]

# -- several graphs -------------------------------------------------------------------


def merge(
    *graphs: FactorGraph, params: Sequence[Params] | None = None
) -> FactorGraph | WithParams:
    """Return all blocks and factors of the graphs: energies are added, densities multiplied.

    Blocks of one name are one block, whose base measure counts once. It is visible if
    it is in every graph that has it, and its units get the labels of a graph that has
    some.

    :param graphs: at least one.
    :param params: of each graph.
    :return: the new graph, and its params if ``params`` is given.
    :raises DeclarationError: for a block of two families or labels, or two factors of
        one name.

    **Example**

    >>> import ebmpp
    >>> from ebmpp import Bernoulli, Bias, Bilinear, Categorical, FactorGraph
    >>> rbm = ebmpp.layered(v=Bernoulli(3), h=Bernoulli(2))
    >>> factors = [Bias("y"), Bilinear("y", "h")]
    >>> labels = FactorGraph({"y": Categorical(1, 4)}, {"h": Bernoulli(2)}, factors)
    >>> ebmpp.contrib.graphs.merge(rbm, labels).layers
    (('v', 'y'), ('h',))
    """
    _check_graphs("merge", graphs, params)
    merged = _union("merge", graphs, [f for graph in graphs for f in graph.factors])
    if params is None:
        return merged
    pairs = zip(graphs, params, strict=True)
    return merged, {
        n: v for graph, p in pairs for n, v in states.ordered_params(graph, p).items()
    }


def stack(
    *graphs: FactorGraph, params: Sequence[Params] | None = None
) -> FactorGraph | WithParams:
    """Return a deep model of models trained one on top of the other.

    The visible blocks of each graph must be latent blocks of the one below, by name
    (see :func:`rename`). Factors of shared blocks only, their biases, are taken once,
    with the mean of their params.

    Inner blocks then get input from both sides, about twice that in either model;
    :func:`pretrain` trains models that fit together.

    :param graphs: from the bottom up.
    :param params: of each graph.
    :return: the deep graph, and its params if ``params`` is given.
    :raises DeclarationError: if a graph does not continue the one below, for a block of
        two families or labels, or two different factors of one name.

    **References**

    1. Hinton, Osindero, Teh (2006), *A fast learning algorithm for deep belief nets*.

    **Example**

    >>> from ebmpp import Bernoulli, layered
    >>> from ebmpp.contrib.graphs import rename, stack
    >>> lower = layered(v=Bernoulli(6), h=Bernoulli(4))
    >>> upper = rename(layered(v=Bernoulli(4), h=Bernoulli(2)), {"v": "h", "h": "h2"})
    >>> stack(lower, upper).layers
    (('v', 'h2'), ('h',))
    """
    _check_graphs("stack", graphs, params)
    for below, above in itertools.pairwise(graphs):
        checks.names(
            "latent block of the graph below",
            above.visible,
            below.latent,
            DeclarationError,
        )
    factors: list[Factor] = []
    for factor in (f for graph in graphs for f in graph.factors):
        is_shared = (
            sum(set(factor.blocks) <= set(graph.families) for graph in graphs) > 1
        )
        if not (is_shared and factor in factors):
            factors.append(factor)
    stacked = _union("stack", graphs, factors)
    if params is None:
        return stacked
    lists: dict[str, list[Any]] = {f.name: [] for f in stacked.factors}
    for graph, values in zip(graphs, params, strict=True):
        for name, value in states.ordered_params(graph, values).items():
            lists[name].append(value)
    return stacked, mean_params(lists)


def mean_params(params: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the mean of several params of each factor."""

    def mean(*values):
        return sum(values) / len(values)

    return {
        name: jax.tree.map(mean, *v) if len(v) > 1 else v[0]
        for name, v in params.items()
    }


def _check_graphs(
    what: str, graphs: Sequence[FactorGraph], params: Sequence[Params] | None
) -> None:
    for graph in graphs:
        checks.instance(f"{what}: each of the graphs", graph, FactorGraph)
    if params is not None and len(params) != len(graphs):
        raise ArgumentError(
            f"{what}: params must be those of each of {len(graphs)} graphs, got {len(params)}"
        )


def _union(
    what: str, graphs: Sequence[FactorGraph], factors: Sequence[Factor]
) -> FactorGraph:
    families: dict[str, Family] = {}
    labels: dict[str, tuple[Hashable, ...]] = {}
    for graph in graphs:
        pairs: Any = (
            ("family", families, graph.families),
            ("labels", labels, graph.labels),
        )
        for kind, merged, declared in pairs:
            for b, value in declared.items():
                if merged.setdefault(b, value) != value:
                    raise DeclarationError(
                        f"{what}: block {b!r} must have one {kind}, got {merged[b]!r} and {value!r}"
                    )
    hidden = {b for graph in graphs for b in graph.latent}
    visible = omit(families, hidden)
    latent = {b: f for b, f in families.items() if b in hidden}
    return FactorGraph(visible, latent, factors, labels=labels)


# -- blocks --------------------------------------------------------------------------


def split(
    graph: FactorGraph,
    block: str,
    into: Mapping[str, Any] | None = None,
    *,
    params: Params | None = None,
) -> FactorGraph | WithParams:
    """Return the same distribution with the units of a block in several blocks.

    Biases and bilinear factors are split with the block, and so are their params. Any
    other factor, and a bias that units share, keeps its name and params and is over all
    pieces; ``graph.init`` has no scheme for it.

    :param graph: the declaration.
    :param block: name of the block.
    :param into: units of each new block by name: a mask of the block's shape, or
        numbers in the flattened block. By default each unit is a block, ``"v_0"``,
        ``"v_1"`` and so on.
    :param params: of ``graph``.
    :return: the new graph, and its params if ``params`` is given. Each piece has one
        axis.
    :raises StateError: for an unknown block.
    :raises ParameterError: for params of other names or shapes.
    :raises DeclarationError: for pieces that are not a partition, or names that are
        taken.

    **Example**

    >>> import ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(3), h=ebmpp.Bernoulli(2))
    >>> ebmpp.contrib.graphs.split(rbm, "v", {"left": [0], "right": [1, 2]}).factors
    (Bias('left'), Bias('right'), Bias('h'), Bilinear('left', 'h'), Bilinear('right', 'h'))
    """
    states.check_names([block], graph.families)
    family = graph.families[block]
    pieces = _pieces(graph, block, into)
    current: Params = {} if params is None else params
    if params is not None:
        graph.check(params, values=False)
    part = Part(
        family, tuple((name, HashableArray.copy(p)) for name, p in pieces.items())
    )
    parts = unchanged(graph.families) | {block: part}
    small = {
        name: dataclasses.replace(family, shape=(len(p),)) for name, p in pieces.items()
    }
    remaining = {
        n: f
        for b, g in graph.families.items()
        for n, f in (small if b == block else {b: g}).items()
    }
    factors = []
    split_params = {}
    for factor in graph.factors:
        values = current.get(factor.name)
        if not _is_divisible(graph, factor, block):
            factors.append(rewire(factor, parts, anchor=next(iter(remaining))))
            split_params[factor.name] = values
            continue
        for name, p in pieces.items():
            cut = _Cut(
                factor, tuple(graph.families.items()), block, HashableArray.copy(p)
            )
            factors.append(_piece(cut, name))
            split_params[factors[-1].name] = (
                None if values is None else cut.take(values)
            )
    result = with_blocks(graph, remaining, factors, parts)
    return result if params is None else (result, split_params)


def _pieces(
    graph: FactorGraph, block: str, into: Mapping[str, Any] | None
) -> dict[str, np.ndarray]:
    """Return the unit numbers of each new block."""
    family = graph.families[block]
    if into is None:
        indices = np.ndindex(family.shape)
        into = {
            "_".join([block, *map(str, index)]): [i] for i, index in enumerate(indices)
        }
    pieces = {}
    for name, units in into.items():
        units = np.asarray(units)
        is_mask = units.dtype == bool and units.shape == family.shape
        pieces[name] = np.flatnonzero(units) if is_mask else np.ravel(units)
    numbers = np.sort(np.concatenate([*pieces.values(), np.empty(0, int)]))
    is_partition = np.array_equal(numbers, np.arange(family.size)) and all(
        map(len, pieces.values())
    )
    if not is_partition or not (graph.families.keys() - {block}).isdisjoint(pieces):
        raise DeclarationError(
            f"split: into must put each of the {family.size} units of block {block!r} "
            "into one new block that has units and a new name, got "
            f"{ ({n: p.tolist() for n, p in pieces.items()}) }"
        )
    return pieces


def _shapes(factor: Factor, families: Families) -> list[tuple[int, ...]]:
    """Return the axes of each block's units in params per unit, or per pair of units."""
    shape = (
        (lambda f: f.statistic_shape)
        if len(factor.blocks) == 1
        else (lambda f: f.interaction_shape)
    )
    return [shape(families[b]) for b in factor.blocks]


def _is_divisible(graph: FactorGraph, factor: Factor, block: str) -> bool:
    """Return True if the params can be split with the units."""
    if block not in factor.blocks or not isinstance(factor, Bias | Bilinear):
        return False
    return graph.param_shapes[factor.name].shape == sum(
        _shapes(factor, graph.families), ()
    )


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Some units of a block in a factor: rows of a bias, rows or columns of weights."""

    factor: Factor
    families: tuple[tuple[str, Family], ...]
    block: str
    units: HashableArray

    def take(self, params: Any) -> Any:
        """Return their part of the params, as a numpy array if the params are one."""
        families = dict(self.families)
        blocks = self.factor.blocks
        before = _shapes(self.factor, families)[0] if blocks[0] != self.block else ()
        after = np.shape(params)[len(before) + len(families[self.block].shape) :]
        params = params if isinstance(params, Array) else np.asarray(params)
        flat = params.reshape(*before, families[self.block].size, *after)
        return flat[(*(slice(None),) * len(before), self.units.array)]

    def __call__(self, rng_key: Array) -> Any:
        return self.take(self.factor.init_params(rng_key, dict(self.families)))


def _piece(cut: _Cut, piece: str) -> Factor:
    factor = cut.factor
    blocks = tuple(piece if b == cut.block else b for b in factor.blocks)
    has_default_name = factor.name == factor.default_name(factor.blocks)
    name = factor.default_name(blocks) if has_default_name else f"{factor.name}:{piece}"
    if isinstance(factor, Bilinear):
        return _renamed(factor, blocks, name)
    init = factor.init
    # an array stays one: a graph whose init is a function cannot be saved
    start = (
        init if init is None else cut if callable(init) else cut.take(init.unflatten())
    )
    kind: Any = type(factor)  # Bias, or a subclass
    return kind(piece, init=start, name=name)


# -- names ---------------------------------------------------------------------------


def rename(
    graph: FactorGraph,
    blocks: Mapping[str, str],
    *,
    factors: Mapping[str, str] | None = None,
    params: Params | None = None,
) -> FactorGraph | WithParams:
    """Return the same graph under other names.

    A factor with a default name is named after its new blocks.

    :param graph: the declaration.
    :param blocks: new names of blocks by old ones.
    :param factors: new names of factors by old ones.
    :param params: of ``graph``.
    :return: the new graph, and its params if ``params`` is given.
    :raises StateError: for an unknown block.
    :raises DeclarationError: for an unknown factor, or one name for two.

    **Example**

    >>> import ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(3), h=ebmpp.Bernoulli(2))
    >>> ebmpp.contrib.graphs.rename(rbm, {"h": "h1"}).factors
    (Bias('v'), Bias('h1'), Bilinear('v', 'h1'))
    """
    states.check_names(blocks, graph.families)
    new_names = dict(factors or {})
    checks.names("factor", new_names, graph.param_shapes, DeclarationError)
    new = {b: blocks.get(b, b) for b in graph.families}
    renamed = []
    names = {}
    for factor in graph.factors:
        scope = tuple(new[b] for b in factor.blocks)
        has_default_name = factor.name == factor.default_name(factor.blocks)
        name = factor.default_name(scope) if has_default_name else factor.name
        names[factor.name] = new_names.get(factor.name, name)
        renamed.append(_renamed(factor, scope, names[factor.name]))
    for kind, mapping in (("blocks", new), ("factors", names)):
        if len(set(mapping.values())) < len(mapping):
            raise DeclarationError(
                f"rename: {kind} must have different names, got {mapping}"
            )
    parts = {b: Part(f, ((new[b], None),)) for b, f in graph.families.items()}
    result = with_blocks(
        graph, {new[b]: f for b, f in graph.families.items()}, renamed, parts
    )
    if params is None:
        return result
    return result, {
        names[n]: v for n, v in states.ordered_params(graph, params).items()
    }


def _renamed(factor: Factor, blocks: tuple[str, ...], name: str) -> Factor:
    """Return a factor of the same class under other names."""
    copy = object.__new__(type(factor))
    new = dict(zip(factor.blocks, blocks, strict=True))
    lateral = tuple((new[b], pairs) for b, pairs in factor.lateral)
    for field, value in {
        **vars(factor),
        "blocks": blocks,
        "name": name,
        "lateral": lateral,
    }.items():
        object.__setattr__(copy, field, value)
    return copy
