# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Does the model normalise? An account, block by block, for given params.

Finite blocks always do. An Exponential or a learned-variance Gaussian needs its natural parameter
inside the domain whatever its neighbours do; two blocks of unbounded statistics need the right sign
(or a positive definite precision, if both are Gaussian). Families are asked for their bounds and domains,
those of one's own as well. Interactions of two blocks are decided exactly. Those of three or more, and a
joint precision that depends on other blocks, are tried at states of these, which can refute but not prove.
"""

from collections.abc import Callable, Iterator
import dataclasses
from functools import lru_cache, partial
import math
from typing import Any
import warnings

from jaxtyping import Float
import numpy as np
from numpyro.distributions import constraints

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import sharding
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Natural, Params, Statistics
from ebmpp.errors import DomainError
from ebmpp.families import Family
from ebmpp.graph import definite, energy
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.initialization import random_statistics

_RANDOM_STATES = 64
_FEW_STATES = 8  # where each takes many products
_ROUNDS = 5  # from a state to a worse one
_DENSE = 512  # units; their precision is a matrix, and of more units only products are taken
_ROUNDING = 32  # of a product with the precision, in units of the floats' own
_Times = Callable[[Float[Array, "vectors size"]], Float[Array, "vectors size"]]
_FAR = 1e6  # a natural parameter that a domain short of all reals does not hold, on one side or the other


def check(graph: Declaration, params: Params) -> None:
    """:raises DomainError: when the model with these params does not normalise, saying why."""
    quadratic = [b for b, f in graph.families.items() if _is_quadratic(f)]
    unbounded = [b for b, f in graph.families.items() if _is_unbounded(f)]
    for block, family in graph.families.items():
        if _is_restricted(family):
            _check_reach(graph, params, block)
    for a, b in graph.interacting(unbounded):
        if not (a in quadratic and b in quadratic):
            _check_sign(graph, params, a, b)
    if graph.interacting(quadratic):
        _check_precision(graph, params, tuple(quadratic))


@lru_cache(maxsize=256)
def _is_restricted(family: Family) -> bool:
    """Whether some natural parameters are outside the domain."""
    one = dataclasses.replace(family, shape=(1,))  # the same program for each width
    with sharding.at_once():
        ends = np.array([-_FAR, -1.0, 1.0, _FAR]).reshape(-1, *[1] * len(one.statistic_shape))
        ends = np.broadcast_to(ends, (4, *one.statistic_shape)).astype(jnp.result_type(float))
        return not np.asarray(jax.jit(one.in_domain)(ends)).all()


@lru_cache(maxsize=256)
def _is_unbounded(family: Family) -> bool:
    return bool(np.isinf(family.statistic_bounds).any())


@lru_cache(maxsize=256)
def _is_quadratic(family: Family) -> bool:
    """Whether the log density of a real unit is quadratic in its value, as a Gaussian's is."""
    if family.support is not constraints.real:
        return False
    points = jnp.array([-2.3, -0.7, 0.4, 1.9])
    curvature = jax.vmap(jax.jacfwd(jax.jacfwd(lambda x: (family.statistics(x), family.log_base_measure(x)))))
    with sharding.at_once():
        return all(bool(jnp.allclose(c, c[:1], 1e-4, 1e-4)) for c in jax.tree.leaves(curvature(points)))


def _around(graph: Declaration, block: str) -> list[str]:
    found = [b for b in graph.families if (b, block) in graph.edges or (block, b) in graph.edges]
    return found + [b for b in graph.splits if b == block]


def _eta(graph: Declaration, params: Params, block: str, stats: Statistics) -> Natural:
    return energy.natural(graph, params, stats, [block])[block]


