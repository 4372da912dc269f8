# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local search for modes, layer by layer."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from jax import Array

from ebmpp.core import Blocks, Params, State, checks, compiled
from ebmpp.errors import StateError
from ebmpp.graph import FactorGraph, states
from ebmpp.moves import Target, search, sweeps


class LocalMode(NamedTuple):
    """Result of :func:`local_search`."""

    state: Blocks
    """All blocks, clamped ones included, ``(*batch, *shape)``."""
    steps: Array
    """Number of passes over the layers that changed the state, shape ``(*batch,)``."""


def local_search(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    init: State | None = None,
    num_rows: int | None = None,
    **clamped: Array | states.Observed,
) -> LocalMode:
    """Set each layer in turn to its conditional mode, until nothing changes.

    Of two equally likely values a unit gets the upper one. Each row starts at a random
    layer. With clamped blocks or observed units this completes the others.

    :param graph: the model; every free block's family must have a mode.
    :param rng_key: a jax key, for the first layer and for blocks that are not in
        ``init``.
    :param init: values of some or all free blocks, with leading axes; other blocks are
        drawn given these.
    :param num_rows: number of searches, where neither ``init`` nor a clamped block has
        leading axes.
    :param clamped: clamped blocks, with or without leading axes; an
        :class:`~ebmpp.Observed` block is clamped at its known units.
    :raises StateError: for values that do not fit the graph, or if no block is free.
    :raises NotImplementedError: for a family without a mode.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), Algorithms 1 and 5.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> params = rbm.init(jax.random.key(0))
    >>> mode = ebmpp.local_search(rbm, params, rng_key=jax.random.key(1), num_rows=5)
    >>> mode.state["v"].shape, mode.steps.shape
    ((5, 4), (5,))
    """
    rng_key = checks.key("local_search: rng_key", rng_key)
    num_rows = checks.optional_count("local_search: num_rows", num_rows)
    target = Target.checked("local_search", graph, params, clamped)
    start, axes = sweeps.free_rows(
        "local_search: init", target, {} if init is None else init
    )
    rows = () if num_rows is None else (num_rows,)
    try:
        batch = np.broadcast_shapes(target.batch, axes, rows)
    except ValueError:
        batch = None
    if batch is None or num_rows not in (None, math.prod(batch)):
        raise StateError(
            "local_search: num_rows and leading axes of init and of clamped blocks must "
            f"broadcast, got {num_rows}, {axes} and {target.batch}."
        )
    fixed = target.fixed.take(_spread(target.batch, batch))
    target = dataclasses.replace(target, fixed=dataclasses.replace(fixed, batch=batch))
    init_rows = {b: v[_spread(axes, batch)] for b, v in start.items()}
    x = search.compiled_initial_states(target, target.keys(rng_key, 0), init_rows)
    result = _search(target, x, target.keys(rng_key, 1))
    families = graph.families
    state = {b: v.reshape(batch + families[b].shape) for b, v in result.x.items()}
    return LocalMode(state, result.steps.reshape(batch))


def _spread(axes: tuple[int, ...], batch: tuple[int, ...]) -> np.ndarray:
    """Return, for each row of ``batch``, the number of the row with leading axes ``axes``."""
    return np.broadcast_to(np.arange(math.prod(axes)).reshape(axes), batch).ravel()


_search = compiled(search.local_modes)
