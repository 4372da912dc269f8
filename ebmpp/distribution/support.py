# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The values that the units of several blocks can take, in one array."""

from functools import partial

from jaxtyping import Real
import numpy as np
from numpyro.distributions import constraints

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import sharding
from ebmpp.distribution.layout import Layout
from ebmpp.exact import enumeration
from ebmpp.families import Family
from ebmpp.families.values import describe
from ebmpp.graph import FactorGraph


def support_of(graph: FactorGraph, layout: Layout) -> constraints.Constraint:
    """Return the support of a value with the layout's units."""
    first, *others = (graph.families[b].support for b in layout.names)
    if all(first == other for other in others):
        return constraints.independent(first, len(layout.shape))
    return UnitwiseSupport(graph, layout)


class UnitwiseSupport(constraints.Constraint):
    """The support of a value whose units are of several families."""

    def __init__(self, graph: FactorGraph, layout: Layout) -> None:
        self.graph, self.layout = graph, layout

    @property
    def is_discrete(self) -> bool:
        """True if any unit is discrete: a gradient-based method must then not update the site."""
        return any(self.graph.families[b].support.is_discrete for b in self.layout.names)

    @property
    def event_dim(self) -> int:
        """The value's number of axes."""
        return len(self.layout.shape)

    def __call__(self, x: Array) -> Array:
        """Return True where all units are in their support."""
        valid = jnp.array(True)
        for b, part in self.layout.split(x).items():
            family = self.graph.families[b]
            valid &= family.in_support(part).all(tuple(range(-len(family.shape), 0)))
        return valid

    def feasible_like(self, prototype: Array) -> Array:
        """Return a value in the support."""
        families = {b: self.graph.families[b] for b in self.layout.names}
        blocks = {b: f.initial(jnp.zeros((*f.shape, f.num_words), jnp.uint32)) for b, f in families.items()}
        value = self.layout.join(blocks).astype(jnp.result_type(prototype))
        return jnp.broadcast_to(value, jnp.shape(prototype))

    def eq(self, other: object, static: bool = False) -> bool:
        """Compare two supports."""
        same = isinstance(other, UnitwiseSupport)
        return same and (self.graph, self.layout) == (other.graph, other.layout)

    def tree_flatten(self) -> tuple:
        """Return no arrays."""
        return (), ((), {"graph": self.graph, "layout": self.layout})

    def __repr__(self) -> str:
        families = (f"{b}: {describe(self.graph.families[b])}" for b in self.layout.names)
        return f"UnitwiseSupport({', '.join(families)})"


def values_of(graph: FactorGraph, layout: Layout) -> Real[Array, "values ..."]:
    """Return every joint value of the layout's blocks, at most 2**20, ``(values, *layout.shape)``."""
    enumeration.refuse_many(graph, layout.names, (), enumeration.MOST_LISTED)
    index = jnp.arange(enumeration.num_states(graph, layout.names), dtype=jnp.int32)
    return layout.join(jax.vmap(partial(enumeration.decode, graph, layout.names))(index))


def is_index(family: Family) -> bool:
    """Return True if a unit takes the values 0, 1, ..., which NumPyro expects of enumerated sites."""
    with sharding.at_once():  # concrete, even if called while tracing
        values = family.states()
        return values is not None and np.array_equal(values, np.arange(len(values)))


def is_own_statistic(family: Family) -> bool:
    """Return True if the statistic by which a unit interacts is its value."""
    with sharding.at_once():
        values = family.states()
        values = jnp.array([-1.5, 0.5, 3.0]) if values is None else values
        return np.array_equal(family.interaction(family.statistics(values)), values)
