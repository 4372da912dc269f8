# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Check that a model normalises at given params.

Finite blocks always do. An Exponential or a Gaussian with learned variance needs its
natural parameter inside the domain for all values of its neighbours; two blocks of
unbounded statistics need a coupling of the right sign, or a positive definite precision
if both are Gaussian. Custom families are judged by their bounds and domains.
Interactions of two blocks are decided exactly. Interactions of three or more, and a
joint precision that depends on other blocks, are tried at states of these, which can
refute but not prove.
"""

from collections.abc import Callable, Iterator
import dataclasses
from functools import lru_cache, partial
from typing import Any
import warnings

from jaxtyping import Float
import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Natural,
    Params,
    Statistics,
    full_precision,
    omit,
    select,
    sharding,
)
from ebmpp.errors import DomainError
from ebmpp.families import Family
from ebmpp.families.family import Families
from ebmpp.graph import energy
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors.probe import generic_statistics, random_statistics

_RANDOM_STATES = 64
_FEW_STATES = 8  # where each takes many products
_ROUNDS = 5  # from a state to a worse one
# units up to which the precision is a matrix; only products are taken with larger ones
_DENSE = 512
_ROUNDING = 32  # of a product with the precision, in units of the floats' epsilon
# a magnitude of natural parameters outside every domain that is not all of R
_FAR = 1e6
# error of an eigenvalue relative to the largest one: decides condition numbers up to
# 5e4
_PRECISE = 2e-5

_Vectors = Float[Array, "vectors size"]
_Times = Callable[[_Vectors], _Vectors]
_TimesAt = Callable[[Statistics, _Vectors], _Vectors]


def check(graph: Declaration, params: Params) -> None:
    """Check that the model normalises, except for real-valued blocks under any energy."""
    families = omit(graph.families, graph.nonconjugate)
    quadratic = [b for b, f in families.items() if f.is_quadratic]
    unbounded = [b for b, f in families.items() if _is_unbounded(f)]
    for block, family in families.items():
        if _is_restricted(family):
            _check_reach(graph, params, block)
    for a, b in graph.interacting(unbounded):
        if not (a in quadratic and b in quadratic):
            _check_sign(graph, params, a, b)
    if graph.interacting(quadratic):
        _check_precision(graph, params, tuple(quadratic))


def is_bounded(graph: Declaration) -> bool:
    """Return True if the model normalises under all params."""
    families = graph.families.values()
    return all(np.isfinite(family.bounds).all() for family in families)


@lru_cache(maxsize=256)
def _is_restricted(family: Family) -> bool:
    """Return True if some natural parameters are outside the domain."""
    if type(family).in_domain is Family.in_domain:
        return False
    unit = dataclasses.replace(family, shape=(1,))  # one program for all widths
    with sharding.eager():
        ends = np.array([-_FAR, -1.0, 1.0, _FAR], jnp.result_type(float))
        shape = (*unit.statistic_shape, len(ends))
        eta = np.moveaxis(np.broadcast_to(ends, shape), -1, 0)
        return not np.asarray(jax.jit(unit.in_domain)(eta)).all()


def _is_unbounded(family: Family) -> bool:
    return bool(np.isinf(family.statistic_bounds).any())


def _eta(graph: Declaration, params: Params, block: str, stats: Statistics) -> Natural:
    return energy.natural(graph, params, stats, [block])[block]


def _names(graph: Declaration, *blocks: str) -> list[str]:
    least = min(2, len(set(blocks)))
    return [
        f.name
        for f in graph.factors
        if f.interacts and len(set(f.blocks) & set(blocks)) >= least
    ]


def _check_reach(graph: Declaration, params: Params, block: str) -> None:
    """Check the natural parameters of ``block`` for all values of its bounded neighbours."""
    family = graph.families[block]
    stats = None
    if any(len(f.blocks) > 2 for f in graph.touching([block])):
        stats = random_statistics(graph.families, graph.scope([block]), _RANDOM_STATES)
    for extreme in _reach(graph, block, params, stats):
        inside = np.asarray(family.in_domain(extreme))
        if inside.all():
            continue
        unit = tuple(int(i) for i in np.argwhere(~inside)[0])
        hint = ""
        if family.is_quadratic:
            hint = " Standardise real-valued data before training."
        raise DomainError(
            f"the model does not normalise: the natural parameter of block {block!r} "
            f"({family!r}) must be {family.domain}, and at unit {unit} it reaches "
            f"{np.asarray(extreme)[unit]!s}. Lower its bias, or weaken its factors "
            f"{_names(graph, block)}; only a Bias({block!r}) holds it in its domain.{hint}"
        )


# op by op a check of 784x500 units takes 20 times as long
@partial(jax.jit, static_argnums=(0, 1))
def _reach(
    graph: Declaration, block: str, params: Params, stats: Statistics | None
) -> tuple[Array, Array]:
    """Return the largest and smallest natural parameters, at ``stats`` or at all values."""
    if stats is not None:
        eta = jax.vmap(lambda s: _eta(graph, params, block, s))(stats)
        return eta.max(0), eta.min(0)
    families = select(graph.families, graph.scope([block]))
    zero = energy.zero_statistics(graph, families)
    high = low = _eta(graph, params, block, zero)
    for b, neighbour in families.items():
        if not _is_unbounded(neighbour):
            slope = energy.slope(graph, block, b, params, zero)
            high = high + _largest(slope, neighbour)
            low = low - _largest(-slope, neighbour)
    return high, low


@full_precision
def _largest(slope: Array, other: Family) -> Array:
    """Return the largest contribution of one bounded neighbour, exactly, over its states."""
    trailing = slope.ndim - len(other.statistic_shape)
    per_state = _per_state(slope, other)
    if per_state is not None:
        largest = per_state.max(-1)
    else:
        low, high = (jnp.broadcast_to(b, slope.shape) for b in other.statistic_bounds)
        largest = jnp.maximum(slope * low, slope * high)
    return largest.sum(tuple(range(trailing, largest.ndim)))


def _per_state(slope: Array, family: Family) -> Array | None:
    """Return products of each state's statistics with ``slope``, None if not finite."""
    states = family.states()
    if states is None:
        return None
    table = family.statistics(states)
    stat_axes = list(range(slope.ndim - len(family.stat_shape), slope.ndim))
    return jnp.tensordot(slope, table, (stat_axes, list(range(1, table.ndim))))


