# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The joint values of some blocks as a list, and what kind of values a family has."""

from functools import lru_cache, partial

from jaxtyping import Real
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random, sharding
from ebmpp.distribution.layout import Layout
from ebmpp.exact import enumeration
from ebmpp.families import Family
from ebmpp.graph import FactorGraph


def values_of(graph: FactorGraph, layout: Layout) -> Real[Array, "values ..."]:
    """Every joint value of the layout's blocks, ``(values, *layout.shape)``.

    :raises IntractableError: for more than 2**20 of them, or units of infinitely many values.
    """
    enumeration.refuse_many(graph, layout.names, (), enumeration.MOST_LISTED)
    index = jnp.arange(enumeration.num_states(graph, layout.names), dtype=jnp.int32)
    return layout.join(jax.vmap(partial(enumeration.decode, graph, layout.names))(index))


@lru_cache(maxsize=128)
def is_index(family: Family) -> bool:
    """Whether a unit takes the values 0, 1, ..., which NumPyro expects of what it enumerates."""
    with sharding.at_once():  # known, also where a trace asks
        values = family.states()
        return values is not None and np.array_equal(values, np.arange(len(values)))


@lru_cache(maxsize=128)
def is_own_statistic(family: Family) -> bool:
    """Whether the statistic by which a unit interacts is its value."""
    with sharding.at_once():
        values = family.states()
        if values is None:
            key = random.key_pair(jax.random.key(0))
            words = random.words(key[None], family.size * family.num_words)
            values = family.initial(words.reshape(1, *family.shape, family.num_words))
        made = family.interaction(family.statistics(values))
        return made.shape == values.shape and np.array_equal(made, np.asarray(values, made.dtype))
