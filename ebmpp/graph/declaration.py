# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The declaration: named blocks of families, factors over them that can be evaluated, and their layers."""

from collections.abc import Hashable, Iterable, Mapping
import functools
import itertools
from types import MappingProxyType
from typing import Any

import networkx as nx

import jax
import jax.numpy as jnp

from ebmpp.core import checks, sharding
from ebmpp.core.types import Eta, Schedule, State
from ebmpp.errors import DeclarationError
from ebmpp.families import Family
from ebmpp.graph.factors import Factor, lateral
from ebmpp.graph.factors.coloring import SplitBlock, color, split_blocks
from ebmpp.graph.probe import probe


def _check_blocks(visible: Mapping[str, Family], latent: Mapping[str, Family]) -> None:
    """:raises DeclarationError: for a wrong name or family, a block declared twice, or none visible."""
    for role, given in (("visible", visible), ("latent", latent)):
        if not isinstance(given, Mapping):
            raise DeclarationError(f"{role} is a dict of families by name, not {checks.tell(given)}")
    for name, family in (*visible.items(), *latent.items()):
        checks.block_name(name)
        if not isinstance(family, Family):
            raise DeclarationError(f"block {name!r} needs a family such as Bernoulli(10), not {family!r}")
    both = sorted(set(visible) & set(latent))
    if both:
        raise DeclarationError(f"blocks {both} are declared visible and latent; choose one")
    if not visible:
        raise DeclarationError("a FactorGraph needs at least one visible block")


def _check_factors(factors: tuple[Factor, ...], families: Mapping[str, Family]) -> None:
    """:raises DeclarationError: for what is not a factor, an unknown block, two factors of one name, or a
    block that no factor mentions.
    """
    seen: set[str] = set()
    for factor in factors:
        if not isinstance(factor, Factor):
            raise DeclarationError(f"factors holds {factor!r}, which is not a Factor")
        for block in (b for b in factor.blocks if b not in families):
            raise DeclarationError(f"{factor!r} names block {block!r}, and the blocks are {list(families)}")
        if factor.name in seen:
            raise DeclarationError(
                f"two factors are named {factor.name!r}; drop one, or give it another name=..."
            )
        seen.add(factor.name)
    alone = [b for b in families if not any(b in f.blocks for f in factors)]
    if alone:
        raise DeclarationError(f"no factor mentions block {alone[0]!r}; add Bias({alone[0]!r})")


def _check_labels(
    given: Mapping[str, Iterable[Hashable]], families: Mapping[str, Family]
) -> dict[str, tuple]:
    """:raises DeclarationError: for names of an unknown block, too few or too many, or one twice."""
    if not isinstance(given, Mapping):
        raise DeclarationError(f"labels is a dict of the names of a block's units, not {checks.tell(given)}")
    made = {b: tuple(names) for b, names in given.items()}
    for b, names in made.items():
        if b not in families:
            raise DeclarationError(f"labels names block {b!r}, and the blocks are {list(families)}")
        try:
            different = len(set(names))
        except TypeError as error:
            raise DeclarationError(
                f"labels of block {b!r} are hashable, like nodes of a graph: {error}"
            ) from None
        if not len(names) == different == families[b].size:
            raise DeclarationError(
                f"labels of block {b!r} are {len(names)} names, {different} of them different, and "
                f"{families[b]!r} has {families[b].size} units"
            )
    return made


def _param_shapes(
    factors: tuple[Factor, ...], families: Mapping[str, Family], splits: Mapping[str, SplitBlock]
) -> dict[str, Any]:
    """Shapes of every factor's params, its energy evaluated once.

    :raises DeclarationError: for an energy that fails.
    :raises NotMultiAffineError: for one that is not affine in each unit's statistics.
    """
    made = {}
    for factor in factors:
        scope = tuple((b, families[b], splits.get(b)) for b in factor.blocks)
        given = (factor, scope, jnp.result_type(float))
        try:
            hash(given)
        except TypeError:  # a family or an energy of one's own that holds a list
            made[factor.name] = _probed.__wrapped__(*given)
        else:
            made[factor.name] = _probed(*given)
    return made


@functools.lru_cache(maxsize=512)
def _probed(factor: Factor, scope: tuple[tuple[str, Family, SplitBlock | None], ...], floats: Any) -> Any:
    """Shapes of a factor's params. What was found once holds in every other graph with these blocks.

    :param floats: jax's default type of them.
    """
    del floats  # what is found is of this type
    families, splits = {b: f for b, f, _ in scope}, {b: s for b, _, s in scope if s is not None}
    with sharding.at_once():  # the probe looks at values, also in a model that is traced
        params = _first_params(factor, families)
        probe(factor, families, params, splits)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), a.dtype), params)


def _first_params(factor: Factor, families: Mapping[str, Family]) -> Any:
    """:raises DeclarationError: for initial values that are no numbers, or that cannot be made."""
    try:
        return factor.init_params(jax.random.key(0), families)
    except (TypeError, ValueError) as error:
        if isinstance(error, DeclarationError):
            raise
        raise DeclarationError(
            f"{factor!r}: its params could not be made: {error}; init is a pytree of numbers, or a "
            "function of a jax key that makes one"
        ) from error


