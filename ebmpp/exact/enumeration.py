# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sums over the states of small models: the plan of which blocks to enumerate, and the sum.

One independent set of blocks is summed out in closed form, and the joint states of the
others are enumerated: a 784-16 Boltzmann machine costs 2**16 terms, not 2**800.
Gaussian blocks that interact with one another are integrated jointly. All sums can be
differentiated.
"""

from collections.abc import Iterable
from functools import partial
import math
from types import MappingProxyType
from typing import NamedTuple

from jaxtyping import Integer, Real
import networkx as nx
import numpy as np

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ebmpp.core import Blocks, Params, State
from ebmpp.core.backend import full_precision
from ebmpp.core.types import Scalar
from ebmpp.errors import IntractableError
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, energy

_MOST_STATES = 2**25  # about a minute for a few hundred summed units on two cores
#: limit of joint states that are stored together, as a table or to draw from
MOST_LISTED = 2**20
#: states in flight; with 784 summed units their natural parameters take 50 MB
CHUNK = 2**14
_MOST_HESSIANS = 2**20  # entries of the precisions in flight
_MOST_BLOCKS = (
    16  # up to which every maximal independent set is tried (at most 3**(16 / 3) = 350)
)

Names = tuple[str, ...]
#: Number of a joint state.
Number = Integer[Array, ""]
_NONE: State = MappingProxyType({})
_ESTIMATE = (
    "Estimate the sum by annealed importance sampling, ebmpp.ais(graph, params, "
    "rng_key=...)."
)


class Plan(NamedTuple):
    """Treatment of each block that is unknown in whole or in part."""

    enumerated: tuple[str, ...]
    summed: tuple[str, ...]
    integrated: tuple[str, ...]
    lacking: tuple[tuple[str, int], ...] = ()
    """Blocks with some known units, and the largest number of their unknown units."""


def values_of(family: Family) -> Real[Array, "values"]:
    """Return every value of a unit; refuse infinitely many."""
    if (values := family.states()) is None:
        raise IntractableError(
            f"units of {family!r} take infinitely many values, so they cannot be listed."
        )
    return values


def num_states(
    graph: FactorGraph, blocks: Iterable[str], lacking: Iterable[tuple[str, int]] = ()
) -> int:
    """Return the number of joint states of ``blocks``, which take finitely many values; see :class:`Plan`."""
    free = {b: graph.families[b].size for b in blocks} | {
        b: n for b, n in lacking if b in blocks
    }
    return math.prod(len(values_of(graph.families[b])) ** n for b, n in free.items())


def count_text(count: int) -> str:
    """Return a count as a power of two."""
    return f"2**{math.log2(count):.4g}"


def make_plan(
    graph: FactorGraph,
    known: Iterable[str] = (),
    lacking: Iterable[tuple[str, int]] = (),
) -> Plan:
    """Return the plan that leaves the fewest states to enumerate, where the blocks ``known`` are known.

    :raises IntractableError: when blocks of infinitely many states interact, or too
        many states remain.
    """
    known = set(known)
    free = [b for b in graph.families if b not in known]
    infinite = {b for b in free if graph.families[b].states() is None}
    gaussian = {b for b in infinite if graph.families[b].is_quadratic}
    integrated = {b for edge in graph.interacting(gaussian) for b in edge}
    for a, b in graph.interacting(infinite):
        if not {a, b} <= integrated:
            raise IntractableError(
                f"blocks {a!r} and {b!r} interact and both take infinitely many "
                "values, so they can be neither enumerated nor summed out in closed "
                f"form. {_ESTIMATE}"
            )
    excluded = infinite | set(graph.neighbours(infinite)) | set(graph.splits)
    rest = graph.to_networkx().subgraph(b for b in free if b not in excluded)
    place = {b: i for i, b in enumerate(free)}
    plans = []
    lacking = tuple(lacking)
    for independent in independent_sets(rest, graph.block_layers):
        summed = (infinite - integrated).union(independent)
        left = (b for b in free if b not in summed | integrated)
        ordered = (
            tuple(sorted(group, key=place.__getitem__))
            for group in (left, summed, integrated)
        )
        plans.append(Plan(*ordered, lacking))

    # the places break ties, so that the plan does not depend on the hashes of the names
    def count(p):
        return num_states(graph, p.enumerated, lacking)

    best = min(plans, key=lambda p: (count(p), [place[b] for b in p.enumerated]))
    refuse_many(graph, best.enumerated, best.summed, _MOST_STATES, lacking)
    return best


def independent_sets(
    rest: nx.Graph, layers: tuple[tuple[str, ...], ...]
) -> list[list[str]]:
    """Return maximal sets of blocks ``rest`` that do not interact, or only the layers if there are many."""
    if len(rest) <= _MOST_BLOCKS:
        return list(nx.find_cliques(nx.complement(rest))) or [[]]
    return [[b for b in layer if b in rest] for layer in layers]


def largest_independent(graph: FactorGraph, blocks: Iterable[str]) -> tuple[str, ...]:
    """Return the independent ``blocks`` with the most units."""
    place = {b: i for i, b in enumerate(graph.families)}

    def size(blocks):
        return sum(graph.families[b].size for b in blocks)

    rest = graph.to_networkx().subgraph(b for b in blocks if b not in graph.splits)
    sets = [
        sorted(s, key=place.__getitem__)
        for s in independent_sets(rest, graph.block_layers)
    ]
    # the places break ties, so that the choice does not depend on the hashes of the
    # names
    return tuple(min(sets, key=lambda s: (-size(s), [place[b] for b in s])))


def refuse_many(
    graph: FactorGraph,
    enumerated: Names,
    summed: Names,
    most: int,
    lacking: Iterable[tuple[str, int]] = (),
) -> None:
    """Refuse to enumerate more than ``most`` joint states."""
    if (count := num_states(graph, enumerated, lacking)) > most:
        closed = (
            f" even with {list(summed)} summed out in closed form" if summed else ""
        )
        raise IntractableError(
            f"blocks {list(enumerated)} have {count_text(count)} joint states to "
            f"enumerate{closed}, and the limit is {count_text(most)}. {_ESTIMATE}"
        )


def decode(graph: FactorGraph, blocks: Names, index: Number) -> Blocks:
    """Return the joint state of ``blocks`` with this number; the last unit varies fastest."""
    return decode_unknown(graph, Plan(blocks, (), ()), {}, {}, index)[0]


def list_states(graph: FactorGraph, blocks: Names) -> Blocks:
    """Return every joint state of ``blocks`` in the order of their numbers, with a leading axis of states."""
    return jax.vmap(partial(decode, graph, blocks))(
        jnp.arange(num_states(graph, blocks), dtype=jnp.int32)
    )


def decode_unknown(
    graph: FactorGraph, plan: Plan, x: State, known: State, index: Number
) -> tuple[Blocks, Array]:
    """Return a joint state of the enumerated blocks, with known units at their values.

    :return: the state, and True if it counts: where fewer units are unknown than the
        plan has room for, numbers past the last state repeat others.
    """
    state = {}
    counts = jnp.array(True)
    stride = 1
    room = dict(plan.lacking)
    for b in reversed(plan.enumerated):
        family = graph.families[b]
        values = values_of(family)
        size = room.get(b, family.size)
        powers = stride * len(values) ** np.arange(size)[::-1]
        digits = index // powers.astype(np.int32) % len(values)
        stride *= len(values) ** size
        if b not in known:
            state[b] = values[digits].reshape(family.shape)
            continue
        free = ~known[b].reshape(-1)
        place = jnp.cumsum(free) - 1  # the k-th unknown unit takes the k-th digit
        listed = values[digits][jnp.clip(place, 0, size - 1)].reshape(family.shape)
        state[b] = jnp.where(known[b], x[b], listed)
        counts &= jnp.where(jnp.arange(size) < free.sum(), True, digits == 0).all()
    return state, counts


def log_term(
    graph: FactorGraph,
    params: Params,
    x: State,
    plan: Plan,
    index: Number,
    known: State = _NONE,
) -> Scalar:
    """Return the log of one enumerated state's term of the sum, given values and masks of known units."""
    listed, counts = decode_unknown(graph, plan, x, known, index)
    x = {**x, **listed}
    partly = {b: k for b, k in known.items() if b in plan.summed}
    summed = tuple(b for b in plan.summed if b not in partly)
    if plan.integrated:
        value = _gaussian_integral(
            graph, params, x, plan.integrated, summed, known, partly
        )
    else:
        value = energy.log_unnormalized(graph, params, x, summed, partly)
    return jnp.where(counts, value, -jnp.inf) if known else value


