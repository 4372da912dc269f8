# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks and factors as an immutable value, with its layers."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
import functools
import itertools
from types import MappingProxyType
from typing import Any

from jaxtyping import PyTree
import networkx as nx
import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core import Eta, Schedule, State, backend, checks, random, sharding
from ebmpp.errors import DeclarationError
from ebmpp.families import Family
from ebmpp.families.family import Families
from ebmpp.graph.coloring import SplitBlock, color, split_blocks
from ebmpp.graph.factors import Factor, lateral
from ebmpp.graph.factors.factor import call_cached
from ebmpp.graph.factors.probe import check_values, probe


class Declaration:
    """Blocks and factors as an immutable, hashable value."""

    visible: Families
    """Blocks with data."""
    latent: Families
    """The other blocks."""
    families: Families
    """All blocks, the visible ones first."""
    factors: tuple[Factor, ...]
    """Terms of the energy."""
    edges: frozenset[tuple[str, str]]
    """Pairs of blocks that share a factor."""
    splits: Mapping[str, SplitBlock]
    """Blocks whose units interact, or are in a factor that is not affine, in parts of units
    that do not interact."""
    evaluated: frozenset[str]
    """Blocks of factors that are not affine, or have zeros: they are neither summed out nor
    set to means."""
    nonconjugate: frozenset[str]
    """Real-valued blocks of factors that are not affine: they have no conditional in closed
    form."""
    param_shapes: dict[str, Any]
    """A pytree of ``jax.ShapeDtypeStruct`` per factor."""
    has_zeros: bool
    """True if factors declare states of probability zero."""
    labels: Mapping[str, tuple[Hashable, ...]]
    """Names of units by block; units keep them in graphs derived from this one."""
    block_layers: Schedule
    """Colour classes of the blocks; a block whose units interact stands alone."""
    layers: Schedule
    """Colour classes, with such a block in its parts: "x[0]", "x[1]"."""
    _identity: tuple

    def __init__(
        self,
        visible: Families,
        latent: Families | None = None,
        factors: Iterable[Factor] = (),
        *,
        labels: Mapping[str, Iterable[Hashable]] | None = None,
    ) -> None:
        latent = {} if latent is None else latent
        labels = {} if labels is None else labels
        dicts = {"visible": visible, "latent": latent, "labels": labels}
        for name, value in dicts.items():
            if not isinstance(value, Mapping):
                raise checks.declaration_error(name, "a dict by block", value)
        are_many = isinstance(factors, Iterable)
        listed = tuple(factors) if are_many else (factors,)
        if not are_many or not all(isinstance(f, Factor) for f in listed):
            raise checks.declaration_error(
                "factors", "a list of Factor objects", listed
            )
        put = super().__setattr__
        put("visible", MappingProxyType(dict(visible)))
        put("latent", MappingProxyType(dict(latent)))
        put("families", MappingProxyType({**visible, **latent}))
        put("factors", listed)
        _check(self)
        checked = {b: _as_labels(self, b, names) for b, names in labels.items()}
        put("labels", MappingProxyType(checked))
        order = {name: i for i, name in enumerate(self.families)}
        edges: set[tuple[str, str]] = set()
        for factor in self.factors:
            scope = sorted(factor.blocks, key=order.__getitem__)
            edges.update(itertools.combinations(scope, 2))
        put("edges", frozenset(edges))
        put("splits", MappingProxyType(split_blocks(self.families, self.factors)))
        special = [f for f in self.factors if f.has_zeros or not f.affine]
        put("evaluated", frozenset(b for f in special for b in f.blocks))
        reals = (b for b in self.evaluated if self.families[b].states() is None)
        put("nonconjugate", frozenset(reals))
        probed = {f.name: _probe(self, f) for f in self.factors}
        put("param_shapes", {name: shapes for name, (shapes, _) in probed.items()})
        put("has_zeros", any(has_zeros for _, has_zeros in probed.values()))
        put("block_layers", tuple(self._block_layers()))
        put("layers", tuple(self._layers()))
        blocks = tuple(visible.items()), tuple(latent.items())
        put("_identity", (*blocks, self.factors, frozenset(self.labels.items())))

    def __setattr__(self, name: str, value: object = None) -> None:
        raise AttributeError(
            f"a {type(self).__name__} is immutable; declare a new one to change {name!r}"
        )

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Declaration) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> tuple:
        declared = dict(self.visible), dict(self.latent), self.factors
        return functools.partial(type(self), labels=dict(self.labels)), declared

    def __repr__(self) -> str:
        factors = ", ".join(map(repr, self.factors))
        blocks = f"visible={dict(self.visible)}, latent={dict(self.latent)}"
        return f"{type(self).__name__}({blocks}, factors=[{factors}])"

    def _block_graph(self) -> nx.Graph:
        graph = nx.Graph()
        graph.add_nodes_from(self.families)
        graph.add_edges_from(
            e for e in itertools.combinations(self.families, 2) if e in self.edges
        )
        return graph

    def _block_layers(self) -> Iterable[tuple[str, ...]]:
        for layer in color(self._block_graph()):
            joint = tuple(b for b in layer if b not in self.splits)
            yield from ([joint] if joint else [])
            yield from ((b,) for b in layer if b in self.splits)

    def _layers(self) -> Iterable[tuple[str, ...]]:
        for layer in self.block_layers:
            block = layer[0]
            if block in self.splits:
                for part in range(self.num_parts(block)):
                    yield (lateral.part_name(block, part),)
            else:
                yield layer

    def to_networkx(self) -> nx.Graph:
        """Return the block graph; nodes have ``family``, ``visible``, ``layer`` and ``parts``."""
        graph = self._block_graph()
        for layer, blocks in enumerate(self.block_layers):
            for b in blocks:
                graph.nodes[b].update(
                    family=self.families[b],
                    visible=b in self.visible,
                    layer=layer,
                    parts=self.num_parts(b),
                )
        for a, b in graph.edges:
            graph.edges[a, b]["factors"] = [
                f.name for f in self.factors if {a, b} <= set(f.blocks)
            ]
        return graph

    def num_parts(self, block: str) -> int:
        """Return the number of parts of a block: more than one where its units interact."""
        return self.splits[block].num_parts if block in self.splits else 1

    def sizes(self, blocks: Iterable[str]) -> list[int]:
        """Return the number of units of each block."""
        return [self.families[b].size for b in blocks]

    @property
    def num_units(self) -> int:
        """Number of units of all blocks."""
        return sum(self.sizes(self.families))

    @property
    def unit_offsets(self) -> dict[str, int]:
        """Number of each block's first unit, counting the units of all blocks in order."""
        starts = itertools.accumulate(self.sizes(self.families), initial=0)
        return dict(zip(self.families, starts, strict=False))

    def interacting(self, blocks: Iterable[str]) -> list[tuple[str, str]]:
        """Return pairs of ``blocks`` that share a factor, with (b, b) if units of b interact."""
        blocks = set(blocks)
        loops = [(b, b) for b in self.splits if b in blocks]
        return [edge for edge in sorted(self.edges) if set(edge) <= blocks] + loops

    def touching(self, blocks: Iterable[str]) -> list[Factor]:
        """Return the factors with one of ``blocks``."""
        blocks = set(blocks)
        return [f for f in self.factors if not blocks.isdisjoint(f.blocks)]

    def neighbours(self, blocks: Iterable[str]) -> tuple[str, ...]:
        """Return the other blocks that share a factor with one of ``blocks``."""
        blocks = set(blocks)
        near = {b for edge in self.edges if blocks & set(edge) for b in edge} - blocks
        return tuple(b for b in self.families if b in near)

    def scope(self, blocks: Sequence[str]) -> tuple[str, ...]:
        """Return the blocks that the natural parameters of ``blocks`` depend on."""
        return self.neighbours(blocks) + tuple(b for b in blocks if b in self.splits)

    def statistics(self, x: State) -> Eta:
        """Return the sufficient statistics of each block of ``x``."""
        return {b: self.families[b].statistics(v) for b, v in x.items()}

    def exact_statistics(self, x: State, rows: int) -> Eta:
        """Return :meth:`statistics` of a state, in bfloat16 if exact and products are faster so.

        :param rows: how many states a caller maps over.
        """
        statistics = self.statistics(x)
        if backend.splits_products(rows):
            for b, t in statistics.items():
                if self.families[b].is_exact_in_bfloat16:
                    statistics[b] = t.astype(jnp.bfloat16)
        return statistics


