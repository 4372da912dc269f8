# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Swaps of neighbouring replicas: how likely they are, and who then has whose state."""

from collections.abc import Mapping

from jaxtyping import Float

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Eta, Rows
from ebmpp.graph import FactorGraph
from ebmpp.graph.transforms.replicate import Reference, Replicated
from ebmpp.moves.target import Target


def take(v: Array, order: Array) -> Array:
    """Replicas of every row in another order.

    :param v: shape ``(rows, num, ...)``.
    :param order: shape ``(rows, num)``.
    """
    return jnp.take_along_axis(v, order.reshape(order.shape + (1,) * (v.ndim - 2)), axis=1)


def new_order(took: Array, parity: Array) -> Array:
    """Whose state each replica gets when the neighbours of this parity that ``took`` do swap."""
    low = jnp.arange(took.shape[1])
    moved = (took & (low % 2 == parity)[None]).astype(jnp.int32)
    still = jnp.zeros((len(took), 1), jnp.int32)
    stays = jnp.arange(took.shape[1] + 1, dtype=jnp.int32)
    return stays[None] + jnp.concatenate([moved, still], 1) - jnp.concatenate([still, moved], 1)


def have_own_params(graph: FactorGraph) -> bool:
    """Whether each replica has params of its own."""
    return any(isinstance(f, Replicated) and f.own for f in graph.factors)


def log_ratio(
    target: Target, x: Rows, parity: Array | int, summed: tuple[str, ...] = ()
) -> Float[Array, "rows pairs"]:
    """Log of the acceptance ratio of every pair of neighbours, ``(rows, num - 1)``.

    :param parity: of the pairs that are meant. Where replicas have params of their own the others get 0: each
        pair asks for the energies of two models, while one energy tells all where only the betas differ.
    :param summed: blocks that are summed out, of replicas with params of their own.
    """
    if have_own_params(target.graph):
        return _own_ratio(target, x, parity, summed)
    return _shared_ratio(target, x)


def _shared_ratio(target: Target, x: Rows) -> Array:
    graph, params = target.graph, target.params
    tempered = [f for f in graph.factors if isinstance(f, Replicated) and f.tempered]

    def one(t: Mapping[str, Array]) -> Array:
        """What beta weighs of each replica's energy."""
        families = lambda f: tuple(graph.families[b] for b in f.blocks)
        each = (f.energies(params[f.name], *(t[b] for b in f.blocks), families=families(f)) for f in tempered)
        return jnp.asarray(sum(each))

    betas = params[tempered[0].name][0]
    return jnp.diff(betas)[None] * jnp.diff(jax.vmap(one)(graph.statistics(x)), axis=1)


def _own_ratio(target: Target, x: Rows, parity: Array | int, summed: tuple[str, ...]) -> Array:
    kept = {b: v for b, v in x.items() if b not in summed}
    rows, num = next(iter(x.values())).shape[:2]
    partner = new_order(jnp.ones((rows, num - 1), bool), jnp.asarray(parity))
    swapped = {b: take(v, partner) for b, v in kept.items()}
    (here, eta), (there, other) = (_affine(target, z, summed) for z in (kept, swapped))
    gain = there - here
    for b in summed:
        each = target.graph.families[b].log_normalizer_difference(eta[b], other[b])
        gain = gain + each.reshape(rows, num, -1).sum(-1)
    meant = jnp.arange(num - 1) % 2 == parity
    return jnp.where(meant[None], gain[:, :-1] + gain[:, 1:], 0)


def _affine(target: Target, x: Rows, summed: tuple[str, ...]) -> tuple[Float[Array, "rows replicas"], Eta]:
    """-E of each replica at zero statistics of ``summed``, and these blocks' natural parameters."""
    graph, params = target.graph, target.params
    factors = [f for f in graph.factors if isinstance(f, Replicated | Reference)]
    zero = {b: jnp.zeros(graph.families[b].statistic_shape, jnp.result_type(float)) for b in summed}

    def one(t: Mapping[str, Array]) -> tuple[Array, Eta]:
        def negative(inside: Mapping[str, Array]) -> tuple[Array, Array]:
            whole = {**t, **inside}
            families = lambda f: tuple(graph.families[b] for b in f.blocks)
            at = lambda f: (whole[b] for b in f.blocks)
            each = [-f.weighted(params[f.name], *at(f), families=families(f)) for f in factors]
            total = jnp.asarray(sum(each))
            return total.sum(), total  # of replicas that have nothing to do with one another

        (_, each), eta = jax.value_and_grad(negative, has_aux=True)(zero)
        return each, eta

    return jax.vmap(one)(graph.statistics(x))
