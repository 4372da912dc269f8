# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Enumeration: which blocks of a small model are listed, which are summed out in closed form, and the sum.

One independent set of blocks is summed out in closed form, and the joint states of the others are
enumerated: a 784-16 Boltzmann machine costs 2**16 terms, not 2**800. Gaussian blocks that interact
with one another are integrated jointly. Everything is differentiated through, nothing derived by hand.
"""

from collections.abc import Iterable
from functools import partial
import math
from types import MappingProxyType
from typing import NamedTuple

from jaxtyping import Float, Integer, Real
import networkx as nx
import numpy as np

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ebmpp.core import Blocks, Params, State
from ebmpp.core.precision import full_precision
from ebmpp.errors import IntractableError
from ebmpp.families import Family, Gaussian
from ebmpp.graph import FactorGraph, energy

_MOST_STATES = 2**25  # about a minute for a few hundred summed units on two cores
#: joint states that are kept together, as a table or to draw from
MOST_LISTED = 2**20
#: states in flight; with 784 summed units their natural parameters take 50 MB
CHUNK = 2**14
_MOST_HESSIANS = 2**20  # entries of the precisions in flight
_MOST_BLOCKS = 16  # up to here every maximal independent set is tried (at most 3**(16 / 3) = 350)

Names = tuple[str, ...]
#: Of a joint state.
Number = Integer[Array, ""]
_NONE: State = MappingProxyType({})


class Plan(NamedTuple):
    """What happens to each block that is not given, or of which some units are not."""

    enumerated: tuple[str, ...]
    summed: tuple[str, ...]
    integrated: tuple[str, ...]
    lacking: tuple[tuple[str, int], ...] = ()
    """Of blocks of which some units are given: how many are not, at most."""


# -- the plan ------------------------------------------------------------------------------------


def values_of(family: Family) -> Real[Array, "values"]:
    """Every value of a unit.

    :raises IntractableError: where there are infinitely many.
    """
    values = family.states()
    if values is None:
        raise IntractableError(f"units of {family!r} take infinitely many values, which cannot be listed")
    return values


def num_states(graph: FactorGraph, blocks: Iterable[str], lacking: Iterable[tuple[str, int]] = ()) -> int:
    """How many joint states ``blocks`` have; each of them takes finitely many values.

    :param lacking: see :class:`Plan`.
    """
    free = {b: graph.families[b].size for b in blocks} | {b: n for b, n in lacking if b in blocks}
    return math.prod(len(values_of(graph.families[b])) ** n for b, n in free.items())


def count_text(count: int) -> str:
    """A count as one reads it, such as 2**30 or 3.5e9."""
    if count & (count - 1) == 0:
        return f"2**{count.bit_length() - 1}"
    if count < 10**6:
        return str(count)
    power = len(str(count)) - 1  # in integers: a float would overflow beyond 1e308
    tenths = round(count // 10 ** (power - 4) / 1000)
    return f"{tenths / 10:.1f}e{power}" if tenths < 100 else f"1.0e{power + 1}"


def make_plan(graph: FactorGraph, given: Iterable[str] = (), lacking: Iterable[tuple[str, int]] = ()) -> Plan:
    """The independent set to sum out that leaves the fewest states to enumerate.

    :param given: blocks that are known as a whole.
    :param lacking: see :class:`Plan`.
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
    plans, lacking = [], tuple(lacking)
    for chosen in independent_sets(rest, graph.block_layers):
        summed = (infinite - integrated).union(chosen)
        left = (b for b in free if b not in summed | integrated)
        ordered = (tuple(sorted(group, key=place.__getitem__)) for group in (left, summed, integrated))
        plans.append(Plan(*ordered, lacking))
    # the places break ties, so that the plan does not depend on the hashes of the names
    count = lambda p: num_states(graph, p.enumerated, lacking)
    best = min(plans, key=lambda p: (count(p), [place[b] for b in p.enumerated]))
    refuse_many(graph, best.enumerated, best.summed, _MOST_STATES, lacking)
    return best


def independent_sets(rest: nx.Graph, layers: tuple[tuple[str, ...], ...]) -> list[list[str]]:
    """Sets of blocks that do not interact: all maximal ones, or the layers where there are too many blocks.

    :param rest: the block graph of those that may be chosen.
    :param layers: see :attr:`FactorGraph.block_layers`.
    """
    if len(rest) <= _MOST_BLOCKS:
        return list(nx.find_cliques(nx.complement(rest))) or [[]]
    return [[b for b in layer if b in rest] for layer in layers]


def largest_independent(graph: FactorGraph, blocks: Iterable[str]) -> tuple[str, ...]:
    """Those of ``blocks`` to sum out together in closed form: as many units as can be."""
    place = {b: i for i, b in enumerate(graph.families)}
    size = lambda blocks: sum(graph.families[b].size for b in blocks)
    rest = graph.to_networkx().subgraph(b for b in blocks if b not in graph.splits)
    found = [sorted(s, key=place.__getitem__) for s in independent_sets(rest, graph.block_layers)]
    # the places break ties, so that the choice does not depend on the hashes of the names
    return tuple(min(found, key=lambda s: (-size(s), [place[b] for b in s])))


def _refuse_infinite(graph: FactorGraph, infinite: set[str], integrated: set[str]) -> None:
    for a, b in graph.interacting(infinite):
        if not {a, b} <= integrated:
            fa, fb = graph.families[a], graph.families[b]
            raise IntractableError(
                f"blocks {a!r} ({fa!r}) and {b!r} ({fb!r}) interact and both take infinitely many values, "
                "so they can be neither enumerated nor summed out in closed form; estimate the sum by "
                "annealed importance sampling, ebmpp.ais(graph, params, rng_key=...)"
            )


