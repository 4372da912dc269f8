# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local search for modes, layer by layer."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from jax import Array

from ebmpp.core import Blocks, Counts, Params, State, checks, compiled
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
    :param params: of one model; or with a leading axis of parameter sets, of several in
        one program. Values of ``init`` and of the result then have that axis first, and
        set i has the result of a call with the key ``jax.random.fold_in(rng_key, i)``.
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
    target = Target.checked("local_search", graph, params, clamped, sets=True)
    sets = target.sets
    start, axes = sweeps.free_rows(
        "local_search: init", target, {} if init is None else init
    )
    if start and sets:
        if axes[:1] != sets:
            raise checks.state_error(
                "local_search: leading axes of init", f"{sets} first, of sets", axes
            )
        axes = axes[1:]
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
    init_rows = {
        b: v.reshape(*sets, -1, *graph.families[b].shape).take(
            _spread(axes, batch), len(sets)
        )
        for b, v in start.items()
    }
    x, steps = _search(target, target.set_keys(rng_key), init_rows)
    lead = sets + batch
    state = {b: v.reshape(lead + graph.families[b].shape) for b, v in x.items()}
    return LocalMode(state, steps.reshape(lead))


def _spread(axes: tuple[int, ...], batch: tuple[int, ...]) -> np.ndarray:
    """Return, for each row of ``batch``, the number of the row with leading axes ``axes``."""
    return np.broadcast_to(np.arange(math.prod(axes)).reshape(axes), batch).ravel()


@compiled
def _search(target: Target, rng_key: Array, init: Blocks) -> tuple[Blocks, Counts]:
    def search_rows(target, rng_key, init):
        x = search.initial_states(target, target.keys(rng_key, 0), init)
        result = search.local_modes(target, x, target.keys(rng_key, 1))
        return result.x, result.steps

    return target.over_sets(search_rows, rng_key, init)
