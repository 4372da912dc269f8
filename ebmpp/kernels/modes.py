# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local search for modes, layer by layer."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.core import Blocks, Params, checks, random
from ebmpp.core.compile import Compiled
from ebmpp.errors import StateError
from ebmpp.graph import FactorGraph, states
from ebmpp.kernels.base import RowKernel
from ebmpp.moves import search
from ebmpp.moves.target import Target


class LocalMode(NamedTuple):
    """Result of :func:`local_search`."""

    state: dict[str, Array]
    """All blocks, clamped ones included, ``(*batch, *shape)``."""
    steps: Array
    """Number of passes over the layers that changed the state, shape ``(*batch,)``."""


class SearchState(NamedTuple):
    """State of :class:`LocalSearch`.

    - **z** - the free blocks, each of shape ``(*batch, *shape)``.
    - **steps** - passes over the layers that changed ``z``, shape ``(*batch,)``.
    - **converged** - True where the last pass did not, so that ``z`` is a local mode, shape ``(*batch,)``.
    - **log_density** - unnormalised, of ``z``, shape ``(*batch,)``.
    - **rng_key** - the run's key.
    """

    z: dict[str, Array]
    steps: Array
    converged: Array
    log_density: Array
    rng_key: Array


class LocalSearch(RowKernel[SearchState]):
    """Local search: each step sets every layer in turn to its conditional mode.

    For completion of missing values, for a look at modes, and for starts of other kernels
    (``init_params=mcmc.last_state.z``). The draws are not draws of the model. A search that has reached its
    local mode stays there. Each row starts at a random layer. :func:`~ebmpp.local_search` runs all searches
    to their end in one call.

    :param graph: the declaration; every free block's family must have a mode.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> mcmc = MCMC(ebmpp.kernels.LocalSearch(rbm), num_warmup=0, num_samples=10, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), rbm.init(jax.random.key(0)))
    >>> mcmc.last_state.converged.item()
    True
    """

    def __init__(self, graph: FactorGraph) -> None:
        super().__init__(graph)

    def _init_one(self, rng_key: Array, target: Target, init_params: dict | None) -> SearchState:
        x = self._start(target, rng_key, init_params)
        return _state(target, search.begin(target, x, target.keys(rng_key, 1)), rng_key)

    def _sample_one(self, state: SearchState, target: Target) -> SearchState:
        flat = lambda a: a.reshape(target.num_rows)
        value, steps, going = flat(state.log_density), flat(state.steps), ~flat(state.converged)
        at = search.Search(target.to_rows(state.z), value, steps, going)
        return _state(target, search.one_pass(target, at), state.rng_key)

    def get_diagnostics_str(self, state: SearchState) -> str:
        """Return the number of searches that have converged, and their mean number of passes."""
        done, steps = np.asarray(state.converged), np.asarray(state.steps)
        mean = f", after {steps[done].mean():.3g} steps" if done.any() else ""
        return f"{int(done.sum())} of {done.size} searches at a local mode{mean}"


def _state(target: Target, at: search.Search, rng_key: Array) -> SearchState:
    shaped = lambda a: a.reshape(target.batch)
    return SearchState(target.from_rows(at.x), shaped(at.steps), shaped(~at.going), shaped(at.value), rng_key)


def local_search(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    init: Mapping[str, Array] | None = None,
    num_rows: int | None = None,
    **clamped: Array | states.Observed,
) -> LocalMode:
    """Set each layer in turn to its conditional mode, until nothing changes.

    Of two equally likely values a unit gets the upper one. Each row starts at a random layer. With clamped
    blocks or observed units this completes the others.

    :param graph: the model; every free block's family must have a mode.
    :param params: its params.
    :param rng_key: a jax key, for the first layer and for blocks that are not in ``init``.
    :param init: values of some or all free blocks, with leading axes; other blocks are drawn uniformly.
    :param num_rows: number of searches, where neither ``init`` nor a clamped block has leading axes.
    :param clamped: clamped blocks, with or without leading axes; an :class:`~ebmpp.Observed` block is clamped
        at its known units.
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
    checks.instance("local_search: graph", graph, FactorGraph, "a FactorGraph")
    rng_key = checks.key("local_search: rng_key", rng_key)
    num_rows = checks.optional_count("local_search: num_rows", num_rows)
    graph.check(params)
    held = states.as_clamped(graph.families, clamped)
    if len(held.full) == len(graph.families):
        raise StateError("local_search: at least one block must be free, and all are clamped.")
    init = {} if init is None else init
    if not isinstance(init, Mapping) or set(init) & set(held.full):
        raise StateError(f"local_search: init must be a dict of free blocks, got {checks.tell(init)}.")
    start, start_batch = states.as_rows(graph.families, init)
    try:
        batch = np.broadcast_shapes(held.batch, start_batch)
    except ValueError:
        raise StateError(
            f"local_search: leading axes of init must broadcast to {held.batch}, got {start_batch}."
        ) from None
    if num_rows is not None and batch:
        raise StateError(f"local_search: num_rows must not be given with axes {batch}, got {num_rows}.")
    batch = batch if num_rows is None else (num_rows,)

    def spread(rows: Mapping[str, Array], axes: tuple[int, ...]) -> Blocks:
        shape = lambda b: graph.families[b].shape
        over = lambda b, v: jnp.broadcast_to(v.reshape(axes + shape(b)), batch + shape(b))
        return {b: over(b, v).reshape(-1, *shape(b)) for b, v in rows.items()}

    rows = (spread(rows, held.batch) for rows in (held.full, held.partial, held.keep))
    target, key = Target(graph, params, states.Clamped(*rows, batch)), random.key_pair(rng_key)
    x = search.started(
        target, random.fold_in(key, 0, jnp.arange(target.num_rows)), spread(start, start_batch)
    )
    result = _search(target, x, random.fold_in(key, 1, jnp.arange(target.num_rows)))
    shaped = {b: v.reshape(batch + graph.families[b].shape) for b, v in result.x.items()}
    return LocalMode(shaped, result.steps.reshape(batch))


_search = Compiled(search.local_modes)