def refuse_many(
    graph: FactorGraph, listed: Names, summed: Names, most: int, lacking: Iterable[tuple[str, int]] = ()
) -> None:
    """:raises IntractableError: when ``listed`` have more than ``most`` joint states."""
    count = num_states(graph, listed, lacking)
    if count > most:
        closed = f" even with {list(summed)} summed out in closed form" if summed else ""
        raise IntractableError(
            f"blocks {list(listed)} have {count_text(count)} joint states to enumerate{closed}, and the "
            f"limit is {count_text(most)}; make a block smaller, or estimate the sum by annealed "
            "importance sampling, ebmpp.ais(graph, params, rng_key=...)"
        )


# -- the sum -------------------------------------------------------------------------------------


def decode(graph: FactorGraph, blocks: Names, index: Number) -> Blocks:
    """The joint state of ``blocks`` with this number; the last unit varies fastest."""
    return decode_unknown(graph, Plan(blocks, (), ()), {}, {}, index)[0]


def decode_unknown(
    graph: FactorGraph, plan: Plan, given: State, known: State, index: Number
) -> tuple[Blocks, Array]:
    """The joint state of the blocks that are enumerated, known units at what is given.

    :return: the state, and whether it counts: where fewer units lack than the plan has room for, numbers
        past the last state say others again.
    """
    state, counts, stride = {}, jnp.array(True), 1
    room = dict(plan.lacking)
    for b in reversed(plan.enumerated):
        family = graph.families[b]
        values, size = values_of(family), room.get(b, family.size)
        powers = stride * len(values) ** np.arange(size)[::-1]
        digits = index // powers.astype(np.int32) % len(values)
        stride *= len(values) ** size
        if b not in known:
            state[b] = values[digits].reshape(family.shape)
            continue
        free = ~known[b].reshape(-1)
        turn = jnp.cumsum(free) - 1  # the k-th unknown unit takes the k-th digit
        drawn = values[digits][jnp.clip(turn, 0, size - 1)].reshape(family.shape)
        state[b] = jnp.where(known[b], given[b], drawn)
        counts &= jnp.where(jnp.arange(size) < free.sum(), True, digits == 0).all()
    return state, counts


def log_term(
    graph: FactorGraph, params: Params, given: State, plan: Plan, index: Number, known: State = _NONE
) -> Float[Array, ""]:
    """log of one enumerated state's share of the sum.

    :param known: masks of the blocks of ``given`` that lack units.
    """
    listed, counts = decode_unknown(graph, plan, given, known, index)
    x = {**given, **listed}
    partly = {b: k for b, k in known.items() if b in plan.summed}
    summed = tuple(b for b in plan.summed if b not in partly)
    if plan.integrated:
        value = _gaussian_integral(graph, params, x, plan.integrated, summed, known, partly)
    else:
        value = energy.log_unnormalized(graph, params, x, summed, partly)
    return jnp.where(counts, value, -jnp.inf) if known else value


@full_precision
def _gaussian_integral(
    graph: FactorGraph, params: Params, x: State, blocks: Names, summed: Names, known: State, partly: State
) -> Float[Array, ""]:
    """log of the integral over the unknown units of Gaussian blocks: their log density is quadratic."""
    dtype = jnp.result_type(float)
    zero = {b: jnp.zeros(graph.families[b].shape, dtype) for b in blocks}
    origin = {b: jnp.where(known[b], x[b], z) if b in known else z for b, z in zero.items()}
    free = {b: jnp.where(known[b], 0, 1 + z) if b in known else 1 + z for b, z in zero.items()}
    flat, unravel = ravel_pytree(origin)
    free, _ = ravel_pytree(free)
    minus_log = lambda z: -energy.log_unnormalized(graph, params, {**x, **unravel(z)}, summed, partly)
    at_origin, slope = jax.value_and_grad(minus_log)(flat)
    precision = jax.hessian(minus_log)(flat)
    if known:  # units that are held have no say: a precision of 1, and no slope
        precision, slope = jnp.diag(1 - free) + precision * jnp.outer(free, free), slope * free
    factor = jnp.linalg.cholesky(precision)  # NaN where the integral diverges
    half = jax.scipy.linalg.solve_triangular(factor, slope, lower=True)
    log_root = jnp.log(jnp.diagonal(factor)).sum()
    return 0.5 * half @ half - at_origin + 0.5 * free.sum() * math.log(2 * math.pi) - log_root


def chunk_size(graph: FactorGraph, plan: Plan) -> int:
    """States in flight at once."""
    entries = sum(graph.families[b].size for b in plan.integrated) ** 2
    most = max(64, _MOST_HESSIANS // max(1, entries))
    return min(num_states(graph, plan.enumerated, plan.lacking), CHUNK, most)


def log_sum(
    graph: FactorGraph, params: Params, given: State, plan: Plan, known: State = _NONE
) -> Float[Array, ""]:
    """log of the sum over all blocks that are not ``given``, for one state of those that are.

    :param known: masks of the blocks of ``given`` that lack units.
    """
    count, chunk = num_states(graph, plan.enumerated, plan.lacking), chunk_size(graph, plan)
    term = partial(log_term, graph, params, given, plan, known=known)

    @jax.checkpoint  # reverse mode recomputes a chunk instead of keeping all of them
    def of_chunk(start: Array) -> Array:
        index = start + jnp.arange(chunk, dtype=jnp.int32)
        value = jax.vmap(term)(jnp.minimum(index, count - 1))
        return logsumexp(jnp.where(index < count, value, -jnp.inf))

    starts = chunk * jnp.arange(-(-count // chunk), dtype=jnp.int32)
    return logsumexp(jax.lax.map(of_chunk, starts))  # a sum of sums: rounding grows with neither
