# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Swaps of neighbouring replicas: acceptance ratios, permutations, and ladders of equal rejection."""

from collections.abc import Mapping, Sequence
from functools import partial

from jaxtyping import Float

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Eta, Rows
from ebmpp.graph import Factor
from ebmpp.graph.transforms.replicate import Reference, Replicated
from ebmpp.moves.target import Target


def take(v: Array, order: Array) -> Array:
    """Permute the replicas ``(rows, num, ...)`` of every row by ``order``, ``(rows, num)``."""
    return jnp.take_along_axis(
        v, order.reshape(order.shape + (1,) * (v.ndim - 2)), axis=1
    )


def new_order(accept: Array, parity: Array) -> Array:
    """Return the replica whose state each replica gets, where accepted neighbours of this parity swap."""
    low_swaps = (accept & (jnp.arange(accept.shape[1]) % 2 == parity)[None]).astype(
        jnp.int32
    )
    still = jnp.zeros((len(accept), 1), jnp.int32)
    stays = jnp.arange(accept.shape[1] + 1, dtype=jnp.int32)
    return (
        stays[None]
        + jnp.concatenate([low_swaps, still], 1)
        - jnp.concatenate([still, low_swaps], 1)
    )


def log_ratio(
    target: Target, x: Rows, parity: Array | int, summed: tuple[str, ...] = ()
) -> Array:
    """Return the log of the acceptance ratio of every pair of neighbours, ``(rows, num - 1)``.

    :param parity: of the pairs that are needed. Where replicas have their own params
        the others get 0: a pair then takes the energies of two models, whereas one
        energy is enough where only the betas differ.
    """
    replicated = [
        f for f in target.graph.factors if isinstance(f, Replicated) and f.tempered
    ]
    if replicated[0].separate:
        return _own_ratio(target, x, parity, summed)
    energies = jax.vmap(partial(_per_replica, target, "energies", replicated))(
        target.graph.statistics(x)
    )
    return jnp.diff(target.params[replicated[0].name][0])[None] * jnp.diff(
        energies, axis=1
    )


def _per_replica(
    target: Target, method: str, factors: Sequence[Factor], t: Mapping[str, Array]
) -> Array:
    """Return the sum of ``factors`` in each replica, by their method of this name."""
    families = target.graph.families

    def value(f: Factor) -> Array:
        inputs = (t[b] for b in f.blocks)
        scope = tuple(families[b] for b in f.blocks)
        return getattr(f, method)(target.params[f.name], *inputs, families=scope)

    return jnp.asarray(sum(map(value, factors)))


def _own_ratio(
    target: Target, x: Rows, parity: Array | int, summed: tuple[str, ...]
) -> Array:
    rest = {b: v for b, v in x.items() if b not in summed}
    rows, num = next(iter(x.values())).shape[:2]
    partner = new_order(jnp.ones((rows, num - 1), bool), jnp.asarray(parity))
    swapped = {b: take(v, partner) for b, v in rest.items()}
    (here, eta), (there, other) = (_affine(target, z, summed) for z in (rest, swapped))
    gain = there - here
    for b in summed:
        difference = target.graph.families[b].log_normalizer_difference(
            eta[b], other[b]
        )
        gain = gain + difference.reshape(rows, num, -1).sum(-1)
    needed = jnp.arange(num - 1) % 2 == parity
    return jnp.where(needed[None], gain[:, :-1] + gain[:, 1:], 0)


def _affine(
    target: Target, x: Rows, summed: tuple[str, ...]
) -> tuple[Float[Array, "rows replicas"], Eta]:
    """Return -E of each replica at zero statistics of ``summed``, and these blocks' natural parameters."""
    graph = target.graph
    factors = [f for f in graph.factors if isinstance(f, Replicated | Reference)]
    zero = {
        b: jnp.zeros(graph.families[b].statistic_shape, jnp.result_type(float))
        for b in summed
    }

    def affine_parts(t: Mapping[str, Array]) -> tuple[Array, Eta]:
        def negative(inside: Mapping[str, Array]) -> tuple[Array, Array]:
            total = -_per_replica(target, "weighted", factors, {**t, **inside})
            return total.sum(), total  # replicas do not interact

        (_, total), eta = jax.value_and_grad(negative, has_aux=True)(zero)
        return total, eta

    return jax.vmap(affine_parts)(graph.statistics(x))


def equalize(betas: Array, rejection: Array) -> Array:
    """Return betas between which swaps would be rejected equally often, given the rates of neighbours.

    The rejection rates, summed from hot to cold, estimate the communication barrier as
    a function of beta; the new betas divide it into equal parts: Syed, Bouchard-Cote,
    Deligiannidis, Doucet (2022), *Non-reversible parallel tempering*, section 5.

    >>> equalize(jnp.array([0, 0.5, 1]), jnp.array([0.1, 0.3])).round(2).tolist()
    [0.0, 0.67, 1.0]
    """
    # neighbours whose swaps are never rejected must not coincide
    barrier = jnp.cumsum(jnp.concatenate([jnp.zeros(1), rejection + 1e-4]))
    levels = jnp.linspace(0.0, 1.0, len(betas)) * barrier[-1]
    return jnp.interp(levels, barrier, betas).at[0].set(betas[0]).at[-1].set(betas[-1])