class Declaration:
    """Blocks and factors as a value: immutable, hashable, compared by what was declared; and its layers.

    :class:`~ebmpp.FactorGraph` adds what follows from the energy.
    """

    visible: Mapping[str, Family]
    """Blocks that data are given for."""
    latent: Mapping[str, Family]
    """The other blocks."""
    families: Mapping[str, Family]
    """All blocks, the visible ones first."""
    factors: tuple[Factor, ...]
    """The terms of the energy."""
    edges: frozenset[tuple[str, str]]
    """Pairs of blocks that share a factor."""
    splits: Mapping[str, SplitBlock]
    """The blocks whose units interact, in parts whose units do not."""
    param_shapes: dict[str, Any]
    """By factor, a pytree of ``jax.ShapeDtypeStruct``."""
    labels: Mapping[str, tuple[Hashable, ...]]
    """Names of the units, by block, for those that have some; in graphs made of this one the units that stay
    keep theirs."""
    block_layers: Schedule
    """Colour classes of the blocks; a block whose units interact stands alone."""
    layers: Schedule
    """The same, such a block in its parts: "x[0]", "x[1]"."""
    _identity: tuple

    def __init__(
        self,
        visible: Mapping[str, Family],
        latent: Mapping[str, Family] | None = None,
        factors: Iterable[Factor] = (),
        *,
        labels: Mapping[str, Iterable[Hashable]] | None = None,
    ) -> None:
        latent = {} if latent is None else latent
        _check_blocks(visible, latent)
        if isinstance(factors, Factor) or not isinstance(factors, Iterable):
            raise DeclarationError(f"factors is a list of factors, not {factors!r}")
        put = super().__setattr__
        put("visible", MappingProxyType(dict(visible)))
        put("latent", MappingProxyType(dict(latent)))
        put("families", MappingProxyType({**visible, **latent}))
        put("factors", tuple(factors))
        _check_factors(self.factors, self.families)
        put("labels", MappingProxyType(_check_labels({} if labels is None else labels, self.families)))
        order = {name: i for i, name in enumerate(self.families)}
        scopes = (sorted(f.blocks, key=order.__getitem__) for f in self.factors)
        put("edges", frozenset(edge for scope in scopes for edge in itertools.combinations(scope, 2)))
        put("splits", MappingProxyType(split_blocks(self.families, self.factors)))
        put("param_shapes", _param_shapes(self.factors, self.families, self.splits))
        put("block_layers", tuple(self._block_layers()))
        put("layers", tuple(self._layers()))
        blocks = tuple(visible.items()), tuple(latent.items())
        put("_identity", (*blocks, self.factors, frozenset(self.labels.items())))

    # -- a value ---------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object = None) -> None:
        raise AttributeError(f"a {type(self).__name__} is immutable; declare a new one to change {name!r}")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Declaration) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> tuple:
        declared = dict(self.visible), dict(self.latent), self.factors
        return functools.partial(type(self), labels=dict(self.labels)), declared

    def __repr__(self) -> str:
        listed = ", ".join(map(repr, self.factors))
        blocks = f"visible={dict(self.visible)}, latent={dict(self.latent)}"
        return f"{type(self).__name__}({blocks}, factors=[{listed}])"

    # -- the block graph -------------------------------------------------------------------------

    def _block_graph(self) -> nx.Graph:
        made = nx.Graph()
        made.add_nodes_from(self.families)
        order = {edge: i for i, edge in enumerate(itertools.combinations(self.families, 2))}
        made.add_edges_from(sorted(self.edges, key=order.__getitem__))
        return made

    def _block_layers(self) -> Iterable[tuple[str, ...]]:
        """The colour classes of the blocks; a block whose units interact stands alone."""
        for layer in color(self._block_graph()):
            whole = tuple(b for b in layer if b not in self.splits)
            yield from ([whole] if whole else [])
            yield from ((b,) for b in layer if b in self.splits)

    def _layers(self) -> Iterable[tuple[str, ...]]:
        for layer in self.block_layers:
            if layer[0] in self.splits:
                yield from ((lateral.part_name(layer[0], i),) for i in range(self.splits[layer[0]].num_parts))
            else:
                yield layer

    def to_networkx(self) -> nx.Graph:
        """The block graph; nodes have ``family``, ``visible``, ``layer`` and ``parts``, edges ``factors``."""
        made = self._block_graph()
        layer = {block: i for i, blocks in enumerate(self.block_layers) for block in blocks}
        for block, family in self.families.items():
            parts = self.splits[block].num_parts if block in self.splits else 1
            known = {"family": family, "visible": block in self.visible}
            made.nodes[block].update(known, layer=layer[block], parts=parts)
        for a, b in made.edges:
            made.edges[a, b]["factors"] = [f.name for f in self.factors if {a, b} <= set(f.blocks)]
        return made

    def interacting(self, blocks: Iterable[str]) -> list[tuple[str, str]]:
        """The pairs among ``blocks`` that share a factor; a block whose units interact pairs with itself."""
        blocks = set(blocks)
        lateral = [(b, b) for b in self.splits if b in blocks]
        return [edge for edge in sorted(self.edges) if set(edge) <= blocks] + lateral

    def neighbours(self, blocks: Iterable[str]) -> tuple[str, ...]:
        """The other blocks that share a factor with one of ``blocks``."""
        blocks = set(blocks)
        found = {b for edge in self.edges if blocks & set(edge) for b in edge} - blocks
        return tuple(b for b in self.families if b in found)

    def statistics(self, x: State) -> Eta:
        """Sufficient statistics of each block of ``x``."""
        return {b: self.families[b].statistics(v) for b, v in x.items()}


def schedule(graph: Declaration, clamped: Iterable[str] = ()) -> Schedule:
    """The blocks of one sweep without the clamped ones, a tuple of blocks that do not interact at a time.

    A block whose units interact stands alone, and is visited part by part.
    """
    held = set(clamped)
    free = (tuple(b for b in layer if b not in held) for layer in graph.block_layers)
    return tuple(layer for layer in free if layer)
