# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Arrangement of the units of several blocks in one array, the value of a sample site."""

from collections.abc import Iterable, Mapping
import dataclasses
from functools import cached_property
import math

from jaxtyping import Real, Shaped
import numpy as np
from numpyro.distributions import constraints

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import checks, sharding
from ebmpp.errors import StateError
from ebmpp.exact import enumeration
from ebmpp.families import Family
from ebmpp.families.values import describe
from ebmpp.graph import FactorGraph, states


@dataclasses.dataclass(frozen=True)
class Layout:
    """An array whose elements are the units of several blocks.

    An example is an image with two colours of pixels. Immutable and hashable; made by
    :meth:`flat` or :meth:`at`.

    **Example**

    >>> import numpy as np
    >>> from ebmpp import Bernoulli, Bilinear, FactorGraph
    >>> from ebmpp.ppl import Layout
    >>> board = np.indices((2, 2)).sum(0) % 2 == 0
    >>> families = {"even": Bernoulli(2), "odd": Bernoulli(2)}
    >>> graph = FactorGraph(families, factors=[Bilinear("even", "odd")])
    >>> layout = Layout.at(graph, (2, 2), {"even": board, "odd": ~board})
    >>> layout.join({"even": np.ones(2), "odd": np.zeros(2)}).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    shape: tuple[int, ...]
    blocks: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes."""
    places: tuple[int, ...]
    """Positions of the blocks' units in the flattened array, one block after the other."""

    def __post_init__(self) -> None:
        if sorted(self.places) != list(range(math.prod(self.shape))):
            raise checks.state_error(
                "Layout: places", "each index of the array once", self.places
            )

    @classmethod
    def flat(cls, graph: FactorGraph, blocks: Iterable[str]) -> "Layout":
        """Return the layout of one block with its shape, or of several, concatenated.

        Several blocks are flattened.

        :raises StateError: for an unknown block, or none.
        """
        blocks = states.check_names(blocks, graph.families)
        if not blocks:
            raise checks.state_error(
                "Layout.flat: blocks", "at least one block", blocks
            )
        shapes = [graph.families[b].shape for b in blocks]
        size = sum(map(math.prod, shapes))
        shape = shapes[0] if len(blocks) == 1 else (size,)
        return cls(shape, tuple(zip(blocks, shapes)), tuple(range(size)))

    @classmethod
    def at(
        cls,
        graph: FactorGraph,
        shape: tuple[int, ...],
        places: Mapping[str, ArrayLike],
    ) -> "Layout":
        """Return the layout of blocks at given places.

        :param shape: of the array.
        :param places: by block: a mask of ``shape``, or whole numbers, indices of the
            flattened array.
        :raises StateError: for an unknown block, or places that do not fill the array
            once.
        """
        states.check_names(places, graph.families)
        indices = []
        for b, place in places.items():
            name = f"Layout.at: places of block {b!r}"
            array = np.asarray(checks.numbers(name, place, StateError))
            index = np.flatnonzero(array) if array.dtype == bool else array.ravel()
            index = index[index % 1 == 0].astype(int).tolist()
            size = graph.families[b].size
            if len(index) != size:
                raise checks.state_error(
                    name,
                    f"{size} whole numbers, one per unit, or a mask of {size}",
                    place,
                )
            indices += index
        blocks = tuple((b, graph.families[b].shape) for b in places)
        return cls(tuple(shape), blocks, tuple(indices))

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
            value = jnp.asarray(x[b])
            batch = value.shape[: value.ndim - len(shape)]
            parts.append(value.reshape(*batch, math.prod(shape)))
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
            raise StateError(
                f"blocks {self.names} got shape {value.shape}, expected (..., *{self.shape})"
            )
        flat = value.reshape(*batch, len(self.places))
        if not self._in_order:
            flat = flat[..., np.asarray(self.places)]
        ends = np.cumsum([math.prod(shape) for _, shape in self.blocks])[:-1]
        parts = zip(self.blocks, jnp.split(flat, ends, axis=-1))
        return {b: part.reshape(*batch, *shape) for (b, shape), part in parts}


class UnitwiseSupport(constraints.Constraint):
    """The support of a value whose units are of several families."""

    def __init__(self, graph: FactorGraph, layout: Layout) -> None:
        self.graph = graph
        self.layout = layout
        # a gradient-based method must not update a site with any discrete unit
        self.is_discrete = any(
            graph.families[b].support.is_discrete for b in layout.names
        )
        self.event_dim = len(layout.shape)

    def __call__(self, x: Array) -> Array:
        """Return True where all units are in their support."""
        valid = jnp.array(True)
        for b, part in self.layout.split(x).items():
            family = self.graph.families[b]
            valid &= family.in_support(part).all(tuple(range(-len(family.shape), 0)))
        return valid

    def feasible_like(self, prototype: Array) -> Array:
        """Return a value in the support."""
        families = self.graph.families
        blocks = {b: states.placeholder(families[b]) for b in self.layout.names}
        value = self.layout.join(blocks).astype(jnp.result_type(prototype))
        return jnp.broadcast_to(value, jnp.shape(prototype))

    def eq(self, other: object, static: bool = False) -> bool:
        """Compare two supports."""
        if not isinstance(other, UnitwiseSupport):
            return False
        return self.graph == other.graph and self.layout == other.layout

    def tree_flatten(self) -> tuple:
        """Return no arrays."""
        return (), ((), dict(vars(self)))

    def __repr__(self) -> str:
        families = self.graph.families
        described = (f"{b}: {describe(families[b])}" for b in self.layout.names)
        return f"UnitwiseSupport({', '.join(described)})"


def joint_values(graph: FactorGraph, layout: Layout) -> Real[Array, "values ..."]:
    """Return every joint value of a layout, at most 2**20, ``(values, *layout.shape)``."""
    plan = enumeration.Plan(layout.names)
    enumeration.refuse_many(graph, plan, enumeration.MOST_LISTED)
    return layout.join(enumeration.list_states(graph, layout.names))


def is_index(family: Family) -> bool:
    """Return True if a unit takes the values 0, 1, ..., as NumPyro expects of enumerated sites."""
    with sharding.eager():  # concrete, even if called while tracing
        values = family.states()
        return values is not None and np.array_equal(values, np.arange(len(values)))


def is_own_statistic(family: Family) -> bool:
    """Return True if the statistic by which a unit interacts is its value."""
    with sharding.eager():
        values = family.states()
        if values is None:
            values = jnp.array([-1.5, 0.5, 3.0])
        return np.array_equal(family.interaction(family.statistics(values)), values)
