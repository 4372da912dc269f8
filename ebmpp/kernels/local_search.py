# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Local search: to a local mode, layer by layer."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp import bits, derived, states, sweeps
from ebmpp.errors import StateError
from ebmpp.graph import FactorGraph, Params


class LocalMode(NamedTuple):
    """Where :func:`local_search` ended."""

    state: dict[str, Array]
    """Every block, clamped ones included, ``(*batch, *shape)``."""
    steps: Array
    """Passes over the layers that raised the density, shape ``(*batch,)``."""


def local_search(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    init: Mapping[str, Array] | None = None,
    num_rows: int | None = None,
    **clamped: Array,
) -> LocalMode:
    """Set layer after layer to its conditional mode, in random order, until the density stops rising.

    With clamped blocks this completes the others: the way to fill in what is missing.

    :param graph: the model; every free block's family needs a mode.
    :param params: its params.
    :param rng_key: a jax key, for the order of the layers and for what ``init`` leaves out.
    :param init: values of some or all free blocks, with leading axes; what is left out is drawn uniformly.
    :param num_rows: independent searches, where neither ``init`` nor a clamped block has leading axes.
    :param clamped: blocks that are held, with leading axes or without.
    :return: a :class:`LocalMode`.
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
    graph.check(params)
    layers = sweeps.schedule(graph, clamped)
    if not layers:
        raise StateError("every block is clamped: there is nothing to search for")
    given = {**(init or {}), **clamped}
    rows, batch = states.as_rows(graph.families, given)
    if num_rows is not None:
        if batch or num_rows < 1:
            raise StateError(f"num_rows={num_rows} with leading axes {batch}: give a positive one of the two")
        batch, rows = (num_rows,), {b: jnp.repeat(v, num_rows, axis=0) for b, v in rows.items()}
    count = 1 if not batch else int(jnp.prod(jnp.array(batch)))
    pair = bits.key_pair(rng_key)
    x = sweeps.initial_rows(graph, graph.families, bits.fold_in(pair, 0, jnp.arange(count)))
    x |= {b: v.astype(x[b].dtype) for b, v in rows.items()}
    found, steps = _search(graph, layers, params, x, jax.random.fold_in(rng_key, 1))
    shaped = {b: v.reshape(batch + graph.families[b].shape) for b, v in found.items()}
    return LocalMode(shaped, steps.reshape(batch))


@partial(jax.jit, static_argnums=(0, 1))
def _search(
    graph: FactorGraph, layers: sweeps.Schedule, params: Params, x: dict[str, Array], rng_key: Array
) -> tuple[dict[str, Array], Array]:
    def density(x: dict[str, Array]) -> Array:
        def one(row: dict[str, Array]) -> Array:
            energy = derived.energy(graph, params, graph.statistics(row))
            return derived.log_base_measure(graph, row) - energy

        return jax.vmap(one)(x)

    def to_mode(blocks: tuple[str, ...], x: dict[str, Array]) -> dict[str, Array]:
        eta = sweeps.natural_rows(graph, params, x, blocks)
        return x | {b: graph.families[b].mode(eta[b]).astype(x[b].dtype) for b in blocks}

    branches = [partial(to_mode, blocks) for blocks in layers]

    def one_pass(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        number, x, value, steps, _ = carry
        order = jax.random.permutation(jax.random.fold_in(rng_key, number), len(layers))
        moved = lax.fori_loop(0, len(layers), lambda i, x: lax.switch(order[i], branches, x), x)
        # A pass that does not raise the density ends a row's search: ties and rounding cannot cycle.
        reached = density(moved)
        better = reached > value
        keep = lambda a, b: jnp.where(better.reshape(-1, *(1,) * (a.ndim - 1)), a, b)  # noqa: E731
        x = jax.tree.map(keep, moved, x)
        return number + 1, x, jnp.where(better, reached, value), steps + better, better.any()

    start = (jnp.zeros((), jnp.int32), x, density(x), jnp.zeros(len(density(x)), jnp.int32), jnp.array(True))
    _, x, _, steps, _ = lax.while_loop(lambda carry: carry[-1], one_pass, start)
    return x, steps
