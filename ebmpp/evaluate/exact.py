# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exact sums for small models: log Z, log-likelihood, moments and their gradients.

One independent set of blocks is summed out in closed form, and the joint states of the others are
enumerated: a 784-16 Boltzmann machine costs 2**16 terms, not 2**800. Gaussian blocks that interact
with one another are integrated jointly. Everything is differentiated through, nothing derived by hand.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
import math
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ebmpp import derived, states
from ebmpp.errors import DomainError, IntractableError
from ebmpp.factors import Bias
from ebmpp.families import Gaussian
from ebmpp.graph import FactorGraph

Params = dict[str, Any]

_MOST_STATES = 2**25  # about a minute for a few hundred summed units on two cores
_MOST_LISTED = 2**20
_CHUNK = 2**14  # states in flight; with 784 summed units their natural parameters take 50 MB
_MOST_HESSIANS = 2**20  # entries of the precisions in flight
_MOST_BLOCKS = 16  # up to here every maximal independent set is tried (at most 3**(16 / 3) = 350)


class _Plan(NamedTuple):
    """What happens to each block that is not given."""

    enumerated: tuple[str, ...]
    summed: tuple[str, ...]
    integrated: tuple[str, ...]


# -- the plan ------------------------------------------------------------------------------------


def _count(graph: FactorGraph, blocks: Iterable[str]) -> int:
    return math.prod(len(graph.families[b].states()) ** graph.families[b].size for b in blocks)


