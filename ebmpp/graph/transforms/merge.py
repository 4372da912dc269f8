# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Graphs made of several graphs: merged and stacked."""

from collections.abc import Hashable, Sequence
import itertools
from typing import Any, overload

from ebmpp.core import Params, checks
from ebmpp.errors import ArgumentError, DeclarationError
from ebmpp.families import Family
from ebmpp.graph.factors import Factor
from ebmpp.graph.graph import FactorGraph
from ebmpp.graph.states import named
from ebmpp.graph.transforms.rewire import WithParams, mean_params


@overload
def merge(*graphs: FactorGraph) -> FactorGraph: ...
@overload
def merge(*graphs: FactorGraph, params: Sequence[Params]) -> WithParams: ...
def merge(*graphs: FactorGraph, params: Sequence[Params] | None = None) -> FactorGraph | WithParams:
    """All blocks and all factors of the graphs: their energies added, so a product of their densities.

    Blocks of one name are one block, and its base measure counts once. It is visible where every graph
    that has it says so, and its units have the labels that a graph gives them.

    :param graphs: at least one.
    :param params: of each graph.
    :return: the new graph, and its params if some were given.
    :raises DeclarationError: for a block of two families or of two graphs' labels that differ, or a factor's
        name that two graphs have.

    **Example**

    >>> import ebmpp
    >>> from ebmpp import Bernoulli, Bias, Bilinear, Categorical, FactorGraph
    >>> rbm = ebmpp.layered(v=Bernoulli(3), h=Bernoulli(2))
    >>> labels = FactorGraph({"y": Categorical(1, 4)}, {"h": Bernoulli(2)}, [Bias("y"), Bilinear("y", "h")])
    >>> ebmpp.graph.merge(rbm, labels).layers
    (('v', 'y'), ('h',))
    """
    _check_params("merge", graphs, params)
    factors: dict[str, Factor] = {}
    for factor in (f for graph in graphs for f in graph.factors):
        if factor.name in factors:
            raise DeclarationError(
                f"merge: two of the graphs have a factor named {factor.name!r}: {factors[factor.name]!r} "
                f"and {factor!r}. Both count in the product; give one another name with "
                f"rename(graph, {{}}, factors={{{factor.name!r}: ...}}), or use stack for models of which "
                "one goes on where the other ends"
            )
        factors[factor.name] = factor
    made = _union("merge", graphs, list(factors.values()))
    if params is None:
        return made
    return made, {n: v for graph, p in zip(graphs, params, strict=True) for n, v in named(graph, p).items()}


@overload
def stack(*graphs: FactorGraph) -> FactorGraph: ...
@overload
def stack(*graphs: FactorGraph, params: Sequence[Params]) -> WithParams: ...
def stack(*graphs: FactorGraph, params: Sequence[Params] | None = None) -> FactorGraph | WithParams:
    """A deep model of models that were trained one on the other: each begins where the one before ends.

    The visible blocks of each graph are latent blocks of the one before, by name
    (:func:`rename` makes them equal). Factors of shared blocks alone, their biases, are taken once, with the
    mean of their params: each of the two models learned them with the input from its own side alone.

    The input of an inner block comes from both sides now, about twice what it was in either model;
    :func:`pretrain` trains them so that they fit together.

    :param graphs: from the bottom up.
    :param params: of each graph.
    :return: the deep graph, and its params if some were given.
    :raises DeclarationError: where a graph does not go on from the one before it, for a block of two
        families or labels, or a factor's name that stands for two.

    **References**

    1. Hinton, Osindero, Teh (2006), *A fast learning algorithm for deep belief nets*.

    **Example**

    >>> from ebmpp import Bernoulli, layered
    >>> from ebmpp.graph import rename, stack
    >>> lower = layered(v=Bernoulli(6), h=Bernoulli(4))
    >>> upper = rename(layered(v=Bernoulli(4), h=Bernoulli(2)), {"v": "h", "h": "h2"})
    >>> stack(lower, upper).layers
    (('v', 'h2'), ('h',))
    """
    _check_params("stack", graphs, params)
    factors: dict[str, Factor] = {}
    for below, above in itertools.pairwise(graphs):
        wrong = [b for b in above.visible if b not in below.latent]
        if wrong:
            raise DeclarationError(
                f"stack: the visible block {wrong[0]!r} of a graph is no latent block of the one before it, "
                f"which has {list(below.latent)}; rename(graph, {{{wrong[0]!r}: ...}}) gives it that name"
            )
    for factor in (f for graph in graphs for f in graph.factors):
        shared = sum(set(factor.blocks) <= set(graph.families) for graph in graphs) > 1
        if factor.name in factors and not (shared and factors[factor.name] == factor):
            raise DeclarationError(
                f"stack: factors {factors[factor.name]!r} and {factor!r} of two graphs are both named "
                f"{factor.name!r}; rename(graph, {{}}, factors={{{factor.name!r}: ...}}) changes that"
            )
        factors.setdefault(factor.name, factor)
    made = _union("stack", graphs, list(factors.values()))
    if params is None:
        return made
    found: dict[str, list[Any]] = {name: [] for name in factors}
    for graph, own in zip(graphs, params, strict=True):
        for name, value in named(graph, own).items():
            found[name].append(value)
    return made, mean_params(found)


def _check_params(what: str, graphs: Sequence[FactorGraph], params: Sequence[Params] | None) -> None:
    if not graphs:
        raise DeclarationError(f"{what}: give at least one graph")
    for graph in graphs:
        checks.instance(f"{what}: each of the graphs", graph, FactorGraph, "a FactorGraph")
    if params is not None and len(params) != len(graphs):
        raise ArgumentError(f"{what}: params are those of each of {len(graphs)} graphs, not of {len(params)}")


def _union(what: str, graphs: Sequence[FactorGraph], factors: Sequence[Factor]) -> FactorGraph:
    families: dict[str, Family] = {}
    for b, f in ((b, f) for graph in graphs for b, f in graph.families.items()):
        if families.setdefault(b, f) != f:
            raise DeclarationError(
                f"{what}: block {b!r} is {families[b]!r} in one graph and {f!r} in another; rename one, or "
                "declare both alike"
            )
    labels: dict[str, tuple[Hashable, ...]] = {}
    for b, names in ((b, names) for graph in graphs for b, names in graph.labels.items()):
        if labels.setdefault(b, names) != names:
            i = next(i for i, pair in enumerate(zip(labels[b], names, strict=True)) if pair[0] != pair[1])
            raise DeclarationError(
                f"{what}: unit {i} of block {b!r} is labelled {labels[b][i]!r} in one graph and {names[i]!r} "
                "in another, and blocks of one name are one; declare their units in one order, or rename one"
            )
    hidden = {b for graph in graphs for b in graph.latent}
    visible = {b: f for b, f in families.items() if b not in hidden}
    latent = {b: f for b, f in families.items() if b in hidden}
    return FactorGraph(visible, latent, factors, labels=labels)
