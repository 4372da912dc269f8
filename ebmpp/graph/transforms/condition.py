# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Graphs made of a graph: conditioned, split and renamed.

Every function returns a new :class:`FactorGraph`; where factors get other names or shapes of params, it
takes ``params`` too and then returns the pair of both.
"""

from collections.abc import Mapping
import dataclasses
import itertools
from typing import Any, overload

import numpy as np

import jax
from jax import Array

from ebmpp.core import Params, checks, sharding
from ebmpp.errors import DeclarationError, StateError
from ebmpp.families import Family
from ebmpp.graph import states
from ebmpp.graph.factors import Bias, Bilinear, Factor
from ebmpp.graph.factors.lateral import Constant
from ebmpp.graph.graph import FactorGraph
from ebmpp.graph.transforms.rewire import Part, WithParams, renamed, rewire, whole, with_blocks


def condition(graph: FactorGraph, /, **values: Array | states.Observed) -> FactorGraph:
    """The law of the other blocks given these values: a graph without them.

    The values are built into the energy. Factors keep their names and their params, so the params of the
    graph are params of this one, and all of it (conditionals, gradients, log Z) is that of p(rest, values),
    of which the values' base measures are a part: log Z of the new graph is the log of the sum over the rest.
    Of an :class:`Observed` block the unknown units stay, as one axis, under the block's name.

    A value here is part of the declaration, and each is a program of its own. Where many values are taken
    in turn, or a value a chain, clamp the block instead: give it by name to a kernel's ``run``, to
    :func:`unbiased_expectation` or to :func:`local_search`.

    Where no visible block is left the others become visible, for a graph needs one. Params to start from
    are those of ``graph.init``; the new graph's own knows no scheme for the factors that have changed.

    :param graph: the declaration.
    :param values: one value a block, of the block's shape; or ``clamped={...}``.
    :return: the graph of the rest.
    :raises StateError: for an unknown block, a wrong shape or value, several rows, or a value that is not
        known (inside ``jit``, ``vmap`` or ``grad``).
    :raises DeclarationError: where no unit is left.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> posterior = ebmpp.condition(rbm, v=jnp.array([1.0, 0, 0, 1]))
    >>> posterior.visible, posterior.layers
    (mappingproxy({'h': Bernoulli(3)}), (('h',),))
    >>> params = rbm.init(jax.random.key(0))
    >>> joint = rbm.free_energy(params, {"v": jnp.array([1.0, 0, 0, 1])})
    >>> bool(jnp.isclose(ebmpp.exact.log_partition(posterior, params), -joint))
    True
    """
    checks.instance("condition: graph", graph, FactorGraph, "a FactorGraph")
    values = states.merge_clamped(values)
    if not values:
        return graph
    with sharding.at_once():
        given = _one_state(graph, values)
        parts = {b: whole(b, f) for b, f in graph.families.items()}
        kept, base = dict(graph.families), {}
        for b, value in {**given.whole, **given.partial}.items():
            family = graph.families[b]
            known = np.asarray(given.keep[b][0]) if b in given.keep else np.ones(family.shape, bool)
            parts[b], left = _fixed_part(b, family, value[0], known)
            measure = family.log_base_measure(value[0])
            base[b] = float(np.asarray(measure, float)[known].sum())
            kept = {n: left if n == b else f for n, f in kept.items() if n != b or left is not None}
    if not kept:
        raise DeclarationError(
            f"condition: no unit is left of {list(graph.families)}; graph.log_density is the number that "
            "would remain"
        )
    return _rebuilt(graph, kept, parts, base)


def _one_state(graph: FactorGraph, values: Mapping[str, Any]) -> states.Clamped:
    for b, v in values.items():
        if not all(states.is_concrete(leaf) for leaf in jax.tree.leaves(v)):
            raise StateError(
                f"condition: the value of block {b!r} is traced (by jit, vmap or grad), and here it is a "
                "part of the declaration; condition outside of the transformed function, or clamp the "
                "block in a kernel"
            )
    given = states.as_clamped(graph.families, values)
    if given.batch:
        raise StateError(
            f"condition: got leading axes {given.batch}, and a graph is conditioned on one state; to hold "
            "a row a chain, clamp the block in a kernel"
        )
    return given


def _fixed_part(block: str, family: Family, value: Array, known: np.ndarray) -> tuple[Part, Family | None]:
    """Where the statistics come from, and the family of the units that stay."""
    free = np.flatnonzero(~known)
    if len(free) == family.size:
        return whole(block, family), family
    fixed = Constant.of(family.statistics(value))
    if not len(free):
        return Part(family, (), fixed), None
    return Part(family, ((block, Constant.of(free)),), fixed), dataclasses.replace(family, shape=(len(free),))


def _rebuilt(
    graph: FactorGraph, kept: Mapping[str, Family], parts: Mapping[str, Part], base: Mapping[str, float]
) -> FactorGraph:
    offsets: dict[str, float] = {}
    for b, value in base.items():  # a block has a factor: its declaration says so
        first = next(f.name for f in graph.factors if b in f.blocks)
        offsets[first] = offsets.get(first, 0.0) - value
    anchor = next(iter(kept))
    factors = [rewire(f, parts, anchor, offsets.get(f.name, 0.0)) for f in graph.factors]
    return with_blocks(graph, kept, factors, parts)


# -- splitting -----------------------------------------------------------------------------------

Pieces = Mapping[str, Any] | None


@overload
def split(graph: FactorGraph, block: str, into: Pieces = None) -> FactorGraph: ...
@overload
def split(graph: FactorGraph, block: str, into: Pieces = None, *, params: Params) -> WithParams: ...
def split(
    graph: FactorGraph, block: str, into: Pieces = None, *, params: Params | None = None
) -> FactorGraph | WithParams:
    """The same law with the units of a block in several blocks.

    Biases and bilinear factors are split with the block, and their params with them. Any other factor, and a
    bias that units share (one param cannot be in two factors), keeps its name and params and is then over all
    the pieces, which count as interacting; ``graph.init`` knows no scheme for it. Units keep their labels.

    :param graph: the declaration.
    :param block: the block.
    :param into: which units each new block has, by name: a mask of the block's shape, or places in the
        flattened block. By default each unit is a block, ``"v_0"``, ``"v_1"`` and so on.
    :param params: of ``graph``.
    :return: the new graph, and its params if some were given. Each piece has one axis.
    :raises StateError: for an unknown block.
    :raises ParameterError: for params of other names or shapes.
    :raises DeclarationError: for pieces that are not a partition, or names that are taken.

    **Example**

    >>> import ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(3), h=ebmpp.Bernoulli(2))
    >>> ebmpp.graph.split(rbm, "v", {"left": [0], "right": [1, 2]}).factors
    (Bias('left'), Bias('right'), Bias('h'), Bilinear('left', 'h'), Bilinear('right', 'h'))
    """
    states.check_names([block], graph.families)
    family = graph.families[block]
    places = _places(graph, block, into)
    given: Params = {} if params is None else params
    if params is not None:
        graph.check(params, values=False)
    part = Part(family, tuple((name, Constant.of(p)) for name, p in places.items()))
    parts = {b: part if b == block else whole(b, f) for b, f in graph.families.items()}
    small = {name: dataclasses.replace(family, shape=(len(p),)) for name, p in places.items()}
    kept = {n: f for b, g in graph.families.items() for n, f in (small if b == block else {b: g}).items()}
    factors, made = [], {}
    for factor in graph.factors:
        own = given.get(factor.name)
        if not _is_cut(graph, factor, block):
            factors.append(rewire(factor, parts, anchor=next(iter(kept))))
            made[factor.name] = own
            continue
        for name, p in places.items():
            cut = _Cut(factor, tuple(graph.families.items()), block, Constant.of(p))
            factors.append(_piece(cut, name))
            made[factors[-1].name] = None if own is None else cut.of(own)
    new = with_blocks(graph, kept, factors, parts)
    return new if params is None else (new, made)


def _places(graph: FactorGraph, block: str, into: Pieces) -> dict[str, np.ndarray]:
    family = graph.families[block]
    if into is None:
        indices = np.ndindex(family.shape)
        into = {"_".join([block, *map(str, index)]): [i] for i, index in enumerate(indices)}
    made = {name: _as_places(family, given) for name, given in into.items()}
    taken = [name for name in made if name in graph.families and name != block]
    if taken:
        raise DeclarationError(f"split: block {taken[0]!r} is there already; choose another name")
    listed = np.sort(np.concatenate([*made.values(), np.empty(0, int)]))
    if not np.array_equal(listed, np.arange(family.size)) or not all(len(p) for p in made.values()):
        raise DeclarationError(
            f"split: each of the {family.size} units of block {block!r} is in one of the new blocks, and "
            f"each of these has a unit; got { ({n: p.tolist() for n, p in made.items()}) }"
        )
    return made


def _as_places(family: Family, given: Any) -> np.ndarray:
    given = np.asarray(given)
    if given.dtype == bool and given.shape == family.shape:
        return np.flatnonzero(given)
    return np.ravel(given)


def _shapes(factor: Factor, families: Mapping[str, Family]) -> list[tuple[int, ...]]:
    """The axes of each block's units in params that have a number for each of them, or for each pair."""
    shape = (lambda f: f.statistic_shape) if len(factor.blocks) == 1 else (lambda f: f.interaction_shape)
    return [shape(families[b]) for b in factor.blocks]