def _points(graph: Declaration, a: str, b: str) -> Iterator[Statistics]:
    """Yield statistics of the neighbours of ``a``: only 0 if the coupling to ``b`` is constant."""
    zero = energy.zero_statistics(graph, graph.scope([a]))

    def couples(f):
        return {a, b} <= set(f.blocks) and (a != b or any(n == a for n, _ in f.lateral))

    others = {n for f in graph.factors if couples(f) for n in f.blocks} - {a, b}
    if not others:
        yield zero
        return
    stats = jax.device_get(
        random_statistics(graph.families, sorted(others), _RANDOM_STATES)
    )
    yield from (
        zero | {n: t[row] for n, t in stats.items()} for row in range(_RANDOM_STATES)
    )


def _check_sign(graph: Declaration, params: Params, a: str, b: str) -> None:
    fa = graph.families[a]
    fb = graph.families[b]
    slopes = [
        energy.slope(graph, a, b, params, stats) for stats in _points(graph, a, b)
    ]
    low_a, high_a = np.isinf(np.reshape(fa.statistic_bounds, (2, -1)))
    low_b, high_b = np.isinf(np.reshape(fb.statistic_bounds, (2, -1)))
    # axes: points, units of a, their statistics, units of b, their statistics
    shape = (-1, fa.size, len(low_a), fb.size, len(low_b))
    slope = np.stack(slopes).reshape(shape)

    def both(of_a, of_b):
        return (of_a[:, None] & of_b[None])[None, None, :, None]

    # directions in which the product of two statistics is unbounded
    up = both(high_a, high_b) | both(low_a, low_b)
    down = both(high_a, low_b) | both(low_a, high_b)
    wrong = ((up & (slope > 0)) | (down & (slope < 0))).any(0, keepdims=True)
    if wrong.any():
        signs = {
            (True, True): "exactly zero",
            (True, False): "at most 0",
            (False, True): "at least 0",
        }
        where = tuple(np.argwhere(wrong)[0] * [0, 0, 1, 0, 1])
        raise DomainError(
            f"the model does not normalise: blocks {a!r} ({fa!r}) and {b!r} ({fb!r}) "
            "are unbounded, so every coupling between their units must be "
            f"{signs[bool(up[where]), bool(down[where])]}, and {int(wrong.sum())} are "
            f"not. Change the params of {_names(graph, a, b)}, or use a bounded family "
            "for one block."
        )


def _check_precision(
    graph: Declaration, params: Params, blocks: tuple[str, ...]
) -> None:
    size = sum(graph.sizes(blocks))
    families = omit(graph.families, blocks)
    near = [b for b in graph.neighbours(blocks) if b in families]

    times = partial(_precision_times, graph, blocks, params)
    if near and _varies(families, times, size):
        lower, upper = _least_over_states(families, times, size)
        where = f" at a state of blocks {near}"
    else:
        zero = energy.zero_statistics(graph, families)
        lower, upper = _least(partial(times, zero), size)
        where = ""
    message = (
        f"the joint precision of the Gaussian blocks {list(blocks)} must be positive "
        f"definite, and its smallest eigenvalue is between {lower:.4g} and "
        f"{upper:.4g}{where}. Weaken the factors {_names(graph, *blocks)}."
    )
    if upper <= 0:
        raise DomainError(f"the model does not normalise: {message}")
    if not lower > 0:
        warnings.warn(
            f"the model may not normalise: {message}", RuntimeWarning, stacklevel=4
        )


