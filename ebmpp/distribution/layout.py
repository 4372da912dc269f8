# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The arrangement of the units of several blocks in one array, the value of a sample site."""

from collections.abc import Iterable, Mapping
import dataclasses
from functools import cached_property
import math
from typing import Any

from jaxtyping import Shaped
import numpy as np

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.errors import StateError
from ebmpp.graph import FactorGraph, states


@dataclasses.dataclass(frozen=True)
class Layout:
    """An array whose elements are the units of several blocks, such as an image with two colours of pixels.

    Immutable and hashable; made by :meth:`of` or :meth:`at`.

    **Example**

    >>> import numpy as np
    >>> from ebmpp import Bernoulli, Bilinear, FactorGraph
    >>> from ebmpp.ppl import Layout
    >>> board = np.indices((2, 2)).sum(0) % 2 == 0
    >>> graph = FactorGraph({"even": Bernoulli(2), "odd": Bernoulli(2)}, factors=[Bilinear("even", "odd")])
    >>> layout = Layout.at(graph, (2, 2), {"even": board, "odd": ~board})
    >>> layout.join({"even": np.ones(2), "odd": np.zeros(2)}).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    shape: tuple[int, ...]
    blocks: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes."""
    places: tuple[int, ...]
    """Positions of the blocks' units in the flattened array, one block after the other."""

    @classmethod
    def of(cls, graph: FactorGraph, blocks: Iterable[str]) -> "Layout":
        """Return the layout of one block with its shape, or of several blocks, flattened and concatenated.

        :raises StateError: for an unknown block, or none.
        """
        blocks = tuple(blocks)
        states.check_names(blocks, graph.families)
        if not blocks:
            raise StateError("a layout needs at least one block")
        shapes = [graph.families[b].shape for b in blocks]
        size = sum(map(math.prod, shapes))
        shape = shapes[0] if len(blocks) == 1 else (size,)
        return cls(shape, tuple(zip(blocks, shapes, strict=True)), tuple(range(size)))

    @classmethod
    def at(cls, graph: FactorGraph, shape: tuple[int, ...], places: Mapping[str, Any]) -> "Layout":
        """Return the layout of blocks at given places.

        :param shape: of the array.
        :param places: by block: a mask of ``shape``, or whole numbers, indices of the flattened array.
        :raises StateError: for an unknown block, or places that do not fill the array once.
        """
        states.check_names(places, graph.families)
        indices, named, problem = [], [], None
        for b, place in places.items():
            place, family = np.asarray(place), graph.families[b]
            index = np.flatnonzero(place) if place.dtype == bool else place.ravel()
            indices.extend(int(i) for i in index)
            named.append((b, family.shape))
            if len(index) != family.size:
                problem = f"block {b!r} has {family.size} units, got {len(index)} places"
        if problem is None and sorted(indices) != list(range(math.prod(shape))):
            problem = (
                f"the {math.prod(shape)} places of the array must be filled once each, got {len(indices)}, "
                f"{len(set(indices))} of them different"
            )
        if problem:
            raise StateError(f"Layout.at: {problem}")
        return cls(tuple(shape), tuple(named), tuple(indices))

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks."""
        return tuple(b for b, _ in self.blocks)

    @cached_property
    def _in_order(self) -> bool:
        return self.places == tuple(range(len(self.places)))

    def join(self, x: Mapping[str, ArrayLike]) -> Shaped[Array, "*value"]:
        """Return the array of the blocks' values, ``(*batch, *shape)``."""
        parts = []
        for b, shape in self.blocks:
            batch = jnp.shape(x[b])[: jnp.ndim(x[b]) - len(shape)]
            parts.append(jnp.reshape(x[b], (*batch, -1)))
        flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
        if not self._in_order:
            flat = flat[..., np.argsort(np.asarray(self.places))]
        return flat.reshape(*flat.shape[:-1], *self.shape)

    def split(self, value: ArrayLike) -> dict[str, Shaped[Array, "..."]]:
        """Return the blocks of an array, ``(*batch, *block shape)`` each.

        :raises StateError: for an array whose last axes are not ``shape``.
        """
        value = jnp.asarray(value)
        batch = value.shape[: value.ndim - len(self.shape)]
        if batch + self.shape != value.shape:
            raise StateError(f"blocks {self.names} got shape {value.shape}, expected (..., *{self.shape})")
        flat = value.reshape(*batch, -1)
        if not self._in_order:
            flat = flat[..., np.asarray(self.places)]
        ends = np.cumsum([math.prod(shape) for _, shape in self.blocks])[:-1]
        parts = zip(self.blocks, jnp.split(flat, ends, axis=-1), strict=True)
        return {b: part.reshape(*batch, *shape) for (b, shape), part in parts}
