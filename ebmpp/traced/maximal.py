# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled draws of two NumPyro distributions.

A maximal coupling makes two draws equal as often as possible, and leaves them
independent of each other otherwise, so that chains that are far apart stay so. Gaussian
conditionals that hardly overlap are therefore drawn from common random numbers, which
brings the chains closer, until a maximal coupling is likely to make them equal. Which
of both is used depends on the two conditionals alone, so each chain keeps its
distribution.

**References**

1. Thorisson (2000), *Coupling, stationarity, and regeneration*, chapter 1, section 4.4.
2. Biswas, Bhattacharya, Jacob, Johndrow (2022), *Coupling-based convergence assessment
   of some Gibbs samplers for high-dimensional Bayesian regression with shrinkage
   priors*, section 3.
"""

from functools import partial
import math
from typing import Any, NamedTuple

import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from ebmpp.core import random
from ebmpp.moves.couplings import MOST_TRIALS

#: Bhattacharyya coefficient of two Gaussians below which they are drawn from common
#: random numbers. There a maximal coupling makes them equal with a probability of at
#: most 0.3.
_MIN_OVERLAP = 0.3


class _Trials(NamedTuple):
    """State of the loop of :func:`maximal`: the last trial's draw is ``y``."""

    number: Array
    x: Array
    y: Array
    accepted: Array
    is_valid: Array


def maximal(
    key: Array, p: dist.Distribution, q: dist.Distribution
) -> tuple[Array, Array, Array]:
    """Return a draw of ``p`` and one of ``q``, equal with the largest probability possible.

    :param key: a jax key, or a key pair ``(2,)``. Trial i draws from the words folded
        with i: a key that ``jax.random`` derives compiles eight kernels, this one.
    :return: the two draws, and False after a log density that is nan, or
        ``MOST_TRIALS`` trials.
    """
    words = random.key_pair(key)

    def density(distribution, x):
        return jnp.sum(distribution.log_prob(x))

    def trial(state):
        # trial 0 draws from p, the others from q: one loop, because a sampler such as
        # gamma's takes the better part of a second to compile
        number = state.number
        leads = number == 0
        y = _draw(leads, p, q, random.as_key(random.fold_in(words, number)))
        gap = density(q, y) - density(p, y)
        level = jnp.log(random.uniforms(random.fold_in(words, number, 1), 1)[0])
        accepted = jnp.where(leads, level <= gap, level > -gap)
        x = jnp.where(leads, y, state.x)
        return _Trials(number + 1, x, y, accepted, ~jnp.isnan(gap))

    def is_pending(state):
        return ~state.accepted & state.is_valid & (state.number <= MOST_TRIALS)

    none = jnp.zeros_like(jax.eval_shape(p.sample, random.as_key(words)))
    start = _Trials(jnp.uint32(0), none, none, jnp.bool_(False), jnp.bool_(True))
    last = lax.while_loop(is_pending, trial, start)
    return last.x, last.y, last.accepted & last.is_valid


def _draw(
    leads: Array, p: dist.Distribution, q: dist.Distribution, key: Array
) -> Array:
    """Return a draw of ``p`` where ``leads``, else of ``q``; by one sampler where possible.

    Their trees must agree, and hold all attributes. A custom distribution that names no
    arrays in ``pytree_data_fields`` takes two samplers.
    """
    drawn = None
    if jax.tree.structure(p) == jax.tree.structure(q):
        selected = jax.tree.map(partial(jnp.where, leads), p, q)
        is_complete = vars(selected).keys() >= vars(p).keys() | vars(q).keys()
        if is_complete:
            drawn = jnp.asarray(selected.sample(key))
    if drawn is None:
        drawn = jnp.where(leads, p.sample(key), q.sample(key))
    if p.support is not constraints.positive:
        return drawn
    # draws of small concentrations underflow, where no log density is finite
    return rounded(drawn)


def rounded(drawn: Array) -> Array:
    """Return draws with the nearest positive float for 0 and infinity, as NumPyro."""
    limits = jnp.finfo(drawn.dtype)
    return jnp.clip(drawn, limits.tiny, limits.max)


def coupled(
    key: Array, p: dist.Distribution, q: dist.Distribution
) -> tuple[Array, Array, Array]:
    """Return draws of two distributions that tend to become equal.

    Two Normal or MultivariateNormal distributions that hardly overlap have common
    random numbers; others are coupled maximally. See :func:`maximal` for arguments and
    results.
    """
    if isinstance(p, dist.Normal) and isinstance(q, dist.Normal):
        is_far = _log_overlap(p, q) < math.log(_MIN_OVERLAP)
    elif isinstance(p, dist.MultivariateNormal):
        is_far = _log_joint_overlap(p, q) < math.log(_MIN_OVERLAP)
    else:
        return maximal(key, p, q)
    x, y, is_valid = maximal(key, p, jax.tree.map(partial(jnp.where, is_far), p, q))
    first_trial = random.as_key(random.fold_in(random.key_pair(key), 0))
    return x, jnp.where(is_far, q.sample(first_trial), y), is_valid


def _log_overlap(p: dist.Normal, q: dist.Normal) -> Array:
    """Return the logarithm of the Bhattacharyya coefficient of two Normal distributions."""
    variance = 0.5 * (p.variance + q.variance)
    log_scales = 0.5 * (jnp.log(p.scale) + jnp.log(q.scale) - jnp.log(variance))
    return log_scales - (p.loc - q.loc) ** 2 / (8 * variance)


def _log_joint_overlap(p: dist.MultivariateNormal, q: Any) -> Array:
    middle = jnp.linalg.cholesky(0.5 * (p.covariance_matrix + q.covariance_matrix))
    gap = solve_triangular(middle, p.loc - q.loc, lower=True)
    log_scale = 0.5 * (_log_det(p.scale_tril) + _log_det(q.scale_tril))
    return log_scale - _log_det(middle) - gap @ gap / 8


def _log_det(factor: Array) -> Array:
    """Return the logarithm of a triangular matrix's determinant."""
    return jnp.log(jnp.diag(factor)).sum()