def _is_cut(graph: FactorGraph, factor: Factor, block: str) -> bool:
    """Whether params can go apart with the units; not those that units have in common."""
    if block not in factor.blocks or type(factor) not in (Bias, Bilinear):
        return False
    return graph.param_shapes[factor.name].shape == sum(_shapes(factor, graph.families), ())


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Some units of a block in a factor: rows of a bias, rows or columns of weights."""

    factor: Factor
    families: tuple[tuple[str, Family], ...]
    block: str
    units: Constant

    def of(self, params: Any) -> Any:
        """Their part of the params, numpy's as numpy's."""
        families, blocks = dict(self.families), self.factor.blocks
        before = _shapes(self.factor, families)[0] if blocks[0] != self.block else ()
        after = np.shape(params)[len(before) + len(families[self.block].shape) :]
        params = params if isinstance(params, Array) else np.asarray(params)
        flat = params.reshape(*before, families[self.block].size, *after)
        return flat[(*(slice(None),) * len(before), self.units.array)]

    def __call__(self, rng_key: Array) -> Any:
        return self.of(self.factor.init_params(rng_key, dict(self.families)))


def _piece(cut: _Cut, piece: str) -> Factor:
    factor = cut.factor
    blocks = tuple(piece if b == cut.block else b for b in factor.blocks)
    usual = factor.name == ":".join(factor.blocks)
    name = ":".join(blocks) if usual else f"{factor.name}:{piece}"
    if isinstance(factor, Bilinear):
        return renamed(factor, blocks, name)
    init = factor.init
    # an array stays one, for a graph whose init is a function cannot be saved
    start = init if init is None else cut if callable(init) else cut.of(init.unflatten())
    return Bias(piece, init=start, name=name)


# -- names ---------------------------------------------------------------------------------------


Names = Mapping[str, str]
SomeNames = Names | None


@overload
def rename(graph: FactorGraph, blocks: Names, *, factors: SomeNames = None) -> FactorGraph: ...
@overload
def rename(graph: FactorGraph, blocks: Names, *, factors: SomeNames = None, params: Params) -> WithParams: ...
def rename(
    graph: FactorGraph, blocks: Names, *, factors: SomeNames = None, params: Params | None = None
) -> FactorGraph | WithParams:
    """The same graph under other names.

    A factor without a name of its own is named after its blocks, and goes with them.

    :param graph: the declaration.
    :param blocks: new names by old ones.
    :param factors: the same for factors.
    :param params: of ``graph``.
    :return: the new graph, and its params if some were given.
    :raises StateError: for an unknown block.
    :raises DeclarationError: for an unknown factor, or one name for two.

    **Example**

    >>> import ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(3), h=ebmpp.Bernoulli(2))
    >>> ebmpp.graph.rename(rbm, {"h": "h1"}).factors
    (Bias('v'), Bias('h1'), Bilinear('v', 'h1'))
    """
    states.check_names(blocks, graph.families)
    own = dict(factors or {})
    unknown = [name for name in own if name not in graph.param_shapes]
    if unknown:
        known = list(graph.param_shapes)
        raise DeclarationError(f"rename: no factor is named {unknown[0]!r}; the factors are {known}")
    new = {b: blocks.get(b, b) for b in graph.families}
    _refuse_equal("block", new)
    made, names = [], {}
    for factor in graph.factors:
        scope = tuple(new[b] for b in factor.blocks)
        usual = factor.name_over(scope) if factor.name == factor.name_over(factor.blocks) else factor.name
        names[factor.name] = own.get(factor.name, usual)
        made.append(renamed(factor, scope, names[factor.name]))
    _refuse_equal("factor", names)
    parts = {b: Part(f, ((new[b], None),)) for b, f in graph.families.items()}
    out = with_blocks(graph, {new[b]: f for b, f in graph.families.items()}, made, parts)
    return out if params is None else (out, {names[n]: v for n, v in states.named(graph, params).items()})


def _refuse_equal(what: str, names: Mapping[str, str]) -> None:
    for a, b in itertools.combinations(names, 2):
        if names[a] == names[b]:
            raise DeclarationError(f"rename: {what}s {a!r} and {b!r} would both be named {names[a]!r}")
