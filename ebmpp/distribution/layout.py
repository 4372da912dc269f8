# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How one array, the value of a sample site, is made of the units of several blocks."""

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
    """An array of ``shape`` whose units are those of ``blocks``: block b's are at ``places[b]``.

    An image whose pixels are two blocks, like the two colours of a chessboard, is one array. Immutable and
    hashable; make one with :meth:`of` or :meth:`at`.

    **Example**

    >>> import numpy as np
    >>> from ebmpp import Bernoulli, Bilinear, FactorGraph
    >>> from ebmpp.distribution.layout import Layout
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
    """Where in the flattened array the blocks' units are, one block after the other."""

    @classmethod
    def of(cls, graph: FactorGraph, blocks: Iterable[str]) -> "Layout":
        """One block as it is, or several flattened, one after the other.

        :raises StateError: for an unknown block, or none.
        """
        blocks = tuple(blocks)
        states.check_names(blocks, graph.families)
        if not blocks:
            raise StateError("a layout needs at least one block")
        families = [graph.families[b] for b in blocks]
        size = sum(f.size for f in families)
        shape = families[0].shape if len(blocks) == 1 else (size,)
        named = tuple((b, f.shape) for b, f in zip(blocks, families, strict=True))
        return cls(shape, named, tuple(range(size)))

    @classmethod
    def at(cls, graph: FactorGraph, shape: tuple[int, ...], places: Mapping[str, Any]) -> "Layout":
        """Blocks at the places that are given.

        :param shape: of the array.
        :param places: by block: a mask of ``shape``, or whole numbers, indices of the flattened array.
        :raises StateError: for an unknown block, or places that do not fill the array once.
        """
        states.check_names(places, graph.families)
        found, named = [], []
        for b, given in places.items():
            given, family = np.asarray(given), graph.families[b]
            index = np.flatnonzero(given) if given.dtype == bool else given.ravel()
            if len(index) != family.size:
                raise StateError(f"block {b!r} has {family.size} units, and was given {len(index)} places")
            found.extend(int(i) for i in index)
            named.append((b, family.shape))
        if sorted(found) != list(range(math.prod(shape))):
            raise StateError(
                f"the blocks' places should be every one of the {math.prod(shape)} of an array of shape "
                f"{tuple(shape)} once; {len(found)} places, {len(set(found))} of them different, were given"
            )
        return cls(tuple(shape), tuple(named), tuple(found))

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks."""
        return tuple(b for b, _ in self.blocks)

    @cached_property
    def _trivial(self) -> bool:
        return self.places == tuple(range(len(self.places)))

    def join(self, x: Mapping[str, ArrayLike]) -> Shaped[Array, "*value"]:
        """The array of the blocks' values, shape ``(*batch, *shape)``."""
        parts = []
        for b, shape in self.blocks:
            batch = jnp.shape(x[b])[: jnp.ndim(x[b]) - len(shape)]
            parts.append(jnp.reshape(x[b], (*batch, -1)))
        flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
        if not self._trivial:
            flat = flat[..., np.argsort(np.asarray(self.places))]
        return flat.reshape(*flat.shape[:-1], *self.shape)

    def split(self, value: ArrayLike) -> dict[str, Shaped[Array, "..."]]:
        """The blocks of an array, each of shape ``(*batch, *block shape)``.

        :raises StateError: for an array whose last axes are not ``shape``.
        """
        value = jnp.asarray(value)
        batch = value.shape[: value.ndim - len(self.shape)]
        if batch + self.shape != value.shape:
            raise StateError(f"blocks {self.names} got shape {value.shape}, expected (..., *{self.shape})")
        flat = value.reshape(*batch, -1)
        if not self._trivial:
            flat = flat[..., np.asarray(self.places)]
        made, start = {}, 0
        for b, shape in self.blocks:
            stop = start + math.prod(shape)
            made[b] = flat[..., start:stop].reshape(*batch, *shape)
            start = stop
        return made
