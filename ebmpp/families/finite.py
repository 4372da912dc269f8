# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Mode and inverse mean of custom families with finitely many values."""

from jaxtyping import Float, Real
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Draws, full_precision

_MAX_STEPS = 200  # means a millionth from an end take about 20
_LENGTHS = 2.0 ** np.arange(3, -12, -1)  # of a step, tried beside the safe one
_MAX_NUMBERS = 2**22  # at once

#: Natural parameters or mean statistics of many units, and of one.
Units = Float[Array, "units statistics"]
Unit = Float[Array, "statistics"]
#: One row per state of a unit.
Statistics = Float[Array, "values statistics"]
Numbers = Float[Array, "values"]
#: Natural parameter, Newton step and number of steps.


@full_precision
def mode(
    eta: Units, states: Real[Array, "values"], statistics: Statistics, log_base: Numbers
) -> Draws:
    """Return the most probable state of each unit, the first of equally probable ones."""
    return states[(eta @ statistics.T + log_base[None]).argmax(-1)]


def from_mean(mean: Units, statistics: Statistics, log_base: Numbers) -> Units:
    """Return natural parameters whose mean statistics are ``mean``, by damped Newton steps.

    The steps minimise A(eta) - <eta, mean>, which is convex. Along a step whose range
    over the states is r, the third derivative is at most r times the second, so a
    length of log(1 + r) / r does not overshoot: Sun, Tran-Dinh (2019), *Generalized
    self-concordant functions*, section 4. With a single statistic, longer steps are
    tried and the longest that does not overshoot is taken. If natural parameters are
    not unique, as with one-hot statistics, one of them is returned.

    :return: infinite for a mean at an end of a single statistic; nan if no natural
        parameter has this mean to floating-point precision, such as outside the convex
        hull of the statistics.
    """
    chunk = max(1, _MAX_NUMBERS // (len(_LENGTHS) * statistics.size))
    eta = lax.map(lambda m: _from_mean(m, statistics, log_base), mean, batch_size=chunk)
    if statistics.shape[1] > 1:
        return eta
    eta = jnp.where(mean == statistics.min(), -jnp.inf, eta)
    return jnp.where(mean == statistics.max(), jnp.inf, eta)


@full_precision
def _from_mean(mean: Unit, statistics: Statistics, log_base: Numbers) -> Unit:
    """Return the natural parameter of one unit."""
    # before anything is summed, so that the tails keep their digits
    around = statistics - mean[None]

    def reach(step):
        return jnp.ptp(around @ step)

    def probs_at(eta):
        return jax.nn.softmax(around @ eta + log_base)

    def newton(eta):
        probs = probs_at(eta)
        gradient = probs @ around
        centred = around - gradient[None]
        covariance = centred.T @ (probs[:, None] * centred)
        scale = jnp.sqrt(jnp.diagonal(covariance))
        scale = jnp.where(scale > 0, scale, 1.0)
        # of the correlations: the small variance of a rare category is not that of a
        # redundant statistic
        correlations = covariance / jnp.outer(scale, scale)
        inverse = jnp.linalg.pinv(correlations, hermitian=True)
        return -(inverse @ (gradient / scale)) / scale

    def length(eta, step):
        extent = reach(step)
        safe = jnp.log1p(extent) / extent
        # a longer one may end where statistics are no longer separated
        if statistics.shape[1] > 1:
            return safe
        along = around @ step
        lengths = jnp.asarray(_LENGTHS, eta.dtype)

        def slope_at(length):
            return probs_at(eta + length * step) @ along

        # slopes and not values, whose differences are lost in rounding where the mean
        # is near an end
        short = jax.vmap(slope_at)(lengths) <= -0.1 * slope_at(0.0)
        return jnp.maximum(safe, jnp.where(short, lengths, 0.0).max())

    def body(carry):
        eta, step, count = carry
        eta = eta + length(eta, step) * step
        return eta, newton(eta), count + 1

    epsilon = jnp.finfo(mean.dtype).eps

    def cond(carry):
        _, step, count = carry
        return (reach(step) > jnp.sqrt(epsilon)) & (count < _MAX_STEPS)

    start = jnp.zeros_like(mean)
    eta, step, _ = lax.while_loop(cond, body, (start, newton(start), jnp.int32(0)))
    eta = eta + step  # quadratic convergence: half the digits become all
    # is the mean at eta right, relative to the terms of its sum?
    probs = probs_at(eta)
    off = jnp.abs(probs @ around)
    size = probs @ jnp.abs(around)
    tolerance = epsilon**0.25
    # rounding may put a mean beside the plane of one-hot statistics, which no step can
    # correct; a step beyond the hull, or to its boundary, stays as long as 1
    is_beside = (off <= 8 * epsilon * jnp.abs(statistics).max(0)).all()
    is_beside &= reach(newton(eta)) <= tolerance
    is_spread = (size > 0) | (jnp.ptp(statistics, axis=0) == 0)
    is_right = ((off <= tolerance * size).all() | is_beside) & is_spread.all()
    return jnp.where(is_right, eta, jnp.nan)