def _count_text(count: int) -> str:
    if count & (count - 1) == 0:
        return f"2**{count.bit_length() - 1}"
    if count < 10**6:
        return str(count)
    power = len(str(count)) - 1  # in integers: a float would overflow beyond 1e308
    tenths = round(count // 10 ** (power - 4) / 1000)
    return f"{tenths / 10:.1f}e{power}" if tenths < 100 else f"1.0e{power + 1}"


def _plan(graph: FactorGraph, given: Iterable[str] = ()) -> _Plan:
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
    for chosen in _independent_sets(rest, graph.block_layers):
        summed = (infinite - integrated).union(chosen)
        left = (b for b in free if b not in summed | integrated)
        ordered = (tuple(sorted(group, key=place.__getitem__)) for group in (left, summed, integrated))
        plans.append(_Plan(*ordered))
    # the places break ties, so that the plan does not depend on the hashes of the names
    best = min(plans, key=lambda p: (_count(graph, p.enumerated), [place[b] for b in p.enumerated]))
    _refuse_many(graph, best.enumerated, best.summed, _MOST_STATES)
    return best


def _independent_sets(rest: nx.Graph, layers: tuple[tuple[str, ...], ...]) -> list[list[str]]:
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


def _refuse_many(graph: FactorGraph, listed: tuple[str, ...], summed: tuple[str, ...], most: int) -> None:
    count = _count(graph, listed)
    if count > most:
        closed = f" even with {list(summed)} summed out in closed form" if summed else ""
        raise IntractableError(
            f"blocks {list(listed)} have {_count_text(count)} joint states to enumerate{closed}, and the "
            f"limit is {_count_text(most)}; make a block smaller, or estimate the sum by annealed "
            "importance sampling, ebmpp.ais(graph, params, rng_key=...)"
        )


# -- the sum -------------------------------------------------------------------------------------


def _decode(graph: FactorGraph, blocks: tuple[str, ...], index: Array) -> dict[str, Array]:
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


def _log_term(
    graph: FactorGraph, params: Params, given: Mapping[str, Array], plan: _Plan, index: Array
) -> Array:
    """log of one enumerated state's share of the sum."""
    x = {**given, **_decode(graph, plan.enumerated, index)}
    if not plan.integrated:
        return derived.log_unnormalized(graph, params, x, plan.summed)
    return _gaussian_integral(graph, params, x, plan)


def _gaussian_integral(graph: FactorGraph, params: Params, x: Mapping[str, Array], plan: _Plan) -> Array:
    """log of the integral over the Gaussian blocks: their log density is quadratic."""
    origin = {b: jnp.zeros(graph.families[b].shape, jnp.result_type(float)) for b in plan.integrated}
    flat, unravel = jax.flatten_util.ravel_pytree(origin)
    energy = lambda z: -derived.log_unnormalized(graph, params, {**x, **unravel(z)}, plan.summed)  # noqa: E731
    at_zero, slope = jax.value_and_grad(energy)(flat)
    factor = jnp.linalg.cholesky(jax.hessian(energy)(flat))  # NaN where the integral diverges
    half = jax.scipy.linalg.solve_triangular(factor, slope, lower=True)
    log_root = jnp.log(jnp.diagonal(factor)).sum()
    return 0.5 * half @ half - at_zero + 0.5 * flat.size * math.log(2 * math.pi) - log_root


def _chunk(graph: FactorGraph, plan: _Plan) -> int:
    entries = sum(graph.families[b].size for b in plan.integrated) ** 2
    return min(_count(graph, plan.enumerated), _CHUNK, max(64, _MOST_HESSIANS // max(1, entries)))


def _log_sum(graph: FactorGraph, params: Params, given: Mapping[str, Array], plan: _Plan) -> Array:
    """log of the sum over all blocks that are not ``given``, for one state of those that are."""
    count, chunk = _count(graph, plan.enumerated), _chunk(graph, plan)
    term = partial(_log_term, graph, params, given, plan)

    @jax.checkpoint  # reverse mode recomputes a chunk instead of keeping all of them
    def of_chunk(start: Array) -> Array:
        index = start + jnp.arange(chunk, dtype=jnp.int32)
        value = jax.vmap(term)(jnp.minimum(index, count - 1))
        return logsumexp(jnp.where(index < count, value, -jnp.inf))

    starts = chunk * jnp.arange(-(-count // chunk), dtype=jnp.int32)
    return logsumexp(jax.lax.map(of_chunk, starts))  # a sum of sums: rounding grows with neither


_log_partition = jax.jit(_log_sum, static_argnames=("graph", "plan"))


@partial(jax.jit, static_argnames=("graph", "clamped", "free"))
def _log_likelihood(
    graph: FactorGraph, params: Params, rows: Mapping[str, Array], clamped: _Plan, free: _Plan
) -> Array:
    length = len(next(iter(rows.values())))
    together = max(1, min(length, _CHUNK // _chunk(graph, clamped)))
    one = lambda row: _log_sum(graph, params, row, clamped)  # noqa: E731
    return jax.lax.map(one, dict(rows), batch_size=together) - _log_sum(graph, params, {}, free)


@partial(jax.jit, static_argnames=("graph", "clamped", "free"))
def _gradient(
    graph: FactorGraph, params: Params, rows: Mapping[str, Array], clamped: _Plan, free: _Plan
) -> Params:
    return jax.grad(lambda p: _log_likelihood(graph, p, rows, clamped, free).mean())(params)


@lru_cache(maxsize=32)  # a declaration probes its factors, which takes tenths of a second
def _with_sources(graph: FactorGraph) -> FactorGraph:
    """The same model with one more bias on each block, in whose value log Z generates the moments."""
    sources = [Bias(b, name=_source(b)) for b in graph.families]
    with jax.ensure_compile_time_eval():  # the probe looks at values, also when called under jit
        return FactorGraph(graph.visible, graph.latent, (*graph.factors, *sources))


def _source(block: str) -> str:
    return f"<source of {block}>"


@partial(jax.jit, static_argnames=("sourced", "plan"))
def _moments(sourced: FactorGraph, params: Params, plan: _Plan) -> dict[str, Array]:
    zero = {b: jnp.zeros(f.statistic_shape, jnp.result_type(float)) for b, f in sourced.families.items()}
    tilted = lambda s: {**params, **{_source(b): value for b, value in s.items()}}  # noqa: E731
    return jax.grad(lambda s: _log_sum(sourced, tilted(s), {}, plan))(zero)


@partial(jax.jit, static_argnames=("graph", "plan"))
def _table(graph: FactorGraph, params: Params, plan: _Plan) -> tuple[dict[str, Array], Array]:
    index = jnp.arange(_count(graph, plan.enumerated), dtype=jnp.int32)
    term = partial(_log_term, graph, params, {}, plan)
    log_weight = jax.lax.map(term, index, batch_size=_chunk(graph, plan))
    listed = jax.vmap(partial(_decode, graph, plan.enumerated))(index)
    return listed, jax.nn.softmax(log_weight)


def _refuse_divergent(value: Array, plan: _Plan) -> Array:
    if plan.integrated and states.is_concrete(value) and bool(jnp.isnan(value).any()):
        raise DomainError(
            f"the model does not normalise: for some states of the blocks {list(plan.enumerated)} the joint "
            f"precision of the Gaussian blocks {list(plan.integrated)} is not positive definite. Weaken "
            "the factors between them."
        )
    return value


# -- the public face -----------------------------------------------------------------------------


def log_partition(graph: FactorGraph, params: Params) -> Array:
    """log Z, exactly.

    Works under ``jit`` (with ``graph`` closed over or static), ``vmap`` and ``grad``; the gradient is
    minus the expected gradient of the energy.

    :param graph: the declaration.
    :param params: a dict keyed by factor name.
    :return: a scalar.
    :raises IntractableError: more than 2**25 joint states to enumerate, or interacting blocks of
        infinitely many values that are not all Gaussian.
    :raises ParameterError: params that do not fit, or do not normalise (a ``DomainError``).

    **Example**

    >>> import jax
    >>> from ebmpp import Bernoulli, exact, layered
    >>> rbm = layered(v=Bernoulli(5), h=Bernoulli(3))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> print(f"{exact.log_partition(rbm, zero):.4f}")  # 8 log 2
    5.5452

    **References**

    1. Salakhutdinov, Murray (2008), *On the quantitative analysis of deep belief networks*, section 3.
    """
    graph.check(params)
    plan = _plan(graph)
    return _refuse_divergent(_log_partition(graph, params, {}, plan), plan)


def _prepare(
    graph: FactorGraph, params: Params, data: Mapping[str, Array] | Array
) -> tuple[dict[str, Array], tuple[int, ...], _Plan, _Plan]:
    graph.check(params)
    visible = tuple(graph.visible)
    rows, batch = states.as_rows(graph.families, graph.as_visible(data), visible)
    return rows, batch, _plan(graph, visible), _plan(graph)


def log_likelihood(graph: FactorGraph, params: Params, data: Mapping[str, Array] | Array) -> Array:
    """log p(v), row by row, exactly.

    :param graph: the declaration.
    :param params: a dict keyed by factor name.
    :param data: the visible blocks, each of shape ``(*batch, *shape)``; a bare array stands for the
        only visible block.
    :return: shape ``(*batch,)``.
    :raises IntractableError: as :func:`log_partition`, and when a row's latents have too many states.
    :raises StateError: data of a wrong name, shape or value.

    **Example**

    >>> import jax
    >>> from ebmpp import Bernoulli, exact, layered
    >>> rbm = layered(v=Bernoulli(4), h=Bernoulli(3))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> print(exact.log_likelihood(rbm, zero, jax.numpy.zeros((2, 4))))  # -4 log 2
    [-2.7725887 -2.7725887]
    """
    rows, batch, clamped, free = _prepare(graph, params, data)
    value = _log_likelihood(graph, params, rows, clamped, free).reshape(batch)
    return _refuse_divergent(value, free)


def grad_log_likelihood(graph: FactorGraph, params: Params, data: Mapping[str, Array] | Array) -> Params:
    """Gradient of the mean of :func:`log_likelihood` in ``params``.

    :param graph: the declaration.
    :param params: a dict keyed by factor name.
    :param data: as for :func:`log_likelihood`.
    :return: a pytree like ``params``.
    :raises IntractableError: as :func:`log_likelihood`.

    **Example**

    >>> import jax
    >>> from ebmpp import Bernoulli, exact, layered
    >>> rbm = layered(v=Bernoulli(2), h=Bernoulli(3))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> exact.grad_log_likelihood(rbm, zero, jax.numpy.array([1.0, 0.0]))["v"].tolist()
    [0.5, -0.5]
    """
    rows, _, clamped, free = _prepare(graph, params, data)
    return _gradient(graph, params, rows, clamped, free)


def moments(graph: FactorGraph, params: Params) -> dict[str, Array]:
    """E[t_b] of every block under the model, exactly: the derivative of log Z in a linear source.

    :param graph: the declaration.
    :param params: a dict keyed by factor name.
    :return: a dict keyed by block; shapes ``shape + stat_shape``.
    :raises IntractableError: as :func:`log_partition`.

    **Example**

    >>> import jax
    >>> from ebmpp import Bernoulli, exact, layered
    >>> rbm = layered(v=Bernoulli(2), h=Bernoulli(3))
    >>> zero = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> exact.moments(rbm, zero)["h"].tolist()
    [0.5, 0.5, 0.5]
    """
    graph.check(params)
    made = _moments(_with_sources(graph), params, _plan(graph))
    return {b: made[b] for b in graph.families}  # jit sorts a dict


def probabilities(graph: FactorGraph, params: Params) -> tuple[dict[str, Array], Array]:
    """Every joint state and its probability.

    :param graph: a declaration whose blocks all take finitely many values.
    :param params: a dict keyed by factor name.
    :return: the S states, each block of shape ``(S, *shape)``, the last unit varying fastest; and
        their probabilities, shape ``(S,)``.
    :raises IntractableError: more than 2**20 states, or a block of infinitely many.

    **Example**

    >>> import jax
    >>> from ebmpp import Bernoulli, exact, layered
    >>> pair = layered(a=Bernoulli(1), b=Bernoulli(1))
    >>> params = {"a": jax.numpy.zeros(1), "b": jax.numpy.zeros(1), "a:b": jax.numpy.ones((1, 1))}
    >>> states, probs = exact.probabilities(pair, params)
    >>> print(probs.round(4))
    [0.1749 0.1749 0.1749 0.4754]
    """
    graph.check(params)
    for b, family in graph.families.items():
        if family.states() is None:
            raise IntractableError(
                f"block {b!r} ({family!r}) takes infinitely many values, so its states cannot be listed; "
                "exact.moments and exact.log_partition sum such a block out"
            )
    plan = _Plan(tuple(graph.families), (), ())
    _refuse_many(graph, plan.enumerated, (), _MOST_LISTED)
    listed, probs = _table(graph, params, plan)
    return {b: listed[b] for b in graph.families}, probs
