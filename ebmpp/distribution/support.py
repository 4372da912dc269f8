# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What values the units of several blocks can take, in one array."""

from numpyro.distributions import constraints

from jax import Array
import jax.numpy as jnp

from ebmpp.distribution.layout import Layout
from ebmpp.families.values import describe
from ebmpp.graph import FactorGraph


def support_of(graph: FactorGraph, layout: Layout) -> constraints.Constraint:
    """Values that the layout's units can take."""
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
        # one discrete unit is enough: a gradient-based method must not take the site
        return any(self.graph.families[b].support.is_discrete for b in self.layout.names)

    @property
    def event_dim(self) -> int:
        return len(self.layout.shape)

    def __call__(self, x: Array) -> Array:
        valid = jnp.array(True)
        for b, part in self.layout.split(x).items():
            family = self.graph.families[b]
            valid &= family.in_support(part).all(tuple(range(-len(family.shape), 0)))
        return valid

    def feasible_like(self, prototype: Array) -> Array:
        families = {b: self.graph.families[b] for b in self.layout.names}
        made = {b: f.initial(jnp.zeros((*f.shape, f.num_words), jnp.uint32)) for b, f in families.items()}
        values = self.layout.join(made).astype(jnp.result_type(prototype))
        return jnp.broadcast_to(values, jnp.shape(prototype))

    def eq(self, other: object, static: bool = False) -> bool:
        same = isinstance(other, UnitwiseSupport)
        return same and (self.graph, self.layout) == (other.graph, other.layout)

    def tree_flatten(self) -> tuple:
        return (), ((), {"graph": self.graph, "layout": self.layout})

    def __repr__(self) -> str:
        listed = (f"{b}: {describe(self.graph.families[b])}" for b in self.layout.names)
        return f"UnitwiseSupport({', '.join(listed)})"