def _check_reach(graph: Declaration, params: Params, block: str) -> None:
    """Natural parameters of ``block`` over everything its bounded neighbours can do."""
    family = graph.families[block]
    stats = None
    if any(len(f.blocks) > 2 for f in graph.factors if block in f.blocks):
        stats = random_statistics(graph.families, _around(graph, block), _RANDOM_STATES)
    for worst in _reach(graph, block, params, stats):
        inside = np.asarray(family.in_domain(worst))
        if inside.all():
            continue
        unit = tuple(int(i) for i in np.argwhere(~inside)[0])
        raise DomainError(
            f"the model does not normalise: the natural parameter of block {block!r} ({family!r}) must "
            f"be {family.domain}, and at unit {unit} it reaches {np.asarray(worst)[unit]!s}. "
            f"Lower its bias, or weaken its factors {_names(graph, block)}; with no Bias({block!r}) "
            "there is nothing to hold it in its domain."
        )


@partial(jax.jit, static_argnums=(0, 1))  # op by op a check of 784x500 units takes 20 times as long
def _reach(
    graph: Declaration, block: str, params: Params, stats: Statistics | None
) -> tuple[Natural, Natural]:
    """The largest and the smallest natural parameters; a domain is convex, so it has what is between.

    :param stats: of some states of the neighbours, where those are tried; None for all that they can do.
    """
    around = _around(graph, block)
    if stats is not None:
        eta = jax.vmap(lambda s: _eta(graph, params, block, s))(stats)
        return eta.max(0), eta.min(0)
    zero = {b: jnp.zeros(graph.families[b].statistic_shape) for b in around}
    high = low = _eta(graph, params, block, zero)
    for b in around:
        if not _is_unbounded(graph.families[b]):
            slope = _slope(graph, block, b, params, zero)
            high = high + _largest(slope, graph.families[b])
            low = low - _largest(-slope, graph.families[b])
    return high, low


@partial(jax.jit, static_argnums=(0, 1, 2))
def _slope(graph: Declaration, a: str, b: str, params: Params, around: Statistics) -> Array:
    """How the natural parameters of ``a`` depend on the statistics of ``b``, its neighbours at ``around``."""
    few = math.prod(graph.families[b].statistic_shape) < math.prod(graph.families[a].statistic_shape)
    eta = lambda t: _eta(graph, params, a, {**around, b: t})
    return (jax.jacfwd if few else jax.jacrev)(eta)(around[b])


def _tried(graph: Declaration, a: str, b: str) -> Iterator[Statistics]:
    """What the neighbours of ``a`` are tried at: 0 where no other block changes its coupling to ``b``."""
    zero = {n: jnp.zeros(graph.families[n].statistic_shape) for n in _around(graph, a)}
    inside = lambda f: {a, b} <= set(f.blocks) and (a != b or any(n == a for n, _ in f.lateral))
    others = {n for f in graph.factors if inside(f) for n in f.blocks} - {a, b}
    if not others:
        yield zero
        return
    stats = jax.device_get(random_statistics(graph.families, sorted(others), _RANDOM_STATES))
    yield from (zero | {n: t[row] for n, t in stats.items()} for row in range(_RANDOM_STATES))


@full_precision
def _largest(slope: Array, other: Family) -> Array:
    """The largest contribution of one bounded neighbour, exactly: unit by unit over its states."""
    own = slope.ndim - len(other.statistic_shape)
    states = other.states()
    unit_axes = tuple(range(own, own + len(other.shape)))
    if states is not None:
        table = other.statistics(states).reshape(len(states), *other.stat_shape)
        stat_axes = list(range(slope.ndim - len(other.stat_shape), slope.ndim))
        per_state = jnp.tensordot(slope, table, (stat_axes, list(range(1, table.ndim))))
        return per_state.max(-1).sum(unit_axes)
    low, high = (jnp.broadcast_to(bound, slope.shape) for bound in other.statistic_bounds)
    return jnp.maximum(slope * low, slope * high).sum(tuple(range(own, slope.ndim)))


