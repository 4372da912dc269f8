# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local search: to a local mode, layer by layer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
    """Where :func:`local_search` ended."""

    state: dict[str, Array]
    """Every block, clamped ones included, ``(*batch, *shape)``."""
    steps: Array
    """Passes over the layers that changed the state, shape ``(*batch,)``."""


class SearchState(NamedTuple):
    """The state of :class:`LocalSearch`.

    - **z** - a dict of the free blocks, each of shape ``(*batch, *shape)``.
    - **steps** - passes over the layers that changed ``z``, shape ``(*batch,)``.
    - **found** - whether the last pass did not, so that ``z`` is a local mode, shape ``(*batch,)``.
    - **log_density** - of ``z``, unnormalised, shape ``(*batch,)``.
    - **rng_key** - the run's key.
    """

    z: dict[str, Array]
    steps: Array
    found: Array
    log_density: Array
    rng_key: Array


class LocalSearch(RowKernel[SearchState]):
    """Every block of a layer set to its conditional mode, layer after layer: a kernel that climbs.

    To complete what is missing, to look at modes, and to start other kernels.

    A step is a pass over the layers; a search that has found its local mode stays there. Each row starts at
    a layer of its own, at random. The draws are no draws of the model: clamp blocks, or give
    :class:`~ebmpp.Observed` ones, to complete the others; start kernels by ``init_params=mcmc.last_state.z``
    (their ``init="local_mode"`` does so by itself).
    :func:`~ebmpp.local_search` runs all searches to their end in one call.

    :param graph: the declaration; every free block's family needs a mode.

    **References**

    1. Taniguchi, Suzuki, Iwasawa, Matsuo (2023), Algorithms 1 and 5.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> mcmc = MCMC(ebmpp.kernels.LocalSearch(rbm), num_warmup=0, num_samples=10, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), rbm.init(jax.random.key(0)))
    >>> mcmc.last_state.found.item()
    True
    """

    def __init__(self, graph: FactorGraph) -> None:
        super().__init__(graph)

    def _init_one(self, rng_key: Array, target: Target, init_params: dict | None) -> SearchState:
        x = self._start(target, rng_key, init_params)
        return _state(target, search.begin(target, x, target.keys(rng_key, 1)), rng_key)

    def _sample_one(self, state: SearchState, target: Target) -> SearchState:
        flat = lambda a: a.reshape(target.num_rows)
        value, steps, going = flat(state.log_density), flat(state.steps), ~flat(state.found)
        at = search.Search(target.to_rows(state.z), value, steps, going)
        return _state(target, search.one_pass(target, at), state.rng_key)

    def get_diagnostics_str(self, state: SearchState) -> str:
        """How many searches have ended, and after how many passes."""
        found, steps = np.asarray(state.found), np.asarray(state.steps)
        mean = f", after {steps[found].mean():.3g} steps" if found.any() else ""
        return f"{int(found.sum())} of {found.size} searches at a local mode{mean}"


def _state(target: Target, made: search.Search, rng_key: Array) -> SearchState:
    shaped = lambda a: a.reshape(target.batch)
    z = target.from_rows(made.x)
    return SearchState(z, shaped(made.steps), shaped(~made.going), shaped(made.value), rng_key)


def local_search(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    init: Mapping[str, Array] | None = None,
    num_rows: int | None = None,
    **clamped: Array | states.Observed,
) -> LocalMode:
    """Set layer after layer to its conditional mode, until nothing changes.

    Units of two values that are as likely at either get the upper one.

    Each row starts at a layer of its own, at random. With clamped blocks or observed units this completes
    the others: the way to fill in what is missing.

    :param graph: the model; every free block's family needs a mode.
    :param params: its params.
    :param rng_key: a jax key, for the first layer and for what ``init`` leaves out.
    :param init: values of some or all free blocks, with leading axes; what is left out is drawn uniformly.
    :param num_rows: independent searches, where neither ``init`` nor a clamped block has leading axes.
    :param clamped: blocks that are held, with leading axes or without; an :class:`~ebmpp.Observed` one is
        held at its known units.
    :raises StateError: for values that do not fit the graph, or no free block.
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
    given = states.as_clamped(graph.families, clamped)
    if len(given.whole) == len(graph.families):
        raise StateError("every block is clamped: there is nothing to search for")
    start, start_batch = states.as_rows(graph.families, _free_values(init, given))
    axes = (given.batch, start_batch)
    try:
        batch = np.broadcast_shapes(*axes)
    except ValueError:
        raise StateError(f"leading axes of clamped blocks and of init do not broadcast: {axes}") from None
    if num_rows is not None:
        if batch:
            raise StateError(
                f"local_search: num_rows={num_rows} with leading axes {batch}: give one of the two"
            )
        batch = (num_rows,)

    def spread(rows: Mapping[str, Array], own: tuple[int, ...]) -> Blocks:
        shape = lambda b: graph.families[b].shape
        over = lambda b, v: jnp.broadcast_to(v.reshape(own + shape(b)), batch + shape(b))
        return {b: over(b, v).reshape(-1, *shape(b)) for b, v in rows.items()}

    held = (spread(rows, given.batch) for rows in (given.whole, given.partial, given.keep))
    target, key = Target(graph, params, states.Clamped(*held, batch)), random.key_pair(rng_key)
    x = search.started(
        target, random.fold_in(key, 0, jnp.arange(target.num_rows)), spread(start, start_batch)
    )
    found = _search(target, x, random.fold_in(key, 1, jnp.arange(target.num_rows)))
    shaped = {b: v.reshape(batch + graph.families[b].shape) for b, v in found.x.items()}
    return LocalMode(shaped, found.steps.reshape(batch))


_search = Compiled(search.local_modes)


def _free_values(init: Any, given: states.Clamped) -> Mapping[str, Any]:
    """:raises StateError: for starts that are no dict, or of a block that is clamped."""
    if init is not None and not isinstance(init, Mapping):
        raise StateError(f"local_search: init is a dict of blocks, not {checks.tell(init)}")
    twice = sorted(set(init or {}) & set(given.whole))
    if twice:
        raise StateError(f"block {twice[0]!r} is clamped and in init: give it once")
    return init or {}
