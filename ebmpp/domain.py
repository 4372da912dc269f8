# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Does the model normalise? An account, block by block, for given params.

Finite blocks always do. An Exponential or a learned-variance Gaussian needs its natural parameter
inside the domain whatever its neighbours do; two blocks of unbounded statistics need the right sign
(or a positive definite precision, if both are Gaussian). Interactions of two blocks are decided
exactly; those of three or more are tried at random states, which can refute but not prove.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import bits, derived
from ebmpp.errors import DomainError
from ebmpp.families import Exponential, Family, Gaussian, Poisson

if TYPE_CHECKING:
    from ebmpp.graph import FactorGraph

_RANDOM_STATES = 64
_LARGEST_PRECISION = 4096  # units; an eigenvalue problem beyond this takes minutes


def check(graph: "FactorGraph", params: dict[str, Any]) -> None:
    """:raises DomainError: when the model with these params does not normalise, saying why."""
    gaussians = [b for b, f in graph.families.items() if isinstance(f, Gaussian)]
    for block, family in graph.families.items():
        if _restricted(family):
            _check_reach(graph, params, block)
    for a, b in graph.edges:
        if a in gaussians and b in gaussians:
            continue
        if all(isinstance(graph.families[n], (Gaussian, Poisson, Exponential)) for n in (a, b)):
            _check_sign(graph, params, a, b)
    for block in graph.splits:
        if isinstance(graph.families[block], (Poisson, Exponential)):
            _check_sign(graph, params, block, block)
    if graph.interacting(gaussians):
        _check_precision(graph, params, gaussians)


def _restricted(family: Family) -> bool:
    one = dataclasses.replace(family, shape=(1,))  # the same program for each width
    return not bool(one.in_domain(jnp.full(one.statistic_shape, 1.0)).all())


def _stat_bounds(family: Family) -> tuple[np.ndarray, np.ndarray]:
    low = np.full(family.stat_shape, family.bounds[0])
    if isinstance(family, Gaussian) and family.learned:
        low = np.array([-math.inf, 0.0])
    return low, np.full(family.stat_shape, family.bounds[1])


def _around(graph: "FactorGraph", block: str) -> list[str]:
    found = [b for b in graph.families if (b, block) in graph.edges or (block, b) in graph.edges]
    return found + [b for b in graph.splits if b == block]


def _eta(graph: "FactorGraph", params: dict[str, Any], block: str, stats: dict[str, Array]) -> Array:
    return derived.natural(graph, params, stats, [block])[block]


def _check_reach(graph: "FactorGraph", params: dict[str, Any], block: str) -> None:
    """Natural parameters of ``block`` over everything its bounded neighbours can do."""
    family = graph.families[block]
    around = _around(graph, block)
    zero = {b: jnp.zeros(graph.families[b].statistic_shape) for b in around}
    worst = _eta(graph, params, block, zero)
    if all(len(f.blocks) <= 2 for f in graph.factors if block in f.blocks):
        for b in around:
            other = graph.families[b]
            if all(map(math.isfinite, other.bounds)):
                slope = jax.jacrev(lambda t, b=b: _eta(graph, params, block, {**zero, b: t}))(zero[b])
                worst = worst + _largest(slope, other)
    else:
        worst = _tried(graph, params, block, around)
    if not bool(family.in_domain(worst).all()):
        wrong = np.argwhere(~np.asarray(family.in_domain(worst)))[0]
        unit = tuple(int(i) for i in wrong)
        raise DomainError(
            f"the model does not normalise: the natural parameter of block {block!r} ({family!r}) must "
            f"be {family.domain}, and at unit {unit} it reaches {np.asarray(worst)[unit]!s}. "
            f"Lower its bias, or weaken its factors {_names(graph, block)}; with no Bias({block!r}) "
            "there is nothing to hold it in its domain."
        )


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
    low, high = other.bounds
    return jnp.maximum(slope * low, slope * high).sum(tuple(range(own, slope.ndim)))


def _tried(graph: "FactorGraph", params: dict[str, Any], block: str, around: list[str]) -> Array:
    key = bits.key_pair(jax.random.key(0))
    stats = {}
    for i, b in enumerate(around):
        f = graph.families[b]
        drawn = bits.words(bits.fold_in(key, i), _RANDOM_STATES * f.size * f.num_words)
        stats[b] = f.statistics(f.initial(drawn.reshape(_RANDOM_STATES, *f.shape, f.num_words)))
    eta = jax.vmap(lambda s: _eta(graph, params, block, s))(stats)
    return eta.max(0)


def _check_sign(graph: "FactorGraph", params: dict[str, Any], a: str, b: str) -> None:
    zero = {n: jnp.zeros(graph.families[n].statistic_shape) for n in _around(graph, a)}
    slope = jax.jacrev(lambda t: _eta(graph, params, a, {**zero, b: t}))(zero[b])
    fa, fb = graph.families[a], graph.families[b]
    slope = np.asarray(slope).reshape(fa.size, -1, fb.size, math.prod(fb.stat_shape))
    low_a, low_b = _stat_bounds(fa)[0].reshape(-1), _stat_bounds(fb)[0].reshape(-1)
    signed = np.isinf(low_a)[:, None] | np.isinf(low_b)[None, :]
    wrong = np.where(signed[None, :, None, :], slope != 0, slope > 0)
    if wrong.any():
        rule = "exactly zero" if np.where(signed[None, :, None, :], wrong, False).any() else "at most 0"
        raise DomainError(
            f"the model does not normalise: {_both(a, fa, b, fb)} "
            f"unbounded, so every coupling between them must be {rule}; {int(wrong.sum())} are not. "
            f"Change the params of {_names(graph, a, b)}, or bound one of the two blocks "
            "(Bernoulli, Spin, Categorical, Binomial)."
        )


def _both(a: str, fa: Family, b: str, fb: Family) -> str:
    return (
        f"the units of block {a!r} ({fa!r}) are"
        if a == b
        else f"blocks {a!r} ({fa!r}) and {b!r} ({fb!r}) are both"
    )


def _check_precision(graph: "FactorGraph", params: dict[str, Any], gaussians: list[str]) -> None:
    size = sum(graph.families[b].size for b in gaussians)
    if size > _LARGEST_PRECISION:
        return
    others = {b: jnp.zeros(f.statistic_shape) for b, f in graph.families.items() if b not in gaussians}

    def negative_log_density(x: dict[str, Array]) -> Array:
        stats = {b: graph.families[b].statistics(v) for b, v in x.items()}
        return derived.energy(graph, params, {**others, **stats}) - derived.log_base_measure(graph, x)

    zero = {b: jnp.zeros(graph.families[b].shape) for b in gaussians}
    flat, unravel = jax.flatten_util.ravel_pytree(zero)
    precision = jax.hessian(lambda z: negative_log_density(unravel(z)))(flat)
    smallest = float(jnp.linalg.eigvalsh(precision)[0])
    if not smallest > 0:
        raise DomainError(
            f"the model does not normalise: the joint precision of the Gaussian blocks {gaussians} has "
            f"smallest eigenvalue {smallest:.4g}, and must be positive definite. Weaken the factors "
            f"{_names(graph, *gaussians)} between them."
        )


def _names(graph: "FactorGraph", *blocks: str) -> list[str]:
    if len(set(blocks)) == 1:
        return [f.name for f in graph.factors if blocks[0] in f.blocks and f.interacts]
    return [f.name for f in graph.factors if len(set(f.blocks) & set(blocks)) > 1]