def _check_sign(graph: Declaration, params: Params, a: str, b: str) -> None:
    fa, fb = graph.families[a], graph.families[b]
    slopes = [np.asarray(_slope(graph, a, b, params, around)) for around in _tried(graph, a, b)]
    slope = np.stack(slopes).reshape(-1, fa.size, math.prod(fa.stat_shape), fb.size, math.prod(fb.stat_shape))
    # to which sides the product of two statistics has no end, shape (1, 1, S of a, 1, S of b)
    (low_a, high_a), (low_b, high_b) = (np.isinf(np.reshape(f.statistic_bounds, (2, -1))) for f in (fa, fb))
    each = lambda of_a, of_b: (of_a[:, None] & of_b[None])[None, None, :, None]
    up = each(high_a, high_b) | each(low_a, low_b)
    down = each(high_a, low_b) | each(low_a, high_b)
    wrong = ((up & (slope > 0)) | (down & (slope < 0))).any(0, keepdims=True)
    if wrong.any():
        sides = {(True, True): "exactly zero", (True, False): "at most 0", (False, True): "at least 0"}
        where = np.argwhere(wrong)[0] * [0, 0, 1, 0, 1]
        both = f"the units of block {a!r} ({fa!r}) are"
        if a != b:
            both = f"blocks {a!r} ({fa!r}) and {b!r} ({fb!r}) are both"
        raise DomainError(
            f"the model does not normalise: {both} unbounded, so every coupling between them "
            f"must be {sides[bool(up[tuple(where)]), bool(down[tuple(where)])]}; {int(wrong.sum())} are not. "
            f"Change the params of {_names(graph, a, b)}, or bound one of the two blocks "
            "(Bernoulli, Spin, Categorical, Binomial)."
        )


def _check_precision(graph: Declaration, params: Params, blocks: tuple[str, ...]) -> None:
    size = sum(graph.families[b].size for b in blocks)
    at = lambda others: partial(_precision_times, graph, blocks, params, others)
    zero = {b: jnp.zeros(f.statistic_shape) for b, f in graph.families.items() if b not in blocks}
    where = ""
    if _depends(graph, blocks, at, zero, size):
        lower, upper = _least_of_states(graph, blocks, params, at, tuple(zero), size)
        where = f" at a state of blocks {[b for b in zero if _joins(graph, blocks, b)]}"
    else:
        lower, upper = _least(at(zero), size)
    remedy = f"Weaken the factors {_names(graph, *blocks)} between them."
    if upper <= 0:
        raise DomainError(
            f"the model does not normalise: the joint precision of the Gaussian blocks {list(blocks)} has "
            f"smallest eigenvalue {upper:.4g}{'' if size <= _DENSE else ' or less'}{where}, and must be "
            f"positive definite. {remedy}"
        )
    if not lower > 0:
        warnings.warn(
            "the model may not normalise: the smallest eigenvalue of the joint precision of the Gaussian "
            f"blocks {list(blocks)} is between {lower:.4g} and {upper:.4g}{where}, and must be positive. "
            f"{remedy}",
            RuntimeWarning,
            stacklevel=4,
        )


def _least(times: _Times, size: int) -> tuple[float, float]:
    """Bounds on the least eigenvalue of a matrix that ``times`` multiplies rows by."""
    if size <= _DENSE:
        least = float(np.linalg.eigvalsh(np.asarray(times(jnp.eye(size)), float))[0])
        return least, least
    rounding = _ROUNDING * float(jnp.finfo(jnp.result_type(float)).eps)
    return definite.least_eigenvalue(lambda v: np.asarray(times(_rows(v))[0]), size, rounding)


def _rows(vector: Any) -> Float[Array, "2 size"]:
    """Two, though one is asked for: one row alone takes XLA seven times as long (5000 units)."""
    made = jnp.asarray(vector, float)
    return jnp.broadcast_to(made[None], (2, *made.shape))


def _joins(graph: Declaration, blocks: tuple[str, ...], other: str) -> bool:
    return any(other in f.blocks and set(blocks) & set(f.blocks) for f in graph.factors)