def _varies(families: Families, times: _TimesAt, size: int) -> bool:
    """Return True if the precision depends on the statistics of ``families``.

    It is affine in the statistics of each block, so it then differs between two random
    points.
    """
    generator = np.random.default_rng(0)
    is_dense = size <= _DENSE
    vectors = jnp.eye(size) if is_dense else _rows(generator.normal(size=size))

    def product_at_random():
        statistics = generic_statistics(families, generator)
        return np.asarray(times(statistics, vectors))

    here = product_at_random()
    there = product_at_random()
    return not np.allclose(here, there, 1e-5, 1e-6 * abs(here).max())


def _least(times: _Times, size: int) -> tuple[float, float]:
    """Bound the least eigenvalue of a matrix that ``times`` multiplies rows by."""
    if size <= _DENSE:
        least = float(np.linalg.eigvalsh(np.asarray(times(jnp.eye(size)), float))[0])
        return least, least
    start = np.random.default_rng(0).normal(size=size)

    def product(v):
        return np.asarray(times(_rows(np.ravel(v)))[0], float)

    def largest(fn: Callable[[np.ndarray], np.ndarray], tolerance: float) -> float:
        # ty: ignore[parameter-already-assigned]
        matrix = LinearOperator((size, size), fn, dtype=float)
        values = eigsh(
            matrix, 1, which="LA", tol=tolerance, v0=start, return_eigenvectors=False
        )
        return float(values[0])

    # the least one as a difference, to an accuracy relative to the largest: its own may
    # be lost in rounding
    top = 1.1 * abs(largest(product, 0.05))
    least = top - largest(lambda v: top * np.ravel(v) - product(v), _PRECISE)
    rounding = _ROUNDING * float(jnp.finfo(jnp.result_type(float)).eps)
    return least - (_PRECISE + rounding) * top, least


def _rows(vector: Any) -> Float[Array, "2 size"]:
    """Repeat a vector: XLA takes seven times as long for a single row (5000 units)."""
    row = jnp.asarray(vector, float)
    return jnp.broadcast_to(row[None], (2, *row.shape))


def _least_over_states(
    families: Families,
    times: _TimesAt,
    size: int,
) -> tuple[float, float]:
    """Bound the least eigenvalue over states of the blocks of ``families``.

    From the worst of some random states, move to states that are worse for its
    eigenvector.
    """

    def curvature(state, vector):
        (product,) = times(state, vector[None])
        return product @ vector

    rows = _RANDOM_STATES if size <= _DENSE else _FEW_STATES
    stats = jax.device_get(random_statistics(families, families, rows))
    states = [{b: t[row] for b, t in stats.items()} for row in range(rows)]
    bounds = [_least(partial(times, state), size) for state in states]
    least = min(bounds, key=lambda pair: pair[1])
    worst = states[bounds.index(least)]
    for _ in range(_ROUNDS if size <= _DENSE else 0):
        matrix = np.asarray(times(worst, jnp.eye(size)), float)
        vector = jnp.asarray(np.linalg.eigh(matrix)[1][:, 0], float)
        slopes = jax.grad(curvature)(worst, vector)
        worst = {b: _lowest(families[b], slopes[b], t) for b, t in worst.items()}
        here = _least(partial(times, worst), size)
        if not here[1] < least[1]:
            break
        least = here
    return least


def _lowest(family: Family, slope: Natural, statistics: Natural) -> Natural:
    """Return statistics of the state that minimises their product with ``slope``."""
    states = family.states()
    products = _per_state(slope, family)
    if states is None or products is None:
        return statistics
    return family.statistics(states)[products.argmin(-1)]


@partial(jax.jit, static_argnums=(0, 1))
def _precision_times(
    graph: Declaration,
    blocks: tuple[str, ...],
    params: Params,
    others: Statistics,
    vectors: _Vectors,
) -> _Vectors:
    """Multiply the joint precision of ``blocks`` given ``others`` by each row of ``vectors``."""

    def negative_log_density(x: Blocks) -> Array:
        value = energy.energy(graph, params, {**others, **graph.statistics(x)})
        return value - energy.log_base_measure(graph, x)

    zero, unravel = ravel_pytree(
        {b: jnp.zeros(graph.families[b].shape) for b in blocks}
    )
    slope = jax.grad(lambda z: negative_log_density(unravel(z)))
    return jax.vmap(lambda v: jax.jvp(slope, (zero,), (v,))[1])(vectors)
