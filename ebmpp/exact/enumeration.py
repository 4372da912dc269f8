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

from jaxtyping import Real
import networkx as nx
import numpy as np

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ebmpp.core import Blocks, Count, Params, Scalar, State, full_precision
from ebmpp.errors import IntractableError
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, energy

_MOST_STATES = 2**25  # about a minute for a few hundred summed units on two cores
#: limit of joint states that are stored together, as a table or to draw from
MOST_LISTED = 2**20
#: states in flight; with 784 summed units their natural parameters take 50 MB
CHUNK = 2**14
_MOST_HESSIANS = 2**20  # entries of the precisions in flight
#: Up to this number of blocks every maximal independent set is tried, at most
#: 3**(16 / 3) = 350.
_MOST_BLOCKS = 16

BlockNames = tuple[str, ...]
_NONE: State = MappingProxyType({})
_ESTIMATE = (
    "Estimate the sum by annealed importance sampling, ebmpp.ais(graph, params, "
    "rng_key=...)."
)


class Plan(NamedTuple):
    """Treatment of each block that is unknown in whole or in part."""

    enumerated: BlockNames
    summed: BlockNames = ()
    integrated: BlockNames = ()
    lacking: tuple[tuple[str, int], ...] = ()
    """Blocks with some known units, and the largest number of their unknown units."""


def unit_values(family: Family) -> Real[Array, "values"]:
    """Return every value of a unit; refuse infinitely many."""
    if (values := family.states()) is None:
        raise IntractableError(
            f"units of {family!r} take infinitely many values, so they cannot be listed."
        )
    return values


def num_states(
    graph: FactorGraph, blocks: Iterable[str], lacking: Iterable[tuple[str, int]] = ()
) -> int:
    """Return the number of joint states of finite ``blocks``; see :class:`Plan`."""
    unknown = dict(lacking)
    count = 1
    for b in blocks:
        family = graph.families[b]
        count *= len(unit_values(family)) ** unknown.get(b, family.size)
    return count


def count_text(count: int) -> str:
    """Return a count as a power of two."""
    return f"2**{math.log2(count):.4g}"


def make_plan(
    graph: FactorGraph,
    known: Iterable[str] = (),
    lacking: Iterable[tuple[str, int]] = (),
) -> Plan:
    """Return the plan that leaves the fewest states to enumerate.

    :param known: blocks whose units are all known.
    :param lacking: see :class:`Plan`.
    :raises IntractableError: when blocks of infinitely many states interact, or too
        many states remain.
    """
    known = set(known)
    free = [b for b in graph.families if b not in known]
    infinite = {b for b in free if graph.families[b].states() is None}
    gaussian = {b for b in infinite if graph.families[b].is_quadratic}
    integrated = {b for edge in graph.interacting(gaussian) for b in edge}
    for b in graph.nonconjugate.intersection(free):
        raise IntractableError(
            f"real-valued block {b!r} is in a factor with affine=False, so it can be "
            f"neither enumerated nor integrated in closed form. {_ESTIMATE}"
        )
    for a, b in graph.interacting(infinite):
        if not {a, b} <= integrated:
            raise IntractableError(
                f"blocks {a!r} and {b!r} interact and both take infinitely many "
                "values, so they can be neither enumerated nor summed out in closed "
                f"form. {_ESTIMATE}"
            )
    lacking = tuple(lacking)
    excluded = infinite | set(graph.neighbours(infinite)) | set(graph.splits)

    def ordered(blocks):
        return tuple(b for b in free if b in blocks)

    plans = []
    for independent in _independent_sets(graph, set(free) - excluded):
        summed = (infinite - integrated).union(independent)
        kinds = (set(free) - summed - integrated, summed, integrated)
        plans.append(Plan(*map(ordered, kinds), lacking=lacking))

    # the places break ties, so that the plan does not depend on the hashes of the names
    def cost(plan):
        count = num_states(graph, plan.enumerated, lacking)
        return count, [*map(free.index, plan.enumerated)]

    best = min(plans, key=cost)
    refuse_many(graph, best, _MOST_STATES)
    return best


def _independent_sets(graph: FactorGraph, blocks: set[str]) -> list[list[str]]:
    """Return maximal independent sets of ``blocks``, or only the layers if they are many."""
    if len(blocks) <= _MOST_BLOCKS:
        rest = graph.to_networkx().subgraph(blocks)
        return list(nx.find_cliques(nx.complement(rest))) or [[]]
    return [[b for b in layer if b in blocks] for layer in graph.block_layers]