@full_precision
def _gaussian_integral(
    graph: FactorGraph,
    params: Params,
    x: State,
    blocks: Names,
    summed: Names,
    known: State,
    partly: State,
) -> Scalar:
    """Return the log-integral over the unknown units of Gaussian blocks, whose log-density is quadratic."""
    zero = {
        b: jnp.zeros(graph.families[b].shape, jnp.result_type(float)) for b in blocks
    }
    origin = {
        b: jnp.where(known[b], x[b], z) if b in known else z for b, z in zero.items()
    }
    free = {
        b: jnp.where(known[b], 0, 1 + z) if b in known else 1 + z
        for b, z in zero.items()
    }
    flat, unravel = ravel_pytree(origin)
    free, _ = ravel_pytree(free)

    def minus_log(z):
        return -energy.log_unnormalized(
            graph, params, {**x, **unravel(z)}, summed, partly
        )

    at_origin, slope = jax.value_and_grad(minus_log)(flat)
    precision = jax.hessian(minus_log)(flat)
    if known:  # known units do not count: a precision of 1, and no slope
        precision = jnp.diag(1 - free) + precision * jnp.outer(free, free)
        slope = slope * free
    factor = jnp.linalg.cholesky(precision)  # NaN where the integral diverges
    half = jax.scipy.linalg.solve_triangular(factor, slope, lower=True)
    log_root = jnp.log(jnp.diagonal(factor)).sum()
    return (
        0.5 * half @ half
        - at_origin
        + 0.5 * free.sum() * math.log(2 * math.pi)
        - log_root
    )


def chunk_size(graph: FactorGraph, plan: Plan) -> int:
    """Return the number of states to sum at once."""
    entries = sum(graph.families[b].size for b in plan.integrated) ** 2
    most = max(64, _MOST_HESSIANS // max(1, entries))
    return min(num_states(graph, plan.enumerated, plan.lacking), CHUNK, most)


def log_sum(
    graph: FactorGraph, params: Params, x: State, plan: Plan, known: State = _NONE
) -> Scalar:
    """Return the log of the sum over all unknown units, given values and masks of the known ones."""
    count = num_states(graph, plan.enumerated, plan.lacking)
    chunk = chunk_size(graph, plan)
    term = partial(log_term, graph, params, x, plan, known=known)

    @jax.checkpoint  # reverse mode recomputes a chunk instead of storing all
    def sum_chunk(start: Array) -> Array:
        index = start + jnp.arange(chunk, dtype=jnp.int32)
        value = jax.vmap(term)(jnp.minimum(index, count - 1))
        return logsumexp(jnp.where(index < count, value, -jnp.inf))

    starts = chunk * jnp.arange(-(-count // chunk), dtype=jnp.int32)
    # a sum of sums limits the rounding error
    return logsumexp(jax.lax.map(sum_chunk, starts))
