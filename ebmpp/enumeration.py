# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Enumeration: which blocks of a small model are listed, which are summed out in closed form, and the sum.

One independent set of blocks is summed out in closed form, and the joint states of the others are
enumerated: a 784-16 Boltzmann machine costs 2**16 terms, not 2**800. Gaussian blocks that interact
with one another are integrated jointly. Everything is differentiated through, nothing derived by hand.
"""

from collections.abc import Iterable, Mapping
from functools import partial
import math
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ebmpp import derived
from ebmpp.errors import IntractableError
from ebmpp.families import Gaussian
from ebmpp.graph import FactorGraph

Params = dict[str, Any]

_MOST_STATES = 2**25  # about a minute for a few hundred summed units on two cores
#: joint states that are kept together, as a table or to draw from
MOST_LISTED = 2**20
#: states in flight; with 784 summed units their natural parameters take 50 MB
CHUNK = 2**14
_MOST_HESSIANS = 2**20  # entries of the precisions in flight
_MOST_BLOCKS = 16  # up to here every maximal independent set is tried (at most 3**(16 / 3) = 350)


class Plan(NamedTuple):
    """What happens to each block that is not given."""

    enumerated: tuple[str, ...]
    summed: tuple[str, ...]
    integrated: tuple[str, ...]


# -- the plan ------------------------------------------------------------------------------------


def num_states(graph: FactorGraph, blocks: Iterable[str]) -> int:
    """How many joint states ``blocks`` have; each of them takes finitely many values."""
    return math.prod(len(graph.families[b].states()) ** graph.families[b].size for b in blocks)


def count_text(count: int) -> str:
    """A count as one reads it, such as 2**30 or 3.5e9."""
    if count & (count - 1) == 0:
        return f"2**{count.bit_length() - 1}"
    if count < 10**6:
        return str(count)
    power = len(str(count)) - 1  # in integers: a float would overflow beyond 1e308
    tenths = round(count // 10 ** (power - 4) / 1000)
    return f"{tenths / 10:.1f}e{power}" if tenths < 100 else f"1.0e{power + 1}"


def make_plan(graph: FactorGraph, given: Iterable[str] = ()) -> Plan:
    """The independent set to sum out that leaves the fewest states to enumerate.

    :raises IntractableError: when blocks of infinitely many states interact, or too many are left.
    """
    given = set(given)
    free = [b for b in graph.families if b not in given]
    infinite = {b for b in free if graph.families[b].states() is None}
    gaussian = {b for b in infinite if isinstance(graph.families[b], Gaussian)}
    integrated = {b for edge in graph.interacting(gaussian) for b in edge}
    _refuse_infinite(graph, infinite, integrated)
    taken = infinite | set(graph.neighbours(infinite))
    rest = graph.to_networkx().subgraph(b for b in free if b not in taken and b not in graph.splits)
    place = {b: i for i, b in enumerate(free)}
    plans = []
    for chosen in independent_sets(rest, graph.block_layers):
        summed = (infinite - integrated).union(chosen)
        left = (b for b in free if b not in summed | integrated)
        ordered = (tuple(sorted(group, key=place.__getitem__)) for group in (left, summed, integrated))
        plans.append(Plan(*ordered))
    # the places break ties, so that the plan does not depend on the hashes of the names
    best = min(plans, key=lambda p: (num_states(graph, p.enumerated), [place[b] for b in p.enumerated]))
    refuse_many(graph, best.enumerated, best.summed, _MOST_STATES)
    return best


def independent_sets(rest: nx.Graph, layers: tuple[tuple[str, ...], ...]) -> list[list[str]]:
    """Sets of blocks that do not interact: all maximal ones, or the layers where there are too many blocks.

    :param rest: the block graph of those that may be chosen.
    :param layers: see :attr:`FactorGraph.block_layers`.
    """
    if len(rest) <= _MOST_BLOCKS:
        return list(nx.find_cliques(nx.complement(rest))) or [[]]
    return [[b for b in layer if b in rest] for layer in layers]


def _refuse_infinite(graph: FactorGraph, infinite: set[str], integrated: set[str]) -> None:
    for a, b in graph.interacting(infinite):
        if not {a, b} <= integrated:
            fa, fb = graph.families[a], graph.families[b]
            raise IntractableError(
                f"blocks {a!r} ({fa!r}) and {b!r} ({fb!r}) interact and both take infinitely many values, "
                "so they can be neither enumerated nor summed out in closed form; estimate the sum by "
                "annealed importance sampling, ebmpp.ais(graph, params, rng_key=...)"
            )


def refuse_many(graph: FactorGraph, listed: tuple[str, ...], summed: tuple[str, ...], most: int) -> None:
    """:raises IntractableError: when ``listed`` have more than ``most`` joint states."""
    count = num_states(graph, listed)
    if count > most:
        closed = f" even with {list(summed)} summed out in closed form" if summed else ""
        raise IntractableError(
            f"blocks {list(listed)} have {count_text(count)} joint states to enumerate{closed}, and the "
            f"limit is {count_text(most)}; make a block smaller, or estimate the sum by annealed "
            "importance sampling, ebmpp.ais(graph, params, rng_key=...)"
        )


# -- the sum -------------------------------------------------------------------------------------


def decode(graph: FactorGraph, blocks: tuple[str, ...], index: Array) -> dict[str, Array]:
    """The joint state of ``blocks`` with this number; the last unit varies fastest."""
    state, stride = {}, 1
    for b in reversed(blocks):
        family = graph.families[b]
        values = family.states()
        powers = stride * len(values) ** np.arange(family.size)[::-1]
        digits = index // powers.astype(np.int32) % len(values)
        state[b] = values[digits].reshape(family.shape)
        stride *= len(values) ** family.size
    return state


def log_term(
    graph: FactorGraph, params: Params, given: Mapping[str, Array], plan: Plan, index: Array
) -> Array:
    """log of one enumerated state's share of the sum."""
    x = {**given, **decode(graph, plan.enumerated, index)}
    if not plan.integrated:
        return derived.log_unnormalized(graph, params, x, plan.summed)
    return _gaussian_integral(graph, params, x, plan)