def schedule(graph: Declaration, clamped: Iterable[str] = ()) -> Schedule:
    """Return the block layers that one sweep visits, without the clamped blocks."""
    held = set(clamped)
    free = (tuple(b for b in layer if b not in held) for layer in graph.block_layers)
    return tuple(layer for layer in free if layer)


def _check(graph: Declaration) -> None:
    """Check names of blocks and factors, and that every block is in a factor."""
    for name, family in graph.families.items():
        checks.block_name(name)
        if not isinstance(family, Family):
            raise checks.declaration_error(
                f"block {name!r}", "a family such as Bernoulli(10)", family
            )
    if not graph.visible or not graph.visible.keys().isdisjoint(graph.latent):
        raise checks.declaration_error(
            "visible",
            "at least one block, and none that is latent too",
            list(graph.visible),
        )
    for factor in graph.factors:
        checks.names(
            f"block of {factor!r}", factor.blocks, graph.families, DeclarationError
        )
    names = Counter(f.name for f in graph.factors)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise checks.declaration_error(
            "factors", "of different names", twice, hint="Name one: name=..."
        )
    used = {b for f in graph.factors for b in f.blocks}
    unused = [b for b in graph.families if b not in used]
    if unused:
        raise checks.declaration_error(
            "blocks", "in a factor each", unused, hint="Add a Bias."
        )


