# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The pool that an estimator's mixture proposals come from, step after step.

It is made of states of the whole graph, which a step moves before its pairs begin and by keys of its own:
what the pairs draw does not enter it, so that given the past they are unbiased.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Blocks, Key, Params, Rows
from ebmpp.estimators.phases import row_keys
from ebmpp.graph import FactorGraph
from ebmpp.moves.layer import Layer, gibbs_sweep
from ebmpp.moves.mixture import Mixture, make_pool
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from ebmpp.sampling.pools import complete_rows

#: Where the states of a pool come from.
POOLS = ("data", "persistent")


@partial(jax.jit, static_argnums=(0, 3))
def begin(graph: FactorGraph, params: Params, data: Rows, size: int, key: Key) -> Blocks:
    """Rows of the data by chance, in turn where there are fewer than ``size``, with latents."""
    count = len(next(iter(data.values())))
    chosen = jnp.argsort(random.words(random.fold_in(key, 3), count))[jnp.arange(size) % count]
    rows = {b: jnp.take(v, chosen, axis=0) for b, v in data.items()}
    return complete_rows(Target(graph, params), rows, random.fold_in(key, 4))


def go_on(graph: FactorGraph, params: Params, pool: Rows, held: tuple[str, ...], key: Key) -> Rows:
    """The pool a sweep on, some blocks held."""
    keys = row_keys(key, len(next(iter(pool.values()))))
    return draw_sweep(Target(graph, params), pool, gibbs_sweep(graph, held), keys)[0]


def with_pool(target: Target, move: Mixture, pool: Rows, key: Key) -> Target:
    """A target whose moves propose from the pool: from draws of what is summed out given the rest of it."""
    keys = row_keys(key, len(next(iter(pool.values()))))
    rows = Layer(move.marginalize).draw(target, pool, keys)[0]
    return dataclasses.replace(
        target, pool=make_pool(target.graph, target.params, move, rows, target.clamped)
    )