def _depends(
    graph: Declaration,
    blocks: tuple[str, ...],
    at: Callable[[Statistics], _Times],
    zero: Statistics,
    size: int,
) -> bool:
    """Whether the joint precision of ``blocks`` depends on the other blocks: it is affine in each of these,
    so that it then differs between two random points.
    """
    if not any(_joins(graph, blocks, b) for b in zero):
        return False
    generator = np.random.default_rng(0)
    draw = lambda: {b: jnp.asarray(generator.uniform(0.1, 0.9, t.shape), t.dtype) for b, t in zero.items()}
    vectors = jnp.eye(size) if size <= _DENSE else _rows(generator.normal(size=size))
    here, there = (np.asarray(at(draw())(vectors)) for _ in range(2))
    return not np.allclose(here, there, 1e-5, 1e-6 * abs(here).max())


def _least_of_states(
    graph: Declaration,
    blocks: tuple[str, ...],
    params: Params,
    at: Callable[[Statistics], _Times],
    others: tuple[str, ...],
    size: int,
) -> tuple[float, float]:
    """The least of bounds on the least eigenvalue, over some states of ``others``; and from the worst of
    these on over states that are worse for its eigenvector, until there is none.
    """
    rows = _RANDOM_STATES if size <= _DENSE else _FEW_STATES
    stats = jax.device_get(random_statistics(graph.families, others, rows))
    tried = [{b: t[row] for b, t in stats.items()} for row in range(rows)]
    found = [_least(at(state), size) for state in tried]
    least = min(found, key=lambda bounds: bounds[1])
    worst = tried[found.index(least)]
    for _ in range(_ROUNDS if size <= _DENSE else 0):
        vector = np.linalg.eigh(np.asarray(at(worst)(jnp.eye(size)), float))[1][:, 0]
        slopes = _slopes_along(graph, blocks, params, worst, jnp.asarray(vector, float))
        worst = {b: _lowest(graph.families[b], slopes[b], t) for b, t in worst.items()}
        here = _least(at(worst), size)
        if not here[1] < least[1]:
            break
        least = here
    return least


@partial(jax.jit, static_argnums=(0, 1))
def _slopes_along(
    graph: Declaration, blocks: tuple[str, ...], params: Params, others: Statistics, vector: Array
) -> Statistics:
    """How the precision along a vector changes with the statistics of the other blocks."""
    along = lambda o: _precision_times(graph, blocks, params, o, vector[None])[0] @ vector
    return jax.grad(along)(others)


def _lowest(family: Family, slope: Natural, statistics: Natural) -> Natural:
    """Of the state at which their product with ``slope`` is least; as they are of units of endless values."""
    states = family.states()
    if states is None:
        return statistics
    table = family.statistics(states).reshape(len(states), *family.stat_shape)
    own = list(range(len(family.shape), slope.ndim))
    each = jnp.tensordot(slope, table, (own, list(range(1, table.ndim))))
    return table[each.argmin(-1)]


@partial(jax.jit, static_argnums=(0, 1))
def _precision_times(
    graph: Declaration,
    blocks: tuple[str, ...],
    params: Params,
    others: Statistics,
    vectors: Float[Array, "vectors size"],
) -> Float[Array, "vectors size"]:
    """The joint precision of ``blocks`` times each row of ``vectors``, the others at ``others``."""

    def negative_log_density(x: dict[str, Array]) -> Array:
        stats = {b: graph.families[b].statistics(v) for b, v in x.items()}
        return energy.energy(graph, params, {**others, **stats}) - energy.log_base_measure(graph, x)

    zero, unravel = ravel_pytree({b: jnp.zeros(graph.families[b].shape) for b in blocks})
    slope = jax.grad(lambda z: negative_log_density(unravel(z)))
    return jax.vmap(lambda v: jax.jvp(slope, (zero,), (v,))[1])(vectors)


def _names(graph: Declaration, *blocks: str) -> list[str]:
    if len(set(blocks)) == 1:
        return [f.name for f in graph.factors if blocks[0] in f.blocks and f.interacts]
    return [f.name for f in graph.factors if len(set(f.blocks) & set(blocks)) > 1]