def _gaussian_integral(graph: FactorGraph, params: Params, x: Mapping[str, Array], plan: Plan) -> Array:
    """log of the integral over the Gaussian blocks: their log density is quadratic."""
    origin = {b: jnp.zeros(graph.families[b].shape, jnp.result_type(float)) for b in plan.integrated}
    flat, unravel = jax.flatten_util.ravel_pytree(origin)
    energy = lambda z: -derived.log_unnormalized(graph, params, {**x, **unravel(z)}, plan.summed)  # noqa: E731
    at_zero, slope = jax.value_and_grad(energy)(flat)
    factor = jnp.linalg.cholesky(jax.hessian(energy)(flat))  # NaN where the integral diverges
    half = jax.scipy.linalg.solve_triangular(factor, slope, lower=True)
    log_root = jnp.log(jnp.diagonal(factor)).sum()
    return 0.5 * half @ half - at_zero + 0.5 * flat.size * math.log(2 * math.pi) - log_root


def chunk_size(graph: FactorGraph, plan: Plan) -> int:
    """States in flight at once."""
    entries = sum(graph.families[b].size for b in plan.integrated) ** 2
    return min(num_states(graph, plan.enumerated), CHUNK, max(64, _MOST_HESSIANS // max(1, entries)))


def log_sum(graph: FactorGraph, params: Params, given: Mapping[str, Array], plan: Plan) -> Array:
    """log of the sum over all blocks that are not ``given``, for one state of those that are."""
    count, chunk = num_states(graph, plan.enumerated), chunk_size(graph, plan)
    term = partial(log_term, graph, params, given, plan)

    @jax.checkpoint  # reverse mode recomputes a chunk instead of keeping all of them
    def of_chunk(start: Array) -> Array:
        index = start + jnp.arange(chunk, dtype=jnp.int32)
        value = jax.vmap(term)(jnp.minimum(index, count - 1))
        return logsumexp(jnp.where(index < count, value, -jnp.inf))

    starts = chunk * jnp.arange(-(-count // chunk), dtype=jnp.int32)
    return logsumexp(jax.lax.map(of_chunk, starts))  # a sum of sums: rounding grows with neither