def largest_independent(graph: FactorGraph, blocks: Iterable[str]) -> BlockNames:
    """Return the independent ``blocks`` with the most units."""
    place = [*graph.families].index

    # the places break ties, so that the choice does not depend on the hashes of the
    # names
    def rank(blocks):
        num_units = sum(graph.sizes(blocks))
        return -num_units, [*map(place, blocks)]

    sets = _independent_sets(graph, set(blocks) - set(graph.splits))
    ordered = [tuple(sorted(blocks, key=place)) for blocks in sets]
    return min(ordered, key=rank)


def refuse_many(graph: FactorGraph, plan: Plan, most: int) -> None:
    """Refuse to enumerate more than ``most`` joint states."""
    count = num_states(graph, plan.enumerated, plan.lacking)
    if count > most:
        closed = ""
        if plan.summed:
            closed = f" even with {list(plan.summed)} summed out in closed form"
        raise IntractableError(
            f"blocks {list(plan.enumerated)} have {count_text(count)} joint states to "
            f"enumerate{closed}, and the limit is {count_text(most)}. {_ESTIMATE}"
        )


def decode(graph: FactorGraph, blocks: BlockNames, index: Count) -> Blocks:
    """Return the joint state of ``blocks`` with this number; the last unit varies fastest."""
    return decode_unknown(graph, Plan(blocks), {}, {}, index)[0]


def list_states(graph: FactorGraph, blocks: BlockNames) -> Blocks:
    """Return every joint state of ``blocks``, in the order of their numbers."""
    numbers = jnp.arange(num_states(graph, blocks), dtype=jnp.int32)
    return jax.vmap(partial(decode, graph, blocks))(numbers)


def decode_unknown(
    graph: FactorGraph, plan: Plan, x: State, known: State, index: Count
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
        values = unit_values(family)
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
    index: Count,
    known: State = _NONE,
) -> Scalar:
    """Return the log of the term of one enumerated state.

    :param x: values of known units.
    :param known: masks of the known units of blocks that are known in part.
    """
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
    blocks: BlockNames,
    summed: BlockNames,
    known: State,
    partly: State,
) -> Scalar:
    """Return the log-integral over the unknown units of Gaussian blocks.

    Their log-density is quadratic.
    """
    origin = {}
    free = {}
    for b in blocks:
        origin[b] = jnp.zeros(graph.families[b].shape)
        free[b] = 1 + origin[b]
        if b in known:
            origin[b] = jnp.where(known[b], x[b], origin[b])
            free[b] = jnp.where(known[b], 0, free[b])
    flat, unravel = ravel_pytree(origin)
    free, _ = ravel_pytree(free)

    def minus_log(z):
        state = {**x, **unravel(z)}
        return -energy.log_unnormalized(graph, params, state, summed, partly)

    at_origin, slope = jax.value_and_grad(minus_log)(flat)
    precision = jax.hessian(minus_log)(flat)
    if known:  # known units do not count: a precision of 1, and no slope
        precision = jnp.diag(1 - free) + precision * jnp.outer(free, free)
        slope *= free
    factor = jnp.linalg.cholesky(precision)  # NaN where the integral diverges
    half = jax.scipy.linalg.solve_triangular(factor, slope, lower=True)
    log_root = jnp.log(jnp.diagonal(factor)).sum()
    constant = 0.5 * free.sum() * math.log(2 * math.pi)
    return 0.5 * half @ half - at_origin + constant - log_root


def states_per_chunk(graph: FactorGraph, plan: Plan) -> int:
    """Return the number of states to sum at once."""
    entries = sum(graph.sizes(plan.integrated)) ** 2
    most = max(64, _MOST_HESSIANS // max(1, entries))
    return min(num_states(graph, plan.enumerated, plan.lacking), CHUNK, most)


def log_sum_states(
    graph: FactorGraph, params: Params, x: State, plan: Plan, known: State = _NONE
) -> Scalar:
    """Return the log of the sum over all unknown units; see :func:`log_term`."""
    count = num_states(graph, plan.enumerated, plan.lacking)
    chunk = states_per_chunk(graph, plan)
    term = partial(log_term, graph, params, x, plan, known=known)
    if count == 1:
        return term(jnp.int32(0))

    @jax.checkpoint  # reverse mode recomputes a chunk instead of storing all
    def sum_chunk(start):
        index = start + jnp.arange(chunk, dtype=jnp.int32)
        value = jax.vmap(term)(jnp.minimum(index, count - 1))
        return logsumexp(jnp.where(index < count, value, -jnp.inf))

    starts = chunk * jnp.arange(-(-count // chunk), dtype=jnp.int32)
    # a sum of sums limits the rounding error
    return logsumexp(jax.lax.map(sum_chunk, starts))