def _as_labels(
    graph: Declaration, block: str, names: Iterable[Hashable]
) -> tuple[Hashable, ...]:
    checks.names("block in labels", [block], graph.families, DeclarationError)
    names = tuple(names)
    size = graph.families[block].size
    are_hashable = all(isinstance(name, Hashable) for name in names)
    if not are_hashable or not len(names) == len(set(names)) == size:
        raise checks.declaration_error(
            f"labels of block {block!r}",
            f"{size} different hashable names, one per unit",
            names,
        )
    return names


def _probe(graph: Declaration, factor: Factor) -> tuple[PyTree, bool]:
    """Probe a factor's energy; return the shapes of its params, and True for infinite values."""
    scope = tuple((b, graph.families[b], graph.splits.get(b)) for b in factor.blocks)
    return call_cached(_probed, factor, scope, jnp.result_type(float))


@functools.lru_cache(maxsize=512)
def _probed(
    factor: Factor,
    scope: tuple[tuple[str, Family, SplitBlock | None], ...],
    floats: jnp.dtype,
) -> tuple[PyTree, bool]:
    """Probe a factor once for all graphs with these blocks and this default dtype of floats."""
    families = {b: f for b, f, _ in scope}
    splits = {b: s for b, _, s in scope if s is not None}
    has_zeros = factor.has_zeros
    with sharding.eager():  # the probe looks at values, also under a trace
        try:
            # `jax.random.key(0)` would compile a program
            params = factor.init_params(random.as_key(np.zeros(2, np.uint32)), families)
        except DeclarationError:
            raise
        except (TypeError, ValueError) as error:
            expected = (
                "a pytree of numbers, or a function of a jax key that returns one"
            )
            raise DeclarationError(
                f"{factor!r}: init must be {expected}: {error}"
            ) from error
        are_finite = all(
            np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(params)
        )
        if not factor.affine:
            has_zeros = check_values(factor, families, params, splits)
        elif not (factor.is_always_affine and are_finite):
            probe(factor, families, params, splits)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), a.dtype), params)
    return shapes, has_zeros
